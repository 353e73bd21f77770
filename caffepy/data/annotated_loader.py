"""Batches of images with boxes (SSD's AnnotatedData): records of AnnotatedDatum, distorted, set on
larger canvases, sampled, resized, cropped and mirrored together with their boxes.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError, one_or_each
from caffepy.data import augment, boxes
from caffepy.data.datum import Annotated, decode_annotated, planes
from caffepy.data.loader import JointLoader, Shape
from caffepy.data.sources.base import Source
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array, shape_string
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import LayerParameter, ResizeParameter

log = logging.getLogger(__name__)

HEEDS = "resize_param further_resize_param noise_param emit_constraint distort_param expand_param"
SEED_WORDS = 2  # random numbers of an image that seed the generator of its changes
YOLO_ROWS, YOLO_COLUMNS = 300, 5
LEAST_ROWS = 64  # of boxes, on a GPU
PROBABILITY_ERROR = 0.01  # of the sum of probabilities


class AnnotatedLoader(JointLoader):
    """Batches of annotated records. Labels are one row a box,

        [number in the batch, label, instance, xmin, ymin, xmax, ymax, difficult]

    (1, 1, boxes, 8), one row of -1 if there are none; on a GPU rows of -1 follow, so that the shape
    is the same in most batches. MobileNet-YOLO's are (N, 1, 300, 5), [label - 1, x, y, width,
    height] of the box' centre, and rows of zeros. Records without boxes have the label of their
    Datum, (N, 1, 1, 1).
    """

    def __init__(
        self, source: Source, layer: LayerParameter, phase: int, device: Device, path: str | None
    ) -> None:
        self._param, self._annotated = layer.transform_param, layer.annotated_data_param
        self._resizes = self._read_resizes()
        self._samplers = boxes.Samplers(list(self._annotated.batch_sampler))
        self._yolo = self._annotated.yolo_data_type
        self._check()
        more = SEED_WORDS * self._is_random()
        transformer = Transformer(
            layer.transform_param, phase, device, path, more=more, heeds=HEEDS
        )
        super().__init__(source, transformer, layer.data_param.batch_size)
        self._mode = transformer.decode_mode
        self._wants_labels = len(layer.top) > 1
        self._rows = LEAST_ROWS if device.is_cuda else 0  # of boxes, at least
        self._warned: set[str] = set()
        modes = {resize.resize_mode for resize in self._resizes}
        if ResizeParameter.FIT_SMALL_SIZE in modes and self.batch_size != 1:
            raise ConfigError(
                "FIT_SMALL_SIZE makes images of several sizes: it needs a batch_size of 1, not "
                f"{self.batch_size}"
            )
        first = self._peek(self._record)
        self._type = self._type_of(first)

    def _read_resizes(self) -> list[ResizeParameter]:
        """The resize_params; of several each has its prob of being drawn for a batch."""
        param = self._param
        resizes = [param.resize_param] if param.HasField("resize_param") else []
        resizes += param.further_resize_param
        for resize in resizes:
            augment.check_resize(resize)
        total = sum(resize.prob for resize in resizes)
        if len(resizes) > 1 and abs(total - 1) > PROBABILITY_ERROR:
            count = len(resizes)
            raise ConfigError(f"the prob of {count} resize_param must sum to 1, not {total:g}")
        return resizes

    def _check(self) -> None:
        param, annotated = self._param, self._annotated
        if param.HasField("distort_param"):
            augment.check_distortion(param.distort_param)
        if param.HasField("noise_param"):
            augment.check_noise(param.noise_param)
        if param.HasField("expand_param"):
            if param.expand_param.max_expand_ratio <= 1:
                ratio = param.expand_param.max_expand_ratio
                raise ConfigError(f"expand_param needs a max_expand_ratio above 1, not {ratio:g}")
            if param.mean_file:
                raise ConfigError("expand_param fills with mean_value; it cannot have a mean_file")
        if self._yolo not in (0, 1):
            raise ConfigError(f"yolo_data_type must be 0 or 1, not {self._yolo}")
        for name in ("seg_resize_width", "seg_resize_height", "difficult_label_warmup"):
            if getattr(annotated, name):
                raise ConfigError(f"annotated_data_param {name} is not supported")

    def _is_random(self) -> bool:
        """True if more than crop and mirror is drawn for an image."""
        param = self._param
        return bool(
            param.HasField("distort_param")
            or param.HasField("expand_param")
            or self._annotated.batch_sampler
            or self._yolo
            or len(self._resizes) > 1
            or any(len(resize.interp_mode) > 1 for resize in self._resizes)
            or param.noise_param.saltpepper
        )

    def _type_of(self, record: Annotated) -> int | None:
        """The type of annotation, which the layer may say instead of its first record."""
        if not self._wants_labels:
            return None
        if self._annotated.HasField("anno_type"):
            if self._annotated.anno_type != record.type:
                log.warning("type stored in AnnotatedDatum is shadowed.")
            return self._annotated.anno_type
        return record.type

    def shape(self) -> Shape:
        channels, *size = self._peek(self._record).image.shape
        if self._resizes:
            size = list(augment.output_size((size[0], size[1]), self._resizes[0]))
        return self.transformer.output_shape((channels, *size))

    def label_shapes(self) -> list[Shape]:
        record = self._peek(self._record)
        if self._type is None:
            return [(self.batch_size, 1, 1, 1)]
        if self._yolo:
            return [(self.batch_size, 1, YOLO_ROWS, YOLO_COLUMNS)]
        return [(1, 1, max(1, len(record.objects), self._rows), 1 + boxes.COLUMNS)]

    def _record(self, item: Any) -> Annotated:
        try:
            return decode_annotated(item[1], self._mode)
        except DataError as error:
            raise DataError(f"{self.source.name(item)}: {error.message}") from None

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        """Image and objects (n, 7), or the Datum's label."""
        record = self._record(item)
        try:
            return self._transform(record, draws, first)
        except (DataError, ConfigError) as error:
            raise type(error)(f"{self.source.name(item)}: {error.message}") from None

    def _transform(self, record: Annotated, draws: Array, first: Array) -> tuple[Array, Any]:
        param = self._param
        rng = np.random.Generator(np.random.PCG64(draws[-SEED_WORDS:].tolist() or 0))
        image = record.image.transpose(1, 2, 0)  # (C, H, W) -> (H, W, C)
        if len(record.image) == 1:
            image = image[..., 0]
        image, objects = np.ascontiguousarray(image), record.objects
        emit = param.emit_constraint if param.HasField("emit_constraint") else None
        sizes = None  # of boxes, once they were projected; the fork keeps them when it resizes
        if param.HasField("distort_param"):
            if record.encoded:
                image = self._stored(augment.distort(image, param.distort_param, rng))
            else:
                self._warn("distort_param changes encoded images only, as in the fork")
        if param.HasField("expand_param"):
            fill = self._colour(image) if record.encoded else augment.SPACE
            if expanded := augment.expand(image, param.expand_param, fill, rng):
                image = self._stored(expanded[0]) if record.encoded else expanded[0]
                objects = boxes.project(objects, expanded[1], emit)
                sizes = boxes.areas(objects[:, boxes.BOX])
        window = None
        if self._yolo:
            window = boxes.jitter(self._annotated.yolo_data_jitter, rng)
        elif self._annotated.batch_sampler:
            window = self._samplers.draw(objects, rng)
        if window is not None:
            image = augment.cut(image, window)
            image = self._stored(image) if record.encoded else image
            objects = boxes.project(objects, window, emit)
            sizes = boxes.areas(objects[:, boxes.BOX])
        resize, size = self._resize_of(first), (image.shape[0], image.shape[1])
        if resize is not None:
            if not record.encoded:
                raise ConfigError("resize_param is for encoded images, and this one is raw")
            image = augment.resize(image, resize, rng)
            objects = boxes.follow_resize(objects, size, resize)
        if param.HasField("noise_param") and record.encoded:
            image = augment.noisy(image, param.noise_param, rng)
        image, window, is_mirrored = self._cut(image, draws)
        objects = boxes.project(objects, window, emit, sizes)
        if is_mirrored:
            boxes.mirror(objects)
        if resize is not None:
            boxes.rescale(objects, size, resize, window)
        return image, self._label(record, objects)

    def _stored(self, image: Array) -> Array:
        return augment.through_jpeg(image, self._mode)

    def _colour(self, image: Array) -> Array | int:
        """The colour of a canvas: mean_value, rounded."""
        means = np.array(self._param.mean_value, np.float64)
        if not len(means):
            return 0
        if len(means) not in (1, augment.channels_of(image)):
            count = augment.channels_of(image)
            raise ConfigError(f"{len(means)} mean_value for {one_or_each(count)}")
        colour = np.rint(means).clip(0, 255).astype(np.uint8)
        return colour if image.ndim == 3 else int(colour[0])

    def _resize_of(self, first: Array) -> ResizeParameter | None:
        """The resize_param of the batch whose first image has these random numbers."""
        if len(self._resizes) < 2:
            return self._resizes[0] if self._resizes else None
        ends = np.cumsum([resize.prob for resize in self._resizes])
        number = float(first[-1]) / (1 << 32) * ends[-1]
        return self._resizes[int(np.searchsorted(ends, number, "right"))]

    def _cut(self, image: Array, draws: Array) -> tuple[Array, Array, bool]:
        """The image (C, h, w), cropped and mirrored; the window of the crop; True if mirrored."""
        pixels, left, top, is_mirrored = self.crop(planes(image), draws)
        height, width = image.shape[:2]
        _, h, w = pixels.shape
        corners = np.array([left, top, left + w, top + h], np.float32)
        return pixels, corners / np.array([width, height] * 2, np.float32), is_mirrored

    def _label(self, record: Annotated, objects: Array) -> Any:
        if not self._wants_labels:
            return None
        if self._type is not None:
            if record.type is None:
                raise DataError("the record has no type of annotation, as others have")
            return objects
        if record.label is None:
            raise DataError("the record has neither a type of annotation nor a label")
        return record.label

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        if not self._wants_labels:
            return []
        if self._type is None:
            return [np.array(labels, np.float64).reshape(-1, 1, 1, 1)]
        return [self._pack_yolo(labels) if self._yolo else self._pack_boxes(labels)]

    def _pack_boxes(self, labels: Sequence[Array]) -> Array:
        count = sum(map(len, labels))
        if self._rows and count > self._rows:
            self._rows = 1 << (count - 1).bit_length()
        rows = np.full((max(1, count, self._rows), 1 + boxes.COLUMNS), -1, np.float32)
        rows[:count, 0] = np.repeat(np.arange(len(labels)), [len(objects) for objects in labels])
        rows[:count, 1:] = np.concatenate(labels)
        return rows[None, None]

    def _pack_yolo(self, labels: Sequence[Array]) -> Array:
        packed = np.zeros((len(labels), 1, YOLO_ROWS, YOLO_COLUMNS), np.float32)
        for rows, objects in zip(packed[:, 0], labels, strict=True):
            if not self._annotated.train_diffcult:
                objects = objects[objects[:, boxes.DIFFICULT] == 0]
            objects = objects[:YOLO_ROWS]
            low, high = objects[:, 2:4], objects[:, 4:6]
            rows[: len(objects), 0] = objects[:, boxes.LABEL] - 1
            rows[: len(objects), 1:3] = (low + high) / 2
            rows[: len(objects), 3:5] = high - low
        return packed

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)

    def _unlike(self, item: Any, shape: Shape, first: Shape) -> DataError:
        start = f"{shape_string(shape)} in a batch that starts with {shape_string(first)}"
        return DataError(
            f"{self.source.name(item)} becomes {start}; resize_param makes all images of one size"
        )


class VideoLoader(AnnotatedLoader):
    """Batches of a video's frames, resized, cropped and mirrored; labels (N,) are 0."""

    def _record(self, item: Any) -> Annotated:
        image, label = self.source.decode(item)
        return Annotated(image, label, True, None, np.empty((0, boxes.COLUMNS), np.float32))

    def label_shapes(self) -> list[Shape]:
        return [(self.batch_size,)]

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        return [np.zeros(self.batch_size)] if self._wants_labels else []
