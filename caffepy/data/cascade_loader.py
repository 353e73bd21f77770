"""Batches of images with true boxes, and maps of these (Cascade R-CNN: Cai and Vasconcelos 2018):
images of many sizes, tall or wide as the first one of a batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.data.augment import check_distortion, distort
from caffepy.data.field_loader import (
    ROWS,
    SEED_WORDS,
    Scene,
    cut,
    enlarged,
    lies_outside,
    looked_at,
    mirrored,
    put,
    rounded,
)
from caffepy.data.loader import Batch, JointLoader, Shape
from caffepy.data.overlap import pixel_overlaps
from caffepy.data.sources.base import Items, State
from caffepy.data.sources.marked_images import CascadeImages
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TEST,
    DetectionDataParameter,
    EvalDataParameter,
    LayerParameter,
    TransformationParameter,
)

GRID = 32
"""Sides of images are multiples of it where a template_ratio or EvalData makes them."""
TRUTH = 8
"""Columns of true boxes: image, x1, y1, x2, y2, class, ignored, difficult."""
SHUFFLES = "random", "random_aspect", "random_mix_aspect"

Size = tuple[int, int]


class CascadeLoader(JointLoader):
    """Base: images (N, 3, h, w) and true boxes (G, 8, 1, 1), a row of -1 if there are none."""

    source: CascadeImages
    settings: DetectionDataParameter | EvalDataParameter

    def __init__(
        self, source: CascadeImages, layer: LayerParameter, device: Device, path: str | None
    ) -> None:
        transform, param = TransformationParameter(), self.settings
        transform.CopyFrom(layer.transform_param)
        if transform.mean_file or transform.crop_size or transform.crop_h or transform.crop_w:
            raise ConfigError(f"{layer.type} takes a mean_value for each channel, no mean_file")
        if not param.batch_size:
            raise ConfigError(f"{layer.type} needs a batch_size of 1 or more")
        if bool(param.resize_width) != bool(param.resize_height):
            raise ConfigError("resize_width and resize_height must both be given or neither")
        if param.HasField("short_size") and not 0 < param.short_size <= param.long_size:
            raise ConfigError(
                f"short_size must be above 0 and long_size no less, not {param.short_size} and "
                f"{param.long_size}"
            )
        transform.mirror = False
        transformer = Transformer(transform, TEST, device, path, more=SEED_WORDS)
        super().__init__(source, transformer, param.batch_size)
        transformer.output_shape(self.shape())  # tells of a mean_value too many

    @property
    def _has_sides(self) -> bool:
        """True if images get a shorter and a longer side."""
        return self.settings.HasField("short_size") and self.settings.HasField("long_size")

    def _fill(self, batch: Batch, items: Items, draws: Array, state: State) -> Any:
        """Each item goes with the first one, which decides the size."""
        return super()._fill(batch, [(item, items[0]) for item in items], draws, state)

    def truths(self, labels: Sequence[Array]) -> Array:
        """The rows of the boxes (n, 7) of each image."""
        rows = np.concatenate([np.insert(found, 0, i, axis=1) for i, found in enumerate(labels)])
        return (rows if len(rows) else np.full((1, TRUTH), -1.0))[..., None, None]


class DetectionLoader(CascadeLoader):
    """Also a map (N, 6, h / stride, w / stride) for each stride and field, and the boxes with
    output_gt_boxes alone.

    A place of a map has the class and the place of the box that its field overlaps most, if by more
    than fg_threshold, and that overlap. Boxes are ignored, so that their places have no class, if
    their centre lies outside or they are smaller than min_gt_width and min_gt_height.
    """

    settings: DetectionDataParameter

    def __init__(self, layer: LayerParameter, phase: int, device: Device, path: str | None) -> None:
        param = self.settings = layer.detection_data_param
        self._mirror = layer.transform_param.mirror
        self._fields = fields_of(param)
        self._octaves = octaves_of(param)
        if param.HasField("distort_param"):
            check_distortion(param.distort_param)
        if param.shuffle not in SHUFFLES or not param.mix_group_size:
            raise ConfigError(
                f"shuffle is {', '.join(SHUFFLES)}, with a mix_group_size of 1 or more, not "
                f'"{param.shuffle}"'
            )
        source = CascadeImages(
            locate(param.source, path),
            param.root_folder,
            path,
            seed=device.draw_seed() if param.HasField("shuffle") else None,
            shuffle=param.shuffle,
            group=param.mix_group_size,
        )
        super().__init__(source, layer, device, path)

    def shape(self) -> Shape:
        size, param = self.source.last_size, self.settings
        if self._has_sides:
            size = param.long_size, param.short_size
        elif not self._is_fixed:
            size = self._resized(size, 1.0)
        return 3, *self._fixed(size)

    @property
    def _is_fixed(self) -> bool:
        """True if all images get one size."""
        param = self.settings
        return bool(param.crop_width and param.crop_height) or bool(param.resize_width)

    def _fixed(self, size: Size) -> Size:
        """The size that crop or resize sizes say, else this one."""
        param = self.settings
        if param.crop_width and param.crop_height:
            return param.crop_height, param.crop_width
        if param.HasField("crop_short_size") and param.HasField("crop_long_size"):
            return param.crop_long_size, param.crop_short_size
        return (param.resize_height, param.resize_width) if param.resize_width else size

    def _resized(self, size: Size, ratio: float) -> Size:
        """The height and width that an image of this size is given before it is cut."""
        param = self.settings
        if param.resize_width:
            return param.resize_height, param.resize_width
        factor = np.float32(1)
        if param.HasField("resize_ratio"):
            factor = np.float32(param.resize_ratio)
        elif self._has_sides:
            short = rounded(param.short_size * np.float32(ratio) / GRID) * GRID
            factor = np.float32(short) / np.float32(min(size))
        height, width = (max(1, rounded(side * factor)) for side in size)
        return height, width

    def _size(self, leader: int, first: Array) -> tuple[Size, float]:
        """Height and width of a batch by its first image, and the template_ratio."""
        param, ratio = self.settings, 1.0
        if param.template_ratio:
            rng = np.random.Generator(np.random.PCG64([*first[-SEED_WORDS:].tolist(), 1]))
            ratio = float(rng.choice(param.template_ratio))
        if self._is_fixed:
            return self._fixed((0, 0)), ratio
        size = self._resized(self.source.marked(leader).size, ratio)
        if param.HasField("crop_short_size") and param.HasField("crop_long_size"):
            sides = param.crop_long_size, param.crop_short_size
        elif self._has_sides:
            long, short = (
                rounded(side * np.float32(ratio) / GRID) * GRID
                for side in (param.long_size, param.short_size)
            )
            sides = max(GRID, long), max(GRID, short)
        else:
            return size, ratio
        return sides if size[0] >= size[1] else sides[::-1], ratio

    def _grid(self, size: Size, stride: int) -> Size:
        height, width = (rounded(side / stride) for side in size)
        return height, width

    def label_shapes(self) -> list[Shape]:
        _, height, width = self.shape()
        maps: list[Shape] = [
            (self.batch_size, ROWS, *self._grid((height, width), stride))
            for stride, *_ in self._fields
        ]
        return maps + [(1, TRUTH, 1, 1)] * self.settings.output_gt_boxes

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        item, leader = item
        param, (size, ratio) = self.settings, self._size(leader, first)
        rng = np.random.Generator(np.random.PCG64(draws[-SEED_WORDS:].tolist()))
        marked = self.source.marked(item)
        image = self.source.image(item)
        if param.HasField("distort_param"):
            image = distort(image, param.distort_param, rng)
        scene = Scene(image, marked.boxes[:, 3:], marked.regions, np.zeros(2))
        if self._mirror and rng.integers(2):
            scene = mirrored(scene)
        height, width = self._resized(image.shape[:2], ratio)
        scene = scene.scaled(np.array([width, height]) / image.shape[1::-1])
        chosen = scene.boxes[rng.integers(len(scene.boxes))] if len(scene.boxes) else None
        scene = looked_at(scene, chosen, size, rng)
        if self._octaves and rng.random() < param.multiscale_prob:
            scene = enlarged(scene, self._factors(chosen, rng))
        scene, seen = cut(scene, size, self.mean, rng)
        least = param.min_gt_width, param.min_gt_height
        ignored = (marked.boxes[:, 1] != 0) | lies_outside(scene.boxes, size, least)
        columns = scene.boxes, marked.boxes[:, 0], ignored, marked.boxes[:, 2]
        found = np.column_stack(columns).astype(np.float32)
        maps = self._maps(found, scene.regions, seen, size)
        return scene.image.transpose(2, 0, 1), (maps, found)

    def _factors(self, box: Array | None, rng: np.random.Generator) -> Array:
        """Return the factors in x and y that give a box a size of min_scale to max_scale, and maybe
        another aspect ratio. Without a box images become twice as large, as in the fork.
        """
        param, octaves = self.settings, self._octaves
        assert octaves
        low, high = octaves
        if param.HasField("min_scale"):
            low = high = 1.0
            if box is not None:
                area = float(np.prod(np.maximum(box[2:] - box[:2] + 1, 1)))
                low, high = (float(edge - np.log2(area) / 2) for edge in octaves)
        factors = np.full(2, 2.0 ** rng.uniform(low, high))
        if param.HasField("min_whaspect") and param.HasField("max_whaspect"):
            aspect = 2 ** rng.uniform(np.log2(param.min_whaspect), np.log2(param.max_whaspect))
            factors *= np.sqrt([aspect, 1 / aspect])
        return factors

    def _maps(self, boxes: Array, regions: Array, seen: Array, size: Size) -> list[Array]:
        """The maps (6, H, W) of boxes (n, 7) = x1, y1, x2, y2, class, ignored, difficult."""
        param = self.settings
        maps, best = [], np.zeros((len(self._fields), len(boxes)), np.float32)
        matched = np.zeros(len(boxes), bool)
        for k, (stride, *field) in enumerate(self._fields):
            height, width = self._grid(size, stride)
            places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)
            middle, half = (places + 0.5) * stride, np.array(field) / 2
            fields = np.concatenate([middle - half, middle + half], axis=-1).astype(np.float32)
            low = [rounded(side / stride) for side in seen[:2]]
            high = [
                a + rounded(side / stride) for a, side in zip(low, seen[2:] - seen[:2], strict=True)
            ]
            heeded: Array = np.all((places >= low) & (places < high), axis=-1)
            heeded &= self._is_good(fields, seen, half)
            values = np.zeros((ROWS, height, width), np.float32)
            maps.append(values)
            overlap, hit = np.zeros((height, width), np.float32), np.zeros((height, width), bool)
            if len(boxes):
                found = pixel_overlaps(fields[..., None, :], boxes[:, :4]).astype(np.float32)
                found *= heeded[..., None]
                best[k] = found.max(axis=(0, 1))
                overlap, match = found.max(axis=-1), found.argmax(axis=-1)
                hit = overlap > np.float32(param.fg_threshold)
                matched[match[hit]] = True
            silent = ~heeded
            if len(regions):
                shares = pixel_overlaps(fields[..., None, :], regions, of_first=True)
                total = shares.astype(np.float32).sum(axis=-1)
                silent |= ~hit & (total >= np.float32(param.ignore_fg_threshold))
            values[5] = np.where(silent, 1, overlap)
            if len(boxes):
                put(values, hit, boxes[match[hit]], 1)
        for box, known, shares in zip(boxes, matched, best.T, strict=True):
            most = shares.max(initial=-1)
            if box[5] or known or most < np.float32(max(param.pickup_iou_thr, 0)):
                continue
            k = int(shares.argmax())
            centre = (box[:2] + box[2:4]) / 2 / self._fields[k][0]
            x, y = np.clip(np.floor(centre), 0, np.array(maps[k].shape[:0:-1]) - 1).astype(int)
            if maps[k][0, y, x] <= 0:
                put(maps[k], (y, x), box, 1)
                maps[k][5, y, x] = shares[k]
        return maps

    def _is_good(self, fields: Array, seen: Array, half: Array) -> Array:
        """False for fields (H, W, 4) that leave the part of the image that is seen by too much."""
        param = self.settings
        if param.HasField("anchor_ignore_margin_ratio"):
            margin = half * np.float32(param.anchor_ignore_margin_ratio)
            inside = fields[..., :2] >= seen[:2] - margin
            good: Array = np.all(inside & (fields[..., 2:] < seen[2:] + margin), axis=-1)
            return good
        if param.HasField("anchor_ignore_iou_thr"):
            share = pixel_overlaps(fields, seen.astype(np.float32), of_first=True)
            return share.astype(np.float32) >= np.float32(param.anchor_ignore_iou_thr)
        return np.ones(fields.shape[:2], bool)

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        packed = [np.stack(maps) for maps in zip(*(maps for maps, _ in labels), strict=True)]
        if self.settings.output_gt_boxes:
            packed.append(self.truths([found for _, found in labels]))
        return packed


class EvalLoader(CascadeLoader):
    """Images as they are, or with a shorter side of short_size and none above long_size, sides
    rounded to multiples of 32; and as a third top their heights and widths (N, 2, 1, 1).
    """

    settings: EvalDataParameter

    def __init__(self, layer: LayerParameter, phase: int, device: Device, path: str | None) -> None:
        param = self.settings = layer.eval_data_param
        if param.batch_size > 1 and not param.resize_width:
            raise ConfigError("images of several sizes need a batch_size of 1")
        self._has_sizes = len(layer.top) > 2
        source = CascadeImages(locate(param.source, path), param.root_folder, path)
        super().__init__(source, layer, device, path)

    def shape(self) -> Shape:
        return 3, *self._resized(self.source.last_size)

    def _resized(self, size: Size) -> Size:
        """The height and width that an image of this size is given."""
        param = self.settings
        if param.resize_width:
            size = param.resize_height, param.resize_width
        elif self._has_sides:
            factor = np.float32(param.short_size) / np.float32(min(size))
            height, width = (min(rounded(side * factor), param.long_size) for side in size)
            size = height, width
        height, width = (max(1, rounded(side / GRID)) * GRID for side in size)
        return height, width

    def label_shapes(self) -> list[Shape]:
        shapes: list[Shape] = [(1, TRUTH, 1, 1), (self.batch_size, 2, 1, 1)]
        return shapes[: 1 + self._has_sizes]

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        item, _ = item
        marked, image = self.source.marked(item), self.source.image(item)
        scene = Scene(image, marked.boxes[:, 3:], marked.regions, np.zeros(2))
        size = self._resized(image.shape[:2])
        scene = scene.scaled(np.array(size[::-1]) / image.shape[1::-1])
        found = np.column_stack([scene.boxes, marked.boxes[:, :3]]).astype(np.float32)
        return scene.image.transpose(2, 0, 1), (size, found)

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        truths = self.truths([found for _, found in labels])
        sizes = np.array([size for size, _ in labels], np.float32)[..., None, None]
        return [truths, sizes][: 1 + self._has_sizes]


def fields_of(param: DetectionDataParameter) -> list[tuple[int, int, int]]:
    """Stride, width and height of each field, if any; ConfigError for settings without sense."""
    counts = {len(param.stride), len(param.field_w), len(param.field_h)}
    fields = list(zip(param.stride, param.field_w, param.field_h, strict=False))
    if len(counts) > 1 or any(min(field) < 1 for field in fields):
        raise ConfigError(
            "detection_data_param needs as many stride as field_w and field_h, each of them 1 or "
            "more"
        )
    if param.coord_num != 4:
        raise ConfigError(f"coord_num is 4, not {param.coord_num}")
    if param.fg_threshold <= 0:
        raise ConfigError(f"fg_threshold must be above 0, not {param.fg_threshold:g}")
    for name in ("resize_ratio", "crop_short_size", "crop_long_size"):
        if param.HasField(name) and getattr(param, name) <= 0:
            raise ConfigError(f"{name} must be above 0")
    if param.template_ratio and min(param.template_ratio) <= 0:
        raise ConfigError("a template_ratio must be above 0")
    return fields


def octaves_of(param: DetectionDataParameter) -> tuple[float, ...] | None:
    """The bounds of random scales, or of the sizes of a box, as powers of 2; None without them."""
    pairs = [("min_scale", "max_scale"), ("low_scale_ratio", "high_scale_ratio")]
    given = [pair for pair in pairs if all(map(param.HasField, pair))]
    if len(given) > 1:
        raise ConfigError("min_scale and max_scale exclude low_scale_ratio and high_scale_ratio")
    for pair in [*given, ("min_whaspect", "max_whaspect")]:
        low, high = (getattr(param, name) for name in pair)
        if all(map(param.HasField, pair)) and not 0 < low <= high:
            raise ConfigError(
                f"{pair[0]} must be above 0 and {pair[1]} no less, not {low:g} and {high:g}"
            )
    if not given:
        return None
    return tuple(float(np.log2(getattr(param, name))) for name in given[0])
