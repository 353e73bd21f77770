"""Weights and images rearranged for cuDNN where the channels lie last.

Weights are float32 in Caffe's order; cuDNN gets the arrays' type and the order (O, *kernel, C).
What is made of them, or of an image, stays valid until the next call.
"""

from collections.abc import Sequence
from math import prod

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.compiler import prefetch
from caffepy.ops.cuda.copies import convert
from caffepy.ops.cuda.graphs import Geometry, Shape
from caffepy.ops.cuda.launch import TYPES, Array, divisor, launch, launch_blocks, packs

TILE = 4096
"""Floats of a tile, as in filters.cu."""

TAPS, FLAT = 64, 1024
"""Most taps of a tile; weights of a tile if nothing is transposed."""

CHUNK = 16
"""Tensor cores want pixels whose channels are a multiple of this many bytes."""


class Filters:
    """The weights of a convolution as cuDNN wants them: a row for each output.

    Tap t of the channels begins at `places[t]` of a row of the shape `row`. If `dense`, the groups
    lie side by side in the rows, with zeros for the channels of other groups.
    """

    def __init__(
        self, geometry: Geometry, dtype: DTypeLike, row: Shape, places: Sequence[int], dense: bool
    ) -> None:
        outputs, channels, taps = geometry.w[0], geometry.w[1], prod(geometry.w[2:])
        self.dtype, self.outputs = np.dtype(dtype), outputs
        self.shape = (outputs, *row)
        self._places = list(places)
        share, shift = (outputs // geometry.group, channels) if dense else (outputs, 0)
        turned = min(channels, taps) > 1 or prod(row) > channels * taps
        self._same_order = not turned
        self._as_they_are = not turned and self.dtype == np.float32
        self.ahead = False  # what `take` would make is there
        if turned:
            across = min(taps, TAPS)
            most = TILE // (across | 1) // 32 * 32
            down = -(-channels // -(-channels // most))
            down = min(channels, -(-down // 32) * 32)
        else:
            outputs, channels, taps = 1, outputs * channels * taps, 1
            across, down = 1, FLAT
        self._blocks = outputs * -(-channels // down) * -(-taps // across)
        even = not any(n % 2 for n in (down, channels, prod(row), shift, *places))
        sizes = (outputs, channels, taps, prod(row), share, shift, down, across)
        self._sizes = (*sizes, int(even), divisor(max(1, down // 2)))
        kind = TYPES[self.dtype.name]
        prefetch("filters", [f"turn<{kind}>", f"add_{'turned' if turned else 'same'}<{kind}>"])
        self.forget()

    def forget(self) -> None:
        """Free the memory."""
        self._memory: tuple[Array, Array, Array] | None = None

    def _kept(self) -> tuple[Array, Array, Array]:
        """Return weights and bias for cuDNN, zeros at first, and the places."""
        if self._memory is None:
            w = cupy.zeros(0 if self._as_they_are else self.shape, self.dtype)
            bias, places = cupy.zeros(self.outputs, self.dtype), cupy.array(self._places, np.int32)
            self._memory = w, bias, places
        return self._memory

    def kept(self, w: Array) -> Array:
        """Return what `take` made last of these weights."""
        return w if self._as_they_are else self._kept()[0]

    def take(self, w: Array, b: Array | None) -> tuple[Array, Array]:
        """Return weights and bias in their new type and order; without a bias, zeros."""
        turned, bias, places = self._kept()
        if self._as_they_are:
            return w, bias if b is None else b
        narrow = b is not None and self.dtype != np.float32
        if self.ahead and not narrow:
            return turned, bias if b is None else b
        if self._same_order and not narrow:
            convert(w.reshape(-1), turned.reshape(-1))
            return turned, bias if b is None else b
        arrays = (w, turned, b if narrow else None, bias, self.outputs, places)
        launch_blocks("filters", "turn", turned, self._blocks, *arrays, *self._sizes)
        return turned, bias if b is None or narrow else b

    def add(self, turned: Array, dw: Array) -> None:
        """dw += a gradient in the type and order of the weights for cuDNN."""
        if self._same_order:
            launch("filters", "add_same", turned, -(-dw.size // 4), turned, dw, dw.size)
            return
        arguments = (turned, dw, self._kept()[2], *self._sizes)
        launch_blocks("filters", "add_turned", turned, self._blocks, *arguments)


def plain_filters(geometry: Geometry, dtype: DTypeLike) -> Filters:
    """Return the weights in the order (O, *kernel, C/g)."""
    channels, kernel = geometry.w[1], geometry.w[2:]
    places = range(0, prod(kernel) * channels, channels)
    return Filters(geometry, dtype, (*kernel, channels), places, False)


def dense_filters(geometry: Geometry, dtype: DTypeLike) -> tuple[Geometry, Filters]:
    """Return an equal convolution without groups and its weights (O, *kernel, C), mostly zeros."""
    channels, kernel = geometry.x[1], geometry.w[2:]
    places = range(0, prod(kernel) * channels, channels)
    whole = geometry._replace(w=(geometry.w[0], channels, *kernel))
    return whole, Filters(geometry, dtype, (*kernel, channels), places, True)


class Blocks:
    """An image whose pixels are blocks of another's, as large as the stride (space to depth).

    A convolution with stride becomes one without, of fewer pixels with more channels; the padding
    becomes part of the image. Without stride, the pixels only get channels of zeros, up to a
    multiple of CHUNK.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        (n, c, *size), (outputs, _, *taps), out = geometry.x, geometry.w, geometry.y[2:]
        down, across = stride = geometry.stride
        chunk = CHUNK // self.dtype.itemsize
        depth = -(-c * prod(stride) // chunk) * chunk
        padding = geometry.padding
        if prod(stride) > 1:
            taps = [-(-k // s) for k, s in zip(taps, stride, strict=True)]
            size = [o + k - 1 for o, k in zip(out, taps, strict=True)]
            padding = (0, 0)
        x, w = (n, depth, *size), (outputs, depth, *taps)
        self.geometry = Geometry(x, w, geometry.y, (1, 1), padding, geometry.dilation)
        kh, kw = geometry.w[2:]
        places = [
            (u // down * taps[1] + v // across) * depth + (u % down * across + v % across) * c
            for u in range(kh)
            for v in range(kw)
        ]
        self.filters = Filters(geometry, dtype, (*taps, depth), places, False)
        pad, before = (p - q for p, q in zip(geometry.padding, padding, strict=True))
        line = geometry.x[3] * c
        run, packs_of_pixel = across * c, depth * self.dtype.itemsize // 16
        sizes = (geometry.x[2], line, down, run, pad, before * c, *size, depth)
        self._sizes = (*sizes, *map(divisor, (packs_of_pixel, size[1], size[0], run)))
        prefetch("filters", [f"gather_blocks<{TYPES[self.dtype.name]}>"])
        self.forget()

    def forget(self) -> None:
        """Free the memory."""
        self.kept: Array | None = None

    def take(self, x: Array) -> Array:
        """Return the image in blocks."""
        if self.kept is None:
            n, depth, *size = self.geometry.x
            self.kept = cupy.empty((n, *size, depth), self.dtype)
        arguments = (x, self.kept, self.kept.size, *self._sizes)
        launch("filters", "gather_blocks", x, packs(self.kept), *arguments)
        return self.kept


def suits_blocks(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if there are so few channels that cuDNN would pad pixels itself."""
    chunk = CHUNK // np.dtype(dtype).itemsize
    strided = prod(geometry.stride) > 1
    return (
        geometry.group == 1
        and len(geometry.stride) == 2
        and geometry.x[1] % chunk > 0
        and geometry.x[1] * prod(geometry.stride) <= 64
        and not (strided and prod(geometry.dilation) > 1)
    )
