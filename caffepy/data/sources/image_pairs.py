"""Image files with label images, named by a list of `image label` lines."""

import logging

from caffepy.core.errors import DataError
from caffepy.core.files import read_regular
from caffepy.data.datum import GRAY, read_image
from caffepy.data.sources.base import Array, Items, NumberedSource, lines_of
from caffepy.data.sources.image_list import find_root, unreadable

log = logging.getLogger(__name__)

Entry = tuple[str, str]  # the path of an image, and what stands behind it


def read_pairs(path: str, *, alone: bool = False) -> list[Entry]:
    """The first two words of each line; only the first one if images stand `alone`.

    DataError: no such file, a line of one word, no lines.
    """
    entries = []
    for number, line in enumerate(lines_of(path), 1):
        words = line.split()
        if len(words) == 1 and not alone:
            wanted = "an image path, a blank and a label image or number"
            raise DataError(f'{path}:{number}: "{line[:80]}" is not {wanted}')
        if words:
            entries.append((words[0], "" if alone else words[1]))
    if not entries:
        raise DataError(f"{path} lists no images")
    return entries


class ImagePairs(NumberedSource):
    """Images with labels, in order or shuffled."""

    kind = "list of images and label images"

    def __init__(
        self,
        path: str,
        root_folder: str = "",
        beside: str | None = None,
        *,
        alone: bool = False,
        seed: int | None = None,
        skip: int | None = None,
    ) -> None:
        log.info("Opening file %s", path)
        self._entries = read_pairs(path, alone=alone)
        if seed is not None:
            log.info("Shuffling data")
        log.info("A total of %d images.", len(self._entries))
        self._root_folder = root_folder
        self._root = find_root(root_folder, self.key(0), path, beside)
        super().__init__(path, len(self._entries), seed)
        if skip is not None:
            log.info("Skipping first %d data points.", skip)
            if skip >= len(self):
                raise DataError(f"{path} lists {len(self)} images, not enough to skip {skip}")
            self._go(0, skip)

    def image(self, item: int, mode: int) -> Array:
        """The image (H, W, C) or (H, W), uint8, decoded by this mode of OpenCV."""
        return self._read(self._entries[item][0], mode)

    def label(self, item: int) -> str:
        """The text behind the image."""
        return self._entries[item][1]

    def label_image(self, item: int) -> Array:
        """The label image (H, W), uint8."""
        return self._read(self._entries[item][1], GRAY)

    def _read(self, path: str, mode: int) -> Array:
        name = f"{self.path}: {self._root}{path}"
        try:
            image = read_image(read_regular(self._root + path), mode)
        except OSError as error:
            raise unreadable(name, error, self._root_folder) from None
        except DataError as error:
            raise DataError(f"{name}: {error.message}") from None
        if image is None:
            raise DataError(f"{name}: its image cannot be decoded")
        return image

    def extent(self) -> str:
        """Number of lines, and the first and the last, labels included."""
        first, last = (" ".join(self._entries[i]) for i in (0, -1))
        return f'{len(self):,} lines, from "{first}" to "{last}"'

    def key(self, item: int) -> str:
        """The image's path, as the list has it."""
        return self._entries[item][0]

    def name(self, item: int) -> str:
        return f"{self.path}: {self._root}{self.key(item)}"

    def place(self, items: Items, i: int) -> str:
        return f"line {1 + items[i]}"
