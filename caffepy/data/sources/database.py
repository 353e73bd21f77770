"""Databases of records, read in key order and around again. What a path holds decides how it is
opened.
"""

import logging
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, overload
from weakref import finalize

import lmdb
import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import DataError
from caffepy.core.registry import nearest
from caffepy.data.sources.lmdb_pages import Pages

log = logging.getLogger(__name__)

AHEAD = 1 << 27  # bytes of a file that are asked for ahead of time
LINKED = "caffepy-leveldb-"
OWN_FILES = ("LOCK", "LOG", "LOG.old")  # of a process that has a LevelDB open

Array = NDArray[Any]
Record = tuple[memoryview | bytes, memoryview | bytes]


class Records(Sequence[Record]):
    """Records by their places in bytes: rows of key start, key size, value start, value size."""

    def __init__(self, content: Array, rows: Array) -> None:
        self.content = content
        self.rows = rows

    @classmethod
    def joined(cls, records: Sequence[Record]) -> "Records":
        """Copies of these records, one behind the other."""
        sizes = np.array([[len(key), len(value)] for key, value in records], np.int64)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        content = np.frombuffer(b"".join(part for record in records for part in record), np.uint8)
        return cls(content, np.stack([ends - sizes, sizes], 2).reshape(-1, 4))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Record: ...
    @overload
    def __getitem__(self, i: slice) -> "Records": ...
    def __getitem__(self, i: int | slice) -> "Record | Records":
        if isinstance(i, slice):
            return Records(self.content, self.rows[i])
        key, key_size, value, size = map(int, self.rows[i])
        return self.content[key : key + key_size].data, self.content[value : value + size].data


class Source:
    """The records of one database. Reading wraps at the end; a record is valid until `close`."""

    kind = ""
    in_place = False  # `take` reads no record, but says where each lies
    errors: tuple[type[Exception], ...] = ()  # what the library raises when the database is damaged

    def __init__(self, path: str, use: "_Use") -> None:
        self.path = path
        self._use = use
        self._database, self._cursor = use.handle.database, use.cursor
        self._finalizer = finalize(self, _forget, use)
        self._index = 0
        try:
            self._first()
        except BaseException:
            self.close()
            raise
        log.info("Opened %s %s", self.kind.lower(), path)

    def __len__(self) -> int:
        """Number of records."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """Number of records, if that is known without reading them."""
        return len(self)

    def once(self, size: int) -> Iterator[Records]:
        """All records, the first one first, so many at a time."""
        self.seek(0)
        with self._told():
            there = True
            while there:
                records = [self._item()]
                while (there := self._next()) and len(records) < size:
                    records.append(self._item())
                yield Records.joined(records)
            self._first()

    def read(self) -> Record:
        """Key and value of the next record; the last one is followed by the first."""
        with self._told(f" near record {self._index}"):
            record = self._item()
            self._index += 1
            if not self._next():
                log.info("Restarting data prefetching from start.")
                self._first()
                self._index = 0
        return record

    def take(self, count: int) -> Records:
        """The next `count` records, as `read` would give them."""
        return Records.joined([self.read() for _ in range(count)])

    def peek(self) -> Record:
        """Key and value of the record that `read` will give."""
        with self._told(f" near record {self._index}"):
            return self._item()

    @property
    def position(self) -> tuple[int, bytes]:
        """Number and key of the record that `read` will give."""
        return self._index, bytes(self.peek()[0])

    def seek(self, index: int, key: bytes | None = None) -> None:
        """Go to record `index`, directly if its key is given; a key that is not there is looked for
        by number.
        """
        with self._told(f" before record {index}"):
            if key is not None and self._find(key, index):
                self._index = index
                return
            if key is not None:
                log.warning(
                    "%s no longer holds record %s; going on at record %d",
                    self.path,
                    printable(key),
                    index,
                )
            self._first()
            self._index = index % len(self)
            for _ in range(self._index):
                if not self._next():
                    raise DataError(
                        f"{self.path} is damaged: it has fewer records than the {len(self)} that it claims"
                    )

    def close(self) -> None:
        """Release the database; no record may be used any more."""
        if self._finalizer.detach():
            del self._database, self._cursor
            _release(self._use)

    @contextmanager
    def _told(self, where: str = "") -> Iterator[None]:
        """What goes wrong in the block becomes a DataError."""
        try:
            yield
        except self.errors as error:
            raise DataError(f"{self.path} is damaged{where}: {self._said(error)}") from None

    def _said(self, error: Exception) -> str:
        """What went wrong, in the user's names."""
        return said(error)

    def _item(self) -> Record:
        raise NotImplementedError

    def _first(self) -> None:
        raise NotImplementedError

    def _next(self) -> bool:
        raise NotImplementedError

    def _find(self, key: bytes, index: int) -> bool:
        """Go to the record of this key, whose number most probably is `index`; whether there is
        one.
        """
        raise NotImplementedError


