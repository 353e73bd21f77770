"""Blob: a shaped pair of arrays, data and diff, that stay where they are between iterations.

Memory is allocated and zeroed on first touch, grows and never shrinks. Blobs that share
(`share_data`) hold the same Memory object, so whatever one writes, reallocates or binds is seen by
all. On a GPU a Memory has a device array and a host array; whoever asks for one of them gets the
newest values there, and is taken to change them. The device array may have a Layout of its own; the
host's is float32 in the order of the shape.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.core.errors import ConfigError
from caffepy.device.device import Device

Array = NDArray[Any]
MAX_AXES = 32
MAX_COUNT = 2**31 - 1


class Layout(NamedTuple):
    """How a blob lies on a GPU: its element type, where uint16 stands for bfloat16, and the order
    of its axes.

    `channels_last` puts the elements of a shape (N, C, ...) into memory in the order (N, ..., C).
    """

    dtype: np.dtype[Any]
    channels_last: bool

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """The flat array in this shape, by strides if the channels lie last."""
        if not self.channels_last or len(shape) < 3:
            return flat.reshape(shape)
        lying: Array = flat.reshape(shape[:1] + shape[2:] + shape[1:2])
        return lying.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))

    def write(self, values: Array, flat: Array) -> None:
        """Put float32 values into a flat numpy array of this layout."""
        narrow = to_bfloat16(values) if self.dtype == np.uint16 else values
        with np.errstate(over="ignore"):
            np.copyto(self.view(flat, values.shape), narrow, casting="same_kind")

    def read(self, flat: Array, values: Array) -> None:
        """Get the values, in float32, from a flat numpy array of this layout."""
        lying = self.view(flat, values.shape)
        values[...] = from_bfloat16(lying) if self.dtype == np.uint16 else lying


PLAIN = Layout(np.dtype(np.float32), False)
"""As Caffe has it, and every host array here."""


def to_bfloat16(values: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """bfloat16, as uint16, in float32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


class Memory:
    """A flat, lazily allocated, zero-initialised array of at least `capacity` elements, in the
    host's memory.
    """

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
    def layout(self) -> Layout:
        """How the array lies."""
        return Layout(self.dtype, False)

    def zeros(self, count: int) -> Array:
        """Another flat array of zeros of this kind and type, where this memory lies."""
        return np.zeros(count, self.dtype)

    @property
    def array(self) -> Array:
        """The flat array where layers compute."""
        if self._array is None:
            self._array = np.zeros(self.capacity, self.dtype)
        return self._array

    def host_of(self, shape: tuple[int, ...]) -> Array:
        """The values of a blob of this shape as numpy's array, to read and to write."""
        values: Array = self.array[: prod(shape)].reshape(shape)
        return values

    @property
    def touched(self) -> bool:
        """Whether the array exists yet; memory that nobody touched is all zeros."""
        return self._array is not None


class SyncedMemory(Memory):
    """Memory of a GPU with a copy on the host. `array` brings the host's values over if `host` was
    asked for last.
    """

    __slots__ = ("_host", "_host_is_newer", "_layout", "_shape", "device")

    def __init__(self, dtype: DTypeLike, device: Device) -> None:
        super().__init__(dtype)
        self.device = device
        self._layout = Layout(self.dtype, False)
        self._host: Array | None = None
        self._host_is_newer = False
        self._shape: tuple[int, ...] = (0,)  # that of the blob which asked for the host's values

    @property
    def layout(self) -> Layout:
        """How the device array lies."""
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Lie in this layout from now on; the values are lost."""
        if layout != self._layout:
            self._layout = layout
            self._array, self._host, self._host_is_newer = None, None, False

    def reserve(self, count: int) -> None:
        """Make room for `count` elements; larger than before means new, zeroed memory."""
        if count > self.capacity:
            self._host, self._host_is_newer = None, False
            self.device.allocation_version += 1
        super().reserve(count)

    @property
    def touched(self) -> bool:
        """Whether one of the arrays exists yet."""
        return self._array is not None or self._host is not None

    def bind(self, array: Array) -> None:
        """Use this flat device array, of the layout's type, from now on."""
        assert array.ndim == 1
        assert array.dtype == self.layout.dtype
        self._array, self.capacity = array, array.size
        self._host, self._host_is_newer = None, False
        self.device.allocation_version += 1

    def zeros(self, count: int) -> Array:
        """Another flat device array of zeros of this layout's type."""
        return self.device.zeros(count, self.layout.dtype)

    @property
    def array(self) -> Array:
        """The flat device array, up to date."""
        if self._array is None:
            self._array = self.device.zeros(self.capacity, self.layout.dtype)
            self.device.allocation_version += 1
        if self._host_is_newer:
            self.flush()
        return self._array

    def flush(self) -> None:
        """Bring the host's values to the device if they are newer."""
        self.device.dirty.discard(self)
        if not self._host_is_newer:
            return
        assert self._host is not None
        self._host_is_newer = False
        if self._is_plain:
            self.device.upload(self._host, self.array)
            return
        count = prod(self._shape)
        raw = np.empty(count, self.layout.dtype)
        self.layout.write(self._host[:count].reshape(self._shape), raw)
        self.device.upload(raw, self.array[:count])

    @property
    def _is_plain(self) -> bool:
        return self.layout == (self.dtype, False)

    def host_of(self, shape: tuple[int, ...]) -> Array:
        """The host array of a blob of this shape, up to date; what is written to it reaches `array`
        when that is asked for."""
        if self._host is None:
            self._host = np.zeros(self.capacity, self.dtype)
        count = prod(shape)
        values: Array = self._host[:count].reshape(shape)
        if not self._host_is_newer:
            if self._array is not None and self._is_plain:
                self.device.download(self._array, self._host)
            elif self._array is not None:
                raw = np.empty(count, self.layout.dtype)
                self.device.download(self._array[:count], raw)
                self.layout.read(raw, values)
            self._host_is_newer = True
            self.device.dirty.add(self)
        self._shape = shape
        return values


