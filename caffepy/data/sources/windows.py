"""Window files: boxes in images, foreground and background, which WindowData cuts out."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from caffepy.core.errors import DataError
from caffepy.data.sources.base import SHOWN_NAMES, AnySource, Array, Summary, first_words, lines_of

FIELDS = 6  # class, overlap, x1, y1, x2, y2
THRESHOLD = 0.5  # window_data_param's default overlap of foreground and background


class WindowFile(AnySource):
    """Image paths; windows (n, 6) of both kinds: image number, class, x1, y1, x2, y2."""

    kind = "window file"
    layer = "WindowData"

    def __init__(self, images: list[str], foreground: Array, background: Array) -> None:
        self.images, self.foreground, self.background = images, foreground, background

    @classmethod
    def holds(cls, path: str, kind: str) -> bool:
        """True for a text that starts with block "# 0"."""
        return kind == "text" and first_words(path, 2) == ["#", "0"]

    @classmethod
    def open(cls, path: str, root: str = "") -> "WindowFile":
        """The windows of a file, split at WindowData's usual overlap."""
        return read_windows(path, THRESHOLD, THRESHOLD)

    def summarize(self, info: Summary, first: int | None, images: int) -> list[tuple[Array, str]]:
        info.records = info.seen = len(self.images)
        info.first = self.images[:SHOWN_NAMES]
        info.facts = {
            "windows": f"{len(self.foreground):,} of overlap {THRESHOLD} or more, "
            f"{len(self.background):,} of less"
        }
        classes = np.concatenate([self.foreground[:, 1], self.background[:, 1]])
        info.labels.update(classes.tolist())
        return []


def read_windows(path: str, fg_threshold: float, bg_threshold: float) -> WindowFile:
    """The windows of a file of blocks `# number`, image path, channels, height, width, count,
    `count` windows.

    A window is `class overlap x1 y1 x2 y2`, corners included. Overlaps of fg_threshold or more are
    foreground, those below bg_threshold background, whose class becomes 0; others are left out.
    DataError: no such file, no blocks, a block that is out of order or incomplete, a foreground
    window without a class.
    """
    images: list[str] = []
    kinds: tuple[list[Array], list[Array]] = ([], [])
    lines = filter(None, map(str.strip, lines_of(path)))
    for number, head in enumerate(lines):
        if head.split() != ["#", str(number)]:
            raise DataError(f'{path}: "{head[:80]}" where block "# {number}" should start')
        image, windows = _block(path, number, lines)
        overlaps = windows[:, 1].astype(np.float32)
        windows[:, 1] = windows[:, 0]
        windows[:, 0] = len(images)
        is_foreground = overlaps >= np.float32(fg_threshold)
        is_background = ~is_foreground & (overlaps < np.float32(bg_threshold))
        if (windows[is_foreground, 1] < 1).any():
            raise DataError(
                f"{path}: a foreground window of image {len(images)} needs a class of 1 or more"
            )
        windows[is_background, 1] = 0
        for kind, chosen in zip(kinds, (is_foreground, is_background), strict=True):
            kind.append(windows[chosen].astype(np.int32))
        images.append(image)
    if not images:
        raise DataError(f"{path} lists no images")
    return WindowFile(images, *map(np.concatenate, kinds))


def _block(path: str, number: int, lines: Iterator[str]) -> tuple[str, Array]:
    def following(count: int) -> list[str]:
        found = list(islice(lines, count))
        if len(found) < count:
            raise DataError(f"{path} ends within block {number}")
        return found

    image, *numbers = following(5)
    try:
        *_, count = map(int, numbers)
        rows = [line.split() for line in following(count)]  # ValueError for a negative count
        windows = np.array(rows, np.float64).reshape(count, FIELDS)
    except ValueError:
        raise DataError(
            f"{path}: block {number} is damaged: it needs an image, its channels, height and "
            f"width, and a number of windows, each a line of {FIELDS} numbers"
        ) from None
    if not (np.abs(windows) < 1 << 31).all() or (windows[:, 4:] < windows[:, 2:4]).any():
        raise DataError(f"{path}: block {number} is damaged: a window needs x1 <= x2 and y1 <= y2")
    return image, windows