class LMDB(Source):
    """The unnamed database of an LMDB environment: read-only, without locks, hence also on
    read-only media.
    """

    kind = "LMDB"
    in_place = True
    errors = (lmdb.Error,)

    def __init__(self, path: str, file: str) -> None:
        try:
            self._file = file
            self._advised = 0  # up to this place the system was asked to read ahead
            self._pages = Pages(path, file)
            super().__init__(
                path,
                _acquire(file, _open_lmdb, lambda database: database.begin(buffers=True).cursor()),
            )
        except (lmdb.Error, OSError) as error:
            hint = (
                "; close the one that the script has opened first"
                if "already open" in str(error)
                else ""
            )
            raise DataError(f"{path} cannot be read as an LMDB: {error}{hint}") from None

    def __len__(self) -> int:
        """Number of records."""
        count, size = int(self._database.stat()["entries"]), os.path.getsize(self._file)
        if not 0 < count <= size:
            raise DataError(f"{self.path} is damaged: it claims {count} records in {size} bytes")
        return count

    def once(self, size: int) -> Iterator[Records]:
        """All records, the first one first, so many at a time."""
        self.seek(0)
        for lo in range(0, len(self), size):
            yield self.take(min(size, len(self) - lo))

    def take(self, count: int) -> Records:
        """The next `count` records, as `read` would give them, in the file where they are plain."""
        runs: list[Records] = []
        missing = count
        while missing:
            run = self._run(self._index, missing)
            if (
                not run or run[0][0] != self.peek()[0]
            ):  # the number and the key of a state may no longer agree
                return Records.joined([*chain(*runs), *(self.read() for _ in range(missing))])
            runs.append(run)
            missing -= len(run)
            self._pass(run)
        self._read_ahead(int(runs[-1].rows[-1, 2]))
        return Records(self._pages.bytes, np.concatenate([run.rows for run in runs]))

    def _run(self, index: int, most: int) -> Records:
        """Some of the records from this one on."""
        return Records(self._pages.bytes, self._pages.places(index)[:most])

    def _pass(self, run: Records) -> None:
        """Go on as if these records had been read."""
        self._index += len(run) - 1
        with self._told(f" near record {self._index}"):
            found = self._cursor.set_key(run[-1][0])
        if not found:
            raise DataError(
                f"{self.path} is damaged near record {self._index}: its keys are out of order"
            )
        self.read()

    def _read_ahead(self, place: int) -> None:
        """Let the system read from the disk what most probably comes after this place in the file."""
        if hasattr(os, "posix_fadvise") and not AHEAD // 2 <= self._advised - place <= AHEAD:
            descriptor = os.open(self._file, os.O_RDONLY)
            os.posix_fadvise(descriptor, place, AHEAD, os.POSIX_FADV_WILLNEED)
            os.close(descriptor)
            self._advised = place + AHEAD

    def _item(self) -> Record:
        key, value = self._cursor.item()
        return key, value

    def _first(self) -> None:
        if not self._pages.records and not self._pages.whole:
            self._pages.check_more()
        if not self._cursor.first():
            raise DataError(f"{self.path} is an LMDB without records")

    def _next(self) -> bool:
        if self._index >= self._pages.records and not self._pages.whole:
            self._pages.check_more()
        return bool(self._cursor.next())

    def _find(self, key: bytes, index: int) -> bool:
        here = self._run(max(index, 0), 1)
        if not here or here[0][0] != key:
            while not self._pages.whole:
                self._pages.check_more()
        return bool(self._cursor.set_key(key))


class LevelDB(Source):
    """A LevelDB folder, which is only read: hence also on read-only media, and by several processes
    at once.
    """

    kind = "LevelDB"

    def __init__(self, path: str) -> None:
        plyvel = import_plyvel(f"{path} is a LevelDB; reading one")
        self.errors = (plyvel.Error,)
        self.path = path
        try:
            super().__init__(
                path,
                _acquire(
                    path,
                    _LinkedLevelDB,
                    lambda database: database.raw_iterator(verify_checksums=True),
                ),
            )
        except (plyvel.Error, OSError) as error:
            raise DataError(f"{path} cannot be read as a LevelDB: {self._said(error)}") from None

    @property
    def length(self) -> int | None:
        """Not known."""
        return None

    def __len__(self) -> int:
        """Number of records, counted by reading all of them."""
        try:
            return self._count()
        except self.errors as error:
            told = self._said(error)
        raise DataError(
            f"{self.path} is damaged: {told}"
        )  # the other error is gone, and with it the iterator it held

    def _count(self) -> int:
        with closing(self._database.iterator(include_value=False)) as keys:
            return sum(1 for _ in keys)

    def _said(self, error: Exception) -> str:
        return re.sub(
            f"{re.escape(tempfile.gettempdir())}/{LINKED}\\w+", lambda _: self.path, said(error)
        )

    def _item(self) -> Record:
        key, value = self._cursor.item()
        return key, value

    def _first(self) -> None:
        self._cursor.seek_to_first()
        if not self._cursor.valid():
            raise DataError(f"{self.path} is a LevelDB without records")

    def _next(self) -> bool:
        self._cursor.next()
        return bool(self._cursor.valid())

    def _find(self, key: bytes, index: int) -> bool:
        self._cursor.seek(key)
        return bool(self._cursor.valid() and self._cursor.key() == key)


