"""Workers: what ranks 1, 2, ... have in common whatever they do, training or testing.

A worker has a device and a thread of its own, is watched, and ends together with the root.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Generic, Protocol, TypeVar

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.worker_threads import WorkerThreads
from caffepy.collectives.world import World
from caffepy.core.abandoned import RANK_THREAD, abandon
from caffepy.device.device import Device
from caffepy.device.threads import num_threads, share
from caffepy.parallel import watchdog
from caffepy.parallel.watchdog import Rescue, Watchdog
from caffepy.solver import Signals

log = logging.getLogger(__name__)


MORE_THAN_CORES = "%d solvers share %d threads of the CPU: more solvers than threads are slower"


class Worker(Protocol):
    """The interface of a worker."""

    def close(self) -> object:
        """Release files, threads and memory."""


Member = TypeVar("Member", bound=Worker)


class Workers(Generic[Member]):
    """A worker for each device but the first, which is the root's; `make` makes it in its thread.

    They compute in the math mode of the root's device. `world` has the other nodes. `signals`,
    `rescue` and `last_resort` are for a root that hangs, see `Watchdog`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        make: Callable[[int], Member],
        deadlines: Mapping[str, float],
        signals: Signals | None = None,
        rescue: Rescue | None = None,
        last_resort: Rescue | None = None,
        world: World | None = None,
    ) -> None:
        self.devices = devices
        for device in devices[1:]:
            device.math_mode = devices[0].math_mode
        if devices[0].kind == "cpu" and len(devices) > num_threads():
            log.warning(MORE_THAN_CORES, len(devices), num_threads())
        self.group = RankGroup(len(devices), deadlines, world)
        self.threads = WorkerThreads(self.group, make, self.cpu_share)
        self.watchdog = Watchdog(
            self.group, devices, lambda: self.threads.at_work, signals, rescue, last_resort
        )

    def cpu_share(self, rank: int) -> AbstractContextManager[object]:
        """A block in which the rank uses its share of the CPU's threads."""
        return share(rank, self.group.size) if self.group.size > 1 else nullcontext()

    @contextmanager
    def starting(self, progress: Callable[[], object] | None = None) -> Iterator[None]:
        """A block for what the root sets up while the workers start; they are ready at its end.

        On GPUs the run aborts when `progress()` stays the same for too long.
        """
        with _without_messages_of_workers():
            self.threads.start()
            if progress and self.devices[0].kind == "cuda":
                self.watchdog.start(progress)
            yield
            self.threads.wait_idle()

    @property
    def members(self) -> list[Member]:
        """The workers, in the order of their ranks."""
        return [self.threads.members[rank] for rank in range(1, self.group.size)]

    def wait_until_idle(self) -> list[int]:
        """After a failure: end the threads; return the ranks whose device is idle, too."""
        self.threads.end(watchdog.PATIENCE)
        until = time.monotonic() + watchdog.SETTLING
        return [rank for rank in self.threads.members if self.watchdog.is_idle(rank, until)]

    def abort(self, error: BaseException) -> None:
        """Stop all ranks for this error of the root; wait until the first error is known."""
        self.group.abort(0, error)
        self.group.wait_failure()

    def end(self, failed: bool, release: Callable[[float], object] = lambda until: None) -> None:
        """End the threads and close the workers that have ended.

        After a failure `release` is called, if nothing is at work any more, with the time by which
        it must return. What belongs to a GPU whose work never ends is kept as long as the process.
        """
        self.watchdog.stop()
        left = self.threads.end(watchdog.PATIENCE)
        if failed:
            until = time.monotonic() + watchdog.SETTLING
            ranks = range(1, self.group.size)
            endless = [rank for rank in ranks if not self.watchdog.is_idle(rank, until)]
            if endless or any(device.lost for device in self.devices):
                abandon(self)
            elif not left and self.watchdog.is_idle(0, until):
                release(until)
            left = sorted({*left, *endless})
        if left:
            names = ", ".join(f"rank {rank}" for rank in left)
            log.warning("Still at work when the run ended: %s", names)
        for rank, worker in self.threads.members.items():
            if rank not in left:
                # After a failure the first error counts; closing may fail with the device.
                with suppress(Exception) if failed else nullcontext():
                    worker.close()


def _is_of_root(record: logging.LogRecord) -> bool:
    """True unless the record is of a worker; its errors pass, and what tells which layers are
    shared: the rest repeats what the root has logged.
    """
    return (
        not (record.threadName or "").startswith(RANK_THREAD)
        or record.levelno >= logging.ERROR
        or record.getMessage().startswith(("Sharing layer", "Created top blob"))
    )


@contextmanager
def _without_messages_of_workers() -> Iterator[None]:
    handlers = [*logging.getLogger("caffepy").handlers, *logging.getLogger().handlers]
    for handler in handlers:
        handler.addFilter(_is_of_root)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_of_root)
