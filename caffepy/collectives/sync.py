"""The choice among the ways to keep solvers in step, and each rank's synchronizer for it."""

import logging
from collections.abc import Mapping
from functools import partial
from itertools import permutations
from typing import NamedTuple

import numpy as np

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.schedule import (
    Level,
    Operation,
    Schedule,
    adding,
    copying,
    flat,
    muji,
    tree,
)
from caffepy.collectives.synchronizer import BF16, FLOAT32, FlatParams, Synchronizer
from caffepy.collectives.topology import Topology
from caffepy.collectives.world import World
from caffepy.core.errors import DeviceError, UsageError, install
from caffepy.device.blob import Array
from caffepy.device.gpus import nccl_version

log = logging.getLogger(__name__)

PIECE = 1 << 22
"""Elements that nodes send each other at a time: more take memory, fewer take more barriers."""

SCHEDULES = {"tree": tree, "muji": muji, "flat": flat}
NAMES = ("nccl", *SCHEDULES)
LEAST_NCCL = 21000
"""The first NCCL that averages, and whose calls can be captured."""


class HostSync(Synchronizer):
    """Synchronizer that runs a schedule of universal ranks on numpy arrays: each rank does the
    steps that write to its own array, after its root has received the arrays of other nodes.

    `data` and `diffs` are the flat arrays of this node's ranks by universal rank, `received` has
    buffers of PIECE elements for the ranks whose arrays the node receives, a piece at a time. With
    `root_updates` only universal rank 0 updates its parameters: the others get them before each
    iteration, and it alone gets the sum.

    The first `narrow` gradients are rounded to bfloat16 where they go to another node. Sums are of
    float32 all the same. The sum of all is rounded where it is made, in universal rank 0, so that
    all ranks have the same: no copy of it is rounded again.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        schedule: Schedule,
        data: Mapping[int, Array],
        diffs: Mapping[int, Array],
        root_updates: bool = False,
        received: Mapping[int, Array] | None = None,
        narrow: int = 0,
    ) -> None:
        super().__init__(group, rank)
        self._narrow = narrow
        self.root_updates, self.updates = root_updates, self.universal_rank == 0 or not root_updates
        self._data, self._diffs, self._received = data, diffs, received or {}
        self._down = copying(schedule) if root_updates else ()
        self._up = adding(schedule) if root_updates else schedule

    def on_start(self) -> None:
        if self._down:
            self._run(self._down, self._data)

    def on_gradients_ready(self) -> None:
        self.reduce(self._diffs[self.universal_rank].size)

    def reduce(self, count: int) -> None:
        diffs = {rank: diff[:count] for rank, diff in self._diffs.items()}
        self._run(self._up, diffs, min(count, self._narrow))
        if self.updates:
            mine = diffs[self.universal_rank]
            mine *= mine.dtype.type(1 / self.size)

    def _run(self, schedule: Schedule, buffers: Mapping[int, Array], narrow: int = 0) -> None:
        self.group.local_barrier(self.rank, "level")
        if self.group.world.nodes == 1:
            self._run_piece(schedule, buffers)
            return
        size = buffers[self.universal_rank].size
        for begin, end in ((0, narrow), (narrow, size)):
            for start in range(begin, end, PIECE):
                stop = min(start + PIECE, end)
                piece = {rank: array[start:stop] for rank, array in buffers.items()}
                got = {rank: array[: stop - start] for rank, array in self._received.items()}
                self._run_piece(schedule, piece | got, start < narrow)

    def _run_piece(
        self, schedule: Schedule, buffers: Mapping[int, Array], narrow: bool = False
    ) -> None:
        group = self.group
        summed = next(iter(copying(schedule)), None)  # the level before which rank 0 has the sum
        for level in schedule:
            if group.world.nodes > 1:
                if narrow and self.universal_rank == 0 and level is summed:
                    _convert(_narrowed(buffers[0]), buffers[0])
                if self.rank == 0:
                    self._exchange(level, buffers, narrow)
                group.local_barrier(self.rank, "received")
            for step in level:
                if step.destination == self.universal_rank:
                    step.apply(buffers)
            group.local_barrier(self.rank, "level")

    def _exchange(self, level: Level, buffers: Mapping[int, Array], narrow: bool) -> None:
        """Send the arrays of this node's ranks that others read in a level, and receive theirs."""
        world = self.group.world
        sends, receives = crossing(level, world)
        given = {source: buffers[source] for source, _ in sends}
        got = {source: buffers[source] for source in receives}
        if narrow:
            given = {source: _narrowed(array) for source, array in given.items()}
            got = {source: np.empty(array.size, np.uint16) for source, array in got.items()}
        with self.group.among_nodes():
            world.exchange(
                [(node, given[source]) for source, node in sends],
                [(world.node_of(source), got[source]) for source in receives],
            )
        if narrow:
            for source in receives:
                _convert(got[source], buffers[source])


