"""Layers that change shapes: join, cut, share, repeat, reduce; and layers of a given shape."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob, Layout, shape_string
from caffepy.device.recording import call
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import ReductionParameter

_SUM, _MEAN, _TOPK = ReductionParameter.SUM, ReductionParameter.MEAN, ReductionParameter.TOPK


@layer("Concat")
class Concat(Layer):
    """Bottoms joined along `axis` (by default 1); all other axes agree. One alone is shared."""

    on_gpu = only_launches = can_replay = True
    can_recompute = True
    bottoms = (1, None)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.concat_param
        if param.HasField("axis") and param.HasField("concat_dim"):
            raise ConfigError("concat_param has both axis and concat_dim; give axis only")
        self.given_axis = param.concat_dim if param.HasField("concat_dim") else param.axis

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        axis, shape = bottom[0].axis(self.given_axis), bottom[0].shape
        before, after = shape[:axis], shape[axis + 1 :]
        for i, b in enumerate(bottom):
            alike = b.shape[:axis] == before and b.shape[axis + 1 :] == after
            if not alike or len(b.shape) != len(shape):
                raise ConfigError(
                    f"bottom {i} has shape {list(b.shape)}, bottom 0 has {list(shape)}: "
                    f"they may differ in axis {axis} only"
                )
        self.axis, self.sizes = axis, [b.shape[axis] for b in bottom]
        self.takes_preferred_layout = axis == 1
        top[0].reshape([*before, sum(self.sizes), *after])
        if len(bottom) == 1:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) > 1:
            self.ops.join([b.data for b in bottom], top[0].data, self.axis)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if len(bottom) > 1 and any(propagate_down):
            wanted = zip(bottom, propagate_down, strict=True)
            diffs = [b.diff if down else None for b, down in wanted]
            self.ops.cut(top[0].diff, self.sizes, diffs, self.axis)


@layer("ShuffleChannel")
class ShuffleChannel(Layer):
    """Channels dealt out: (N, group, C / group, ...) -> (N, C / group, group, ...) (ShuffleNet)."""

    on_gpu = True
    can_recompute = True
    takes_preferred_layout = True
    backward_reads_bottom = backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, group = bottom[0].shape, self.param.shuffle_channel_param.group
        if len(shape) < 2 or group < 1 or not shape[1] or shape[1] % group:
            raise ConfigError(
                f"shuffle_channel_param: the channels of {list(shape)} cannot be split into "
                f"{group} groups"
            )
        self.group = group
        top[0].reshape_like(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.deal_channels(bottom[0].data, top[0].data, self.group)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            hand = bottom[0].shape[1] // self.group
            self.ops.deal_channels(top[0].diff, bottom[0].diff, hand)


@layer("Permute")
class Permute(Layer):
    """The axes in another order: axis i of the top is axis order[i] of the bottom, those that
    `order` leaves out follow (SSD). One that changes nothing is shared.

    Channels that become the last axis may lie last already: a GPU then moves nothing.
    """

    on_gpu = plain_tops = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def order_of(self, shape: Sequence[int]) -> list[int]:
        """Return which axis of the bottom each axis of the top is; ConfigError if that is none."""
        given, axes = list(self.param.permute_param.order), len(shape)
        if len({*given}) < len(given) or any(axis >= axes for axis in given):
            raise ConfigError(
                f"permute_param: order {given} must name axes of the {axes} of {list(shape)}, each "
                "once"
            )
        return [*given, *(axis for axis in range(axes) if axis not in given)]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        self.order = self.order_of(shape)
        self.inverse = [self.order.index(axis) for axis in range(len(shape))]
        self.changes = self.order != sorted(self.order)
        to_last = [0, *range(2, len(shape)), 1]
        self.takes_preferred_layout = len(shape) > 2 and self.order == to_last
        top[0].reshape([shape[axis] for axis in self.order])
        if not self.changes:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.changes:
            self.ops.copy(bottom[0].data.transpose(self.order), top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if self.changes and propagate_down[0]:
            self.ops.copy(top[0].diff.transpose(self.inverse), bottom[0].diff)


@layer("Transpose")
class Transpose(Permute):
    """The axes in another order: axis i of the top is axis dim[i] of the bottom; all are named
    (CTPN).
    """

    def order_of(self, shape: Sequence[int]) -> list[int]:
        order = list(self.param.transpose_param.dim)
        if sorted(order) != list(range(len(shape))):
            raise ConfigError(
                f"transpose_param: dim {order} must name each axis of {list(shape)} once"
            )
        return order


class Turning(Layer):
    """Base of layers whose top is the bottom with `axes` the other way round."""

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def axes_of(self, shape: Sequence[int]) -> list[int]:
        """Return the axes that turn; ConfigError if the bottom does not have them."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        self.axes = self.axes_of(shape)
        steps = [-1 if axis in self.axes else 1 for axis in range(len(shape))]
        self.order = tuple(slice(None, None, step) for step in steps)
        top[0].reshape_like(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.copy(bottom[0].data[self.order], top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.ops.copy(top[0].diff[self.order], bottom[0].diff)


@layer("Flip")
class Flip(Turning):
    """(N, C, H, W) with its columns (`flip_width`) and its rows (`flip_height`) the other way round
    (happynear). Axes that are not there have size 1.
    """

    def axes_of(self, shape: Sequence[int]) -> list[int]:
        if len(shape) > 4:
            raise ConfigError(f"a bottom has at most 4 axes, not {list(shape)}")
        turned = {2: self.param.flip_param.flip_height, 3: self.param.flip_param.flip_width}
        return [axis for axis, turns in turned.items() if turns and axis < len(shape)]


@layer("Reverse")
class Reverse(Turning):
    """The bottom with one `axis` the other way round, by default the first: sequences backward
    (CTPN).
    """

    def axes_of(self, shape: Sequence[int]) -> list[int]:
        axis = self.param.reverse_param.axis
        if not 0 <= axis < len(shape):
            raise ConfigError(f"reverse_param: {list(shape)} has no axis {axis}")
        return [axis]


@layer("Slice")
class Slice(Layer):
    """The bottom cut along `axis` (by default 1) at slice points or evenly. One top is shared."""

    on_gpu = True
    can_recompute = True
    tops = (1, None)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.slice_param
        if param.HasField("axis") and param.HasField("slice_dim"):
            raise ConfigError("slice_param has both axis and slice_dim; give axis only")
        self.given_axis = param.slice_dim if param.HasField("slice_dim") else param.axis
        self.points = list(param.slice_point)
        if self.points and len(self.points) != len(top) - 1:
            raise ConfigError(
                f"{len(top)} tops need {len(top) - 1} slice_point, not {len(self.points)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        axis = bottom[0].axis(self.given_axis)
        shape = list(bottom[0].shape)
        size, parts = shape[axis], len(top)
        if not self.points and size % parts:
            raise ConfigError(
                f"axis {axis} of size {size} cannot be cut into {parts} equal parts; "
                "give slice_point"
            )
        cuts = [0, *(self.points or [size // parts * i for i in range(1, parts)]), size]
        if any(a >= b for a, b in pairwise(cuts)):
            raise ConfigError(
                f"slice_point {self.points} must rise and lie within the {size} of axis {axis}"
            )
        self.axis, self.sizes = axis, [b - a for a, b in pairwise(cuts)]
        self.takes_preferred_layout = axis == 1
        for t, part in zip(top, self.sizes, strict=True):
            t.reshape([*shape[:axis], part, *shape[axis + 1 :]])
        if parts == 1:
            top[0].share_data(bottom[0])
            top[0].share_diff(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if len(top) > 1:
            self.ops.cut(bottom[0].data, self.sizes, [t.data for t in top], self.axis)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if len(top) > 1 and propagate_down[0]:
            self.ops.join([t.diff for t in top], bottom[0].diff, self.axis)


@layer("Split")
class Split(Layer):
    """Every top is the bottom: data are shared, dx = sum of dy_i."""

    on_gpu = True
    can_recompute = True
    can_replay = True
    tops = (1, None)
    backward_reads_bottom = backward_reads_top = False
    can_fuse = True
    takes_preferred_layout = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for t in top:
            t.reshape_like(bottom[0])
            t.share_data(bottom[0])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Add up the gradients of the tops that have one."""
        if not propagate_down[0]:
            return
        diffs, dx = [t.diff for t in top if t.diff_memory.touched], bottom[0].diff
        if len(diffs) > 1:
            self.ops.eltwise_sum(diffs, [1.0] * len(diffs), dx)
        elif diffs:
            self.ops.copy(diffs[0], dx)
        else:
            call(dx.fill, 0)


class View(Layer):
    """The bottom's values in another shape; data and diff are shared."""

    on_gpu = True
    can_replay = True
    can_recompute = True
    is_view = True
    backward_reads_bottom = backward_reads_top = False

    def shape(self, bottom: Blob) -> list[int]:
        """The top's shape."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(self.shape(bottom[0]))
        if top[0].count != bottom[0].count:
            raise ConfigError(
                f"shape {shape_string(top[0].shape)} does not hold the bottom's "
                f"{shape_string(bottom[0].shape)}"
            )
        top[0].share_data(bottom[0])
        top[0].share_diff(bottom[0])

    def layout_for(self, preferred: Layout) -> Layout:
        """The preferred type, in the order of the shape."""
        return Layout(preferred.dtype, False)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Nothing to do."""


@layer("Flatten")
class Flatten(View):
    """Axes `axis` to `end_axis` become one: for axes 1 to 2 (a, b, c, d) -> (a, b * c, d)."""

    def shape(self, bottom: Blob) -> list[int]:
        param = self.param.flatten_param
        start, end = bottom.axis(param.axis), bottom.axis(param.end_axis)
        if start > end:
            raise ConfigError(f"flatten_param: axis {start} comes after end_axis {end}")
        shape = bottom.shape
        return [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]]


@layer("Reshape")
class Reshape(View):
    """Axes `axis` to `axis + num_axes - 1` (all by default) take the given shape.

    In it 0 copies the bottom's axis at that place and one -1 takes what is left:
    (a, b, c) -> (a, b * c) for the dims 0 and -1.
    """

    fixed_batch = False

    def shape(self, bottom: Blob) -> list[int]:
        param = self.param.reshape_param
        n, old = len(bottom.shape), bottom.shape
        start = param.axis if param.axis >= 0 else n + param.axis + 1
        end = n if param.num_axes == -1 else start + param.num_axes
        if not 0 <= start <= end <= n or param.num_axes < -1:
            raise ConfigError(
                f"reshape_param: axis {param.axis} and num_axes {param.num_axes} do not lie within "
                f"{shape_string(old)}"
            )
        dims = list(param.shape.dim)
        if any(d < -1 for d in dims) or dims.count(-1) > 1:
            raise ConfigError(f"reshape_param: dims {dims} must be 0 or more, but for one -1")
        for i, d in enumerate(dims):
            if d == 0:
                if start + i >= n:
                    raise ConfigError(
                        f"reshape_param: dim {i} is 0, which copies axis {start + i}, but the "
                        f"bottom {shape_string(old)} has {n} axes; write the size"
                    )
                dims[i] = old[start + i]
        if -1 in dims:
            known, count = prod(d for d in dims if d != -1), prod(old[start:end])
            if known == 0 or count % known:
                raise ConfigError(
                    f"reshape_param: {count} elements of the bottom {shape_string(old)} cannot be "
                    f"divided into the dims' {shape_string([d for d in dims if d != -1])}; write "
                    "dims beside -1 that divide them"
                )
            dims[dims.index(-1)] = count // known
        elif (made := prod(dims)) != (count := prod(old[start:end])):
            raise ConfigError(
                f"reshape_param: dims {shape_string(dims)} make {made} elements of {count} of the "
                f"bottom {shape_string(old)}; one dim may be -1, which takes what is left"
            )
        return [*old[:start], *dims, *old[end:]]


@layer("Squeeze")
class Squeeze(View):
    """The axes `axis` of size 1 are left out, or without them all that have it (Synopsys)."""

    def shape(self, bottom: Blob) -> list[int]:
        given, old = self.param.squeeze_param.axis, bottom.shape
        axes = [bottom.axis(axis) for axis in given] or [i for i, n in enumerate(old) if n == 1]
        if any(old[axis] != 1 for axis in axes):
            raise ConfigError(
                f"squeeze_param: axes {list(given)} of {shape_string(old)} do not all have size 1"
            )
        return [n for i, n in enumerate(old) if i not in axes]


@layer("Pad")
class Pad(Layer):
    """The bottom within `constant_values`, as many before and behind each axis as `paddings` say
    (Synopsys).
    """

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        given, shape = list(self.param.pad_param.paddings), bottom[0].shape
        if len(given) != 2 * len(shape):
            raise ConfigError(
                f"pad_param: paddings {given} must be two for each axis of {list(shape)}"
            )
        sides = list(zip(given[::2], given[1::2], strict=True))
        top[0].reshape([n + sum(side) for n, side in zip(shape, sides, strict=True)])
        inside = zip(shape, sides, strict=True)
        self.inside = tuple(slice(before, before + n) for n, (before, _) in inside)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data
        y.fill(self.param.pad_param.constant_values)
        self.ops.copy(bottom[0].data, y[self.inside])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.ops.copy(top[0].diff[self.inside], bottom[0].diff)


@layer("Silence")
class Silence(Layer):
    """A sink for blobs that no other layer reads; their gradient is 0."""

    on_gpu = True
    bottoms = (1, None)
    tops = 0
    backward_reads_bottom = backward_reads_top = False
    takes_preferred_layout = True

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        for b, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                b.diff.fill(0)


@layer("Input")
class Input(Layer):
    """The net's inputs, filled by the user: tops of given shapes (none, one for all, one each)."""

    on_gpu = True
    can_replay = True
    bottoms = 0
    tops = (1, None)
    is_input = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Shape the tops, once: a user may reshape them afterwards."""
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise ConfigError(
                f"input_param has {len(shapes)} shapes for {len(top)} tops; give one, or one a top"
            )
        for i, t in enumerate(top):
            if shapes:
                t.reshape(shapes[i if len(shapes) > 1 else 0].dim)


@layer("Parameter")
class Parameter(Layer):
    """The top is a learnable parameter of the given shape, initially 0 or what its blob_filler
    (happynear's) or filler (OpenVINO's) says.
    """

    on_gpu = True
    bottoms = 0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.parameter_param
        for name in ("blob_filler", "filler"):
            if param.HasField(name):
                self.make_params({"parameter": param.shape.dim}, [getattr(param, name)])
                return
        if not self.blobs:
            self.add_blob(param.shape.dim)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Share the data; the diff is the top's own, so that it can be added."""
        top[0].reshape_like(self.blobs[0])
        top[0].share_data(self.blobs[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Share the parameter's memory again, which may have moved."""
        top[0].share_data(self.blobs[0])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if self.param_propagate_down[0]:
            self.ops.add(top[0].diff, self.blobs[0].diff)


@layer("Tile")
class Tile(Layer):
    """The bottom `tiles` times in a row along `axis`: (..., c, ...) -> (..., tiles * c, ...)."""

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.tile_param
        axis, shape = bottom[0].axis(param.axis), list(bottom[0].shape)
        if param.tiles < 1:
            raise ConfigError(f"tile_param: tiles must be 1 or more, not {param.tiles}")
        shape[axis] *= param.tiles
        top[0].reshape(shape)
        outer = prod(shape[:axis])
        self.view = (outer, param.tiles, bottom[0].count // max(outer, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        top[0].data.reshape(self.view)[...] = bottom[0].data.reshape(self.view[0], 1, self.view[2])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(self.view[0], self.view[2])
            np.sum(top[0].diff.reshape(self.view), axis=1, out=dx)


@layer("Reduction")
class Reduction(Layer):
    """(a, b, c, ...) -> (a, b): coeff times the sum of x, |x|, x^2 or the mean, from `axis` on."""

    on_gpu = True
    can_recompute = True
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.reduction_param
        if param.operation == ReductionParameter.TOPK:
            raise ConfigError("operation TOPK is for BatchReduction")
        axis = bottom[0].axis(param.axis)
        top[0].reshape(bottom[0].shape[:axis])
        self.view = (top[0].count, bottom[0].count // max(top[0].count, 1))
        self.operation, self.coeff = param.operation, param.coeff
        if self.operation == ReductionParameter.MEAN:
            self.coeff /= max(self.view[1], 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = bottom[0].data.reshape(self.view)
        if self.operation == ReductionParameter.ASUM:
            x = np.abs(x)
        elif self.operation == ReductionParameter.SUMSQ:
            x = x * x
        y = top[0].data.reshape(-1)
        np.sum(x, axis=1, out=y)
        np.multiply(y, self.coeff, out=y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = coeff * dy, for ASUM times sign(x), for SUMSQ times 2x."""
        if not propagate_down[0]:
            return
        x, dx = bottom[0].data.reshape(self.view), bottom[0].diff.reshape(self.view)
        dy = top[0].diff.reshape(-1, 1) * self.coeff
        if self.operation == ReductionParameter.ASUM:
            np.multiply(np.sign(x), dy, out=dx)
        elif self.operation == ReductionParameter.SUMSQ:
            np.multiply(x, 2 * dy, out=dx)
        else:
            dx[...] = dy


@layer("BatchReduction")
class BatchReduction(Layer):
    """(outer, n, inner) -> (outer, inner): the sum, the mean, or with TOPK the mean of the k
    largest, along one axis (Temporal Segment Networks, UntrimmedNet).

    With levels a, b, ... other than 1 alone the axis has a^2 + b^2 + ... places, and the top an
    axis with a number for each level. With pos the numbers are those on the diagonal of two axes of
    one size. Of equal numbers TOPK takes the first.
    """

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.batch_reduction_param
        self.operation = param.reduction_param.operation
        self.levels = list(param.level) if list(param.level) != [1] else []
        if self.operation not in (_SUM, _MEAN, _TOPK):
            raise ConfigError("batch_reduction_param: operation is SUM, MEAN or TOPK")
        if min(self.levels, default=1) < 1:
            raise ConfigError("batch_reduction_param: level must be 1 or more")
        if len(self.levels) > 1 and (param.pos or self.operation == _TOPK):
            raise ConfigError("batch_reduction_param: pos and TOPK take one level")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.batch_reduction_param, bottom[0].shape
        axis = bottom[0].axis(param.reduction_param.axis)
        size, behind = shape[axis], axis + 1 + param.pos
        self.sizes = [level**2 for level in self.levels] or [size]
        if sum(self.sizes) != size:
            raise ConfigError(f"levels {self.levels} need {sum(self.sizes)} places, not {size}")
        if param.pos and shape[axis + 1 : behind] != (size,):
            raise ConfigError(f"pos needs two axes of one size, not {list(shape[axis:behind])}")
        top[0].reshape(
            (*shape[:axis], *([len(self.sizes)] if self.levels else []), *shape[behind:])
        )
        self.view = prod(shape[:axis]), prod(shape[axis:behind]), prod(shape[behind:])
        self.diagonal = slice(None, None, size + 1 if param.pos else 1)
        k = param.reduction_param.k
        if self.operation == _TOPK:
            if not 1 <= k <= size:
                raise ConfigError(f"batch_reduction_param: k must be 1 to {size}, not {k}")
            self.share = self.buffer((self.view[0], size, self.view[2]))  # 1 / k of the largest

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = bottom[0].data.reshape(self.view)[:, self.diagonal]
        y = top[0].data.reshape(self.view[0], len(self.sizes), self.view[2])
        if self.operation == _TOPK:
            self.choose(x)
            x = x * self.share.data
        first = 0
        for i, size in enumerate(self.sizes):
            np.sum(x[:, first : first + size], axis=1, out=y[:, i])
            if self.operation == _MEAN:
                np.divide(y[:, i], max(size, 1), out=y[:, i])
            first += size

    def choose(self, x: Array) -> None:
        """Set the share of each number: 1 / k if fewer than k come before it by size."""
        k, rank = self.param.batch_reduction_param.reduction_param.k, self.share.data
        rank.fill(0)
        for i in range(x.shape[1]):
            one = x[:, i : i + 1]
            rank[:, :i] += one > x[:, :i]
            rank[:, i + 1 :] += one >= x[:, i + 1 :]
        np.multiply(rank < k, 1 / k, out=rank)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy, over the number of places for MEAN, over k for TOPK and 0 for others there."""
        if not propagate_down[0]:
            return
        dx = bottom[0].diff.reshape(self.view)
        if self.param.batch_reduction_param.pos:
            dx.fill(0)
        dx, first = dx[:, self.diagonal], 0
        dy = top[0].diff.reshape(self.view[0], len(self.sizes), self.view[2])
        for i, size in enumerate(self.sizes):
            part, given = dx[:, first : first + size], dy[:, i : i + 1]
            if self.operation == _TOPK:
                np.multiply(self.share.data, given, out=part)
            else:
                part[...] = given / max(size, 1) if self.operation == _MEAN else given
            first += size
