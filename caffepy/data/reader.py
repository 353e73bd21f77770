"""Batches of a database: made whole by a Loader, ahead of time by a Reader's thread.

Batch k is always batch k. Each carries the state (database position, random stream) after it, so that the state of a
Reader is that after the last batch taken: batches made ahead do not count.
"""

import atexit
import logging
import threading
import weakref
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.blob import shape_string
from caffepy.data.datum import RawLayout, Record, decode
from caffepy.data.source import Source, printable
from caffepy.data.transformer import Transformer
from caffepy.errors import CaffeError, DataError

log = logging.getLogger(__name__)

Array = NDArray[Any]
State = dict[str, Any]
Shape = tuple[int, ...]
EXIT_WAIT = 2.0  # seconds that the end of the process waits for a thread in the middle of a batch
WAITS_PER_LINE = 1000


class Batch:
    """Transformed images (N, C, h, w), labels (N,) and the state of their Loader after them."""

    __slots__ = ("data", "label", "state")

    def __init__(self, size: int, dtype: DTypeLike) -> None:
        self.data: Array = np.empty((size, 0, 0, 0), dtype)
        self.label: Array = np.empty(size, dtype)
        self.state: State = {}

    def reshape(self, shape: Shape) -> None:
        """Make room for images of this shape."""
        if self.data.shape[1:] != shape:
            self.data = np.empty((len(self.label), *shape), self.data.dtype)


class Loader:
    """Fills batches: reads records, decodes them into one array, transforms all of it at once."""

    def __init__(self, source: Source, transformer: Transformer, batch_size: int) -> None:
        self.source = source
        self.transformer = transformer
        self.batch_size = batch_size
        self._images: Array = np.empty((batch_size, 0, 0, 0), np.uint8)
        self._layout: RawLayout | None = None
        self._said = False

    def shape(self) -> Shape:
        """(C, h, w) of what the next record becomes; nothing is consumed."""
        return self.transformer.output_shape(self._decode(*self.source.peek())[0].shape)

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next records; the first one decides the shape."""
        others: dict[int, Array] = {}  # images of other sizes, which a crop makes equal
        for i in range(self.batch_size):
            key, record = self.source.read()
            label = self._layout.read(record, self._images[i].reshape(-1)) if self._layout else None
            if label is None:
                image, label = self._decode(key, record)
                if i == 0:
                    self._expect(image)
                if image.shape == self._images.shape[1:] and image.dtype == self._images.dtype:
                    self._images[i] = image
                else:
                    others[i] = image
            if i == 0 or i in others:
                self._fit(key, others.get(i, self._images[i]).shape, batch, first=i == 0)
            batch.label[i] = label
        draws = self.transformer.draw(self.batch_size)
        self.transformer.apply(self._images, batch.data, draws)
        for i, image in others.items():
            self.transformer.apply(image[None], batch.data[i : i + 1], draws[i : i + 1])
        batch.state = self.state()

    def _expect(self, image: Array) -> None:
        """Make room for images like this one."""
        if self._images.shape[1:] != image.shape or self._images.dtype != image.dtype:
            self._images = np.zeros((self.batch_size, *image.shape), image.dtype)
            self._layout = RawLayout(image.shape) if image.dtype == np.uint8 else None

    def _fit(self, key: Record, shape: Shape, batch: Batch, first: bool) -> None:
        """Shape the batch by its first image; DataError for one that does not fit."""
        where = f"{self.source.path}: record {printable(key)}"
        try:
            becomes = self.transformer.output_shape(shape)
        except CaffeError as error:
            raise DataError(f"{where}: {error.message}") from None
        if first:
            batch.reshape(becomes)
        elif becomes != batch.data.shape[1:]:
            start = shape_string(self._images.shape[1:])
            raise DataError(f"{where} has shape {shape_string(shape)} in a batch that starts with {start}")

    def _decode(self, key: Record, record: Record) -> tuple[Array, int]:
        try:
            image, label, encoded = decode(record, self.transformer.decode_mode)
        except DataError as error:
            raise DataError(f"{self.source.path}: record {printable(key)}: {error.message}") from None
        if not encoded and not self._said and (self.transformer.param.force_color or self.transformer.param.force_gray):
            self._said = True
            log.error("force_color and force_gray only for encoded datum")
        return image, label

    def state(self) -> State:
        """Database position and random stream: numbers and arrays."""
        index, key = self.source.position
        return {"record": index, "key": np.frombuffer(key, np.uint8), **self.transformer.state()}

    def set_state(self, state: State) -> None:
        """Go where `state` was taken."""
        self.source.seek(int(state["record"]), np.asarray(state["key"], np.uint8).tobytes())
        self.transformer.set_state(state)


class _Ring:
    """What a Reader and its thread share: empty batches one way, full ones or an error the other."""

    def __init__(self, batches: list[Batch]) -> None:
        self.free: SimpleQueue[Batch | None] = SimpleQueue()
        self.full: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.stopped = False
        for batch in batches:
            self.free.put(batch)

    def stop(self) -> None:
        """Let the thread end after the batch it is making."""
        self.stopped = True
        self.free.put(None)


_threads: "weakref.WeakKeyDictionary[threading.Thread, _Ring]" = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    threads = list(_threads.items())
    for _, ring in threads:
        ring.stop()
    for thread, _ in threads:
        thread.join(EXIT_WAIT)


def _produce(loader: Loader, ring: _Ring) -> None:
    while (batch := ring.free.get()) is not None and not ring.stopped:
        try:
            loader.load(batch)
        except BaseException as error:  # raised again where the batch is taken
            ring.full.put(error)
            return
        ring.full.put(batch)


_waits = count()


class Reader:
    """A Loader and a thread that keeps up to `depth` batches ready; it starts when the first one is asked for."""

    def __init__(self, loader: Loader, depth: int, dtype: DTypeLike) -> None:
        self._loader = loader
        self._batches = [Batch(loader.batch_size, dtype) for _ in range(depth)]
        self._state = loader.state()
        self._thread: threading.Thread | None = None

    def take(self) -> Batch:
        """The next batch; hand it back with `give_back` when it was used. Raises what went wrong in making it."""
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
        self._ring.free.put(batch)

    def state(self) -> State:
        """The state after the last batch taken."""
        return self._state

    def set_state(self, state: State) -> None:
        """Go on from there; batches made ahead are dropped."""
        self.stop()
        self._loader.set_state(state)
        self._state = self._loader.state()

    def stop(self) -> None:
        """End the thread and forget what it made ahead; `take` starts it again after the last batch taken."""
        if self._thread is None:
            return
        self._ring.stop()
        self._thread.join()
        self._thread = None
        self._finalizer.detach()
        self._loader.set_state(self._state)

    def close(self) -> None:
        """End the thread and release the database."""
        self.stop()
        self._loader.source.close()

    def _start(self) -> None:
        self._ring = _Ring(self._batches)
        self._finalizer = weakref.finalize(self, self._ring.stop)
        self._finalizer.atexit = False
        self._thread = threading.Thread(
            target=_produce, args=(self._loader, self._ring), name="caffepy-data", daemon=True
        )
        _threads[self._thread] = self._ring
        self._thread.start()
