"""Batches of images of people and maps of their joints (DataHeatmap of caffe-heatmap): images are
mirrored, cropped, turned and resized.
"""

from collections.abc import Sequence
from functools import partial
from math import isfinite, pi, sqrt
from typing import Any

import cv2
import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import locate
from caffepy.data.datum import COLOR
from caffepy.data.loader import JointLoader, Shape
from caffepy.data.sources.base import lines_of
from caffepy.data.sources.image_pairs import ImagePairs
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TRAIN,
    HeatmapDataParameter,
    LayerParameter,
    TransformationParameter,
)

SIGMA = 1.5  # of a peak, in cells of its map
HEIGHT = 4 / (SIGMA * sqrt(2 * pi))
DRAWS = 4  # random numbers of an image: its mirror, two for its place, its angle
WORDS = 4  # of a line: an image, numbers between commas, its crop and its cluster


def read_joints(path: str, kept: Sequence[int]) -> list[tuple[str, str]]:
    """Return the image and the numbers x, y, x, y, ... of each line, those of the places `kept`,
    counted from 1, or all. DataError: no such file, a line of other words, numbers that are not
    finite or not as many as in the first line, no lines.
    """
    entries: list[tuple[str, str]] = []
    for number, line in enumerate(lines_of(path), 1):
        words = line.split()
        if not words:
            continue
        try:
            if len(words) < WORDS:
                raise ValueError
            values = [float(value) for value in words[1].split(",")]
            if not all(map(isfinite, values)):
                raise ValueError
        except ValueError:
            wanted = "an image, numbers between commas, a crop and a cluster"
            raise DataError(f'{path}:{number}: "{line[:80]}" is not {wanted}') from None
        chosen = [v for place, v in enumerate(values, 1) if not kept or place in kept]
        if not chosen or len(chosen) % 2:
            numbers = f"{len(chosen)} numbers" + f" of {len(values)}, by labelinds," * bool(kept)
            raise DataError(f"{path}:{number}: {numbers} are no x and y of joints")
        first = len(entries[0][1].split(",")) if entries else len(chosen)
        if len(chosen) != first:
            raise DataError(f"{path}:{number}: {len(chosen)} numbers, not {first} as before")
        entries.append((words[0], ",".join(map(repr, chosen))))
    if not entries:
        raise DataError(f"{path} lists no images")
    return entries


class JointImages(ImagePairs):
    """Images with the coordinates of joints, in order."""

    kind = "list of images and joints"

    def __init__(
        self, path: str, root_folder: str, beside: str | None, kept: Sequence[int]
    ) -> None:
        read = partial(read_joints, kept=kept)
        super(ImagePairs, self).__init__(path, read, root_folder, beside, None, None)

    def joints(self, item: int) -> Array:
        """Return x and y of each joint, (J, 2)."""
        return np.array([float(v) for v in self.label(item).split(",")]).reshape(-1, 2)