def _narrowed(array: Array) -> Array:
    """Return float32 values as bfloat16, which uint16 stands for."""
    narrow = np.empty(array.size, np.uint16)
    _convert(array, narrow)
    return narrow


def _convert(values: Array, to: Array) -> None:
    from caffepy.ops import cpu  # here, since it loads the CPU's kernels, which a GPU does without

    cpu.convert(values, to)


def crossing(level: Level, world: World) -> tuple[list[tuple[int, int]], list[int]]:
    """Return what a node sends in a level, (rank, to node), and of which ranks it receives.

    Each array goes to a node once; arrays between two nodes go in the order of the ranks.
    """
    across = _across(level, world)
    sends = [(source, node) for source, node in across if world.node_of(source) == world.node]
    return sends, [source for source, node in across if node == world.node]


def _across(level: Level, world: World) -> list[tuple[int, int]]:
    """Return the arrays that go between nodes in a level: (rank, to node)."""
    ways = sorted({(step.source, world.node_of(step.destination)) for step in level})
    return [(source, node) for source, node in ways if world.node_of(source) != node]


class Choice(NamedTuple):
    """A way to synchronize; `schedule` is None for NCCL.

    With `root_updates` only the root updates parameters and the others get them from it. Between
    nodes gradients are of the type `wire`, see WIRES. `joined`: all are GPUs of one process that
    reach each other's memory.
    """

    name: str
    schedule: Schedule | None
    root_updates: bool = False
    wire: str = FLOAT32
    joined: bool = False

    def join(self, group: RankGroup, rank: int, flats: FlatParams) -> Synchronizer:
        """Make this rank's synchronizer; returns when all ranks of the group have called it."""
        _, schedule, root_updates, wire, joined = self
        all_gather = partial(group.all_gather, rank)
        if flats.device.kind == "cpu":
            assert schedule is not None
            return _host_sync(group, rank, schedule, flats, root_updates, wire)
        if schedule is None:
            from caffepy.collectives.nccl import NcclSync

            return NcclSync(group, rank, all_gather, flats, wire=wire, joined=joined)
        from caffepy.collectives.gpu import ScheduleSync

        return ScheduleSync(group, rank, all_gather, flats, schedule, root_updates)


def crossing_bytes(choice: Choice, world: World, gradients: int, metrics: int) -> float:
    """Return the bytes that a node sends others in an iteration, in the mean, for `gradients` and
    `metrics` elements; NCCL is taken to send them round a ring.
    """
    wide, narrow = 4 * (gradients + metrics), (2 if choice.wire == BF16 else 4) * gradients
    if choice.schedule is None:
        return 2 * (world.size - 1) / world.size * (narrow + 4 * metrics)
    sent = 0
    for level in choice.schedule:
        of_params = choice.root_updates and level[0].operation is Operation.COPY
        sent += len(_across(level, world)) * (wide if of_params else narrow + 4 * metrics)
    return sent / world.nodes


