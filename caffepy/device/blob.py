"""Blob: a shaped pair of arrays, data and diff, that stay where they are between iterations.

Memory is allocated and zeroed on first touch, grows and never shrinks. Blobs that share
(`share_data`) hold the same Memory object, so whatever one writes, reallocates or binds is seen by
all. On a GPU a Memory has a device array and a host array; reading either copies the newest values
there and marks them as changed there. The device array may have its own Layout; the host's is
float32 in the order of the shape.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.core.errors import ConfigError
from caffepy.device.device import Device

Array = NDArray[Any]
MAX_AXES = 32
MAX_COUNT = 2**31 - 1


class Layout(NamedTuple):
    """Layout of a blob on a GPU: element type (uint16 stands for bfloat16) and order of axes.

    With `channels_last` the elements of a shape (N, C, ...) are stored in the order (N, ..., C).
    """

    dtype: np.dtype[Any]
    channels_last: bool

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """Return the flat array in this shape, by strides if the channels are last."""
        if not self.channels_last or len(shape) < 3:
            return flat.reshape(shape)
        lying: Array = flat.reshape(shape[:1] + shape[2:] + shape[1:2])
        return lying.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))

    def write(self, values: Array, flat: Array) -> None:
        """Write float32 values to a flat numpy array in this layout."""
        narrow = to_bfloat16(values) if self.dtype == np.uint16 else values
        with np.errstate(over="ignore"):
            np.copyto(self.view(flat, values.shape), narrow, casting="same_kind")

    def read(self, flat: Array, values: Array) -> None:
        """Read float32 values from a flat numpy array in this layout."""
        lying = self.view(flat, values.shape)
        values[...] = from_bfloat16(lying) if self.dtype == np.uint16 else lying


PLAIN = Layout(np.dtype(np.float32), False)
"""Caffe's layout, and that of every host array."""


def to_bfloat16(values: Array) -> Array:
    """Return float32 values rounded to bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Return bfloat16 values, stored as uint16, in float32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


class Memory:
    """A flat, lazily allocated array of zeros on the host, of at least `capacity` elements."""

    __slots__ = ("_array", "capacity", "dtype")

    version: ClassVar[int] = 0
    """Grows whenever a blob of the process gets another array or shape: calls that were recorded
    before may be invalid.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.capacity = 0
        self._array: Array | None = None

    def reserve(self, count: int) -> None:
        """Make room for `count` elements; larger than before means new, zeroed memory."""
        Memory.version += 1
        if count > self.capacity:
            self.capacity = count
            self._array = None

    def bind(self, array: Array) -> None:
        """Use this flat array from now on (a slice of a solver's flat parameters)."""
        assert array.ndim == 1
        assert array.dtype == self.layout.dtype
        Memory.version += 1
        self._array, self.capacity = array, array.size

    @property
    def layout(self) -> Layout:
        """Layout of the array."""
        return Layout(self.dtype, False)

    def zeros(self, count: int) -> Array:
        """Return another flat array of zeros of this type on the same device."""
        return np.zeros(count, self.dtype)

    @property
    def array(self) -> Array:
        """Flat array with which layers compute."""
        if self._array is None:
            Memory.version += 1
            self._array = np.zeros(self.capacity, self.dtype)
        return self._array

    def host_of(self, shape: tuple[int, ...]) -> Array:
        """Return the values of a blob of this shape as numpy's array, to read and to write."""
        values: Array = self.array[: prod(shape)].reshape(shape)
        return values

    @property
    def touched(self) -> bool:
        """True if the array exists; else all values are zero."""
        return self._array is not None


class SyncedMemory(Memory):
    """Memory of a GPU with a copy on the host, as Caffe's SyncedMemory.

    `host_of` downloads the values and marks the host's as newer; `array` uploads them again if so.
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
        """Layout of the device array."""
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Change the layout; the values are lost."""
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
        """True if one of the arrays exists."""
        return self._array is not None or self._host is not None

    def bind(self, array: Array) -> None:
        """Use this flat device array, of the layout's type, from now on."""
        super().bind(array)
        self._host, self._host_is_newer = None, False
        self.device.allocation_version += 1

    def zeros(self, count: int) -> Array:
        """Return another flat device array of zeros of this layout's type."""
        return self.device.zeros(count, self.layout.dtype)

    @property
    def array(self) -> Array:
        """Flat device array, up to date."""
        if self._array is None:
            self._array = self.device.zeros(self.capacity, self.layout.dtype)
            self.device.allocation_version += 1
        if self._host_is_newer:
            self.flush()
        return self._array

    def flush(self) -> None:
        """Upload the host's values if they are newer."""
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
        """Return the up-to-date host array of this shape; `array` uploads what is written to it."""
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
        base = self.memory.array  # each time, since it may have to upload the host's values
        view = self.view
        if self.base is not base or view is None:
            view = self.memory.layout.view(base[:count], shape)
            self.base, self.view = base, view
        return view

    def point(self, memory: Memory) -> None:
        Memory.version += 1
        self.memory, self.view = memory, None
        if isinstance(memory, SyncedMemory):
            memory.device.allocation_version += 1


