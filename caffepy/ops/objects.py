"""The objects of a back end, beside its functions: what both implementations of each class do.

`protocol.Ops` has a constructor for each. Methods of an implementation have a docstring only where
they add to this one; the CPU inherits what has no meaning there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from numpy.typing import DTypeLike

from caffepy.device.blob import Array, Blob, Layout
from caffepy.ops.update_state import Number, StepResult

Specs = tuple[tuple[tuple[int, ...], DTypeLike], ...]
"""The shape and element type of each array."""

PARTS = ("data", "forward", "backward", "synchronization", "update")
"""The phases of an iteration, in their order."""

HOST = "host"
"""A phase of GPUs only: idle, since the host has not enqueued work yet."""

States = Sequence[Array]
"""h and c of an LSTM."""

Preparation = tuple[Sequence[Array], float, float, Sequence[Array | None], Array]
"""Arguments of `Ops.batch_norm_prepare` but x: running, fraction, eps, affine, numbers."""


class NormForward(NamedTuple):
    """`Ops.norm_forward` of a convolution's output, after `Ops.batch_norm_prepare` of it writes the
    numbers; with no preparation they are given. other, if any, has the shape of y.
    """

    preparation: Preparation | None
    numbers: Array
    other: Array | None
    ceiling: float | None
    y: Array
    bits: Array | None


class Normalized(NamedTuple):
    """`Ops.norm_forward` of x without another addend, as a convolution reads it."""

    numbers: Array
    ceiling: float | None


Windows = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""kernel, stride and pad, each (height, width)."""


class Maxima(NamedTuple):
    """`Ops.max_pool_forward` of a convolution's output, or its gradient: y, or dy in its place, the
    index of each, and the windows. With `relu` maxima <= 0 become 0.
    """

    y: Array
    where: Array
    window: Windows
    relu: bool


class NormSums(NamedTuple):
    """The first half of `Ops.norm_backward`, of the gradient g = dx of a convolution, plus `more`
    if there is one.

    masked = g where y, or its bits, let it pass (without a y: where x * factor + shift does);
    dscale += sums of masked * (x - mean) * inverse, dbias += sums of masked; and line (2, C) =
    slope and rest of the second half, `Ops.norm_gradient`.
    x, more, y and masked have the shape of the convolution's x. Without an x only masked is wanted.
    """

    x: Array | None
    numbers: Array
    more: Array | None
    y: Array | None
    bits: Array | None
    ceiling: float | None
    masked: Array
    dscale: Array | None
    dbias: Array | None
    line: Array


class NormGradient(NamedTuple):
    """Arguments of `Ops.norm_gradient`, which writes the gradient of x."""

    x: Array
    numbers: Array
    line: Array
    g: Array


