"""Databases: records of a key and a Datum, read in the order of their keys.

A process has one open handle a database file: LMDB and LevelDB both refuse to open it twice.
"""

import logging
import os
import sys
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, overload
from weakref import finalize

import numpy as np

from caffepy.core.errors import DataError
from caffepy.data import datum_fields, jpegs
from caffepy.data.datum import (
    COLOR,
    GRAY,
    decode,
    decode_file,
    encoding_of,
    head_of,
    image_file,
    opened,
    planes,
)
from caffepy.data.decoder_process import Part
from caffepy.data.decoders import File
from caffepy.data.sources.base import Array, ImageFiles, Items, Source, State

log = logging.getLogger(__name__)

LARGE = 1 << 15  # bytes of a raw image that take longer to copy than to find by Python
MANY = 4096
"""Records that Python looks through, 5 us each, before kernels are loaded for that, 0.1 s."""

_records = 0  # of those

Record = tuple[memoryview | bytes, memoryview | bytes]


class Records(Sequence[Record]):
    """Keys and values by their places in `content`.

    `rows` (n, 5): start and size of the key, start and size of the value, number of the record.
    """

    def __init__(self, content: Array, rows: Array) -> None:
        self.content = content
        self.rows = rows

    @classmethod
    def copied(cls, records: Sequence[Record], numbers: Sequence[int]) -> "Records":
        """Copies of these records."""
        sizes = np.array([[len(key), len(value)] for key, value in records], np.int64)
        sizes = sizes.reshape(-1, 2)
        starts = np.cumsum(sizes).reshape(-1, 2) - sizes
        content = np.frombuffer(b"".join(part for record in records for part in record), np.uint8)
        places = np.stack([starts, sizes], 2).reshape(-1, 4)
        return cls(content, np.column_stack([places, np.asarray(numbers, np.int64)]))

    @classmethod
    def joined(cls, parts: Sequence["Records"]) -> "Records":
        """Several Records as one; they are copied unless they lie in the same content."""
        if len(parts) == 1:
            return parts[0]
        if all(part.content is parts[0].content for part in parts):
            return cls(parts[0].content, np.concatenate([part.rows for part in parts]))
        numbers = [number for part in parts for number in part.rows[:, 4]]
        return cls.copied([record for part in parts for record in part], numbers)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Record: ...
    @overload
    def __getitem__(self, i: slice | list[int]) -> "Records": ...
    def __getitem__(self, i: int | slice | list[int]) -> "Record | Records":
        if isinstance(i, (slice, list)):
            return Records(self.content, self.rows[i])
        key, key_size, value, size, _ = map(int, self.rows[i])
        return self.content[key : key + key_size].data, self.content[value : value + size].data


class _Handle:
    """An open database, and the cursors of its users, which must go before it is closed."""

    def __init__(self, identity: tuple[int, int], database: Any) -> None:
        self.identity = identity
        self.database = database
        self.cursors: dict[int, Any] = {}


_open: dict[tuple[int, int], _Handle] = {}
_open_lock = threading.Lock()
# Cursors of databases that were collected without being closed. The garbage collector may run while
# any thread holds the lock, so it must not wait for it: it queues here.
_forgotten: deque[tuple[_Handle, int]] = deque()


def _forget(handle: _Handle, cursor: int) -> None:
    """Release a cursor now if the lock is free, else when the next database is opened."""
    _forgotten.append((handle, cursor))
    if _open_lock.acquire(blocking=False):
        try:
            _release_forgotten()
        finally:
            _open_lock.release()


def _release_forgotten() -> None:
    while _forgotten:
        _release(*_forgotten.popleft())


def _release(handle: _Handle, cursor: int) -> None:
    del handle.cursors[cursor]
    if not handle.cursors:
        del _open[handle.identity]
        handle.database.close()


