"""Files around the detections of SSD: names and sizes of images, and results in three forms."""

import json
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import ConfigError, reason
from caffepy.core.files import locate, replacing_all
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import LabelMap, ResizeParameter, SaveOutputParameter
from caffepy.proto.text import read_message

log = logging.getLogger(__name__)

FORMATS = ("VOC", "COCO", "ILSVRC")

NOT_SAVED = "since nothing is saved without output_directory, label_map_file and name_size_file"


def warn_of_unread(label_map: str, beside: str | None, because: str) -> None:
    """Warn of a label_map_file that is not there though a layer does not read it."""
    if label_map and not os.path.exists(locate(label_map, beside)):
        log.warning("label_map_file %s is not there; it is not read, %s", label_map, because)


class Image(NamedTuple):
    """A line of a name_size_file."""

    name: str
    height: float
    width: float


class Images:
    """The images of a name_size_file, lines of name, height and width, in turn, for ever."""

    def __init__(self, path: str, beside: str | None) -> None:
        self._images, self._next = read_images(locate(path, beside)), 0

    def __len__(self) -> int:
        return len(self._images)

    def take(self) -> Image:
        """Return the next image."""
        image = self._images[self._next % len(self._images)]
        self._next += 1
        return image

    def begin(self) -> None:
        """Start again with the first image."""
        self._next = 0


def read_images(path: str) -> list[Image]:
    """Return the images of a name_size_file; ConfigError says which line is wrong."""
    images = list[Image]()
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"name_size_file cannot be read: {reason(error)}", path) from None
    for number, line in enumerate(lines, start=1):
        words = line.split()
        try:
            name, height, width = words[0], float(words[1]), float(words[2])
        except (IndexError, ValueError):
            raise ConfigError(
                f'name_size_file needs "name height width" in each line, not "{line[:60]}"',
                f"{path}:{number}",
            ) from None
        images.append(Image(name, height, width))
    if not images:
        raise ConfigError("name_size_file names no image", path)
    return images


def to_pixels(boxes: Array, size: tuple[float, float], resize: ResizeParameter | None) -> Array:
    """Return boxes (R, 4) = xmin, ymin, xmax, ymax in pixels of an image of this height and width,
    cut to it, from units of the net's input, which `resize` made of it.
    """
    height, width = size
    mode = resize.resize_mode if resize else ResizeParameter.WARP
    scale = np.array([width, height, width, height])
    if resize and mode == ResizeParameter.FIT_SMALL_SIZE:
        if resize.height_scale and resize.width_scale:
            given = np.array([resize.width_scale, resize.height_scale] * 2)
            small: Array = np.clip(boxes * given, 0, scale)
            return small
    elif resize and mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
        # what of the input the image takes, across and down
        ratio = width / height * resize.height / resize.width
        shares = np.array([min(1, ratio), min(1, 1 / ratio)] * 2)
        boxes = (boxes - (1 - shares) / 2) / shares
    pixels: Array = np.clip(boxes, 0, 1) * scale
    return pixels


class ResultFiles:
    """Files of what is found in num_test_image images, of their names in name_size_file, in turn:
    VOC, a file for each class with "name score xmin ymin xmax ymax"; ILSVRC, one file with "name
    class score xmin ..."; COCO, a list of {image_id, category_id, bbox: [x, y, w, h], score}.
    """

    def __init__(
        self, param: SaveOutputParameter, labels: Sequence[int], beside: str | None
    ) -> None:
        self._param, self._labels = param, labels
        self._images = Images(param.name_size_file, beside)
        self._count = param.num_test_image or len(self._images)
        if param.output_format not in FORMATS:
            raise ConfigError(
                f'save_output_param: output_format "{param.output_format}" is none of '
                f"{', '.join(FORMATS)}"
            )
        if self._count > len(self._images):
            raise ConfigError(
                f"save_output_param: num_test_image {self._count} is more than the "
                f"{len(self._images)} images of {param.name_size_file}"
            )
        path = locate(param.label_map_file, beside)
        items = {item.label: item.name for item in read_message(path, LabelMap()).item}
        if missing := [label for label in labels if label not in items]:
            raise ConfigError(f"label_map_file has no name for class {missing[0]}", path)
        self._names = items
        self._found: list[tuple[str, int, float, Array]] = []  # image, class, score, box
        self._taken = 0

    def add(self, images: Sequence[Array]) -> None:
        """Add the rows (D, 7) of each image; write the files after the last one."""
        param = self._param
        resize = param.resize_param if param.HasField("resize_param") else None
        for rows in images:
            image = self._images.take()
            boxes = np.round(to_pixels(rows[:, 3:], image[1:], resize), 2)
            for row, box in zip(rows, boxes, strict=True):
                self._found.append((image.name, int(row[1]), float(row[2]), box))
            self._taken += 1
            if self._taken == self._count:
                self._write()
                self._images.begin()
                self._found, self._taken = [], 0

    def _write(self) -> None:
        prefix = os.path.join(self._param.output_directory, self._param.output_name_prefix)
        texts = dict[str, str]()
        if self._param.output_format == "COCO":
            texts[f"{prefix}.json"] = json.dumps([self._as_coco(*each) for each in self._found])
        elif self._param.output_format == "ILSVRC":
            lines = (f"{name} {label} {_line(s, box)}" for name, label, s, box in self._found)
            texts[f"{prefix}.txt"] = "".join(lines)
        else:
            for label in self._labels:
                of_class = (each for each in self._found if each[1] == label)
                lines = (f"{name} {_line(s, box)}" for name, _, s, box in of_class)
                texts[f"{prefix}{self._names[label]}.txt"] = "".join(lines)
        try:
            os.makedirs(self._param.output_directory, exist_ok=True)
            with replacing_all([*texts]) as names:
                for name, text in zip(names, texts.values(), strict=True):
                    with open(name, "w", encoding="utf-8") as file:
                        file.write(text)
        except OSError as error:
            raise ConfigError(
                f"what was found cannot be written: {reason(error)}", self._param.output_directory
            ) from None

    def _as_coco(self, image: str, label: int, score: float, box: Array) -> dict[str, object]:
        sides = [*box[:2], *np.round(box[2:] - box[:2], 2)]
        return {
            "image_id": int(image) if image.isdigit() else image,
            "category_id": int(name) if (name := self._names[label]).isdigit() else name,
            "bbox": list(map(float, sides)),
            "score": score,
        }


def _line(score: float, box: Array) -> str:
    return f"{score:g} {' '.join(str(int(v)) for v in box)}\n"
