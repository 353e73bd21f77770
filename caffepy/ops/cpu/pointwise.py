"""Convolution with a kernel of one element: matrix products on the planes of the images.

- forward: y (O, P) = w (O, C) @ x (C, P) of all images and a group;
- gradient of the data: dx = w.T @ dy;
- gradient of the weights: dw = sum over images of dy @ x.T.

The elements of x that a larger stride reads are laid side by side first.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.recording import release, temporary
from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import bias_gradient
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.gemm import Planes, Product, Transposed, turn

Sizes = Sequence[int]

COPIED = 1 << 15  # elements for which one more thread pays


@kernel
def _gather(x: Array, place: Array, to: Array, lo: int, hi: int) -> None:
    """to[plane, p] = x[plane, place[p]]."""
    for plane in range(lo, hi):
        source, target = x[plane], to[plane]
        for p in range(place.size):
            target[p] = source[place[p]]


@kernel
def _spread(y: Array, place: Array, to: Array, lo: int, hi: int) -> None:
    """The inverse: to[plane, place[p]] = y[plane, p]; the other elements of `to` become 0."""
    for plane in range(lo, hi):
        source, target = y[plane], to[plane]
        target[:] = 0
        for p in range(place.size):
            target[place[p]] = source[p]


def suits(w_shape: Sizes, pad: Sizes) -> bool:
    """Return True if `Pointwise` is to compute a convolution with these weights and padding."""
    return prod(w_shape[2:]) == 1 and not any(pad)


class Pointwise:
    """x (N, C, *size), w (O, C/g, 1, ...) -> y (N, O, *out)."""

    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, stride: Sizes, group: int, dtype: DTypeLike
    ) -> None:
        n, c, *size = x_shape
        out = [(k - 1) // s + 1 for k, s in zip(size, stride, strict=True)]
        self.y_shape = (n, w_shape[0], *out)
        place = np.zeros((), np.intp)  # of the elements that are read, in a plane of x
        for k, (count, s) in enumerate(zip(out, stride, strict=True)):
            place = place[..., None] + np.arange(count) * (s * prod(size[k + 1 :]))
        positions, self.plane = prod(out), prod(size)
        self.place = None if positions == self.plane else place.reshape(-1)
        self.compact = n * c, positions  # of x, without what a larger stride leaves out
        if not prod(self.y_shape) * c:
            return
        inputs, outputs = c // group, w_shape[0] // group
        x = Planes(inputs * positions, c * positions, positions)
        y = Planes(outputs * positions, w_shape[0] * positions, positions)
        counts = group, n, positions
        self.forward_product = Product((outputs, inputs), counts, (x, y), dtype)
        self.data_product = Product((inputs, outputs), counts, (y, x), dtype)
        # The factor with fewer rows is packed.
        self.turned = group, inputs, outputs
        self.packs_x = inputs <= outputs
        sides = [(outputs, y), (inputs, x)]
        (m, a), (k, b) = sides if self.packs_x else sides[::-1]
        size_of = m, k, positions
        self.weight_product = Transposed(size_of, (group, n), (a, b), dtype, not self.packs_x)

    def _compact(self, x: Array) -> Array:
        """Return x without what a larger stride leaves out, to be passed to `_release`."""
        if self.place is None:
            return x
        to = temporary(self.compact, x.dtype)
        run = partial(_gather, x.reshape(len(to), self.plane), self.place, to)
        parallel(run, len(to), 1 + COPIED // self.place.size)
        return to

    def _release(self, x: Array) -> None:
        if self.place is not None:
            release(x)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        x = self._compact(x)
        self.forward_product(w, x, b, y)
        self._release(x)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        g, inputs, outputs = self.turned
        turned = turn(w.reshape(g, outputs, inputs), temporary(self.turned, w.dtype))
        to = dx if self.place is None else temporary(self.compact, dx.dtype)
        self.data_product(turned, dy, None, to)
        release(turned)
        if self.place is not None:
            run = partial(_spread, to, self.place, dx.reshape(len(to), self.plane))
            parallel(run, len(to), 1 + COPIED // self.plane)
            release(to)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if db is not None:
            bias_gradient(dy, db)
        if dw is not None:
            x = self._compact(x)
            self.weight_product(*((dy, x) if self.packs_x else (x, dy)), dw)
            self._release(x)
