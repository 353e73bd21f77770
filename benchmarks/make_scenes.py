"""Make the data of the bundled nets digits_ssd and digits_seg: digits of the bundled set, pasted on
canvases.

python -m benchmarks.make_scenes DIGITS_SSD DIGITS_SEG

writes the LMDBs into these two folders, always the same. Training scenes have digits of
digits_train_lmdb, test scenes of digits_test_lmdb.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

import caffepy.models
from caffepy.data.sources import open_database
from caffepy.data.write import write_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import (
    AnnotatedDatum,
    Annotation,
    AnnotationGroup,
    Datum,
    NormalizedBBox,
)

SIZE = 64  # pixels of a canvas
MOST = 4  # digits on it
SIDES = (14, 30)  # least and most pixels of a digit's side
TRIALS = 20  # for a place where a digit does not touch others
INK, FAINT = 110, 45  # values from which a pixel is of a digit; between them it is of neither
VOID = 255
COUNTS = {"train": 600, "test": 150}


class Scene(NamedTuple):
    """A canvas (SIZE, SIZE), its label image: 0, digit + 1 or VOID, and its digits: xmin, ymin,
    xmax, ymax in pixels by digit.
    """

    image: Array
    labels: Array
    boxes: list[tuple[int, tuple[int, int, int, int]]]


def read_digits(split: str) -> tuple[Array, Array]:
    """Images (n, 8, 8) and labels of the bundled set."""
    folder = Path(caffepy.models.__path__[0], "digits", f"digits_{split}_lmdb")
    with closing(open_database(str(folder))) as source:
        decoded = [source.decode(item) for items in source.once(100) for item in items]
    return np.stack([image[0] for image, _ in decoded]), np.array([label for _, label in decoded])


def enlarged(digit: Array, side: int) -> Array:
    """The digit as (side, side), interpolated between the centres of its pixels.

    In whole numbers, so that a value in the middle of two is rounded alike by every processor.
    """
    whole = 2 * side  # parts of a pixel
    at = ((2 * np.arange(side) + 1) * 8 - side).clip(0, 7 * whole)
    low = np.minimum(at // whole, 6)
    weights = np.zeros((side, 8), np.int64)
    weights[np.arange(side), low] = (low + 1) * whole - at
    weights[np.arange(side), low + 1] = at - low * whole
    return np.rint(weights @ digit.astype(np.int64) @ weights.T / whole**2).astype(np.int64)


def scenes(split: str) -> Iterator[Scene]:
    """The scenes of one LMDB."""
    digits, numbers = read_digits(split)
    rng = np.random.Generator(np.random.PCG64([2, COUNTS[split]]))
    for _ in range(COUNTS[split]):
        yield scene(digits, numbers, rng)


def scene(digits: Array, numbers: Array, rng: np.random.Generator) -> Scene:
    """Up to MOST digits that do not touch each other, on a grey that grows along one direction."""
    slope = rng.uniform(-0.6, 0.6, 2)
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2
    ground = rng.uniform(20, 60) + slope[0] * x + slope[1] * y
    image = (ground.clip(0, 90) // 6 * 6).astype(np.int64)
    labels, taken = np.zeros((SIZE, SIZE), np.uint8), np.zeros((SIZE, SIZE), np.bool_)
    boxes = []
    for _ in range(rng.integers(1, MOST + 1)):
        one, side = rng.integers(len(digits)), int(rng.integers(*SIDES, endpoint=True))
        ink = enlarged(digits[one], side)
        for _ in range(TRIALS):
            top, left = rng.integers(0, SIZE - side, 2, endpoint=True)
            here = slice(top, top + side), slice(left, left + side)
            if not taken[here].any():
                break
        else:
            continue
        taken[here] = True
        image[here] = np.maximum(image[here], ink)
        labels[here] = np.where(ink >= INK, numbers[one] + 1, np.where(ink >= FAINT, VOID, 0))
        rows, columns = (np.flatnonzero((ink >= FAINT).any(axis)) for axis in (1, 0))
        box = left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1
        boxes.append((int(numbers[one]), tuple(map(int, box))))
    return Scene(image.astype(np.uint8), labels, boxes)


def encoded(image: Array) -> Datum:
    """A Datum of a PNG file."""
    content = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 9])[1].tobytes()
    return Datum(channels=1, height=SIZE, width=SIZE, data=content, encoded=True)


def annotated(one: Scene) -> AnnotatedDatum:
    """The scene with its boxes; the label of digit d is d + 1, 0 is the background."""
    record = AnnotatedDatum(datum=encoded(one.image), type=AnnotatedDatum.BBOX)
    record.datum.label = -1
    groups: dict[int, AnnotationGroup] = {}
    for digit, box in one.boxes:
        if digit not in groups:
            groups[digit] = record.annotation_group.add(group_label=digit + 1)
        corners = dict(zip(("xmin", "ymin", "xmax", "ymax"), (v / SIZE for v in box), strict=True))
        instance = len(groups[digit].annotation)
        bbox = NormalizedBBox(difficult=False, **corners)
        groups[digit].annotation.append(Annotation(instance_id=instance, bbox=bbox))
    return record


def main(detection: str, segmentation: str) -> None:
    """Write the LMDBs."""
    for split in COUNTS:
        made = [(f"{i:08d}", one) for i, one in enumerate(scenes(split))]
        with write_database(f"{detection}/scenes_{split}_lmdb") as writer:
            for key, one in made:
                writer.put(key, annotated(one).SerializeToString())
        with write_database(f"{segmentation}/labels_{split}_lmdb") as writer:
            for key, one in made:
                writer.put(key, encoded(one.labels))


if __name__ == "__main__":
    main(*sys.argv[1:])
