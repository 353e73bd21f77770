"""Boxes around what was found in an image, drawn by OpenCV.

Letters are OpenCV's, which has ASCII alone: others become question marks.
"""

from collections.abc import Iterable, Sequence
from colorsys import hsv_to_rgb

from caffepy.drawing.bitmap import BLACK, Bitmap

GOLDEN = 0.618034
"""Step from a class to the next on the circle of hues: classes that follow differ much."""

LINES = 300  # pixels of an image's longer side for one of a line's width
LEAST_FONT = 0.35


def draw_boxes(image: Bitmap, boxes: Iterable[tuple[Sequence[float], int, str]]) -> None:
    """Draw boxes with a colour for each class and a caption above, or within at the upper edge.

    `image` is (H, W, 3), blue first, and is changed; `boxes` are (xmin, ymin, xmax, ymax) in its
    pixels, class, and caption. Later boxes hide earlier ones.
    """
    import cv2

    height, width, _ = image.shape
    line = max(1, round(max(height, width) / LINES))
    font, factor = cv2.FONT_HERSHEY_SIMPLEX, max(LEAST_FONT, line / 3)
    for box, label, caption in boxes:
        red, green, blue = (round(255 * v) for v in hsv_to_rgb(label * GOLDEN % 1, 0.85, 1.0))
        colour = (blue, green, red)
        x0, x1 = (min(max(round(x), 0), width - 1) for x in box[::2])
        y0, y1 = (min(max(round(y), 0), height - 1) for y in box[1::2])
        cv2.rectangle(image, (x0, y0), (x1, y1), colour, line)
        text = caption.encode("ascii", "replace").decode()
        (across, up), below = cv2.getTextSize(text, font, factor, 1)
        base = y0 - below if y0 >= up + below else y0 + up
        left = max(0, min(x0, width - across))
        cv2.rectangle(image, (left, base - up), (left + across, base + below), colour, cv2.FILLED)
        cv2.putText(image, text, (left, base), font, factor, BLACK, 1, cv2.LINE_AA)