class Convolution(Protocol):
    """A convolution of fixed shapes: x (N, C, *spatial), w (O, C/g, *kernel), y (N, O, *out).

    On a GPU x, y and their gradients are float32 or float64 in this order of axes, or float32,
    float16 or uint16 (bfloat16) with the channels last; w, b and their gradients are always float32
    (float64 for doubles) in Caffe's order. Plans are made at the first call of each method, with
    the precision of that time. With the channels last, the backward methods reuse what the last
    forward made of w, and of x if it is the same array: neither may have changed in between.
    """

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of y."""

    @property
    def can_replay(self) -> bool:
        """True if a replay on the CPU can do what the methods do, see `device/recording.py`."""

    def arrange_ahead(self, w: Array) -> bool:
        """Convert w to what forward multiplies by, as the last one did, for the passes up to
        `end_ahead`, which wait for it on any stream. Return True if there is anything to convert.
        """

    def end_ahead(self) -> None:
        """Note that the weights may change again."""

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        """Write y = w * x + b; max(0, .) of it with `relu`."""

    def takes_normalized(self, layout: Layout) -> bool:
        """Return True if `forward_prepare` with `given` saves passes over an x of this layout."""

    def forward_prepare(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        y: Array,
        preparation: Preparation,
        given: Normalized | None = None,
    ) -> None:
        """Write y = w * x + b, then `Ops.batch_norm_prepare` of y, whose channels are axis 1. With
        `given`, the convolution reads x normalized by it.
        """

    def pools(self, layout: Layout, window: Windows) -> bool:
        """Return True if `forward_maxima` with `relu`, and its gradient, may save passes over an
        output of this layout with these windows.
        """

    def forward_maxima(
        self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima
    ) -> None:
        """Write the maxima of w * x + b, and their index; the output need not be written."""

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx, the transpose of `forward`."""

    def sums_gradients(self, dy: Array, dx: Array, alike: bool) -> bool:
        """Return True if `backward_data_norm` may save passes over such arrays; `alike`: `more` is
        0 wherever dx is, because of a stride or the like.
        """

    def backward_data_norm(self, dy: Array, w: Array, norm: NormSums) -> None:
        """Write what `backward_data` writes, and the first half of the backward of x's
        normalization.
        """

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw the products of dy and x, and to db the sums of dy; None is not wanted."""

    def backward_weight_maxima(
        self, x: Array, output: Array, maxima: Maxima, dw: Array | None, db: Array | None
    ) -> None:
        """Add to dw and db from the gradient of the maxima; the gradient of the output need not be
        written.
        """

    def backward_weight_relu(
        self, x: Array, y: Array, dy: Array, dw: Array | None, db: Array | None
    ) -> None:
        """Add to dw and db of y = relu(w * x + b); may change dy."""

    def skips_gradient(self, layout: Layout) -> bool:
        """Return True if the method below saves passes over arrays of this layout."""

    def backward_norm_gradient(
        self, x: Array | None, w: Array, dy: NormGradient, dw: Array | None, to: NormSums | Array
    ) -> None:
        """Compute `backward_weight` without a bias, and `backward_data` or `backward_data_norm`,
        from a dy that need not be written. If x is None, it is what the normalization of `to`,
        which has an x and no y, gives.
        """

    def skips_output(self, layout: Layout) -> bool:
        """Return True if the methods below save passes over arrays of this layout."""

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        """Normalize w * x, which need not be written."""

    def backward_normalized(
        self,
        x: Array,
        w: Array,
        g: Array,
        numbers: Array,
        gradients: Sequence[Array | None],
        to: NormSums | Array | None,
    ) -> None:
        """Compute the gradients of the last `forward_normalized` from g, that of w * x * factor +
        shift. Add to those of w, scale and bias that are wanted; write dx, or the sums `to` of it.
        """


class LSTM(Protocol):
    """A layer of LSTM units: T steps, N streams, H units.

    a_t = input_t + (cont_t h_{t-1}) @ w.T, then the unit of `Ops.lstm_unit_forward`. Gates are in
    the order i, f, o, g; w is (4H, H), cont (T, N), the first states h and c are (N, H).
    """

    def forward(
        self, a: Array, w: Array, cont: Array, first: States, kept: Array, h: Array, c: Array
    ) -> None:
        """Write h and c (T, N, H) of all steps.

        a (T, N, 4H) holds the inputs' sums, afterwards the activations of the gates. kept (T, N, H)
        becomes cont_t h_{t-1}, which the gradient of w needs.
        """

    def backward(
        self, a: Array, w: Array, cont: Array, c_first: Array, c: Array, dy: Array, da: Array
    ) -> None:
        """da (T, N, 4H) = gradient in the sums of gates, from dy (T, N, H), the gradient in h."""


class RNN(Protocol):
    """h_t = tanh(input_t + (cont_t h_{t-1}) @ w.T): w (H, H), cont (T, N); T, N, H as in LSTM."""

    def forward(self, h: Array, w: Array, cont: Array, h_first: Array, kept: Array) -> None:
        """h (T, N, H): the inputs' sums, then the states; kept = cont_t h_{t-1}; h_first (N, H)."""

    def backward(self, h: Array, w: Array, cont: Array, dh: Array) -> None:
        """dh (T, N, H), the gradient in h from outside, becomes that in the sums inside tanh."""


class UpdateState(Protocol):
    """Device-side numbers of an update: `rate`, `decay` and `correction` are set by
    `set_hyperparams`, `scale` of the gradients and `go` by `check_and_scale`; gradients are
    multiplied by `loss_scale` until then.

    Order of calls in an iteration: `set_hyperparams`, `begin`, `accumulate_loss` after each forward
    pass, `check_and_scale` after the last backward pass, the update, `mark_enqueued`. On a GPU all
    but `set_hyperparams`, `loss`, `mark_enqueued` and `step_results` can be captured.
    """

    rate: Number
    decay: Number
    correction: Number
    scale: Number
    go: Number
    loss_scale: Number

    def set_hyperparams(self, rate: float, decay: float, correction: float, ahead: int = 0) -> None:
        """Set learning rate, weight decay and bias correction of the next update, or on a GPU of
        the one `ahead` updates later.
        """

    def begin(self, diffs: Sequence[Array]) -> None:
        """Zero these gradients and the accumulated loss."""

    def save_stats(self, blobs: Sequence[Blob]) -> None:
        """Save these float32 blobs for `restore_stats`; after a STOPPED iteration, restore."""

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        """Copy the saved values back into these blobs."""

    def accumulate_loss(self) -> None:
        """Add the loss of a forward pass, the sum of data * diff over the losses, and count the
        pass in the device's step counter.
        """

    def pack_metrics(self, metrics: Array) -> None:
        """Write the loss where the all-reduce averages it; NaN if this device found a problem."""

    def pack_scale(self, spare: Array) -> None:
        """Write the loss scale, if any, to the spare elements that are broadcast with the data."""

    def unpack_scale(self, spare: Array) -> None:
        """Take over the loss scale, if any, that was broadcast with the data."""

    def loss(self) -> float:
        """Return the loss of the last pass, when the device has finished it."""

    def check_loss(self, check: Callable[[], object]) -> None:
        """Call `check` after a pass; where the CPU replays it, if the loss is not finite."""

    @property
    def needs_norm(self) -> bool:
        """True if `check_and_scale` needs the gradients' norm, not the loss alone."""

    def check_and_scale(
        self, diff: Array, metrics: Array | None = None, abort_flag: int = 0
    ) -> None:
        """Check the loss and the gradients in flat `diff`; set `scale` and `go`.

        The loss is that in `metrics`, after an all-reduce, but not finite if the int at host
        address `abort_flag` is not 0; without metrics that of this device.
        """

    def mark_enqueued(self, count: int = 1) -> None:
        """Count iterations whose `check_and_scale` is on the device's stream by now."""

    def step_results(self, wait: bool, room: int = 1) -> list[StepResult]:
        """Return results in order that were not returned yet: all, or without `wait` those
        available now.

        In any case it waits for some if the host is too many iterations ahead to enqueue `room`
        more.
        """

    @property
    def done(self) -> int:
        """The number of iterations that a GPU has finished; may be read from another thread."""

    def resync(self) -> None:
        """After an interruption, drop pending results and continue from the device's counter."""

    def resume(self) -> None:
        """Allow updates again after an iteration that was STOPPED."""

    def state(self) -> dict[str, float]:
        """Return what a snapshot keeps so that a resumed run continues exactly."""

    def set_state(self, state: dict[str, float]) -> None:
        """Restore what `state` returned."""


