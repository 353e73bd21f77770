"""Image files named by a list of `path label` lines."""

import logging
import re

from caffepy.core.errors import ConfigError, DataError, reason
from caffepy.core.paths import locate
from caffepy.data.datum import COLOR, GRAY, Array, decode_image
from caffepy.data.loader import SequentialLoader, State
from caffepy.data.order import visits
from caffepy.data.sources.lists import lines_of
from caffepy.data.transformer import Transformer
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import ImageDataParameter

log = logging.getLogger(__name__)

Entry = tuple[str, int]

LABEL = re.compile(
    r"\s*([+-]?)0*([0-9]{1,12})", re.ASCII
)  # more digits would not change what is said of it


def read_list(path: str, *, every_line: bool = False) -> list[Entry]:
    """(image path, label) of each line, split at the last blank; a label is the integer that it
    starts with, else 0.

    A line without a blank is both. `every_line` gives blank lines an entry without a path. A
    warning tells of labels that are more than an integer, or none. DataError: no such file, fields
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
            raise DataError(
                f'{path}:{number}: "{line[:80]}" is not an image path, a blank and a label'
            )
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
    """What to put before the image names of the list `path`: `folder` as given or beside the file
    `beside`.

    Without a folder it is nothing, or the list's own folder if the image `first` lies only there.
    """
    return locate(folder, beside) if folder else locate(first, path).removesuffix(first)


def unreadable(name: str, error: OSError, folder: str) -> DataError:
    """That an image cannot be read; with a hint if its root folder, put before names as it is,
    lacks the separator.
    """
    hint = (
        f'; root_folder "{folder}" does not end in "/"'
        if folder and not folder.endswith("/")
        else ""
    )
    return DataError(f"{name} cannot be read: {reason(error)}{hint}")


class ImageLoader(SequentialLoader):
    """Batches of image files: decoded in colour or grey, resized (bilinear) if new_height and
    new_width say so.
    """

    position = frozenset({"epoch", "index"})

    def __init__(
        self,
        param: ImageDataParameter,
        transformer: Transformer,
        device: Device,
        beside: str | None = None,
    ) -> None:
        super().__init__(transformer, param.batch_size)
        if (param.new_height > 0) != (param.new_width > 0):
            raise ConfigError("new_height and new_width must both be given or neither")
        self._param = param
        self._path = locate(param.source, beside)
        log.info("Opening file %s", self._path)
        self._entries = read_list(self._path)
        self.length = len(self._entries)
        self._root = find_root(param.root_folder, self._entries[0][0], self._path, beside)
        self._seed = device.draw_seed() if param.shuffle else None
        if param.shuffle:
            log.info("Shuffling data")
        log.info("A total of %d images.", len(self._entries))
        self._go(0, self._skip(device))

    def _skip(self, device: Device) -> int:
        """The number of images that the first epoch leaves out."""
        if not self._param.rand_skip:
            return 0
        skip = device.draw_seed() % self._param.rand_skip
        log.info("Skipping first %d data points.", skip)
        if skip >= len(self._entries):
            raise DataError(
                f"{self._path} lists {len(self._entries)} images, not enough to skip {skip}"
            )
        return skip

    def _go(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = visits(len(self._entries), self._seed, epoch)

    def peek(self) -> Array:
        """The next image (C, H, W), which is not consumed."""
        return self.decode(self._entries[self._order[self._index]])[0]

    def take(self, count: int) -> list[Entry]:
        """The next entries."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Entry:
        entry = self._entries[int(self._order[self._index])]
        self._index += 1
        if self._index == len(self._entries):
            log.info("Restarting data prefetching from start.")
            self._go(self._epoch + 1, 0)
        return entry

    def decode(self, item: Entry) -> tuple[Array, int]:
        """The image and the label of an entry."""
        size = (self._param.new_width, self._param.new_height) if self._param.new_width else None
        try:
            with open(
                self._root + item[0], "rb", buffering=0
            ) as file:  # fewer calls that give up Python's lock
                return decode_image(
                    file.read(), COLOR if self._param.is_color else GRAY, size
                ), item[1]
        except OSError as error:
            raise unreadable(self.name(item), error, self._param.root_folder) from None
        except DataError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None

    def name(self, item: Entry) -> str:
        """An entry's name for messages."""
        return f"{self._path}: {self._root}{item[0]}"

    def place(self, item: Entry) -> str:
        """The line of the list that an entry is of."""
        return f"line {1 + self._entries.index(item)}"

    def state(self) -> State:
        """Epoch, number in its order, seed of the orders, and the transformer's stream."""
        seed = {} if self._seed is None else {"seed": self._seed}
        return {
            "epoch": self._epoch,
            "index": self._index,
            **seed,
            **self.transformer.state(),
            **self.bad.state(),
        }

    def seek(self, state: State) -> None:
        """Go to the position in `state`."""
        if self._seed is not None and "seed" in state:
            self._seed = int(state["seed"])
        self._go(int(state["epoch"]), int(state["index"]) % len(self._entries))
