"""Layers that select: places of the largest values, windows, items by index or by a selector."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.layer.base import Blobs, Layer, Weighted, layer


@layer("ArgMax")
class ArgMax(Layer):
    """The places of the top_k largest values, largest first, ties to the larger place; no gradient.

    With `axis`: (..., c, ...) -> (..., top_k, ...), places, or values with out_max_val. Without:
    (N, ...) -> (N, 1, top_k), or (N, 2, top_k), places and values, with out_max_val.
    """

    on_gpu = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.argmax_param, bottom[0].shape
        axis = bottom[0].axis(param.axis) if param.HasField("axis") else None
        bottom[0].axis(0)  # ConfigError if there is none
        candidates = prod(shape[1:]) if axis is None else shape[axis]
        if not 1 <= param.top_k <= candidates:
            raise ConfigError(
                f"argmax_param: top_k {param.top_k} must lie between 1 and {candidates}"
            )
        if axis is None:
            top[0].reshape([shape[0], 1 + param.out_max_val, param.top_k] + [1] * (len(shape) - 3))
            self.view = (shape[0], candidates, 1)
        else:
            top[0].reshape([*shape[:axis], param.top_k, *shape[axis + 1 :]])
            self.view = (prod(shape[:axis]), candidates, prod(shape[axis + 1 :]))
        self.places = axis is None or not param.out_max_val

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (outer, _, inner) = self.param.argmax_param, self.view
        rows = param.top_k * (self.places + param.out_max_val)
        x, y = bottom[0].data.reshape(self.view), top[0].data.reshape(outer, rows, inner)
        self.ops.top_values(x, param.top_k, self.places, param.out_max_val, y)


@layer("Crop")
class Crop(Layer):
    """Cuts bottom 0, from the offsets on, to the size of bottom 1 in the axes from `axis` on."""

    on_gpu = True
    can_recompute = True
    bottoms = 2
    backward_reads_bottom = backward_reads_top = False
    takes_preferred_layout = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, axis = self.param.crop_param, bottom[0].axis(self.param.crop_param.axis)
        shape, wanted = bottom[0].shape, bottom[1].shape
        if len(shape) != len(wanted):
            raise ConfigError(
                f"the bottoms must have equally many axes: {list(shape)} and {list(wanted)}"
            )
        offsets, cropped = list(param.offset), len(shape) - axis
        if len(offsets) not in (0, 1, cropped):
            raise ConfigError(
                f"crop_param: {len(offsets)} offsets for {cropped} axes; give one, or one an axis"
            )
        if len(offsets) < cropped:
            offsets = (offsets or [0]) * cropped
        window = [slice(None)] * axis
        for i, offset in enumerate(offsets, axis):
            if offset + wanted[i] > shape[i]:
                raise ConfigError(
                    f"axis {i}: offset {offset} and size {wanted[i]} exceed "
                    f"the bottom's size {shape[i]}"
                )
            window.append(slice(offset, offset + wanted[i]))
        self.window = tuple(window)
        top[0].reshape([*shape[:axis], *wanted[axis:]])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.copy(bottom[0].data[self.window], top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy inside the window, 0 outside; 0 for bottom 1, of which only the size counts."""
        if propagate_down[0]:
            bottom[0].diff.fill(0)
            self.ops.copy(top[0].diff, bottom[0].diff[self.window])
        if propagate_down[1]:
            bottom[1].diff.fill(0)


