"""Images with true boxes and regions that say nothing: window files of MS-CNN and Cascade R-CNN."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import read_regular
from caffepy.data.datum import COLOR, read_image
from caffepy.data.sources.base import Array, Items, NumberedSource, lines_of
from caffepy.data.sources.image_list import find_root, unreadable

log = logging.getLogger(__name__)


class MarkedImage(NamedTuple):
    """An image's path, its height and width as listed, boxes (n, 6) = class, ignored, x1, y1, x2,
    y2, or of Cascade R-CNN (n, 7) with `difficult` before the place, and regions of no interest (m,
    4) = x1, y1, x2, y2, float32.
    """

    path: str
    size: tuple[int, int]
    boxes: Array
    regions: Array


def read_marked(path: str, columns: int = 6) -> list[MarkedImage]:
    """The images of a file of blocks `# number`, image path, channels, height, width, count,
    `count` boxes, count, `count` regions.

    A box is `class ignored x1 y1 x2 y2`, with 7 columns `class ignored difficult x1 y1 x2 y2`, a
    region `x1 y1 x2 y2`. DataError: no such file, no blocks, a block that is damaged, a box of no
    class.
    """
    found: list[MarkedImage] = []
    words = (word for line in lines_of(path) for word in line.split())
    for start in words:
        block = len(found)
        if start != "#":
            raise DataError(f'{path}: "{start[:80]}" where block {block} should start with "#"')
        try:
            _, image, _, *size = islice(words, 5)
            boxes, regions = _rows(words, columns), _rows(words, 4)
            height, width = map(int, size)
            if min(height, width) < 1:
                raise ValueError("an image without pixels")
        except ValueError:
            raise DataError(
                f"{path}: block {block} is damaged: it needs a number, an image, its channels, "
                f"height and width, a number of boxes of {columns} numbers each, and a number of "
                "regions of 4 numbers each"
            ) from None
        if len(boxes) and boxes[:, 0].min() < 1:
            raise DataError(f"{path}: a box in block {block} needs a class of 1 or more")
        found.append(MarkedImage(image, (height, width), boxes, regions))
    if not found:
        raise DataError(f"{path} lists no images")
    return found


def _rows(words: Iterator[str], columns: int) -> Array:
    """Rows of numbers behind their count; ValueError if there are fewer."""
    count = int(next(words, ""))
    rows = np.array(list(islice(words, count * columns)), np.float64).reshape(count, columns)
    if not (np.abs(rows) < 1 << 24).all():  # that float32 holds
        raise ValueError("a number is not finite or too large")
    return np.trunc(rows).astype(np.float32)


class MarkedImages(NumberedSource):
    """Images with boxes, in order or shuffled; those with a box that is not ignored `multiple`
    times.
    """

    kind = "window file of MS-CNN"

    def __init__(
        self,
        path: str,
        root_folder: str = "",
        beside: str | None = None,
        *,
        seed: int | None = None,
        multiple: int = 1,
        columns: int = 6,
    ) -> None:
        log.info("Opening file %s", path)
        images = read_marked(path, columns)
        self.last_size = images[-1].size
        self._images = [
            image
            for image in images
            for _ in range(multiple if (image.boxes[:, 1] == 0).any() else 1)
        ]
        if not self._images:
            raise DataError(f"{path}: no image is left with an fg_img_multiple of 0")
        log.info("A total of %d images.", len(self._images))
        self._root = find_root(root_folder, self.key(0), path, beside)
        super().__init__(path, len(self._images), seed)

    def marked(self, item: int) -> MarkedImage:
        """Boxes and regions of an image."""
        return self._images[item]

    def image(self, item: int) -> Array:
        """The image (H, W, 3), uint8."""
        try:
            image = read_image(read_regular(self._root + self.key(item)), COLOR)
        except OSError as error:
            raise unreadable(self.name(item), error, self._root) from None
        except DataError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None
        if image is None:
            raise DataError(f"{self.name(item)}: its image cannot be decoded")
        return image

    def extent(self) -> str:
        """Number of images, and the first and the last."""
        return f'{len(self):,} images, from "{self.key(0)}" to "{self.key(len(self) - 1)}"'

    def key(self, item: int) -> str:
        """The image's path, as the file has it."""
        return self._images[item].path

    def name(self, item: int) -> str:
        return f"{self.path}: {self._root}{self.key(item)}"

    def place(self, items: Items, i: int) -> str:
        return f"image {1 + items[i]}"


class CascadeImages(MarkedImages):
    """Images with boxes that may be difficult, in order, or shuffled: "random", "random_aspect",
    tall ones and wide ones one after the other, or "random_mix_aspect", in groups by turns.
    """

    kind = "window file of Cascade R-CNN"

    def __init__(
        self,
        path: str,
        root_folder: str = "",
        beside: str | None = None,
        *,
        seed: int | None = None,
        shuffle: str = "random",
        group: int = 1,
    ) -> None:
        self._shuffle, self._group = shuffle, group
        super().__init__(path, root_folder, beside, seed=seed, columns=7)

    def _go(self, epoch: int, index: int) -> None:
        super()._go(epoch, index)
        if self._seed is None or self._shuffle == "random":
            return
        is_tall = np.array([height >= width for _, (height, width), *_ in self._images])
        shapes = is_tall[self._order]
        kinds = [self._order[shapes], self._order[~shapes]]
        if np.random.Generator(np.random.MT19937([self._seed, epoch, 1])).integers(2):
            kinds.reverse()
        if self._shuffle == "random_mix_aspect":
            kinds = list(self._mixed(*kinds))
        self._order = np.concatenate(kinds)

    def _mixed(self, first: Array, second: Array) -> Iterator[Array]:
        """Groups of the one and of the other, until one of them is used up; then the rest."""
        left = [first, second]
        turn = 0
        while all(map(len, left)):
            yield left[turn][: self._group]
            left[turn] = left[turn][self._group :]
            turn = 1 - turn
        yield from left