class Database(Source):
    """Base of the databases: a cursor of its own in a handle that others may share. A record is
    valid until `close`.

    A subclass moves the cursor: `_first`, `_next`, `_find`.
    """

    layer = "Data"
    state_keys = frozenset({"record", "key"})
    errors: tuple[type[Exception], ...] = ()  # what the library raises for a damaged database
    _endless = True  # says when it starts again

    def __init__(
        self, path: str, file: str, opener: Callable[[str], Any], cursor_of: Callable[[Any], Any]
    ) -> None:
        status = os.stat(file)
        identity = status.st_dev, status.st_ino
        with _open_lock:
            _release_forgotten()
            handle = _open.get(identity) or _Handle(identity, opener(file))
            self._database, self._cursor = handle.database, cursor_of(handle.database)
            self._use = handle, id(self._cursor)
            handle.cursors[id(self._cursor)] = self._cursor
            _open[identity] = handle
        self._finalizer = finalize(self, _forget, *self._use)
        self._finalizer.atexit = False  # a thread may still read, and the system closes files
        self.path = path
        self._index = 0
        self._has_warned = False
        try:
            self._first()
        except BaseException:
            self.close()
            raise
        log.info("Opened %s %s", self.kind.lower(), path)

    def close(self) -> None:
        """Release the database; no record may be used any more."""
        if self._finalizer.detach():
            del self._database, self._cursor
            with _open_lock:
                _release(*self._use)

    def once(self, size: int) -> Iterator[Records]:
        self.seek(0)
        with self._described():
            index, there = 0, True
            while there:
                records = [self._item()]
                while (there := self._next()) and len(records) < size:
                    records.append(self._item())
                yield Records.copied(records, range(index, index + len(records)))
                index += len(records)
            self._first()

    def read(self) -> Record:
        """Key and value of the next record; the first follows the last."""
        with self._described(f" near record {self._index}"):
            record = self._item()
            self._pass()
        return record

    def _pass(self) -> None:
        """Go past the next record."""
        self._index += 1
        if not self._next():
            if self._endless:
                log.info("Restarting data prefetching from start.")
            self._first()
            self._index = 0

    def take(self, count: int) -> Records:
        numbered = [(self._index, self.read()) for _ in range(count)]
        return Records.copied([record for _, record in numbered], [i for i, _ in numbered])

    def skip(self, count: int) -> None:
        for _ in range(count):
            with self._described(f" near record {self._index}"):
                self._pass()

    def peek(self) -> Record:
        with self._described(f" near record {self._index}"):
            return self._item()

    def seek(self, index: int, key: bytes | None = None) -> None:
        """Go to record `index`, directly if its key is given; without such a key, by number."""
        with self._described(f" before record {index}"):
            if key is not None:
                if self._find(key, index):
                    self._index = index
                    return
                gone = f"{self.path} no longer holds record {printable(key)}"
                log.warning("%s; going on at record %d", gone, index)
            self._first()
            self._index = index % len(self)
            for _ in range(self._index):
                if not self._next():
                    claim = f"the {len(self)} that it claims"
                    raise DataError(f"{self.path} is damaged: it has fewer records than {claim}")

    def decode(self, item: Record) -> tuple[Array, int]:
        try:
            image, label, encoded = decode(item[1], self.mode)
        except DataError as error:
            raise DataError(f"{self.name(item)}: {error.message}") from None
        if not encoded and not self._has_warned and self.mode in (COLOR, GRAY):
            self._has_warned = True
            log.error("force_color and force_gray only for encoded datum")
        return image, label

    def stored(self, item: Record, image: Array) -> str:
        """The type of the image file in the Datum, or the type of its values."""
        content = image_file(item[1])
        return encoding_of(content) if content is not None else super().stored(item, image)

    def copy(self, items: Items, images: Array, labels: Array) -> Array:
        """Copy the images of raw Datums of this shape, without parsing them."""
        if images.dtype != np.uint8:
            return super().copy(items, images, labels)
        assert isinstance(items, Records)
        loops = _loops(0 if images[0].nbytes >= LARGE else len(items))
        head = head_of(images.shape[1:])
        done: Array = loops.copy_images(items.content, items.rows, head, images, labels)
        return done

    def decode_jpegs(self, items: Items, places: Array, images: Array, labels: Array) -> Array:
        kernels = jpegs.kernels(len(places)) if images.dtype == np.uint8 else None
        if kernels is None:
            return places
        assert isinstance(items, Records)
        spans, found = _loops(len(items)).find_encoded(items.content, items.rows)
        done: Array = kernels.decode_files(items.content, spans[places], places, self.mode, images)
        labels[places[done]] = found[places[done]]
        return places[~done]

    def decoder(self, items: Items) -> Callable[[int], tuple[Array, int]]:
        """Return `decode` of records by their place in `items`, whose files are found at once."""
        content, spans, labels = _encoded(items)

        def decode_one(i: int) -> tuple[Array, int]:
            start, size = spans[i]
            with suppress(DataError):  # `decode` names the record
                image = opened(content[start : start + size], self.mode)
                if image is not None and image.dtype == np.uint8:
                    return planes(image), labels[i]
            return self.decode(items[i])

        return decode_one

    def image_files(self, items: Items, places: Array) -> ImageFiles:
        content, spans, labels = _encoded(items)
        chosen = [i for i in places.tolist() if spans[i][1]]
        where = [spans[i] for i in chosen]
        files: list[File] = [content[at : at + size].data for at, size in where]
        parts = self.parts_of_file(content, where)
        make = partial(decode_file, self.mode, None)
        labels, are_color = [labels[i] for i in chosen], self.mode != GRAY
        return ImageFiles(make, chosen, files, labels, are_color, False, parts)

    def parts_of_file(self, content: Array, spans: Sequence[Sequence[int]]) -> Sequence[Part]:
        """Return these spans, start and size, of the content of Records as parts of a file; none if
        they lie elsewhere.
        """
        return ()

    def key(self, item: Record) -> str:
        """The key, as text."""
        return printable(item[0])[1:-1]

    def name(self, item: Record) -> str:
        return f"{self.path}: record {printable(item[0])}"

    def place(self, items: Items, i: int) -> str:
        assert isinstance(items, Records)
        return f"number {items.rows[i, 4]}"

    def join(self, parts: Sequence[Any]) -> Records:
        return Records.joined(parts)

    def state(self) -> State:
        return _position(self._index, self.peek())

    def state_at(self, items: Items, i: int) -> State:
        assert isinstance(items, Records)
        return _position(int(items.rows[i, 4]), items[i])

    def set_state(self, state: State) -> None:
        self.seek(int(state["record"]), np.asarray(state["key"], np.uint8).tobytes())

    @contextmanager
    def _described(self, where: str = "") -> Iterator[None]:
        """Turn errors of the library into a DataError."""
        try:
            yield
        except self.errors as error:
            raise DataError(f"{self.path} is damaged{where}: {self._text_of(error)}") from None

    def _text_of(self, error: Exception) -> str:
        return text_of(error)

    def _item(self) -> Record:
        item: Record = self._cursor.item()
        return item

    @abstractmethod
    def _first(self) -> None:
        """Go to the first record; DataError if there is none."""

    @abstractmethod
    def _next(self) -> bool:
        """Go to the next record; false at the end."""

    @abstractmethod
    def _find(self, key: bytes, index: int) -> bool:
        """Go to the record of this key, probably number `index`; false if there is none."""


