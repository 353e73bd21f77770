"""Recurrent units."""

from typing import Protocol

from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.ops import objects


class RecurrentOps(Protocol):
    def LSTM(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> objects.LSTM:
        """Make a layer of LSTM units."""

    def RNN(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> objects.RNN:
        """Make a layer of tanh units."""

    def lstm_unit_forward(self, a: Array, c_before: Array, cont: Array, c: Array, h: Array) -> None:
        """c = f c_before + i g, h = o tanh(c), (N, H) each (Hochreiter and Schmidhuber 1997).

        a (N, 4H) holds the sums of the gates i, f, o, g, afterwards their activations: i, o are
        sigmoids, g is a tanh, f is cont (N) times a sigmoid.
        """

    def lstm_unit_backward(
        self, a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array
    ) -> None:
        """da = gradient in the sums of the gates; dc, the gradient in c, becomes that in c_before;
        a as `lstm_unit_forward` left it.
        """
