"""The nodes of a run that MPI started: joined at its start, left at its end.

Each process of `mpirun` or `srun` is a node. They meet before anything is read, so that an error of
one ends all, with its message.
"""

import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from caffepy.collectives.launch import launched
from caffepy.collectives.mpi import MpiTransport, join_launched
from caffepy.collectives.synchronizer import FLOAT32
from caffepy.collectives.world import SET_UP_DEADLINE, World
from caffepy.core.abandoned import abandon
from caffepy.core.errors import CaffeError, ConfigError, DeviceError, UsageError
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_numbers
from caffepy.solver import Solver

log = logging.getLogger(__name__)

LOCAL = "local"
"""Value of --gpu: one GPU for each process of a host."""

FIRST_EXITS = 0.5
"""Seconds that a node has to show its message and exit before the others do: a launcher then may
end it. They exit without Python's clean-up, which takes seconds on a busy machine.
"""

_node = 0  # this process's, once it has met the others


def is_first() -> bool:
    """Return True unless this process was a node that leaves what is printed to the first."""
    return _node == 0


@contextmanager
def nodes(
    deadline: float = SET_UP_DEADLINE, last_resort: Callable[[BaseException], object] | None = None
) -> Iterator[World | None]:
    """Join the processes that a launcher started for a block, as a World; None without a launcher.

    An error of one node ends the block in all of them, in the first with its message, in others
    with its exit code. Where they do not meet within `deadline` s, `last_resort` must end the
    process, see `InitWatch`.
    """
    global _node
    if not launched():
        yield None
        return
    world = join_launched(deadline, last_resort)
    _node = world.node
    with _warnings_only() if world.node else nullcontext():
        try:
            yield world
        except BaseException as error:
            _leave(world, error)
            raise
        world.close()


def _leave(world: World, error: BaseException) -> None:
    """Report an error to the other nodes, unless it is theirs, and leave them.

    Raises SystemExit with its exit code where another node shows one: the node that writes files
    does, so that there is one message even if all have met the same.
    """
    theirs = world.failure()
    if theirs is None:
        if isinstance(error, CaffeError) and "(host " not in str(error):
            place = f"node {world.node} (host {world.hosts[world.node]})"
            error.where = f"{place}: {error.where}" if error.where else place
        world.send_failure(error)
    is_shown = world.close(failed=True)
    if is_shown and isinstance(error, CaffeError):
        log.info("%s", error)
        time.sleep(FIRST_EXITS)
        abandon(world)
        raise SystemExit(error.exit_code) from error
    abandon(world)  # without MPI_Finalize; and the launcher then ends the others


def check_number(world: World | None, wanted: tuple[int, int]) -> None:
    """Raise UsageError unless the run has as many nodes as this, at least and at most."""
    fewest, most = wanted
    hosts = world.hosts if world else [platform.node()]
    count = len(hosts)
    if fewest <= count <= most:
        return
    given = f"{fewest}:{most}" if fewest < most else str(fewest)
    right = fewest if count < fewest else most
    raise UsageError(
        f"--nodes {given}: this run has {count} node{'s' if count > 1 else ''} "
        f"({', '.join(dict.fromkeys(hosts))}): start {right} with mpirun -n {right} or "
        f"srun -n {right}, or give --nodes {count}"
    )


def check_images(
    world: World, solver: Solver, path: str, wanted: tuple[int, int] | None = None
) -> None:
    """Compare the images of an iteration with those of the state that was restored from `path`,
    if that is of another number of solvers.

    If they differ, a range of `wanted` nodes makes it a warning; else ConfigError is raised.
    """
    state, own = solver.resume_state, solver.images * world.size  # the solver is alone as yet
    before = len(state.workers_positions) + 1
    if before == world.size or not state.images or not own or state.images == own:
        return
    message = (
        f"{_solvers(before)} wrote this snapshot and took {state.images} images in an iteration; "
        f"now {_solvers(world.size)} on {world.nodes} nodes would take {own}"
    )
    fewest, most = wanted or (0, 0)
    if fewest < most:
        log.warning("%s: %s; base_lr stays as it is", path, message)
        return
    earlier = max(1, round(before * world.nodes / world.size))
    low, high = sorted((world.nodes, earlier if earlier != world.nodes else world.nodes + 1))
    raise ConfigError(
        f"{message}: start {before} again, or change batch_size or iter_size; to go on with {own}, "
        f"give --nodes {low}:{high}",
        path,
    )


def _solvers(count: int) -> str:
    return f"{count} solver{'s' if count > 1 else ''}"


def gpus_of_process(gpu: str | None, world: World | None) -> str | None:
    """Return the GPUs of this process, as --gpu names them, where a host runs several.

    "all" are dealt among the processes that see the same GPUs; "local" is one for each. UsageError
    for "local" in a process that no launcher started, DeviceError for fewer GPUs than processes.
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


def check_wire(wire: str, world: World | None) -> None:
    """Raise UsageError for another type of gradients between nodes where there is one node."""
    if wire != FLOAT32 and world is None:
        raise UsageError(
            f"--wire {wire} is for several nodes: start one on each machine by mpirun or srun"
        )


def threads_of_process(world: World) -> int:
    """Return this process's share of the host's CPU threads."""
    transport = world.transport
    assert isinstance(transport, MpiTransport)
    return transport.threads


def seed_devices(world: World | None, devices: Sequence[Device]) -> int:
    """Seed this node's devices as a random_seed would, and return that: one number of all nodes.

    The solver does not get it: a resumed run, which draws another, is the same run.
    """
    seed = secrets.randbelow(1 << 31)
    seed, first = (int(world.broadcast(seed)), world.first_rank) if world else (seed, 0)
    for rank, device in enumerate(devices, start=first):
        device.seed(seed + rank)
    return seed


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