@layer("Embed")
class Embed(Weighted):
    """(...) of whole numbers below K -> (..., O), y = w[x] + b; weight (K, O), bias (O)."""

    on_gpu = True
    backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        0: "Embed cannot differentiate its input; give it propagate_down: false"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.embed_param
        self.inputs, self.outputs = param.input_dim, param.num_output
        if self.inputs < 1 or self.outputs < 1:
            raise ConfigError("embed_param: input_dim and num_output must be 1 or more")
        self.make_weight((self.inputs, self.outputs), self.outputs, param)
        self.wrong = self.error_flag(
            lambda x: DataError(
                f"input {x:g} is not one of the {self.inputs} rows 0 to {self.inputs - 1}"
            )
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape([*bottom[0].shape, self.outputs])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data.reshape(-1, self.outputs)
        rows = bottom[0].data.reshape(-1)
        self.ops.take_rows(self.blobs[0].data, rows, True, y, self.wrong.found)
        self.wrong.check()
        if self.bias is not None:
            self.ops.add_bias(y, self.bias)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw[x] += dy, db += column sums of dy."""
        self.refuse_constants(propagate_down)
        dy = top[0].diff.reshape(-1, self.outputs)
        if (dw := self.weight_diff) is not None:
            self.ops.add_rows(dy, bottom[0].data.reshape(-1), dw)
        if (db := self.bias_diff) is not None:
            self.ops.bias_gradient(dy, db)


@layer("BatchReindex")
class BatchReindex(Layer):
    """y[i] = x[index[i]]; x (N, ...), index (M) of whole numbers, y (M, ...)."""

    on_gpu = True
    bottoms = 2
    backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "BatchReindex cannot differentiate its indices; give them propagate_down: false"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.wrong = self.error_flag(
            lambda index: DataError(
                f"index {index:g} is not one of the {self.view[0]} items 0 to {self.view[0] - 1}"
            )
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[1].shape) != 1:
            raise ConfigError(f"the indices must have one axis, not {list(bottom[1].shape)}")
        n, *item = bottom[0].shape
        top[0].reshape([bottom[1].shape[0], *item])
        self.view = (n, prod(item))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data.reshape(self.view), top[0].data.reshape(bottom[1].count, self.view[1])
        self.ops.take_rows(x, bottom[1].data, False, y, self.wrong.found)
        self.wrong.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx[index[i]] += dy[i], from 0."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            dx, dy = bottom[0].diff.reshape(self.view), top[0].diff
            dx.fill(0)
            self.ops.add_rows(dy.reshape(bottom[1].count, self.view[1]), bottom[1].data, dx)


@layer("Gather")
class Gather(Layer):
    """Places of an axis, listed by gather_param.indices: (outer, n, inner) -> (outer, *shape,
    inner). `shape` is that of the indices, 0 for a single one without axes (Synopsys' Caffe).

    Without a gather_param each top is its bottom, as that of Temporal Segment Networks and PSPNet
    is in a process of its own.
    """

    on_gpu = True
    bottoms = (1, None)
    tops = (1, None)
    same_count = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.gather_param
        self.gathers = self.param.HasField("gather_param")
        self.indices, shape = list(param.indices), list(param.shape)
        self.outer_shape = [] if shape == [0] else shape
        if self.gathers and len(bottom) > 1:
            raise ConfigError(f"Gather with a gather_param takes one bottom, not {len(bottom)}")
        if self.gathers and prod(self.outer_shape) != len(self.indices):
            raise ConfigError(f"{len(self.indices)} indices do not fit the shape {shape}")
        self.wrong = self.error_flag(lambda index: DataError(f"index {index:g} is not there"))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not self.gathers:
            for b, t in zip(bottom, top, strict=True):
                t.reshape_like(b)
            return
        shape, axis = bottom[0].shape, bottom[0].axis(self.param.gather_param.axis)
        outer, n, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
        for index in self.indices:
            if index >= n:
                raise ConfigError(f"gather_param: index {index} is not below {n}, the axis' size")
        top[0].reshape((*shape[:axis], *self.outer_shape, *shape[axis + 1 :]))
        self.view = (outer * n, inner)
        if outer * n > 1 << 24:
            raise ConfigError(f"gather_param: {outer} x {n} rows are more than 2^24")
        rows = np.arange(outer)[:, None] * n + np.array(self.indices, np.int64)
        self.rows = self.buffer([rows.size])
        self.rows.host_data[...] = rows.reshape(-1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.gathers:
            for b, t in zip(bottom, top, strict=True):
                self.ops.copy(b.data, t.data)
            return
        x, y = bottom[0].data.reshape(self.view), top[0].data.reshape(-1, self.view[1])
        self.ops.take_rows(x, self.rows.data, False, y, self.wrong.found)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx[index] += dy, from 0."""
        if not self.gathers:
            for b, t, down in zip(bottom, top, propagate_down, strict=True):
                if down:
                    self.ops.copy(t.diff, b.diff)
        elif propagate_down[0]:
            dx, dy = bottom[0].diff.reshape(self.view), top[0].diff.reshape(-1, self.view[1])
            dx.fill(0)
            self.ops.add_rows(dy, self.rows.data, dx)


@layer("Filter")
class Filter(Layer):
    """Items of each bottom but the last whose selector, in the last bottom (N), is not 0:
    (N, ...) -> (M, ...).

    The tops have the bottoms' shapes until the first forward; M may be 0.
    """

    bottoms = (2, None)
    tops = (1, None)
    always_reshape = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(top) != len(bottom) - 1:
            raise ConfigError(
                "Filter has a top for each bottom but the selector: "
                f"{len(bottom) - 1}, not {len(top)}"
            )
        self.started = False
        self.constant_bottoms = {
            len(top): "Filter cannot differentiate its selector; give it propagate_down: false"
        }

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Count the items; at the net's construction, without values in the selector, all."""
        n, selector = prod(bottom[0].shape[:1]), bottom[-1]
        if selector.shape[:1] != (n,) or selector.count != n:
            raise ConfigError(
                f"the selector must have shape [{n}] for {n} items, not {list(selector.shape)}"
            )
        for i, b in enumerate(bottom[:-1]):
            if b.shape[:1] != (n,):
                raise ConfigError(f"bottom {i} has {prod(b.shape[:1])} items, the selector {n}")
        self.chosen = np.flatnonzero(selector.data) if self.started else np.arange(n)
        self.started = True
        for b, t in zip(bottom, top, strict=False):
            t.reshape([len(self.chosen), *b.shape[1:]])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for b, t in zip(bottom, top, strict=False):
            np.take(b.data, self.chosen, axis=0, out=t.data, mode="clip")

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy of the chosen items, 0 of the others."""
        self.refuse_constants(propagate_down)
        for b, t, wanted in zip(bottom, top, propagate_down, strict=False):
            if wanted:
                b.diff.fill(0)
                b.diff[self.chosen] = t.diff
