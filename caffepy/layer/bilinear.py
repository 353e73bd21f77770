"""Compact bilinear pooling: a sketch of all products of two channels (Gao et al. 2016)."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer

MOST = 2**20
"""The largest num_output: tables of the products that each output sums are in memory."""


@layer("CompactBilinear")
class CompactBilinear(Layer):
    """(N, C0, H, W), (N, C1, H, W) -> (N, num_output, 1, 1), or (..., H, W) without sum_pool.

    y[k] = sum over the places, and over the channels i, j with (h0[i] + h1[j]) % num_output = k, of
    s0[i] * s1[j] * x0[i] * x1[j]. The places h and the signs s are those that the fork draws by C's
    rand() of glibc from the seed 1, so that its weights fit.
    """

    on_gpu = True
    can_recompute = True
    bottoms = 2
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.outputs = self.param.compact_bilinear_param.num_output
        if not 1 <= self.outputs <= MOST:
            raise ConfigError(
                f"compact_bilinear_param needs a num_output of 1 to {MOST}, not {self.outputs}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        a, b = (blob.shape for blob in bottom)
        if len(a) != 4 or len(b) != 4 or (a[0], *a[2:]) != (b[0], *b[2:]):
            raise ConfigError(
                "the bottoms must have shapes (N, C, H, W) that differ in C alone, not "
                f"{list(a)} and {list(b)}"
            )
        sums = self.param.compact_bilinear_param.sum_pool
        top[0].reshape((a[0], self.outputs, *((1, 1) if sums else a[2:])))
        self.places = prod(a[2:])
        self.step = max(self.places, 1) if sums else 1  # places that are summed
        self.channels = a[1], b[1]
        numbers = _numbers_of_c(1)
        (h0, s0), (h1, s1) = (self.drawn(numbers, c) for c in self.channels)
        where = (h0[:, None] + h1) % self.outputs
        self.where, self.signs = self.buffer(where.shape, np.int64), self.buffer(where.shape)
        self.where.host_data[...] = where
        self.signs.host_data[...] = s0[:, None] * s1
        # For each output the products that it sums, in order, then a 0 behind all of them.
        counts = np.bincount(where.reshape(-1), minlength=self.outputs)
        terms = np.full((self.outputs, max(1, counts.max())), where.size)
        order = np.argsort(where, axis=None, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        terms[where.reshape(-1)[order], np.arange(where.size) - first] = order
        self.terms = self.buffer(terms.shape, np.int64)
        self.terms.host_data[...] = terms
        self.products = self.buffer((where.size + 1,))

    def drawn(self, numbers: Iterator[int], channels: int) -> tuple[Array, Array]:
        """Return the places and the signs of the channels of a bottom."""
        places, signs = (
            np.array(list(islice(numbers, channels)), np.int64).reshape(channels) for _ in range(2)
        )
        return places % self.outputs, signs % 2 * 2 - 1

    def factors(self, arrays: Sequence[Array]) -> Iterator[list[Array]]:
        """Yield views (C, places) of what is summed together, each of all the arrays."""
        views = [a.reshape(*a.shape[:2], prod(a.shape[2:])) for a in arrays]
        for n in range(len(arrays[0])):
            for p in range(0, self.places, self.step):
                yield [view[n, :, p : p + self.step] for view in views]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        products = self.products.data[:-1].reshape(self.channels)
        given = self.factors([bottom[0].data, bottom[1].data, top[0].data])
        for x0, x1, y in given:
            self.multiply(x0, x1.T, products)
            np.multiply(products, self.signs.data, out=products)
            np.sum(self.products.data.take(self.terms.data), axis=1, out=y[:, 0])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx0 = d @ x1, dx1 = d.T @ x0, with d = s0 * s1 * dy where the product is added."""
        blobs = [bottom[0].data, bottom[1].data, top[0].diff, bottom[0].diff, bottom[1].diff]
        for x0, x1, dy, dx0, dx1 in self.factors(blobs):
            d = dy[:, 0].take(self.where.data) * self.signs.data
            if propagate_down[0]:
                self.multiply(d, x1, dx0)
            if propagate_down[1]:
                self.multiply(d.T, x0, dx1)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """out = a @ b; without sum_pool of one place, whose channels do not lie side by side."""
        if self.step > 1:
            self.ops.matmul(a, b, out)
        elif len(b) == 1:
            np.multiply(a, b, out=out)
        else:
            np.sum(a * b[:, 0], axis=1, out=out[:, 0])

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return bottoms[0] * self.channels[1]


def _numbers_of_c(seed: int) -> Iterator[int]:
    """Yield what rand() of glibc gives after srand(seed): sums of two earlier numbers."""
    state = [seed]
    while len(state) < 31:
        state.append(16807 * state[-1] % (2**31 - 1))
    for k in range(31, 34):
        state.append(state[k - 31])
    drawn = 34
    while True:
        state.append((state[-3] + state[-31]) % 2**32)
        del state[0]
        drawn += 1
        if drawn > 344:
            yield state[-1] >> 1