class _View:
    """A shaped view of a Memory, rebuilt only when the memory or the shape changed."""

    __slots__ = ("base", "memory", "view")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.base: Array | None = None
        self.view: Array | None = None

    def get(self, shape: tuple[int, ...], count: int) -> Array:
        base = self.memory.array  # asked for each time: it may have to bring the host's values over
        if self.base is not base or self.view is None:
            self.base, self.view = base, self.memory.layout.view(base[:count], shape)
        return self.view

    def point(self, memory: Memory) -> None:
        self.memory, self.view = memory, None
        if isinstance(memory, SyncedMemory):
            memory.device.allocation_version += 1


class Blob:
    """Data and diff of one shape; up to 32 axes, a 0-axis blob is a scalar. Shape sizes are in
    elements.

    On a `device` that is a GPU they have an array there beside that on the host.
    """

    __slots__ = ("_data", "_diff", "count", "shape")

    def __init__(
        self,
        shape: Iterable[int] = (0,),
        dtype: DTypeLike = np.float32,
        device: Device | None = None,
    ) -> None:
        self._data, self._diff = (
            _View(SyncedMemory(dtype, device) if device and device.is_cuda else Memory(dtype))
            for _ in range(2)
        )
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
    def host_data(self) -> Array:
        """The values as a numpy array to read and to write; on the CPU `data` itself."""
        return self._data.memory.host_of(self.shape)

    @property
    def host_diff(self) -> Array:
        """The gradient as a numpy array to read and to write; on the CPU `diff` itself."""
        return self._diff.memory.host_of(self.shape)

    @property
    def data_memory(self) -> Memory:
        """What holds `data`; shared between blobs that share."""
        return self._data.memory

    @property
    def diff_memory(self) -> Memory:
        """What holds `diff`; shared between blobs that share."""
        return self._diff.memory

    @property
    def layout(self) -> Layout:
        """How data and diff lie where layers compute."""
        return self._data.memory.layout

    @property
    def gpu(self) -> Device | None:
        """The GPU that data and diff lie on; None if they lie on the host."""
        return self._data.memory.device if isinstance(self._data.memory, SyncedMemory) else None

    def set_layout(self, layout: Layout) -> None:
        """Lie in this layout on the GPU from now on, in other memory if it is another; the values
        are lost.
        """
        for view in (self._data, self._diff):
            memory = view.memory
            assert isinstance(memory, SyncedMemory)
            if memory.layout != layout:
                own = SyncedMemory(memory.dtype, memory.device)
                own.set_layout(layout)
                own.reserve(memory.capacity)
                view.point(own)

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
                f"blob shape {shape_string(shape)} is not possible: sizes are 0 or more, the "
                "count below 2^31"
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
        """The axis number in 0..n-1 that `index` (may be negative) names; ConfigError if there is
        none.
        """
        n = len(self.shape)
        if not -n <= index < n:
            raise ConfigError(
                f"axis {index} is out of range for a blob with {n} axes "
                f"({shape_string(self.shape)})"
            )
        return index % n

    def legacy_shape(self) -> tuple[int, int, int, int]:
        """num, channels, height, width of a blob with at most 4 axes; missing axes count 1."""
        if len(self.shape) > 4:
            raise ConfigError(
                f"a blob of at most 4 axes is needed here, not {shape_string(self.shape)}"
            )
        n, c, h, w = self.shape + (1,) * (4 - len(self.shape))
        return n, c, h, w

    def __repr__(self) -> str:
        return f"Blob({shape_string(self.shape)})"


class HostView:
    """A blob of a GPU as a layer that computes on the host sees it: `data` and `diff` are its host
    arrays.
    """

    __slots__ = ("blob",)

    def __init__(self, blob: Blob) -> None:
        self.blob = blob

    @property
    def data(self) -> Array:
        """The blob's host_data."""
        return self.blob.host_data

    @property
    def diff(self) -> Array:
        """The blob's host_diff."""
        return self.blob.host_diff

    def share_data(self, other: "HostView") -> None:
        """Use the other's data memory, as Blob.share_data."""
        self.blob.share_data(other.blob)

    def share_diff(self, other: "HostView") -> None:
        """Use the other's diff memory, as Blob.share_diff."""
        self.blob.share_diff(other.blob)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blob, name)


def on_host(blobs: Iterable[Blob]) -> list[Blob]:
    """The blobs as host views, which do all that a Blob does."""
    return [cast("Blob", HostView(b)) for b in blobs]


def behind(blob: Blob) -> Blob:
    """The blob itself, whether seen through a host view or not."""
    return blob.blob if isinstance(blob, HostView) else blob


def shape_string(shape: Iterable[int]) -> str:
    """Caffe's form of a shape: each size and a blank, then the count in parentheses, as in `64 3 7
    7 (9408)`.
    """
    shape = tuple(shape)
    return "".join(f"{d} " for d in shape) + f"({prod(shape)})"
