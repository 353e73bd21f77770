"""MemoryData and DummyData, whose values come from no file."""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array, Blob, shape_string
from caffepy.layer.base import Blobs, layer
from caffepy.layer.feed import Feed
from caffepy.layer.filler import fill
from caffepy.proto.caffe_pb2 import FillerParameter

T = TypeVar("T")


@layer("MemoryData")
class MemoryData(Feed):
    """-> (N, C, H, W), labels (N, 1, 1, 1): arrays of `reset`, endlessly, or images of `add`."""

    tops = 2
    fixed_batch = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.memory_data_param
        self._shape = param.channels, param.height, param.width
        self.batch_size = param.batch_size
        if not self.batch_size * prod(self._shape):
            raise ConfigError(
                "memory_data_param needs batch_size, channels, height and width of 1 or more"
            )
        transform = self.param.transform_param
        self._transformer = Transformer(transform, self.phase, self.device, self.path)
        self._data: Array | None = None
        # Where the random stream stood before the images were added.
        self._before: dict[str, Any] | None = None
        self._unread = False
        self._restored = 0  # where to go on in arrays that are still to come
        top[0].reshape((self.batch_size, *self._shape))
        top[1].reshape((self.batch_size,))

    def reset(self, data: Array, labels: Array) -> None:
        """Take arrays (n, C, H, W) and (n, ...) as they are.

        DataError for other shapes, or if the batch size does not divide n.
        """
        n = len(data)
        if data.shape[1:] != self._shape:
            raise DataError(
                f"arrays of shape {shape_string(data.shape[1:])} for a layer of "
                f"{shape_string(self._shape)}"
            )
        if not n or n % self.batch_size or len(labels) != n:
            raise DataError(
                f"{n} arrays and {len(labels)} labels; give a multiple of the batch size "
                f"{self.batch_size}"
            )
        self._data, self._labels = data, np.reshape(labels, (n, -1))[:, 0]
        self._position, self._restored, self._unread = self._restored % n, 0, True
        self._before = None

    def add(self, images: Array, labels: Array) -> None:
        """Take images (n, C, H, W), which are transformed, and labels (n, ...).

        DataError if earlier ones were not used up, and as `reset` raises it.
        """
        if self._unread:
            raise DataError("images cannot be added before those given earlier were used up")
        before = self._transformer.state()
        out = np.empty((len(images), *self._transformer.output_shape(images.shape[1:])), self.dtype)
        self._transformer.apply(images, out, self._transformer.draw(len(images)))
        self.reset(out, labels)
        self._before = before

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._need_data()
        top[1].reshape((self.batch_size, 1, 1, 1))
        self.hand_over(top, self._next)
        self._unread = self._position > 0

    def skip(self, batches: int) -> None:
        self._position = (self._position + batches * self.batch_size) % len(self._need_data())
        self._unread = self._position > 0

    def _need_data(self) -> Array:
        if self._data is None:
            raise DataError("MemoryData needs data before forward; call set_input_arrays")
        return self._data

    def _next(self, arrays: Sequence[Array]) -> None:
        assert self._data is not None
        here = slice(self._position, self._position + self.batch_size)
        data, labels = arrays
        data[...], labels[:, 0, 0, 0] = self._data[here], self._labels[here]
        self._position = here.stop % len(self._data)

    def state(self) -> dict[str, Any]:
        """Position in the arrays, and the random stream of `add`, as it was before the images that
        are being read.
        """
        if self._data is None:
            return {"position": self._restored, **self._transformer.state()}
        before = self._before if self._unread else None
        random = self._transformer.state() if before is None else before
        return {"position": self._position, **random}

    def set_state(self, state: dict[str, Any]) -> None:
        """Return to where `state` was taken, in the present arrays or in the next ones."""
        super().set_state(state)
        self._restored = int(state.get("position", 0))
        self._transformer.set_state(state)
        if self._data is not None:
            self._position, self._restored = self._restored % len(self._data), 0
            self._unread = self._position > 0


