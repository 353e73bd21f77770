"""Synchronization of GPUs by NCCL: one communicator, buckets reduced during the backward pass."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from cupy.cuda import get_current_stream, nccl

from caffepy.collectives import interfaces
from caffepy.collectives.buckets import NEVER, Bucket, Progress
from caffepy.collectives.factors import STREAM, Factors
from caffepy.collectives.gpu import AbortFlag
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.synchronizer import FlatParams, Synchronizer
from caffepy.core.errors import SyncError
from caffepy.device.blob import Array

log = logging.getLogger(__name__)


def new_unique_id() -> bytes:
    """Return an id with which ranks make one communicator."""
    unique_id: bytes = nccl.get_unique_id()
    return unique_id


class NcclSync(Synchronizer):
    """Synchronizer of which every rank updates its own parameters with the mean of all gradients.

    The ranks start from the root's parameters. `all_gather` brings the communicator's id from the
    root to all ranks, unless they have a `unique_id`. From the second iteration on
    a bucket is reduced, on the stream "sync", as soon as the layers that add to it are done. In the
    first iteration all is reduced after the backward pass and each collective is bracketed by
    barriers, since what is loaded at first use may block on a GPU that waits for others. Weight
    gradients that are smaller as factors are not reduced; all ranks compute them from all factors.
    """

    capturable = True

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        all_gather: Callable[[Any], list[Any]],
        flats: FlatParams,
        unique_id: bytes | None = None,
    ) -> None:
        super().__init__(group, rank)
        self._device, self._data, self._diff, parts, factored = flats
        self._progress = Progress(parts or [Bucket(((0, self._diff.size),), NEVER)])
        self._hosts = len(set(group.world.hosts))
        self._started = self._warm = False  # parameters are in step; an iteration has ended
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()
        if unique_id is None:
            unique_id, *_ = all_gather(new_unique_id() if self.universal_rank == 0 else None)
        if self.universal_rank == 0 and self._hosts > 1:
            log.debug("NCCL connects %d hosts: %s", self._hosts, interfaces.told())
        group.barrier(rank, "nccl")
        with self._errors(), self._device.scope():
            self._communicator = nccl.NcclCommunicator(self.size, unique_id, self.universal_rank)
        group.barrier(rank, "nccl")
        self._flag = AbortFlag()
        self.abort_flag = self._flag.address
        self._factors = Factors(factored, self.universal_rank, self.size, self._gather)
        self._all_gather = all_gather
        group.on_abort(self._abort)

    def on_start(self) -> None:
        if not self._started:
            self._started = True
            with self._collective():
                whole = self._range(self._data, 0, self._data.size)
                self._communicator.broadcast(*whole, 0, get_current_stream().ptr)
        self._progress.restart()

    def after_backward(self, layer: int) -> None:
        if self._warm:
            for bucket in self._progress.after(layer):
                self._send(bucket)

    def on_gradients_ready(self) -> None:
        if not self._warm:
            own = self._factors.shapes
            if any(shapes != own for shapes in self._all_gather(own)):
                raise SyncError(
                    "solvers that train together need batches of one size, but theirs differ"
                )
        for bucket in self._progress.rest():
            self._send(bucket)
        self._warm = True
        self._device.wait_stream("sync")
        self._device.wait_stream(STREAM)

    def reduce(self, count: int) -> None:
        self._reduce(Bucket(((0, count),), NEVER))
        self._warm = True
        self._device.wait_stream("sync")

    def _send(self, bucket: Bucket) -> None:
        if bucket.ranges:
            self._reduce(bucket)
        else:
            self._factors.exchange()

    def _reduce(self, bucket: Bucket) -> None:
        self._device.wait_stream()  # parameter gradients may be computed on another stream
        with self._device.side_stream("sync"), self._collective():
            for start, stop in bucket.ranges:
                arguments = self._range(self._diff, start, stop)
                self._communicator.allReduce(*arguments, nccl.NCCL_AVG, get_current_stream().ptr)

    def _gather(self, wholes: Sequence[Array]) -> None:
        with self._collective():
            for whole in wholes:
                start, count = _address(whole), whole.nbytes // self.size
                mine, stream = start + self.universal_rank * count, get_current_stream().ptr
                self._communicator.allGather(mine, start, count, nccl.NCCL_CHAR, stream)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """A block whose NCCL errors are raised as what stopped the group, else as SyncError."""
        self.group.check(self.rank)
        try:
            yield
        except nccl.NcclError as error:
            self.group.check(self.rank)
            hint = "NCCL_DEBUG=INFO tells more"
            if self._hosts > 1 and not self._warm:  # it has not connected them yet
                hint = (
                    f"if it cannot connect the {self._hosts} hosts, name the interface to the "
                    f"others on each of them: {interfaces.VARIABLE}=eth0 ({interfaces.told()}); "
                    f"{hint}"
                )
            raise SyncError(f"NCCL failed ({error}); {hint}") from error

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """A block of NCCL calls that are one launch; barriers bracket it in the first iteration."""
        done = get_current_stream().synchronize
        with (
            nullcontext() if self._warm else self.group.synchronized(self.rank, "nccl", done),
            self._errors(),
        ):
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()

    @staticmethod
    def _range(flat: Array, start: int, stop: int) -> tuple[int, int, int, int]:
        pointer = _address(flat) + start * flat.itemsize
        return pointer, pointer, stop - start, nccl.NCCL_FLOAT32

    def _abort(self) -> None:
        """End all waits for other ranks; NCCL may then wait until no captured graph uses it."""
        self._flag.set()
        self._factors.close()
        self._release(self._communicator.abort)

    def close(self, patience: float = PATIENCE) -> None:
        self._factors.close()
        self._release(self._communicator.destroy).join(patience)

    def _release(self, how: Callable[[], object]) -> threading.Thread:
        """Start a thread that does this, unless one was started before; return it."""

        def work() -> None:
            with suppress(nccl.NcclError):  # a failed GPU releases nothing
                how()

        with self._lock:
            if self._ending is None:
                name = f"nccl end {self.rank}"
                self._ending = threading.Thread(target=work, name=name, daemon=True)
                self._ending.start()
            return self._ending


def _address(array: Any) -> int:
    return int(array.data.ptr)
