"""Rows of an image from the planes of samples: libjpeg's "fancy" upsampling of colours and its
conversion from YCbCr.
"""

import numpy as np

from caffepy.data.jpeg_kernels.room import (
    ACROSS,
    COLUMNS,
    COMPONENTS,
    DOWN,
    HEIGHT,
    ROWS,
    WIDTH,
)
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import inlined


@inlined
def fill_row(
    images: Array,
    at: int,
    y: int,
    channels: int,
    head: Array,
    samples: Array,
    rows: Array,
    wide: Array,
) -> None:
    """Write row y of the image to row `at` of `images` (C, rows, columns); the arrays are those of
    a Room.
    """
    width, across, down = head[WIDTH], head[ACROSS], head[DOWN]
    stride, narrow = head[COLUMNS] * across * 8, head[COLUMNS] * 8
    luma = samples[y * stride : y * stride + width]
    if channels == 1 or head[COMPONENTS] == 1:
        for c in range(channels):
            for x in range(width):
                images[c, at, x] = luma[x]
        return
    blue, red = wide[:stride], wide[stride : 2 * stride]
    for c in range(2):
        start = 64 * head[ROWS] * head[COLUMNS] * (across * down + c)
        _widen(y, samples[start:], narrow, red if c else blue, head, rows)
    first, second, third = images[0, at], images[1, at], images[2, at]
    for x in range(width):
        cb, cr = np.int32(blue[x]) - 128, np.int32(red[x]) - 128
        b = luma[x] + (np.int32(116130 * cb + 32768) >> 16)
        g = luma[x] + (np.int32(-22554 * cb - 46802 * cr + 32768) >> 16)
        r = luma[x] + (np.int32(91881 * cr + 32768) >> 16)
        first[x] = min(max(b, 0), 255)
        second[x] = min(max(g, 0), 255)
        third[x] = min(max(r, 0), 255)


@inlined
def _widen(y: int, plane: Array, stride: int, to: Array, head: Array, rows: Array) -> None:
    """Write the samples of a colour for row y of the image."""
    across, down = head[ACROSS], head[DOWN]
    used, last = -(-head[WIDTH] // across), -(-head[HEIGHT] // down) - 1
    near = plane[y // down * stride :][:used]
    if across == 1:
        for x in range(used):
            to[x] = near[x]
        return
    row, before, behind = rows[:used], rows[used : 2 * used], rows[2 * used : 3 * used]
    if down == 1:
        for x in range(used):
            row[x] = near[x]
        _between(row, before, behind, 1, 2, 2)
        before[0], behind[used - 1] = row[0], row[used - 1]
    else:
        other = min(max(y // 2 + 2 * (y % 2) - 1, 0), last)
        far = plane[other * stride :][:used]
        for x in range(used):
            row[x] = 3 * near[x] + far[x]
        _between(row, before, behind, 8, 7, 4)
        before[0], behind[used - 1] = (row[0] + 2) >> 2, (4 * row[used - 1] + 7) >> 4
    for x in range(used):
        to[2 * x] = before[x]
        to[2 * x + 1] = behind[x]


@inlined
def _between(row: Array, before: Array, behind: Array, down: int, up: int, shift: int) -> None:
    """Three parts of each sample and one of the sample before it, and behind it, rounded."""
    for x in range(1, len(row)):
        before[x] = np.int32(3 * row[x] + row[x - 1] + down) >> shift
    for x in range(len(row) - 1):
        behind[x] = np.int32(3 * row[x] + row[x + 1] + up) >> shift
