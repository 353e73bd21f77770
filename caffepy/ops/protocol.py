"""The contract of a back end: what `caffepy.ops.cpu` and `caffepy.ops.cuda` both are.

mypy holds both modules to `Ops` (see `backend`), a test compares names, parameters and defaults in
both directions. To add a function: its method here with shapes and formula, one function in each
package, the name in both `__init__.py`, a test in `tests/ops` and one in `tests/ops/cuda`.

What holds for all functions:
- The caller makes all arrays; a function writes its outputs, returns nothing and keeps nothing.
  `out`, `y`, `dx` are written; `dw`, `db` and the like are added to.
- Arrays do not overlap; where "dx may be dy" stands, it must then be the same object.
- Arrays are C-contiguous on the CPU. On a GPU the arrays (N, C, ...) of one call may also have
  their channels last, all in the same order. Arrays of (outer, C, inner) are (N, C, ...) with axes
  merged.
- On the CPU elements are float32 or float64. On a GPU activations and their gradients may also be
  float16 or bfloat16, which numpy lacks and uint16 stands for; parameters, their gradients, sums
  and numbers of channels stay float32 (float64 for doubles).
- On a GPU work is enqueued on the current stream, and nothing is read back.
- Labels and indices are whole floating-point numbers, truncated as C does. A function that finds an
  invalid one writes 1 and the first of them to `wrong` (2), and the caller raises the error.
- A loss is divided by `norm`, an array that the function writes: `divisor`, or where that is None
  the number of labels that count, at least 1. `weight` is an array whose first element is the loss
  weight.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array, Blob, Layout
from caffepy.ops import objects
from caffepy.ops.boxes import BoxCode, LocationLoss, Matching, Mining, Rois, TruthCheck
from caffepy.ops.objects import Normalized, NormSums, Windows
from caffepy.ops.overlap import YoloWeights
from caffepy.ops.update_state import Limits, Number, Segments

Maybe = Array | None
Seed = int | Array
"""A seed, or on the CPU an int64 array () of it, which is read when the operation runs."""
Pair = tuple[int, int]
Three = tuple[int, int, int]
Volume = tuple[Three, Three, Three]
"""kernel, stride and pad, each (length, height, width)."""
Sizes = Sequence[int]
Counting = tuple[int | None, float | None]
"""The label to ignore, and the divisor of a loss."""
Outcome = tuple[Array, Array, Array]
"""loss, norm and wrong."""
Room = tuple[Array, Array]
"""hits and counts of an accuracy."""
Shares = tuple[Array, Maybe, Array]
"""share, shares and wrong."""
Affine = Sequence[Maybe]
"""scale and bias of each channel."""
Crops = Sequence[Array]
"""Start rows and columns of crops, and which are mirrored."""
Terms = tuple[int, float, float, float]
"""size, alpha, beta and k of a local response normalization."""


class Displacements(NamedTuple):
    """The windows of a correlation, and where they are compared: displacement (p, o) is
    ((p + top) * step, (o + left) * step), of `rows` times `columns`; the first window of the first
    map begins at (row, column).
    """

    size: int
    stride: int
    step: int
    rows: int
    columns: int
    top: int
    left: int
    row: int
    column: int


class Ops(Protocol):
    """Arithmetic on one kind of device; it has a method for each function of a back end."""

    # Objects, described in objects.py; a device is one of the back end's kind.

    def Convolution(
        self, x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], group: int, dtype: DTypeLike
    ) -> objects.Convolution:
        """Make a convolution of these shapes, in any number of spatial axes.

        window = stride, pad, dilation, each with a number for each axis.
        """

    def LSTM(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> objects.LSTM:
        """Make a layer of LSTM units."""

    def RNN(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> objects.RNN:
        """Make a layer of tanh units."""

    def UpdateState(
        self, limits: Limits, losses: Sequence[Blob], device: Any
    ) -> objects.UpdateState:
        """Make the device-side state of a solver's updates; `losses` are the tops with a weight."""

    def Sums(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: Any) -> objects.Sums:
        """Make the sums of a test pass."""

    def PhaseTimer(self, device: Any) -> objects.PhaseTimer:
        """Make the phase timer of a solver."""

    def Stopwatch(self) -> objects.Stopwatch:
        """Make a stopwatch of operations."""

    def Lattice(self, features: Array, device: Any) -> objects.Lattice:
        """Make the permutohedral lattice of points (P, d), which lie on the host."""

    def Staging(self) -> objects.Staging:
        """Make buffers for batches on their way to the device."""

    # Threads of the host

    def set_num_threads(self, n: int) -> None:
        """Compute with n host threads; nothing on a GPU."""

    def blas_scope(self) -> AbstractContextManager[None]:
        """Return a block in which BLAS keeps to the calling thread; nothing on a GPU."""

    def compile_ahead(self) -> AbstractContextManager[None]:
        """Return a block in which a GPU compiles the kernels of all calls, without launching them:
        for calls that do nothing but launch some. Nothing on the CPU.
        """

    # Copies

    def copy(self, src: Array, dst: Array) -> None:
        """dst = src, at full speed if rows are contiguous; on a GPU src may lie on the host."""

    def convert(self, x: Array, out: Array) -> None:
        """out = x in its own element type and order of axes."""

    def join(self, parts: Sequence[Array], whole: Array, axis: int) -> None:
        """whole = the parts side by side along the axis (1 if the channels lie last); parts of one
        other element type must be C-contiguous, and the whole.
        """

    def cut(self, whole: Array, sizes: Sizes, parts: Sequence[Maybe], axis: int) -> None:
        """Write the parts, of these sizes along the axis, that are not None: undo `join`, also to
        another element type.
        """

    def deal_channels(self, x: Array, y: Array, parts: int) -> None:
        """Write channel p * (C / parts) + k of x (N, C, ...) as channel k * parts + p of y."""

    def interleave(
        self,
        parts: Sequence[Array],
        wholes: Sequence[Array],
        given: Sequence[Normalized | None] = (None, None),
    ) -> None:
        """Write channel k of part p of P parts (N, C, ...) as channel k * P + p of the wholes side
        by side: `join`, `deal_channels` and `cut` into equal wholes, with a multiple of P channels;
        of what a normalization makes of a part, where it is `given`. On a GPU two parts of an even
        C and one or two wholes, of 16 bits with the channels last.
        """

    def separate(
        self,
        wholes: Sequence[Array],
        parts: Sequence[Maybe],
        norms: Sequence[NormSums | None] = (None, None),
    ) -> None:
        """Write the parts that are not None: undo `interleave`; then `norm_sums` of those norms
        that there are, each of which has one of the parts as masked.
        """

    # Arrays of one shape

    def scaled(self, alpha: float, x: Array, out: Array) -> None:
        """out = alpha * x."""

    def axpy(self, alpha: float, x: Array, out: Array) -> None:
        """out += alpha * x."""

    def add(self, x: Array, out: Array) -> None:
        """out += x."""

    def multiply(self, x: Array, y: Array, out: Array) -> None:
        """out = x * y."""

    def dot(self, x: Array, y: Array) -> Number:
        """Return the sum of x * y in float64: a float, on a GPU an array without axes."""

    def eltwise_sum(self, xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
        """out = sum of coefficient * x over at least two arrays."""

    def eltwise_max(self, xs: Sequence[Array], out: Array, index: Array) -> None:
        """out = the largest x, index = its number.

        A tie of the first two goes to the second; later ones must be larger.
        """

    def eltwise_select(self, index: Array, rank: int, dy: Array, dx: Array) -> None:
        """dx = dy where index is rank, else 0."""

    # Products and biases

    def matmul(
        self, a: Array, b: Array, out: Array, accumulate: bool = False, scale: float = 1.0
    ) -> None:
        """out = scale * a @ b, or out += scale * a @ b; (M, K) @ (K, N) -> (M, N).

        Transposed views are allowed. On a GPU a and b have one type, out has theirs or float32;
        sums are float32, or float64 for doubles.
        """

    def inner_product(
        self, x: Array, w: Array, narrow: Maybe, b: Maybe, relu: bool, y: Array
    ) -> None:
        """y = x @ w + b, at least 0 with `relu`; (M, K) @ (K, N) -> (M, N).

        If x has another type than w, `narrow`, like w, becomes w in that. w and narrow are arrays
        or transposed views of them.
        """

    def add_bias(self, y: Array, b: Array) -> None:
        """y[n, o, ...] += b[o]; y (M, O) or (N, O, P)."""

    def bias_gradient(self, dy: Array, db: Array, copy: Maybe = None) -> None:
        """db[o] += sum of dy[n, o, ...]; dy (M, O) or (N, O, P).

        If dy has rows (M, O), `copy` receives dy in its own element type.
        """

    def relu_bias_backward(self, y: Maybe, dy: Array, db: Maybe) -> None:
        """dy *= (y > 0) in place unless y is None; then db[o] += sum of dy[n, o, ...] unless db is
        None. y and dy (M, O) or (N, O, P).
        """

    def cut_relu_backward(
        self,
        dys: Sequence[Array],
        ys: Sequence[Array],
        dxs: Sequence[Array],
        dbs: Sequence[Maybe],
    ) -> None:
        """dx_i = part i of the sum of dys, which is cut as ys lie side by side along axis 1, where
        y_i > 0, else 0; then db_i[o] += sum of dx_i[n, o, ...] unless db_i is None. dys[0] may
        change.
        """

    def bias_act_forward(
        self,
        y: Array,
        b: Maybe,
        relu: bool,
        ratio: float,
        seed: Seed,
        mask: Maybe,
        step_counter: Maybe = None,
    ) -> None:
        """y = dropout(relu(y + b)) in place for y (M, O); a step that is None or False is left out.

        ratio, seed, mask and step_counter are those of `dropout_forward`.
        """

    def bias_act_backward(
        self, y: Array, dy: Array, db: Maybe, relu: bool, mask: Maybe, ratio: float
    ) -> None:
        """dy *= mask / (1 - ratio) * (y > 0) in place for y, dy (M, O); db += its column sums."""

    # Activations: x, y, dy, dx of one shape; y may be x, dx may be dy

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
        runs: each pass has a mask of its own.
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

    # Normalization: x, y, dy, dx (outer, C, inner), means, scales and the like (C)

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
        """`lrn_forward` of x (N, C, H, W), then `max_pool_forward`."""

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
        """`max_pool_backward`, then `lrn_backward` with `relu`; dx may be x."""

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
        """Write the same numbers from the running sums / their weight; 0 if the weight is."""

    def mask_size(self, shape: Sizes, layout: Layout) -> int:
        """Return the bytes of the bits that `norm_forward` keeps for y of this shape and layout; 0
        if `norm_backward` looks at y.
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

        bits (`mask_size`, uint8) tell `norm_backward` where y lies between 0 and the ceiling.
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
        """The gradient of `norm_forward` from the gradients `dys` of its y, one or two.

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

    # Local connections: x, dx (N, C, H, W), y, dy (N, O, h, w), w, dw (O, C side side, h w)

    def local_forward(self, x: Array, w: Array, y: Array, side: int, stride: int, pad: int) -> None:
        """y = convolution of x with weights of its own at each position."""

    def local_backward_data(
        self, dy: Array, w: Array, dx: Array, side: int, stride: int, pad: int
    ) -> None:
        """Write dx, the transpose of `local_forward`."""

    def local_backward_weight(
        self, dy: Array, x: Array, dw: Array, side: int, stride: int, pad: int
    ) -> None:
        """dw += products of dy and what the weights were multiplied with."""

    # Deformable convolution of an image: x, dx (C, H, W), offsets, doffsets (G, kh kw, 2, Ho, Wo) =
    # down, right, of G groups of channels, columns (C, kh kw, Ho, Wo); window = kernel, stride,
    # pad, dilation, each (height, width)

    def deformable_columns(
        self, x: Array, offsets: Array, columns: Array, window: Sequence[Sizes]
    ) -> None:
        """Write columns: x where the offsets move each tap of the kernel, bilinear; 0 outside."""

    def deformable_backward(
        self,
        dcolumns: Array,
        x: Array,
        offsets: Array,
        dx: Maybe,
        doffsets: Maybe,
        window: Sequence[Sizes],
    ) -> None:
        """Write dx, the transpose of `deformable_columns`, and doffsets."""

    # Distances of rows: x, dx (M, K), w (N, K), y, dy (M, N)

    def distances(self, x: Array, w: Array, y: Array, squared: bool) -> None:
        """y[m, n] = sum over k of (x[m, k] - w[n, k])^2, or of |x[m, k] - w[n, k]|."""

    def distance_gradients(
        self, dy: Array, x: Array, w: Array, dx: Array, squared: bool, accumulate: bool
    ) -> None:
        """Write dx, or add to it: sum over n of dy[m, n] 2 (x[m, k] - w[n, k]), or of dy[m, n]
        sign(x[m, k] - w[n, k]). dy may be a transposed view.
        """

    # Pooling: x, dx (N, C, H, W), y, dy, index (N, C, Ho, Wo)

    def pool_index_type(self, kernel: Pair) -> "np.dtype[Any]":
        """Return the element type of an index: int32, on a GPU uint8 if windows are small."""

    def max_pool_forward(
        self, x: Array, y: Array, index: Array, window: Windows, relu: bool = False
    ) -> None:
        """Write the maximum of each window, clipped to the plane, and the index of the first
        element that has it.

        An index of int32 is h*W + w; one of uint8 counts within the window, in the order of y's
        memory. A window of NaN only keeps its first element. With `relu` a maximum <= 0 becomes 0
        and its index -1 (255).
        """

    def max_pool_backward(
        self, dy: Array, index: Array, dx: Array, window: Windows, db: Maybe = None
    ) -> None:
        """dx = 0, then dx[index] += dy for every index but -1. db[c] += sum of dx[n, c, ...] unless
        db is None; dy may then become 0 where the index is -1.
        """

    def norm_max_pool_forward(
        self, x: Array, numbers: Array, y: Array, index: Array, window: Windows
    ) -> None:
        """Maxima of x * factor + shift: `norm_forward`, then `max_pool_forward` with `relu`."""

    def norm_max_pool_backward(
        self,
        x: Array,
        numbers: Array,
        dy: Array,
        index: Array,
        window: Windows,
        dx: Maybe,
        dscale: Maybe,
        dbias: Maybe,
        frozen: bool,
    ) -> None:
        """`max_pool_backward`, then `norm_backward`, of `norm_max_pool_forward`."""

    def ave_pool_forward(self, x: Array, y: Array, window: Windows, relu: bool = False) -> None:
        """Write the mean of each window, at least 0 with `relu`.

        The divisor counts elements of the padding, but none beyond it.
        """

    def ave_pool_backward(
        self, dy: Array, dx: Array, window: Windows, y: Maybe = None, x: Maybe = None
    ) -> None:
        """Write dx: each dy divided evenly over its window; with y, only dy whose y > 0, or with x
        only for elements whose x > 0.
        """

    def stochastic_pool_forward(
        self,
        x: Array,
        y: Array,
        index: Array,
        window: Windows,
        seed: Seed,
        step_counter: Maybe = None,
    ) -> None:
        """Write a random element of each window, with probability in proportion to its value, and
        its index as `max_pool_forward` does (Zeiler and Fergus 2013).

        Its gradient is `max_pool_backward`. Seed and step_counter are those of `dropout_forward`.
        """

    def stochastic_pool_mean(self, x: Array, y: Array, window: Windows) -> None:
        """Write the mean of `stochastic_pool_forward`: sum of squares / sum, 0 if that is <= 0."""

    # Pooling of volumes: x, dx (P, L, H, W), y, dy (P, Lo, Ho, Wo), window of three axes

    def max_pool_volumes_forward(self, x: Array, y: Array, least: float, window: Volume) -> None:
        """Write the maximum of each window, `least` for one without elements."""

    def max_pool_volumes_backward(
        self, x: Array, y: Array, dy: Array, dx: Array, window: Volume
    ) -> None:
        """Write dx: each dy goes to every element of its window that equals y."""

    def ave_pool_volumes_forward(self, x: Array, y: Array, window: Volume) -> None:
        """Write the mean of each window; the divisor counts padding, but nothing beyond it."""

    def ave_pool_volumes_backward(self, dy: Array, dx: Array, window: Volume) -> None:
        """Write dx: each dy divided evenly over its window."""

    # Optical flow

    def correlation_forward(
        self, a: Array, b: Array, y: Array, how: Displacements, differ: bool
    ) -> None:
        """Write y (N, rows * columns, Ho, Wo), the means over channels and windows of a * b, or
        with `differ` of |a - b|; a, b (N, C, H, W) with their padding.
        """

    def correlation_backward(
        self,
        a: Array,
        b: Array,
        dy: Array,
        da: Array,
        db: Array,
        how: Displacements,
        differ: bool,
    ) -> None:
        """Write da and db."""

    def flow_warp_forward(self, x: Array, flow: Array, y: Array, fill: float) -> None:
        """Write y, x (N, C, H, W) where flow (N, 2, H, W) leads, bilinear; `fill` outside."""

    def flow_warp_backward(self, x: Array, flow: Array, dy: Array, dx: Array, dflow: Array) -> None:
        """Write dx, the transpose of `flow_warp_forward`, and dflow."""

    def resample(
        self,
        x: Array,
        y: Array,
        rows: Array,
        down: Array,
        columns: Array,
        across: Array,
        skip: bool,
    ) -> None:
        """Write y (P, Ho, Wo), means of x (P, H, W) with weights down (Ho, K) of the rows from
        rows (Ho), int32, on, and likewise across of the columns; 0 where they sum to 0. With
        `skip` NaNs do not count, and y is NaN where they weigh more than half of the others.
        """

    # Connectionist temporal classification: scores x (T, N, C), of which an item has steps (N,)
    # after the first `delay`; labels (N, L), -1 for none; kept for backward: path (N, 2L + 1), the
    # labels with blanks around them, sizes (N,) of it, 0 for labels that need more steps,
    # normalizers (T, N), states (N, T + 2, 2L + 1)

    def ctc_forward(
        self,
        x: Array,
        steps: Array,
        labels: Array,
        blank: int,
        merge: bool,
        delay: int,
        path: Array,
        sizes: Array,
        normalizers: Array,
        states: Array,
        losses: Array,
    ) -> None:
        """Write losses (N,), -log of the probability of all ways through the path, and states, the
        probability that a way has state u at time t. With `merge` a label may last several steps.
        """

    def ctc_backward(
        self,
        x: Array,
        steps: Array,
        delay: int,
        path: Array,
        sizes: Array,
        normalizers: Array,
        states: Array,
        scale: Array,
        dx: Array,
    ) -> None:
        """Write dx = scale * (softmax of x - probability that a way has the class)."""

    # Resizing of planes: x, dx (P, H, W), y, dy (P, Ho, Wo)

    def interp_forward(self, x: Array, y: Array) -> None:
        """Write y, bilinear, corners on corners: y[i] reads x at i * (H - 1) / (Ho - 1)."""

    def interp_backward(self, dy: Array, dx: Array) -> None:
        """Write dx, the transpose of `interp_forward`."""

    # Sampling of x, dx (N, C, H, W) to y, dy (N, C, Ho, Wo) at the places of theta (N, 6)

    def affine_sample_forward(self, x: Array, theta: Array, y: Array) -> None:
        """Write y[s, t], bilinear, 0 outside: it reads x at ((u + 1) / 2 H, (v + 1) / 2 W), where
        (u, v) = theta (2, 3) @ (2 s / Ho - 1, 2 t / Wo - 1, 1).
        """

    def affine_sample_backward(self, dy: Array, theta: Array, dx: Array) -> None:
        """Write dx, the transpose of `affine_sample_forward`."""

    def affine_theta_gradient(self, dy: Array, x: Array, theta: Array, dtheta: Array) -> None:
        """Write dtheta (N, 6); at a whole pixel that pixel alone counts, with the slope 1."""

    # Boxes of maps: x, dx (N, C, H, W), boxes (R, 5) = image, x1, y1, x2, y2, times scale; rois are
    # those that forward has taken

    def take_rois(self, boxes: Rois, images: int) -> None:
        """Write the boxes that are taken; set bad_image (2) = 1 and the largest image that is none
        of so many, float64, whose place image 0 takes.
        """

    def roi_pool_forward(self, x: Array, boxes: Rois, y: Array, index: Array, scale: float) -> None:
        """Take the boxes; write the maximum of each part of each, y (R, C, h, w), and its place
        a * W + b in the plane, int32; 0 and -1 for a part without elements.
        """

    def roi_pool_backward(
        self, dy: Array, rois: Array, index: Array, dx: Array, scale: float
    ) -> None:
        """Write dx, the sums of dy at the places of the maxima."""

    def psroi_pool_forward(self, x: Array, boxes: Rois, y: Array, scale: float) -> None:
        """Take the boxes; write the mean of part (i, j) of each in channel (k g + i) g + j,
        y (R, K, g, g).
        """

    def psroi_pool_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        """Write dx, the sums of dy / elements of the part."""

    def roi_align_forward(
        self,
        x: Array,
        boxes: Rois,
        y: Array,
        scale: float,
        samples: int,
        beyond: int,
        sensitive: bool,
    ) -> None:
        """Take the boxes; write the mean of samples x samples values, bilinear, in each part of
        each, whose end is `beyond` farther; with samples below 1 of as many as the part has pixels.

        `sensitive`: as `psroi_pool_forward`, of PSROIAlign's places.
        """

    def roi_align_backward(
        self,
        dy: Array,
        rois: Array,
        dx: Array,
        scale: float,
        samples: int,
        beyond: int,
        sensitive: bool,
    ) -> None:
        """Write dx, the transpose of `roi_align_forward`; if `sensitive` without what lies behind a
        part.
        """

    def decode_proposals(
        self,
        scores: Array,
        deltas: Array,
        anchors: Array,
        info: Array,
        stride: int,
        least: float,
        boxes: Array,
        objects: Array,
    ) -> None:
        """Write boxes (N, H W A, 4) = x1, y1, x2, y2, the anchors (A, 4) at each place moved by
        deltas (N, 4A, H, W) and cut to the image, and objects (N, H W A), the second half of scores
        (N, 2A, H, W), but 0 for a box with a side under `least` times the scale of the image.

        info = height, width, scale, or a scale for each of the two; places lie stride pixels apart.
        """

    def suppress_overlaps(
        self, boxes: Array, threshold: float, unit: float, kept: Array, counts: Array
    ) -> None:
        """Write the places, kept (N, most) int32, and the numbers, counts (N) int32, of the boxes
        (N, P, 4) whose overlap with each kept one before it is threshold or less, at most `most` of
        each N: intersection over union, where a side is x2 - x1 + unit, 1 for pixels, else 0.
        """

    # Boxes of SSD: xmin, ymin, xmax, ymax, in units of the image; locations (N, P, L, 4) for L
    # classes, or 1 for all; priors (2, P, 4), the boxes and their variances; truths (G, 8) = image,
    # class, instance, box, whether it is difficult; matches int32, row of truths, or below 0

    def decode_boxes(self, locations: Array, priors: Array, code: BoxCode, boxes: Array) -> None:
        """Write boxes (N, L, P, 4) from locations x times variances: CORNER: prior + x,
        CORNER_SIZE: prior + x * size of the prior, CENTER_SIZE: centre + x * size, size * exp(x).
        """

    def match_boxes(
        self,
        boxes: Array,
        truths: Array,
        label: int,
        rule: Matching,
        matches: Array,
        overlaps: Array,
        counts: Array,
    ) -> None:
        """Match boxes (N, P, 4), or (1, P, 4) for all images, with the true boxes of each image, of
        the class `label` unless that is -1.

        The pair that overlaps most, of those left, is matched, as long as there is one; then, with
        rule.every, each box left with the true box that it overlaps most, threshold or more. Of
        equal overlaps the earlier box comes first, then the earlier true box. Write matches (N, P),
        -1 for no match and -2 for a box that crosses the edge where the rule leaves it out;
        overlaps (N, P) with the match, or the largest; and counts (N, 2) int32: true boxes of any
        class, and matches.
        """

    def location_losses(
        self,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        losses: Array,
    ) -> None:
        """Write losses (N, L, P): sums of f(d) over the four locations of each box with a match, d
        the difference to what `decode_boxes` would make the true box of, over the variances if they
        are not scaled; 0 for other boxes. matches (N, L, P).
        """

    def location_gradients(
        self,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        factor: Array,
        gradients: Array,
    ) -> None:
        """Write gradients like the locations, factor () * f'(d)."""

    def choose_largest(self, values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
        """Write chosen (N, P) int32, 1 for the numbers[n] largest values of row n of those that are
        allowed (N, P) int32, of equal ones the first, else 0; numbers (N) int32.
        """

    def match_with_losses(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matching: Matching,
        rule: LocationLoss,
        check: TruthCheck,
        matches: Array,
        overlaps: Array,
        counts: Array,
        labels: Array,
        of_location: Array,
        of_class: Array,
    ) -> None:
        """`check_truths`, `match_boxes` of the priors (2, P, 4) with true boxes of any class, and
        `box_losses`, but on the CPU only the first if a true box is wrong.
        """

    def check_truths(self, truths: Array, check: TruthCheck) -> None:
        """Set bad_label (2) = 1 and the largest class of true boxes of an image that is the
        background's or none, and bad_box (2) = 1 and the largest image of those that are not
        finite, float64, on the CPU unless bad_label is set; difficult ones count with `difficult`,
        all classes with `any_class`.
        """

    def label_matches(
        self, truths: Array, matches: Array, background: int, one_class: bool, labels: Array
    ) -> None:
        """Write labels (N, P) int32: the class of the true box of the last of L matches (N, L, P)
        that there is, with `one_class` background + 1, else the background.
        """

    def mine_negatives(
        self,
        losses: Array,
        matches: Array,
        overlaps: Array,
        counts: Array,
        ratio: float,
        most: float,
        labels: Array,
    ) -> None:
        """Write the label -1 for all boxes (N, P) without a match but those with the largest
        losses, ratio times as many as matches in an image that has true boxes, of those with the
        match -1 whose overlap is below `most`; counts (N, 2) as of `match_boxes`.
        """

    def multibox_loss(
        self,
        location: Array,
        matches: Array,
        of_class: Array,
        labels: Array,
        weights: tuple[float, float],
        divisor: float | None,
        mining: Mining | None,
        norm: Array,
        loss: Array,
    ) -> None:
        """loss = (weights[0] * sum of location losses (N, L, P) of matches + weights[1] * sum of
        class losses (N, P) of boxes whose label is 0 or more) / norm; norm = the divisor, or the
        number of matches, 1 or more. With `mining`, which needs L = 1 and labels of all matches,
        after `mine_negatives`.
        """

    def class_losses(self, x: Array, labels: Array, losses: Array) -> None:
        """Write losses (R) = -log(softmax(x)[label]) of rows x (R, K), at most that of the least
        normal float; 0 for a label below 0; labels (R) int32.
        """

    def class_gradients(self, x: Array, labels: Array, factor: Array, gradients: Array) -> None:
        """Write gradients (R, K) = factor () * (softmax(x) - 1 at the label), 0 for a label below
        0.
        """

    def box_losses(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        background: int,
        one_class: bool,
        labels: Array,
        of_location: Array,
        of_class: Array,
    ) -> None:
        """Write what `label_matches`, `location_losses` (N, 1, P) and `class_losses` (N, P) do, of
        scores (N, P, K) and matches (N, 1, P).
        """

    def box_gradients(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        labels: Array,
        rule: LocationLoss,
        weight: float,
        dloss: Array,
        norm: Array,
        dlocations: Array,
        dscores: Array,
    ) -> None:
        """Write what `class_gradients` and `location_gradients` do, of scores (N, P, K) and matches
        (N, 1, P), with the factors dloss () / norm () and weight times that.
        """

    def detect(
        self,
        boxes: Array,
        scores: Array,
        background: int,
        least: float,
        threshold: float,
        eta: float,
        found: Array,
        counts: Array,
    ) -> None:
        """Write found (N, K, M, 5) = score and box, and counts (N, K) int32: of the M boxes (N, L,
        P, 4) of each class but the background with the largest scores (N, P, K) above `least`, the
        best first, those whose overlap with each one before is threshold or less; with each of
        these the threshold is multiplied by eta while it is above 1/2, if eta is below 1.
        """

    # Losses of YOLO: x, p, delta (N, A, 5 + K, H, W) = x, y, w, h, object, classes of A boxes in
    # each cell; truths (N, T, 5) = class, x, y, w, h of centre and size in units of the image, as
    # are the sizes of anchors, float32

    def yolo_scores(
        self,
        x: Array,
        truths: Array,
        sizes: Array,
        softmax: bool,
        kind: int,
        scale: float,
        threshold: float,
        p: Array,
        delta: Array,
    ) -> None:
        """Write p, sigmoids of x, but w and h as they are, and delta, 0 but for o = object of each
        box whose overlap of this kind (`ops.overlap`) with every truth, up to the first at x = 0,
        is threshold or less.

        With `softmax` x and y are as they are, too, the classes a softmax, and delta is
        scale * o * o (1 - o). The box of anchor a, sizes (A, 2), in cell i, j is
        (j + sigmoid(x)) / W, (i + sigmoid(y)) / H, exp(w, h) * sizes[a].
        """

    def region_truths(
        self,
        p: Array,
        truths: Array,
        sizes: Array,
        by_bias: bool,
        rescore: bool,
        object_scale: float,
        class_scale: float,
        coord_scale: float,
        delta: Array,
    ) -> None:
        """Write delta for the box in the cell of each truth, up to the first without a width, whose
        size is most like it, with by_bias the size of its anchor; p as `yolo_scores` writes it with
        `softmax` (Redmon and Farhadi 2017).
        """

    def yolo_truths(
        self,
        p: Array,
        truths: Array,
        anchors: Array,
        slots: Array,
        kind: int,
        weights: YoloWeights,
        delta: Array,
        stats: Array,
    ) -> None:
        """Write delta for the box in the cell of each truth, up to the first without a width, whose
        anchor is most like it, and for others like it; anchors (B, 2), slots (B) int32 their places
        among the boxes, -1 for none (Redmon and Farhadi 2018).

        stats (N, 2) = sum of 1 - overlap of these boxes and their number.
        """

    # Rows and the largest values

    def take_rows(self, x: Array, index: Array, cut: bool, y: Array, wrong: Array) -> None:
        """y = x[index]; x (K, D), index (M), y (M, D).

        An index outside 0 to K - 1 is invalid; it is truncated before that check with `cut`, else
        after it.
        """

    def add_rows(self, dy: Array, index: Array, dx: Array) -> None:
        """dx[index] += dy in the order of dy (M, D); dx (K, D); an index outside dx is skipped."""

    def top_values(self, x: Array, top_k: int, places: bool, values: bool, y: Array) -> None:
        """Write the places of the top_k largest values with `places`, then the values with
        `values`; of equal ones the larger place is first.

        x (outer, C, inner), y (outer, top_k or 2 * top_k, inner). NaN is larger than any number.
        """

    # Recurrent units

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

    # Softmax and losses: x, prob (outer, C, inner), label (outer, inner); a label `ignore` does not
    # count and has gradient 0

    def softmax_forward(self, x: Array, y: Array) -> None:
        """y = exp(x - max) / sum of that over the channels."""

    def softmax_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dx = y * (dy - sum of dy * y over the channels); dx may be dy."""

    def softmax_loss_forward(
        self, x: Array, label: Array, counting: Counting, prob: Array, outcome: Outcome
    ) -> None:
        """prob = softmax of x, loss = sum of -log(max(prob of the label, FLT_MIN)) / norm."""

    def softmax_loss_backward(
        self, prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
    ) -> None:
        """dx = weight / norm * (prob - 1 at the label)."""

    def infogain_loss_forward(
        self,
        x: Array,
        label: Array,
        matrix: Array,
        counting: Counting,
        prob: Array,
        outcome: Outcome,
    ) -> None:
        """prob = softmax of x, loss = -sum over classes of matrix[label] * log(max(prob, 1e-20)) /
        norm; matrix (C, C).
        """

    def infogain_loss_backward(
        self,
        prob: Array,
        label: Array,
        matrix: Array,
        ignore: int | None,
        weight: Array,
        norm: Array,
        dx: Array,
    ) -> None:
        """dx = weight / norm * (prob * sum of matrix[label] - matrix[label])."""

    def multinomial_loss_forward(
        self, prob: Array, label: Array, divisor: float, loss: Array, wrong: Array
    ) -> None:
        """loss = -sum of log(max(prob of the label, 1e-20)) / divisor; prob (N, C), label (N)."""

    def multinomial_loss_backward(
        self, prob: Array, label: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = -weight / divisor / max(prob, 1e-20) at the label, else 0."""

    def sigmoid_loss_forward(
        self,
        x: Array,
        target: Array,
        ignore: int | None,
        divisor: float | None,
        loss: Array,
        norm: Array,
    ) -> None:
        """loss = sum of max(x, 0) - x * target + log(1 + exp(-|x|)) / norm."""

    def sigmoid_loss_backward(
        self, x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
    ) -> None:
        """dx = weight / norm * (sigmoid(x) - target)."""

    def euclidean_loss_forward(
        self, x: Array, target: Array, divisor: float, difference: Array, loss: Array
    ) -> None:
        """difference = x - target, loss = sum of its squares / 2 / divisor."""

    def euclidean_loss_backward(
        self, difference: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * difference."""

    def hinge_loss_forward(
        self,
        x: Array,
        label: Array,
        squares: bool,
        divisor: float,
        slack: Array,
        loss: Array,
        wrong: Array,
    ) -> None:
        """slack = max(0, 1 + x), at the label -max(0, 1 - x); loss = sum of its absolute values, or
        with `squares` of its squares, / divisor; x and slack (N, C), label (N).
        """

    def hinge_loss_backward(
        self, slack: Array, squares: bool, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * sign(slack), or with `squares` times 2 * slack."""

    def contrastive_loss_forward(
        self,
        a: Array,
        b: Array,
        similar: Array,
        margin: float,
        legacy: bool,
        divisor: float,
        difference: Array,
        factor: Array,
        loss: Array,
    ) -> None:
        """difference = a - b (N, C), d its length; loss = sum / 2N of d^2 where similar (N), else
        of max(margin - d, 0)^2, with `legacy` of max(margin - d^2, 0) (Hadsell et al. 2006).

        The divisor is N; factor (N) is what backward multiplies the difference by.
        """

    def contrastive_loss_backward(
        self, difference: Array, factor: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * factor * difference."""

    def accuracy(
        self, x: Array, label: Array, top_k: int, ignore: int | None, room: Room, outcome: Shares
    ) -> None:
        """share = fraction of the labels with fewer than top_k other scores >= theirs, shares (C) =
        that of each class.

        The room, hits and counts (C), is there to count in: zeros before and after.
        """

    # Images

    def transform_batch(
        self, records: Array, out: Array, crops: Crops, mean: Maybe, scale: float
    ) -> None:
        """out (N, C, h, w) = (records - mean) * scale, cropped at the offsets and mirrored; records
        (N, C, H, W) of uint8 or float32.

        crops are h_off, w_off and mirror, of one value an image; mean is None or (C, H, W), where C
        as well as H and W may be 1. On a GPU all but out may lie on the host; a mean is best kept
        on the device.
        """

    # Updates

    def update_params(
        self, rule: str, arrays: Sequence[Array], segments: Segments, numbers: Sequence[Number]
    ) -> None:
        """Update flat arrays in place: w, g and the rule's history, with the rate and decay of each
        of the segments; g becomes what was subtracted from w.

        sgd (momentum): h = momentum*h + rate*g; w -= h.
        nesterov (momentum): h' = momentum*h + rate*g; w -= (1 + momentum)*h' - momentum*h; h = h'.
        rms (keep, take, delta): h = keep*h + take*g^2; w -= rate*g/(sqrt(h) + delta).
        adadelta (momentum, delta): h, u are means of g^2, of v^2 with v = g*sqrt((u + delta)/(h +
        delta)); w -= rate*v.
        adam (beta1, beta2, delta, correction): m, v = means of g, g^2 by beta1, beta2; w -=
        rate*correction*m/(sqrt(v) + delta).
        """

    def fuses_update(self, depth: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
        """Return True if `product_update` saves passes, for factors (depth, R) and (depth, C) of
        this type and a parameter of this shape, (R, C).
        """

    def product_update(
        self,
        rule: str,
        a: Array,
        b: Array,
        arrays: Sequence[Array],
        segments: Segments,
        numbers: Sequence[Number],
    ) -> None:
        """Update arrays (R, C) in place, w and the rule's history, as `update_params` does with the
        gradient a.T @ b of a (M, R) and b (M, C), which is not kept; there is one segment.
        """
