"""Losses of detectors: smooth L1, the losses of single boxes, the choice of the hardest of them.

They are array arithmetic, the same on the CPU and a GPU; nothing is read back.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, Layer, LossLayer, layer
from caffepy.layer.loss import ClassLoss, SoftmaxWithLoss, around


def check_shapes(bottom: Blobs) -> None:
    """ConfigError unless all bottoms have one shape, but for axes of 1 at its end."""
    for i, b in enumerate(bottom):
        short, long = sorted((b.shape, bottom[0].shape), key=len)
        if long != short + (1,) * (len(long) - len(short)):
            raise ConfigError(
                f"bottom {i} has shape {list(b.shape)}, bottom 0 has {list(bottom[0].shape)}"
            )


def clear_weight_gradients(bottom: Blobs, propagate_down: Sequence[bool]) -> None:
    """Weights, all bottoms from the third on, have a gradient of 0."""
    for b, wanted in zip(bottom[2:], propagate_down[2:], strict=True):
        if wanted:
            b.diff.fill(0)


def smooth_l1(d: Array, square: float) -> Array:
    """Return square * d^2 / 2 where |d| < 1 / square, else |d| - 1 / 2 square."""
    size = np.abs(d)
    return np.where(size < 1 / square, 0.5 * square * d * d, size - 0.5 / square)


def smooth_l1_slope(d: Array, square: float) -> Array:
    """Return the derivative of `smooth_l1`."""
    return np.where(np.abs(d) < 1 / square, square * d, np.sign(d))


def _shape_of_sums(x: Blob) -> tuple[int, ...]:
    """Return (N, 1, ...) of (N, C, ...), with two axes at the end at least."""
    if len(x.shape) < 2:
        raise ConfigError(f"sums over channels need (N, C, ...), not {list(x.shape)}")
    n, _, *places = x.shape
    return (n, 1, *places, *[1] * (2 - len(places)))


@layer("SmoothL1Loss")
class SmoothL1Loss(LossLayer):
    """Sum of f(d) / N, f = `smooth_l1`, N the size of the first axis.

    Fast R-CNN's, recognized by four bottoms or smooth_l1_loss_param: d = inside * (a - b), f with
    sigma and times `outside`; its loss weight is 0 unless given. SSD's, with two or three bottoms:
    d = (a - b) * w, whose gradient lacks the factor w, as in SSD: right for weights of 0 and 1.

    An optional top 1 is the sum over the channels, (N, 1, ...) with the further axes, two at least;
    it has no gradient (Cascade R-CNN).
    """

    bottoms = (2, 4)
    tops = (1, 2)
    constant_bottoms: Mapping[int, str] = {}

    @property
    def of_rcnn(self) -> bool:
        return len(self.param.bottom) == 4 or self.param.HasField("smooth_l1_loss_param")

    @property
    def default_weight(self) -> float:
        return 0 if self.of_rcnn else 1

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.of_rcnn and len(bottom) == 3:
            raise ConfigError("SmoothL1Loss with smooth_l1_loss_param takes 2 or 4 bottoms, not 3")
        self.square = self.param.smooth_l1_loss_param.sigma**2
        if self.square <= 0:
            raise ConfigError("smooth_l1_loss_param: sigma must be above 0")
        if len(self.param.loss_weight) < len(top):
            self.param.loss_weight.append(0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_shapes(bottom)
        top[0].reshape(())
        if len(top) > 1:
            top[1].reshape(_shape_of_sums(bottom[0]))
        self.difference = self.buffer(bottom[0].shape)
        self.items = max((1, *bottom[0].shape[:1]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        d = self.difference.data
        a, b, *weights = (blob.data.reshape(d.shape) for blob in bottom)
        np.subtract(a, b, out=d)
        if weights:
            np.multiply(d, weights[0], out=d)
        losses = smooth_l1(d, self.square)
        if len(weights) > 1:
            losses = losses * weights[1]
        np.sum(losses, out=top[0].data)
        np.divide(top[0].data, self.items, out=top[0].data)
        if len(top) > 1:
            outer, channels, inner = around(bottom[0], 1)
            sums = top[1].data.reshape(outer, inner)
            np.sum(losses.reshape(outer, channels, inner), axis=1, out=sums)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / N * f'(d) * inside * outside, db = -da."""
        clear_weight_gradients(bottom, propagate_down)
        shape = bottom[0].shape
        slope = smooth_l1_slope(self.difference.data, self.square)
        if len(bottom) > 3:
            slope = slope * bottom[2].data.reshape(shape) * bottom[3].data.reshape(shape)
        for b, wanted, sign in zip(bottom[:2], propagate_down, (1, -1), strict=False):
            if wanted:
                np.multiply(slope, top[0].diff * (sign / self.items), out=b.diff.reshape(shape))


