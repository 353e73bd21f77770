"""Batches that a thread reads ahead of the net. With enough cores, FILL_THREADS more threads fill
several batches at a time.

Batch k is always batch k. Each carries the state (position, random stream) after it, so the state
of a Reader is that after the last batch taken: batches read ahead do not count. With several
devices, batches go to them in turn, each by a Staging of its device. The table of who calls what on
which thread stands at the head of `loader`.
"""

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from itertools import count, cycle
from queue import SimpleQueue
from typing import NamedTuple

from numpy.typing import DTypeLike

from caffepy.data.loader import Batch, Loader
from caffepy.data.sources.base import State
from caffepy.device.threads import num_threads
from caffepy.ops.objects import Staging

log = logging.getLogger(__name__)

EXIT_WAIT = 2.0  # seconds that `close` and the exit of the process wait for a batch being filled
# one batch alone does not keep the cores busy: its start is serial, and its last images end late
FILL_THREADS = 3
MIN_THREADS = 4  # of the pool, for FILL_THREADS to start
MAX_BATCHES = 100
WAITS_PER_LINE = 1000


_threads: "weakref.WeakKeyDictionary[threading.Thread, _Producer]" = weakref.WeakKeyDictionary()
# The last to use a loader releases its source, so the exit of the process waits for each thread,
# also for one that is ending.
_alive: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for producer in list(_threads.values()):
        producer.stop()
    for thread in list(_alive):
        _join(thread, EXIT_WAIT)


def _join(thread: threading.Thread, seconds: float | None) -> None:
    """Wait for the thread's end, if it was started: an interruption may have come before."""
    if thread.ident is not None:
        thread.join(seconds)


class _Reserved(NamedTuple):
    batch: Batch  # is being filled
    filled: Future[bool]
    before: State  # of the loader


class _Producer:
    """The reading thread: reserves free batches one after the other, lets filling threads fill
    them, and hands them over in their order, or its error, to the Reader.
    """

    def __init__(self, loader: Loader, batches: list[Batch]) -> None:
        self._loader = loader
        ranks = 1 + max(batch.rank for batch in batches)
        self.free: list[SimpleQueue[Batch | None]] = [SimpleQueue() for _ in range(ranks)]
        self.full: SimpleQueue[Batch | BaseException] = SimpleQueue()
        for batch in batches:
            self.free[batch.rank].put(batch)
        self._stopped = False
        self._reserved: deque[_Reserved] = deque()
        self._jobs: SimpleQueue[tuple[Future[bool], Callable[[], bool]] | None] = SimpleQueue()

    def stop(self) -> None:
        self._stopped = True
        for queue in self.free:
            queue.put(None)

    def run(self) -> None:
        fill_threads = 0
        try:
            fill_threads = FILL_THREADS if num_threads() >= MIN_THREADS else 0
            make = self._reserve if fill_threads else self._load
            for _ in range(fill_threads):
                filling = threading.Thread(target=self._fill, name="caffepy-fill", daemon=True)
                _alive.add(filling)
                filling.start()
            for free in cycle(self.free):
                # a batch is full, or none can be reserved before one is handed over
                while self._reserved and (
                    self._reserved[0].filled.done()
                    or len(self._reserved) == FILL_THREADS
                    or free.empty()
                ):
                    self._hand_over()
                batch = free.get()
                if batch is None or self._stopped:
                    return
                make(batch)
        except BaseException as error:  # raised again by Reader.take
            self.full.put(error)
        finally:
            wait([reserved.filled for reserved in self._reserved])
            for _ in range(fill_threads):
                self._jobs.put(None)
            # an error that nobody takes refers to its thread, which must not keep the batches alive
            _threads.pop(threading.current_thread(), None)

    def _load(self, batch: Batch) -> None:
        self._loader.load(batch)
        self.full.put(batch)

    def _reserve(self, batch: Batch) -> None:
        before = self._loader.state()
        try:
            fill = self._loader.reserve(batch)
        except Exception:
            # `load` raises it again, unless going back to an earlier batch avoids it
            self._loader.set_state(before)
            fill = None
        if fill is None:
            while self._reserved:
                self._hand_over()
            self._load(batch)
        else:
            self._reserved.append(_Reserved(batch, Future(), before))
            self._jobs.put((self._reserved[-1].filled, fill))

    def _fill(self) -> None:
        while (job := self._jobs.get()) is not None:
            filled, fill = job
            try:
                filled.set_result(fill())
            except BaseException as error:
                filled.set_exception(error)

    def _hand_over(self) -> None:
        """Hand over the oldest batch. If it could not be filled, load it and those after it one by
        one: that raises the same error, or skips a bad record.
        """
        batch, filled, before = self._reserved[0]
        if filled.exception() is None and filled.result():
            self._reserved.popleft()
            self.full.put(batch)
            return
        wait([reserved.filled for reserved in self._reserved])
        self._loader.set_state(before)
        while self._reserved:
            self._load(self._reserved.popleft().batch)


