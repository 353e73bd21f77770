"""`caffepy convert-annoset`: images with boxes become an LMDB or LevelDB of AnnotatedDatums, with
the keys of SSD's tool.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

import cv2
import numpy as np

from caffepy.commands.data.annotations import LABELS, READERS, Coco, Labels, read_label_map
from caffepy.commands.data.convert_imageset import (
    SPELT,
    Converted,
    Job,
    Made,
    encoded,
    with_slash,
)
from caffepy.core.errors import DataError, UsageError
from caffepy.core.files import read_regular
from caffepy.data.datum import COLOR, GRAY, planes, read_image, resized
from caffepy.data.sources.base import lines_of
from caffepy.data.sources.image_pairs import read_pairs
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import AnnotatedDatum, Datum

log = logging.getLogger(__name__)

NO_LABEL = -1  # of the Datum of an image with boxes
VOC_IMAGES, VOC_ANNOTATIONS = "JPEGImages", "Annotations"


@dataclass(frozen=True)
class AnnotatedRecipe:
    """The conversion of an image file and its boxes to a record.

    With `min_dim` or `max_dim` images whose shorter side is less, or longer side is more, are
    resized to it with their aspect; else those of `width` and `height` are, unless these are 0.
    `encode` is as `Recipe` has it. `label_type` is the kind of annotation files, a key of READERS.
    """

    gray: bool = False
    width: int = 0
    height: int = 0
    min_dim: int = 0
    max_dim: int = 0
    encode: str | None = ""
    label_type: str = "xml"

    def resized(self, image: Array) -> Array:
        """The image in its new size."""
        if self.min_dim or self.max_dim:
            short, long = sorted(image.shape[:2])
            scale = np.float32(1)
            if self.min_dim and short < self.min_dim:
                scale = np.float32(self.min_dim) / np.float32(short)
            if self.max_dim and int(scale * np.float32(long)) > self.max_dim:
                scale = np.float32(self.max_dim) / np.float32(long)
            factor = float(scale)
            return image if factor == 1 else cv2.resize(image, None, fx=factor, fy=factor)
        return resized(image, self.width, self.height) if self.width else image

    def datum(self, path: str, content: bytes, image: Array, label: int) -> Datum:
        """The Datum of an image file, with this content, that was decoded to `image` (H, W, K).

        DataError if it cannot be resized.
        """
        try:
            after = self.resized(image)
        except (cv2.error, MemoryError):
            size = f"{image.shape[1]} x {image.shape[0]}"
            raise DataError(f"{path}: {size} pixels cannot be resized as asked") from None
        pixels = planes(after)
        shape = dict(zip(("channels", "height", "width"), pixels.shape, strict=True))
        if self.encode == "":
            return Datum(**shape, data=pixels.tobytes(), label=label, encoded=False)
        extension = os.path.splitext(path)[1][1:].lower()
        kind = extension if self.encode is None else self.encode.lower()
        as_it_is = not (self.width or self.min_dim or self.max_dim)
        if not as_it_is or extension not in (kind, SPELT.get(kind)):
            content = encoded(after, kind, path)
        return Datum(**shape, data=content, label=label, encoded=True)


@dataclass(frozen=True)
class Annotator:
    """Makes the record of an image and of what stands behind it in the list: a label, an annotation
    file (behind `root`; no boxes if there is no such file), or an image's id in `coco`.
    """

    recipe: AnnotatedRecipe
    root: str
    labels: Labels
    detects: bool
    coco: Coco | None = None

    @property
    def encode(self) -> str | None:
        """Encoding of the recipe."""
        return self.recipe.encode

    def record(self, path: str, label: Any) -> Made:
        """The serialized AnnotatedDatum; none if the file cannot be read or is no image."""
        try:
            content = read_regular(path)
            image = read_image(content, GRAY if self.recipe.gray else COLOR)
        except (OSError, DataError):
            return None, 0
        if image is None:
            return None, 0
        datum = self.recipe.datum(path, content, image, NO_LABEL if self.detects else label)
        made = AnnotatedDatum(datum=datum)
        if self.detects:
            made.type = AnnotatedDatum.BBOX
            self._annotate(made, label, (image.shape[1], image.shape[0]))
        values = datum.channels * datum.height * datum.width
        return made.SerializeToString(), 0 if datum.encoded else values

    def _annotate(self, record: AnnotatedDatum, label: Any, size: tuple[int, int]) -> None:
        if self.coco:
            self.coco.objects(label, size).write(record)
        elif os.path.exists(self.root + label):
            reader = READERS[self.recipe.label_type]
            reader(self.root + label, size, self.labels).write(record)
        else:
            log.warning("%s%s does not exist: the image has no boxes", self.root, label)


def convert_annoset(
    root: str,
    list_file: str,
    database: str,
    *,
    anno_type: str = "classification",
    label_map: str | None = None,
    check_label: bool = False,
    backend: str = "lmdb",
    shuffle: bool = False,
    seed: int | None = None,
    check_size: bool = False,
    recipe: AnnotatedRecipe = AnnotatedRecipe(),
    resume: bool = False,
    check: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Converted:
    """Write the images that `list_file` names, each behind `root`, with their boxes into the new
    `database`.

    A line has an image and its annotation file, or in a folder of PASCAL VOC the name of both, or
    its label for the `anno_type` "classification". Instead of a list there may be COCO's
    instances_*.json. Keys, images that cannot be read, `resume` and `check` are those of
    `convert_imageset`. ConfigError, UsageError or DataError say what does not fit; nothing is left
    out of a database but such images.
    """
    is_coco = list_file.lower().endswith(".json")
    detects = is_coco or anno_type == "detection"
    labels = read_label_map(label_map, check_label) if label_map else None
    root, coco = with_slash(root), None
    entries: list[tuple[str, Any]]
    if is_coco:
        coco = Coco(list_file, labels)
        entries = coco.entries
    elif detects:
        if labels is None and recipe.label_type != "txt":
            raise UsageError("detection needs the labels of names: give --label-map FILE")
        entries = list(_read_detection(list_file, root))
    else:
        entries = list(_read_classification(list_file))
    log.info("A total of %d images.", len(entries))
    shown = json.dumps([entries, coco.labels if coco else labels], sort_keys=True)
    made_of = {
        "list": hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest(),
        "anno_type": anno_type,
        **asdict(recipe),
    }
    maker = Annotator(recipe, root, labels or {}, detects, coco)
    job = Job(root, entries, maker, check_size, threads, progress)
    return job.run(database, made_of, backend, shuffle, seed, resume, check)


def _read_detection(path: str, root: str) -> list[tuple[str, str]]:
    """Pairs of image and annotation; of lines of one word, those of a folder of PASCAL VOC."""
    if all(len(line.split()) < 2 for line in lines_of(path)):
        folder = os.path.isdir(root + VOC_ANNOTATIONS)
        if not folder:
            raise DataError(
                f"{path} has no annotation behind its images, and {root} is no folder of PASCAL "
                f"VOC: it has no {VOC_ANNOTATIONS}"
            )
        names = (name for name, _ in read_pairs(path, alone=True))
        return [(f"{VOC_IMAGES}/{name}.jpg", f"{VOC_ANNOTATIONS}/{name}.xml") for name in names]
    return read_pairs(path)


def _read_classification(path: str) -> list[tuple[str, int]]:
    if max((len(line.split()) for line in lines_of(path)), default=0) == 1:
        raise DataError(
            f"{path} has no labels behind its images; for the boxes of a folder of PASCAL VOC give "
            "--anno-type detection"
        )
    entries = []
    for number, (name, label) in enumerate(read_pairs(path), 1):
        try:
            entries.append((name, int(label)))
            if int(label) not in LABELS:
                raise ValueError
        except ValueError:
            raise DataError(
                f'{path}:{number}: "{label}" is no label; for annotation files give --anno-type '
                "detection"
            ) from None
    return entries
