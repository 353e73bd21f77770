"""Activations: x, y, dy, dx of one shape; y may be x, dx may be dy."""

from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.protocol.types import Maybe, Seed


class NeuronOps(Protocol):
    def relu_forward(self, x: Array, y: Array, slope: float) -> None:
        """y = x > 0 ? x : slope * x; NaN stays NaN."""

    def relu_backward(self, x: Array, dy: Array, dx: Array, slope: float) -> None:
        """dx = dy * (x > 0 ? 1 : slope); if slope >= 0, x may be the output."""

    def relu6_forward(self, x: Array, y: Array, slope: float) -> None:
        """y = min(x > 0 ? x : slope * x, 6); NaN stays NaN."""

    def relu6_backward(self, x: Array, dy: Array, dx: Array, slope: float) -> None:
        """dx = dy * (x <= 0 ? slope : x < 6 ? 1 : 0); if slope >= 0, x may be the output."""

    def prelu_forward(self, x: Array, y: Array, slope: Array) -> None:
        """y = x > 0 ? x : slope_c * x; x (N, C, P), slope (C) or (1) (He et al. 2015)."""

    def prelu_backward(self, x: Array, dy: Array, slope: Array, dx: Maybe, dslope: Maybe) -> None:
        """dx = dy * (x > 0 ? 1 : slope_c), dslope_c += sum of dy * x over x <= 0."""

    def elu_forward(self, x: Array, y: Array, alpha: float) -> None:
        """y = x > 0 ? x : alpha * (exp(x) - 1) (Clevert et al. 2015)."""

    def elu_backward(self, x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
        """dx = dy * (x > 0 ? 1 : alpha + y); if alpha >= 0, x may be y."""

    def sigmoid_forward(self, x: Array, y: Array) -> None:
        """y = 1 / (1 + exp(-x)), computed as (tanh(x/2) + 1) / 2."""

    def sigmoid_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * y * (1 - y)."""

    def tanh_forward(self, x: Array, y: Array) -> None:
        """y = tanh(x)."""

    def tanh_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (1 - y^2)."""

    def swish_forward(self, x: Array, y: Array, sigmoid: Array, beta: float) -> None:
        """sigmoid = 1 / (1 + exp(-beta * x)), y = x * sigmoid (Ramachandran et al. 2017)."""

    def swish_backward(self, y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
        """dx = dy * (beta * y + sigmoid * (1 - beta * y))."""

    def power_forward(self, x: Array, y: Array, power: float, scale: float, shift: float) -> None:
        """y = (shift + scale * x)^power; NaN for a negative base and a fractional power."""

    def power_backward(
        self, x: Array, dy: Array, dx: Array, power: float, scale: float, shift: float
    ) -> None:
        """dx = dy * power * scale * (shift + scale * x)^(power - 1)."""

    def dropout_forward(
        self, x: Array, y: Array, mask: Array, ratio: float, seed: Seed, step_counter: Maybe = None
    ) -> None:
        """mask = 1 with probability 1 - ratio, a hash of seed and place in memory, the same on CPU
        and GPU; y = x * mask / (1 - ratio).

        `step_counter`, an int64 array without axes, is the number of a pass, read when the kernel
        runs: each pass has another mask.
        """

    def rrelu_forward(
        self,
        x: Array,
        y: Array,
        slope: Array,
        bounds: tuple[float, float],
        seed: Seed,
        step_counter: Maybe = None,
    ) -> None:
        """slope = 1 where x > 0, else 1 / a, a uniform between the bounds: drawn as the mask of
        `dropout_forward`; y = x * slope.
        """

    def dropout_backward(self, dy: Array, mask: Array, dx: Array, ratio: float) -> None:
        """dx = dy * mask / (1 - ratio)."""
