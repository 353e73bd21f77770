"""Batches of images with maps of true boxes (MS-CNN's ImageGtData): mirrored, scaled so that a box
gets another size, and cut around it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import locate
from caffepy.data.loader import JointLoader, Shape
from caffepy.data.overlap import overlaps
from caffepy.data.sources.marked_images import MarkedImages
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TEST,
    ImageGtDataParameter,
    LayerParameter,
    TransformationParameter,
)

SEED_WORDS = 2  # random numbers of an image that seed the generator of its changes
OCTAVE = 2  # sizes of a field between one and twice as large
LARGE = 1.5  # an image that is made so much larger is cut first
NOISE = 10  # pixels by which a cut is moved at random, at most
ASPECT_STEP = 0.05
MOST_ASPECTS = 20000
SILENT = 0.4  # share of a field in regions of no interest that makes it one
LEAST_OVERLAP = 0.2  # of a box that no field matches, with its best one
ROWS = 6  # of a map: class, x, y of the centre, width, height, overlap
NO_BOXES = [[0, 1, 1, 2, 2, 1, 1]]  # what stands for the boxes of a batch without any


def rounded(number: Any) -> int:
    """The nearest whole number, halves away from 0."""
    return int(np.floor(abs(number) + 0.5) * np.sign(number))


class Scene(NamedTuple):
    """An image (H, W, 3), boxes (n, 4) and regions (m, 4) = x1, y1, x2, y2 in it, and the place x,
    y that is looked at.
    """

    image: Array
    boxes: Array
    regions: Array
    centre: Array

    def moved(self, image: Array, factor: Array, shift: Array) -> "Scene":
        """The scene with another image, in which all is multiplied by (2,) and moved by (2,)."""
        twice, by = np.tile(factor, 2), np.tile(shift, 2)
        boxes, regions = (
            (rows * twice + by).astype(np.float32) for rows in (self.boxes, self.regions)
        )
        return Scene(image, boxes, regions, self.centre * factor + shift)

    def scaled(self, factors: Array) -> "Scene":
        """The scene scaled by these factors in x and y; DataError if nothing is left."""
        width, height = (
            rounded(side * factor)
            for side, factor in zip(self.image.shape[1::-1], factors, strict=True)
        )
        if (height, width) == self.image.shape[:2]:
            return self.moved(self.image, factors, np.zeros(2))
        try:
            image = cv2.resize(self.image, (width, height))
        except cv2.error:
            raise DataError(f"an image of {height} x {width} pixels") from None
        return self.moved(image, factors, np.zeros(2))


class FieldLoader(JointLoader):
    """Images (N, 3, h, w), a map (N, 6, h / rate, w / rate) for each downsample_rate and field,
    and with output_gt_boxes the boxes (G, 7, 1, 1) = image, x1, y1, x2, y2, class, ignored.

    A place of a map has the class and the place of the box that its field overlaps most, if by
    more than fg_threshold, and that overlap. Boxes are ignored, so that their places have no class,
    if their centre lies outside or they are smaller than min_gt_width and min_gt_height.
    """

    source: MarkedImages

    def __init__(self, layer: LayerParameter, phase: int, device: Device, path: str | None) -> None:
        param, transform = layer.image_gt_data_param, TransformationParameter()
        transform.CopyFrom(layer.transform_param)
        self._param, self._mirror = param, transform.mirror
        if transform.mean_file or transform.crop_size or transform.crop_h or transform.crop_w:
            raise ConfigError(
                "ImageGtData takes a mean_value for each channel, crop_width and crop_height, no "
                "mean_file and no crop_size"
            )
        self._fields, self._sizes = fields_of(param), sizes_of(param)
        self._aspects = aspects_of(param)
        transform.mirror = False
        transformer = Transformer(transform, TEST, device, path, more=SEED_WORDS)
        source = MarkedImages(
            locate(param.source, path),
            param.root_folder,
            path,
            seed=device.draw_seed() if param.shuffle else None,
            multiple=param.fg_img_multiple,
        )
        super().__init__(source, transformer, param.batch_size)
        self.scale = param.scale
        height, width = source.last_size
        if param.resize_width and param.resize_height:
            height, width = param.resize_height, param.resize_width
        self._size = param.crop_height or height, param.crop_width or width
        size = f"{self._size[0]} x {self._size[1]}"
        if self._size[0] > height or self._size[1] > width:
            raise ConfigError(f"a crop of {size} is larger than the image, {height} x {width}")
        for rate in param.downsample_rate:
            if min(self._grid(rate)) < 1:
                raise ConfigError(f"a downsample_rate of {rate} leaves no map of images of {size}")
        transformer.output_shape(self.shape())  # tells of a mean_value too many

    def shape(self) -> Shape:
        return 3, *self._size

    def _grid(self, rate: int) -> tuple[int, int]:
        height, width = (rounded(side / rate) for side in self._size)
        return height, width

    def label_shapes(self) -> list[Shape]:
        maps: list[Shape] = [
            (self.batch_size, ROWS, *self._grid(int(rate))) for rate, *_ in self._fields
        ]
        return maps + [(1, 7, 1, 1)] * self._param.output_gt_boxes

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        rng = np.random.Generator(np.random.PCG64(draws[-SEED_WORDS:].tolist()))
        marked = self.source.marked(item)
        image, boxes, regions = self.source.image(item), marked.boxes[:, 2:], marked.regions
        scene = Scene(image, boxes, regions, np.zeros(2))
        if self._mirror and rng.integers(2):
            scene = mirrored(scene)
        wanted = self._param.resize_width, self._param.resize_height
        if all(wanted):
            scene = scene.scaled(np.array(wanted) / image.shape[1::-1])
        chosen = scene.boxes[rng.integers(len(boxes))] if len(boxes) else None
        scene = looked_at(scene, chosen, self._size, rng)
        if chosen is not None and self._sizes is not None and rng.integers(2):
            scene = enlarged(scene, self._factors(chosen, rng))
        scene, seen = cut(scene, self._size, self.mean, rng)
        least = self._param.min_gt_width, self._param.min_gt_height
        ignored = (marked.boxes[:, 1] != 0) | lies_outside(scene.boxes, self._size, least)
        found = np.column_stack([scene.boxes, marked.boxes[:, 0], ignored]).astype(np.float32)
        maps = self._maps(found, scene.regions, seen)
        return scene.image.transpose(2, 0, 1), (maps, found)

    def _factors(self, box: Array, rng: np.random.Generator) -> Array:
        """Return the factors in x and y that give a box another of the sizes, and maybe another
        aspect ratio.
        """
        param, (width, height) = self._param, box[2:] - box[:2]
        assert self._sizes is not None
        areas, area = (param.min_scale * 2**self._sizes) ** 2, width * height
        likeness = np.minimum(areas, area) / np.maximum(areas, area)
        nearest = self._sizes[likeness.argmax()] if likeness.max() > 0 else 0
        factors = np.full(2, 2.0 ** (rng.choice(self._sizes) - nearest))
        if self._aspects is None or not rng.integers(2) or area <= 0:
            return factors
        change = rng.choice(self._aspects) / (width / height)
        axis = int(rng.integers(2))  # the width is changed, or the height
        factor = factors[axis] * (1 / change if axis else change)
        if param.min_scale * 0.8 <= (width, height)[axis] * factor <= param.max_scale * 1.2:
            factors[axis] = factor
        return factors

    def _maps(self, boxes: Array, regions: Array, seen: Array) -> list[Array]:
        """The maps (6, H, W) of boxes (n, 6) = x1, y1, x2, y2, class, ignored."""
        maps, best = [], np.zeros((len(self._fields), len(boxes)), np.float32)
        matched = np.zeros(len(boxes), bool)
        true, silent = with_sides(boxes[:, :4]), with_sides(regions)
        for k, (rate, *field) in enumerate(self._fields):
            height, width = self._grid(int(rate))
            places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)
            sides = np.broadcast_to(np.array(field, np.float32), places.shape)
            fields = np.concatenate([(places + 0.5) * rate - sides / 2, sides], axis=-1)[
                ..., None, :
            ]
            low = [rounded(side / rate) for side in seen[:2]]
            high = [
                a + rounded(side / rate) for a, side in zip(low, seen[2:] - seen[:2], strict=True)
            ]
            heeded: Array = np.all((places >= low) & (places < high), axis=-1)
            if len(regions):
                shares = overlaps(fields, silent, of_first=True)
                heeded &= shares.astype(np.float32).sum(axis=-1) < np.float32(SILENT)
            values = np.zeros((ROWS, height, width), np.float32)
            values[5] = ~heeded
            maps.append(values)
            if not len(boxes):
                continue
            found = overlaps(fields, true).astype(np.float32) * heeded[..., None]
            best[k] = found.max(axis=(0, 1))
            overlap, match = found.max(axis=-1), found.argmax(axis=-1)
            values[5][heeded] = overlap[heeded]
            hit = overlap > np.float32(self._param.fg_threshold)
            matched[match[hit]] = True
            put(values, hit, boxes[match[hit]])
        for box, known, shares in zip(boxes, matched, best.T, strict=True):
            k = int(shares.argmax())
            if box[5] or known or shares[k] < np.float32(LEAST_OVERLAP):
                continue
            centre = (box[:2] + box[2:4]) / 2 / self._fields[k][0]
            x, y = np.clip(np.floor(centre), 0, np.array(maps[k].shape[:0:-1]) - 1).astype(int)
            if maps[k][0, y, x] <= 0:
                put(maps[k], (y, x), box)
        return maps

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        packed = [np.stack(maps) for maps in zip(*(maps for maps, _ in labels), strict=True)]
        if self._param.output_gt_boxes:
            rows = [np.insert(found, 0, i, axis=1) for i, (_, found) in enumerate(labels)]
            boxes = np.concatenate(rows)
            packed.append((boxes if len(boxes) else np.array(NO_BOXES))[..., None, None])
        return packed


def mirrored(scene: Scene) -> Scene:
    """The scene with left and right exchanged."""
    image, width = np.ascontiguousarray(scene.image[:, ::-1]), scene.image.shape[1]
    boxes, regions = (
        np.stack([width - b[:, 2], b[:, 1], width - b[:, 0], b[:, 3]], axis=1)
        for b in (scene.boxes, scene.regions)
    )
    return scene._replace(image=image, boxes=boxes, regions=regions)


def looked_at(
    scene: Scene, chosen: Array | None, size: tuple[int, int], rng: np.random.Generator
) -> Scene:
    """The scene with the place to cut an image of this height and width around: the centre of the
    chosen box, or any.
    """
    if chosen is not None:
        return scene._replace(centre=(chosen[:2] + chosen[2:]) / 2)
    sides = zip(scene.image.shape[1::-1], size[::-1], strict=True)
    centre = [
        rng.integers(side - wanted + 1) + wanted / 2 if side >= wanted else side / 2
        for side, wanted in sides
    ]
    return scene._replace(centre=np.array(centre))


def cut(
    scene: Scene, size: tuple[int, int], mean: Array | None, rng: np.random.Generator
) -> tuple[Scene, Array]:
    """The scene in an image of this height and width, and the part of it that is seen, x1, y1, x2,
    y2: the others have the mean's colour (C, 1, 1).
    """
    wanted, sides = np.array(size[::-1]), np.array(scene.image.shape[1::-1])
    noise = rng.integers(-NOISE, NOISE, 2)
    middle = np.array([rounded(side / 2) for side in wanted])
    spare = np.array([rounded(side / 2) for side in np.maximum(wanted - sides, 0)])
    to = np.clip(spare + noise, 0, np.maximum(wanted - sides, 0))
    place = np.array([rounded(number) for number in scene.centre])
    start = np.clip(place + noise - middle, 0, np.maximum(sides - wanted, 0))
    seen = np.minimum(sides, wanted)
    (x, y), (left, top), (w, h) = start, to, seen
    image = scene.image[y : y + h, x : x + w]
    if (seen < wanted).any():
        colour = np.zeros(1, np.uint8) if mean is None else mean[:, 0, 0]
        canvas = np.empty((*size, 3), colour.dtype)
        canvas[...] = colour
        canvas[top : top + h, left : left + w] = image
        image = canvas
    scene = scene.moved(image, np.ones(2), to - start)
    return scene, np.concatenate([to, to + seen])


def lies_outside(boxes: Array, size: tuple[int, int], least: tuple[float, float]) -> Array:
    """True for boxes whose centre lies outside an image of this height and width, or that are
    smaller than the least width or height.
    """
    centre, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2] + 1
    fits: Array = np.all((centre >= 0) & (centre < size[::-1]) & (sides >= least), axis=1)
    return ~fits


def put(values: Array, places: Any, boxes: Array, unit: int = 0) -> None:
    """Write class, centre and sides, x2 - x1 + unit, of boxes (..., 6) to a map's places."""
    boxes = boxes.T
    for row, value in enumerate(
        (
            np.where(boxes[5] == 0, boxes[4], 0),
            (boxes[0] + boxes[2]) / 2,
            (boxes[1] + boxes[3]) / 2,
            boxes[2] - boxes[0] + unit,
            boxes[3] - boxes[1] + unit,
        )
    ):
        values[row][places] = value