class Blob:
    """Data and diff of one shape, with up to 32 axes; a 0-axis blob is a scalar.

    On a GPU both have a device array beside the host's.
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
        """Values, an array of the blob's device."""
        seen = self._data
        view = seen.view
        if view is None or seen.memory.array is not seen.base:
            return seen.get(self.shape, self.count)
        return view

    @property
    def diff(self) -> Array:
        """Gradient of the loss with respect to `data`, an array of the blob's device."""
        seen = self._diff
        view = seen.view
        if view is None or seen.memory.array is not seen.base:
            return seen.get(self.shape, self.count)
        return view

    @property
    def host_data(self) -> Array:
        """Values as a numpy array to read and to write; on the CPU `data` itself."""
        return self._data.memory.host_of(self.shape)

    @property
    def host_diff(self) -> Array:
        """Gradient as a numpy array to read and to write; on the CPU `diff` itself."""
        return self._diff.memory.host_of(self.shape)

    @property
    def data_memory(self) -> Memory:
        """Memory of `data`; several blobs may share it."""
        return self._data.memory

    @property
    def diff_memory(self) -> Memory:
        """Memory of `diff`; several blobs may share it."""
        return self._diff.memory

    @property
    def layout(self) -> Layout:
        """Layout of data and diff on the device."""
        return self._data.memory.layout

    @property
    def gpu(self) -> Device | None:
        """GPU that holds data and diff; None on the CPU."""
        return self._data.memory.device if isinstance(self._data.memory, SyncedMemory) else None

    def set_layout(self, layout: Layout) -> None:
        """Change the layout on the GPU; another one needs new memory, and values are lost."""
        for view in (self._data, self._diff):
            memory = view.memory
            assert isinstance(memory, SyncedMemory)
            if memory.layout != layout:
                own = SyncedMemory(memory.dtype, memory.device)
                own.set_layout(layout)
                own.reserve(memory.capacity)
                view.point(own)

    def reshape(self, shape: Iterable[int]) -> None:
        """Change the shape; values are kept unless the memory must grow, as in Caffe.

        ConfigError as in `count_of`.
        """
        shape = tuple(int(d) for d in shape)
        if shape == self.shape and self.count <= self._data.memory.capacity:
            return
        self.shape, self.count = shape, count_of(shape)
        for view in (self._data, self._diff):
            view.memory.reserve(self.count)
            view.view = None

    def reshape_like(self, other: "Blob") -> None:
        """Change the shape to that of the other blob."""
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
        """Return the axis 0..n-1 for `index`, maybe negative; ConfigError if there is none."""
        n = len(self.shape)
        if not -n <= index < n:
            raise ConfigError(
                f"axis {index} is out of range for a blob with {n} axes "
                f"({shape_string(self.shape)})"
            )
        return index % n

    def legacy_shape(self) -> tuple[int, int, int, int]:
        """Return num, channels, height, width; missing axes are 1. ConfigError for more than 4."""
        if len(self.shape) > 4:
            raise ConfigError(
                f"a blob of at most 4 axes is needed here, not {shape_string(self.shape)}"
            )
        n, c, h, w = self.shape + (1,) * (4 - len(self.shape))
        return n, c, h, w

    def __repr__(self) -> str:
        return f"Blob({shape_string(self.shape)})"


class HostView:
    """A GPU's blob for a layer that computes on the host: `data` and `diff` are host arrays."""

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blob, name)


def on_host(blobs: Iterable[Blob]) -> list[Blob]:
    """Return host views of the blobs, which do all that a Blob does."""
    return [cast("Blob", HostView(b)) for b in blobs]


def behind(blob: Blob) -> Blob:
    """Return the blob behind a host view, or the blob itself."""
    return blob.blob if isinstance(blob, HostView) else blob


def count_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a blob of this shape.

    ConfigError for more than MAX_AXES axes, a size below 0, or 2^31 elements and more.
    """
    if len(shape) > MAX_AXES:
        raise ConfigError(f"a blob has at most {MAX_AXES} axes, not {len(shape)}")
    count = prod(shape)
    if count > MAX_COUNT or min(shape, default=0) < 0:
        raise ConfigError(
            f"blob shape {shape_string(shape)} is not possible: sizes are 0 or more, the "
            "count below 2^31"
        )
    return count


def shape_string(shape: Iterable[int]) -> str:
    """Return a shape as Caffe prints it: sizes and count, as in `64 3 7 7 (9408)`."""
    shape = tuple(shape)
    return "".join(f"{d} " for d in shape) + f"({prod(shape)})"
