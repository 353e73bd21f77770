"""People in images: the rows of annotations in records of Convolutional Pose Machines and OpenPose
(Wei et al. 2016, Cao et al. 2017), bodies of a number of parts, and the maps that nets learn.

Points are x, y in pixels, float32. Visibility is OCCLUDED, VISIBLE, OUTSIDE the image, or of a part
that the data set does not have (UNLABELED).
"""

import struct
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import DataError
from caffepy.device.blob import Array

OCCLUDED, VISIBLE, OUTSIDE, UNLABELED = range(4)

LEAST_EXPONENT = 4.6052  # ln 100: a peak ends where it is 1 % of its height
LIMB_STRIDE = 0.125  # limbs are drawn on maps of this scale whatever the stride, as in the fork
LIMB_WIDTH = 1  # cells on either side


class Body(NamedTuple):
    """Parts of a body: each lies between two parts of a record, from 0 on; `sides` are right
    parts and left ones, which a mirror exchanges; `limbs` are the ends of each limb.
    """

    parts: list[tuple[int, int]]
    sides: tuple[list[int], list[int]]
    limbs: list[tuple[int, int]]


def _pairs(first: str, second: str, base: int = 1) -> list[tuple[int, int]]:
    ends = ([int(number) - base for number in text.split()] for text in (first, second))
    return list(zip(*ends, strict=True))


_ARMS_AND_LEGS = [2, 3, 4, 8, 9, 10], [5, 6, 7, 11, 12, 13]
_MPI = "9 8 12 11 10 13 14 15 2 1 0 3 4 5"

COCO = Body(
    _pairs(
        "1 6 7 9 11 6 8 10 13 15 17 12 14 16 3 2 5 4", "1 7 7 9 11 6 8 10 13 15 17 12 14 16 3 2 5 4"
    ),
    ([2, 3, 4, 8, 9, 10, 14, 16], [5, 6, 7, 11, 12, 13, 15, 17]),
    _pairs(
        "2 9 10 2 12 13 2 3 4 3 2 6 7 6 2 1 1 15 16",
        "9 10 11 12 13 14 3 4 5 17 6 7 8 18 1 15 16 17 18",
    ),
)
MPI = Body(
    _pairs(f"{_MPI} 7", f"{_MPI} 6", 0),
    _ARMS_AND_LEGS,
    _pairs("0 1 2 3 1 5 6 1 14 8 9 14 11 12", "1 2 3 4 5 6 7 14 8 9 10 11 12 13", 0),
)
WITH_LIMBS = {56: COCO, 43: MPI}
"""OpenPose's bodies by `num_parts`: parts, and two maps a limb."""

PEAKS_ONLY = {
    9: Body([], ([0, 1, 2, 6], [3, 4, 5, 7]), []),
    14: Body(_pairs(_MPI, _MPI, 0), _ARMS_AND_LEGS, []),
    28: Body(
        _pairs(
            f"{_MPI} 7 6 9 8 12 11 8 13 14 2 1 3 4 6",
            f"{_MPI} 7 6 8 12 11 10 13 14 15 1 0 4 5 7",
            0,
        ),
        ([2, 3, 4, 8, 9, 10, 17, 18, 19, 23, 24], [5, 6, 7, 11, 12, 13, 20, 21, 22, 25, 26]),
        [],
    ),
}
"""Convolutional Pose Machines' by `num_parts`; 9 are FLIC's, as they lie."""


class Person(NamedTuple):
    """Places of a person: `centre` (2,), `points` (P, 2) and `visible` (P,) of the parts."""

    centre: Array
    points: Array
    visible: Array

    def as_body(self, body: Body) -> "Person":
        """The person with the parts of a body."""
        first, second = np.array(body.parts, np.intp).reshape(-1, 2).T
        a, b = self.visible[first], self.visible[second]
        visible = ((a != OCCLUDED) & (b != OCCLUDED)).astype(np.int64)
        visible[(a == UNLABELED) | (b == UNLABELED)] = UNLABELED
        visible[(a == OUTSIDE) | (b == OUTSIDE)] = OUTSIDE
        points = (self.points[first] + self.points[second]) * np.float32(0.5)
        return Person(self.centre, points, visible)

    def mirrored(self, width: int, sides: tuple[list[int], list[int]]) -> "Person":
        """The person in an image of this width that was mirrored; `sides` change places."""
        right, left = sides
        order = np.arange(len(self.points))
        order[right + left] = left + right
        moved = self.moved(np.array([[-1, 0, width - 1], [0, 1, 0]], np.float64))
        return Person(moved.centre, moved.points[order], self.visible[order])

    def moved(self, matrix: Array) -> "Person":
        """The person after an affine map (2, 3), computed in float64 and rounded once."""

        def apply(points: Array) -> Array:
            return (points @ matrix[:, :2].T + matrix[:, 2]).astype(np.float32)

        return Person(apply(self.centre), apply(self.points), self.visible)


class Record(NamedTuple):
    """The annotations of an image: the person that it is cut around, the others, and the height of
    that person in units of the data set.
    """

    person: Person
    others: list[Person]
    scale: float


HEADER_ROWS = 9  # of a record without other people
ROWS_EACH = 4  # of each other person


