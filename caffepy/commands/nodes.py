"""The nodes of a run that MPI started: joined at its start, left at its end.

Each process of `mpirun` or `srun` is a node. They meet before anything is read, so that an error of
one ends all, with its message.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from caffepy.collectives.mpi import MpiTransport, join_launched, launched
from caffepy.collectives.world import World
from caffepy.core.errors import CaffeError, DeviceError, UsageError
from caffepy.device.gpus import gpu_numbers

log = logging.getLogger(__name__)

LOCAL = "local"
"""Value of --gpu: one GPU for each process of a host."""

_node = 0  # this process's, once it has met the others


def is_first() -> bool:
    """Return True unless this process was a node that leaves what is printed to the first."""
    return _node == 0


@contextmanager
def nodes() -> Iterator[World | None]:
    """A block in which this process is one of those that a launcher started; None if it is alone.

    An error of one node ends the block in all of them, in the first with its message, in others
    with its exit code.
    """
    global _node
    if not launched():
        yield None
        return
    world = join_launched()
    _node = world.node
    with _warnings_only() if world.node else nullcontext():
        try:
            yield world
        except BaseException as error:
            _leave(world, error)
            raise
        world.close()


def _leave(world: World, error: BaseException) -> None:
    """Tell the other nodes of an error, unless it is theirs, and leave them.

    Raises SystemExit with its exit code where another node shows one: the node that writes files
    does, so that there is one message even if all have met the same.
    """
    theirs = world.failure()
    if theirs is None:
        if isinstance(error, CaffeError) and "(host " not in str(error):
            place = f"node {world.node} (host {world.hosts[world.node]})"
            error.where = f"{place}: {error.where}" if error.where else place
        world.tell(error)
    is_shown = world.close(failed=True)
    if is_shown and isinstance(error, CaffeError):
        log.info("%s", error)
        raise SystemExit(error.exit_code) from error


def gpus_of_process(gpu: str | None, world: World | None) -> str | None:
    """Return the GPUs of this process, as --gpu names them, where a host runs several.

    "all" are dealt among the processes that see the same GPUs; "local" is one for each.
    """
    if gpu not in ("all", LOCAL):
        return gpu
    if world is None:
        if gpu == LOCAL:
            raise UsageError("--gpu local is for processes that mpirun or srun started")
        return gpu
    host, seen = world.hosts[world.node], os.environ.get("CUDA_VISIBLE_DEVICES")
    places = world.gather((host, seen))
    beside = [node for node, place in enumerate(places) if place == (host, seen)]
    numbers, count, own = gpu_numbers("all"), len(beside), beside.index(world.node)
    if len(numbers) < count:
        raise DeviceError(
            f"{count} processes share {len(numbers)} GPU(s): start one for each GPU or less, "
            "or choose them by CUDA_VISIBLE_DEVICES"
        )
    lo, hi = (len(numbers) * (own + i) // count for i in (0, 1))
    numbers = [numbers[own]] if gpu == LOCAL else numbers[lo:hi]
    return ",".join(map(str, numbers))


def threads_of_process(world: World) -> int:
    """Return this process's share of the host's CPU threads."""
    transport = world.transport
    assert isinstance(transport, MpiTransport)
    return transport.threads


def seed_of_all(world: World, seed: int) -> int:
    """Return the random seed of all nodes: this one, or one of the clock if it is below 0."""
    drawn = time.time_ns() % (1 << 31)
    return int(world.broadcast(seed if seed >= 0 else drawn))


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Log to stderr only warnings: the lines of the first node stand for all; files have all."""
    from caffepy.report.glog import Stderr, Together

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    handlers = [
        handler
        for together in logging.getLogger("caffepy").handlers
        if isinstance(together, Together)
        for handler in together.handlers
        if isinstance(handler, Stderr)
    ]
    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)
