"""Fully connected layers, and products of matrices."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array, Blob, Layout
from caffepy.device.streams import UPDATE
from caffepy.layer.base import Blobs, Layer, Weighted, layer
from caffepy.proto.caffe_pb2 import FillerParameter, MarginInnerProductParameter

log = logging.getLogger(__name__)

AHEAD = 1 << 26
"""Multiplications of a product from which on its weight is converted ahead: smaller ones convert it
themselves.
"""


class Factors(Protocol):
    """Computes the mean over several solvers of the gradient of a layer's weight."""

    def __call__(self, dy: Array, x: Array) -> None:
        """Take this solver's factors of dy.T @ x: dy (M, O), x (M, K); may overwrite them."""


@layer("InnerProduct")
class InnerProduct(Weighted):
    """(*outer, *inner) -> (*outer, O), the axes from `axis` on as one of size K; weight (O, K) or,
    transposed, (K, O).

    y = x @ w.T + b. If the bottom has a narrower type than the weight, products are in that type.
    With happynear's `normalize` each forward pass divides the weights of an output by their norm;
    the gradient, as its, knows nothing of that.
    """

    on_gpu = True
    can_recompute = True
    seeks_preferred_layout = True
    is_matrix_product = True
    backward_reads_top = False
    narrowed_on = ""
    """Side stream on which forward's narrow weight is made ahead, if it is."""
    factors: "Factors | None" = None
    """Set where several solvers compute the weight's gradient together."""
    overwrites = False
    """True to overwrite the weight's gradient (beta = 0) since nothing else adds to it."""
    update: Callable[[Array, Array], None] | None = None
    """Set where the weight is updated with its gradient a.T @ b, given a (M, R) and b (M, C): as
    soon as those are there, or by who sets `factors`, with those of all. The gradient is not kept.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.inner_product_param
        self.axis = bottom[0].axis(param.axis)
        self.inputs, self.outputs = prod(bottom[0].shape[self.axis :]), param.num_output
        self.transposed, self.normalizes = param.transpose, param.normalize
        self.can_fuse = not self.normalizes
        if self.outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        weight = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        self.make_weight(weight, param.num_output, param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        inputs = prod(shape[self.axis :])
        if len(shape) < self.axis or inputs != self.inputs:
            raise ConfigError(
                "Input size incompatible with inner product parameters. The weights are for "
                f"{self.inputs} inputs, not {inputs} (shape {list(shape)}, axis {self.axis})"
            )
        self.rows = prod(shape[: self.axis])
        top[0].reshape((*shape[: self.axis], self.outputs))
        narrow = bottom[0].layout.dtype
        self.narrow_weight, self.narrowed_on = self.buffer(self.blobs[0].shape, narrow), ""
        self.narrow_dy = self.buffer((self.rows, self.outputs), narrow)

    @property
    def only_launches(self) -> bool:
        return self.factors is None and not self.normalizes

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.only_launches

    def layout_for(self, preferred: Layout) -> Layout:
        """The preferred type; the order is that of the weight's columns."""
        return Layout(preferred.dtype, False)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.inputs * tops[0]

    @property
    def weight(self) -> Array:
        """w, as forward multiplies by it."""
        return self.blobs[0].data

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.product(bottom[0], top[0], self.bias)

    def product(self, bottom: Blob, top: Blob, b: Array | None = None, relu: bool = False) -> Array:
        """Write x @ w.T + b, at least 0 with `relu`, into the top; return it as (M, O)."""
        x, w = bottom.data.reshape(self.rows, self.inputs), self.weight
        y: Array = top.data.reshape(self.rows, self.outputs)
        if self.normalizes and not self.recomputes:
            squares = (w * w).sum(axis=0 if self.transposed else 1, keepdims=True)
            np.divide(w, np.sqrt(squares + 1e-12), out=w)
        narrow = self.narrow_weight.data if x.dtype != w.dtype else None
        if narrow is not None and self.narrowed_on:
            self.device.wait_stream(self.narrowed_on)
            w, narrow = narrow, None
        if not self.transposed:
            w, narrow = w.T, None if narrow is None else narrow.T
        self.ops.inner_product(x, w, narrow, b, relu, y)  # (M, K) @ (K, O)
        return y

    def narrow_ahead(self, stream: str) -> None:
        """Make what forward multiplies by, if it is not the weight itself, in the context of a side
        stream of this name.
        """
        w, narrow = self.blobs[0], self.narrow_weight
        is_large = self.rows * w.count >= AHEAD and not self.normalizes
        if is_large and narrow.layout.dtype != w.dtype:
            self.ops.convert(w.data, narrow.data)
            self.narrowed_on = stream

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy.T @ x, db += column sums of dy, dx = dy @ w."""
        dy = top[0].diff.reshape(self.rows, self.outputs)
        self.gradients(dy, self.bias_diff, bottom[0], propagate_down[0])

    def gradients(self, dy: Array, db: Array | None, bottom: Blob, down: bool) -> None:
        """dw += dy.T @ x, db += column sums of dy (M, O) unless None, dx = dy @ w with `down`."""
        x = bottom.data.reshape(self.rows, self.inputs)
        w = self.weight
        if dy.dtype != x.dtype:
            narrow = self.narrow_dy.data
            if db is None:
                self.ops.convert(dy, narrow)
            else:
                self.ops.bias_gradient(dy, db, narrow)
            dy, db = narrow, None
        if x.dtype != w.dtype:
            w = self.narrow_weight.data
        update = self.update if self.factors is None else None
        update_stream: AbstractContextManager[object] = nullcontext()
        if down and update is not None:
            update_stream = self.device.side_stream(UPDATE)
        with self.side_stream(down):
            if db is not None:
                self.ops.bias_gradient(dy, db)
            if self.param_propagate_down[0] and self.factors is not None:
                self.factors(dy, x)
            elif self.param_propagate_down[0] and update is None:
                self.weight_gradient(dy, x, not self.overwrites)
        if down:
            dx = bottom.diff.reshape(self.rows, self.inputs)
            self.ops.matmul(dy, w.T if self.transposed else w, dx)  # (M, O) @ (O, K)
        if update is not None:
            with update_stream:
                update(*self.gradient_factors(dy, x))

    def weight_gradient(self, dy: Array, x: Array, accumulate: bool, scale: float = 1.0) -> None:
        """dw = scale * dy.T @ x, or dw += that, of dy (M, O) and x (M, K), both of one type."""
        a, b = self.gradient_factors(dy, x)
        self.ops.matmul(a.T, b, self.blobs[0].diff, accumulate, scale)

    def gradient_factors(self, dy: Array, x: Array) -> tuple[Array, Array]:
        """Return a and b of dw = a.T @ b: (O, M) @ (M, K), or transposed (K, M) @ (M, O)."""
        return (x, dy) if self.transposed else (dy, x)

    def fuses_update(self, rows: int) -> bool:
        """True if `update` saves passes, with factors of `rows` rows. Backward must not read the
        weight itself after it.
        """
        dtype = self.narrow_weight.layout.dtype
        is_narrow = dtype != self.blobs[0].dtype
        return is_narrow and self.ops.fuses_update(rows, self.blobs[0].shape, dtype)


class _Margin(NamedTuple):
    """Scores of cosines c of rows and their labels, for |x| = 1, and the shares of the label's
    weight and of x / |x| in their gradients.
    """

    score: Array
    by_weight: Array
    by_x: Array


def _double(c: Array) -> _Margin:
    """cos(2 a), folded so that it falls."""
    s = np.sign(c)
    return _Margin(2 * s * c**2 - 1, 4 * s * c, -2 * s * c**2 - 1)


def _triple(c: Array) -> _Margin:
    """cos(3 a), folded."""
    s = np.sign(np.abs(c) - 0.5)
    fold = np.sign(c) * (1 + s) - 2
    return _Margin(s * (4 * c**3 - 3 * c) + fold, s * (12 * c**2 - 3), fold - 8 * s * c**3)


def _quadruple(c: Array) -> _Margin:
    """cos(4 a), folded."""
    s = np.sign(np.sign(c) * (2 * c**2 - 1))
    fold = 2 * np.sign(c) + s - 3
    score = s * (8 * c**4 - 8 * c**2 + 1) + fold
    return _Margin(score, s * (32 * c**3 - 16 * c), fold - s * (24 * c**4 - 8 * c**2 - 1))


_MARGINS = {
    MarginInnerProductParameter.DOUBLE: _double,
    MarginInnerProductParameter.TRIPLE: _triple,
    MarginInnerProductParameter.QUADRUPLE: _quadruple,
}
"""By type; L-Softmax has the same numbers."""


_LABELS = "{type} cannot differentiate its labels; the layer that makes them needs no gradient"


class _Margins(Layer):
    """Base: x (*outer, *inner), labels (M) -> y (M, O) and, if there is a second top, lambda (1);
    weight (O, K).

    The score of the label becomes (lambda * score + score with a margin) / (1 + lambda). lambda is
    base * (1 + gamma * t)^-power, lambda_min at least; t counts forward passes, from `iteration` +
    1 on.
    """

    on_gpu = True
    bottoms = 2
    tops = (1, 2)
    backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {1: _LABELS}
    settings: Any

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings
        self.axis = bottom[0].axis(param.axis)
        self.inputs = prod(bottom[0].shape[self.axis :])
        if param.num_output < 1:
            raise ConfigError("num_output must be 1 or more")
        self.margin = _MARGINS.get(param.type)
        self.make_params({"weight": (param.num_output, self.inputs)}, [param.weight_filler])
        self.passes = self.buffer([1], np.float64)
        self.passes.host_data[...] = param.iteration
        self.wrong = self.error_flag(
            lambda label: DataError(
                f"label {label:g} is not one of the {param.num_output} classes 0 to "
                f"{param.num_output - 1}"
            )
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if prod(shape[self.axis :]) != self.inputs:
            raise ConfigError(
                f"the weights are for {self.inputs} inputs, not {prod(shape[self.axis :])}"
            )
        self.rows = prod(shape[: self.axis])
        if bottom[1].count != self.rows:
            raise ConfigError(f"{bottom[1].count} labels do not fit {self.rows} rows")
        outputs = self.blobs[0].shape[0]
        top[0].reshape((self.rows, outputs))
        if len(top) > 1:
            top[1].reshape((1,))
        self.place = self.buffer([self.rows], np.int64)
        self.place.host_data[...] = np.arange(self.rows)
        self.by_x, self.by_weight = (self.buffer([self.rows]) for _ in range(2))
        self.chosen = self.buffer([self.rows], np.int64)
        self.scaled = self.buffer((self.rows, outputs))

    def state(self) -> dict[str, Any]:
        return {"passes": float(self.passes.host_data[0])}

    def set_state(self, state: dict[str, Any]) -> None:
        self.passes.host_data[...] = state["passes"]

    def weight_of_cosine(self, top: Blobs) -> Array:
        """Count the pass; return lambda (1), also in the second top."""
        param, passes = self.settings, self.passes.data
        passes += 1
        weight: Array = np.maximum(
            param.base * (1 + param.gamma * passes) ** -param.power, param.lambda_min
        )
        if len(top) > 1:
            top[1].data[...] = weight
        return weight

    def find_labels(self, labels: Array) -> tuple[Array, Array]:
        """Return the places in y of each row's label; DataError for one that is no class."""
        bad = ~((labels > -1) & (labels < self.blobs[0].shape[0]))
        self.wrong.set_where(bad, labels)
        self.wrong.check()
        self.chosen.data[...] = np.where(bad, 0, labels)  # a GPU goes on until the error is seen
        return self.place.data, self.chosen.data

    def input_gradient(self, top: Blobs, bottom: Blobs) -> None:
        """dx = dy @ w, but for the label dy * (by_weight * w + by_x * x)."""
        dy, dx = top[0].diff, bottom[0].diff.reshape(self.rows, self.inputs)
        if self.margin is None:
            self.ops.matmul(dy, self.blobs[0].data, dx)  # (M, O) @ (O, K)
            return
        at = self.place.data, self.chosen.data
        self.ops.matmul(self.by_label(dy), self.blobs[0].data, dx)
        dx += bottom[0].data.reshape(dx.shape) * (dy[at] * self.by_x.data)[:, None]

    def by_label(self, dy: Array) -> Array:
        """Return dy (M, O), times by_weight at the labels."""
        scaled: Array = self.scaled.data
        self.ops.copy(dy, scaled)
        scaled[self.place.data, self.chosen.data] *= self.by_weight.data
        return scaled

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.inputs * tops[0]