def read_record(rows: Array, parts: int, unlabeled: bool) -> Record:
    """Read the annotations in the rows (H, W) of uint8 of a record's fourth channel: people of so
    many parts. `unlabeled` says whether a visibility of 3 has a meaning. DataError if they do not
    fit.

    Row 0 has the name of the data set, 1 height and width, 2 flags and the number of others, 3 the
    centre, 4 the scale, 5 to 7 the parts' x, y and visibility; then follow a row with the centre of
    each other person, one with their scales, and three with the parts of each. Numbers are float32,
    and places count from 1.
    """
    height, width = rows.shape
    if width < 8 or height < HEADER_ROWS:
        raise DataError(f"an image of {height} x {width} pixels has no room for annotations")
    others = struct.unpack("b", rows[2, 1:2].tobytes())[0]
    need = HEADER_ROWS + ROWS_EACH * others
    if others < 0 or height < need or width < 4 * max(parts, others):
        raise DataError(
            f"annotations of {others} other people with {parts} parts (np_in_lmdb) do not fit into "
            f"an image of {height} x {width} pixels"
        )

    def floats(row: int, count: int) -> Array:
        return rows[row, : 4 * count].copy().view("<f4").astype(np.float32)

    def person(centre: int, first: int, unlabeled: bool) -> Person:
        points = np.stack([floats(first, parts), floats(first + 1, parts)], axis=1) - 1
        mark = floats(first + 2, parts)
        visible = (mark != 0).astype(np.int64)
        with np.errstate(invalid="ignore"):
            inside = ((points >= 0) & (points < size)).all(axis=1)
        visible[~inside] = OUTSIDE
        if unlabeled:
            visible[mark == UNLABELED] = UNLABELED
        return Person(floats(centre, 2) - 1, points, visible)

    size = floats(1, 2)[::-1]
    start = HEADER_ROWS + others
    return Record(
        person(3, 5, unlabeled),
        [person(8 + p, start + 3 * p, False) for p in range(others)],
        float(floats(4, 1)[0]),
    )


def add_peak(image: Array, centre: Array, stride: int, sigma: float) -> None:
    """Add a Gaussian peak of height 1 around a place to a map (h, w), up to 1 in all."""
    start = np.float32(stride / 2 - 0.5)
    y, x = (start + np.arange(n, dtype=np.float32) * stride for n in image.shape)
    distance = (x - centre[0]) ** 2 + ((y - centre[1]) ** 2)[:, None]
    exponent = (distance.astype(np.float64) / 2 / sigma / sigma).astype(np.float32)
    near = exponent <= LEAST_EXPONENT
    image[near] = np.minimum(image[near] + np.exp(-exponent[near]), 1)


def _rounded(number: np.floating) -> int:
    """The nearest whole number, halves away from 0."""
    return int(np.floor(abs(float(number)) + 0.5) * np.sign(number))


def put_limb(maps: Array, start: Array, end: Array) -> None:
    """Write the direction of a limb to the cells of maps (2, h, w) beside its line; nothing where
    its ends are one point. What another limb wrote is overwritten, as in the fork.
    """
    start, end = start * np.float32(LIMB_STRIDE), end * np.float32(LIMB_STRIDE)
    along = end - start
    length = np.sqrt(along[0] * along[0] + along[1] * along[1])
    if not (length > 0 and np.isfinite(length)):
        return
    along /= length
    (left, top), (right, bottom) = np.minimum(start, end), np.maximum(start, end)
    x0, y0 = max(_rounded(left - LIMB_WIDTH), 0), max(_rounded(top - LIMB_WIDTH), 0)
    x1 = min(_rounded(right + LIMB_WIDTH), maps.shape[2])
    y1 = min(_rounded(bottom + LIMB_WIDTH), maps.shape[1])
    x = np.arange(x0, max(x0, x1), dtype=np.float32) - start[0]
    y = (np.arange(y0, max(y0, y1), dtype=np.float32) - start[1])[:, None]
    near = np.abs(x * along[1] - y * along[0]) <= LIMB_WIDTH
    maps[:, y0:y1, x0:x1][:, near] = along[:, None]


def peaks(
    people: list[Person], parts: int, shape: tuple[int, int], stride: int, sigma: float
) -> Array:
    """Return maps (parts + 1, h, w): peaks at a part of all people that have it in the image, and
    what they leave of the background.
    """
    maps = np.zeros((parts + 1, *shape), np.float32)
    for i in range(parts):
        for person in people:
            if person.visible[i] <= VISIBLE:
                add_peak(maps[i], person.points[i], stride, sigma)
    maps[-1] = 1 - maps[:-1].max(axis=0)
    return maps


def limbs(people: list[Person], body: Body, shape: tuple[int, int]) -> Array:
    """Return maps (2 * limbs, h, w) of the limbs' directions, x and y, 0 where there is none."""
    maps = np.zeros((len(body.limbs), 2, *shape), np.float32)
    for both, (start, end) in zip(maps, body.limbs, strict=True):
        for person in people:
            if person.visible[start] <= VISIBLE and person.visible[end] <= VISIBLE:
                put_limb(both, person.points[start], person.points[end])
    return maps.reshape(-1, *shape)
