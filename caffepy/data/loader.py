"""Loaders fill batches. Most read images one by one, decode them on several threads and leave
cropping, mean and scale to the net's device.

Who calls what, on which thread:

| thread | call | when |
|---|---|---|
| the layer's | `Reader.begin` | on a GPU, while kernels are compiled for the first forward |
| | `Reader.take` | at each forward; the first one starts the reading thread, if none runs |
| | `batch.staging.take`, `.done` | to get the batch on the device; when it was used |
| | `Reader.give_back` | the batch may be filled again |
| | `Reader.stop`, `set_state`, `skip`, `close` | to end the thread and drop what it read ahead |
| reading | `Loader.state` | before each `reserve` and after each `skip` |
| | `Loader.skip(batches)` | where other machines take the next batches |
| | `Loader.reserve(batch)` | for each free batch, in order, if there are filling threads |
| | `Loader.load(batch)` | instead of `reserve`: on few cores, unless `can_reserve`, on a failure |
| | `Loader.load_several(batch, count)` | instead, where a layer takes several batches at a time |
| | `Loader.set_state` | to go back to a batch that could not be filled |
| filling | the result of `reserve` | at once: decodes into `batch.room(...)`, `batch.finish` |
| filling | `Source.decode_jpegs` | once a batch, if threads decode |
| pool | `Source.decode`, `decoder`, `JointLoader.make` | for each image of a batch that is left |
| filling | `Source.image_files`, `Decoders.run` | once a batch, if processes decode |

"Reading" is the thread "caffepy-data" of each Reader, "filling" are its FILL_THREADS threads
"caffepy-fill", "pool" is that of `device.threads`. `reserve` and `load` both go past the images of
a batch; `load` fills it, too, while `reserve` returns a callable that does. `skip` goes past the
images of batches and draws their random numbers, without reading them.

Batches reach the layer in the order in which they were reserved. Each carries the state after it,
so the state of a Reader is exact whatever was read ahead.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import CaffeError, DataError, RecordError
from caffepy.data.decoders import Task, current
from caffepy.data.sources.base import Array, ImageFiles, Items, Source, State
from caffepy.data.transformer import Transformer
from caffepy.device.blob import shape_string
from caffepy.device.threads import parallel
from caffepy.ops.objects import Staging

log = logging.getLogger(__name__)

DECODERS = 6
"""The most threads that decode one batch. They need Python's lock for each image: more of them
wait for it.
"""

Shape = tuple[int, ...]
T = TypeVar("T")


class Batch:
    """Images as they were read and labels on their way to a net, and the state of their Loader
    after them.

    What arrives by `staging`, in the order of ops.transform_batch: images (N, C, H, W), start rows
    and columns of their crops (N,), True where they are mirrored (N,); then the labels: (N,), or
    what else there is for the tops. The images become (N, C, h, w) = `shape`. `rank` is the local
    rank of the device that gets the batch.

    It may hold `count` batches of the net's, one behind the other, each N / count images;
    `state_after(k)` is the state after the first k of them.
    """

    __slots__ = (
        "_parts",
        "count",
        "dtype",
        "rank",
        "shape",
        "size",
        "staging",
        "state",
        "state_after",
        "there",
    )

    def __init__(self, size: int, dtype: DTypeLike, staging: Staging, rank: int = 0) -> None:
        self.rank = rank
        self.hold(size)
        self.dtype = np.dtype(dtype)
        self.staging = staging
        self.shape: Shape = ()
        self.state: State = {}
        self.there: Sequence[int] = ()  # places of images that are on the device already

    def hold(
        self, size: int, count: int = 1, state_after: Callable[[int], State] | None = None
    ) -> None:
        """Hold `size` images from now on, of `count` batches."""
        self.size, self.count = size, count
        self.state_after = state_after or (lambda _: self.state)

    def room(self, shape: Shape, dtype: DTypeLike, labels: Sequence[Shape] | None = None) -> Array:
        """An array (N, *shape) for the images; it replaces one that was returned before. `labels`
        are the shapes of the labels, (N,) unless given.
        """
        n = (self.size,)
        beside: list[tuple[Shape, DTypeLike]] = [(n, t) for t in (np.int64, np.int64, np.bool_)]
        beside += [(label, self.dtype) for label in ([n] if labels is None else labels)]
        images, *self._parts = self.staging.room(((n + shape, np.dtype(dtype)), *beside))
        assert isinstance(images, np.ndarray)
        self.there = ()
        return images

    def finish(self, shape: Shape, state: State, *parts: Any) -> None:
        """Send the images, which are in their room, with the other parts."""
        for part, value in zip(self._parts, parts, strict=True):
            part[...] = value
        self.shape, self.state = (self.size, *shape), state
        self.staging.send(self.there)


_most: ContextVar[int] = ContextVar("most", default=0)


@contextmanager
def tolerating(most: int) -> Iterator[None]:
    """Allow each source that this thread opens in this block to skip `most` bad records."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)


