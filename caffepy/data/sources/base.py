"""The contract of a source: items in a fixed order, read endlessly, each an image with a label.
Methods are described here, and in subclasses only where there is more to say.

A source is one file of this package with a subclass of Source in it, and one entry in the table
SOURCES of `caffepy.data.sources`. Data layers and `caffepy data show` find a source there by what a
path holds. A loader calls `take` on one thread and `decode` on many.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import DataError, reason
from caffepy.data.datum import NATIVE
from caffepy.data.decoder_process import Make, Part
from caffepy.data.decoders import File
from caffepy.proto.sniff import sniff

log = logging.getLogger(__name__)

Array = NDArray[Any]
State = dict[str, Any]

RAW = "bytes", "floats"
"""The results of `Source.stored` for images that are not image files."""


class Items(Protocol):
    """Some items of a source: an array of their numbers, (n,), or Records."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


SHOWN_NAMES = 5  # of records, and of errors


@dataclass
class Summary:
    """The output of `caffepy data show`.

    `records` counts all records; `shapes`, `stored` and `labels` count those of the first `seen`.
    `first` holds names, `bad` the errors of some of the `bad_records`, `facts` whatever else there
    is to say.
    """

    kind: str
    path: str
    size: int
    records: int = 0
    seen: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    bad_records: int = 0
    bad: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class ImageFiles(NamedTuple):
    """Items as other processes decode them, or a GPU: `make` of each file and None is an image,
    which has this place among the items and this label. `are_color`: the image is that of a file of
    three channels, as it is there or `resized` to one size. Other processes may read the files for
    themselves, as these `parts`, if there are some.
    """

    make: Make
    places: list[int]
    files: list[File]
    labels: list[int]
    are_color: bool
    resized: bool
    parts: Sequence[Part] = ()


class AnySource:
    """Base of all sources, also of those without items: all that `caffepy data show` needs."""

    kind: str  # its name in messages
    layer: ClassVar[str]  # the type of the data layer that reads it

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def holds(cls, path: str, kind: str) -> bool:
        """True if `path` is such a source; `kind` is what `sniff` says of it."""
        return kind == cls.kind

    @classmethod
    def open(cls, path: str, root: str = "") -> Self:
        """The source at `path`; `root` precedes the names of images in a list."""
        return cls(path)

    def summarize(self, info: Summary, first: int | None, images: int) -> list[tuple[Array, str]]:
        """Fill in `info`, of the `first` records if that is given; return up to `images` images
        with captions. Not needed of a Source, whose items are looked at one by one.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what is open."""


class Source(AnySource):
    """Base of the sources of items. `item` stands for an element of what `take` returns."""

    state_keys: ClassVar[frozenset[str]]  # the keys of `state` without which it cannot be restored
    mode = NATIVE  # how OpenCV decodes image files
    take_is_cheap = True  # `take` reads nothing; the work is in `decode`

    def __len__(self) -> int:
        """Number of items, counted if need be."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """Number of items; None if only reading all of them would tell."""
        return len(self)

    def extent(self) -> str:
        """Number of items, names of the first and the last, in words, without reading all: what
        machines compare that must have the same data. It does not move; any thread may call it.
        """
        raise NotImplementedError

    def peek(self) -> Any:
        """The next item, which is not consumed."""
        raise NotImplementedError

    def take(self, count: int) -> Items:
        """The next `count` items; the first follows the last."""
        raise NotImplementedError

    def skip(self, count: int) -> None:
        """Go past the next `count` items, to where `take` would be; read as little as possible."""
        self.take(count)

    def once(self, size: int) -> Iterator[Items]:
        """All items once, from the first on, up to `size` at a time."""
        raise NotImplementedError

    def decode(self, item: Any) -> tuple[Array, int]:
        """Image (C, H, W) and label. DataError names the item. Any thread may call it."""
        raise NotImplementedError

    def stored(self, item: Any, image: Array) -> str:
        """The type of the item's image file, "bytes" or "floats", for `caffepy data show`."""
        return RAW[image.dtype != np.uint8]

    def copy(self, items: Items, images: Array, labels: Array) -> Array:
        """Copy images of this shape and type that need no decoding, with their labels.

        Returns a mask (n,) of the items for which that was possible.
        """
        return np.zeros(len(items), np.bool_)

    def state_at(self, items: Items, i: int) -> State:
        """Return `state` before item i of `items`, where there is a `copy`; any thread may ask."""
        raise NotImplementedError

    def decode_jpegs(self, items: Items, places: Array, images: Array, labels: Array) -> Array:
        """Decode items of these places that are JPEG files of the images' shape, with their labels;
        return the places of the others. It needs Python's lock for moments only.
        """
        return places

    def decoder(self, items: Items) -> Callable[[int], tuple[Array, int]]:
        """Return `decode` of items by their place in `items`, which sources may prepare at once."""
        return lambda i: self.decode(items[i])

    def image_files(self, items: Items, places: Array) -> ImageFiles | None:
        """Return the items of these places that are image files, for other processes, which decode
        them as `decode` does; None if the source does not tell.
        """
        return None

    def key(self, item: Any) -> str:
        """The item's name within the source."""
        raise NotImplementedError

    def name(self, item: Any) -> str:
        """The item's name in messages; it identifies bad records, also in snapshots."""
        return f"{self.path}: {self.key(item)}"

    def place(self, items: Items, i: int) -> str:
        """The place in the source of item i of `items`, in words."""
        raise NotImplementedError

    def join(self, parts: Sequence[Any]) -> Items:
        """Concatenate items."""
        return np.concatenate(parts)

    def state(self) -> State:
        """The position of the next item: numbers and arrays."""
        raise NotImplementedError

    def set_state(self, state: State) -> None:
        """Go to a position that `state` returned."""
        raise NotImplementedError


