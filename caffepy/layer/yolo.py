"""Layers of YOLO for Caffe: Reorg, the losses of YOLO 2 and 3, their detections.

Channels are those of A boxes: x, y, w, h, object and K classes each. True boxes are class, x, y, w,
h: centre and size in units of the image, with zeros after the last.
"""

import logging
from collections.abc import Mapping, Sequence
from math import nextafter
from typing import ClassVar

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, Layer, LossLayer, layer
from caffepy.layer.detection import overlaps
from caffepy.ops.overlap import MSE, PLAIN, RESCORE, SMOOTH, YoloWeights

log = logging.getLogger(__name__)


class Rearranged(Layer):
    """Base: the top has the bottom's elements in other places, those of `views`."""

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def views(self, bottom: Array, top: Array) -> tuple[Array, Array]:
        """Return views of both, of one shape, whose elements correspond."""
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = self.views(bottom[0].data, top[0].data)
        y[...] = x

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            dx, dy = self.views(bottom[0].diff, top[0].diff)
            dx[...] = dy


@layer("PassThrough")
class PassThrough(Rearranged):
    """(N, C, H, W) -> (N, C bh bw, H / bh, W / bw): element (i, j) of the blocks of channel c as
    channel (c bh + i) bw + j (tool chains of HiSilicon; winggan's).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.pass_through_param
        self.block = param.block_height, param.block_width
        if min(self.block) < 1:
            raise ConfigError("pass_through_param needs block_height and block_width")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        (bh, bw), shape = self.block, bottom[0].shape
        if len(shape) != 4 or shape[2] % bh or shape[3] % bw:
            raise ConfigError(
                f"PassThrough by {bh} x {bw} needs (N, C, H, W) of whole blocks, not {list(shape)}"
            )
        n, c, h, w = shape
        outputs = self.param.pass_through_param.num_output
        if outputs not in (0, c * bh * bw):
            raise ConfigError(
                f"pass_through_param: num_output is {c * bh * bw} ({c} channels times {bh} x "
                f"{bw}), not {outputs}"
            )
        top[0].reshape((n, c * bh * bw, h // bh, w // bw))
        self.blocks = (n, c, h // bh, bh, w // bw, bw)
        self.channels = (n, c, bh, bw, h // bh, w // bw)

    def views(self, bottom: Array, top: Array) -> tuple[Array, Array]:
        """Return views of both whose elements correspond, (N, C, bh, bw, H / bh, W / bw)."""
        apart = bottom.reshape(self.blocks).transpose(0, 1, 3, 5, 2, 4)
        return apart, top.reshape(self.channels)


@layer("Reorg")
class Reorg(Rearranged):
    """(N, C, H, W) -> (N, C s^2, H / s, W / s), s the stride, or back with `reverse`, in darknet's
    order of elements: x, read as (N, C / s^2, H s, W s), gives each s x s of it to s^2 channels
    (Redmon and Farhadi 2017).

    The gradient is the way back; the fork has none.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.stride = self.param.reorg_param.stride
        if self.stride < 1:
            raise ConfigError("reorg_param needs a stride of 1 or more")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        s, shape = self.stride, bottom[0].shape
        if len(shape) != 4 or shape[1] % s**2:
            raise ConfigError(
                f"Reorg by {s} needs (N, C, H, W) with C a multiple of {s * s}, not {list(shape)}"
            )
        n, c, h, w = shape
        if self.param.reorg_param.reverse:
            top[0].reshape((n, c // s**2, h * s, w * s))
        elif h % s or w % s:
            raise ConfigError(f"{h} x {w} cannot be divided by the stride {s}")
        else:
            top[0].reshape((n, c * s**2, h // s, w // s))
        # Blocks in planes, and one channel for each element of a block.
        self.blocks = (n, c // s**2, h, s, w, s)
        self.channels = (n, s, s, c // s**2, h, w)

    def views(self, bottom: Array, top: Array) -> tuple[Array, Array]:
        """Return views of both whose elements correspond, (N, s, s, C / s^2, H, W)."""
        blocks, channels = bottom, top
        if self.param.reorg_param.reverse:
            blocks, channels = top, bottom
        apart = blocks.reshape(self.blocks).transpose(0, 3, 5, 1, 2, 4)
        together = channels.reshape(self.channels)
        return (together, apart) if self.param.reorg_param.reverse else (apart, together)


class YoloLoss(LossLayer):
    """Base: bottoms x (N, A (5 + K), H, W) and true boxes (N, ..., T, 5); the loss is a sum of
    squares of `delta` / N, and delta / N is taken for its gradient, as darknet does.
    """

    backward_reads_bottom = backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "{type} cannot differentiate its true boxes; the layer that makes them needs no gradient"
    }

    takes_ssds = False
    """True if true boxes may be SSD's, (1, 1, G, 8), whose first class is 1."""

    def prepare(self, boxes: int, classes: int, truths: Blob) -> None:
        """Take the numbers of boxes of a cell and of classes, and the kind of true boxes."""
        self.boxes, self.classes = boxes, classes
        self.of_ssd = self.takes_ssds and len(truths.shape) == 4 and truths.shape[3] == 8
        first = int(self.of_ssd)
        if min(boxes, classes) < 1:
            raise ConfigError("num and num_class must be 1 or more")
        self.wrong = self.error_flag(
            lambda label: DataError(
                f"a true box has class {label + first:g}, which is not one of {first} to "
                f"{classes - 1 + first}"
            )
        )
        log.info(
            "%s: its gradient is not that of the loss it shows, as in darknet", self.param.name
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, truths = (b.shape for b in bottom)
        length = 5 + self.classes
        if len(x) != 4 or x[1] != self.boxes * length or 0 in x[2:]:
            raise ConfigError(
                f"{self.boxes} boxes of {self.classes} classes need (N, {self.boxes * length}, H, "
                f"W), not {list(x)}"
            )
        ssds = truths[:2] == (1, 1) and truths[3:] == (8,)
        if not (ssds if self.of_ssd else truths and truths[0] == x[0] and truths[-1] == 5):
            also = " or (1, 1, G, 8)" if self.takes_ssds else ""
            hint = ", as AnnotatedData gives them with yolo_data_type: 1" if ssds else ""
            raise ConfigError(
                f"true boxes must have shape ({x[0]}, ..., 5){also}{hint}, not {list(truths)}"
            )
        top[0].reshape(())
        self.view = (x[0], self.boxes, length, *x[2:])
        self.p, self.delta = self.buffer(self.view), self.buffer(self.view)
        most = truths[2] if self.of_ssd else bottom[1].count // (5 * x[0])
        self.truths = self.buffer((x[0], most, 5))

    def sizes(self, biases: Sequence[float], height: float, width: float) -> Array:
        """Return a buffer of sizes of anchors (A, 2), width and height, in units of the image."""
        sizes = self.buffer((len(biases) // 2, 2), np.float32)
        sizes.host_data[...] = np.reshape(biases, (-1, 2)) / (width, height)
        return sizes.data

    def take_truths(self, bottom: Blobs) -> Array:
        """Return the true boxes (N, T, 5), after a look at their classes."""
        truths = self.truths.data
        if self.of_ssd:
            self.ops.sort_truths(bottom[1].data.reshape(-1, 8), truths)
        else:
            self.ops.copy(bottom[1].data.reshape(truths.shape), truths)
        label = truths[:, :, 0]
        bad = (truths[:, :, 3] != 0) & ~((label > -1) & (label < self.classes))
        self.wrong.set_where(bad, label)
        self.wrong.check()
        return truths

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            factor = top[0].diff * (1 / self.view[0])
            np.multiply(self.gradient(), factor, out=bottom[0].diff.reshape(self.view))

    def gradient(self) -> Array:
        """Return what is taken for the gradient of the sum of the losses of the images."""
        return self.delta.data


@layer("RegionLoss")
class RegionLoss(YoloLoss):
    """The loss of YOLO 2: boxes of cells that overlap no truth by `thresh` are to be no object, the
    one in the cell of each truth whose size is most like it is to be that truth.

    biases: width and height of the anchor of each box in cells. Anchors without any size, from
    fewer than ten numbers, are refused, where the fork goes on with zeros.

    With SSD's true boxes it is Intel Caffe's: a box and its object learn by other rules, and the
    loss is the sum of squares, not divided by N.
    """

    takes_ssds = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.region_loss_param
        for name in ("softmax_tree", "class_map"):
            if getattr(param, name):
                raise ConfigError(f"region_loss_param: {name} of YOLO 9000 is not there")
        self.prepare(param.num, param.num_class, bottom[1])
        self.rule = SMOOTH if self.of_ssd else RESCORE if param.rescore else PLAIN
        if len(param.biases) < max(10, 2 * param.num) or min(param.biases) <= 0:
            raise ConfigError(
                f"region_loss_param needs biases above 0, two for each of num {param.num} boxes "
                f"and ten or more, not {len(param.biases)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        h, w = self.view[3:]
        if h != w:
            raise ConfigError(f"RegionLoss needs as many rows as columns, not {h} x {w}")
        self.anchors = self.sizes(self.param.region_loss_param.biases[: 2 * self.boxes], h, w)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, truths = self.param.region_loss_param, self.take_truths(bottom)
        x, p, delta = bottom[0].data.reshape(self.view), self.p.data, self.delta.data
        given = x, truths, self.anchors, True, MSE, param.noobject_scale, param.thresh
        self.ops.yolo_scores(*given, p, delta)
        choice = bool(param.bias_match), self.rule
        scales = param.object_scale, param.class_scale, param.coord_scale
        self.ops.region_truths(p, truths, self.anchors, *choice, *scales, delta)
        np.sum(delta * delta, out=top[0].data)
        if not self.of_ssd:
            np.multiply(top[0].data, 1 / self.view[0], out=top[0].data)


@layer("Yolov3")
class Yolov3(YoloLoss):
    """The loss of YOLO 3 on one map: boxes of cells that overlap no truth by `thresh` are to be no
    object, those in the cell of a truth whose anchors are most like it, or more like it than
    iou_thresh, are to be that truth.

    biases: width and height of all anchors in pixels of an image of anchors_scale times the map;
    mask: those of this map's boxes. With an iou_loss other than MSE boxes learn by the slope of
    their overlap (GIoU, DIoU, CIoU), and the loss shows 1 - overlap.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolov3_param
        self.prepare(param.num, param.num_class, bottom[1])
        known = len(param.biases) // 2
        if not param.biases or len(param.biases) % 2 or min(param.biases) <= 0:
            raise ConfigError("yolov3_param needs biases above 0, two for each anchor")
        if len(param.mask) < param.num or max(param.mask[: param.num]) >= known:
            raise ConfigError(
                f"yolov3_param: mask must name one of {known} anchors, from 0, for each of num "
                f"{param.num} boxes"
            )
        if param.anchors_scale < 1:
            raise ConfigError("yolov3_param: anchors_scale must be 1 or more")
        mask = list(param.mask[: param.num])
        self.slots = self.buffer((known,), np.int32)
        self.slots.host_data[...] = [mask.index(a) if a in mask else -1 for a in range(known)]
        self.weights = YoloWeights(
            coord=param.coord_scale,
            object=param.object_scale if param.use_logic_gradient else 1.0,
            label=param.class_scale,
            smooth=param.label_smooth_eps,
            focal=param.use_focal_loss,
            box=param.iou_normalizer,
            most=param.max_delta,
            accumulate=param.accumulate,
            least=param.iou_thresh,
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        param = self.param.yolov3_param
        size = [side * param.anchors_scale for side in self.view[3:]]
        self.all_anchors = self.sizes(param.biases, *size)
        mask = param.mask[: param.num]
        self.anchors = self.sizes([v for a in mask for v in param.biases[2 * a : 2 * a + 2]], *size)
        self.stats = self.buffer((self.view[0], 2))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, truths = self.param.yolov3_param, self.take_truths(bottom)
        x, p, delta = bottom[0].data.reshape(self.view), self.p.data, self.delta.data
        given = x, truths, self.anchors, False, param.iou_loss, 1.0, param.thresh
        self.ops.yolo_scores(*given, p, delta)
        every = self.all_anchors, self.slots.data
        self.ops.yolo_truths(
            p, truths, *every, param.iou_loss, self.weights, delta, self.stats.data
        )
        if param.iou_loss == MSE:
            np.sum(delta * delta, out=top[0].data)
        else:
            missing, count = np.sum(self.stats.data, axis=0)
            np.sum(delta[:, :, 4:] ** 2, out=top[0].data)
            mean = missing / np.maximum(count, 1)
            np.add(top[0].data, param.iou_normalizer * mean, out=top[0].data)
            p[:, :, :2] = x[:, :, :2]  # as the fork's use_logic_gradient reads them
        np.multiply(top[0].data, 1 / self.view[0], out=top[0].data)

    def gradient(self) -> Array:
        """delta, with use_logic_gradient times p (1 - p) but for w and h."""
        if not self.param.yolov3_param.use_logic_gradient:
            return self.delta.data
        p = self.p.data
        slope: Array = p * (1 - p)
        slope[:, :, 2:4] = 1
        slope *= self.delta.data
        return slope


class Detections(Layer):
    """Base: rows (1, 1, D, 7) = 0, class + 1, score, left, top, right, bottom, in units of the
    image, best first; of images that have none at all rows of number, -1, -1, ...

    As in the fork, boxes of all images and classes suppress each other, where intersection over
    union is nms_threshold or more, and the number of the image is 0.
    """

    always_reshape = True
    bottoms: ClassVar[int | tuple[int, int | None]] = (1, None)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Shape for one box until forward counts them."""
        for b in bottom:
            if len(b.shape) != 4 or b.shape[1] != self.channels or 0 in b.shape[2:]:
                raise ConfigError(
                    f"{self.type} needs (N, {self.channels}, H, W) for its boxes and classes, not "
                    f"{list(b.shape)}"
                )
        top[0].reshape((1, 1, 1, 7))

    channels: int
    """Of each bottom."""

    def outputs(self, x: Array, boxes: int) -> Array:
        """Return outputs (N, A, 5 + K, H, W), A = `boxes` at a place."""
        return x.reshape(len(x), boxes, self.channels // boxes, *x.shape[2:])

    def boxes(self, x: Array, sizes: Array) -> Array:
        """Return boxes (N, A, H, W, 4) = x, y, w, h of outputs x (N, A, 5 + K, H, W)."""
        h, w = x.shape[3:]
        rows, columns = np.indices((h, w))
        return np.stack(
            [
                (columns + sigmoid(x[:, :, 0])) / w,
                (rows + sigmoid(x[:, :, 1])) / h,
                np.exp(x[:, :, 2]) * sizes[:, 0, None, None],
                np.exp(x[:, :, 3]) * sizes[:, 1, None, None],
            ],
            axis=-1,
        )

    def write_top(self, top: Blobs, images: int, found: Array, threshold: float) -> None:
        """Write the top from candidates (D, 6) = class, score, x, y, w, h."""
        found, ends = self.best(found, threshold)
        if not len(found):
            rows = np.full((images, 7), -1.0)
            rows[:, 0] = np.arange(images)
        else:
            rows = np.hstack([np.zeros((len(found), 1)), found[:, :2], ends])
            rows[:, 1] += 1
        top[0].reshape((1, 1, len(rows), 7))
        top[0].data[0, 0] = rows

    def best(self, found: Array, threshold: float) -> tuple[Array, Array]:
        """Return the candidates (D, 6) that no better one suppresses, the best first, and their
        corners (D, 4).
        """
        found = found[np.argsort(-found[:, 1], kind="stable")]
        ends = corners(found[:, 2:])
        kept, counts = np.empty((1, max(1, len(found))), np.int32), np.empty(1, np.int32)
        given = ends[None].astype(np.float32), nextafter(threshold, -1), 0.0
        self.ops.suppress_overlaps(*given, kept, counts)
        places = kept[0, : counts[0]]
        return found[places], ends[places]


def corners(boxes: Array) -> Array:
    """Return left, top, right, bottom of boxes (D, 4) = x, y, w, h."""
    return np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    result: Array = 1 / (1 + np.exp(-x))
    return result


@layer("YoloDetectionOutput")
class YoloDetectionOutput(Detections):
    """Detections of YOLO 2 from outputs (N, A (5 + K), S, S), one bottom or two scales: of each box
    its best class, if object times its share is confidence_threshold or more; see `Detections`.
    """

    bottoms = (1, 2)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolo_detection_output_param
        self.channels = param.num_box * (5 + param.num_classes)
        if len(param.biases) < 2 * param.num_box or param.num_classes < 1 or param.num_box < 1:
            raise ConfigError(
                "yolo_detection_output_param needs num_classes, num_box and two biases for each of "
                f"these boxes, not {len(param.biases)}"
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolo_detection_output_param
        biases = np.reshape(param.biases[: 2 * param.num_box], (-1, 2)).astype(np.float32)
        found = [np.zeros((0, 6), np.float32)]
        for b in bottom:
            h, w = b.shape[2:]
            x = self.outputs(b.data, param.num_box)
            label = x[:, :, 5:].argmax(axis=2)
            share = np.exp(x[:, :, 5:] - x[:, :, 5:].max(axis=2, keepdims=True)).sum(axis=2)
            score = sigmoid(x[:, :, 4]) / share  # of the best class: exp(0) / sum
            boxes = self.boxes(x, biases / (w, h))
            rows = np.concatenate([np.stack([label, score], axis=-1), boxes], axis=-1)
            rows = rows.transpose(0, 2, 3, 1, 4).reshape(-1, 6)  # (N, A, H, W) -> (N, H, W, A)
            found.append(rows[rows[:, 1] >= np.float32(param.confidence_threshold)])
        self.write_top(top, bottom[0].shape[0], np.concatenate(found), param.nms_threshold)


@layer("Yolov3DetectionOutput")
class Yolov3DetectionOutput(Detections):
    """Detections of YOLO 3 from outputs (N, A (5 + K), H, W), a bottom for each of mask_group_num
    groups of `mask`: of each box every class whose sigmoid times that of the object is above
    confidence_threshold; see `Detections`.

    With gaussian_box a box has x, y, w, h, each followed by its variance, and the object's sigmoid
    is multiplied by 1 - their mean (Choi et al. 2019).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolov3_detection_output_param
        self.head = 9 if param.gaussian_box else 5
        self.channels = param.num_box * (self.head + param.num_classes)
        groups, known = param.mask_group_num, len(param.biases) // 2
        self.anchors = np.reshape(param.biases[: 2 * known], (-1, 2)).astype(np.float32)
        if len(bottom) != groups or len(param.anchors_scale) < groups:
            raise ConfigError(
                f"yolov3_detection_output_param: mask_group_num {groups} needs as many bottoms and "
                f"anchors_scale, not {len(bottom)} and {len(param.anchors_scale)}"
            )
        self.step = len(param.mask) // groups if groups else 0
        if self.step < param.num_box or max(param.mask) >= known:
            raise ConfigError(
                f"yolov3_detection_output_param: mask must name one of {known} anchors, from 0, "
                f"for each of num_box {param.num_box} boxes of {groups} groups"
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolov3_detection_output_param
        found = [np.zeros((0, 6), np.float32)]
        for k, b in enumerate(bottom):
            h, w = b.shape[2:]
            x = self.outputs(b.data, param.num_box)
            score = sigmoid(x[:, :, self.head - 1])
            if param.gaussian_box:
                score = score * (1 - sigmoid(x[:, :, 1:8:2]).mean(axis=2))
            mask = param.mask[k * self.step : k * self.step + param.num_box]
            scale = param.anchors_scale[k]
            places = x[:, :, :8:2] if param.gaussian_box else x
            boxes = self.boxes(places, self.anchors[list(mask)] / (w * scale, h * scale))
            scores = sigmoid(x[:, :, self.head :]) * score[:, :, None]
            chosen = scores.transpose(0, 3, 4, 1, 2)  # (N, A, K, H, W) -> (N, H, W, A, K)
            i, row, column, a, label = np.nonzero(chosen > np.float32(param.confidence_threshold))
            rows = [label[:, None], chosen[i, row, column, a, label][:, None]]
            found.append(np.hstack([*rows, boxes[i, a, row, column]]).astype(np.float32))
        self.write_top(top, bottom[-1].shape[0], np.concatenate(found), param.nms_threshold)


@layer("EvalDetection")
class EvalDetection(Detections):
    """(N, K + 4 A S^2) of what YOLO 2 found in (N, A (5 + K), S, S), and which of it is true: for
    each class the number of its true boxes, then class, score, true, false of each box found, by
    classes, the best first; the rest is 0 (Intel Caffe, caffe-yolov2).

    True boxes are those of the losses, or SSD's (1, 1, G, 8), whose first class is 1. Boxes of an
    image, of all classes, suppress each other; those with a score below 0.005 are left out. A box
    is true if the true box of its class that it overlaps most, by `threshold` or more, is no
    better one's, false if it is or the image has none of the class, else neither. Bottom 2 is not
    read.
    """

    bottoms = (2, 3)
    stops_gradient = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.eval_detection_param
        self.channels = param.num_object * (5 + param.num_class)
        if len(param.biases) < 2 * param.num_object or min(param.num_class, param.num_object) < 1:
            raise ConfigError(
                "eval_detection_param needs num_class, num_object and two biases for each of these "
                f"boxes, not {len(param.biases)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, x, truths = self.param.eval_detection_param, bottom[0].shape, bottom[1].shape
        if len(x) != 4 or x[1:] != (self.channels, param.side, param.side):
            raise ConfigError(
                f"EvalDetection needs (N, {self.channels}, {param.side}, {param.side}) for its "
                f"boxes, classes and side, not {list(x)}"
            )
        self.of_ssd = len(truths) == 4 and truths[:2] == (1, 1) and truths[3] == 8
        if not self.of_ssd and (truths[:1] != x[:1] or truths[-1] != 5):
            raise ConfigError(
                f"true boxes must have shape ({x[0]}, ..., 5) or (1, 1, G, 8), not {list(truths)}"
            )
        top[0].reshape((x[0], param.num_class + 4 * param.num_object * param.side**2))

    def truths(self, boxes: Array, image: int) -> Array:
        """Return class and corners (T, 5) of the true boxes of an image."""
        if self.of_ssd:
            rows = boxes[0, 0]
            rows = rows[rows[:, 0] == image]
            return np.hstack([rows[:, 1:2] - 1, rows[:, 3:7]])
        rows = boxes[image].reshape(-1, 5)
        rows = rows[np.cumprod(rows[:, 3] != 0) > 0]
        return np.hstack([rows[:, :1], corners(rows[:, 1:])])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.eval_detection_param
        biases = np.reshape(param.biases[: 2 * param.num_object], (-1, 2)).astype(np.float32)
        h, w = bottom[0].shape[2:]
        x = self.outputs(bottom[0].data, param.num_object)
        label = x[:, :, 5:].argmax(axis=2)
        share = 1 / np.exp(x[:, :, 5:] - x[:, :, 5:].max(axis=2, keepdims=True)).sum(axis=2)
        scores = {param.OBJ: sigmoid(x[:, :, 4]), param.PROB: share}
        score = scores.get(param.score_type, sigmoid(x[:, :, 4]) * share)
        rows = [np.stack([label, score], axis=-1), self.boxes(x, biases / (w, h))]
        found = np.concatenate(rows, axis=-1).transpose(0, 2, 3, 1, 4)  # (N, H, W, A, 6)
        top[0].data[...] = 0
        for image, y in enumerate(top[0].data):
            truths = self.truths(bottom[1].data, image)
            for true in truths[:, 0]:
                if not 0 <= true < param.num_class:
                    raise DataError(
                        f"a true box has class {true:g}, which is not one of 0 to "
                        f"{param.num_class - 1}"
                    )
                y[int(true)] += 1
            if param.nms >= 0:  # else the fork finds nothing
                best, ends = self.best(found[image].reshape(-1, 6), param.nms)
                matched = match_detections(best, ends, truths, param.threshold)
                y[param.num_class : param.num_class + matched.size] = matched.reshape(-1)


def match_detections(found: Array, ends: Array, truths: Array, threshold: float) -> Array:
    """Return class, score, true, false (D, 4) of boxes, by classes, the best first."""
    matched, taken = np.zeros((len(found), 4)), set[int]()
    matched[:, :2] = found[:, :2]
    for row, box in zip(matched, ends, strict=True):
        (same,) = np.nonzero(truths[:, 0] == row[0])
        if not len(same):
            row[3] = 1
            continue
        shares = overlaps(box, truths[same, 1:], 0)
        chosen = int(same[shares.argmax()])
        if shares.max() >= threshold:
            row[3 if chosen in taken else 2] = 1
            taken.add(chosen)
    matched = matched[matched[:, 1] >= np.float32(0.005)]
    by_class: Array = matched[np.argsort(matched[:, 0], kind="stable")]
    return by_class
