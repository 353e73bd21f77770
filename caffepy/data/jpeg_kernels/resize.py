"""Images that are resized while their rows are made: OpenCV's bilinear resizing of 8 bits, in whole
numbers, to the last bit.

Centres lie at halves, weights are 2048 in all. Beyond the first and the last column a weight is all
of theirs; beyond the first and the last row they are read twice, which rounds otherwise. Of two
rows the sums along them are kept; each row of an image is made once, or never.
"""

from functools import partial
from typing import Any

import numpy as np

from caffepy.data.jpeg_kernels.color import fill_row
from caffepy.data.jpeg_kernels.room import WIDTH, Room
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import inlined

ONE = np.float32(1)
WHOLE = np.float32(2048)
SUM = (1 << 15) - 1
SUMS = SUM | SUM << 21 | SUM << 42


@partial(inlined, fastmath=set())
def _first(i: int, size: int, to: int) -> Any:
    """The place before which, and the share behind it with which, pixel i of `to` reads `size`."""
    step = 1.0 / (np.float64(to) / np.float64(size))
    place = np.float32((i + 0.5) * step - 0.5)
    first = np.floor(place)
    return np.int64(first), place - first


@partial(inlined, fastmath=set())
def _weights(share: Any) -> Any:
    return np.int32(np.rint((ONE - share) * WHOLE)), np.int32(np.rint(share * WHOLE))


@inlined
def fill_image(image: Array, window: tuple[int, ...], to: tuple[int, int], room: Room) -> None:
    """Write the first rows and columns of `image` (C, H, W), as many as `to` says, from a window of
    the image in the planes of samples: its first row and column, height and width.

    Rows of the whole image go to their places at once if it keeps its size.
    """
    head, samples, rows, wide = room.head, room.samples, room.rows, room.wide
    line, pixels, taps, sums = room.line, room.pixels, room.taps, room.sums
    (top, left, height, width), (lines, columns) = window, to
    channels, full = image.shape[0], head[WIDTH]
    is_as_it_was = lines == height and columns == width == full
    for x in range(columns):
        first, share = _first(x, width, columns)
        if first < 0 or first >= width - 1:
            first, share = min(max(first, 0), width - 1), np.float32(0)
        taps[0, x] = left + first
        taps[1, x], taps[2, x] = _weights(share)
    evens = odds = -1  # the rows of which `sums` are
    for y in range(lines):
        first, share = _first(y, height, lines)
        upper, lower = min(max(first, 0), height - 1), min(max(first + 1, 0), height - 1)
        above, below = _weights(share)
        for row in (upper, lower):
            if row == (odds if row & 1 else evens):
                continue
            made, at = (image, row) if is_as_it_was else (line, 0)
            fill_row(made, at, top + row, channels, head, samples, rows, wide)
            if not is_as_it_was:
                _sum_along(line, channels, full, columns, pixels, taps, sums[row & 1])
            if row & 1:
                odds = row
            else:
                evens = row
        if is_as_it_was:
            continue
        up, low = sums[upper & 1], sums[lower & 1]
        for c in range(channels):
            out, shift = image[c, y], 21 * c
            for x in range(columns):
                one = (up[x] >> shift & SUM) * above >> 16
                other = (low[x] >> shift & SUM) * below >> 16
                out[x] = (one + other + 2) >> 2


@inlined
def _sum_along(
    line: Array, channels: int, width: int, columns: int, pixels: Array, taps: Array, to: Array
) -> None:
    """Resize a row of the image (3, 1, width) along it, all colours at once: 21 bits of a number
    each, sums of 19 bits less their last 4.
    """
    blue, green, red = line[0, 0], line[1, 0], line[2, 0]
    if channels == 1:
        for x in range(width):
            pixels[x] = blue[x]
    else:
        for x in range(width):
            pixels[x] = np.int64(blue[x]) | np.int64(green[x]) << 21 | np.int64(red[x]) << 42
    pixels[width] = 0  # of no weight
    firsts, ones, others = taps[0], taps[1], taps[2]
    for x in range(columns):
        place = np.uint64(firsts[x])
        total = pixels[place] * ones[x] + pixels[place + np.uint64(1)] * others[x]
        to[x] = total >> 4 & SUMS
