"""Normalization: x, y, dy, dx (outer, C, inner), means, scales and the like (C)."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.device.blob import Array, Layout
from caffepy.ops import objects
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.types import Maybe, Sizes

Affine = Sequence[Maybe]
"""scale and bias of each channel."""
Terms = tuple[int, float, float, float]
"""size, alpha, beta and k of a local response normalization."""


class NormalizationOps(Protocol):
    def lrn_forward(self, x: Array, y: Array, scale: Maybe, terms: Terms) -> None:
        """s_c = k + alpha/size * sum of x^2 over the `size` channels around c, y = x * s^-beta
        (Krizhevsky et al. 2012); x, y, scale (N, C, ...).

        scale = s for `lrn_backward`; None if the channels lie last.
        """

    def lrn_backward(
        self,
        x: Array,
        y: Array,
        scale: Maybe,
        dy: Array,
        dx: Array,
        terms: Terms,
        relu: bool = False,
        db: Maybe = None,
    ) -> None:
        """dx = dy * s^-beta - 2*alpha*beta/size * x * sum over the window of dy * y / s; dx may be
        dy. s comes from `scale`, or if the channels lie last from x. `relu`: dx = 0 where x <= 0;
        then db[c] += sum of dx[n, c, ...] unless db is None.
        """

    def lrn_max_pool_forward(
        self, x: Array, y: Array, index: Array, terms: Terms, window: Windows
    ) -> None:
        """Compute `lrn_forward` of x (N, C, H, W), then `max_pool_forward`."""

    def lrn_max_pool_backward(
        self,
        x: Array,
        dy: Array,
        index: Array,
        dx: Array,
        terms: Terms,
        window: Windows,
        db: Maybe,
    ) -> None:
        """Compute `max_pool_backward`, then `lrn_backward` with `relu`; dx may be x."""

    def normalize_forward(
        self, x: Array, y: Array, norm: Array, eps: float, absolute: bool
    ) -> None:
        """y = x / norm, the norm (outer, inner) of the channels at each place: sqrt(sum of x^2 +
        eps), or with `absolute` sum of |x| + eps.
        """

    def normalize_backward(
        self, y: Array, norm: Array, dy: Array, dnorm: Maybe, dx: Array, absolute: bool
    ) -> None:
        """dx = (dy - s * sum of y * dy over the channels) / norm + s * dnorm with s = y, or sign(y)
        with `absolute`; dnorm (outer, inner). dx may be dy.
        """

    def scaled_norm_forward(
        self, x: Array, scale: Array, y: Array, norm: Array, eps: float
    ) -> None:
        """y = x / norm * scale, the norm (outer, inner) as of `normalize_forward`, scale (C)."""

    def scaled_norm_backward(
        self,
        x: Array,
        scale: Array,
        norm: Array,
        eps: float,
        dy: Array,
        dx: Maybe,
        dscale: Maybe,
    ) -> None:
        """dx = scale * (dy - u * sum of u * dy over the channels) / norm, u = x / norm, SSD's
        gradient; add sums of u * dy to dscale (C). dx may be dy.
        """

    def batch_norm_statistics(self, x: Array, mean: Array, variance: Array) -> None:
        """Write the mean and biased variance of each channel, sums in float64 on the CPU."""

    def batch_norm_forward(self, x: Array, mean: Array, inverse: Array, y: Array) -> None:
        """y = (x - mean) * inverse; inverse = 1 / standard deviation."""

    def batch_norm_backward(
        self, x: Array, mean: Array, inverse: Array, dy: Array, dx: Array
    ) -> None:
        """dx = (dy - mean(dy) - y * mean(dy * y)) * inverse with y = (x - mean) * inverse, means
        per channel; dx may be dy.
        """

    def batch_norm_prepare(
        self,
        x: Array,
        running: Sequence[Array],
        fraction: float,
        eps: float,
        affine: Affine,
        numbers: Array,
    ) -> None:
        """Write the numbers (4, C) of a batch: mean, inverse = 1 / sqrt(variance + eps), and factor
        and shift such that y = x * factor + shift = (x - mean) * inverse * scale + bias, where
        affine = scale, bias.

        Running sums of means (C) and variances (C) and their weight (1) become sum * fraction +
        mean, sum * fraction + unbiased variance, weight * fraction + 1. An empty x changes nothing.
        """

    def batch_norm_stored(
        self, running: Sequence[Array], eps: float, affine: Affine, numbers: Array
    ) -> None:
        """Write the same numbers from the running sums / their weight, or from 0 if the weight is
        0.
        """

    def mask_size(self, shape: Sizes, layout: Layout) -> int:
        """Return the number of bytes of the bits that `norm_forward` keeps for y of this shape and
        layout; 0 if `norm_backward` reads y instead.
        """

    def norm_forward(
        self,
        x: Array,
        numbers: Array,
        other: Maybe,
        ceiling: float | None,
        y: Array,
        bits: Maybe = None,
    ) -> None:
        """y = x * factor + shift [+ other]; numbers of `batch_norm_prepare`. With a ceiling then
        min(max(y, 0), ceiling): inf for a ReLU.

        bits (`mask_size`, uint8) show `norm_backward` where y lies between 0 and the ceiling.
        """

    def norm_backward(
        self,
        x: Array,
        numbers: Array,
        dys: Sequence[Array],
        y: Maybe,
        ceiling: float | None,
        masked: Maybe,
        dx: Maybe,
        dscale: Maybe,
        dbias: Maybe,
        frozen: bool,
        bits: Maybe = None,
    ) -> None:
        """Compute the gradient of `norm_forward` from the gradients `dys` of its y, one or two.

        g = sum of dys, with a ceiling 0 where y <= 0 or y >= ceiling < inf (y is x * factor +
        shift if it is None; the bits that `norm_forward` kept are read instead of y).
        masked = g, the gradient of `other`; dscale += sums of g * n, dbias += sums of g, where
        n = (x - mean) * inverse. dx = factor * (g - mean(g) - n * mean(g * n)), means per channel,
        or dx = factor * g if the numbers are frozen, that is no function of x.
        masked and dx may be one of dys; masked is needed if there is a y or a second dy.
        """

    def norm_mask(
        self,
        dys: Sequence[Array],
        y: Maybe,
        ceiling: float | None,
        masked: Array,
        bits: Maybe = None,
    ) -> None:
        """Write masked as `norm_backward` does, where there is a y or no ceiling."""

    def norm_sums(self, norm: objects.NormSums) -> None:
        """The first half of `norm_backward` of the gradient that norm.masked holds
        (`objects.NormSums`).
        """

    def norm_gradient(self, x: Array, numbers: Array, line: Array, g: Array, dx: Array) -> None:
        """dx = factor * g + slope * x + rest, with slope and rest of each channel in line (2, C):
        the second half of `norm_backward` after `objects.NormSums`. dx may be g.
        """

    def scale_forward(self, x: Array, scale: Array, bias: Maybe, y: Array) -> None:
        """y = x * scale + bias."""

    def scale_backward(
        self, x: Array, scale: Array, dy: Array, dx: Maybe, dscale: Maybe, dbias: Maybe
    ) -> None:
        """dx = dy * scale; dscale += sums of dy * x, dbias += sums of dy; dx may be dy."""
