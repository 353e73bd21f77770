"""LMDB, whose records are read in place: the file is mapped and its pages are checked."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import lmdb

from caffepy.core.errors import DataError, reason
from caffepy.data.decoder_process import Part
from caffepy.data.sources.base import Array
from caffepy.data.sources.databases import Database, Records, printable
from caffepy.data.sources.lmdb_pages import Pages

log = logging.getLogger(__name__)

READ_AHEAD = 1 << 27  # bytes of the file that the system is asked to read ahead


class LMDB(Database):
    """The unnamed database of an LMDB, a folder or its data.mdb: read-only, without locks, hence
    also on read-only media.
    """

    kind = "LMDB"
    errors = (lmdb.Error,)

    def __init__(self, path: str) -> None:
        file = path if os.path.isfile(path) else os.path.join(path, "data.mdb")
        self._advised = 0  # the place in the file up to which the system reads ahead
        self._skips = False  # other machines take the records in between
        try:
            self._pages = Pages(path, file)
            super().__init__(path, file, _open, _cursor)
        except (lmdb.Error, OSError) as error:
            hint = ""
            if "already open" in str(error):
                hint = "; close the one that the script has opened first"
            why = reason(error) if isinstance(error, OSError) else error
            raise DataError(f"{path} cannot be read as an LMDB: {why}{hint}") from None

    def __len__(self) -> int:
        count, size = int(self._database.stat()["entries"]), self._pages.size
        if not 0 < count <= size:
            raise DataError(f"{self.path} is damaged: it claims {count} records in {size} bytes")
        return count

    def extent(self) -> str:
        self._pages.check_unchanged()
        first, last = map(printable, self._pages.ends())
        return f"{len(self):,} records, from {first} to {last}"

    def once(self, size: int) -> Iterator[Records]:
        self.seek(0)
        self._endless = False
        try:
            for start in range(0, len(self), size):
                yield self.take(min(size, len(self) - start))
        finally:
            self._endless = True

    def take(self, count: int) -> Records:
        """The next `count` records, in the file where that has no other kind of nodes."""
        parts = list(self._walk(count))
        if missing := count - sum(map(len, parts)):
            return Records.joined([*parts, super().take(missing)])
        records = Records.joined(parts)
        starts, sizes = records.rows[:, 2], records.rows[:, 3]
        if self._skips:
            first = int(starts.min())
            self._advise(first, min(READ_AHEAD, int((starts + sizes).max()) - first))
        else:
            self._read_ahead(int(starts[-1]))
        return records

    def skip(self, count: int) -> None:
        """Go past records by their keys alone; from now on the system is not asked to read those
        that `take` does not return.
        """
        self._skips = True
        super().skip(count - sum(map(len, self._walk(count))))

    def parts_of_file(self, content: Array, spans: Sequence[Sequence[int]]) -> Sequence[Part]:
        if content is not self._pages.bytes:
            return ()
        where = self._pages.file, *self._pages.identity
        return [Part(*where, start, size) for start, size in spans]

    def _walk(self, count: int) -> Iterator[Records]:
        """Go past the next `count` records, or those of them before the first that is not in the
        file as its number says; yield them by their places.
        """
        self._pages.check_unchanged()
        while count:
            part = self._in_file(self._index, count)
            # after `set_state` the number may not be that of the key
            if not part or part[0][0] != self.peek()[0]:
                return
            count -= len(part)
            self._index += len(part) - 1
            with self._described(f" near record {self._index}"):
                if not self._cursor.set_key(part[-1][0]):
                    place = f"near record {self._index}"
                    raise DataError(f"{self.path} is damaged {place}: its keys are out of order")
                self._pass()
            yield part

    def _in_file(self, index: int, most: int) -> Records:
        """Up to `most` records from number `index` on, by their places in the file."""
        return Records(self._pages.bytes, self._pages.places(index)[:most])

    def _read_ahead(self, place: int) -> None:
        """Ask the system to read what probably comes after this place in the file."""
        is_near = READ_AHEAD // 2 <= self._advised - place <= READ_AHEAD
        if not is_near:
            self._advise(place, READ_AHEAD)
            self._advised = place + READ_AHEAD

    def _advise(self, place: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # the file was removed; what is mapped can still be read
                descriptor = os.open(self._pages.file, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    # LMDB crashes on damaged pages: check a leaf before the cursor reaches it
    def _first(self) -> None:
        self._pages.check_unchanged()
        if not self._pages.records and not self._pages.whole:
            self._pages.check_more()
        if not self._cursor.first():
            raise DataError(f"{self.path} is an LMDB without records")

    def _next(self) -> bool:
        if self._index >= self._pages.records and not self._pages.whole:
            self._pages.check_more()
        return bool(self._cursor.next())

    def _find(self, key: bytes, index: int) -> bool:
        self._pages.check_unchanged()
        here = self._in_file(max(index, 0), 1)
        if not here or here[0][0] != key:
            while not self._pages.whole:
                self._pages.check_more()
        return bool(self._cursor.set_key(key))


def _open(file: str) -> Any:
    return lmdb.open(os.fsencode(file), subdir=False, readonly=True, lock=False, create=False)


def _cursor(database: Any) -> Any:
    return database.begin(buffers=True).cursor()
