"""Batches of images with label images: ImageSegData of PSPNet and DeepLab, DenseImageData of
SegNet, ImageLabelmapData of HED. Image and label are scaled, cropped and mirrored alike.
"""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import locate
from caffepy.data.augment import Size
from caffepy.data.datum import COLOR, GRAY, planes
from caffepy.data.loader import JointLoader, Shape
from caffepy.data.sources.image_pairs import ImagePairs
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TRAIN,
    DenseImageDataParameter,
    ImageDataParameter,
    LayerParameter,
    TransformationParameter,
)


def _resized(image: Array, size: Size, method: int) -> Array:
    """The image with this height and width."""
    if image.shape[:2] == size:
        return image
    return cv2.resize(image, size[::-1], interpolation=method)


def _new_size(param: ImageDataParameter | DenseImageDataParameter) -> Size | None:
    if (param.new_height > 0) != (param.new_width > 0):
        raise ConfigError("new_height and new_width must both be given or neither")
    return (param.new_height, param.new_width) if param.new_height else None


def _pairs(
    param: ImageDataParameter | DenseImageDataParameter, device: Device, path: str | None
) -> ImagePairs:
    """Return the pairs of images that a list names, in the order that `param` asks for."""
    return ImagePairs(
        locate(param.source, path),
        param.root_folder,
        path,
        seed=device.draw_seed() if param.shuffle else None,
        skip=device.draw_seed() % param.rand_skip if param.rand_skip else None,
    )


class SegmentationLoader(JointLoader):
    """Base: what `make` and `pack` have in common. Labels are (N, 1, h, w)."""

    source: ImagePairs
    alike = True  # label images have the size of their images

    def __init__(self, source: ImagePairs, transformer: Transformer, batch: int, mode: int) -> None:
        super().__init__(source, transformer, batch)
        self._mode = mode

    def read(self, item: int) -> tuple[Array, Array]:
        """Image and label image, resized as the layer says."""
        raise NotImplementedError

    def _checked(self, item: int) -> tuple[Array, Array]:
        """The result of `read`; DataError unless the two have one size."""
        image, label = self.read(item)
        if self.alike and image.shape[:2] != label.shape:
            sizes = (f"{height} x {width}" for height, width in (image.shape[:2], label.shape))
            raise DataError(
                "{}: the image has {} pixels, its label {}".format(self.source.name(item), *sizes)
            )
        return image, label

    def _cropped(self, image: Array, label: Array, draws: Array) -> tuple[Array, Array]:
        """Image (C, h, w) and label (h, w), cropped and mirrored alike."""
        pixels, left, top, is_mirrored = self.crop(planes(image), draws)
        if self.transformer.crop:
            label = label[top : top + pixels.shape[1], left : left + pixels.shape[2]]
        return pixels, label[:, ::-1] if is_mirrored else label

    def _cut(self, item: int, image: Array, label: Array, draws: Array) -> tuple[Array, Array]:
        """Return the result of `_cropped`; ConfigError that names the item if it is smaller."""
        try:
            return self._cropped(image, label, draws)
        except ConfigError as error:
            raise ConfigError(f"{self.source.name(item)}: {error.message}") from None

    def _output_of(self, size: Size) -> Size:
        """The size of an image of this size after its crop."""
        return self.transformer.crop or size

    def shape(self) -> Shape:
        image, _ = self._peek(self._checked)
        channels = 1 if image.ndim == 2 else image.shape[2]
        return (channels, *self._output_of((image.shape[0], image.shape[1])))


class ImageSegLoader(SegmentationLoader):
    """Images and labels of `image_data_param`, and the sizes (N, 1, 1, 2) that images had, height
    and width, where the crop is not smaller.

    What a crop needs beyond the image is mean_value there, and ignore_label in the label. With
    new_height and new_width label images are interpolated like images, as in the fork.
    """

    def __init__(self, layer: LayerParameter, phase: int, device: Device, path: str | None) -> None:
        param, transform = layer.image_data_param, TransformationParameter()
        transform.CopyFrom(layer.transform_param)
        if transform.mean_file:
            raise ConfigError("ImageSegData takes a mean_value for each channel, no mean_file")
        if min(transform.scale_factors, default=1) <= 0:
            raise ConfigError("scale_factors must be above 0")
        if transform.crop_height or transform.crop_width:  # PSPNet's names
            transform.crop_h, transform.crop_w = transform.crop_height, transform.crop_width
        self._param, self._factors = param, list(transform.scale_factors)
        self._size = _new_size(param)
        self._labels = param.label_type if param.has_label else ImageDataParameter.NONE
        heeds = "scale_factors crop_height crop_width"
        transformer = Transformer(
            transform, phase, device, path, more=bool(self._factors), heeds=heeds
        )
        source = ImagePairs(
            locate(param.source, path),
            param.root_folder,
            path,
            alone=self._labels == ImageDataParameter.NONE,
            seed=device.draw_seed() if param.shuffle else None,
            skip=device.draw_seed() % param.rand_skip if param.rand_skip else None,
        )
        super().__init__(source, transformer, param.batch_size, COLOR if param.is_color else GRAY)

    def read(self, item: int) -> tuple[Array, Array]:
        image = self.source.image(item, self._mode)
        size = self._size or (image.shape[0], image.shape[1])
        image = _resized(image, size, cv2.INTER_LINEAR)
        if self._labels == ImageDataParameter.PIXEL:
            label = self.source.label_image(item)
            return image, _resized(label, size, cv2.INTER_LINEAR) if self._size else label
        return image, np.full(size, self._number(item), np.uint8)

    def _number(self, item: int) -> int:
        """The label of all pixels, kept within 0 to 255."""
        if self._labels == ImageDataParameter.NONE:
            return min(max(self._param.ignore_label, 0), 255)
        try:
            return min(max(int(self.source.label(item)), 0), 255)
        except ValueError:
            text = self.source.label(item)
            raise DataError(
                f'{self.source.name(item)}: "{text}" is no number; for label images write '
                "label_type: PIXEL"
            ) from None

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        image, label = self._checked(item)
        size = height, width = image.shape[0], image.shape[1]
        if self._factors:
            factor = np.float32(self._factors[int(draws[-1]) % len(self._factors)])
            scaled = max(1, int(height * factor)), max(1, int(width * factor))
            image = _resized(image, scaled, cv2.INTER_LINEAR)
            label = _resized(label, scaled, cv2.INTER_NEAREST)
        image, label = self._padded(image, label)
        pixels, label = self._cropped(image, label, draws)
        return pixels, (label, np.minimum(size, pixels.shape[1:]))

    def _padded(self, image: Array, label: Array) -> tuple[Array, Array]:
        """Both, below and right of which lies what the crop needs."""
        height, width = image.shape[:2]
        wanted = self.transformer.crop or (0, 0)
        below, right = max(0, wanted[0] - height), max(0, wanted[1] - width)
        if not (below or right):
            return image, label
        if self.mean is not None:  # which 8 bits may not hold
            image = image.astype(np.float32)
        mean = [0.0] if self.mean is None else self.mean[:, 0, 0].tolist()
        colour = mean * 3 if len(mean) == 1 else mean
        ignore = min(max(self._param.ignore_label, 0), 255)
        sides = 0, below, 0, right, cv2.BORDER_CONSTANT
        return (
            cv2.copyMakeBorder(image, *sides, value=colour),
            cv2.copyMakeBorder(label, *sides, value=ignore),
        )

    def label_shapes(self) -> list[Shape]:
        _, *size = self.shape()
        return [(self.batch_size, 1, *size), (self.batch_size, 1, 1, 2)]

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        images, sizes = zip(*labels, strict=True)
        return [np.stack(images)[:, None], np.array(sizes)[:, None, None]]


