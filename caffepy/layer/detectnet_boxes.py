"""The Python layers of NVIDIA's DetectNet, `caffe.layers.detectnet`: boxes from maps of a grid, and
how many of them are true.

Boxes are lists (N, 50, 5) = x1, y1, x2, y2 and a number, in a row of zeros where there is none.
Coordinates are rounded to half precision, as there.
"""

from collections.abc import Sequence
from math import isfinite, log

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.python_blob import Blob
from caffepy.layer.rpn import RcnnLayer

MOST = 50  # boxes in a list
TRUE, FALSE, MISSED = 1, 2, 3
OVERLAP = 0.7  # of a true box with what was found

Blobs = Sequence[Blob]


class BoxesOfMaps(RcnnLayer):
    """Base: maps of classes (N, C, h, w) and of boxes (N, 4, h, w) = left, top, right and bottom
    from each cell's corner, to a top of boxes for each class.
    """

    names: Sequence[str] = ()
    """Text of param_str before the number of classes, which is 1 if it does not stand there."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        try:
            values = [float(word) for word in self.param_str.split(",")]
        except ValueError:
            values = []
        if (
            len(values) < len(self.names)
            or not all(map(isfinite, values))
            or min(values[:3], default=0) <= 0
        ):
            raise ConfigError(
                f"param_str of {type(self).__name__} is {', '.join(self.names)} and, if there are "
                f"several, the number of classes, not {self.param_str!r}"
            )
        self.given = dict(zip(self.names, values, strict=False))
        if min(values[:2]) < values[2]:
            raise ConfigError(
                f"param_str of {type(self).__name__}: a stride of {values[2]:g} is too large for "
                f"{values[0]:g} x {values[1]:g}"
            )
        self.classes = int(values[len(self.names)]) if len(values) > len(self.names) else 1
        if len(top) != self.classes or len(bottom) != 2:
            raise ConfigError(
                f"{type(self).__name__} of {self.classes} classes has two bottoms and a top for "
                f"each class, not {len(bottom)} and {len(top)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        maps, boxes = (tuple(blob.data.shape) for blob in bottom)
        if len(maps) != 4 or maps[1] != self.classes or boxes != (maps[0], 4, *maps[2:]):
            raise ConfigError(
                f"{type(self).__name__} needs maps (N, {self.classes}, h, w) and (N, 4, h, w), not "
                f"{list(maps)} and {list(boxes)}"
            )
        for blob in top:
            blob.reshape(maps[0], MOST, 5)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for k, blob in enumerate(top):
            blob.data[...] = 0
            for rows, cover, boxes in zip(
                blob.data, bottom[0].data[:, k], bottom[1].data, strict=True
            ):
                found = self.boxes_of(self.covered(cover), boxes)[:MOST]
                rows[: len(found)] = found.astype(np.float16)

    def covered(self, cover: Array) -> Array:
        """Return which cells (h, w) have a box."""
        raise NotImplementedError

    def boxes_of(self, covered: Array, maps: Array) -> Array:
        """Return the boxes (B, 5) of maps (4, h, w)."""
        width, height = self.given["width"], self.given["height"]
        columns, rows = (int(side / self.given["stride"]) for side in (width, height))
        y, x = np.nonzero(covered[:rows, :columns])
        places = np.stack([x * (width / columns), y * (height / rows)] * 2, axis=1)
        return self.grouped(maps[:, y, x].T + places)

    def grouped(self, boxes: Array) -> Array:
        """Return the boxes (B, 5) that the boxes of cells (A, 4) predict."""
        raise NotImplementedError


class ClusterGroundtruth(BoxesOfMaps):
    """Each true box once."""

    names = "width", "height", "stride"

    def covered(self, cover: Array) -> Array:
        return cover > 0

    def grouped(self, boxes: Array) -> Array:
        found = list(dict.fromkeys(map(tuple, boxes.astype(np.float16).tolist())))
        return np.pad(np.array(found).reshape(-1, 4), ((0, 0), (0, 1)))


class ClusterDetections(BoxesOfMaps):
    """The means of groups of like boxes, and the logarithm of how many they are."""

    names = "width", "height", "stride", "coverage", "least", "share", "least_height"

    def covered(self, cover: Array) -> Array:
        return cover >= self.given["coverage"]

    def grouped(self, boxes: Array) -> Array:
        boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1).astype(np.int64)
        means, counts = group(boxes, int(self.given["least"]), self.given["share"])
        rows = [
            [x, y, x + w, y + h, log(count)]
            for (x, y, w, h), count in zip(means.tolist(), counts.tolist(), strict=True)
            if h >= self.given["least_height"]
        ]
        return np.array(rows).reshape(-1, 5)


def group(boxes: Array, least: int, share: float) -> tuple[Array, Array]:
    """Return the mean boxes (G, 4) of groups of more than `least` like boxes x, y, width, height,
    and how many those are, as OpenCV's groupRectangles; with a `least` of 0 all boxes.

    Boxes are alike whose sides lie no further apart than this share of their size. A group inside
    a larger one is left out, and one of less than 3 inside any.
    """
    if least <= 0 or not len(boxes):
        return boxes, np.ones(len(boxes), np.int64)
    sides = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    smaller = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:]).sum(axis=2)
    alike = (np.abs(sides[:, None] - sides) <= (share / 2 * smaller)[..., None]).all(axis=2)
    left = np.ones(len(boxes), bool)
    means, counts = [], []
    for first in range(len(boxes)):
        if left[first]:
            members = np.zeros(len(boxes), bool)
            new = np.arange(len(boxes)) == first
            while new.any():
                members |= new
                new = alike[new].any(axis=0) & ~members
            left &= ~members
            if members.sum() > least:
                means.append(np.rint(boxes[members].mean(axis=0)).astype(np.int64))
                counts.append(int(members.sum()))
    kept = [
        i
        for i, (mean, count) in enumerate(zip(means, counts, strict=True))
        if not any(
            i != j and (other > max(3, count) or count < 3) and inside(mean, large, share)
            for j, (large, other) in enumerate(zip(means, counts, strict=True))
        )
    ]
    return np.array(means).reshape(-1, 4)[kept], np.array(counts, np.int64)[kept]


def inside(box: Array, large: Array, share: float) -> bool:
    """True if a box (x, y, w, h) lies in another, larger by this share of its size on each side."""
    edge = np.rint(large[2:] * share)
    low = large[:2] - edge
    high = large[:2] + large[2:] + edge
    return bool((box[:2] >= low).all() and (box[:2] + box[2:] <= high).all())


class ScoreDetections(RcnnLayer):
    """True boxes and what was found to a list of what is true (1), false (2) and missed (3).

    Each true box takes the first free one that it overlaps by 0.7.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) != 2 or len(top) != 1:
            raise ConfigError("ScoreDetections has two bottoms and a top")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        true, found = (tuple(blob.data.shape) for blob in bottom)
        if true != found or true[1:] != (MOST, 5):
            raise ConfigError(
                f"ScoreDetections needs two lists (N, {MOST}, 5), not {list(true)} and "
                f"{list(found)}"
            )
        top[0].reshape(*true)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        top[0].data[...] = 0
        for rows, true, found in zip(top[0].data, bottom[0].data, bottom[1].data, strict=True):
            scored = score(true[true[:, :4].any(axis=1), :4], found[found[:, :4].any(axis=1), :4])
            rows[: min(len(scored), MOST)] = scored[:MOST]