def _position(index: int, record: Record) -> State:
    return {"record": index, "key": np.frombuffer(bytes(record[0]), np.uint8)}


def _encoded(items: Items) -> tuple[Array, list[list[int]], list[int]]:
    """The bytes of records; start and size of the image file in each, 0 if it is to be parsed; the
    labels.
    """
    assert isinstance(items, Records)
    spans, labels = _loops(len(items)).find_encoded(items.content, items.rows)
    return items.content, spans.tolist(), labels.tolist()


def _loops(records: int) -> Any:
    """The module with loops over serialized Datums: kernels where the process has others, or so
    many records came before that their load is worth it.
    """
    global _records
    _records += records
    if "caffepy.ops.cpu" in sys.modules or _records >= MANY:
        from caffepy.data import datum_kernels

        return datum_kernels
    return datum_fields


def text_of(error: Exception) -> str:
    """The message of a library's error; plyvel's are bytes."""
    what = error.args[0] if error.args else ""
    return what.decode(errors="replace") if isinstance(what, bytes) else str(error)


def printable(key: bytes | memoryview) -> str:
    """A key in quotes, for messages; what a terminal would not show is escaped."""
    try:
        text = repr(bytes(key).decode())
    except UnicodeDecodeError:
        text = repr(bytes(key))[1:]
    return f'"{text[1:-1]}"'
