"""Attention from one place of a map to others, which other maps predict."""

from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import PointwiseSpatialAttentionParameter

DISTRIBUTE = PointwiseSpatialAttentionParameter.DISTRIBUTE


@layer("PointwiseSpatialAttention")
class PointwiseSpatialAttention(Layer):
    """x (N, C, H, W), masks (N, Hm * Wm, H, W) -> (N, C, H, W); y = x @ A / normalization_factor,
    with A (N, H * W, H * W) (PSANet: Zhao et al. 2018).

    The mask of place p lies around it, with p in its middle. COLLECT: A[q, p] is what the mask of p
    has at q, DISTRIBUTE: A[p, q] is; 0 beyond the mask, and with is_softmax each column of A
    becomes its softmax, these 0 with it.
    """

    on_gpu = True
    bottoms = 2
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.pointwise_spatial_attention_param
        given = param.HasField("attention_mask_height"), param.HasField("attention_mask_width")
        if any(given) != all(given):
            raise ConfigError("attention_mask_height and attention_mask_width go together")
        self.mask = (param.attention_mask_height, param.attention_mask_width)
        if any(given) and any(side < 3 or side % 2 == 0 for side in self.mask):
            raise ConfigError(
                "attention_mask_height and attention_mask_width must be odd and above 1, not "
                f"{self.mask[0]} and {self.mask[1]}"
            )
        if not all(given):
            self.mask = (0, 0)
        if param.HasField("normalization_factor") and not param.normalization_factor:
            raise ConfigError("normalization_factor must not be 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, masks = bottom[0].shape, bottom[1].shape
        if len(shape) != 4 or len(masks) != 4:
            raise ConfigError(
                f"{self.type} needs x and masks with 4 axes, not {list(shape)} and {list(masks)}"
            )
        n, self.channels, height, width = shape
        sides = (self.mask[0] or 2 * height - 1), (self.mask[1] or 2 * width - 1)
        wanted = n, sides[0] * sides[1], height, width
        if masks != wanted:
            raise ConfigError(
                f"masks of {sides[0]} x {sides[1]} for {list(shape)} need shape {list(wanted)}, "
                f"not {list(masks)}"
            )
        top[0].reshape_like(bottom[0])
        param = self.param.pointwise_spatial_attention_param
        given = param.HasField("normalization_factor")
        self.scale = 1 / (param.normalization_factor if given else sides[0] * sides[1])
        self.places = height * width
        self.attention = self.buffer((n, self.places, self.places))
        self.change = self.buffer((n, self.places, self.places))
        self.find_places(sides, width)

    def find_places(self, sides: tuple[int, int], width: int) -> None:
        """Find where each element of A is in the masks, and where each of the masks is in A."""
        rows, columns = sides
        y, x = np.divmod(np.arange(self.places), width)  # of p, and of q
        down = y[:, None] - y + (rows - 1) // 2  # (q, p)
        right = x[:, None] - x + (columns - 1) // 2
        inside = (down >= 0) & (down < rows) & (right >= 0) & (right < columns)
        taken = (down * columns + right) * self.places + np.arange(self.places)
        if self.param.pointwise_spatial_attention_param.psa_type == DISTRIBUTE:
            inside, taken = inside.T, taken.T
        back = np.full(rows * columns * self.places, -1)
        back[taken[inside]] = np.flatnonzero(inside)
        self.sources, self.targets = (self.buffer(a.shape, np.int64) for a in (taken, back))
        self.inside, self.used = (self.buffer(a.shape, np.uint8) for a in (inside, back))
        self.sources.host_data[...] = np.where(inside, taken, 0)
        self.inside.host_data[...] = inside
        self.targets.host_data[...] = np.maximum(back, 0)
        self.used.host_data[...] = back >= 0

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        n, attention = len(self.attention.data), self.attention.data
        masks = np.take(bottom[1].data.reshape(n, -1), self.sources.data, axis=1)  # (N, P, P)
        if self.param.pointwise_spatial_attention_param.is_softmax:
            self.ops.softmax_forward(masks * self.inside.data, attention)
        else:
            np.multiply(masks, self.inside.data, out=attention)
        maps = (n, self.channels, self.places)
        x, y = bottom[0].data.reshape(maps), top[0].data.reshape(maps)
        for given, weights, made in zip(x, attention, y, strict=True):
            self.ops.matmul(given, weights, made, scale=self.scale)  # (C, P) @ (P, P)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy @ A.T, dA = x.T @ dy, each / normalization_factor; dmasks are those of A."""
        n, attention, change = len(self.attention.data), self.attention.data, self.change.data
        maps = (n, self.channels, self.places)
        x, dy = bottom[0].data.reshape(maps), top[0].diff.reshape(maps)
        if propagate_down[0]:
            for out, weights, given in zip(
                bottom[0].diff.reshape(maps), attention, dy, strict=True
            ):
                self.ops.matmul(given, weights.T, out, scale=self.scale)
        if propagate_down[1]:
            for given, slope, out in zip(x, dy, change, strict=True):
                self.ops.matmul(given.T, slope, out, scale=self.scale)  # (P, C) @ (C, P)
            if self.param.pointwise_spatial_attention_param.is_softmax:
                self.ops.softmax_backward(attention, change, change)
            slopes = np.take(change.reshape(n, -1), self.targets.data, axis=1)
            np.multiply(slopes, self.used.data, out=bottom[1].diff.reshape(n, -1))

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return tops[0] * self.places
