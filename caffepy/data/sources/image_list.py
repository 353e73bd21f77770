"""Image files named by a list of `path label` lines."""

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Generic, Self, TypeVar

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import locate, read_regular
from caffepy.data import jpegs
from caffepy.data.datum import (
    COLOR,
    EITHER,
    LONGEST_SIGNATURE,
    decode_file,
    decode_image,
    encoding_of,
)
from caffepy.data.decoders import File
from caffepy.data.sources.base import Array, ImageFiles, Items, NumberedSource, lines_of

log = logging.getLogger(__name__)

Entry = tuple[str, int]
Listed = TypeVar("Listed")
"""Text behind the path of an image in a list."""

# an integer at the start; twelve digits are enough to say that it has more than 32 bits
LABEL = re.compile(r"\s*([+-]?)0*([0-9]{1,12})", re.ASCII)


def read_list(path: str, *, every_line: bool = False) -> list[Entry]:
    """(image path, label) of each line, split at the last blank; a label is the integer that it
    starts with, else 0.

    A line without a blank is both. With `every_line` a blank line is an entry without a path.
    Labels that are more than an integer, or none, are logged. DataError: no such file, fields
    between tabs, a label of more than 32 bits, no lines.
    """
    entries: list[Entry] = []
    odd: list[tuple[str, int, int]] = []
    for number, line in enumerate(lines_of(path), 1):
        name, blank, label = line.rpartition(" ")
        if not line.strip():
            entries += [("", 0)] * every_line
            continue
        if not blank and line.split() != [line]:
            wanted = "an image path, a blank and a label"
            raise DataError(f'{path}:{number}: "{line[:80]}" is not {wanted}')
        digits = LABEL.match(label)
        entries.append((name if blank else line, int("".join(digits.groups())) if digits else 0))
        if not -(1 << 31) <= entries[-1][1] < 1 << 31:
            raise DataError(f"{path}:{number}: label {label.strip()[:80]} has more than 32 bits")
        if not digits or label[digits.end() :].strip():
            odd.append((label.strip()[:80], number, entries[-1][1]))
    if not entries:
        raise DataError(f"{path} lists no images")
    if odd:
        count = f"{len(odd)} labels are no integers" if len(odd) > 1 else "a label is no integer"
        log.warning('%s: %s; as in Caffe, "%s" in line %d counts as %d', path, count, *odd[0])
    return entries


def find_root(folder: str, first: str, path: str, beside: str | None) -> str:
    """The prefix of the image names in the list `path`: `folder` as given or beside the file
    `beside`.

    Without a folder it is empty, or the list's own folder if the image `first` lies only there.
    """
    return locate(folder, beside) if folder else locate(first, path).removesuffix(first)


def unreadable(name: str, error: OSError, folder: str) -> DataError:
    """Return the error for an image that cannot be read, with a hint if root_folder is not given,
    does not end in "/", or does not exist.
    """
    hint = ""
    if not folder:
        if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename or os.sep):
            hint = "; no root_folder is given, which would stand before the name"
    elif not folder.endswith("/"):
        hint = f'; root_folder "{folder}" does not end in "/"'
    elif not os.path.isdir(folder):
        hint = f'; there is no root_folder "{folder}"'
    # without the nearest name (`reason`): of a list of images all are near
    problem = (error.strerror or str(error)).lower()
    return DataError(f"{name} cannot be read: {problem}{hint}")


class ListedImages(NumberedSource, Generic[Listed]):
    """Base: images whose paths, and what stands behind each, are the lines of a list."""

    def __init__(
        self,
        path: str,
        read: Callable[[str], list[tuple[str, Listed]]],
        root_folder: str,
        beside: str | None,
        seed: int | None,
        skip: int | None,
    ) -> None:
        log.info("Opening file %s", path)
        self._entries = read(path)
        if seed is not None:
            log.info("Shuffling data")
        log.info("A total of %d images.", len(self._entries))
        self._root = find_root(root_folder, self.key(0), path, beside)
        super().__init__(path, len(self._entries), seed)
        if skip is not None:
            log.info("Skipping first %d data points.", skip)
            if skip >= len(self):
                raise DataError(f"{path} lists {len(self)} images, not enough to skip {skip}")
            self._go(0, skip)

    def extent(self) -> str:
        """Number of lines, and the first and the last, labels included."""
        first, last = (" ".join(map(str, self._entries[i])) for i in (0, -1))
        return f'{len(self):,} lines, from "{first}" to "{last}"'

    def key(self, item: int) -> str:
        """The image's path, as the list has it."""
        return self._entries[item][0]

    def name(self, item: int) -> str:
        return f"{self.path}: {self._root}{self.key(item)}"

    def place(self, items: Items, i: int) -> str:
        return f"line {1 + items[i]}"


class ImageList(ListedImages[int]):
    """Image files, decoded in colour or grey and resized (bilinear) to `size` = (width, height)."""

    kind = "list of images"
    layer = "ImageData"

    @classmethod
    def holds(cls, path: str, kind: str) -> bool:
        """True for any text; other lists precede this one in SOURCES."""
        return kind == "text"

    @classmethod
    def open(cls, path: str, root: str = "") -> Self:
        """The images of the list at `path`, each behind `root`, as they are."""
        return cls(path, root, mode=EITHER)

    def __init__(
        self,
        path: str,
        root_folder: str = "",
        beside: str | None = None,
        *,
        mode: int = COLOR,
        size: tuple[int, int] | None = None,
        seed: int | None = None,
        skip: int | None = None,
    ) -> None:
        super().__init__(path, read_list, root_folder, beside, seed, skip)
        self.mode = mode
        self._size = size

    def decode(self, item: int) -> tuple[Array, int]:
        name, label = self._entries[item]
        try:
            content = read_regular(self._root + name)
            return decode_image(content, self.mode, self._size), label
        except OSError as error:
            raise unreadable(self.name(item), error, self._root) from None
        except DataError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None

    def decode_jpegs(self, items: Items, places: Array, images: Array, labels: Array) -> Array:
        kernels = jpegs.kernels(len(places)) if images.dtype == np.uint8 else None
        if kernels is None:
            return places
        entries = [self._entries[items[i]] for i in places]
        paths = [self._root + name for name, _ in entries]
        resizes = self._size is not None
        done: Array = kernels.decode_named(paths, places, self.mode, images, resizes=resizes)
        labels[places] = [label for _, label in entries]
        return places[~done]

    def image_files(self, items: Items, places: Array) -> ImageFiles:
        chosen = places.tolist()
        entries = [self._entries[items[i]] for i in chosen]
        files: list[File] = [os.path.abspath(self._root + name) for name, _ in entries]
        make = partial(decode_file, self.mode, self._size)
        labels, resized = [label for _, label in entries], self._size is not None
        return ImageFiles(make, chosen, files, labels, self.mode == COLOR, resized)

    def stored(self, item: int, image: Array) -> str:
        return encoding_of(read_regular(self._root + self.key(item))[:LONGEST_SIGNATURE])
