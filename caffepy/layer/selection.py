"""Layers that select: places of the largest values, windows, items by index or by a selector."""

from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Layout
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.data_error import error_flag


@layer("ArgMax")
class ArgMax(Layer):
    """The places of the top_k largest values, largest first, ties to the larger place; no gradient.

    With `axis`: (..., c, ...) -> (..., top_k, ...), places, or values with out_max_val. Without:
    (N, ...) -> (N, 1, top_k), or (N, 2, top_k), places and values, with out_max_val.
    """

    on_gpu = True
    in_place = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.argmax_param, bottom[0].shape
        axis = bottom[0].axis(param.axis) if param.HasField("axis") else None
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

    def allow_force_backward(self, index: int) -> bool:
        return False


@layer("Crop")
class Crop(Layer):
    """Cuts bottom 0, from the offsets on, to the size of bottom 1 in the axes from `axis` (2 unless
    given).
    """

    on_gpu = True
    bottoms = 2
    in_place = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, axis = self.param.crop_param, bottom[0].axis(self.param.crop_param.axis)
        shape, wanted = bottom[0].shape, bottom[1].shape
        if len(shape) != len(wanted):
            raise ConfigError(
                f"the bottoms must have equally many axes: {list(shape)} and {list(wanted)}"
            )
        offsets: list[int] = list(param.offset)
        cropped = len(shape) - axis
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

    def layout_for(self, preferred: Layout) -> Layout:
        return preferred

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.copy(bottom[0].data[self.window], top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy inside the window, 0 outside; 0 for bottom 1, of which only the size counts."""
        if propagate_down[0]:
            bottom[0].diff.fill(0)
            self.ops.copy(top[0].diff, bottom[0].diff[self.window])
        if propagate_down[1]:
            bottom[1].diff.fill(0)


@layer("BatchReindex")
class BatchReindex(Layer):
    """y[i] = x[index[i]]; x (N, ...), index (M) of whole numbers, y (M, ...)."""

    on_gpu = True
    bottoms = 2
    in_place = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.wrong = error_flag(self, self.no_item)

    def no_item(self, index: float) -> DataError:
        items = self.view[0]
        return DataError(f"index {index:g} is not one of the {items} items 0 to {items - 1}")

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
        if propagate_down[1]:
            raise ConfigError(
                "BatchReindex cannot differentiate its indices; give them propagate_down: false"
            )
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(self.view)
            dx.fill(0)
            self.ops.add_rows(
                top[0].diff.reshape(bottom[1].count, self.view[1]), bottom[1].data, dx
            )

    def allow_force_backward(self, index: int) -> bool:
        return index == 0


@layer("Filter")
class Filter(Layer):
    """Of each bottom but the last the items whose selector, in the last bottom (N), is not 0: (N,
    ...) -> (M, ...).

    The tops have the bottoms' shapes until the first forward; M may be 0.
    """

    bottoms = (2, None)
    tops = (1, None)
    in_place = False
    always_reshape = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(top) != len(bottom) - 1:
            raise ConfigError(
                "Filter has a top for each bottom but the selector: "
                f"{len(bottom) - 1}, not {len(top)}"
            )
        self.started = False
        self.selector = len(bottom) - 1

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Count the items; at the net's construction, without values in the selector, all."""
        n = bottom[0].shape[0]
        selector = bottom[-1]
        if selector.shape[0] != n or selector.count != n:
            raise ConfigError(
                f"the selector must have shape [{n}] for {n} items, not {list(selector.shape)}"
            )
        for i, b in enumerate(bottom[:-1]):
            if b.shape[0] != n:
                raise ConfigError(f"bottom {i} has {b.shape[0]} items, the selector {n}")
        self.chosen = np.flatnonzero(selector.data) if self.started else np.arange(n)
        self.started = True
        for b, t in zip(bottom, top, strict=False):
            t.reshape([len(self.chosen), *b.shape[1:]])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for b, t in zip(bottom, top, strict=False):
            np.take(b.data, self.chosen, axis=0, out=t.data, mode="clip")

    def allow_force_backward(self, index: int) -> bool:
        return index != self.selector

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy of the chosen items, 0 of the others."""
        if propagate_down[-1]:
            raise ConfigError(
                "Filter cannot differentiate its selector; give it propagate_down: false"
            )
        for b, t, wanted in zip(bottom, top, propagate_down, strict=False):
            if wanted:
                b.diff.fill(0)
                b.diff[self.chosen] = t.diff
