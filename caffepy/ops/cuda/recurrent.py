"""Recurrences over time: for each step a matrix product with the state and one kernel for the
units.

Arrays are (T, N, .) of steps and streams. The contribution of the inputs of all steps is one matrix
product before the loop, the gradients of the weights are one after it.
"""

from typing import Any

import cupy
from numpy.typing import DTypeLike

from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.launch import Array, launch


def _unit(
    a: Array, c_before: Array, cont: Array, c: Array, h: Array, next_cont: Any, kept: Any
) -> None:
    launch("recurrent", "lstm_unit", h, h.size, a, c_before, cont, c, h, next_cont, kept, *h.shape)


def _unit_gradient(
    a: Array, c_before: Array, c: Array, dh: Array, next_cont: Any, rest: Any, dc: Array, da: Array
) -> None:
    launch(
        "recurrent",
        "lstm_unit_gradient",
        dh,
        dh.size,
        a,
        c_before,
        c,
        dh,
        next_cont,
        rest,
        dc,
        da,
        *dh.shape,
    )


def lstm_unit_forward(a: Array, c_before: Array, cont: Array, c: Array, h: Array) -> None:
    _unit(a, c_before, cont, c, h, 0, 0)


def lstm_unit_backward(
    a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array
) -> None:
    _unit_gradient(a, c_before, c, dh, 0, 0, dc, da)


class LSTM:
    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        self._rest, self._dc = cupy.empty((2, streams, size), dtype)

    def forward(
        self,
        a: Array,
        w: Array,
        cont: Array,
        h_first: Array,
        c_first: Array,
        kept: Array,
        h: Array,
        c: Array,
    ) -> None:
        steps = len(h)
        launch("recurrent", "keep", h, h_first.size, h_first, cont, kept, *h_first.shape)
        for t in range(steps):
            matmul(kept[t], w.T, a[t], accumulate=True)
            following = (cont[t + 1], kept[t + 1]) if t + 1 < steps else (0, 0)
            _unit(a[t], c[t - 1] if t else c_first, cont[t], c[t], h[t], *following)

    def backward(
        self, a: Array, w: Array, cont: Array, c_first: Array, c: Array, dy: Array, da: Array
    ) -> None:
        steps = len(dy)
        self._dc.fill(0)
        for t in range(steps - 1, -1, -1):
            before = c[t - 1] if t else c_first
            next_cont, rest = (cont[t + 1], self._rest) if t + 1 < steps else (0, 0)
            _unit_gradient(a[t], before, c[t], dy[t], next_cont, rest, self._dc, da[t])
            if t:
                matmul(da[t], w, self._rest)


class RNN:
    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        self._rest = cupy.empty((streams, size), dtype)

    def forward(self, h: Array, w: Array, cont: Array, h_first: Array, kept: Array) -> None:
        steps = len(h)
        launch("recurrent", "keep", h, h_first.size, h_first, cont, kept, *h_first.shape)
        for t in range(steps):
            matmul(kept[t], w.T, h[t], accumulate=True)
            following = (cont[t + 1], kept[t + 1]) if t + 1 < steps else (0, 0)
            launch("recurrent", "rnn_unit", h, h[t].size, h[t], *following, *h[t].shape)

    def backward(self, h: Array, w: Array, cont: Array, dh: Array) -> None:
        steps = len(h)
        for t in range(steps - 1, -1, -1):
            following = (cont[t + 1], self._rest) if t + 1 < steps else (0, 0)
            launch(
                "recurrent", "rnn_unit_gradient", h, h[t].size, h[t], dh[t], *following, *h[t].shape
            )
            if t:
                matmul(dh[t], w, self._rest)
