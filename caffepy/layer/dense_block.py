"""DenseBlock: a whole block of a DenseNet as one layer (caffe_ocr)."""

from collections.abc import Sequence
from itertools import chain
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import TRAIN, FillerParameter

EPS = 1e-5
FIXED = {
    "pad_h": 1,
    "pad_w": 1,
    "conv_verticalStride": 1,
    "conv_horizentalStride": 1,
    "filter_H": 3,
    "filter_W": 3,
    "use_dropout": False,
    "use_BC": False,
}
"""Settings that have no other values here."""


@layer("DenseBlock")
class DenseBlock(Layer):
    """(N, C, H, W) -> (N, C + T g, H, W): behind the bottom, from each of T transitions g channels,
    3x3 convolutions of ReLU(scale * normalized + bias) of all channels before (Huang et al. 2017).

    Blobs: T filters (g, C + t g, 3, 3); T scales, T biases, T sums of means and T of variances
    (1, C + t g, 1, 1), and their weight (1,). Each batch of TRAIN is added to
    moving_average_fraction times these, as by BatchNorm; TEST normalizes by them.
    """

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.denseblock_param
        if len(bottom[0].shape) != 4:
            raise ConfigError(f"DenseBlock needs (N, C, H, W), not {list(bottom[0].shape)}")
        for name, value in FIXED.items():
            if getattr(param, name) != value:
                raise ConfigError(f"denseblock_param: {name} must be {value} here")
        self.count, self.growth = param.numTransition, param.growthRate
        if min(self.count, self.growth) < 1:
            raise ConfigError("denseblock_param: numTransition and growthRate must be 1 or more")
        self.channels = [bottom[0].shape[1] + t * self.growth for t in range(self.count)]
        kinds = {
            "filter": param.Filter_Filler,
            "scale": param.BN_Scaler_Filler,
            "bias": param.BN_Bias_Filler,
            "mean": FillerParameter(),
            "variance": FillerParameter(),
        }
        shapes: dict[str, Sequence[int]] = {}
        for kind in kinds:
            for t, c in enumerate(self.channels):
                shape = (self.growth, c, 3, 3) if kind == "filter" else (1, c, 1, 1)
                shapes[f"{kind} {t}"] = shape
        shapes["weight of the sums"] = (1,)
        fillers = chain.from_iterable([filler] * self.count for filler in kinds.values())
        self.make_params(shapes, [*fillers, FillerParameter()])
        self.statistics = self.blobs[3 * self.count :]
        while len(self.param.param) < len(self.blobs):
            self.param.param.add()
        for spec in self.param.param[3 * self.count :]:  # as the fork does
            spec.lr_mult = spec.decay_mult = 0
        self.learns = self.phase == TRAIN

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, c, h, w = bottom[0].shape
        if c != self.channels[0]:
            raise ConfigError(f"the blobs are for {self.channels[0]} channels, not {c}")
        top[0].reshape((n, self.channels[-1] + self.growth, h, w))
        most = (n, self.channels[-1], h, w)
        self.scratch = [self.buffer(most), self.buffer(most)]
        self.grown = self.buffer((n, self.growth, h, w))
        self.gradient = self.buffer(top[0].shape)
        self.normalized = [self.buffer((n, c, h, w)) for c in self.channels]
        self.numbers = [self.buffer((3, c)) for c in self.channels]
        window = (1, 1), (1, 1), (1, 1)
        self.convolutions = [
            self.ops.Convolution((n, c, h, w), (self.growth, c, 3, 3), window, 1, self.dtype)
            for c in self.channels
        ]

    def part(self, which: int, t: int) -> Array:
        """Return a scratch array of the shape of the channels before transition t."""
        shape = self.normalized[t].shape
        return self.scratch[which].data.reshape(-1)[: prod(shape)].reshape(shape)

    def vector(self, kind: int, t: int, diff: bool = False) -> Array:
        """Return the blob of a kind, from the scales on, as (C,)."""
        blob = self.blobs[kind * self.count + t]
        return (blob.diff if diff else blob.data).reshape(-1)

    def normalize(self, x: Array, t: int) -> None:
        """Write (x - mean) / deviation, and both numbers."""
        mean, variance, inverse = self.numbers[t].data
        rows = x.reshape(*x.shape[:2], -1)
        if self.learns:
            self.ops.batch_norm_statistics(rows, mean, variance)
            if not self.recomputes:
                m, fraction = rows.shape[0] * rows.shape[2], self.fraction
                corrected = variance * (m / max(m - 1, 1))
                for kind, new in ((3, mean), (4, corrected)):
                    stored = self.vector(kind, t)
                    stored *= fraction
                    stored += new
        else:
            weight = self.blobs[-1].data
            share = np.where(weight == 0, 0, 1 / np.where(weight == 0, 1, weight))
            np.multiply(self.vector(3, t), share, out=mean)
            np.multiply(self.vector(4, t), share, out=variance)
        np.divide(1, np.sqrt(variance + EPS), out=inverse)
        to = self.normalized[t].data.reshape(rows.shape)
        self.ops.batch_norm_forward(rows, mean, inverse, to)

    @property
    def fraction(self) -> float:
        return float(self.param.denseblock_param.moving_average_fraction)

    def activate(self, t: int) -> Array:
        """Return ReLU(scale * normalized + bias)."""
        y = self.part(1, t)
        rows = self.normalized[t].data.reshape(*y.shape[:2], -1)
        scale, bias = self.vector(1, t), self.vector(2, t)
        self.ops.scale_forward(rows, scale, bias, y.reshape(rows.shape))
        np.maximum(y, 0, out=y)
        return y

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data
        self.ops.copy(bottom[0].data, y[:, : self.channels[0]])
        for t, c in enumerate(self.channels):
            x = self.part(0, t)
            self.ops.copy(y[:, :c], x)
            self.normalize(x, t)
            grown = self.grown.data
            self.convolutions[t].forward(self.activate(t), self.blobs[t].data, None, grown)
            self.ops.copy(grown, y[:, c : c + self.growth])
        if self.learns and not self.recomputes:
            weight = self.blobs[-1].data
            weight *= self.fraction
            weight += 1

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """From the last transition on: what a transition gave gets its gradient through the later
        ones, too.
        """
        y, total = top[0].data, self.gradient.data
        self.ops.copy(top[0].diff, total)
        wanted = self.param_propagate_down
        for t, c in reversed(list(enumerate(self.channels))):
            dy, active, dx = self.grown.data, self.activate(t), self.part(0, t)
            self.ops.copy(total[:, c : c + self.growth], dy)
            if wanted[t]:
                self.convolutions[t].backward_weight(active, dy, self.blobs[t].diff, None)
            self.convolutions[t].backward_data(dy, self.blobs[t].data, dx)
            dx *= active > 0
            rows = dx.reshape(*dx.shape[:2], -1)
            dscale, dbias = (
                self.vector(kind, t, True) if wanted[kind * self.count + t] else None
                for kind in (1, 2)
            )
            normalized = self.normalized[t].data.reshape(rows.shape)
            self.ops.scale_backward(normalized, self.vector(1, t), rows, rows, dscale, dbias)
            mean, _, inverse = self.numbers[t].data
            if self.learns:
                x = self.part(1, t)  # the activations are not needed any more
                self.ops.copy(y[:, :c], x)
                self.ops.batch_norm_backward(x.reshape(rows.shape), mean, inverse, rows, rows)
            else:
                self.ops.scale_forward(rows, inverse, None, rows)
            before = total[:, :c]
            before += dx
        if propagate_down[0]:
            self.ops.copy(total[:, : self.channels[0]], bottom[0].diff)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        """Each transition's filters over each place."""
        places = tops[0] // (self.channels[-1] + self.growth)
        return places * sum(blob.count for blob in self.blobs[: self.count])