class HeatmapLoader(JointLoader):
    """Pixels red, green, blue times `scale`, (N, 3, outsize, outsize), and maps with a peak at each
    joint, (N, J, label_height, label_width).
    """

    source: JointImages

    def __init__(self, layer: LayerParameter, device: Device, path: str | None) -> None:
        param = self._param = layer.heatmap_data_param
        check(param)
        if layer.transform_param.ListFields():
            raise ConfigError("DataHeatmap transforms by heatmap_data_param, not transform_param")
        self._factor = param.outsize / param.cropsize
        draws = DRAWS if param.random_crop else 0
        transformer = Transformer(TransformationParameter(), TRAIN, device, path, more=draws)
        source = JointImages(
            locate(param.source, path), param.root_img_dir, path, read_places(param.labelinds)
        )
        super().__init__(source, transformer, param.batchsize)

    def shape(self) -> Shape:
        return 3, self._param.outsize, self._param.outsize

    def label_shapes(self) -> list[Shape]:
        joints = len(self._peek(self.source.joints))
        return [(self.batch_size, joints, self._param.label_height, self._param.label_width)]

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        pixels: Array = self.source.image(item, COLOR)[:, :, ::-1].astype(np.float32)
        try:
            image, joints = self._cut(
                pixels, self.source.joints(item) * self._param.multfact, draws
            )
        except DataError as error:
            raise DataError(f"{self.source.name(item)}: {error.message}") from None
        side = self._param.outsize
        image = cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)
        planes = np.ascontiguousarray(image.transpose(2, 0, 1)) * np.float32(self._param.scale)
        return planes, self._maps(joints * self._factor)

    def _cut(self, image: Array, joints: Array, draws: Array) -> tuple[Array, Array]:
        """Return the square of cropsize pixels in the middle, and the joints (J, 2) in it; with
        random_crop one anywhere, mirrored and turned.
        """
        param, side = self._param, self._param.cropsize
        if image.shape[0] < side:
            raise DataError(f"an image of {image.shape[0]} rows, from which {side} are to be cut")
        lacking = max(0, side - image.shape[1])  # right of it
        if lacking:
            image = cv2.copyMakeBorder(image, 0, 0, 0, lacking, cv2.BORDER_CONSTANT, value=0)
        below, right = image.shape[0] - side, image.shape[1] - side
        top, left = below // 2, right // 2
        if param.random_crop:
            mirrored, *places, turn = draws[-DRAWS:]
            if mirrored % 2:
                image, joints = self._mirrored(image, joints)
            left, top = (
                int(n) % (most + 1) for n, most in zip(places, (right, below), strict=True)
            )
        image = image[top : top + side, left : left + side]
        joints = joints - (left, top)
        if not param.random_crop:
            return image, joints
        angle = param.angle_max * (2 * float(turn) / 0xFFFFFFFF - 1)
        matrix = cv2.getRotationMatrix2D((side // 2, side // 2), angle, 1)
        turned = cv2.warpAffine(np.ascontiguousarray(image), matrix, (side, side))
        return turned, joints @ matrix[:, :2].T + matrix[:, 2]

    def _mirrored(self, image: Array, joints: Array) -> tuple[Array, Array]:
        """Return both mirrored. With flip_joint_labels left and right joints are exchanged: pairs
        from the first joint on, or with dont_flip_first from the second.
        """
        joints = joints * (-1, 1) + (image.shape[1], 0)
        if self._param.flip_joint_labels:
            begin = 1 if self._param.dont_flip_first else 0
            if (len(joints) - begin) % 2:
                raise DataError(
                    f"{len(joints) - begin} joints are no pairs of left and right, as "
                    "flip_joint_labels takes them"
                )
            order = np.arange(len(joints))
            order[begin:] = order[begin:].reshape(-1, 2)[:, ::-1].reshape(-1)
            joints = joints[order]
        return np.ascontiguousarray(image[:, ::-1]), joints

    def _maps(self, joints: Array) -> Array:
        """Return maps with a peak at each joint (J, 2) of an image of outsize pixels."""
        height, width = self._param.label_height, self._param.label_width
        x, y = (joints * (height / self._param.outsize)).T[:, :, None, None]
        down, right = np.arange(height)[:, None] - y, np.arange(width) - x
        peaks: Array = HEIGHT * np.exp(-0.5 * (down**2 + right**2) / SIGMA**2)
        return peaks.astype(np.float32)

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        return [np.stack(labels)]


def check(param: HeatmapDataParameter) -> None:
    """Raise ConfigError for settings that cannot work, or that only the fork has."""
    for name in ("batchsize", "cropsize", "outsize", "label_width", "label_height", "multfact"):
        if not getattr(param, name):
            raise ConfigError(f"heatmap_data_param: {name} must be 1 or more")
    for name in ("segmentation", "sample_per_cluster", "meanfile"):
        if getattr(param, name):
            raise ConfigError(f"heatmap_data_param: {name} is not supported")


def read_places(text: str) -> list[int]:
    """Return the places of numbers, from 1 on, that `text` lists between commas; none for all."""
    try:
        return [int(float(place)) for place in text.split(",") if place.strip()]
    except (ValueError, OverflowError):
        raise ConfigError(
            f'heatmap_data_param: labelinds "{text}" are no numbers between commas'
        ) from None