def score(true: Array, found: Array) -> Array:
    """Return boxes (B, 5) = x1, y1, x2, y2, TRUE, FALSE or MISSED."""
    low = np.maximum(true[:, None, :2], found[None, :, :2])
    high = np.minimum(true[:, None, 2:], found[None, :, 2:])
    common = np.prod(np.maximum(high - low, 0), axis=2)
    areas, others = (np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (true, found))
    union = areas[:, None] + others - common
    fits = (common > 0) & (common >= OVERLAP * union)
    is_true, is_missed = np.zeros(len(found), bool), np.ones(len(true), bool)
    for i, row in enumerate(fits):
        free = np.flatnonzero(row & ~is_true)
        if len(free):
            is_true[free[0]], is_missed[i] = True, False
    kinds = (found[is_true], TRUE), (found[~is_true], FALSE), (true[is_missed], MISSED)
    return np.concatenate(
        [np.pad(boxes, ((0, 0), (0, 1)), constant_values=kind) for boxes, kind in kinds]
    )


class MeanAP(RcnnLayer):
    """A list of scored boxes to precision x recall / 100, precision and recall, in percent."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) != 1 or len(top) != 3:
            raise ConfigError("mAP has a bottom and three tops")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in top:
            blob.reshape(1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        kinds = bottom[0].data[..., 4]
        true, false, missed = (int((kinds == kind).sum()) for kind in (TRUE, FALSE, MISSED))
        precision = 100 * true / max(1, true + false)
        recall = 100 * true / max(1, true + missed)
        for blob, value in zip(top, (precision * recall / 100, precision, recall), strict=True):
            blob.data[...] = value


mAP = MeanAP  # noqa: N816 # the name there
