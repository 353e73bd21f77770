"""Synchronization of GPUs by NCCL: one communicator, all-reduce in buckets beside the backward
pass.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from cupy.cuda import get_current_stream, nccl

from caffepy.collectives.buckets import NEVER, Bucket, Progress
from caffepy.collectives.factors import LANE, Factors
from caffepy.collectives.gpu import AbortFlag
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.sync import FlatParams
from caffepy.core.errors import SyncError
from caffepy.device.blob import Array


def new_unique_id() -> bytes:
    """Return an id for ranks that are to make one communicator."""
    unique_id: bytes = nccl.get_unique_id()
    return unique_id


class NcclSync:
    """One rank's side: every rank updates its own parameters with the mean of all gradients.

    The ranks start from the root's parameters. `exchange` brings the root's id of the communicator
    to all ranks; it is not called if they have a `unique_id`. Buckets are reduced as soon as the
    layers that add to them are done, from the second iteration on. In the first one nobody sets up
    what it needs while a GPU waits for others, as that may wait for the GPU. Gradients that are
    smaller as factors are not reduced, but made by all ranks.
    """

    capturable = True
    updates = True

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        exchange: Callable[[Any], list[Any]],
        flats: FlatParams,
        unique_id: bytes | None = None,
    ) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._device, self._data, self._diff, parts, factored = flats
        self._progress = Progress(parts or [Bucket(((0, self._diff.size),), NEVER)])
        self._started = self._met = False
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()
        if unique_id is None:
            unique_id, *_ = exchange(new_unique_id() if rank == 0 else None)
        group.barrier(rank, "nccl")
        with self._told(), self._device.scope():
            self._communicator = nccl.NcclCommunicator(self.size, unique_id, rank)
        group.barrier(rank, "nccl")
        self._word = AbortFlag()
        self._factors = Factors(factored, rank, self.size, self._gather)
        self._exchange = exchange
        group.on_abort(self._abort)

    @property
    def abort_flag(self) -> int:
        """The host's address of an int that is not 0 when the group was given up."""
        return self._word.address

    def _told(self) -> "_Told":
        return _Told(self.group, self.rank)

    def on_start(self) -> None:
        """Once, take the root's parameters."""
        if not self._started:
            self._started = True
            with self._collective():
                self._communicator.broadcast(
                    *self._range(self._data, 0, self._data.size), 0, get_current_stream().ptr
                )
        self._progress.restart()

    def after_backward(self, layer: int) -> None:
        """Reduce the buckets that are complete now."""
        if self._met:
            for bucket in self._progress.after(layer):
                self._send(bucket)

    def on_gradients_ready(self) -> None:
        """Reduce what is left, and let what follows wait for all."""
        if not self._met and any(
            shapes != self._factors.shapes for shapes in self._exchange(self._factors.shapes)
        ):
            raise SyncError(
                "solvers that train together need batches of one size, but theirs differ"
            )
        for bucket in self._progress.rest():
            self._send(bucket)
        self._met = True
        self._device.join("sync")
        self._device.join(LANE)

    def reduce(self, count: int) -> None:
        """The first so many elements of the diff become the mean of all ranks'."""
        self._reduce(Bucket(((0, count),), NEVER))
        self._met = True
        self._device.join("sync")

    def _send(self, bucket: Bucket) -> None:
        if bucket.ranges:
            self._reduce(bucket)
        else:
            self._factors.exchange()

    def _reduce(self, bucket: Bucket) -> None:
        self._device.join()  # gradients of parameters may be computed aside
        with self._device.side_stream("sync"), self._collective():
            for start, stop in bucket.ranges:
                arguments = self._range(self._diff, start, stop)
                self._communicator.allReduce(*arguments, nccl.NCCL_AVG, get_current_stream().ptr)

    def _gather(self, wholes: Sequence[Array]) -> None:
        with self._collective():
            for whole in wholes:
                start, count = _address(whole), whole.nbytes // self.size
                mine, stream = start + self.rank * count, get_current_stream().ptr
                self._communicator.allGather(mine, start, count, nccl.NCCL_CHAR, stream)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """A block whose calls become one launch, abreast of the others in the first iteration."""
        done = get_current_stream().synchronize
        with (
            nullcontext() if self._met else self.group.synchronized(self.rank, "nccl", done),
            self._told(),
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
        """End what waits for other ranks; NCCL may then wait until no recording refers to it any
        more.
        """
        self._word.set()
        self._factors.close()
        self._let_go(self._communicator.abort)

    def close(self, patience: float = PATIENCE) -> None:
        """Give back the communicator, for which it waits so many seconds; recordings of it must be
        gone.
        """
        self._factors.close()
        self._let_go(self._communicator.destroy).join(patience)

    def _let_go(self, how: Callable[[], object]) -> threading.Thread:
        """A thread that does so, unless one has begun to."""

        def work() -> None:
            with suppress(nccl.NcclError):  # of a GPU that failed nothing can be given back
                how()

        with self._lock:
            if self._ending is None:
                self._ending = threading.Thread(
                    target=work, name=f"nccl end {self.rank}", daemon=True
                )
                self._ending.start()
            return self._ending


def _address(array: Any) -> int:
    return int(array.data.ptr)


class _Told:
    """NCCL's errors come as ours: what stopped the group, or a SyncError."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def __enter__(self) -> None:
        self._group.check(self._rank)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, nccl.NcclError):
            self._group.check(self._rank)
            raise SyncError(f"NCCL failed ({error}); NCCL_DEBUG=INFO tells more") from error
