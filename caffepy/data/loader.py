"""Loaders fill batches: most read images one by one, decoded by some threads, and leave it to the
net to cut them.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.core.errors import CaffeError, DataError, RecordError
from caffepy.data.bad_records import BadRecords
from caffepy.data.datum import Record, decode, head_of, opened, planes
from caffepy.data.sources.database import Records, Source, printable
from caffepy.data.transformer import Transformer
from caffepy.device.blob import shape_string

log = logging.getLogger(__name__)

DECODERS = 6
"""At most so many threads decode one batch. They need Python's lock for each image: more of them
wait for it.
"""

Array = NDArray[Any]
State = dict[str, Any]
Shape = tuple[int, ...]


class Staging(Protocol):
    """ops.Staging: arrays on their way to where layers compute."""

    def room(self, layout: Any) -> list[Any]:
        """Arrays to fill."""

    def send(self) -> None:
        """Let what was filled go to the device."""

    def take(self) -> list[Any]:
        """What was sent."""

    def done(self) -> None:
        """What was taken may be overwritten by what is sent next."""


class Batch:
    """Images as they were read and labels on their way to a net, and the state of their Loader
    after them.

    What arrives by `staging`, in the order of ops.transform_batch: images (N, C, H, W), where their
    crops start in rows and columns (N,), whether they are mirrored (N,); then labels (N,). The
    images become (N, C, h, w) = `shape`.
    """

    __slots__ = ("_parts", "dtype", "lane", "shape", "size", "staging", "state")

    def __init__(self, size: int, dtype: DTypeLike, staging: Staging, lane: int = 0) -> None:
        self.lane = lane
        self.size = size
        self.dtype = np.dtype(dtype)
        self.staging = staging
        self.shape: Shape = ()
        self.state: State = {}

    def room(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array (N, *shape) for the images; one that was given before is no longer good."""
        n = (self.size,)
        images, *self._parts = self.staging.room(
            (
                (n + shape, np.dtype(dtype)),
                (n, np.int64),
                (n, np.int64),
                (n, np.bool_),
                (n, self.dtype),
            )
        )
        assert isinstance(images, np.ndarray)
        return images

    def finish(self, shape: Shape, state: State, *parts: Any) -> None:
        """The images are in their room: send them with the other parts."""
        for part, value in zip(self._parts, parts, strict=True):
            part[...] = value
        self.shape, self.state = (self.size, *shape), state
        self.staging.send()


