"""Image files with label images, named by a list of `image label` lines."""

from functools import partial

from caffepy.core.errors import DataError
from caffepy.core.files import read_regular
from caffepy.data.datum import GRAY, read_image
from caffepy.data.sources.base import Array, lines_of
from caffepy.data.sources.image_list import ListedImages, unreadable

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


class ImagePairs(ListedImages[str]):
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
        read = partial(read_pairs, alone=alone)
        super().__init__(path, read, root_folder, beside, seed, skip)

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
            raise unreadable(name, error, self._root) from None
        except DataError as error:
            raise DataError(f"{name}: {error.message}") from None
        if image is None:
            raise DataError(f"{name}: its image cannot be decoded")
        return image