@layer("MarginInnerProduct", "AngularMargin")
class MarginInnerProduct(_Margins):
    """InnerProduct with a margin in the angle to the label (SphereFace: Liu et al. 2017).

    Each forward pass divides the weight's rows by their norms; y = x @ w.T = |x| cos(a). The score
    with a margin is |x| f(a), f(a) is cos(m a) with m 2 to 4 by `type`, folded so that it falls
    from 0 to pi.

    Gradients are the fork's: that of the weight knows neither margin nor norm, in dx the gradient
    of |x| f(a) has the length 1.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.settings = self.param.margin_inner_product_param
        super().setup(bottom, top)
        if self.margin:
            log.info("%s: gradients of margins have the length 1, as SphereFace's", self.type)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, w = bottom[0].data.reshape(self.rows, self.inputs), self.blobs[0].data
        y, share = top[0].data, self.weight_of_cosine(top)
        norms = np.sqrt((w * w).sum(axis=1, keepdims=True))
        np.divide(w, np.where(norms > 0, norms, 1), out=w)
        self.ops.matmul(x, w.T, y)  # (M, K) @ (K, O)
        if self.margin is None:
            return
        at = self.find_labels(bottom[1].data.reshape(-1))
        length = np.sqrt((x * x).sum(axis=1))
        safe = np.where(length > 0, length, 1)
        cosine = y[at] / safe
        margin = self.margin(cosine)
        y[at] = (share * y[at] + length * margin.score) / (1 + share)
        size = np.sqrt(margin.by_weight**2 + (margin.by_x / safe) ** 2)
        size *= 1 + share
        self.by_x.data[...] = margin.by_x / safe / size
        self.by_weight.data[...] = margin.by_weight / size + share / (1 + share)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy.T @ x; dx as `input_gradient` says."""
        self.refuse_constants(propagate_down)
        if self.param_propagate_down[0]:
            x = bottom[0].data.reshape(self.rows, self.inputs)
            self.ops.matmul(top[0].diff.T, x, self.blobs[0].diff, True)  # (O, M) @ (M, K)
        if propagate_down[0]:
            self.input_gradient(top, bottom)


