"""Blob: a shaped pair of arrays, data and diff, that stay where they are between iterations.

Memory is allocated and zeroed on first touch, grows and never shrinks. Blobs that share (`share_data`) hold the same
Memory object, so whatever one writes, reallocates or binds is seen by all.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.errors import ConfigError

Array = NDArray[Any]
MAX_AXES = 32
MAX_COUNT = 2**31 - 1


class Memory:
    """A flat, lazily allocated, zero-initialised array of at least `capacity` elements."""

    __slots__ = ("_array", "capacity", "dtype")

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.capacity = 0
        self._array: Array | None = None

    def reserve(self, count: int) -> None:
        """Make room for `count` elements; larger than before means new, zeroed memory."""
        if count > self.capacity:
            self.capacity = count
            self._array = None

    def bind(self, array: Array) -> None:
        """Use this flat array from now on (a slice of a solver's flat parameters)."""
        assert array.ndim == 1
        assert array.dtype == self.dtype
        self._array, self.capacity = array, array.size

    @property
    def array(self) -> Array:
        """The flat array."""
        if self._array is None:
            self._array = np.zeros(self.capacity, self.dtype)
        return self._array

    @property
    def touched(self) -> bool:
        """Whether the array exists yet; memory that nobody touched is all zeros."""
        return self._array is not None


class _View:
    """A shaped view of a Memory, rebuilt only when the memory or the shape changed."""

    __slots__ = ("base", "memory", "view")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.base: Array | None = None
        self.view: Array | None = None

    def get(self, shape: tuple[int, ...], count: int) -> Array:
        base = self.memory.array
        if self.base is not base or self.view is None:
            self.base, self.view = base, base[:count].reshape(shape)
        return self.view

    def point(self, memory: Memory) -> None:
        self.memory, self.view = memory, None


class Blob:
    """Data and diff of one shape; up to 32 axes, a 0-axis blob is a scalar. Shape sizes are in elements."""

    __slots__ = ("_data", "_diff", "count", "shape")

    def __init__(self, shape: Iterable[int] = (0,), dtype: DTypeLike = np.float32) -> None:
        self._data = _View(Memory(dtype))
        self._diff = _View(Memory(dtype))
        self.shape: tuple[int, ...] = ()
        self.count = 1
        self.reshape(shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of data and diff."""
        return self._data.memory.dtype

    @property
    def data(self) -> Array:
        """The values, an array of the blob's device."""
        return self._data.get(self.shape, self.count)

    @property
    def diff(self) -> Array:
        """The gradient of the loss with respect to `data`, an array of the blob's device."""
        return self._diff.get(self.shape, self.count)

    @property
    def data_memory(self) -> Memory:
        """What holds `data`; shared between blobs that share."""
        return self._data.memory

    @property
    def diff_memory(self) -> Memory:
        """What holds `diff`; shared between blobs that share."""
        return self._diff.memory

    def reshape(self, shape: Iterable[int]) -> None:
        """Take this shape; contents survive as far as the memory suffices, as in Caffe."""
        shape = tuple(int(d) for d in shape)
        if shape == self.shape and self.count <= self._data.memory.capacity:
            return
        if len(shape) > MAX_AXES:
            raise ConfigError(f"a blob has at most {MAX_AXES} axes, not {len(shape)}")
        count = prod(shape)
        if count > MAX_COUNT or min(shape, default=0) < 0:
            raise ConfigError(
                f"blob shape {shape_string(shape)} is not possible: sizes are 0 or more, the count below 2^31"
            )
        self.shape, self.count = shape, count
        for view in (self._data, self._diff):
            view.memory.reserve(count)
            view.view = None

    def reshape_like(self, other: "Blob") -> None:
        """Take the other blob's shape."""
        self.reshape(other.shape)

    def share_data(self, other: "Blob") -> None:
        """Use the other blob's data memory; counts must agree, shapes may differ."""
        assert self.count == other.count
        if self._data.memory is not other._data.memory:
            self._data.point(other._data.memory)

    def share_diff(self, other: "Blob") -> None:
        """Use the other blob's diff memory; counts must agree, shapes may differ."""
        assert self.count == other.count
        if self._diff.memory is not other._diff.memory:
            self._diff.point(other._diff.memory)

    def axis(self, index: int) -> int:
        """The axis number in 0..n-1 that `index` (may be negative) names; ConfigError if there is none."""
        n = len(self.shape)
        if not -n <= index < n:
            raise ConfigError(f"axis {index} is out of range for a blob with {n} axes ({shape_string(self.shape)})")
        return index % n

    def legacy_shape(self) -> tuple[int, int, int, int]:
        """num, channels, height, width of a blob with at most 4 axes; missing axes count 1."""
        if len(self.shape) > 4:
            raise ConfigError(f"a blob of at most 4 axes is needed here, not {shape_string(self.shape)}")
        n, c, h, w = self.shape + (1,) * (4 - len(self.shape))
        return n, c, h, w

    def __repr__(self) -> str:
        return f"Blob({shape_string(self.shape)})"


def shape_string(shape: Iterable[int]) -> str:
    """Caffe's form of a shape: each size and a blank, then the count in parentheses, as in `64 3 7 7 (9408)`."""
    shape = tuple(shape)
    return "".join(f"{d} " for d in shape) + f"({prod(shape)})"