class _LinkedLevelDB:
    """A LevelDB by way of links to its files in a folder of our own: LevelDB locks and rewrites
    what it opens.
    """

    def __init__(self, path: str) -> None:
        import plyvel

        folder = tempfile.mkdtemp(prefix=LINKED)
        self._finalizer = finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for name in os.listdir(path):
            if name not in OWN_FILES:
                os.symlink(os.path.join(os.path.abspath(path), name), os.path.join(folder, name))
        try:
            self._database = plyvel.DB(
                folder, paranoid_checks=True
            )  # else what is damaged is left out silently
        except plyvel.Error:
            self._finalizer()
            raise
        self.iterator, self.raw_iterator = self._database.iterator, self._database.raw_iterator

    def close(self) -> None:
        """Release the files."""
        del self.iterator, self.raw_iterator
        self._database.close()
        self._finalizer()


class _Handle:
    """The process's one open database of a file; both libraries refuse to open it twice."""

    def __init__(self, identity: tuple[int, int], database: Any) -> None:
        self.identity = identity
        self.database = database
        self.users = 0


class _Use:
    """One Source's part in a handle, with its cursor, which must go before the database is closed."""

    def __init__(self, handle: _Handle, cursor: Any) -> None:
        self.handle = handle
        self.cursor = cursor


_open: dict[tuple[int, int], _Handle] = {}
_open_lock = threading.Lock()
_forgotten: deque[_Use] = (
    deque()
)  # of sources that were not closed; garbage collection must not wait for the lock


def _acquire(path: str, opener: Callable[[str], Any], cursor_of: Callable[[Any], Any]) -> _Use:
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    with _open_lock:
        _give_up_forgotten()
        handle = _open.get(identity) or _Handle(identity, opener(path))
        use = _Use(handle, cursor_of(handle.database))
        handle.users += 1
        _open[identity] = handle
        return use


def _release(use: _Use) -> None:
    with _open_lock:
        _give_up(use)


def _forget(use: _Use) -> None:
    """Release what garbage collection has found: at once, so that others may open the file, or
    where this thread or another has the lock, when the next file is opened."""
    _forgotten.append(use)
    if _open_lock.acquire(blocking=False):
        try:
            _give_up_forgotten()
        finally:
            _open_lock.release()


def _give_up_forgotten() -> None:
    while _forgotten:
        _give_up(_forgotten.popleft())


def _give_up(use: _Use) -> None:
    handle = use.handle
    use.cursor = None
    handle.users -= 1
    if not handle.users:
        del _open[handle.identity]
        handle.database.close()


def _open_lmdb(file: str) -> Any:
    return lmdb.open(file, subdir=False, readonly=True, lock=False, create=False)


def import_plyvel(purpose: str) -> Any:
    """The module plyvel; DataError, which starts with `purpose`, if it is not installed."""
    try:
        import plyvel
    except ImportError:
        raise DataError(
            f"{purpose} needs plyvel: pip install caffepy[leveldb], or use an LMDB"
        ) from None
    return plyvel


def said(error: Exception) -> str:
    """What an error of a library says; plyvel's say it in bytes."""
    what = error.args[0] if error.args else ""
    return what.decode(errors="replace") if isinstance(what, bytes) else str(error)


def printable(key: bytes | memoryview) -> str:
    """A key as it stands in messages, what a terminal would not show in escapes."""
    try:
        text = repr(bytes(key).decode())
    except UnicodeDecodeError:
        text = repr(bytes(key))[1:]
    return f'"{text[1:-1]}"'


def _look(path: str) -> str:
    """The file data.mdb if `path` is an LMDB, "" if it is a LevelDB; DataError says what else it
    is.
    """
    if not os.path.exists(path):
        folder, name = os.path.split(path.rstrip(os.sep))
        hint = nearest(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else ""
        beside = "" if os.path.isabs(path) else f" (the working directory is {os.getcwd()})"
        raise DataError(f'source "{path}" does not exist{hint}{beside}')
    if os.path.isfile(path):
        return path
    if os.path.exists(file := os.path.join(path, "data.mdb")):
        return file
    if os.path.exists(os.path.join(path, "CURRENT")):
        return ""
    raise DataError(
        f"{path} is no database: the folder holds neither data.mdb (LMDB) nor CURRENT (LevelDB)"
    )


_warned: set[tuple[str, str]] = set()


def open_source(path: str, backend: str | None = None) -> Source:
    """Open the database at `path`, a folder or a data.mdb, by what it is; warn once if `backend`
    says otherwise.

    DataError: nothing there, not a database, truncated, without records, or a LevelDB while plyvel
    is missing.
    """
    if not path:
        raise DataError("no source is given; name a database: data_param { source: ... }")
    file = _look(path)
    is_kind = "LMDB" if file else "LEVELDB"
    source = LMDB(path, file) if file else LevelDB(path)
    if backend is not None and backend != is_kind and (path, backend) not in _warned:
        _warned.add((path, backend))
        log.warning("%s is opened as the %s it is; write backend: %s", path, source.kind, is_kind)
    return source
