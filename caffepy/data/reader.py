"""Batches made ahead of time by a thread; where there are many, others fill several of them at a
time.

Batch k is always batch k. Each carries the state (position, random stream) after it, so that the
state of a Reader is that after the last batch taken: batches made ahead do not count. Batches may
come in several lanes, one after the other, each with a Staging of its own device.
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

from caffepy.data.loader import Batch, Loader, Staging, State

log = logging.getLogger(__name__)

EXIT_WAIT = 2.0  # seconds that an end waits for a thread in the middle of a batch
HELPERS = 3  # fill as many batches at a time: of one alone some pieces end late, and what goes before them is serial
MANY = 4  # threads are needed for that
MOST_BATCHES = 100
WAITS_PER_LINE = 1000


class _Ring:
    """What a Reader and its thread share: empty batches one way, full ones or an error the other."""

    def __init__(self, batches: list[Batch]) -> None:
        lanes = 1 + max(batch.lane for batch in batches)
        self.free: list[SimpleQueue[Batch | None]] = [SimpleQueue() for _ in range(lanes)]
        self.full: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.stopped = False
        for batch in batches:
            self.free[batch.lane].put(batch)

    def stop(self) -> None:
        """Let the thread end after the batch it is making."""
        self.stopped = True
        for lane in self.free:
            lane.put(None)


_threads: "weakref.WeakKeyDictionary[threading.Thread, _Ring]" = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    threads = list(_threads.items())
    for _, ring in threads:
        ring.stop()
    for thread, _ in threads:
        _join(thread, EXIT_WAIT)


def _join(thread: threading.Thread, seconds: float | None) -> None:
    """Wait for its end, if it ever began: an interruption may have come before."""
    if thread.ident is not None:
        thread.join(seconds)


class _Begun(NamedTuple):
    """A batch that is being filled, whether that was possible or what went wrong, and the state
    before it.
    """

    batch: Batch
    filled: Future[bool]
    before: State


class _Producer:
    """Begins batches one after the other, has some filled at a time, and hands them over in their
    order.
    """

    def __init__(self, loader: Loader, ring: _Ring) -> None:
        self._loader, self._ring = loader, ring
        self._begun: deque[_Begun] = deque()
        self._jobs: SimpleQueue[tuple[Future[bool], Callable[[], bool]] | None] = SimpleQueue()

    def run(self) -> None:
        """Until it is told to stop, or something fails."""
        helpers = 0
        try:
            from caffepy.device.threads import num_threads  # here, since the package loads numba

            helpers = HELPERS if num_threads() >= MANY else 0
            make = self._begin if helpers else self._load
            for _ in range(helpers):
                threading.Thread(target=self._help, name="caffepy-fill", daemon=True).start()
            for lane in cycle(self._ring.free):
                while self._must_hand_over(lane):
                    self._hand_over()
                batch = lane.get()
                if batch is None or self._ring.stopped:
                    return
                make(batch)
        except BaseException as error:  # raised again where the batch is taken
            self._ring.full.put(error)
        finally:
            wait([begun.filled for begun in self._begun])
            for _ in range(helpers):
                self._jobs.put(None)
            _threads.pop(
                threading.current_thread(), None
            )  # an error that nobody takes refers to its thread

    def _load(self, batch: Batch) -> None:
        self._loader.load(batch)
        self._ring.full.put(batch)

    def _begin(self, batch: Batch) -> None:
        before = self._loader.state()
        try:
            fill = self._loader.begin(batch)
        except (
            Exception
        ):  # it comes up again in its place, if it is still there when those before are loaded
            self._loader.set_state(before)
            fill = None
        if fill is None:
            while self._begun:
                self._hand_over()
            self._load(batch)
        else:
            self._begun.append(_Begun(batch, Future(), before))
            self._jobs.put((self._begun[-1].filled, fill))

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            filled, fill = job
            try:
                filled.set_result(fill())
            except BaseException as error:
                filled.set_exception(error)

    def _must_hand_over(self, lane: "SimpleQueue[Batch | None]") -> bool:
        """Whether a batch is ready, or none can be begun before one is."""
        if not self._begun:
            return False
        return self._begun[0].filled.done() or len(self._begun) == HELPERS or lane.empty()

    def _hand_over(self) -> None:
        """The batch that was begun first; if it could not be filled, load it and those behind it
        one by one.

        What went wrong in filling it goes wrong in loading it, too, unless it is a bad record that
        may be passed over.
        """
        batch, filled, before = self._begun[0]
        if filled.exception() is None and filled.result():
            self._begun.popleft()
            self._ring.full.put(batch)
            return
        wait([begun.filled for begun in self._begun])
        self._loader.set_state(before)
        while self._begun:
            self._load(self._begun.popleft().batch)


_waits = count()


class Reader:
    """A Loader and a thread that keeps up to `depth` batches ready; it starts when the first one is
    asked for.
    """

    def __init__(
        self, loader: Loader, depth: int, dtype: DTypeLike, staging: Callable[[], Staging]
    ) -> None:
        self._loader = loader
        if depth > MOST_BATCHES:
            log.warning("%d batches are read ahead, not %d", MOST_BATCHES, depth)
            depth = MOST_BATCHES
        self._depth, self._dtype, self._staging = depth, dtype, staging
        self._batches = [Batch(loader.batch_size, dtype, staging()) for _ in range(depth)]
        self._state = loader.state()
        self._thread: threading.Thread | None = None

    def serve(self, scopes: Sequence[Callable[[], AbstractContextManager[object]]]) -> None:
        """Make batches in as many lanes, each with a Staging made in its scope; the next batch is
        of the first.
        """
        self.stop()
        self._batches = []
        for lane, scope in enumerate(scopes):
            with scope():
                for _ in range(self._depth):
                    self._batches.append(
                        Batch(self._loader.batch_size, self._dtype, self._staging(), lane)
                    )

    def take(self) -> Batch:
        """The next batch; hand it back with `give_back` when it was used. Raises what went wrong in
        making it.
        """
        if self._thread is None:
            self._start()
        elif self._ring.full.empty() and next(_waits) % WAITS_PER_LINE == 0:
            log.info("Waiting for data")
        batch = self._ring.full.get()
        if isinstance(batch, BaseException):
            self.stop()
            raise batch
        self._state = batch.state
        return batch

    def give_back(self, batch: Batch) -> None:
        """Let the thread fill this batch anew."""
        self._ring.free[batch.lane].put(batch)

    def state(self) -> State:
        """The state after the last batch taken."""
        return self._state

    def set_state(self, state: State) -> None:
        """Go on from there; batches made ahead are dropped."""
        self.stop()
        self._loader.set_state(state)
        self._state = self._loader.state()

    def stop(self) -> None:
        """End the thread and forget what it made ahead; `take` starts it again after the last batch
        taken.
        """
        if self._end_thread():
            self._loader.set_state(self._state)

    def close(self) -> None:
        """End the thread and release what the loader reads, unless the thread hangs in reading it."""
        thread = self._thread
        self._end_thread(EXIT_WAIT)
        if thread and thread.is_alive():
            log.warning("Reading data hangs")
        else:
            self._loader.close()

    def _end_thread(self, seconds: float | None = None) -> bool:
        """Whether there was one; waits for its end, for so many seconds at most."""
        if self._thread is None:
            return False
        self._ring.stop()
        _join(self._thread, seconds)
        self._thread = None
        self._finalizer.detach()
        return True

    def _start(self) -> None:
        self._ring = _Ring(self._batches)
        self._finalizer = weakref.finalize(self, self._ring.stop)
        self._finalizer.atexit = False
        producer = _Producer(self._loader, self._ring)
        thread = threading.Thread(target=producer.run, name="caffepy-data", daemon=True)
        try:
            self._thread = thread
            _threads[thread] = self._ring
            thread.start()
        except BaseException:  # an interruption
            self.stop()
            raise
