"""All-reduce algorithms as data: which rank adds or copies whose buffer, level by level.

A schedule leaves the sum of all ranks' buffers in every rank's. Steps of one level may run at the
same time; a level begins, for what it reads and writes, when the levels before it have ended. One
executor runs any schedule on GPUs, one in numpy (`run`).
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from caffepy.collectives.topology import NO_PARENT, Topology, device_pairs
from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array


class Operation(Enum):
    """What a step does with two ranks' buffers."""

    ADD = "add"  # destination += source
    COPY = "copy"  # destination = source


class Step(NamedTuple):
    """One buffer goes from rank `source` to rank `destination`, through the host if neither can use
    the other's.
    """

    operation: Operation
    source: int
    destination: int
    staged: bool = False

    def apply(self, buffers: Sequence[Array]) -> None:
        """Do it on numpy arrays, by rank."""
        if self.operation is Operation.ADD:
            np.add(buffers[self.destination], buffers[self.source], out=buffers[self.destination])
        else:
            buffers[self.destination][...] = buffers[self.source]


Level = tuple[Step, ...]
Schedule = tuple[Level, ...]


def _add(*edges: tuple[int, int]) -> Level:
    return tuple(Step(Operation.ADD, source, destination) for source, destination in edges)


def _copy(*edges: tuple[int, int]) -> Level:
    return tuple(Step(Operation.COPY, source, destination) for source, destination in edges)


def tree(topology: Topology) -> Schedule:
    """Sums up the tree of device pairs, then copies down it; each level has what does not wait for
    one another.
    """
    place = {device: i for i, device in enumerate(topology.devices)}
    edges = [
        (place[p.device], place[p.parent]) for p in device_pairs(topology) if p.parent != NO_PARENT
    ]
    up: list[list[tuple[int, int]]] = []
    busy: dict[int, int] = {}  # rank -> the first level in which it may take part again
    for child, parent in edges:
        level = max(busy.get(child, 0), busy.get(parent, 0))
        up += [[] for _ in range(level + 1 - len(up))]
        up[level].append((child, parent))
        busy[child] = busy[parent] = level + 1
    down = [[(parent, child) for child, parent in level] for level in reversed(up)]
    return _stage((*(_add(*level) for level in up), *(_copy(*level) for level in down)), topology)


def flat(topology: Topology) -> Schedule:
    """The root adds every other rank's buffer, one after the other, and each copies the sum; needs
    no peer access.
    """
    others = range(1, topology.size)
    return _stage((*(_add((i, 0)) for i in others), *(_copy((0, i)) for i in others)), topology)


TWO: Schedule = (_add((1, 0)), _copy((0, 1)))
FOUR: Schedule = (_add((1, 0), (3, 2)), _add((2, 0)), _copy((0, 2)), _copy((0, 1), (2, 3)))
EIGHT: Schedule = (
    _add((1, 0), (3, 2), (5, 4), (7, 6)),
    _add((2, 0), (6, 4)),
    _add((4, 0)),
    _copy((0, 4)),
    _copy((0, 2), (4, 6)),
    _copy((0, 1), (2, 3), (4, 5), (6, 7)),
)


