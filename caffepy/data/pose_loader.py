"""Batches of people (CPMData of Convolutional Pose Machines and OpenPose): records are scaled,
turned, cut around a person and mirrored; labels are maps of parts and limbs.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.data import pose
from caffepy.data.loader import JointLoader, Shape
from caffepy.data.sources.base import Source
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array, shape_string
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import (
    TRAIN,
    CPMTransformationParameter,
    LayerParameter,
    TransformationParameter,
)

log = logging.getLogger(__name__)

WITHOUT_EFFECT = (
    "scale mirror mean_file mean_value scale_cvg max_cvg_len min_cvg_len opaque_coverage coverage "
    "visualize bbox_norm_factor img_header force_color force_gray"
)
DRAWS = 6  # random numbers of an image: two for its scale, its angle, two for its place, its mirror
GREY, LEARNED = 128, 255  # what lies outside an image, and its mask
MASK = 4  # the channel with the mask of what is learned
LONGEST_SIDE = 32766  # that OpenCV turns
MOST_TILES = 256  # in a row, whose tables OpenCV keeps


class PoseLoader(JointLoader):
    """Images ((b, g, r) - 128) / 256 with further channels, and maps (N, 2 * (parts + 1), h, w).

    OpenPose's bodies (num_parts 56 and 43) need records with a mask: three further channels of 0;
    the maps are weights of the limbs' maps and the peaks', those maps, those peaks. Others have one
    further channel, a peak at the person's centre; the maps are peaks of that person and of all
    people. Peaks have the background behind them.
    """

    def __init__(
        self, source: Source, layer: LayerParameter, phase: int, device: Device, path: str | None
    ) -> None:
        param = self._param = layer.cpm_transform_param
        check(param)
        if [f.name for f, _ in layer.transform_param.ListFields() if f.name != "random_seed"]:
            raise ConfigError("CPMData transforms by cpm_transform_param, not by transform_param")
        if unused := [f.name for f, _ in param.ListFields() if f.name in WITHOUT_EFFECT.split()]:
            log.warning("cpm_transform_param: without effect: %s", ", ".join(unused))
        self._is_random = phase == TRAIN
        seed = TransformationParameter(random_seed=layer.transform_param.random_seed)
        transformer = Transformer(seed, phase, device, path, more=DRAWS * self._is_random)
        super().__init__(source, transformer, layer.data_param.batch_size)
        self._wants_labels = len(layer.top) > 1
        self._limbs = pose.WITH_LIMBS.get(param.num_parts)
        self._body = self._limbs or pose.PEAKS_ONLY.get(param.num_parts)
        self._sides = self._body.sides if self._body and param.transform_body_joint else ([], [])

    def _channels(self, item: Any) -> Array:
        """The record (C, H, W)."""
        image, _ = self.source.decode(item)
        need = MASK + 1 if self._limbs else MASK
        if image.dtype != np.uint8 or len(image) < need:
            raise DataError(
                f"{self.source.name(item)}: an image of shape {shape_string(image.shape)}, "
                f"{image.dtype}, not {need} or more channels of 8 bits with annotations in the "
                "fourth"
            )
        return image

    def _size(self, record: Array) -> tuple[int, int]:
        """Height and width of what the record becomes."""
        param = self._param
        if self._is_random:
            return param.crop_size_y, param.crop_size_x
        return record.shape[1], record.shape[2]

    def shape(self) -> Shape:
        record = self._peek(self._channels)
        return len(record), *self._size(record)

    def label_shapes(self) -> list[Shape]:
        height, width = self._size(self._peek(self._channels))
        stride = self._param.stride
        maps = 2 * (self._param.num_parts + 1)
        return [(self.batch_size, maps, height // stride, width // stride)]

    def make(self, item: Any, draws: Array, first: Array) -> tuple[Array, Any]:
        record = self._channels(item)
        try:
            return self._made(record, draws)
        except DataError as error:
            raise DataError(f"{self.source.name(item)}: {error.message}") from None

    def _made(self, record: Array, draws: Array) -> tuple[Array, Any]:
        param = self._param
        found = pose.read_record(record[3], param.np_in_lmdb, unlabeled=self._limbs is not None)
        people = [found.person, *found.others]
        if param.transform_body_joint and self._body and self._body.parts:
            people = [person.as_body(self._body) for person in people]
        image = coloured(np.ascontiguousarray(record[:3].transpose(1, 2, 0)), param)
        mask = np.ascontiguousarray(record[MASK]) if self._limbs else None
        if self._is_random:
            dice = draws / 0xFFFFFFFF
            images = [(image, GREY)] if mask is None else [(image, GREY), (mask, LEARNED)]
            (image, *masks), people = self._changed(images, people, found.scale, dice)
            mask = masks[0] if masks else None
        data = np.zeros((len(record), *image.shape[:2]), np.float32)
        data[:3] = (image.transpose(2, 0, 1).astype(np.float32) - 128) / 256
        if mask is None:
            pose.add_peak(data[3], people[0].centre, 1, param.sigma_center)
        maps = self._maps(people, mask, image.shape[:2]) if self._wants_labels else None
        return data, maps

    def _changed(
        self, images: list[tuple[Array, int]], people: list[pose.Person], scale: float, dice: Array
    ) -> tuple[list[Array], list[pose.Person]]:
        """Images, each with what lies outside it, and people: scaled, turned, cut and mirrored."""
        param, factor = self._param, 1.0
        if dice[0] <= param.scale_prob:
            factor = (param.scale_max - param.scale_min) * float(dice[1]) + param.scale_min
        if not (np.isfinite(scale) and scale > 0 and factor > 0):
            raise DataError(f"a person of scale {scale:g}, made {factor:g} times as large")
        factor *= param.target_dist / scale
        sized = [(scaled(image, factor), outside) for image, outside in images]
        people = [person.moved(np.eye(2, 3) * factor) for person in people]
        height, width = sized[0][0].shape[:2]
        matrix, size = rotation(width, height, (dice[2] - 0.5) * 2 * param.max_rotate_degree)
        people = [person.moved(matrix) for person in people]
        middle = people[0].centre + np.trunc((dice[3:5] - 0.5) * 2 * param.center_perterb_max)
        if not (np.abs(middle) < LONGEST_SIDE).all():
            raise DataError(f"a person at {middle.tolist()}")
        wanted = param.crop_size_y, param.crop_size_x
        corner = np.rint(middle) - [wanted[1] // 2, wanted[0] // 2]
        people = [person.moved(np.column_stack([np.eye(2), -corner])) for person in people]
        cuts = [
            cut(turned(image, matrix, size, outside), corner.astype(np.int64), wanted, outside)
            for image, outside in sized
        ]
        if dice[5] <= param.flip_prob:
            cuts = [np.ascontiguousarray(image[:, ::-1]) for image in cuts]
            people = [person.mirrored(wanted[1], self._sides) for person in people]
        return cuts, people

    def _maps(self, people: list[pose.Person], mask: Array | None, size: Sequence[int]) -> Array:
        param, parts = self._param, self._param.num_parts
        grid = size[0] // param.stride, size[1] // param.stride
        if mask is None:
            own, every = (
                pose.peaks(some, parts, grid, param.stride, param.sigma)
                for some in (people[:1], people)
            )
            return np.concatenate([own, every])
        assert self._limbs is not None
        small = cv2.resize(
            mask, None, fx=1 / param.stride, fy=1 / param.stride, interpolation=cv2.INTER_CUBIC
        )[: grid[0], : grid[1]]
        weights = np.repeat(small[None].astype(np.float32) / 255, parts + 1, axis=0)
        own = people[0].visible
        weights[: len(own)][own == pose.UNLABELED] = 0
        heat = pose.peaks(people, len(own), grid, param.stride, param.sigma)
        return np.concatenate([weights, pose.limbs(people, self._limbs, grid), heat])

    def _unlike(self, item: Any, shape: Shape, first: Shape) -> DataError:
        start = f"{shape_string(shape)} in a batch that starts with {shape_string(first)}"
        return DataError(f"{self.source.name(item)} becomes {start}; TEST needs a batch_size of 1")

    def pack(self, labels: Sequence[Any]) -> list[Array]:
        if not self._wants_labels:
            return []
        return [np.stack(labels)]


def check(param: CPMTransformationParameter) -> None:
    """ConfigError for settings with which nothing can be made."""
    parts = param.num_parts
    if param.crop_size:
        raise ConfigError("cpm_transform_param has crop_size_x and crop_size_y, no crop_size")
    if param.aug_way != "rand":
        raise ConfigError(
            f'aug_way is "rand", not "{param.aug_way}"; the tables of angles are not read'
        )
    for name in ("stride", "crop_size_x", "crop_size_y", "num_parts", "np_in_lmdb"):
        if not getattr(param, name):
            raise ConfigError(f"cpm_transform_param needs a {name} of 1 or more")
    if min(param.crop_size_x, param.crop_size_y) < param.stride:
        raise ConfigError(f"a crop smaller than the stride {param.stride} leaves no map")
    for name in ("target_dist", "sigma", "sigma_center"):
        if not 0 < getattr(param, name) < math.inf:
            raise ConfigError(f"cpm_transform_param needs a {name} above 0")
    if not math.isfinite(param.max_rotate_degree):
        raise ConfigError(f"max_rotate_degree cannot be {param.max_rotate_degree:g}")
    if param.do_clahe:
        if not 1 <= param.clahe_tile_size <= MOST_TILES:
            raise ConfigError(f"do_clahe needs a clahe_tile_size of 1 to {MOST_TILES}")
        if not abs(param.clahe_clip_limit) < 1 << 24:
            raise ConfigError(f"clahe_clip_limit cannot be {param.clahe_clip_limit:g}")
    body = pose.WITH_LIMBS.get(parts) or pose.PEAKS_ONLY.get(parts)
    if parts in pose.WITH_LIMBS and not param.transform_body_joint:
        raise ConfigError(f"num_parts {parts} are parts of bodies: transform_body_joint is true")
    need = parts
    if param.transform_body_joint and body and body.parts:
        need = 1 + max(max(pair) for pair in body.parts)
    if param.np_in_lmdb < need:
        raise ConfigError(
            f"num_parts {parts} needs an np_in_lmdb of {need}, not {param.np_in_lmdb}"
        )


def coloured(image: Array, param: CPMTransformationParameter) -> Array:
    """The image (H, W, 3) with its contrast evened out and in shades of grey, if so told."""
    if param.do_clahe:
        tiles = int(param.clahe_tile_size)
        lab = cv2.cvtColor(image, cv2.COLOR_BGR2Lab)
        lab[..., 0] = cv2.createCLAHE(int(param.clahe_clip_limit), (tiles, tiles)).apply(
            lab[..., 0]
        )
        image = cv2.cvtColor(lab, cv2.COLOR_Lab2BGR)
    if param.gray == 1:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    return image


def scaled(image: Array, factor: float) -> Array:
    """The image scaled by this factor; DataError if it vanishes or gets too large."""
    sides = [round(side * factor) for side in image.shape[:2]]
    if not (min(sides) >= 1 and max(sides) <= LONGEST_SIDE // 2):
        height, width = image.shape[:2]
        raise DataError(f"an image of {height} x {width} pixels made {factor:g} times as large")
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)


def rotation(width: int, height: int, degree: float) -> tuple[Array, tuple[int, int]]:
    """Return the affine map (2, 3) that turns an image around its centre, and the width and height
    that hold all of it.
    """
    centre = width / 2, height / 2
    corners = cv2.boxPoints((centre, (width, height), degree))
    size = np.ceil(corners.max(axis=0)) - np.floor(corners.min(axis=0)) + 1
    matrix = cv2.getRotationMatrix2D(centre, degree, 1.0)
    matrix[:, 2] += size / 2 - centre
    return matrix, (int(size[0]), int(size[1]))


def turned(image: Array, matrix: Array, size: tuple[int, int], outside: int) -> Array:
    """The image after an affine map, in an image of this width and height."""
    flags, border = cv2.INTER_CUBIC, cv2.BORDER_CONSTANT
    return cv2.warpAffine(
        image, matrix, size, flags=flags, borderMode=border, borderValue=(outside,) * 3
    )


def cut(image: Array, corner: Array, size: tuple[int, int], outside: int) -> Array:
    """The part of an image that begins at x, y, which may lie outside of it."""
    part = np.full((*size, *image.shape[2:]), outside, np.uint8)
    x, y = corner.tolist()
    top, left = max(y, 0), max(x, 0)
    piece = image[top : max(y + size[0], 0), left : max(x + size[1], 0)]
    height, width = piece.shape[:2]
    part[top - y : top - y + height, left - x : left - x + width] = piece
    return part