def with_sides(boxes: Array) -> Array:
    """x, y, width and height of boxes (n, 4) = x1, y1, x2, y2."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def enlarged(scene: Scene, factors: Array) -> Scene:
    """The scene scaled by these factors in x and y, first cut if that is much."""
    if max(factors) > LARGE:
        sides = scene.image.shape[1::-1]
        size = [min(rounded(1.2 * side / f), side) for side, f in zip(sides, factors, strict=True)]
        corner = [
            min(max(rounded(c - w * 0.5), 0), side - w)
            for c, w, side in zip(scene.centre, size, sides, strict=True)
        ]
        (x, y), (w, h) = corner, size
        piece = scene.image[y : y + h, x : x + w]
        scene = scene.moved(piece, np.ones(2), -np.array(corner))
    return scene.scaled(factors)


def fields_of(param: ImageGtDataParameter) -> list[tuple[int, int, int]]:
    """Downsample rate, width and height of each field; ConfigError for settings without sense."""
    counts = {len(param.downsample_rate), len(param.field_w), len(param.field_h)}
    fields = list(zip(param.downsample_rate, param.field_w, param.field_h, strict=False))
    if len(counts) > 1 or not fields or min(map(min, fields)) < 1:
        raise ConfigError(
            "image_gt_data_param needs as many downsample_rate as field_w and field_h, one or "
            "more, each of them 1 or more"
        )
    if param.coord_num != 4:
        raise ConfigError(f"coord_num is 4, not {param.coord_num}")
    if not param.batch_size:
        raise ConfigError("image_gt_data_param needs a batch_size of 1 or more")
    if bool(param.resize_width) != bool(param.resize_height):
        raise ConfigError("resize_width and resize_height must both be given or neither")
    scales = param.HasField("min_scale") and param.HasField("max_scale")
    if param.do_multiple_scale and scales and not 0 < param.min_scale <= param.max_scale:
        raise ConfigError(f"no scale between {param.min_scale} and {param.max_scale}")
    return fields


def sizes_of(param: ImageGtDataParameter) -> Array | None:
    """The sizes that boxes are scaled to, as powers of 2 times min_scale; None without them."""
    scales = param.HasField("min_scale") and param.HasField("max_scale")
    if not (param.do_multiple_scale and scales):
        return None
    return np.arange(rounded(OCTAVE * np.log2(param.max_scale / param.min_scale) + 1)) / OCTAVE


def aspects_of(param: ImageGtDataParameter) -> Array | None:
    """The aspect ratios that boxes are changed to; None without them."""
    if not (param.HasField("min_whaspect") and param.HasField("max_whaspect")):
        return None
    steps = (param.max_whaspect - param.min_whaspect) / ASPECT_STEP
    if not (0.5 <= steps <= MOST_ASPECTS and param.min_whaspect > 0):
        raise ConfigError(
            "max_whaspect must be min_whaspect + 0.05 or more, and both above 0 and below "
            f"{MOST_ASPECTS * ASPECT_STEP:g}"
        )
    return np.arange(rounded(steps)) * ASPECT_STEP + param.min_whaspect
