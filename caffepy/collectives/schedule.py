"""All-reduce algorithms as data: which rank adds or copies whose buffer, level by level.

A schedule leaves the sum of all ranks' buffers in every rank's. Steps of one level may run at the
same time; a level begins, for what it reads and writes, when the levels before it have ended. One
executor runs any schedule on GPUs (`gpu`), one in numpy (`HostSync`).
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from caffepy.collectives.topology import NO_PARENT, Topology, device_pairs
from caffepy.device.blob import Array


class Operation(Enum):
    """The operation of a step on two ranks' buffers."""

    ADD = "add"  # destination += source
    COPY = "copy"  # destination = source


class Step(NamedTuple):
    """An operation from rank `source` to `destination`; `staged` through the host or direct."""

    operation: Operation
    source: int
    destination: int
    staged: bool = False

    def apply(self, buffers: Mapping[int, Array]) -> None:
        """Do the step on numpy arrays, indexed by rank."""
        if self.operation is Operation.ADD:
            total = buffers[self.destination]
            with np.errstate(all="ignore"):  # a loss tells of overflows
                np.add(total, buffers[self.source], out=total)
        else:
            buffers[self.destination][...] = buffers[self.source]


Level = tuple[Step, ...]
Schedule = tuple[Level, ...]


def _add(*edges: tuple[int, int]) -> Level:
    return tuple(Step(Operation.ADD, *edge) for edge in edges)


def _copy(*edges: tuple[int, int]) -> Level:
    return tuple(Step(Operation.COPY, *edge) for edge in edges)


def tree(topology: Topology) -> Schedule:
    """Sum up the tree of device pairs, then copy down it; steps of one level are independent."""
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
    """Add every other rank's buffer to the root's, then copy the sum to all, through the host in a
    level of its own; needs no peer access.
    """
    others = range(1, topology.size)
    copies = [
        _copy(*((0, i) for i in others if topology.reaches(0, i) == direct))
        for direct in (True, False)
    ]
    return _stage((*(_add((i, 0)) for i in others), *filter(None, copies)), topology)


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
    """Return the schedule written for 2, 4 or 8 devices; None if it does not fit the topology.

    All devices, or all of each half, must have peer access to each other. Between the halves one
    pair of devices copies, through the host if it has no peer access.
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
    """Return the levels that sum, of a schedule that sums into one rank and then copies."""
    return tuple(level for level in schedule if level[0].operation is Operation.ADD)


def copying(schedule: Schedule) -> Schedule:
    """Return the levels that copy, of a schedule that sums into one rank and then copies."""
    return tuple(level for level in schedule if level[0].operation is Operation.COPY)


def _stage(schedule: Schedule, topology: Topology) -> Schedule:
    """Mark the steps between devices that cannot use each other's memory."""

    def marked(step: Step) -> Step:
        return step._replace(staged=not topology.reaches(step.source, step.destination))

    return tuple(tuple(map(marked, level)) for level in schedule)


def totals(schedule: Schedule, size: int) -> frozenset[tuple[int, int]]:
    """Return where sums become complete: (level, rank) of each step that adds the last buffer."""
    held = [frozenset([rank]) for rank in range(size)]
    found = set()
    for number, level in enumerate(schedule):
        for operation, source, destination, _ in level:
            adds = operation is Operation.ADD
            held[destination] = held[source] | (held[destination] if adds else frozenset())
            if adds and len(held[destination]) == size:
                found.add((number, destination))
    return frozenset(found)


def partners(schedule: Schedule, rank: int) -> list[int]:
    """Return the ranks whose memory a rank uses, or that use its memory."""
    steps = [step for level in schedule for step in level if not step.staged]
    pairs = [(step.source, step.destination) for step in steps]
    return sorted({end for pair in pairs if rank in pair for end in pair} - {rank})


Wait = tuple[int, int]
"""(rank, level): wait until the rank has ended its part of a level. Levels count from 1; level 0
means that the rank has begun.
"""


class Action(NamedTuple):
    """One rank's step in a level: change its own buffer by that of `source`, after some waits."""

    level: int
    operation: Operation
    source: int
    waits: tuple[Wait, ...]


class Part(NamedTuple):
    """One rank's actions, and the waits after which nobody reads its buffer any more.

    Ranks know of each other only which levels each has ended. The actions may run at the same time,
    each on one piece of the buffers after the other. They wait only for lower levels, so there is
    no deadlock.
    """

    actions: tuple[Action, ...]
    last: tuple[Wait, ...]


def part(schedule: Schedule, rank: int) -> Part:
    """Return a rank's part of a schedule."""
    wrote: dict[int, int] = {}  # rank -> the level in which it last changed its buffer
    readers: list[Wait] = []  # who reads the rank's buffer as it is, and in which level
    found = []
    for number, level in enumerate(schedule, start=1):
        now = {}
        for operation, source, destination, _ in level:
            now[destination] = number
            if destination == rank:
                own = [(rank, wrote[rank])] if rank in wrote else []
                waits = (source, wrote.get(source, 0)), *own, *readers
                found.append(Action(number, operation, source, waits))
                readers = []
            elif source == rank:
                readers.append((destination, number))
        wrote |= now
    return Part(tuple(found), tuple(readers))
