"""Layers of nets with weights and activations of few bits (HWGQ: Cai et al. 2017).

They compute with the rounded numbers in floating point, and learn as if nothing had been rounded.
"""

import logging

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import PLAIN, Array, Layout
from caffepy.layer.base import Blobs, layer
from caffepy.layer.convolution import Convolution
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import Neuron
from caffepy.proto.caffe_pb2 import BinaryConvolutionParameter, BinaryInnerProductParameter

log = logging.getLogger(__name__)


@layer("Quant")
class Quant(Neuron):
    """y is, by forward_func: of x > 0 the nearest of the `centers`, of others -negative_slope
    ("hwgq"); 1 or -1 ("sign"); x between -1 and 1 ("hard_tanh"); leaky ReLU ("relu").

    The gradient is that of backward_func: of a leaky ReLU, 0 above clip_thr ("relu"), or 1 between
    -clip_thr and clip_thr ("hard_tanh"); a clip_thr of 0 is none.
    """

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.quant_param
        self.kind, self.slope = param.forward_func, param.negative_slope
        self.clip = param.clip_thr if param.clip_thr > 0 else float(np.finfo(np.float32).max)
        self.is_hard = param.backward_func == "hard_tanh"
        if self.kind not in ("hwgq", "sign", "hard_tanh", "relu"):
            raise ConfigError(
                f'forward_func is hwgq, sign, hard_tanh or relu, not "{param.forward_func}"'
            )
        if param.backward_func not in ("relu", "hard_tanh"):
            raise ConfigError(f'backward_func is relu or hard_tanh, not "{param.backward_func}"')
        centers = np.array(param.centers, np.float32)
        if self.kind == "hwgq" and not (len(centers) and centers.min() > 0):
            raise ConfigError("forward_func hwgq needs centers, all above 0")
        edges = [0, *(centers[:-1] + centers[1:]) / 2]
        if (np.diff(edges) < 0).any():
            raise ConfigError("centers must rise")
        self.steps = list(zip(map(float, edges), map(float, centers), strict=False))
        log.info("Quant: its gradient is that of %s, as in HWGQ", param.backward_func)

    def function(self, x: Array, y: Array) -> None:
        if self.kind == "hard_tanh":
            np.clip(x, -1, 1, out=y)
        elif self.kind == "sign":
            y[...] = np.where(x >= 0, 1.0, -1.0)
        elif self.kind == "relu":
            y[...] = np.where(x > 0, x, x * self.slope)
        else:
            rounded = np.where(x > 0, self.steps[0][1], -self.slope)
            for edge, center in self.steps[1:]:
                rounded = np.where(x > edge, center, rounded)
            y[...] = rounded

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy where -clip <= x <= clip; or dy * (x > 0 ? 1 : slope) where x <= clip."""
        inside = x <= self.clip
        if self.is_hard:
            np.multiply(dy, inside & (x >= -self.clip), out=dx)
        else:
            np.multiply(dy, np.where(x > 0, 1.0, self.slope) * inside, out=dx)


def binarize(
    w: Array, param: BinaryConvolutionParameter | BinaryInnerProductParameter, out: Array
) -> None:
    """Write 1 or -1 for each weight (O, ...) by its sign, with use_alpha times the mean size of an
    output's weights; or w itself without use_binarization.
    """
    if not param.use_binarization:
        out[...] = w
        return
    out[...] = np.where(w >= 0, 1.0, -1.0)
    if param.use_alpha:
        rows, places = w.shape[0], out.reshape(w.shape[0], -1)
        places *= np.abs(w).reshape(rows, -1).mean(axis=1, keepdims=True)


@layer("BinaryConvolution")
class BinaryConvolution(Convolution):
    """Convolution with `binarize`d weights, whose gradient the weights get (HWGQ)."""

    seeks_preferred_layout = False
    can_fuse = False
    can_replay = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        log.info("BinaryConvolution: weights get the gradient of the binary ones, as in HWGQ")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.takes_preferred_layout = False
        self.binary = self.buffer(self.blobs[0].shape)

    @property
    def weight(self) -> Array:
        return self.binary.data

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        binarize(self.blobs[0].data, self.param.binary_convolution_param, self.binary.data)
        super().forward(bottom, top)


@layer("BinaryInnerProduct")
class BinaryInnerProduct(InnerProduct):
    """InnerProduct with `binarize`d weights, whose gradient the weights get (HWGQ)."""

    seeks_preferred_layout = False
    can_replay = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self.can_fuse = False
        if self.transposed or self.normalizes:
            raise ConfigError("BinaryInnerProduct knows neither transpose nor normalize")
        log.info("BinaryInnerProduct: weights get the gradient of the binary ones, as in HWGQ")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.binary = self.buffer(self.blobs[0].shape)

    @property
    def weight(self) -> Array:
        return self.binary.data

    def layout_for(self, preferred: Layout) -> Layout:
        return PLAIN

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        binarize(self.blobs[0].data, self.param.binary_inner_product_param, self.binary.data)
        super().forward(bottom, top)
