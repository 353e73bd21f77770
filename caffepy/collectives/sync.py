"""How the solvers of a group keep in step: what a solver calls, and the choice among the ways to do
it.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from caffepy.collectives.buckets import Bucket
from caffepy.collectives.host import HostSync
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.schedule import Schedule, flat, muji, tree
from caffepy.collectives.topology import Topology
from caffepy.core.errors import DeviceError, UsageError
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.device.gpus import nccl_version
from caffepy.layer.inner_product import InnerProduct

log = logging.getLogger(__name__)

NAMES = ("nccl", "tree", "muji", "flat")
LEAST_NCCL = 21000
"""The first NCCL that averages, and whose calls can be captured."""


class Synchronizer(Protocol):
    """One rank's side; all methods are called in the rank's thread, in its device's scope."""

    rank: int
    size: int
    updates: bool  # whether this rank updates its own parameters, or gets the root's before each iteration
    capturable: bool  # whether its calls give work to the current stream and do nothing else

    @property
    def abort_flag(self) -> int:
        """On a GPU the host's address of an int; if it is not 0 after the gradients, they may be no
        mean of all.
        """

    def on_start(self) -> None:
        """Before the forward pass: parameters are in step."""

    def after_backward(self, layer: int) -> None:
        """The gradients to which this layer of the net adds may be final, in an iteration of one
        pass.
        """

    def on_gradients_ready(self) -> None:
        """The diff becomes the mean of all ranks', where parameters are updated."""

    def reduce(self, count: int) -> None:
        """The first so many elements of the diff become the mean of all ranks'."""

    def close(self, patience: float = PATIENCE) -> None:
        """Give back what is held outside, for which it waits so many seconds; recordings of its
        calls must be gone.
        """


class Choice(NamedTuple):
    """A way to synchronize; `schedule` is None for NCCL. With `root_updates` parameters come from
    the root.
    """

    name: str
    schedule: Schedule | None
    root_updates: bool = False


def reason_nccl_unavailable(gpu: bool) -> str | None:
    """Why NCCL cannot be had, if it cannot."""
    if not gpu:
        return "NCCL is for GPUs"
    try:
        version = nccl_version()
    except (ImportError, DeviceError) as error:
        return f"NCCL cannot be loaded ({error}): pip install 'caffepy[cuda13]'"
    if version < LEAST_NCCL:
        return f"NCCL {version} is too old: 2.10 ({LEAST_NCCL}) or later is needed"
    return None


def reason_unavailable(name: str, topology: Topology, gpu: bool) -> str | None:
    """Why these devices cannot be synchronized in the way of this name, if they cannot."""
    if name == "nccl":
        return reason_nccl_unavailable(gpu)
    if name == "muji" and not muji(topology):
        return (
            "it is for 2, 4 or 8 devices of which all, or all of each half, reach each other's memory, not for these "
            f"{topology.size}"
        )
    return None


def choose(name: str, topology: Topology, gpu: bool) -> Choice:
    """What `--sync` means for these devices, "auto" being the fastest that can be had; logs which,
    and why.

    UsageError says why a way that is named cannot be had.
    """
    choice, why = (
        _automatic(topology, gpu)
        if name == "auto"
        else (_named(name, topology, gpu), "as asked for")
    )
    log.info("Synchronizing %d solvers by %s: %s", topology.size, choice.name, why)
    return choice


def _automatic(topology: Topology, gpu: bool) -> tuple[Choice, str]:
    without = reason_nccl_unavailable(gpu)
    if without is None:
        return Choice("nccl", None), "the fastest on GPUs"
    written = muji(topology)
    if written:
        return Choice(
            "muji", written
        ), f"{without}; there is a schedule for {topology.size} devices joined like this"
    if any(topology.reaches(a, b) for a in range(topology.size) for b in range(a)):
        return Choice("tree", tree(topology)), f"{without}; muji has no schedule for these devices"
    return Choice("flat", flat(topology)), f"{without}; no device reaches another's memory"


def _named(name: str, topology: Topology, gpu: bool) -> Choice:
    if why := reason_unavailable(name, topology, gpu):
        raise UsageError(f"--sync {name}: {why}")
    if name == "nccl":
        return Choice(name, None)
    if name == "tree":
        return Choice(name, tree(topology), root_updates=True)
    if name == "muji":
        return Choice(name, muji(topology))
    if name == "flat":
        return Choice(name, flat(topology))
    raise UsageError(f"--sync {name!r} is none of auto, {', '.join(NAMES)}")


class AllGather:
    """Gives every rank what all ranks have: called by each with its value, returns the values by
    rank.

    This one is for threads; ranks of several processes bring one of their own.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._values: list[Any] = [None] * group.size

    def __call__(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._values[rank] = value
        self._group.barrier(rank, "exchange")
        values = list(self._values)
        self._group.barrier(rank, "exchange")
        return values


class FlatParams(NamedTuple):
    """One rank's device and its flat parameters and gradients.

    `buckets` are ranges of the gradients that may be reduced while the backward pass goes on. They
    leave out those of the weights of the layers `factored`, which a synchronizer that takes buckets
    makes from the factors of all ranks.
    """

    device: Device
    data: Array
    diff: Array
    buckets: Sequence[Bucket] = ()
    factored: Sequence[InnerProduct] = ()


class Synchronization:
    """What the ranks of a group synchronize by: made once; each rank's thread gets its side from
    `join`.
    """

    def __init__(
        self,
        group: RankGroup,
        choice: Choice,
        exchange: Callable[[int, Any], list[Any]] | None = None,
    ) -> None:
        self.group, self.choice = group, choice
        self.exchange = exchange or AllGather(group)

    def join(self, rank: int, flats: FlatParams) -> Synchronizer:
        """This rank's side; returns when all ranks have called it."""
        group, (_, schedule, root_updates) = self.group, self.choice
        exchange = partial(self.exchange, rank)
        if flats.device.kind == "cpu":
            assert schedule is not None
            data, diffs = exchange(flats.data), exchange(flats.diff)
            return HostSync(group, rank, schedule, data, diffs, root_updates)
        if schedule is None:
            from caffepy.collectives.nccl import NcclSync

            return NcclSync(group, rank, exchange, flats)
        from caffepy.collectives.gpu import ScheduleSync

        return ScheduleSync(group, rank, exchange, flats, schedule, root_updates)
