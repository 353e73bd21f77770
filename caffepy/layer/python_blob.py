"""Blobs as pycaffe's scripts and Python layers see them."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Array
from caffepy.device.blob import Blob as Inner


def _legacy_size(axis: int) -> property:
    def size(self: "Blob") -> int:
        return self._inner.legacy_shape()[axis]

    return property(size, doc=f"Size of axis {axis}, 1 if there is none; up to 4 axes only.")


class Blob:
    """A blob as scripts and Python layers see it: writable numpy arrays `data` and `diff`."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    @property
    def data(self) -> Array:
        """The values, a writable view."""
        return self._inner.host_data

    @property
    def diff(self) -> Array:
        """The gradients, a writable view."""
        return self._inner.host_diff

    @property
    def shape(self) -> tuple[int, ...]:
        return self._inner.shape

    @property
    def count(self) -> int:
        """The number of elements."""
        return self._inner.count

    num = _legacy_size(0)
    channels = _legacy_size(1)
    height = _legacy_size(2)
    width = _legacy_size(3)

    def reshape(self, *shape: int) -> None:
        self._inner.reshape(map(index, shape))

    @property
    def _gpu_data_ptr(self) -> int:
        """Address of the values on the GPU, in the layout in which the net computes."""
        return _address(self._inner.data)

    @property
    def _gpu_diff_ptr(self) -> int:
        """Address of the gradients on the GPU, in the same layout."""
        return _address(self._inner.diff)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_host, (self.data.copy(), self.diff.copy())


def _on_host(data: Array, diff: Array) -> Blob:
    """Return a blob with memory of its own, for copies and pickles."""
    inner = Inner(data.shape, data.dtype)
    inner.host_data[...], inner.host_diff[...] = data, diff
    return Blob(inner)


class BlobVec(Sequence[Blob]):
    """The parameters of a layer, in order."""

    def __init__(self, inner: list[Inner], dtype: DTypeLike = np.float32) -> None:
        self._inner = inner
        self._dtype = dtype

    @overload
    def __getitem__(self, index: int) -> Blob: ...
    @overload
    def __getitem__(self, index: slice) -> list[Blob]: ...
    def __getitem__(self, index: int | slice) -> Blob | list[Blob]:
        found = self._inner[index]
        return wrap_all(found) if isinstance(found, list) else Blob(found)

    def __len__(self) -> int:
        return len(self._inner)

    def add_blob(self, *shape: int) -> None:
        """Append a zero-filled parameter of this shape."""
        self._inner.append(Inner(shape, self._dtype))

    def append(self, blob: Blob) -> None:
        """Append a blob as a parameter; its memory is not copied."""
        self._inner.append(blob._inner)

    def extend(self, blobs: Iterable[Blob]) -> None:
        """Append several blobs."""
        self._inner.extend(blob._inner for blob in blobs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _vector, (list(self), self._dtype)


def _vector(blobs: list[Blob], dtype: DTypeLike) -> BlobVec:
    return BlobVec(unwrap_all(blobs), dtype)


def _address(array: Array) -> int:
    if isinstance(array, np.ndarray):
        raise DeviceError(
            "this blob lies in the host's memory: caffe.set_mode_gpu() before its net is built"
        )
    return int(array.data.ptr)


def wrap_all(inner: Sequence[Inner]) -> list[Blob]:
    """pycaffe's views of the blobs."""
    return [Blob(b) for b in inner]


def unwrap_all(blobs: Sequence[Blob]) -> list[Inner]:
    """The blobs behind pycaffe's views."""
    return [blob._inner for blob in blobs]