@layer("LargeMarginInnerProduct")
class LargeMarginInnerProduct(_Margins):
    """InnerProduct with a margin in the angle to the label (L-Softmax: Liu et al. 2016).

    y = x @ w.T = |x| |w| cos(a). The score with a margin is |x| |w| f(a), f(a) is cos(m a) with m 2
    to 4 by `type`, folded so that it falls from 0 to pi. At a length of 0 the cosine counts as 0.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.settings = self.param.largemargin_inner_product_param
        super().setup(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.by_own = self.buffer([self.rows])
        outputs = self.blobs[0].shape[0]
        self.number = self.buffer([outputs, 1], np.int64)
        self.number.host_data[:, 0] = np.arange(outputs)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, w = bottom[0].data.reshape(self.rows, self.inputs), self.blobs[0].data
        y, share = top[0].data, self.weight_of_cosine(top)
        self.ops.matmul(x, w.T, y)  # (M, K) @ (K, O)
        if self.margin is None:
            return
        at = self.find_labels(bottom[1].data.reshape(-1))
        of_x = np.sqrt((x * x).sum(axis=1))
        of_w = np.sqrt((w * w).sum(axis=1))[at[1]]
        both = of_x * of_w
        margin = self.margin(y[at] / np.where(both > 0, both, 1))
        y[at] = (share * y[at] + both * margin.score) / (1 + share)
        self.by_weight.data[...] = (margin.by_weight + share) / (1 + share)
        part = margin.by_x / (1 + share)
        self.by_x.data[...] = part * of_w / np.where(of_x > 0, of_x, 1)
        self.by_own.data[...] = part * of_x / np.where(of_w > 0, of_w, 1)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy.T @ x, but for the label dy * (by_weight * x + by_own * w), by_own being the
        sum over its rows; dx as `input_gradient` says.
        """
        self.refuse_constants(propagate_down)
        x, dy = bottom[0].data.reshape(self.rows, self.inputs), top[0].diff
        if self.param_propagate_down[0]:
            w, dw = self.blobs[0].data, self.blobs[0].diff
            given = dy if self.margin is None else self.by_label(dy)
            self.ops.matmul(given.T, x, dw, True)  # (O, M) @ (M, K)
            if self.margin is not None:
                at = self.place.data, self.chosen.data
                own = np.where(self.number.data == at[1], dy[at] * self.by_own.data, 0)  # (O, M)
                dw += own.sum(axis=1, keepdims=True) * w
        if propagate_down[0]:
            self.input_gradient(top, bottom)