class Sums(Protocol):
    """Sums over passes of the data of blobs and of a net's losses."""

    def clear(self) -> None:
        """Zero the sums, for the blobs' current shapes."""

    def add(self) -> None:
        """Add the values of a pass."""

    def read(self) -> tuple[list[Array], float]:
        """Return the sums, float64 in the blobs' shapes, and the sum of the losses."""


class PhaseTimer(Protocol):
    """Seconds by phase of an iteration (PARTS); nothing is measured unless `running`.

    Between `stop` and `start` no time is counted. An iteration is `begin`, then a `mark` at the end
    of each phase.
    """

    running: bool

    def start(self) -> None:
        """Count time again."""

    def sample(self, number: int, count: int) -> None:
        """Time only the last of `count` iterations that are enqueued as one, as if each took as
        long; iteration `number` comes next. `sample(0, 1)` ends that.
        """

    def begin(self) -> None:
        """Begin an iteration, or a pass of it."""

    def mark(self, part: str) -> None:
        """Count the time since the last call as this phase."""

    def stop(self) -> None:
        """Count no time."""

    def fetching(self) -> AbstractContextManager[None]:
        """Return a block between iterations in which the host waits for data or uploads them."""

    def issuing(self) -> AbstractContextManager[None]:
        """Return a block in which the host enqueues other work."""

    def read(self) -> dict[str, float]:
        """Return the seconds by phase; a GPU's last iterations may be missing: nothing waits."""


class Stopwatch(Protocol):
    """The time between marks among the operations (of the current stream)."""

    def hold(self, milliseconds: float) -> None:
        """Delay what follows on a GPU, so that it does not wait for the host in between."""

    def mark(self) -> None:
        """Record the time when everything up to here is done."""

    def read(self) -> list[float]:
        """Wait for the marks, remove them and return the milliseconds from each to the next."""


class Lattice(Protocol):
    """A filter of points (P, d) by a Gaussian of standard deviation 1, up to a factor, on a
    permutohedral lattice (Adams, Baek and Davis 2010).
    """

    def filter(self, x: Array, y: Array, transposed: bool = False) -> None:
        """Write y (C, P), each row that of x (C, P) blurred; with `transposed` add it to y, blurred
        along the axes in the other order, which is the transpose.
        """


class Staging(Protocol):
    """Arrays on their way to where layers compute: `room`, fill, `send` in one thread; `take`,
    `done` in another. `gpu` is the number of the device, None on the CPU.
    """

    gpu: int | None = None

    def room(self, layout: Specs) -> list[Any]:
        """Return host arrays to fill, the same ones for the same layout, once they are free."""

    def target(self, stream: Any) -> Array:
        """Return the array on the GPU that takes the first of what `room` returned, to be written
        by work of this stream, which waits until it is free.
        """
        raise NotImplementedError

    def resize(
        self, stream: Any, images: Sequence[tuple[int, int, int]], to: Sequence[int]
    ) -> None:
        """Resize images to these rows of `target(stream)`, (N, 3, H, W) uint8, as OpenCV does,
        bilinear: each is the address of its three planes, height and width.
        """
        raise NotImplementedError

    def send(self, there: Sequence[int] = ()) -> None:
        """Start to copy the filled arrays to the device, except the rows of the first that are
        `there` already.
        """

    def take(self) -> list[Array]:
        """Return what was sent, as arrays of the device for operations of the current stream."""

    def done(self) -> None:
        """Mark that the operations that use what was taken have been enqueued."""
