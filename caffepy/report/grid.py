"""Pictures of many small images side by side: filters of a layer, channels of a blob, and contact
sheets, whose images have captions.
"""

import logging
from collections.abc import Sequence
from math import ceil, isqrt

import numpy as np

from caffepy.core.errors import UsageError
from caffepy.core.files import written
from caffepy.device.blob import Array, shape_string
from caffepy.report.text import extension_of

log = logging.getLogger(__name__)

FORMATS = ("png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff")
WIDTH = 800
"""Least width of a picture in pixels; smaller ones are enlarged."""

LARGEST = 32
"""Most pixels for one value in each direction."""

MOST_PIXELS = 1 << 24

# of a contact sheet
SIZE = 96  # pixels of an image's place in each direction
STRIP = 16  # pixels of a caption's height
GAP = 4


def filter_tiles(weights: Array) -> tuple[Array, int]:
    """Return weights (O, I, h, w) as tiles (n, h, w, k), and the number of tiles in a row.

    Filters of three channels, which Caffe's nets have in the order blue, green, red, are in colour.
    Of others each channel is a tile, and each filter a row.
    """
    outputs, inputs, height, width = weights.shape
    if inputs == 3:
        return weights.transpose(0, 2, 3, 1), square(outputs)
    return weights.reshape(-1, height, width, 1), inputs if inputs > 1 else square(outputs)


def blob_tiles(values: Array) -> tuple[Array, int]:
    """Return an item, (C, H, W) or of other axes, as tiles (n, h, w, 1), and how many a row has."""
    size = values.shape[-2:] if values.ndim > 1 else (1, 1)
    tiles = values.reshape(-1, *size, 1)
    return tiles, square(len(tiles))


def square(count: int) -> int:
    """Return the number of columns that makes a grid of `count` tiles about square."""
    return isqrt(max(count - 1, 0)) + 1


def grid(tiles: Array, columns: int) -> Array:
    """Return a picture (H, W, 3), uint8, of tiles (n, h, w, 1 or 3) with white lines between them.

    There are `columns` tiles in a row. The smallest value is black and the largest white (of each
    colour, in colour); values that are not finite are red. Rows beyond 16 million pixels are left
    out, and the log says so.
    """
    count, height, width, _ = tiles.shape
    factor = max(1, min(LARGEST, WIDTH // (columns * (width + 1))))
    high, wide = height * factor + 1, width * factor + 1  # with the line
    rows = ceil(count / columns)
    shown = max(1, min(rows, MOST_PIXELS // (high * wide * columns)))
    if shown < rows:
        log.warning("Only the first %d of %d rows fit into the picture", shown, rows)
        tiles = tiles[: shown * columns]
    picture = np.full((shown, columns, high, wide, 3), 255, np.uint8)
    finite = np.isfinite(tiles)
    values = np.where(finite, tiles, 0).astype(np.float64)
    black, white = (values[finite].min(), values[finite].max()) if finite.any() else (0, 0)
    span = white - black
    shades = (values - black) / span if span > 0 else np.full_like(values, 0.5)
    coloured = np.repeat((shades * 255).round().astype(np.uint8), 3 // tiles.shape[-1], -1)
    coloured[~finite.all(-1)] = 0, 0, 255  # (n, h, w, 3), blue first
    enlarged = coloured.repeat(factor, 1).repeat(factor, 2)
    places = picture.reshape(-1, high, wide, 3)
    places[: len(enlarged), :-1, :-1] = enlarged
    joined = picture.transpose(0, 2, 1, 3, 4).reshape(shown * high, columns * wide, 3)
    return joined[:-1, :-1]


def thumbnail(image: Array) -> Array:
    """Return an image (C, H, W) as (h, w, 3) of bytes that fits its place.

    One channel is grey, three are blue, green, red; of any other number the first is shown. Values
    that are not bytes are stretched from black to white.
    """
    import cv2

    planes = image if len(image) == 3 else image[:1]
    if planes.dtype != np.uint8:
        values = np.nan_to_num(planes.astype(np.float64))
        low, high = values.min(), values.max()
        planes = ((values - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    _, height, width = planes.shape
    factor = SIZE / max(height, width)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST
    small = cv2.resize(np.ascontiguousarray(planes.transpose(1, 2, 0)), size, interpolation=method)
    height, width = small.shape[:2]
    return np.broadcast_to(small.reshape(height, width, -1), (height, width, 3))


def sheet(pictures: Sequence[tuple[Array, str]]) -> Array:
    """Return a picture (H, W, 3) of thumbnails side by side, with their captions below them."""
    import cv2

    columns = square(len(pictures))
    rows = -(-len(pictures) // columns)
    high, wide = SIZE + STRIP + GAP, SIZE + GAP
    whole = np.full((rows * high + GAP, columns * wide + GAP, 3), 255, np.uint8)
    for i, (picture, caption) in enumerate(pictures):
        top, left = i // columns * high + GAP, i % columns * wide + GAP
        height, width, _ = picture.shape
        above, before = (SIZE - height) // 2, (SIZE - width) // 2
        whole[top + above : top + above + height, left + before : left + before + width] = picture
        place = left + 2, top + SIZE + STRIP - 4
        font, black = cv2.FONT_HERSHEY_SIMPLEX, (0, 0, 0)
        cv2.putText(whole, caption, place, font, 0.38, black, 1, cv2.LINE_AA)
    return whole


def save(picture: Array, path: str) -> None:
    """Write a picture (H, W, 3), blue first, in the format of its name; UsageError if it fails."""
    import cv2

    made, content = cv2.imencode(f".{extension_of(path, FORMATS)}", picture)
    if not made:
        raise UsageError(f'"{path}" cannot hold a picture of {shape_string(picture.shape)}')
    with written(path) as temporary, open(temporary, "wb") as file:
        file.write(content.tobytes())
