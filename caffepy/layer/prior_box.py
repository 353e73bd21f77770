"""PriorBox: the boxes that a map of features predicts offsets of."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import PriorBoxParameter

POINTS = {32: 4, 64: 2}
"""Sides of squares that FaceBoxes' layer has more of at a place: how many along each axis."""


def aspect_ratios(given: Sequence[float], flip: bool) -> list[float]:
    """Return 1 and the given ratios, each with its reciprocal if `flip`, none twice."""
    ratios = [1.0]
    for ratio in given:
        if all(abs(ratio - known) >= 1e-6 for known in ratios):
            ratios += [ratio, 1 / ratio] if flip else [ratio]
    return ratios


def boxes_of_place(param: PriorBoxParameter) -> Array:
    """Return (height, width, shift down, shift right) of the boxes of a place, in pixels."""
    boxes = [(h, w, 0.0, 0.0) for h, w in zip(param.height, param.width, strict=True)]
    for i, low in enumerate(map(int, param.min_size)):
        side, shifts = low - param.faceboxes, [0.0]
        if param.faceboxes and low in POINTS:
            most = POINTS[low] // 2
            shifts = [step * low / 4 for step in range(-most, most)]
        if param.use_default:
            boxes += [(side, side, down, right) for down in shifts for right in shifts]
        for high in param.max_size[i : i + 1]:
            boxes.append((sqrt(low * int(high)), sqrt(low * int(high)), 0, 0))
        for ratio in aspect_ratios(param.aspect_ratio, param.flip)[1:]:
            boxes.append((low / sqrt(ratio), low * sqrt(ratio), 0, 0))
    return np.array(boxes)


@layer("PriorBox", "PriorBoxClustered")
class PriorBox(Layer):
    """(N, C, H, W) and an image (N, C, h, w) -> (1, 2, H * W * A * 4): corners of the A boxes at
    each place, in parts of the image, and their variances (Liu et al. 2016, SSD). Only the sizes of
    the bottoms count.

    At a place, for each min_size: a square of that side; with a max_size one of the root of their
    product; and one box for each aspect ratio, of the area of the first. Sides in pixels are cut to
    whole numbers, as SSD's layer reads them. With denser_prior_boxes each is followed by one as
    large on the lower edge of the place (Liao et al. 2018, TextBoxes++). With faceboxes squares are
    a pixel smaller, and those of 32 and 64 stand at 16 and 4 points of a place (Zhang et al. 2017,
    FaceBoxes). Without use_default there are no squares (BDIG). Or heights and widths are given,
    one box for each pair (OpenVINO, which calls such a layer PriorBoxClustered).
    """

    on_gpu = stops_gradient = reads_shapes_only = True
    bottoms = 2
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.prior_box_param
        smallest, largest = list(param.min_size), list(param.max_size)
        given = [*param.height, *param.width]
        numbers = [*smallest, *largest, *given, *param.aspect_ratio, *param.variance]
        if not np.isfinite(numbers).all():
            raise ConfigError("prior_box_param has a number that is not finite")
        if given and (smallest or len(param.height) != len(param.width) or min(given) <= 0):
            raise ConfigError(
                "prior_box_param needs min_size, or as many heights as widths, above 0"
            )
        if not given and (not smallest or min(smallest) <= 0):
            raise ConfigError("prior_box_param needs min_size, above 0")
        if param.faceboxes and param.denser_prior_boxes:
            raise ConfigError(
                "prior_box_param: faceboxes and denser_prior_boxes exclude each other"
            )
        if largest and len(largest) != len(smallest):
            raise ConfigError(
                f"prior_box_param has {len(smallest)} min_size and {len(largest)} max_size; give "
                "one for each, or none"
            )
        for low, high in zip(smallest, largest, strict=False):
            if high <= low:
                raise ConfigError(
                    f"prior_box_param: max_size {high:g} must be above min_size {low:g}"
                )
        if any(ratio <= 0 for ratio in param.aspect_ratio):
            raise ConfigError("prior_box_param: aspect_ratio must be above 0")
        others = aspect_ratios(param.aspect_ratio, param.flip)[1:]
        if not (param.use_default or given) and (largest or not others):
            raise ConfigError(
                "prior_box_param: use_default: false needs an aspect_ratio other than 1, and no "
                "max_size"
            )
        variance = list(param.variance) or [0.1]
        if len(variance) not in (1, 4) or min(variance) <= 0:
            raise ConfigError(
                f"prior_box_param: give one variance or four, above 0, not {variance}"
            )
        self.variance = variance * (4 // len(variance))
        boxes = np.repeat(boxes_of_place(param), 1 + param.denser_prior_boxes, axis=0)
        self.sizes, self.shifts = boxes[:, :2].astype(np.float32), boxes[:, 2:]
        self.image = self.pair("img_size", "img_h", "img_w")
        self.steps = self.pair("step", "step_h", "step_w")

    def pair(self, both: str, *each: str) -> list[float] | None:
        """Return a setting of height and width, given as one number or as two; None without."""
        param = self.param.prior_box_param
        given = [name for name in each if param.HasField(name)]
        if param.HasField(both) and given:
            raise ConfigError(f"prior_box_param has both {both} and {given[0]}; give one")
        if len(given) == 1:
            raise ConfigError(f"prior_box_param has {given[0]} alone; give both, or {both}")
        names = [both] * 2 if param.HasField(both) else given
        values = [float(getattr(param, name)) for name in names]
        if any(value <= 0 for value in values):
            raise ConfigError(f"prior_box_param: {names[0]} must be above 0")
        return values or None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for i, blob in enumerate(bottom):
            if len(blob.shape) != 4:
                raise ConfigError(
                    f"PriorBox needs (N, C, H, W), not {list(blob.shape)}, bottom {i}"
                )
            if 0 in blob.shape[2:]:
                raise ConfigError(f"bottom {i} of PriorBox has no places: {list(blob.shape)}")
        size, image = bottom[0].shape[2:], bottom[1].shape[2:]
        top[0].reshape((1, 2, size[0] * size[1] * len(self.sizes) * 4))
        priors = self.boxes(size, self.image or image)
        self.priors = self.buffer(top[0].shape)
        self.priors.host_data[0, 0] = priors.reshape(-1)
        self.priors.host_data[0, 1] = np.tile(self.variance, len(priors))

    def boxes(self, size: Sequence[int], image: Sequence[float]) -> Array:
        """Return (H * W * A, 4) boxes (xmin, ymin, xmax, ymax) in parts of the image."""
        param, single = self.param.prior_box_param, np.float32
        each = (single(i) / single(s) for i, s in zip(image, size, strict=True))
        steps = self.steps or [float(step) for step in each]
        places = [
            (np.arange(s, dtype=single) + single(param.offset)) * single(step)
            for s, step in zip(size, steps, strict=True)
        ]
        centre = np.stack(np.meshgrid(*places, indexing="ij"), -1)[:, :, None].astype(np.float64)
        if param.denser_prior_boxes:
            centre = np.repeat(centre, len(self.sizes), axis=2)
            edges = np.arange(1, size[0] + 1, dtype=single) * single(steps[0])
            centre[:, :, 1::2, 0] = edges[:, None, None]
        centre = centre + self.shifts
        half = self.sizes / 2.0
        low, high = ((centre + sign * half) / np.asarray(image) for sign in (-1, 1))
        boxes = np.concatenate([low[..., ::-1], high[..., ::-1]], -1).reshape(-1, 4)
        return np.clip(boxes, 0, 1) if param.clip else boxes

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.copy(self.priors.data, top[0].data)