class DenseImageLoader(SegmentationLoader):
    """Images and labels of `dense_image_data_param`; crops and mirrors are drawn in the TEST phase,
    too, as in the fork.

    Label images are resized to their nearest pixels, to sizes divided by ENet's
    label_divide_factor.
    """

    def __init__(self, layer: LayerParameter, phase: int, device: Device, path: str | None) -> None:
        param, transform = layer.dense_image_data_param, TransformationParameter()
        transform.CopyFrom(layer.transform_param)
        if transform.mirror or transform.crop_size or transform.crop_h or transform.crop_w:
            raise ConfigError(
                "DenseImageData crops and mirrors by dense_image_data_param's crop_height, "
                "crop_width and mirror, not by transform_param"
            )
        if bool(param.crop_height) != bool(param.crop_width):
            raise ConfigError("crop_height and crop_width must both be given or neither")
        transform.crop_h, transform.crop_w = param.crop_height, param.crop_width
        transform.mirror = param.mirror
        self._size, self._factor = _new_size(param), param.label_divide_factor
        if self._factor < 1:
            raise ConfigError("label_divide_factor must be 1 or more")
        self.alike = self._factor == 1
        if not self.alike and (param.crop_height or not self._size):
            raise ConfigError(
                "label_divide_factor needs new_height and new_width, and no crop: labels are "
                "resized to a part of that size"
            )
        transformer = Transformer(transform, TRAIN, device, path)
        source = _pairs(param, device, path)
        super().__init__(source, transformer, param.batch_size, COLOR if param.is_color else GRAY)

    def read(self, item: int) -> tuple[Array, Array]:
        image, label = self.source.image(item, self._mode), self.source.label_image(item)
        if self._size:
            image = _resized(image, self._size, cv2.INTER_LINEAR)
            label = _resized(label, self._label_size(self._size), cv2.INTER_NEAREST)
        return image, label

    def _label_size(self, size: Size) -> Size:
        return size[0] // self._factor, size[1] // self._factor

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        return self._cut(item, *self._checked(item), draws)

    def label_shapes(self) -> list[Shape]:
        _, height, width = self.shape()
        return [(self.batch_size, 1, *self._label_size((height, width)))]

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        return [np.stack(labels)[:, None]]


class LabelmapLoader(SegmentationLoader):
    """Images and edges of `image_data_param`: 1 where a label image has 128 or more, else 0, which
    HED's sums in 8 bits make of the edges that most people drew; with DSS's `normalize: false` the
    numbers of the label image.

    Crops and mirrors are drawn in the TEST phase, too, and with new_height and new_width label
    images are interpolated like images, as in the fork.
    """

    def __init__(self, layer: LayerParameter, device: Device, path: str | None) -> None:
        param = layer.image_data_param
        self._size = _new_size(param)
        self._as_numbers = param.HasField("normalize") and not param.normalize
        source = _pairs(param, device, path)
        transformer = Transformer(layer.transform_param, TRAIN, device, path)
        super().__init__(source, transformer, param.batch_size, COLOR if param.is_color else GRAY)

    def read(self, item: int) -> tuple[Array, Array]:
        image, label = self.source.image(item, self._mode), self.source.label_image(item)
        size = self._size or (image.shape[0], image.shape[1])
        if self._size:
            label = _resized(label, size, cv2.INTER_LINEAR)
        return _resized(image, size, cv2.INTER_LINEAR), label

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        image, label = self._checked(item)
        if not self._as_numbers:
            label = (label >= 128).astype(np.uint8)
        return self._cut(item, image, label, draws)

    def label_shapes(self) -> list[Shape]:
        return [(self.batch_size, 1, *self.shape()[1:])]

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        return [np.stack(labels)[:, None]]
