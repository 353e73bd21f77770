"""Recurrences over time: for each step a matrix product with the state and one kernel for the
units.

Arrays are (T, N, .) of steps and streams. The contribution of the inputs of all steps is one matrix
product before the loop, the gradients of the weights are one after it.
"""

import cupy
from numpy.typing import DTypeLike

from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.launch import Array, launch
from caffepy.ops.objects import States


def _unit(name: str, h: Array, *arrays: Array | None) -> None:
    """Run a kernel with a thread for each element of h (N, H); None where there is no next step."""
    launch("recurrent", name, h, h.size, *arrays, *h.shape)


def lstm_unit_forward(a: Array, c_before: Array, cont: Array, c: Array, h: Array) -> None:
    _unit("lstm_unit", h, a, c_before, cont, c, h, None, None)


def lstm_unit_backward(
    a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array
) -> None:
    _unit("lstm_unit_gradient", dh, a, c_before, c, dh, None, None, dc, da)


class LSTM:
    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        self._rest, self._dc = cupy.empty((2, streams, size), dtype)

    def forward(
        self, a: Array, w: Array, cont: Array, first: States, kept: Array, h: Array, c: Array
    ) -> None:
        h_first, c_first = first
        steps = len(h)
        _unit("keep", h_first, h_first, cont, kept)
        for t in range(steps):
            matmul(kept[t], w.T, a[t], accumulate=True)
            following = (cont[t + 1], kept[t + 1]) if t + 1 < steps else (None, None)
            before = c[t - 1] if t else c_first
            _unit("lstm_unit", h[t], a[t], before, cont[t], c[t], h[t], *following)

    def backward(
        self, a: Array, w: Array, cont: Array, c_first: Array, c: Array, dy: Array, da: Array
    ) -> None:
        steps = len(dy)
        self._dc.fill(0)
        for t in range(steps - 1, -1, -1):
            before = c[t - 1] if t else c_first
            following = (cont[t + 1], self._rest) if t + 1 < steps else (None, None)
            arrays = (a[t], before, c[t], dy[t], *following, self._dc, da[t])
            _unit("lstm_unit_gradient", dy[t], *arrays)
            if t:
                matmul(da[t], w, self._rest)


class RNN:
    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        self._rest = cupy.empty((streams, size), dtype)

    def forward(self, h: Array, w: Array, cont: Array, h_first: Array, kept: Array) -> None:
        steps = len(h)
        _unit("keep", h_first, h_first, cont, kept)
        for t in range(steps):
            matmul(kept[t], w.T, h[t], accumulate=True)
            following = (cont[t + 1], kept[t + 1]) if t + 1 < steps else (None, None)
            _unit("rnn_unit", h[t], h[t], *following)

    def backward(self, h: Array, w: Array, cont: Array, dh: Array) -> None:
        steps = len(h)
        for t in range(steps - 1, -1, -1):
            following = (cont[t + 1], self._rest) if t + 1 < steps else (None, None)
            _unit("rnn_unit_gradient", h[t], h[t], dh[t], *following)
            if t:
                matmul(dh[t], w, self._rest)