@layer("InnerDistance")
class InnerDistance(Layer):
    """x (*outer, *inner) -> (*outer, O), the axes from `axis` on as one of size K: the distances
    from the rows of a weight (O, K), a parameter or the second bottom (happynear's NormFace).

    A distance is the sum of squares of the differences, or with distance_type "L1" of their sizes.
    With `normalize` each forward pass divides the rows of a parameter by their norms. With
    update_center_only, and labels (M) as the last bottom, a row of the weight gets its gradient
    from the items of its own class only. The fork knows no bias and no `transpose`, either.
    """

    on_gpu = True
    bottoms = (1, 3)
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.inner_distance_param
        if param.distance_type not in ("L1", "L2"):
            raise ConfigError(f'distance_type is L1 or L2, not "{param.distance_type}"')
        self.squared = param.distance_type == "L2"
        self.has_labels = param.update_center_only
        self.has_weight = len(bottom) == 1 + self.has_labels
        if len(bottom) > 2 + self.has_labels:
            raise ConfigError("a third bottom, of labels, goes with update_center_only: true")
        if self.has_labels and len(bottom) < 2:
            raise ConfigError("update_center_only needs labels as the last bottom")
        self.axis = bottom[0].axis(param.axis)
        self.inputs = prod(bottom[0].shape[self.axis :])
        if self.has_weight:
            if param.num_output < 1:
                raise ConfigError("num_output must be 1 or more")
            self.make_params({"weight": (param.num_output, self.inputs)}, [param.weight_filler])
        if self.has_labels:
            self.constant_bottoms = {len(bottom) - 1: _LABELS}

    def weight(self, bottom: Blobs) -> Blob:
        """The blob of the rows that distances are taken from."""
        return self.blobs[0] if self.has_weight else bottom[1]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, weight = bottom[0].shape, self.weight(bottom).shape
        self.rows, inputs = prod(shape[: self.axis]), prod(shape[self.axis :])
        if not weight or inputs != self.inputs or prod(weight[1:]) != inputs:
            raise ConfigError(
                f"rows of {prod(weight[1:])} numbers have no distance from items of {inputs}"
            )
        self.outputs = weight[0]
        top[0].reshape((*shape[: self.axis], self.outputs))
        if self.has_labels and bottom[-1].count != self.rows:
            raise ConfigError(f"{bottom[-1].count} labels do not fit {self.rows} rows")
        self.number = self.buffer([self.outputs], np.int64)
        self.number.host_data[...] = np.arange(self.outputs)

    def matrices(self, bottom: Blobs) -> tuple[Array, Array]:
        """View x as (M, K) and the weight as (O, K)."""
        x, w = bottom[0].data, self.weight(bottom).data
        return x.reshape(self.rows, self.inputs), w.reshape(self.outputs, self.inputs)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, w = self.matrices(bottom)
        if self.has_weight and self.param.inner_distance_param.normalize:
            np.divide(w, np.sqrt((w * w).sum(axis=1, keepdims=True) + 1e-6), out=w)
        y = top[0].data.reshape(self.rows, self.outputs)
        self.ops.distances(x, w, y, self.squared)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = sum over o of dy * slope, dw = -sum over m of dy * slope; slope = 2 (x - w), or the
        sign of x - w.
        """
        self.refuse_constants(propagate_down)
        (x, w), dy = self.matrices(bottom), top[0].diff.reshape(self.rows, self.outputs)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(x.shape)
            self.ops.distance_gradients(dy, x, w, dx, self.squared, False)
        wanted = self.param_propagate_down[0] if self.has_weight else propagate_down[1]
        if wanted:
            dw = self.weight(bottom).diff.reshape(w.shape)
            if self.has_labels:
                labels = bottom[-1].data.reshape(-1, 1).astype(np.int64)
                dy = np.where(labels == self.number.data, dy, 0)
            self.ops.distance_gradients(dy.T, w, x, dw, self.squared, self.has_weight)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.inputs * tops[0]


@layer("OuterProduct")
class OuterProduct(Layer):
    """(N, A), (N, B) -> (N, 1, A, B): a_i * b_j of each item (Xlearn, JADF)."""

    on_gpu = True
    can_recompute = True
    bottoms = 2
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [b.shape for b in bottom]
        (n, a), (m, b) = ((s[0], prod(s[1:])) if len(s) > 1 else (0, 0) for s in shapes)
        if n != m or not all(len(s) > 1 and prod(s[2:]) == 1 for s in shapes):
            raise ConfigError(
                "OuterProduct needs (N, A) and (N, B), not "
                + " and ".join(str(list(s)) for s in shapes)
            )
        top[0].reshape((n, 1, a, b))

    def factors(self, bottom: Blobs) -> tuple[Array, Array]:
        """Return a (N, A, 1) and b (N, 1, B)."""
        a, b = bottom[0].data, bottom[1].data
        return a.reshape(*a.shape[:2], 1), b.reshape(len(b), 1, b.shape[1])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.multiply(*self.factors(bottom), out=top[0].data[:, 0])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = dy @ b, db = dy.T @ a."""
        (a, b), dy = self.factors(bottom), top[0].diff[:, 0]
        for blob, wanted, other, axis in zip(bottom, propagate_down, (b, a), (2, 1), strict=True):
            if wanted:
                np.sum(dy * other, axis=axis, out=blob.diff.reshape(blob.shape[:2]))


