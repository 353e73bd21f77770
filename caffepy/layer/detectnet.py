"""DetectNetTransformation of NVCaffe's DetectNet: images and their boxes changed together, and the
boxes as maps of a grid. All of it is computed on the host.
"""

from math import ceil, cos, floor, isfinite, radians, sin
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.data.transformer import read_mean
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import TRAIN, DetectNetGroundTruthParameter

FULL = 255  # white
NUMBERS = 16  # of a box: x, y, width, height, angle, class and ten that change nothing
CLASS = 5
MAPS = 8  # before those of classes
LEAST = float(np.finfo(np.float32).eps)  # area of a box, covered share of a cell, angle of a turn
LEAST_FADING = 1 / FULL  # of colours


class Change(NamedTuple):
    """Changes of an image and its boxes, in this order."""

    hue: float
    saturation: float
    flip: bool
    size: tuple[int, int]
    turn: Array | None  # an affine matrix (2, 3)
    turned_size: tuple[int, int]
    offset: tuple[int, int]


@layer("DetectNetTransformation")
class DetectNetTransformation(Layer):
    """Images (N, 3, H, W) and boxes (N, 1, R, 16), whose row 0 begins with the number of boxes and
    16, to images (N, 3, image_size_y, image_size_x) and maps (N, 8 + classes, h, w), h and w these
    sizes / stride.

    Maps of a cell that a box covers: 1; the box's left, top, right and bottom from the cell's
    corner; 1 / its width and height; stride^2 / what it covers; 1 for its class. Boxes cover
    `scale_cvg` of their sides, in bounds; later ones cover earlier ones.
    """

    always_reshape = stops_gradient = True
    bottoms = tops = 2

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detectnet_groundtruth_param
        changes = self.param.detectnet_augmentation_param
        for field, value in (*param.ListFields(), *changes.ListFields()):
            if isinstance(value, float) and not isfinite(value):
                raise ConfigError(f"{self.type}: {field.name} cannot be {value:g}")
        for name in ("stride", "image_size_x", "image_size_y"):
            if not getattr(param, name):
                raise ConfigError(f"detectnet_groundtruth_param needs a {name} of 1 or more")
        self.classes = {pair.src: pair.dst for pair in param.object_class} or {1: 0}
        self.size = param.image_size_x, param.image_size_y
        self.grid = round(self.size[0] / param.stride), round(self.size[1] / param.stride)
        if not all(self.grid):
            raise ConfigError(f"a stride of {param.stride} is too large for {self.size}")
        self.mean = read_mean(self.param.transform_param, self.path)
        if self.mean is not None and len(self.mean) != 3 and self.mean.shape != (1, 1, 1):
            raise ConfigError(f"the mean needs 3 channels, not {len(self.mean)}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images, boxes = bottom
        if len(images.shape) != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
            raise ConfigError(f"{self.type} needs images (N, 3, H, W), not {list(images.shape)}")
        count = images.shape[0]
        if not boxes.shape or boxes.shape[0] != count:
            raise ConfigError(f"{count} images, but boxes {list(boxes.shape)}")
        top[0].reshape((count, 3, *self.size[::-1]))
        top[1].reshape((count, MAPS + max(self.classes.values()) + 1, *self.grid[::-1]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        images, tables = bottom[0].data, bottom[1].data
        rng = np.random.default_rng(self.device.draw_seed()) if self.phase == TRAIN else None
        size = images.shape[3], images.shape[2]
        mean = self.mean_of(size)
        for i, (image, table) in enumerate(zip(images, tables, strict=True)):
            boxes = self.boxes_of(table.ravel())
            change = self.draw(size, rng)
            top[0].data[i] = self.changed(image.transpose(1, 2, 0), mean, change).transpose(2, 0, 1)
            boxes[:, :4] = moved(boxes[:, :4], size, change)
            self.write_maps(boxes, top[1].data[i])

    def mean_of(self, size: tuple[int, int]) -> Array | None:
        """Return the mean (H, W, 3) or (1, 1, C), of values from 0 to 1."""
        if self.mean is None:
            return None
        mean = np.ascontiguousarray(self.mean.transpose(1, 2, 0))
        if self.param.transform_param.mean_file:
            import cv2

            mean = cv2.resize(mean, size, interpolation=cv2.INTER_CUBIC)
        return mean / np.float32(FULL)

    def boxes_of(self, table: Array) -> Array:
        """Return a copy of the boxes (B, 16) of an image; DataError for a table that has none."""
        count = int(table[0]) if len(table) and np.isfinite(table[0]) else -1
        if len(table) < NUMBERS or table[1] != NUMBERS or not 0 <= count < len(table) // NUMBERS:
            raise DataError(
                f"{self.type}: labels begin with the number of boxes and {NUMBERS}, and a row of "
                f"{NUMBERS} numbers for each follows; here {table[:2].tolist()} and "
                f"{len(table)} numbers in all"
            )
        boxes = np.array(table[NUMBERS : (count + 1) * NUMBERS]).reshape(count, NUMBERS)
        if not np.isfinite(boxes[:, : CLASS + 1]).all():
            raise DataError(f"{self.type}: a box has a number that is not finite")
        return boxes

    def draw(self, size: tuple[int, int], rng: np.random.Generator | None) -> Change:
        """Draw what happens to an image of this size; without `rng` it is scaled to the top's."""
        if rng is None:
            return Change(0, 1, False, self.size, None, self.size, (0, 0))
        param = self.param.detectnet_augmentation_param
        hue, saturation, angle = 0.0, 1.0, 0.0
        if rng.random() <= param.hue_rotation_prob:
            hue = min(max(rng.uniform(-1, 1) * param.hue_rotation, -180), 180)
        if rng.random() <= param.desaturation_prob:
            saturation = 1 - rng.random() * param.desaturation_max
        flip = bool(rng.random() <= param.flip_prob)
        if rng.random() <= param.scale_prob:
            factor = param.scale_min + (param.scale_max - param.scale_min) * rng.random()
            size = max(1, floor(size[0] * factor + 0.5)), max(1, floor(size[1] * factor + 0.5))
        if rng.random() <= param.rotation_prob:
            angle = rng.uniform(-1, 1) * param.max_rotate_degree
        turn, turned_size = turning(size, angle) if abs(angle) > LEAST else (None, size)
        shares, shifts = (0.5, 0.5), (0, 0)
        if rng.random() <= param.crop_prob:
            shares, shifts = (rng.random(), rng.random()), (param.shift_x, param.shift_y)
        pairs = zip(shares, shifts, turned_size, self.size, strict=True)
        x, y = (
            rounded(share * (have - wanted + shift) - shift // 2)
            for share, shift, have, wanted in pairs
        )
        return Change(hue, saturation, flip, size, turn, turned_size, (x, y))

    def changed(self, image: Array, mean: Array | None, change: Change) -> Array:
        """Return the image (H, W, 3) as the net is to see it."""
        import cv2

        image = np.ascontiguousarray(image) / image.dtype.type(FULL)
        if abs(change.hue) > LEAST or change.saturation < 1 - LEAST_FADING:
            colours: Array = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_BGR2HSV)
            colours[..., 0] = (colours[..., 0] + np.float32(change.hue)) % 360
            colours[..., 1] *= np.float32(change.saturation)
            image = cv2.cvtColor(colours, cv2.COLOR_HSV2BGR).astype(image.dtype)
        if mean is not None:
            image = image - mean.astype(image.dtype)
        if change.flip:
            image = cv2.flip(image, 1)
        if image.shape[1::-1] != change.size:
            image = cv2.resize(image, change.size, interpolation=cv2.INTER_CUBIC)
        if change.turn is not None:
            space = np.zeros((*change.turned_size[::-1], 3), image.dtype)
            image = cv2.warpAffine(
                image,
                change.turn,
                change.turned_size,
                dst=space,
                flags=cv2.INTER_LINEAR,
                borderMode=cv2.BORDER_TRANSPARENT,
            )
        out = np.zeros((*self.size[::-1], 3), image.dtype)
        axes = zip(change.offset, image.shape[1::-1], self.size, strict=True)
        (x, to_x), (y, to_y) = (common(*axis) for axis in axes)
        out[to_y, to_x] = image[y, x]
        return out * image.dtype.type(FULL)

    def write_maps(self, boxes: Array, maps: Array) -> None:
        """Write the maps (8 + classes, h, w) of an image with these boxes."""
        param = self.param.detectnet_groundtruth_param
        maps.fill(0)
        least_norm = 0 if param.obj_norm else 1
        for row in boxes:
            start, side = row[:2], row[2:4]
            if param.crop_bboxes:
                stop = np.minimum(start + side, np.array(self.size, row.dtype))
                start = np.maximum(start, 0)
                side = np.maximum(stop - start, 0)
            if int(row[CLASS]) not in self.classes or side[0] * side[1] < LEAST:
                continue
            covered = side * row.dtype.type(param.scale_cvg)
            if param.gridbox_type == DetectNetGroundTruthParameter.GRIDBOX_MIN:
                covered = np.minimum(side, np.maximum(covered, param.min_cvg_len))
            else:
                covered = np.minimum(covered, param.max_cvg_len)
            low = start + side / 2 - covered / 2
            high = low + covered
            columns, across = cells(low[0], high[0], param.stride, self.grid[0])
            rows, down = cells(low[1], high[1], param.stride, self.grid[1])
            area = covered[0] * covered[1]
            norm = max(least_norm, param.stride**2 / area) if area > 0 else least_norm
            y, x = np.nonzero(down[:, None] * across > LEAST * param.stride**2)
            y, x = y + rows, x + columns
            corners = np.stack([x, y]) * param.stride
            maps[MAPS:, y, x] = 0
            maps[MAPS + self.classes[int(row[CLASS])], y, x] = 1
            maps[0, y, x] = 1
            maps[1:3, y, x] = start[:, None] - corners
            maps[3:5, y, x] = (start + side)[:, None] - corners
            maps[5:7, y, x] = (1 / side)[:, None]
            maps[7, y, x] = norm


def rounded(value: float) -> int:
    """Return the nearest whole number, of two the one further from 0."""
    return floor(value + 0.5) if value >= 0 else ceil(value - 0.5)


def turning(size: tuple[int, int], angle: float) -> tuple[Array, tuple[int, int]]:
    """Return the matrix (2, 3) that turns an image by an angle in degrees and moves it to where its
    corners are at 0 or above, and the size of what holds it.
    """
    c, s = cos(radians(angle)), sin(radians(angle))
    matrix = np.array([[c, -s], [s, c]])
    half = np.array(size) / 2
    reach = np.abs(matrix) @ half
    shift = half - np.floor(half - reach) - matrix @ half
    # the space is measured around a centre at whole pixels, as in the fork
    centre = np.array([size[0] // 2, size[1] // 2])
    width, height = np.ceil(centre + reach) - np.floor(centre - reach) + 1
    return np.column_stack([matrix, shift]), (int(width), int(height))


def moved(boxes: Array, size: tuple[int, int], change: Change) -> Array:
    """Return boxes (B, 4) = x, y, width, height where the change of an image of this size puts
    them; those of a turned image keep their sides.
    """
    start, side = boxes[:, :2].copy(), boxes[:, 2:].copy()
    if change.flip:
        start[:, 0] = size[0] - start[:, 0] - side[:, 0] - 1
    factors = np.array(change.size, boxes.dtype) / np.array(size, boxes.dtype)
    start, side = start * factors, side * factors
    if change.turn is not None:
        centre = start + side / 2
        start = centre @ change.turn[:, :2].T + change.turn[:, 2] - side / 2
    return np.concatenate([start - np.array(change.offset), side], axis=1)


def common(offset: int, have: int, wanted: int) -> tuple[slice, slice]:
    """Return which of `have` pixels lie in the `wanted` ones from `offset` on, and where there."""
    low, high = max(offset, 0), min(offset + wanted, have)
    high = max(low, high)
    return slice(low, high), slice(low - offset, high - offset)


def cells(low: float, high: float, stride: int, count: int) -> tuple[int, Array]:
    """Return the first of `count` cells of `stride` pixels that lie between `low` and `high`, and
    how many pixels of each cell do, (cells,).
    """
    first = min(max(floor(low / stride), 0), count)
    places = np.arange(first, max(first, min(ceil(high / stride), count))) * stride
    return first, np.minimum(places + stride, high) - np.maximum(places, low)
