"""Loaders fill batches: most read images one by one into one array and transform all of it at once."""

import logging
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.blob import shape_string
from caffepy.data.datum import RawLayout, decode
from caffepy.data.source import Source, printable
from caffepy.data.transformer import Transformer
from caffepy.errors import CaffeError, DataError

log = logging.getLogger(__name__)

Array = NDArray[Any]
State = dict[str, Any]
Shape = tuple[int, ...]


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
    """Base of the loaders: what a Reader asks of them."""

    position: ClassVar[frozenset[str]]  # what a state says of the position

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def shape(self) -> Shape:
        """(C, h, w) of the next image of a batch; nothing is consumed."""
        raise NotImplementedError

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images and state what follows it."""
        raise NotImplementedError

    def state(self) -> State:
        """Position and random stream: numbers and arrays."""
        raise NotImplementedError

    def set_state(self, state: State) -> None:
        """Go where `state` was taken; a state of another kind of source leaves the position as it is."""
        if self.position <= state.keys():
            self.seek(state)
        else:
            log.warning("the saved state does not say where to go on; starting at the first image")

    def seek(self, state: State) -> None:
        """Go to the position in `state`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is read."""


class SequentialLoader(Loader):
    """Base of the loaders that read one image after the other, endlessly.

    The first image of a batch decides the shape of the batch; others may differ if a crop makes them equal.
    """

    def __init__(self, transformer: Transformer, batch_size: int) -> None:
        super().__init__(batch_size)
        self.transformer = transformer
        self._images: Array = np.empty((batch_size, 0, 0, 0), np.uint8)

    def shape(self) -> Shape:
        """(C, h, w) of what the next image becomes; nothing is consumed."""
        return self.transformer.output_shape(self.peek().shape)

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images."""
        others: dict[int, Array] = {}
        for i in range(self.batch_size):
            where, image, batch.label[i] = self.read(self._images[i])
            if image is not None:
                if i == 0:
                    self._expect(image)
                if image.shape == self._images.shape[1:] and image.dtype == self._images.dtype:
                    self._images[i] = image
                else:
                    others[i] = image
            if i == 0 or i in others:
                self._fit(where, others.get(i, self._images[i]).shape, batch, first=i == 0)
        draws = self.transformer.draw(self.batch_size)
        self.transformer.apply(self._images, batch.data, draws)
        for i, image in others.items():
            self.transformer.apply(image[None], batch.data[i : i + 1], draws[i : i + 1])
        batch.state = self.state()

    def _expect(self, image: Array) -> None:
        """Make room for images like this one."""
        if self._images.shape[1:] != image.shape or self._images.dtype != image.dtype:
            self._images = np.zeros((self.batch_size, *image.shape), image.dtype)

    def _fit(self, where: object, shape: Shape, batch: Batch, first: bool) -> None:
        """Shape the batch by its first image; DataError for one that does not fit."""
        try:
            becomes = self.transformer.output_shape(shape)
        except CaffeError as error:
            raise DataError(f"{self.name(where)}: {error.message}") from None
        if first:
            batch.reshape(becomes)
        elif becomes != batch.data.shape[1:]:
            start = shape_string(self._images.shape[1:])
            raise DataError(f"{self.name(where)} has shape {shape_string(shape)} in a batch that starts with {start}")

    def peek(self) -> Array:
        """The next image (C, H, W), which is not consumed."""
        raise NotImplementedError

    def read(self, into: Array) -> tuple[Any, Array | None, int]:
        """What `name` makes a name of, the next image (C, H, W) or None if it was written to `into`, its label."""
        raise NotImplementedError

    def name(self, where: Any) -> str:
        """An image's name for messages."""
        raise NotImplementedError

    def set_state(self, state: State) -> None:
        """Go where `state` was taken; a state of another kind of source leaves the position as it is."""
        super().set_state(state)
        self.transformer.set_state(state)


class RecordLoader(SequentialLoader):
    """Batches of the Datums of a database."""

    position = frozenset({"record", "key"})

    def __init__(self, source: Source, transformer: Transformer, batch_size: int) -> None:
        super().__init__(transformer, batch_size)
        self._source = source
        self._layout = RawLayout((0, 0, 0))
        self._said = False

    def peek(self) -> Array:
        """The next image (C, H, W), which is not consumed."""
        return self._decode(*self._source.peek())[0]

    def read(self, into: Array) -> tuple[Any, Array | None, int]:
        """Key, the next image or None if it was written to `into`, label."""
        key, record = self._source.read()
        if into.dtype == np.uint8 and into.size:
            if self._layout.shape != into.shape:
                self._layout = RawLayout(into.shape)
            label = self._layout.read(record, into.reshape(-1))
            if label is not None:
                return key, None, label
        return key, *self._decode(key, record)

    def _decode(self, key: memoryview | bytes, record: memoryview | bytes) -> tuple[Array, int]:
        try:
            image, label, encoded = decode(record, self.transformer.decode_mode)
        except DataError as error:
            raise DataError(f"{self.name(key)}: {error.message}") from None
        if not encoded and not self._said and (self.transformer.param.force_color or self.transformer.param.force_gray):
            self._said = True
            log.error("force_color and force_gray only for encoded datum")
        return image, label

    def name(self, where: Any) -> str:
        """An image's name for messages."""
        return f"{self._source.path}: record {printable(where)}"

    def state(self) -> State:
        """Number and key of the next record, and the transformer's stream."""
        index, key = self._source.position
        return {"record": index, "key": np.frombuffer(key, np.uint8), **self.transformer.state()}

    def seek(self, state: State) -> None:
        """Go to the position in `state`."""
        self._source.seek(int(state["record"]), np.asarray(state["key"], np.uint8).tobytes())

    def close(self) -> None:
        """Release the database."""
        self._source.close()