class BadRecords(list[str]):
    """The names of a source's bad records; `most` may be skipped. Each counts once, however often
    it is met; over several machines each counts those that it meets.
    """

    def __init__(self) -> None:
        self.most = _most.get()

    def add(self, name: str, error: DataError) -> None:
        """Skip one more, whose error this is; RecordError if that is one too many."""
        if name in self:
            return
        if len(self) >= self.most:
            skipped = f"; {self.most} bad records were skipped before" if self.most else ""
            raise RecordError(f"{error.message}{skipped}", error.where)
        self.append(name)
        skipped = "Bad record %d of at most %d is skipped: %s"
        log.warning(skipped, len(self), self.most, error.message)

    def state(self) -> State:
        """The names; empty if there are none."""
        return {"bad": list(self)} if self else {}

    def set_state(self, state: State) -> None:
        """Replace the names by those of `state`."""
        self[:] = map(str, state.get("bad", []))


class Loader:
    """The interface of a loader for a Reader. An image x becomes (x - `mean`) * `scale`."""

    state_keys: frozenset[str]  # the keys of `state` without which it cannot be restored
    mean: Array | None = None
    scale = 1.0
    length: int | None = None  # number of images, if known
    can_reserve = False  # `reserve` can be called now

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.bad = BadRecords()

    def shape(self) -> Shape:
        """(C, h, w) of the next image of a batch, which is not consumed."""
        raise NotImplementedError

    def label_shapes(self) -> list[Shape]:
        """The shapes of the labels of a batch, by the next image, which is not consumed."""
        return [(self.batch_size,)]

    def extent(self) -> str:
        """The size of the source and the names of its ends, see `Source.extent`."""
        raise NotImplementedError

    def load(self, batch: Batch) -> None:
        """Fill the batch with the next images and set its state to that after them."""
        raise NotImplementedError

    def load_several(self, batch: Batch, count: int) -> bool:
        """Fill the batch with the images of the next `count` batches; false, and nothing is done,
        unless they can be had at once and each batch would be as any other.
        """
        return False

    def reserve(self, batch: Batch) -> Callable[[], bool]:
        """Reserve the next images; return a callable that fills `batch` with them, on any thread.

        The callable returns false, or raises an error, where only `load` can fill the batch, from
        the state before.
        """
        raise NotImplementedError

    def skip(self, batches: int) -> None:
        """Go past the images and random numbers of `batches` batches, to the state that loading
        them would leave; bad records among them are not found.
        """
        raise NotImplementedError

    def state(self) -> State:
        """Position and random stream: numbers and arrays."""
        raise NotImplementedError

    def set_state(self, state: State) -> None:
        """Go to where `state` was taken; stay if it is of another kind of source."""
        if self.state_keys <= state.keys():
            self.bad.set_state(state)
            self.seek(state)
        else:
            log.warning("the snapshot has no position in the data; starting at the first image")

    def seek(self, state: State) -> None:
        """Go to the position in `state`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the source."""


