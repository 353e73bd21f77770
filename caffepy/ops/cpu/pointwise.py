"""Convolution with a kernel of one element: matrix products on the planes of the images, a BLAS
call each.

- forward: y (O, P) = w (O, C) @ x (C, P) of an image and group;
- gradient of the data: dx = w.T @ dy;
- gradient of the weights: dw = sum over images of dy @ x.T.

Small planes of several images are laid side by side first, since BLAS is slow on few columns; so
are the elements of x that a larger stride reads. Shapes alone say how the products are cut, so
results do not depend on the number of threads.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import bias_gradient
from caffepy.ops.cpu.compiler import kernel

Sizes = Sequence[int]

COLUMNS = 128  # with fewer, images are laid side by side
MOST = 512  # columns of such a product
ROWS = 128  # of a piece of a product, at least
PIECES = 16  # that keep many threads busy
PARTS = 1 << 21  # elements: the most that parts of the gradient of the weights take
WORK = 200_000  # multiplications for which one more thread pays
COPIED = 1 << 15  # elements likewise


@kernel
def _gather(x: Array, place: Array, to: Array, together: int, lo: int, hi: int) -> None:
    """to[pack, c, i, p] = x[pack * together + i, c, place[p]] for planes [lo, hi) of x."""
    channels = x.shape[1]
    for plane in range(lo, hi):
        n, c = plane // channels, plane % channels
        source, target = x[n, c], to[n // together, c, n % together]
        for p in range(place.size):
            target[p] = source[place[p]]


@kernel
def _spread(y: Array, place: Array, to: Array, together: int, zero: bool, lo: int, hi: int) -> None:
    """The inverse: to[n, c, place[p]] = y[...]; with `zero` the other elements of `to` become 0."""
    channels = to.shape[1]
    for plane in range(lo, hi):
        n, c = plane // channels, plane % channels
        source, target = y[n // together, c, n % together], to[n, c]
        if zero:
            target[:] = 0
        for p in range(place.size):
            target[place[p]] = source[p]


@kernel
def _add_bias(y: Array, b: Array) -> None:
    for o in range(y.shape[0]):
        row, value = y[o], b[o]
        for p in range(row.size):
            row[p] += value


@kernel
def _add_parts(parts: Array, dw: Array, lo: int, hi: int) -> None:
    """dw (K) += the sum of parts (chunks, K)."""
    to, first = dw[lo:hi], parts[0, lo:hi]
    for k in range(1, parts.shape[0]):
        part = parts[k, lo:hi]
        for i in range(to.size):
            first[i] += part[i]
    for i in range(to.size):
        to[i] += first[i]


def suits(w_shape: Sizes, pad: Sizes) -> bool:
    """Return True if `Pointwise` is to compute a convolution with these weights and padding."""
    return prod(w_shape[2:]) == 1 and not any(pad)


class Pointwise:
    """x (N, C, *size), w (O, C/g, 1, ...) -> y (N, O, *out)."""

    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, stride: Sizes, group: int, dtype: DTypeLike
    ) -> None:
        n, c, *size = x_shape
        outputs = w_shape[0]
        out = [(k - 1) // s + 1 for k, s in zip(size, stride, strict=True)]
        self.y_shape = (n, outputs, *out)
        self.dtype = np.dtype(dtype)
        self.images, self.channels, self.outputs, self.group = n, c, outputs, group
        self.plane, self.positions = prod(size), prod(out)
        self.together = 1
        if self.positions < COLUMNS:
            fitting = (k for k in range(1, n + 1) if n % k == 0 and k * self.positions <= MOST)
            self.together = max(fitting, default=1)
        place = np.zeros((), np.intp)  # of the elements that are read, in a plane of x
        for k, (count, s) in enumerate(zip(out, stride, strict=True)):
            place = place[..., None] + np.arange(count) * (s * prod(size[k + 1 :]))
        self.steps_over = self.positions != self.plane
        # Of elements of y, and of x.
        self.places = np.arange(self.positions), place.reshape(-1)

    @property
    def packs(self) -> int:
        """The number of products of a group; the images of one lie side by side."""
        return self.images // self.together

    def _rows(self, channels: int) -> tuple[int, ...]:
        return self.packs, self.group, channels // self.group, self.together * self.positions

    def _side_by_side(self, x: Array, stepping: bool) -> Array:
        """Return x as (packs, g, C/g, columns): itself, or a copy.

        `stepping`: it is x or dx, of which a larger stride leaves elements out.
        """
        channels = x.shape[1]
        if self.together == 1 and not (stepping and self.steps_over):
            return x.reshape(self._rows(channels))
        to = np.empty((self.packs, channels, self.together, self.positions), self.dtype)
        flat = x.reshape(self.images, channels, -1)
        planes = self.images * channels
        run = partial(_gather, flat, self.places[stepping], to, self.together)
        parallel(run, planes, 1 + COPIED // self.positions)
        return to.reshape(self._rows(channels))

    def _product(self, w: Array, x: Array, b: Array | None, y: Array, stepping: bool) -> None:
        """y = w (g, M, K) @ x (packs, g, K, columns) + b; `stepping` as for `_side_by_side`."""
        groups, m, k = w.shape
        rows = self._rows(groups * m)
        direct = self.together == 1 and not (stepping and self.steps_over)
        to = y.reshape(rows) if direct else np.empty(rows, self.dtype)
        bias = None if b is None else b.reshape(groups, m)
        cuts = _cut(m, -(-PIECES // (rows[0] * groups)))
        blocks = len(cuts) - 1

        def pieces(lo: int, hi: int) -> None:
            for unit in range(lo, hi):
                which, block = divmod(unit, blocks)
                pack, g = divmod(which, groups)
                inside = slice(cuts[block], cuts[block + 1])
                np.matmul(w[g, inside], x[pack, g], out=to[pack, g, inside])
                if bias is not None:
                    _add_bias(to[pack, g, inside], bias[g, inside])

        units = rows[0] * groups * blocks
        parallel(pieces, units, 1 + WORK * blocks // (m * k * rows[3]))
        if not direct:
            zero = stepping and self.steps_over
            flat = y.reshape(self.images, groups * m, -1)
            source = to.reshape(self.packs, groups * m, self.together, self.positions)
            run = partial(_spread, source, self.places[stepping], flat, self.together, zero)
            parallel(run, self.images * groups * m, 1 + COPIED // self.plane)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        w = w.reshape(self.group, self.outputs // self.group, -1)
        self._product(w, self._side_by_side(x, True), b, y, False)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        w = w.reshape(self.group, self.outputs // self.group, -1)
        self._product(w.transpose(0, 2, 1), self._side_by_side(dy, False), None, dx, True)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if db is not None:
            bias_gradient(dy, db)
        if dw is None:
            return
        x, dy = self._side_by_side(x, True), self._side_by_side(dy, False)
        packs, groups, m, columns = dy.shape
        inputs = x.shape[2]
        cuts = _cut(m, PIECES)
        blocks = len(cuts) - 1
        # Chunks of the packs, where rows do not make enough pieces.
        chunks = min(-(-PIECES // (groups * blocks)), 1 + PARTS // dw.size, packs)
        parts = np.empty((chunks, groups, m, inputs), self.dtype)

        def pieces(lo: int, hi: int) -> None:
            for unit in range(lo, hi):
                which, block = divmod(unit, blocks)
                chunk, g = divmod(which, groups)
                inside = slice(cuts[block], cuts[block + 1])
                part, product = parts[chunk, g, inside], None
                first, end = packs * chunk // chunks, packs * (chunk + 1) // chunks
                np.matmul(dy[first, g, inside], x[first, g].T, out=part)
                for pack in range(first + 1, end):
                    product = np.matmul(dy[pack, g, inside], x[pack, g].T, out=product)
                    part += product

        units = chunks * groups * blocks
        parallel(pieces, units, 1 + WORK * units // (packs * groups * m * inputs * columns))
        run = partial(_add_parts, parts.reshape(chunks, -1), dw.reshape(-1))
        parallel(run, dw.size, COPIED)


def _cut(rows: int, most: int) -> list[int]:
    """Return the bounds of at most `most` pieces of this many rows, none of fewer than ROWS."""
    pieces = max(1, min(most, rows // ROWS))
    return [rows * i // pieces for i in range(pieces + 1)]