class Loader:
    """Base of the loaders: what a Reader asks of them. `mean` and `scale` are what images become
    net inputs by.
    """

    position: ClassVar[frozenset[str]]  # what a state says of the position
    mean: Array | None = None
    scale = 1.0
    length: int | None = None  # how many images there are, if that is known

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.bad = BadRecords()

    def shape(self) -> Shape:
        """(C, h, w) of the next image of a batch; nothing is consumed."""
        raise NotImplementedError

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images and state what follows it."""
        raise NotImplementedError

    def begin(self, batch: Batch) -> Callable[[], bool] | None:
        """Go past the next images; what is returned fills the batch with them, in any thread, while
        others begin.

        It returns false, or raises an error, where only `load` can fill the batch, from the state
        before. None is returned, and nothing done, where that is known at once.
        """
        return None

    def state(self) -> State:
        """Position and random stream: numbers and arrays."""
        raise NotImplementedError

    def set_state(self, state: State) -> None:
        """Go where `state` was taken; a state of another kind of source leaves the position as it
        is.
        """
        if self.position <= state.keys():
            self.bad.set_state(state)
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

    The first image of a batch decides the shape of the batch; others may differ if a crop makes
    them equal. In the place of bad ones that may be passed over come those that follow.
    """

    def __init__(self, transformer: Transformer, batch_size: int) -> None:
        super().__init__(batch_size)
        self.transformer = transformer
        self.mean, self.scale = transformer.mean, transformer.param.scale

    def shape(self) -> Shape:
        """(C, h, w) of what the next image becomes; nothing is consumed."""
        return self.transformer.output_shape(self._peek().shape)

    def _peek(self) -> Array:
        """The image of the next good item."""
        try:
            return self.peek()
        except DataError as error:
            here = self.state()
            try:
                for _ in range(self.bad.most):
                    self.take(1)
                    with suppress(DataError):
                        return self.peek()
            finally:
                self.seek(here)
            raise RecordError(error.message) from None

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images."""
        items, draws = self._good(self.batch_size), self.transformer.draw(self.batch_size)
        while bad := self._load(batch, items, draws, self.state()):
            for i, error in sorted(bad.items()):
                self.bad.add(
                    self.name(items[i]), DataError(f"{error.message} ({self.place(items[i])})")
                )
            rest = [item for i, item in enumerate(items) if i not in bad]
            items = self.joined([*rest, *self._good(len(bad))])

    def begin(self, batch: Batch) -> Callable[[], bool] | None:
        """Go past the next images; what is returned fills the batch, and returns false if one of
        them is bad.
        """
        items, draws = self._good(self.batch_size), self.transformer.draw(self.batch_size)
        load = partial(self._load, batch, items, draws, self.state())
        return lambda: not load()

    def _good(self, count: int) -> Sequence[Any]:
        """The next items that are not known to be bad."""
        items = self.take(count)
        if not len(self.bad):
            return items
        good, taken = [item for item in items if self.name(item) not in self.bad], count
        while len(good) < count:
            if not good and taken >= (self.length or len(self.bad) + 1):
                raise DataError(f"{self.name(items[0])}: so are all others, bad")
            good += [
                item for item in self.take(count - len(good)) if self.name(item) not in self.bad
            ]
            taken += count
        return self.joined(good)

    def _load(
        self, batch: Batch, items: Sequence[Any], draws: Array, state: State
    ) -> dict[int, DataError]:
        """Fill the batch with these, which `state` follows, or return what is wrong with some, by
        number.
        """
        try:
            first, label = self.decode(items[0])
        except DataError as error:
            return {0: error}
        shape = self._becomes(items[0], first)
        images, labels = batch.room(first.shape, first.dtype), np.zeros(self.batch_size)
        images[0], labels[0] = first, label
        bad: dict[int, DataError] = {}
        others = self._fill(items, images, labels, shape, bad)
        if bad:
            return bad
        if others:
            all_images = [
                others[i] if i in others else image.copy() for i, image in enumerate(images)
            ]
            place = self._cut(batch, all_images, draws)
        else:
            place = self.transformer.place(draws, first.shape[1:])
        batch.finish(shape, state, *place, labels)
        return {}

    def _fill(
        self,
        items: Sequence[Any],
        images: Array,
        labels: Array,
        shape: Shape,
        bad: dict[int, DataError],
    ) -> dict[int, Array]:
        """Decode all items but the first; returns the images of another kind than those that have
        room, by number.

        What is wrong with items that cannot be decoded goes to `bad`.
        """
        from caffepy.device.threads import parallel  # here, since the package loads numba

        todo = 1 + np.flatnonzero(~self.copy(items, images, labels)[1:])
        if not len(todo):
            return {}
        others: dict[int, Array] = {}
        errors: dict[int, CaffeError] = {}
        decode = self.decoder(items)

        def decode_some(lo: int, hi: int) -> None:
            for i in map(int, todo[lo:hi]):
                try:
                    image, labels[i] = decode(i)
                except DataError as error:
                    bad[i] = error
                    continue
                try:
                    if image.shape == images.shape[1:] and image.dtype == images.dtype:
                        images[i] = image
                        continue
                    if self._becomes(items[i], image) != shape:
                        raise self._unlike(items[i], image.shape, images.shape[1:])
                    others[i] = image
                except CaffeError as error:
                    errors[i] = error
                    return

        parallel(decode_some, len(todo), most=DECODERS)
        if errors and min(errors) < min(bad, default=len(items)):
            raise errors[min(errors)]
        return others

    def _unlike(self, item: Any, shape: Shape, first: Shape) -> DataError:
        remedy = "; resize all images to one size, or set crop_size" if shape[0] == first[0] else ""
        start = f"in a batch that starts with {shape_string(first)}"
        return DataError(f"{self.name(item)} has shape {shape_string(shape)} {start}{remedy}")

    def _becomes(self, item: Any, image: Array) -> Shape:
        """What the transformer makes of an image of this shape; DataError for one that does not
        fit.
        """
        try:
            return self.transformer.output_shape(image.shape)
        except CaffeError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None

    def _cut(self, batch: Batch, images: list[Array], draws: Array) -> tuple[Any, Any, Any]:
        """Give the batch images of several types or sizes, of the latter the crops; returns what is
        left to be cut.
        """
        h_off, w_off, mirror = self.transformer.place(draws, [image.shape[1:] for image in images])
        dtype = np.result_type(*images)
        if len({image.shape for image in images}) == 1:
            np.stack(images, out=batch.room(images[0].shape, dtype))
            return h_off, w_off, mirror
        size = self.transformer.crop
        room = batch.room((len(images[0]), size, size), dtype)
        for crop, image, h, w in zip(room, images, h_off, w_off, strict=True):
            crop[...] = image[:, h : h + size, w : w + size]
        return 0, 0, mirror

    def peek(self) -> Array:
        """The next image (C, H, W), which is not consumed."""
        raise NotImplementedError

    def take(self, count: int) -> Sequence[Any]:
        """The next items; what they are is the loader's affair."""
        raise NotImplementedError

    def decode(self, item: Any) -> tuple[Array, int]:
        """An item's image (C, H, W) and label; called by several threads at once."""
        raise NotImplementedError

    def decoder(self, items: Sequence[Any]) -> Callable[[int], tuple[Array, int]]:
        """What decodes one of these items, by number; called by several threads at once."""
        return lambda i: self.decode(items[i])

    def copy(self, items: Sequence[Any], images: Array, labels: Array) -> Array:
        """Fill in images and labels of items that need no decoding; which they are."""
        return np.zeros(len(items), np.bool_)

    def name(self, item: Any) -> str:
        """An item's name for messages."""
        raise NotImplementedError

    def place(self, item: Any) -> str:
        """Which one of the source an item is that was taken for the last batch, in words."""
        raise NotImplementedError

    def joined(self, items: Sequence[Any]) -> Sequence[Any]:
        """These items, taken one by one, as `take` gives several."""
        return items

    def set_state(self, state: State) -> None:
        """Go where `state` was taken; a state of another kind of source leaves the position as it
        is.
        """
        super().set_state(state)
        self.transformer.set_state(state)