@layer("MatMul")
class MatMul(Layer):
    """a (..., M, K), b (..., K, N) -> (..., M, N), each matrix by its own; or a (..., K) times one
    matrix b (K, N) (Synopsys' Caffe).

    b is the second bottom or, of shape blob_shape, a parameter. transpose_a and transpose_b are for
    factors stored as (..., K, M) and (..., N, K). With dim_1, dim_2, dim_3 (Sophgo's) a is taken as
    (dim_1, dim_2), b as (dim_3, dim_2) and transposed.
    """

    on_gpu = True
    can_recompute = True
    bottoms = (1, 2)
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.matmul_param
        self.by_dims = any(param.HasField(f"dim_{k}") for k in (1, 2, 3))
        if len(bottom) == 1:
            if not param.blob_shape:
                raise ConfigError("matmul_param needs a blob_shape where there is no second bottom")
            zeros = FillerParameter(type="constant")
            self.make_params({"factor": tuple(param.blob_shape)}, [zeros])

    def factor(self, bottom: Blobs) -> Blob:
        """The second factor."""
        return bottom[1] if len(bottom) > 1 else self.blobs[0]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, a, b = self.param.matmul_param, bottom[0].shape, self.factor(bottom).shape
        fails = ConfigError(f"factors of shape {list(a)} and {list(b)} do not fit each other")
        self.turned = param.transpose_a, param.transpose_b
        if self.by_dims:
            self.turned = False, True
            m, k, n = param.dim_1, param.dim_2, param.dim_3
            self.views: tuple[tuple[int, ...], ...] = ((1, m, k), (1, n, k))
            if prod(a) != m * k or prod(b) != n * k:
                raise fails
            outer: tuple[int, ...] = ()
        else:
            if len(b) < 2 or len(a) < len(b):
                raise fails
            if len(a) > len(b):
                if len(b) > 2 or param.transpose_a:
                    raise fails
                a = (prod(a[:-1]), a[-1])
            outer = a[:-2]
            if outer != b[:-2]:
                raise fails
            self.views = (prod(outer), *a[-2:]), (prod(outer), *b[-2:])
            m, k = a[-2:][:: -1 if param.transpose_a else 1]
            inner, n = b[-2:][:: -1 if param.transpose_b else 1]
            if k != inner:
                raise fails
        self.result = (prod(outer), m, n)
        full = bottom[0].shape
        rows = full[:-1] if len(full) > len(b) and not self.by_dims else (*outer, m)
        top[0].reshape((*rows, n))

    def factors(self, a: Array, b: Array) -> tuple[Array, Array]:
        """View a as (P, M, K) and b as (P, K, N)."""
        views = (x.reshape(v) for x, v in zip((a, b), self.views, strict=True))
        a, b = (x.transpose(0, 2, 1) if t else x for x, t in zip(views, self.turned, strict=True))
        return a, b

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, b = self.factors(bottom[0].data, self.factor(bottom).data)
        for one, other, y in zip(a, b, top[0].data.reshape(self.result), strict=True):
            self.ops.matmul(one, other, y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = dy @ b.T, db = a.T @ dy, added to the parameter; turned as the factor is."""
        second, adds = self.factor(bottom), len(bottom) == 1
        a, b = self.factors(bottom[0].data, second.data)
        da, db = (x.diff.reshape(v) for x, v in zip((bottom[0], second), self.views, strict=True))
        dy = top[0].diff.reshape(self.result)
        wanted = self.param_propagate_down[0] if adds else propagate_down[1]
        for p, d in enumerate(dy):
            if propagate_down[0]:
                left, right = (b[p], d.T) if self.turned[0] else (d, b[p].T)
                self.ops.matmul(left, right, da[p])
            if wanted:
                left, right = (d.T, a[p]) if self.turned[1] else (a[p].T, d)
                self.ops.matmul(left, right, db[p], adds)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.views[0][1 if self.turned[0] else 2] * tops[0]