def visits(count: int, seed: int | None, epoch: int) -> Array:
    """An epoch's order of the numbers 0 to count - 1: theirs, or shuffled by seed and epoch."""
    if seed is None:
        return np.arange(count)
    return np.random.Generator(np.random.MT19937([seed, epoch])).permutation(count)


class NumberedSource(Source):
    """Base of sources whose items are known by number. With a seed, each epoch shuffles them."""

    state_keys = frozenset({"epoch", "index"})

    def __init__(self, path: str, length: int, seed: int | None = None) -> None:
        self.path = path
        self._length = length
        self._seed = seed
        self._go(0, 0)

    def __len__(self) -> int:
        return self._length

    def _go(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = visits(self._length, self._seed, epoch)

    def peek(self) -> Any:
        return self._order[self._index]

    def take(self, count: int) -> Items:
        parts = []
        while count:
            parts.append(self._order[self._index : self._index + count])
            count -= len(parts[-1])
            self._index += len(parts[-1])
            if self._index == self._length:
                log.info("Restarting data prefetching from start.")
                self._go(self._epoch + 1, 0)
        return np.concatenate(parts)

    def skip(self, count: int) -> None:
        epochs, index = divmod(self._index + count, self._length)
        if epochs:
            log.info("Restarting data prefetching from start.")
            self._go(self._epoch + epochs, index)
        else:
            self._index = index

    def once(self, size: int) -> Iterator[Items]:
        for start in range(0, self._length, size):
            yield np.arange(start, min(start + size, self._length))

    def key(self, item: Any) -> str:
        return str(item)

    def place(self, items: Items, i: int) -> str:
        return f"number {items[i]}"

    def state(self) -> State:
        """Epoch, index in its order and, if shuffled, seed of the orders."""
        seed = {} if self._seed is None else {"seed": self._seed}
        return {"epoch": self._epoch, "index": self._index, **seed}

    def set_state(self, state: State) -> None:
        if self._seed is not None and "seed" in state:
            self._seed = int(state["seed"])
        self._go(int(state["epoch"]), int(state["index"]) % self._length)


def lines_of(path: str) -> Iterator[str]:
    """The lines of a list without their ends, whichever system wrote them, and without a byte order
    mark.

    Bytes that are not UTF-8 are kept as in names of files. DataError: no such file, or not a text.
    """
    if (kind := sniff(path)) == "a device":  # it may have no end
        raise DataError(f'source "{path}" is {kind}, not a list as UTF-8 text')
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            for line in file:
                if "\0" in line:
                    raise DataError(f'source "{path}" is {sniff(path)}, not a list as UTF-8 text')
                yield line.removesuffix("\n")
    except OSError as error:
        raise DataError(f'source "{path}" cannot be read: {reason(error)}') from None
    except ValueError as error:  # a NUL in the path
        raise DataError(f'source "{path}" cannot be read: {error}') from None


def first_words(path: str, count: int) -> list[str]:
    """The first words of a list, fewer if it has fewer."""
    return list(islice((word for line in lines_of(path) for word in line.split()), count))