STATIC, FRESH = range(2)
"""Kinds of random streams of DummyData."""

SIZES = ("num", "channels", "height", "width")


@layer("DummyData")
class DummyData(Feed):
    """-> tops of given shapes: constants, which are filled once, or new random values at each
    forward.

    NVCaffe's fillers whose names end in "static" fill at the first forward of each net only. The
    layer has a random stream of its own, since several solvers share it.
    """

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        fillers = list(self.param.dummy_data_param.data_filler) or [FillerParameter()]
        self._fillers = _each("data_filler", fillers, len(top))
        self._filled: list[Blob] = []
        self._draws = any(filler.type != "constant" for filler in self._fillers)
        self._has_fresh = any(map(_is_fresh, self._fillers))
        self.data_stay = not self._has_fresh
        self._seed = self.device.draw_seed() if self._draws else 0
        self._batch = 0
        for blob, shape in zip(top, self._shapes(len(top)), strict=True):
            blob.reshape(shape)

    def _shapes(self, tops: int) -> list[tuple[int, ...]]:
        param = self.param.dummy_data_param
        legacy = [list(getattr(param, name)) for name in SIZES]
        if not any(legacy):
            return _each("shape", [tuple(shape.dim) for shape in param.shape], tops)
        if param.shape:
            raise ConfigError(
                "dummy_data_param takes either shape or num, channels, height and width, not both"
            )
        sizes = [_each(name, given, tops) for name, given in zip(SIZES, legacy, strict=True)]
        return list(zip(*sizes, strict=True))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Fill untouched tops that have constant fillers; what a user writes to them stays."""
        constant = (filler for filler in self._fillers if filler.type == "constant")
        for blob, filler in zip(self.tops_of_user(top), constant, strict=True):
            if not blob.data_memory.touched:
                fill(blob, filler, self.device.rng)

    def tops_of_user(self, top: Blobs) -> Blobs:
        pairs = zip(top, self._fillers, strict=True)
        return [blob for blob, filler in pairs if filler.type == "constant"]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        fresh = []
        for blob, filler in zip(top, self._fillers, strict=True):
            if filler.type.endswith("static") and not any(known is blob for known in self._filled):
                fill(blob, filler, self._rng(STATIC, len(self._filled) + self._filled_elsewhere()))
                self._filled.append(blob)
            elif _is_fresh(filler):
                fresh.append((blob, filler))
        if fresh:
            rng = self._rng(FRESH, self._batch)

            def draw(arrays: Sequence[Array]) -> None:
                for array, (_, filler) in zip(arrays, fresh, strict=True):
                    fill(array, filler, rng)
                self._batch += 1

            self.hand_over([blob for blob, _ in fresh], draw)

    def _filled_elsewhere(self) -> int:
        """Number of tops that are filled once in other processes, by nets before this one."""
        turns = self.deal[: self.turn + 1]
        nets = sum(turn.before for turn in turns) + sum(turn.after for turn in turns[:-1])
        return nets * sum(filler.type.endswith("static") for filler in self._fillers)

    def skip(self, batches: int) -> None:
        self._batch += batches * self._has_fresh

    def _rng(self, kind: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.MT19937([self._seed, kind, number]))

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "batch": self._batch} if self._draws else {}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if self._draws and "seed" in state:
            self._seed, self._batch = int(state["seed"]), int(state["batch"])


def _is_fresh(filler: FillerParameter) -> bool:
    """True if each forward draws new values."""
    return filler.type != "constant" and not filler.type.endswith("static")


def _each(name: str, values: list[T], tops: int) -> list[T]:
    """Return a value for each top: the same for all if one is given."""
    if len(values) not in (1, tops):
        raise ConfigError(
            f"{name} must be given once or once for each top, not {len(values)} times for {tops} "
            "tops"
        )
    return values * tops if len(values) == 1 else values