def muji(topology: Topology) -> Schedule | None:
    """The schedule written for 2, 4 or 8 devices, if those that it joins within a group reach each
    other.

    The groups of 4 are all four or two pairs, those of 8 all eight or two fours; between groups one
    pair of devices talks, through the host where there is no peer access. None where the pattern
    does not fit.
    """
    written = {2: TWO, 4: FOUR, 8: EIGHT}.get(topology.size)
    if written is None:
        return None
    for group in (topology.size, topology.size // 2):
        if group > 1 and all(
            topology.reaches(a, b)
            for start in range(0, topology.size, group)
            for a in range(start, start + group)
            for b in range(start, a)
        ):
            return _stage(written, topology)
    return None


def adding(schedule: Schedule) -> Schedule:
    """The levels that sum, of a schedule that sums into one rank and then copies."""
    return tuple(level for level in schedule if level and level[0].operation is Operation.ADD)


def copying(schedule: Schedule) -> Schedule:
    """The levels that copy, of a schedule that sums into one rank and then copies."""
    return tuple(level for level in schedule if level and level[0].operation is Operation.COPY)


def _stage(schedule: Schedule, topology: Topology) -> Schedule:
    """Mark the steps between devices that cannot use each other's memory."""
    return tuple(
        tuple(
            step._replace(staged=not topology.reaches(step.source, step.destination))
            for step in level
        )
        for level in schedule
    )


def check(schedule: Schedule, size: int) -> None:
    """ConfigError unless the schedule gives every rank the sum of all and no level has conflicting
    steps.
    """
    held = [{rank: 1} for rank in range(size)]  # how often each rank's buffer is in whose
    for number, level in enumerate(schedule):
        written = [step.destination for step in level]
        if len(set(written)) < len(written) or {step.source for step in level} & set(written):
            raise ConfigError(f"level {number} of the schedule has steps that wait for one another")
        for operation, source, destination, _ in level:
            if not (0 <= source < size and 0 <= destination < size and source != destination):
                raise ConfigError(
                    f"level {number} of the schedule goes from {source} to {destination} of {size}"
                )
            mine = {} if operation is Operation.COPY else held[destination]
            held[destination] = {
                rank: mine.get(rank, 0) + held[source].get(rank, 0)
                for rank in mine.keys() | held[source].keys()
            }
    everything = dict.fromkeys(range(size), 1)
    wrong = [rank for rank in range(size) if held[rank] != everything]
    if wrong:
        raise ConfigError(f"the schedule does not give rank {wrong[0]} the sum of all")


def run(schedule: Schedule, buffers: Sequence[Array]) -> None:
    """Run it on numpy arrays of one shape, in place."""
    for level in schedule:
        for step in level:
            step.apply(buffers)


def totals(schedule: Schedule, size: int) -> frozenset[tuple[int, int]]:
    """Where sums are complete: (level, rank) for each step that adds the last of all buffers to a
    rank's.
    """
    held = [frozenset([rank]) for rank in range(size)]
    found = set()
    for number, level in enumerate(schedule):
        for operation, source, destination, _ in level:
            adds = operation is Operation.ADD
            held[destination] = held[source] | (held[destination] if adds else frozenset())
            if adds and len(held[destination]) == size:
                found.add((number, destination))
    return frozenset(found)


Wait = tuple[int, int]
"""For a rank to have ended what it does in a level; level 0 is to have begun, the schedule's levels
count from 1.
"""


class Action(NamedTuple):
    """What one rank does in a level: change its buffer by another's, after some waits."""

    level: int
    operation: Operation
    source: int
    waits: tuple[Wait, ...]


class Part(NamedTuple):
    """What one rank does, and the waits after which nobody reads its buffer any more.

    Ranks know of one another only which levels each has ended. The actions may run at the same
    time, on one piece of the buffers after the other; they wait only for lower levels, so somebody
    can always get on.
    """

    actions: tuple[Action, ...]
    last: tuple[Wait, ...]


def part(schedule: Schedule, rank: int) -> Part:
    """A rank's part of a schedule."""
    wrote: dict[int, int] = {}  # rank -> the level in which it last changed its buffer
    readers: list[Wait] = []  # who reads the rank's buffer as it is, and in which level
    found = []
    for number, level in enumerate(schedule, start=1):
        now = {}
        for operation, source, destination, _ in level:
            now[destination] = number
            if destination == rank:
                own = [(rank, wrote[rank])] if rank in wrote else []
                found.append(
                    Action(
                        number, operation, source, ((source, wrote.get(source, 0)), *own, *readers)
                    )
                )
                readers = []
            elif source == rank:
                readers.append((destination, number))
        wrote |= now
    return Part(tuple(found), tuple(readers))