class RecordLoader(SequentialLoader):
    """Batches of the Datums of a database."""

    position = frozenset({"record", "key"})

    def __init__(self, source: Source, transformer: Transformer, batch_size: int) -> None:
        super().__init__(transformer, batch_size)
        self._source = source
        self._taken: list[
            tuple[int, Records]
        ] = []  # for the batch being made: the number of the first, and they
        self.length = source.length
        self._said = False

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images."""
        try:
            super().load(batch)
        finally:
            self._taken.clear()

    def begin(self, batch: Batch) -> Callable[[], bool] | None:
        """Go past the next images; what is returned fills the batch, and returns false if one of
        them is bad.
        """
        if not self._source.in_place:  # to go past them is most of the work
            return None
        try:
            return super().begin(batch)
        finally:
            self._taken.clear()

    def peek(self) -> Array:
        """The next image (C, H, W), which is not consumed."""
        return self.decode(self._source.peek())[0]

    def take(self, count: int) -> Records:
        """The next records."""
        start = self._source.position[0]
        self._taken.append((start, self._source.take(count)))
        return self._taken[-1][1]

    def copy(self, items: Sequence[Any], images: Array, labels: Array) -> Array:
        """Fill in the images of raw datums of this shape."""
        if images.dtype != np.uint8:
            return super().copy(items, images, labels)
        from caffepy.data.records import copy_images

        assert isinstance(items, Records)
        return copy_images(items.content, items.rows, head_of(images.shape[1:]), images, labels)

    def decoder(self, items: Sequence[Any]) -> Callable[[int], tuple[Array, int]]:
        """What decodes one of these records, by number; called by several threads at once."""
        from caffepy.data.records import find_encoded

        assert isinstance(items, Records)
        content, (found, numbers) = items.content, find_encoded(items.content, items.rows)
        places, labels, mode = found.tolist(), numbers.tolist(), self.transformer.decode_mode

        def decode_one(i: int) -> tuple[Array, int]:
            start, size = places[i]
            image = opened(content[start : start + size], mode)
            if image is None or image.dtype != np.uint8:
                return self.decode(items[i])
            return planes(image), labels[i]

        return decode_one

    def decode(self, item: tuple[Record, Record]) -> tuple[Array, int]:
        """The image and the label of a key and its datum."""
        try:
            image, label, encoded = decode(item[1], self.transformer.decode_mode)
        except DataError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None
        if (
            not encoded
            and not self._said
            and (self.transformer.param.force_color or self.transformer.param.force_gray)
        ):
            self._said = True
            log.error("force_color and force_gray only for encoded datum")
        return image, label

    def name(self, item: tuple[Record, Record]) -> str:
        """A record's name for messages."""
        return f"{self._source.path}: record {printable(item[0])}"

    def place(self, item: tuple[Record, Record]) -> str:
        """The number of a record."""
        for start, records in reversed(self._taken):
            keys = [bytes(key) for key, _ in records]
            if bytes(item[0]) in keys:
                at = keys.index(bytes(item[0]))
                wrap = next((i for i in range(1, at + 1) if keys[i] <= keys[i - 1]), None)
                return f"number {start + at if wrap is None else at - wrap}"
        return "of unknown number"

    def joined(self, items: Sequence[Any]) -> Records:
        """These records as `take` gives several."""
        return Records.joined(items)

    def state(self) -> State:
        """Number and key of the next record, and the transformer's stream."""
        index, key = self._source.position
        return {
            "record": index,
            "key": np.frombuffer(key, np.uint8),
            **self.transformer.state(),
            **self.bad.state(),
        }

    def seek(self, state: State) -> None:
        """Go to the position in `state`."""
        self._source.seek(int(state["record"]), np.asarray(state["key"], np.uint8).tobytes())

    def close(self) -> None:
        """Release the database."""
        self._source.close()