def _host_sync(
    group: RankGroup,
    rank: int,
    schedule: Schedule,
    flats: FlatParams,
    root_updates: bool,
    wire: str,
) -> HostSync:
    received: dict[int, Array] = {}
    if rank == 0:
        sources = {source for level in schedule for source in crossing(level, group.world)[1]}
        size, dtype = min(PIECE, flats.diff.size), flats.diff.dtype
        received = {source: np.empty(size, dtype) for source in sources}
    first = group.world.first_rank
    flat = group.local_gather(rank, (flats.data, flats.diff, received))
    received = flat[0][2]  # for data and for diffs, which are never sent at once
    data = {first + i: data for i, (data, _, _) in enumerate(flat)}
    diffs = {first + i: diff for i, (_, diff, _) in enumerate(flat)}
    narrow = flats.diff.size - flats.metrics if wire == BF16 else 0
    return HostSync(group, rank, schedule, data, diffs, root_updates, received, narrow)


def reason_nccl_unavailable(gpu: bool) -> str | None:
    """Return why NCCL is not available; None if it is."""
    if not gpu:
        return "NCCL is for GPUs"
    try:
        version = nccl_version()
    except (ImportError, DeviceError) as error:
        return f"NCCL cannot be loaded ({error}): {install('cuda13')}"
    if version < LEAST_NCCL:
        return f"NCCL {version} is too old: 2.10 ({LEAST_NCCL}) or later is needed"
    return None


def reason_unavailable(name: str, topology: Topology, gpu: bool, nodes: int = 1) -> str | None:
    """Return why `--sync name` is not available for these devices; None if it is."""
    if gpu and nodes > 1 and name in SCHEDULES:
        return "it is for GPUs of one process; several take nccl"
    if name == "nccl":
        return reason_nccl_unavailable(gpu)
    if name == "muji" and not muji(topology):
        return (
            "it is for 2, 4 or 8 devices of which all, or all of each half, reach each other's "
            f"memory, not for these {topology.size}"
        )
    return None


def fastest(topology: Topology, without_nccl: str | None) -> tuple[Choice, str]:
    """Return what `--sync auto` takes for these devices, and why; `without_nccl` is the reason if
    NCCL is not available.
    """
    size = topology.size
    if without_nccl is None:
        return Choice("nccl", None), "the fastest on GPUs"
    if schedule := muji(topology):
        why = f"{without_nccl}; there is a schedule for {size} devices joined like this"
        return Choice("muji", schedule), why
    if any(topology.reaches(a, b) for a in range(size) for b in range(a)):
        why = f"{without_nccl}; muji has no schedule for these devices"
        return Choice("tree", tree(topology)), why
    return Choice("flat", flat(topology)), f"{without_nccl}; no device reaches another's memory"


def choose(name: str, topology: Topology, gpu: bool, nodes: int = 1) -> Choice:
    """Return what `--sync` means for these devices and log which it is and why.

    "auto" is the fastest that is available. UsageError if the one that is named is not; GPUs of
    several nodes need NCCL.
    """
    size = topology.size
    if gpu and nodes > 1 and name == "auto":
        name = "nccl"
    if name != "auto":
        if name not in NAMES:
            raise UsageError(f"--sync {name!r} is none of auto, {', '.join(NAMES)}")
        if reason := reason_unavailable(name, topology, gpu, nodes):
            raise UsageError(f"--sync {name}: {reason}")
        schedule = SCHEDULES[name](topology) if name in SCHEDULES else None
        choice, why = Choice(name, schedule, root_updates=name == "tree"), "as asked for"
    else:
        choice, why = fastest(topology, reason_nccl_unavailable(gpu))
    if choice.schedule is None and nodes == 1:
        pairs = permutations(range(size), 2)
        choice = choice._replace(joined=all(topology.reaches(a, b) for a, b in pairs))
    log.info("Synchronizing %d solvers by %s: %s", size, choice.name, why)
    return choice
