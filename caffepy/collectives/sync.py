"""The choice among the ways to keep solvers in step, and each rank's synchronizer for it."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from caffepy.collectives.host import HostSync
from caffepy.collectives.rank_group import AllGather, RankGroup
from caffepy.collectives.schedule import Schedule, flat, muji, tree
from caffepy.collectives.synchronizer import FlatParams, Synchronizer
from caffepy.collectives.topology import Topology
from caffepy.core.errors import DeviceError, UsageError
from caffepy.device.gpus import nccl_version

log = logging.getLogger(__name__)

NAMES = ("nccl", "tree", "muji", "flat")
LEAST_NCCL = 21000
"""The first NCCL that averages, and whose calls can be captured."""


class Choice(NamedTuple):
    """A way to synchronize; `schedule` is None for NCCL.

    With `root_updates` only the root updates parameters and the others get them from it.
    """

    name: str
    schedule: Schedule | None
    root_updates: bool = False


def reason_nccl_unavailable(gpu: bool) -> str | None:
    """Return why NCCL is not available; None if it is."""
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
    """Return why `--sync name` is not available for these devices; None if it is."""
    if name == "nccl":
        return reason_nccl_unavailable(gpu)
    if name == "muji" and not muji(topology):
        return (
            "it is for 2, 4 or 8 devices of which all, or all of each half, reach each other's "
            f"memory, not for these {topology.size}"
        )
    return None


def choose(name: str, topology: Topology, gpu: bool) -> Choice:
    """Return what `--sync` means for these devices and log which it is and why.

    "auto" is the fastest that is available. UsageError if the one that is named is not.
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


class Synchronization:
    """The way in which the ranks of a group synchronize; each gets its synchronizer from `join`."""

    def __init__(
        self,
        group: RankGroup,
        choice: Choice,
        all_gather: Callable[[int, Any], list[Any]] | None = None,
    ) -> None:
        self.group, self.choice = group, choice
        self.all_gather = all_gather or AllGather(group)

    def join(self, rank: int, flats: FlatParams) -> Synchronizer:
        """Make this rank's synchronizer; returns when all ranks have called it."""
        group, (_, schedule, root_updates) = self.group, self.choice
        all_gather = partial(self.all_gather, rank)
        if flats.device.kind == "cpu":
            assert schedule is not None
            data, diffs = all_gather(flats.data), all_gather(flats.diff)
            return HostSync(group, rank, schedule, data, diffs, root_updates)
        if schedule is None:
            from caffepy.collectives.nccl import NcclSync

            return NcclSync(group, rank, all_gather, flats)
        from caffepy.collectives.gpu import ScheduleSync

        return ScheduleSync(group, rank, all_gather, flats, schedule, root_updates)