class SequentialLoader(Loader):
    """Batches of a source's items, one after the other, endlessly.

    The first image of a batch decides the shape of the batch; others may differ if a crop makes
    them equal. Bad items that may be skipped are replaced by those that follow the batch, which
    come again in their turn: no other batch changes, and machines that skip this one need not know.
    """

    def __init__(self, source: Source, transformer: Transformer, batch_size: int) -> None:
        super().__init__(batch_size)
        self.source = source
        self.state_keys = source.state_keys
        self.length = source.length
        self.transformer = transformer
        self.mean, self.scale = transformer.mean, transformer.param.scale
        self._decoders = current()
        self._task: Task | None = None

    def shape(self) -> Shape:
        return self.transformer.output_shape(self._peek(self.source.decode)[0].shape)

    def extent(self) -> str:
        return self.source.extent()

    def _peek(self, decode: Callable[[Any], T]) -> T:
        """The result of `decode` for the next item, or for the first one after it that is good."""
        source = self.source
        try:
            return decode(source.peek())
        except DataError as error:
            here = source.state()
            try:
                for _ in range(self.bad.most):
                    source.take(1)
                    with suppress(DataError):
                        return decode(source.peek())
            finally:
                source.set_state(here)
            raise RecordError(error.message) from None

    def load(self, batch: Batch) -> None:
        items, draws, state = self._next()
        replaced = in_a_row = 0
        while bad := self._fill(batch, items, draws, state):
            for i, error in sorted(bad.items()):
                message = f"{error.message} ({self.source.place(items, i)})"
                self.bad.add(self.source.name(items[i]), DataError(message))
            in_a_row += 0 in bad  # good ones come first: all before it were bad
            if in_a_row >= 2 * (self.length or len(self.bad)):  # so many hold a whole epoch
                raise DataError(f"{self.source.name(items[0])}: so are all others, bad")
            good = items[[i for i in range(len(items)) if i not in bad]]
            items = self.source.join([good, self.source.take(len(bad))])
            state = {**state, **self.bad.state()}
            replaced += len(bad)
        if replaced:
            self.source.set_state(state)

    @property
    def can_reserve(self) -> bool:  # type: ignore[override]
        return self.source.take_is_cheap

    def reserve(self, batch: Batch) -> Callable[[], bool]:
        """Reserve the next images; the callable returns false if one of them is bad."""
        items, draws, state = self._next()
        return lambda: not self._fill(batch, items, draws, state)

    def skip(self, batches: int) -> None:
        self.source.skip(batches * self.batch_size)
        self.transformer.skip(batches * self.batch_size)

    def load_several(self, batch: Batch, count: int) -> bool:
        """Fill the batch with images that need no decoding, of one shape and type."""
        before = self.state()
        try:
            items, draws, state = self._next(count)
            first, label = self.source.decode(items[0])
            shape = self._output_shape(items[0], first)
            batch.hold(len(items))
            images, labels = batch.room(first.shape, first.dtype), np.zeros(len(items))
            images[0], labels[0] = first, label
            is_done = bool(self.source.copy(items, images, labels)[1:].all())
        except CaffeError:  # `load` raises it where the layer meets it
            is_done = False
        if not is_done:
            self.set_state(before)
            return False

        def state_after(batches: int) -> State:
            if batches == count:
                return state
            taken = batches * self.batch_size
            position = self.source.state_at(items, taken)
            return {**state, **position, **self.transformer.state_after(before, taken)}

        batch.hold(len(items), count, state_after)
        batch.finish(shape, state, *self.transformer.place(draws, first.shape[1:]), labels)
        return True

    def _next(self, batches: int = 1) -> tuple[Items, Array, State]:
        """The items of the next batches, their random numbers, and the state after them."""
        count = batches * self.batch_size
        items, draws = self.source.take(count), self.transformer.draw(count)
        return items, draws, self.state()

    def _fill(self, batch: Batch, items: Items, draws: Array, state: State) -> dict[int, DataError]:
        """Fill the batch with these items, or return the errors of bad ones by their place."""
        try:
            first, label = self.source.decode(items[0])
        except DataError as error:
            return {0: error}
        shape = self._output_shape(items[0], first)
        images, labels = batch.room(first.shape, first.dtype), np.zeros(self.batch_size)
        images[0], labels[0] = first, label
        bad: dict[int, DataError] = {}
        others = self._decode(batch, items, images, labels, shape, bad)
        if others and batch.there:  # all are needed on the host
            batch.there = ()
            others = self._decode(batch, items, images, labels, shape, bad, there=False)
        if bad:
            return bad
        if others:
            all_images = [
                others[i] if i in others else image.copy() for i, image in enumerate(images)
            ]
            crops = self._crop(batch, all_images, draws)
        else:
            crops = self.transformer.place(draws, first.shape[1:])
        batch.finish(shape, state, *crops, labels)
        return {}

    def _decode(
        self,
        batch: Batch,
        items: Items,
        images: Array,
        labels: Array,
        shape: Shape,
        bad: dict[int, DataError],
        there: bool = True,
    ) -> dict[int, Array]:
        """Decode all items but the first into `images`, or on the batch's device if they may lie
        `there`; put the errors of bad ones into `bad`.

        Returns by their place the images of another shape or type, which `images` has no room for.
        """
        copied = self.source.copy(items, images, labels)[1:]
        if copied.all():
            return {}
        todo = 1 + np.flatnonzero(~copied)
        others: dict[int, Array] = {}
        errors: dict[int, CaffeError] = {}

        def put(i: int, some: Array, *, copied: bool) -> bool:
            """Put images from place i on; false if they do not fit into the batch."""
            if some.shape[1:] == images.shape[1:] and some.dtype == images.dtype:
                images[i : i + len(some)] = some
                return True
            for k, image in enumerate(some, i):
                try:
                    if self._output_shape(items[k], image) != shape:
                        raise self._unlike(items[k], image.shape, images.shape[1:])
                except CaffeError as error:
                    errors[k] = error
                    return False
                others[k] = image.copy() if copied else image
            return True

        if not self._decoders:
            todo = self.source.decode_jpegs(items, todo, images, labels)
            if not len(todo):
                return {}
        elif files := self.source.image_files(items, todo):
            labels[files.places] = files.labels
            todo = self._decode_elsewhere(batch, files, todo, partial(put, copied=True), there)
        decode = self.source.decoder(items)

        def decode_some(lo: int, hi: int) -> None:
            for i in map(int, todo[lo:hi]):
                try:
                    image, labels[i] = decode(i)
                except DataError as error:
                    bad[i] = error
                    continue
                if not put(i, image[None], copied=False):
                    return

        parallel(decode_some, len(todo), most=DECODERS)
        if errors and min(errors) < min(bad, default=len(items)):
            raise errors[min(errors)]
        return others

    def _decode_elsewhere(
        self,
        batch: Batch,
        files: ImageFiles,
        todo: Array,
        put: Callable[[int, Array], object],
        there: bool,
    ) -> Array:
        """Have a GPU or processes decode image files; return the places of `todo` that are left."""
        assert self._decoders
        if self._task is None:
            self._task = Task(files.make)
        left = set(todo.tolist()) - set(files.places)

        def take(i: int, some: Array | None) -> None:
            if some is None:
                left.add(i)
            else:
                put(i, some)

        if there and files.are_color:
            chosen = files.places, files.files
            batch.there = self._decoders.run_there(*chosen, batch.staging, files.resized)
        done = set(batch.there)
        rest = [k for k, place in enumerate(files.places) if place not in done]
        if rest:
            among = files.parts if files.parts and not self._decoders.on_gpus else files.files
            places, contents = [files.places[k] for k in rest], [among[k] for k in rest]
            self._decoders.run(self._task, places, contents, [None] * len(rest), take)
        return np.array(sorted(left), np.int64)

    def _unlike(self, item: Any, shape: Shape, first: Shape) -> DataError:
        start = f"{shape_string(shape)} in a batch that starts with {shape_string(first)}"
        remedy = "; resize all images to one size, or set crop_size" if shape[0] == first[0] else ""
        return DataError(f"{self.source.name(item)} has shape {start}{remedy}")

    def _output_shape(self, item: Any, image: Array) -> Shape:
        """The transformed shape of an image; DataError for one that does not fit."""
        try:
            return self.transformer.output_shape(image.shape)
        except CaffeError as error:
            raise DataError(f"{self.source.name(item)}: {error.message}") from None

    def _crop(self, batch: Batch, images: list[Array], draws: Array) -> tuple[Any, Any, Any]:
        """Copy images of several types or sizes to the batch; those of several sizes are cropped.

        Returns the crops and mirrors that are left to `transform_batch`.
        """
        h_off, w_off, mirror = self.transformer.place(draws, [image.shape[1:] for image in images])
        dtype = np.result_type(*images)
        if len({image.shape for image in images}) == 1:
            np.stack(images, out=batch.room(images[0].shape, dtype))
            return h_off, w_off, mirror
        assert self.transformer.crop  # or they would have one shape
        height, width = self.transformer.crop
        room = batch.room((len(images[0]), height, width), dtype)
        for crop, image, h, w in zip(room, images, h_off, w_off, strict=True):
            crop[...] = image[:, h : h + height, w : w + width]
        return 0, 0, mirror

    def state(self) -> State:
        return {**self.source.state(), **self.transformer.state(), **self.bad.state()}

    def seek(self, state: State) -> None:
        self.source.set_state(state)

    def set_state(self, state: State) -> None:
        super().set_state(state)
        self.transformer.set_state(state)

    def close(self) -> None:
        self.source.close()


