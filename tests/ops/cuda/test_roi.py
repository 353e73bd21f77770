"""Pooled regions on a GPU beside the CPU's: boxes of all kinds, planes of one cell, and of more than
a warp holds.
"""

import numpy as np
import pytest

from caffepy.ops import cpu
from caffepy.ops.boxes import Rois
from tests.ops.cuda.compare import EXACT, agree, data

pytestmark = pytest.mark.gpu


def regions(count, images, height, width):
    """Boxes in pixels, some of them tiny, huge, turned around or outside."""
    draw = np.random.default_rng(count)
    low = draw.uniform(-40, 1, (count, 2)) + draw.uniform(0, 1, (count, 2)) * [width, height]
    high = low + draw.choice([-30, 0, 10, 90, 5000], (count, 2))
    image = draw.integers(0, images, count)
    return np.column_stack([image, low, high]).astype(np.float32)


def to_take(given, pad=0.0):
    return Rois(given, np.empty_like(given), pad, np.zeros(2))


@pytest.mark.parametrize(
    ("count", "shape", "bins"),
    [
        (5, (2, 3, 7, 9), (2, 3)),
        (300, (2, 5, 38, 50), (7, 7)),
        (200, (3, 70, 5, 6), (1, 1)),
        (40, (1, 2, 130, 150), (6, 7)),  # more cells than a warp holds
        (40, (1, 9, 60, 50), (3, 4)),  # four channels side by side, and one more
        (1300, (1, 2, 9, 8), (3, 3)),  # more boxes than a block lists at a time
        (60, (1, 2, 20, 30), (11, 12)),  # more bins with even or odd rows and columns than lanes
        (90, (1, 2, 30, 20), (5, 2)),  # columns all of which have a neighbour at one side
        (90, (1, 2, 30, 20), (3, 1)),
        (0, (1, 2, 4, 4), (2, 2)),
        (9, (1, 2, 2, 13000), (2, 3)),  # weights of a box that shared memory has no room for
        (9, (1, 2, 13000, 2), (2, 3)),
    ],
)
def test_pooled_regions(count, shape, bins):
    n, c, h, w = shape
    rois = regions(count, n, 16 * h, 16 * w)
    x = np.round(data(shape), 1)
    y, index = np.empty((count, c, *bins), np.float32), np.empty((count, c, *bins), np.int32)
    agree("roi_pool_forward", x, to_take(rois), y, index, 1 / 16, tolerance=EXACT)
    cpu.roi_pool_forward(x, to_take(rois), y, index, 1 / 16)
    agree("roi_pool_backward", data(y.shape), rois, index, x, 1 / 16)
    for samples in (0, 2):
        given = 1 / 16, samples, 1, False
        agree("roi_align_forward", x, to_take(rois), y, *given, tolerance=(1e-5, 1e-5))
        agree("roi_align_backward", data(y.shape), rois, x, *given, tolerance=(1e-5, 1e-4))


def test_gradients_of_more_bins_than_shared_memory_holds():
    rois = regions(3, 1, 96, 112)
    given = data((3, 5, 90, 50)), rois, np.empty((1, 5, 6, 7), np.float32)
    agree("roi_align_backward", *given, 1 / 16, 2, 1, False, tolerance=(1e-4, 1e-3))


@pytest.mark.parametrize(
    ("count", "outputs", "bins", "images", "size"),
    [
        (5, 1, 1, 1, (3, 4)),
        (300, 3, 7, 2, (38, 50)),
        (50, 2, 3, 1, (120, 130)),  # more than shared memory has room for
        (1300, 1, 2, 1, (9, 8)),  # more boxes than a block looks at at a time
        (700, 4, 2, 1, (7, 70)),  # more than a block has threads, and more columns than lanes twice
        (0, 2, 2, 1, (4, 4)),
    ],
)
def test_pooled_parts(count, outputs, bins, images, size):
    rois = regions(count, images, 16 * size[0], 16 * size[1])
    x = data((images, outputs * bins**2, *size))
    y = np.empty((count, outputs, bins, bins), np.float32)
    agree("psroi_pool_forward", x, to_take(rois), y, 1 / 16)
    agree("psroi_pool_backward", data(y.shape), rois, x, 1 / 16)
    given = 1 / 16, 2, 1, True
    agree("roi_align_forward", x, to_take(rois), y, *given, tolerance=(1e-5, 1e-5))
    agree("roi_align_backward", data(y.shape), rois, x, *given, tolerance=(1e-5, 1e-4))


def test_boxes_far_outside():
    """Places for which 32 bits are too few."""
    rois = regions(40, 1, 96, 112)
    rois[::3, 3:] = 1e12
    rois[1::3, 1:3] = -1e12
    x, y, parts = data((1, 5, 6, 7)), np.empty((40, 5, 2, 3), np.float32), data((1, 12, 6, 7))
    index, mean = np.empty(y.shape, np.int32), np.empty((40, 3, 2, 2), np.float32)
    agree("roi_pool_forward", x, to_take(rois), y, index, 1 / 16, tolerance=EXACT)
    agree("psroi_pool_forward", parts, to_take(rois), mean, 1 / 16)
    agree("psroi_pool_backward", data(mean.shape), rois, parts, 1 / 16)


@pytest.mark.parametrize("pad", [0.0, 0.3])
@pytest.mark.parametrize("images", [1, 7, 40])
def test_taken_boxes(images, pad):
    """Boxes of images that there are not, and of ones that are no number, too."""
    given = regions(1500, 40, 100, 90)
    given[::7, 0] -= 3
    for largest in (given, np.where(given[:, :1] < 0, np.nan, given)):
        agree("take_rois", to_take(largest, pad), images, tolerance=EXACT)
        x, y = data((images, 1, 3, 4)), np.empty((len(given), 1, 1, 1), np.float32)
        index = np.empty(y.shape, np.int32)
        agree("roi_pool_forward", x, to_take(largest, pad), y, index, 1 / 16, tolerance=EXACT)
        agree("psroi_pool_forward", x, to_take(largest), y, 1 / 16)
        agree("roi_align_forward", x, to_take(largest), y, 1 / 16, 2, 1, True)
