"""Batches that a thread reads ahead of the net. With enough cores, FILL_THREADS more threads fill
several batches at a time.

Batch k is always batch k. Each carries the state (position, random stream) after it, so the state
of a Reader is that after the last batch taken: batches read ahead do not count. With several
devices, batches go to them in turn, each by a Staging of its device. With several machines, each
has a Reader, which skips what the others take (see `Turn`). The table of who calls what on which
thread stands at the head of `loader`.
"""

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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


class Turn(NamedTuple):
    """One batch of a deal: `before` are skipped, the next goes to local rank `rank`, then `after`
    are skipped.

    A deal is a sequence of turns, which is repeated endlessly. It says what one process gets of all
    batches; others that start at the same state take what it skips.
    """

    before: int
    rank: int
    after: int


def deal_of(first: int, own: int, ranks: int, batches: int | None = None) -> list[Turn]:
    """The deal of the process that has the universal ranks `first` to `first + own - 1`, if batch b
    goes to universal rank b mod `ranks`.

    It is over after a round of all ranks, or after so many `batches`, as a test has; it is empty if
    none of them is the process's.
    """
    count = ranks if batches is None else batches
    mine = [b for b in range(count) if first <= b % ranks < first + own]
    turns, end = list[Turn](), 0
    for b in mine:
        after = count - 1 - b if b == mine[-1] else 0
        turns.append(Turn(b - end, b % ranks - first, after))
        end = b + 1
    return turns


ALONE = (Turn(0, 0, 0),)
"""The deal of a single device, which gets all batches."""


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
    turn: Turn
    filled: Future[bool]
    before: State  # of the loader, before the turn
    after: State | None  # after it, if it is not that after the batch


class _Producer:
    """The reading thread: reserves free batches one after the other, lets filling threads fill
    them, and hands them over in their order, or its error, to the Reader.
    """

    def __init__(
        self, loader: Loader, batches: list[Batch], turns: Iterator[Turn], several: int
    ) -> None:
        self._loader, self._turns, self._several = loader, turns, several
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
            fills = num_threads() >= MIN_THREADS and self._several == 1
            fill_threads = FILL_THREADS if fills else 0
            make = self._reserve if fill_threads else self._load
            for _ in range(fill_threads):
                filling = threading.Thread(target=self._fill, name="caffepy-fill", daemon=True)
                _alive.add(filling)
                filling.start()
            for turn in self._turns:
                free = self.free[turn.rank]
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
                make(batch, turn)
        except BaseException as error:  # raised again by Reader.take
            self.full.put(error)
        finally:
            wait([reserved.filled for reserved in self._reserved])
            for _ in range(fill_threads):
                self._jobs.put(None)
            # an error that nobody takes refers to its thread, which must not keep the batches alive
            _threads.pop(threading.current_thread(), None)

    def _skip(self, batches: int) -> State | None:
        """Skip batches; return the state after them, None if there are none."""
        if not batches:
            return None
        self._loader.skip(batches)
        return self._loader.state()

    def _load(self, batch: Batch, turn: Turn) -> None:
        if self._several > 1:
            if self._loader.load_several(batch, self._several):
                self.full.put(batch)
                return
            self._several = 1
        self._skip(turn.before)
        batch.hold(self._loader.batch_size)
        self._loader.load(batch)
        batch.state = self._skip(turn.after) or batch.state
        self.full.put(batch)

    def _reserve(self, batch: Batch, turn: Turn) -> None:
        if self._loader.can_reserve:
            before = self._loader.state()
            try:
                self._skip(turn.before)
                fill = self._loader.reserve(batch)
                after = self._skip(turn.after)
            except Exception:
                # `load` raises it again, unless going back to an earlier batch avoids it
                self._loader.set_state(before)
            else:
                self._reserved.append(_Reserved(batch, turn, Future(), before, after))
                self._jobs.put((self._reserved[-1].filled, fill))
                return
        while self._reserved:
            self._hand_over()
        self._load(batch, turn)

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
        batch, _, filled, before, after = self._reserved[0]
        if filled.exception() is None and filled.result():
            self._reserved.popleft()
            batch.state = after or batch.state
            self.full.put(batch)
            return
        wait([reserved.filled for reserved in self._reserved])
        self._loader.set_state(before)
        while self._reserved:
            again = self._reserved.popleft()
            self._load(again.batch, again.turn)


_waits = count()


class Reader:
    """A Loader and the thread that keeps up to `depth` batches ready, which `begin` or `take`
    starts.
    """

    _producer: _Producer  # of the thread

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
        self._turns: Callable[[int], Iterator[Turn]] = lambda taken: cycle(ALONE)
        self._alone = True  # one device gets all batches
        self._several = 1  # batches of the net's that a batch holds, where that is possible
        self._next: Batch | None = None  # what `peek` has seen
        self._taken = 0  # batches since `serve`
        self._first = True  # `take` is to wait for the first batch of the thread
        self._thread: threading.Thread | None = None

    def extent(self) -> str:
        """The size of the source and the names of its ends, see `Source.extent`."""
        return self._loader.extent()

    def serve(
        self,
        scopes: Sequence[Callable[[], AbstractContextManager[object]]],
        deal: Sequence[Turn] | None = None,
    ) -> None:
        """Make batches for several devices by this deal, or else for one after the other; their
        Stagings are made in these scopes.

        The state of a batch is that after its turn. The deal starts anew wherever the thread was
        stopped.
        """
        self.read_several(1)
        turns = deal or [Turn(0, rank, 0) for rank in range(len(scopes))]
        self._alone = tuple(turns) == ALONE
        self._turns = lambda taken: cycle(turns)
        self._batches = []
        for rank, scope in enumerate(scopes):
            with scope():
                for _ in range(self._depth):
                    batch = Batch(self._loader.batch_size, self._dtype, self._staging(), rank)
                    self._batches.append(batch)

    def lease(self, turns: Callable[[int], Iterator[Turn]]) -> None:
        """From now on make the batches of `turns(taken)`: those after the first `taken`."""
        self.read_several(1)
        self._alone = False
        self._turns, self._taken = turns, 0

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None:
            self._start()

    def read_several(self, count: int) -> None:
        """From now on make batches that hold `count` of the net's, where that is possible and a
        single device gets all of them. What was read ahead is dropped.
        """
        self.stop()
        self._several = count if self._alone else 1
        for batch in self._batches:
            batch.hold(self._loader.batch_size)

    def peek(self) -> Batch:
        """The batch that `take` will return."""
        self._next = self._next or self._await()
        return self._next

    def take(self) -> Batch:
        """The next batch, for `give_back` after its use, or the error of making it."""
        batch, self._next = self._next or self._await(), None
        self._state = batch.state
        self._taken += batch.count
        return batch

    def _await(self) -> Batch:
        self.begin()
        waits = not self._first and self._producer.full.empty()
        if waits and next(_waits) % WAITS_PER_LINE == 0:
            log.info("Waiting for data")
        self._first = False
        batch = self._producer.full.get()
        if isinstance(batch, BaseException):
            self.stop()
            raise batch
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

    def skip(self, batches: int) -> None:
        """Go past the next batches; those read ahead are dropped."""
        self.stop()
        self._loader.skip(batches)
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
        self._thread = self._next = None
        self._finalizer.detach()
        return True

    def _start(self) -> None:
        self._first = True
        turns = self._turns(self._taken)
        self._producer = _Producer(self._loader, self._batches, turns, self._several)
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
