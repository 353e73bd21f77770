"""Contact sheets: small pictures of many images, each with a caption."""

from collections.abc import Sequence

import cv2
import numpy as np

from caffepy.device.blob import Array
from caffepy.report.grid import square

SIZE = 96  # pixels of an image's place in each direction
STRIP = 16  # pixels of a caption's height
GAP = 4


def thumbnail(image: Array) -> Array:
    """Return an image (C, H, W) as (h, w, 3) of bytes that fits its place.

    One channel is grey, three are blue, green, red; of any other number the first is shown. Values
    that are not bytes are stretched from black to white.
    """
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
