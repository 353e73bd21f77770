"""Pictures of `svg` as bitmaps, drawn by OpenCV.

Only the elements that `svg` writes are known. Letters are OpenCV's, which has ASCII alone: others
become question marks.
"""

import re
from collections.abc import Iterable, Iterator
from math import atan2, cos, hypot, pi, sin
from operator import mul
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from caffepy.drawing.svg import Graph, svg

Bitmap = NDArray[np.uint8]
Point = tuple[float, float]

SCALE = 2.0
"""Pixels for one of the SVG."""

MOST, LONGEST = 6e7, 16_000
"""Most pixels of a bitmap and of its longer side; a larger graph is drawn smaller."""

TIP, SPREAD = 8.0, pi / 7
"""Length of an arrow's head in pixels of the SVG, and half its angle."""

FRACTION = 4
"""Bits after the binary point of the coordinates for OpenCV."""

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
STEPS = 12
NUMBER = re.compile(r"-?[\d.]+")


def bitmap(graph: Graph) -> Bitmap:
    """Return the picture, (H, W, 3) BGR."""
    return _Canvas(ElementTree.fromstring(svg(graph).encode())).draw()


def encoded(graph: Graph, ext: str) -> bytes:
    """Return the content of a file of the format that OpenCV knows as `ext`."""
    import cv2

    return bytes(cv2.imencode(f".{ext}", bitmap(graph))[1])


class _Canvas:
    def __init__(self, picture: ElementTree.Element) -> None:
        self.picture = picture
        width, height = (float(picture.attrib[side]) for side in ("width", "height"))
        area, side = max(width * height, 1), max(width, height, 1)
        self.scale = min(SCALE, (MOST / area) ** 0.5, LONGEST / side)
        size = [max(round(side * self.scale), 1) for side in (height, width)]
        self.pixels: Bitmap = np.full((*size, 3), 255, np.uint8)
        self.font_size = float(picture.attrib["font-size"])

    def draw(self) -> Bitmap:
        for element in self.picture:
            kind = element.tag.rpartition("}")[2]
            if kind == "path":
                self._arrow(list(_curve(element.attrib["d"])), _colour(element.attrib["stroke"]))
            elif kind == "polygon":
                points = _points(element.attrib["points"])
                self._fill(points, _colour(element.attrib["fill"]))
                self._line([*points, points[0]])
            elif kind == "text":
                for line in element if len(element) else [element]:
                    self._text(line, element)
        return self.pixels

    def _fixed(self, points: Iterable[Point]) -> Any:
        return np.round(np.array(list(points)) * self.scale * (1 << FRACTION)).astype(np.int32)

    def _line(self, points: Iterable[Point], colour: tuple[int, ...] = BLACK) -> None:
        import cv2

        cv2.polylines(self.pixels, [self._fixed(points)], False, colour, 1, cv2.LINE_AA, FRACTION)

    def _fill(self, points: Iterable[Point], colour: tuple[int, ...]) -> None:
        import cv2

        cv2.fillPoly(self.pixels, [self._fixed(points)], colour, cv2.LINE_AA, FRACTION)

    def _arrow(self, points: list[Point], colour: tuple[int, ...]) -> None:
        end = u, v = points[-1]
        x, y = next((point for point in reversed(points) if point != end), end)
        angle = atan2(v - y, u - x)
        a, b = (
            (u - TIP * cos(angle + turn), v - TIP * sin(angle + turn)) for turn in (-SPREAD, SPREAD)
        )
        line = [(x, y) for x, y in points if hypot(x - u, y - v) > TIP / 2]
        self._line([*line, ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)], colour)
        self._fill([end, a, b], colour)

    def _text(self, line: ElementTree.Element, whole: ElementTree.Element) -> None:
        import cv2

        text = (line.text or "").encode("ascii", "replace").decode()
        size = float(whole.get("font-size", self.font_size)) * self.scale
        font, factor = cv2.FONT_HERSHEY_SIMPLEX, size / 32
        (width, height), _ = cv2.getTextSize(text, font, factor, 1)
        x, y = float(line.attrib["x"]) * self.scale, float(line.attrib["y"]) * self.scale
        left = x if whole.get("text-anchor") == "start" else x - width / 2
        place = round(left), round(y)
        if "stroke" in whole.attrib:  # white between the letters, too, and an edge
            corner = round(left + width), round(y - height)
            cv2.rectangle(self.pixels, place, corner, WHITE, cv2.FILLED)
        cv2.putText(self.pixels, text, place, font, factor, BLACK, 1, cv2.LINE_AA)


def _colour(text: str) -> tuple[int, ...]:
    """Return BGR of `#RRGGBB`."""
    return tuple(int(text[i : i + 2], 16) for i in (5, 3, 1))


def _points(text: str) -> list[Point]:
    numbers = list(map(float, NUMBER.findall(text)))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _curve(path: str) -> Iterator[Point]:
    """Return points on a path of `M` and `C`, cubic Bezier curves."""
    start, *rest = _points(path)
    yield start
    for i in range(0, len(rest), 3):
        a, b, end = rest[i : i + 3]
        for step in range(1, STEPS + 1):
            t = step / STEPS
            shares = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
            xs, ys = zip(start, a, b, end, strict=True)
            yield sum(map(mul, shares, xs)), sum(map(mul, shares, ys))
        start = end
