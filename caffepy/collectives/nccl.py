"""Synchronization of GPUs by NCCL: one communicator, buckets reduced during the backward pass.

NCCL waits without end for a rank that is dead, stopped or cut off; an abort ends that. CuPy's
communicators are blocking ones, so two waits need care:

- While a communicator is made there is nothing yet to abort, so over several nodes a thread makes
  it. Its rank waits as it does for others: a failure, or the deadline of the set-up, ends the run,
  and the thread with the process.
- An abort frees what a call in another thread may still use. It lets calls end first (CALL_ENDS),
  and none begins after it. Only a call that waits for a rank lasts longer, and needs the abort.

Non-blocking communicators (nccl4py) could be aborted while they are made, and the process would go
on. But a run ends when a rank has failed, so that they would only add a dependency.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
from cupy.cuda import get_current_stream, nccl

from caffepy import ops
from caffepy.collectives import interfaces
from caffepy.collectives.buckets import NEVER, Bucket, Progress
from caffepy.collectives.factors import STREAM, Factors
from caffepy.collectives.gpu import AbortFlag
from caffepy.collectives.interfaces import NcclLog
from caffepy.collectives.one_shot import OneShot, small
from caffepy.collectives.peer_copies import PeerCopies, copied
from caffepy.collectives.peers import MOST_RANKS
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.synchronizer import BF16, FLOAT32, FlatParams, Synchronizer
from caffepy.collectives.world import LONGEST_SLEEP
from caffepy.core.abandoned import abandon
from caffepy.core.errors import SyncError
from caffepy.device.blob import Array

log = logging.getLogger(__name__)

CALL_ENDS = 1.0
"""Seconds that an abort waits for a call of NCCL in another thread."""

SLOW = 15.0
"""Seconds after which a warning says that NCCL still connects the nodes."""

BFLOAT16 = 9
"""ncclBfloat16, which not every CuPy names."""


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
    Ranks that are `joined`, as GPUs of one process that reach each other's memory, do all that
    without NCCL: the last buckets, if they are small, by `one_shot`, the rest by `peer_copies`.

    With `wire` "bf16" each bucket is rounded to bfloat16, summed as that by NCCL, in a node and
    between nodes alike, and widened again: each sum of two is rounded, and all ranks get the same.
    """

    capturable = reduces_early = True

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        all_gather: Callable[[Any], list[Any]],
        flats: FlatParams,
        unique_id: bytes | None = None,
        wire: str = FLOAT32,
        joined: bool = False,
    ) -> None:
        super().__init__(group, rank)
        self._device, self._data, self._diff, parts, factored, metrics = flats
        parts = parts or [Bucket(((0, self._diff.size),), NEVER)]
        self._progress = Progress(parts)
        self._ops = ops.backend(self._device)
        self._narrow = self._diff.size - metrics if wire == BF16 else 0  # the first of the diff
        most = max(sum(stop - start for start, stop in part.ranges) for part in parts)
        room = min(most, self._narrow)  # buckets follow each other on one stream
        self._narrowed = self._device.zeros(room, np.dtype(np.uint16))
        self._hosts = len(set(group.world.hosts))
        self._started = self._warm = False  # parameters are in step; an iteration has ended
        self._ending: threading.Thread | None = None
        self._lock, self._calls = threading.Lock(), threading.Lock()
        # The flags of all ranks are set before a communicator is aborted, which takes longer: a GPU
        # whose wait has ended goes on, and overwrites what one without its flag would still add.
        self._flag = AbortFlag()
        self.abort_flag = self._flag.address
        group.on_abort(self._flag.set)
        self._log = NcclLog(rank == 0 and interfaces.between_hosts(group.world.hosts))
        with self._log:
            if unique_id is None:
                unique_id, *_ = all_gather(new_unique_id() if self.universal_rank == 0 else None)
            group.barrier(rank, "nccl")
            with self._errors():
                self._communicator = self._connect(unique_id)
            group.barrier(rank, "nccl")
        if network := self._log.network:
            log.info("NCCL goes from host to host by %s", network)
            if self._hosts > 1 and network.warning:
                log.warning("%s", network.warning)
        self.has_factors = bool(factored)
        ways = self._gather, self._wait_gathered
        self._factors = Factors(factored, self.universal_rank, self.size, *ways)
        self._all_gather = all_gather
        group.on_abort(self._abort)
        self._small = small(parts, self.size) if joined and wire == FLOAT32 else []
        self._all_small = len(self._small) == len(parts)
        self._one_shot: OneShot | None = None
        if self._small:
            own = self._device, self._diff, self._small
            self._one_shot = OneShot(rank, self.size, all_gather, *own, self.abort_flag)
        alone = joined and wire == FLOAT32 and 1 < self.size <= MOST_RANKS
        self._copied = copied(parts, self._small, self.size) if alone else []
        self._copies: PeerCopies | None = None
        if alone and (self._copied or factored):
            own = self._device, self._diff, self._copied
            self._copies = PeerCopies(rank, self.size, all_gather, *own, self.abort_flag)

    def _connect(self, unique_id: bytes) -> Any:
        """Return a new communicator. All ranks meet in here, see the head of this file."""
        made: list[Any] = []

        def make() -> None:
            try:
                with self._device.scope():
                    made.append(nccl.NcclCommunicator(self.size, unique_id, self.universal_rank))
            except BaseException as error:
                made.append(error)
            self.group.wake(self.rank)

        if self.group.world.nodes == 1:
            make()
        else:
            name = f"nccl begin {self.rank}"
            threading.Thread(target=make, name=name, daemon=True).start()
            try:
                self._wait(made)
            except BaseException:
                abandon(made)
                raise
        (communicator,) = made
        if isinstance(communicator, BaseException):
            raise communicator
        return communicator

    def _wait(self, made: Sequence[Any]) -> None:
        """Wait until there is something, as for other ranks."""
        if self.rank:
            self.group.until(self.rank, lambda: bool(made), lambda: [self.rank])
            return
        with (
            self._warning_if_slow(),
            self.group.among_nodes("NCCL", lambda: f"; {self._hint()}") as world,
        ):
            while not made:
                world.poll([])
                time.sleep(LONGEST_SLEEP)

    @contextmanager
    def _warning_if_slow(self) -> Iterator[None]:
        """A block in which NCCL connects nodes, some at first use: logs a warning if that lasts."""
        if self.rank or self.group.world.nodes == 1 or self._warm:
            yield
            return

        def warn() -> None:
            log.warning("NCCL has not connected all nodes yet; %s", self._hint())

        timer = threading.Timer(SLOW, warn)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def on_start(self) -> None:
        if not self._started:
            self._started = True
            with self._collective():
                whole = self._range(self._data, 0, self._data.size)
                self._communicator.broadcast(*whole, 0, get_current_stream().ptr)
        self._progress.restart()
        if self._one_shot:
            self._one_shot.restart()
        if self._copies:
            self._copies.restart()

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
            if bucket not in self._small:
                self._send(bucket)
        if self._copies:
            with self._device.side_stream(STREAM, "sync"), self._together("copies"):
                self._copies.finish()
        self._device.wait_stream("sync")  # a wait for other ranks must not keep NCCL from a GPU
        self._finish()
        self._warm = True
        self._device.wait_stream(STREAM)

    def update_by_factors(self) -> None:
        self._factors.update()

    def reduce(self, count: int) -> None:
        if self._all_small and count == self._diff.size:
            self._finish()
        else:
            self._reduce(Bucket(((0, count),), NEVER))
            self._device.wait_stream("sync")
        self._warm = True

    def _send(self, bucket: Bucket) -> None:
        if not bucket.ranges:
            self._factors.exchange()
        elif self._copies and bucket in self._copied:
            with self._after_gradients(), self._together("copies"):
                self._copies.send(bucket)
            with self._device.side_stream(STREAM, "sync"), self._together("copies"):
                self._copies.add(bucket)
        elif not (self._one_shot and bucket in self._small):
            self._reduce(bucket)
        elif bucket != self._small[-1]:  # which `finish` writes
            with self._after_gradients():
                self._one_shot.send(bucket)

    def _finish(self) -> None:
        """Reduce the small buckets, of which some may have been sent before."""
        if self._one_shot:
            with self._together("one-shot"):
                self._one_shot.finish()

    def _together(self, name: str) -> AbstractContextManager[object]:
        """The context of a launch that waits for other ranks; barriers bracket it in the first
        iteration.
        """
        done = get_current_stream().synchronize
        return nullcontext() if self._warm else self.group.synchronized(self.rank, name, done)

    def _after_gradients(self) -> AbstractContextManager[object]:
        """The context of the stream "sync", after gradients, which may be computed on another
        stream, and after the loss, which goes with a bucket.
        """
        return self._device.side_stream("sync", "layer", "control")

    def _reduce(self, bucket: Bucket) -> None:
        with self._after_gradients():
            narrow, count = list[tuple[Array, Array]](), 0  # gradients and their place as bfloat16
            for start, stop in bucket.ranges:
                if size := max(0, min(stop, self._narrow) - start):
                    place = self._narrowed[count : count + size]
                    narrow.append((self._diff[start : start + size], place))
                    count += size
            for gradients, place in narrow:
                self._ops.convert(gradients, place)
            with self._collective():
                stream = get_current_stream().ptr
                if count:
                    sums = _address(self._narrowed)
                    self._communicator.allReduce(sums, sums, count, BFLOAT16, nccl.NCCL_SUM, stream)
                for start, stop in bucket.ranges:
                    if stop > self._narrow:
                        wide = self._range(self._diff, max(start, self._narrow), stop)
                        self._communicator.allReduce(*wide, nccl.NCCL_AVG, stream)
            for gradients, place in narrow:
                self._ops.convert(place, gradients)
                self._ops.scaled(1 / self.size, gradients, gradients)

    def _gather(self, wholes: Sequence[Array]) -> None:
        if self._copies:
            with self._together("copies"):
                self._copies.gather(wholes)
            return
        with self._collective():
            for whole in wholes:
                start, count = _address(whole), whole.nbytes // self.size
                mine, stream = start + self.universal_rank * count, get_current_stream().ptr
                self._communicator.allGather(mine, start, count, nccl.NCCL_CHAR, stream)

    def _wait_gathered(self) -> None:
        if self._copies:
            with self._together("copies"):
                self._copies.wait_gathered()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """A block whose NCCL errors are raised as what stopped the group, else as SyncError."""
        self.group.check(self.rank)
        try:
            yield
        except nccl.NcclError as error:
            self.group.check(self.rank)
            raise SyncError(f"NCCL failed ({error}); {self._hint()}") from error

    def _hint(self) -> str:
        hint = "NCCL_DEBUG=INFO tells more"
        if self._hosts > 1 and not self._warm:  # it has not connected them yet
            network = self._log.network
            taken = f"it took {network}" if network else interfaces.choices()
            hint = (
                f"if it cannot connect the {self._hosts} hosts, name the interface to the others "
                f"on each of them: {interfaces.VARIABLE}=eth0 ({taken}); {hint}"
            )
        return hint

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """A block of NCCL calls that are one launch."""
        with self._together("nccl"), self._errors(), self._calls:
            if self._ending:
                raise SyncError("NCCL's communicator was aborted")
            nccl.groupStart()
            try:
                yield
            finally:
                with self._warning_if_slow():
                    nccl.groupEnd()

    @staticmethod
    def _range(flat: Array, start: int, stop: int) -> tuple[int, int, int, int]:
        pointer = _address(flat) + start * flat.itemsize
        return pointer, pointer, stop - start, nccl.NCCL_FLOAT32

    def _abort(self) -> None:
        """End the communicator; NCCL may wait with that until no captured graph uses it."""
        self._factors.close()
        self._release(self._communicator.abort)

    def close(self, patience: float = PATIENCE) -> None:
        self._factors.close()
        self._release(self._communicator.destroy).join(patience)

    def _release(self, how: Callable[[], object]) -> threading.Thread:
        """Start a thread that does this, unless one was started before; return it."""

        def work() -> None:
            if self._calls.acquire(timeout=CALL_ENDS):
                self._calls.release()
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