@layer("SmoothL1LossOHEM")
class SmoothL1LossOHEM(ClassLoss):
    """Sum of f(d) / divisor, d = (a - b) * w, and as an optional top 1 the sum over the channels of
    each box, (N, 1, H, W) also where a, b, w (N, C, ...) have no H and W (R-FCN).

    The divisor is the number of boxes unless loss_param says otherwise; the loss weight is 0 unless
    given. The gradient lacks the factor w, as in R-FCN: right for weights of 0 and 1.
    """

    bottoms = (2, 3)
    tops = (1, 2)
    constant_bottoms: Mapping[int, str] = {}

    @property
    def default_weight(self) -> float:
        return 0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_shapes(bottom)
        self.view = around(bottom[0], 1)
        self.difference = self.buffer(self.view)
        top[0].reshape(())
        if len(top) > 1:
            top[1].reshape(_shape_of_sums(bottom[0]))
        outer, _, inner = self.view
        found = self.divisor(outer, inner)
        self.count = max(1, outer * inner) if found is None else found

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        d = self.difference.data
        a, b, *weights = (blob.data.reshape(self.view) for blob in bottom)
        np.subtract(a, b, out=d)
        for w in weights:
            np.multiply(d, w, out=d)
        losses = smooth_l1(d, 1)
        np.sum(losses, out=top[0].data)
        np.divide(top[0].data, self.count, out=top[0].data)
        if len(top) > 1:
            np.sum(losses, axis=1, out=top[1].data.reshape(self.view[0], self.view[2]))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / divisor * f'(d), db = -da."""
        clear_weight_gradients(bottom, propagate_down)
        slope = smooth_l1_slope(self.difference.data, 1)
        for b, wanted, sign in zip(bottom[:2], propagate_down, (1, -1), strict=False):
            if wanted:
                factor = top[0].diff * (sign / self.count)
                np.multiply(slope, factor, out=b.diff.reshape(self.view))


@layer("SoftmaxWithLossOHEM")
class SoftmaxWithLossOHEM(SoftmaxWithLoss):
    """SoftmaxWithLoss with an optional top 2 of the shape of the labels: the loss of each box, 0
    for ignored labels (R-FCN). Every top without a loss_weight has 1, as there.
    """

    tops = (1, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        while len(self.param.loss_weight) < len(top):
            self.param.loss_weight.append(1)
        super().setup(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(top) > 2:
            top[2].reshape_like(bottom[1])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        super().forward(bottom, top)
        if len(top) > 2:
            _, counts, p = self.of_label(bottom)
            losses = top[2].data.reshape(p.shape)
            np.multiply(np.log(p), counts, out=losses)
            np.negative(losses, out=losses)


@layer("BoxAnnotatorOHEM")
class BoxAnnotatorOHEM(Layer):
    """The labels and weights of the roi_per_img boxes of each image whose loss is largest; the
    others get ignore_label and weights of 0 (Shrivastava et al. 2016, as R-FCN does it).

    Bottoms: rois (R, 5, ...), losses and labels (R, 1, ...), weights (R, 4K, ...). Tops have four
    axes or more, as there. Of equal losses the first comes first.
    """

    on_gpu = True
    bottoms = 4
    tops = 2
    stops_gradient = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.box_annotator_ohem_param
        self.most, self.ignore = param.roi_per_img, param.ignore_label
        if self.most < 1:
            raise ConfigError("box_annotator_ohem_param: roi_per_img must be 1 or more")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        rois, losses, labels, weights = bottom
        count = losses.count
        boxes, _, places = around(rois, 1)
        if rois.shape[1] != 5 or count != boxes * places or labels.count != count:
            raise ConfigError(
                f"boxes of shape {list(rois.shape)} need (R, 5, ...), and a loss and a label each, "
                f"not {list(losses.shape)} and {list(labels.shape)}"
            )
        given, columns, around_them = around(weights, 1)
        if (given, around_them) != (boxes, places):
            raise ConfigError(f"weights of shape {list(weights.shape)} do not fit {boxes} boxes")
        sides = (*rois.shape[2:], 1, 1)[: max(2, len(rois.shape) - 2)]
        top[0].reshape((boxes, 1, *sides))
        top[1].reshape((boxes, columns, *sides))
        self.view = (boxes, places)
        self.order = self.buffer((count,), np.int64)
        self.order.host_data[...] = np.arange(count)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        rois, losses, labels, weights = (blob.data for blob in bottom)
        image = rois.reshape(self.view[0], 5, self.view[1])[:, 0].reshape(-1)
        loss, order = losses.reshape(-1), self.order.data
        harder = (loss > loss[:, None]) | ((loss == loss[:, None]) & (order < order[:, None]))
        keep = np.sum(harder & (image == image[:, None]), axis=1) < self.most
        top[0].data.reshape(-1)[...] = np.where(keep, labels.reshape(-1), self.ignore)
        of_box = keep.reshape(self.view[0], 1, self.view[1])
        lying = around(bottom[3], 1)
        np.multiply(weights.reshape(lying), of_box, out=top[1].data.reshape(lying))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Write zeros: there is no gradient."""
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                blob.diff.fill(0)