class JointLoader(SequentialLoader):
    """Batches of images that are transformed on the host together with their labels; mean and scale
    are left to the net's device.

    A subclass has `make` and `pack`.
    """

    def __init__(self, source: Source, transformer: Transformer, batch_size: int) -> None:
        super().__init__(source, transformer, batch_size)
        self._mean_image: Array | None = None
        if self.mean is not None and self.mean.shape[1:] != (1, 1):
            self._mean_image, self.mean = self.mean, None  # it belongs to pixels before the crop
        if self._decoders:
            ways = "images are decoded by threads; other ways are for Data, ImageData, WindowData"
            log.warning("%s: %s", source.path, ways)
            self._decoders = None

    def crop(self, pixels: Array, draws: Array) -> tuple[Array, int, int, bool]:
        """An image (C, h, w), cropped and mirrored; the column and the row at which its crop began,
        and True if it is mirrored. ConfigError or DataError if it does not fit.
        """
        _, h, w = self.transformer.output_shape(pixels.shape)
        if self._mean_image is not None:
            pixels = pixels - self._mean_image
        tops, lefts, mirrored = self.transformer.place(draws[None], pixels.shape[1:])
        top, left, is_mirrored = int(tops[0]), int(lefts[0]), bool(mirrored[0])
        pixels = pixels[:, top : top + h, left : left + w]
        return pixels[:, :, ::-1] if is_mirrored else pixels, left, top, is_mirrored

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        """An image (C, h, w) and its label, from an item and its random numbers; `first` are those
        of the batch's first item. DataError names the item. Any thread may call it.
        """
        raise NotImplementedError

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        """The labels of a batch as they go to the tops, from what `make` returned."""
        raise NotImplementedError

    def load_several(self, batch: Batch, count: int) -> bool:
        return False

    def _fill(self, batch: Batch, items: Items, draws: Array, state: State) -> dict[int, DataError]:
        n = len(items)
        made: list[tuple[Array, Any]] = [(np.empty(0), None)] * n
        bad: dict[int, DataError] = {}

        def make_some(lo: int, hi: int) -> None:
            for i in range(lo, hi):
                try:
                    made[i] = self.make(items[i], draws[i], draws[0])
                except DataError as error:
                    bad[i] = error

        parallel(make_some, n, most=DECODERS)
        if bad:
            return bad
        images = [image for image, _ in made]
        shape = images[0].shape
        for i, image in enumerate(images):
            if image.shape != shape:
                raise self._unlike(items[i], image.shape, shape)
        labels = self.pack([label for _, label in made])
        room = batch.room(shape, np.result_type(*images), [label.shape for label in labels])
        np.stack(images, out=room)
        batch.finish(shape, state, 0, 0, False, *labels)
        return {}