_waits = count()


class Reader:
    """A Loader and the thread that keeps up to `depth` batches ready. `take` starts it."""

    def __init__(
        self, loader: Loader, depth: int, dtype: DTypeLike, staging: Callable[[], Staging]
    ) -> None:
        self._loader = loader
        if depth > MAX_BATCHES:
            log.warning("%d batches are read ahead, not %d", MAX_BATCHES, depth)
            depth = MAX_BATCHES
        self._depth, self._dtype, self._staging = depth, dtype, staging
        self._batches = [Batch(loader.batch_size, dtype, staging()) for _ in range(depth)]
        self._state = loader.state()
        self._thread: threading.Thread | None = None

    def serve(self, scopes: Sequence[Callable[[], AbstractContextManager[object]]]) -> None:
        """Make batches for several devices in turn; their Stagings are made in these scopes."""
        self.stop()
        self._batches = []
        for rank, scope in enumerate(scopes):
            with scope():
                for _ in range(self._depth):
                    batch = Batch(self._loader.batch_size, self._dtype, self._staging(), rank)
                    self._batches.append(batch)

    def take(self) -> Batch:
        """The next batch, for `give_back` after its use, or the error of making it."""
        if self._thread is None:
            self._start()
        elif self._producer.full.empty() and next(_waits) % WAITS_PER_LINE == 0:
            log.info("Waiting for data")
        batch = self._producer.full.get()
        if isinstance(batch, BaseException):
            self.stop()
            raise batch
        self._state = batch.state
        return batch

    def give_back(self, batch: Batch) -> None:
        """Return a batch, which may be filled again."""
        self._producer.free[batch.rank].put(batch)

    def state(self) -> State:
        """The state after the last batch taken."""
        return self._state

    def set_state(self, state: State) -> None:
        """Go to where `state` was taken; batches read ahead are dropped."""
        self.stop()
        self._loader.set_state(state)
        self._state = self._loader.state()

    def stop(self) -> None:
        """End the thread and drop what it read ahead; `take` goes on after the last batch taken."""
        if self._end_thread():
            self._loader.set_state(self._state)

    def close(self) -> None:
        """End the thread and release the source, unless the thread hangs in reading it."""
        thread = self._thread
        self._end_thread(EXIT_WAIT)
        if thread and thread.is_alive():
            log.warning("Reading data hangs")
        else:
            self._loader.close()

    def _end_thread(self, seconds: float | None = None) -> bool:
        """Wait for the thread's end, up to `seconds`; false if there was no thread."""
        if self._thread is None:
            return False
        self._producer.stop()
        _join(self._thread, seconds)
        self._thread = None
        self._finalizer.detach()
        return True

    def _start(self) -> None:
        self._producer = _Producer(self._loader, self._batches)
        self._finalizer = weakref.finalize(self, self._producer.stop)
        self._finalizer.atexit = False
        thread = threading.Thread(target=self._producer.run, name="caffepy-data", daemon=True)
        try:
            self._thread = thread
            _threads[thread] = self._producer
            _alive.add(thread)
            thread.start()
        except BaseException:  # an interruption
            self.stop()
            raise
