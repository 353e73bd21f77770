"""Blobs as pycaffe's scripts and Python layers see them."""

from collections.abc import Callable, Sequence
from operator import index
from typing import overload

import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Array
from caffepy.device.blob import Blob as Inner


class Blob:
    """A blob as scripts and Python layers see it: numpy arrays `data` and `diff` that may be read
    and written.
    """

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

    @property
    def num(self) -> int:
        """Size of axis 0, 1 if there is none; blobs of up to 4 axes only, like the next three."""
        return self._inner.legacy_shape()[0]

    @property
    def channels(self) -> int:
        """Size of axis 1, 1 if there is none."""
        return self._inner.legacy_shape()[1]

    @property
    def height(self) -> int:
        """Size of axis 2, 1 if there is none."""
        return self._inner.legacy_shape()[2]

    @property
    def width(self) -> int:
        """Size of axis 3, 1 if there is none."""
        return self._inner.legacy_shape()[3]

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

    def __reduce__(self) -> tuple[Callable[[Array, Array], "Blob"], tuple[Array, Array]]:
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
        return (
            wrap_all(self._inner[index]) if isinstance(index, slice) else wrap(self._inner[index])
        )

    def __len__(self) -> int:
        return len(self._inner)

    def add_blob(self, *shape: int) -> None:
        """Append a zero-filled parameter of this shape."""
        self._inner.append(Inner(shape, self._dtype))

    def __reduce__(
        self,
    ) -> tuple[Callable[[list[Blob], DTypeLike], "BlobVec"], tuple[list[Blob], DTypeLike]]:
        return _vector, (list(self), self._dtype)


def _vector(blobs: list[Blob], dtype: DTypeLike) -> BlobVec:
    return BlobVec(unwrap_all(blobs), dtype)


def _address(array: Array) -> int:
    if isinstance(array, np.ndarray):
        raise DeviceError(
            "this blob lies in the host's memory: caffe.set_mode_gpu() before its net is built"
        )
    return int(array.data.ptr)


def wrap(inner: Inner) -> Blob:
    """pycaffe's view of the blob."""
    return Blob(inner)


def wrap_all(inner: Sequence[Inner]) -> list[Blob]:
    """pycaffe's views of the blobs."""
    return [wrap(b) for b in inner]


def unwrap_all(blobs: Sequence[Blob]) -> list[Inner]:
    """The blobs behind pycaffe's views."""
    return [blob._inner for blob in blobs]
