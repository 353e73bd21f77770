"""LevelDB, read by way of plyvel, which is an extra (`caffepy[leveldb]`)."""

import os
import re
import tempfile
from contextlib import ExitStack, closing
from typing import Any
from weakref import finalize

from caffepy.core.errors import DataError, install
from caffepy.core.files import temporary
from caffepy.data.sources.databases import Database, printable, text_of

LINKED = "caffepy-leveldb"
OWN_FILES = ("LOCK", "LOG", "LOG.old")  # of a process that has a LevelDB open


class LevelDB(Database):
    """A LevelDB folder, read-only: also on read-only media, and by several processes at once."""

    kind = "LevelDB"
    take_is_cheap = False  # the cursor decompresses each record that it passes

    def __init__(self, path: str) -> None:
        plyvel = import_plyvel(f"{path} is a LevelDB; reading one")
        self.errors = (plyvel.Error,)
        self.path = path
        try:
            super().__init__(path, path, _Linked, _cursor)
        except (plyvel.Error, OSError) as error:
            raise DataError(f"{path} cannot be read as a LevelDB: {self._text_of(error)}") from None

    @property
    def length(self) -> None:
        return None  # known only by reading all records

    def __len__(self) -> int:
        try:
            return self._count()
        except self.errors as error:
            text = self._text_of(error)
        # outside the except block: the library's error is gone, and the iterator it refers to
        raise DataError(f"{self.path} is damaged: {text}")

    def extent(self) -> str:
        """The first and the last key; only reading all records would tell their number."""
        with self._described(), closing(self._database.raw_iterator()) as cursor:
            cursor.seek_to_first()
            first = printable(cursor.key())
            cursor.seek_to_last()
            return f"records from {first} to {printable(cursor.key())}"

    def _count(self) -> int:
        with closing(self._database.iterator(include_value=False)) as keys:
            return sum(1 for _ in keys)

    def _text_of(self, error: Exception) -> str:
        """The error's message with the path that the user gave, not that of the links."""
        links = re.escape(os.path.dirname(_links())) + rf"/\.{LINKED}\.\w+\.tmp"
        return re.sub(links, lambda _: self.path, text_of(error))

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


def _links() -> str:
    return os.path.join(tempfile.gettempdir(), LINKED)


class _Linked:
    """A LevelDB opened through links in a folder of its own, which LevelDB locks and rewrites."""

    def __init__(self, path: str) -> None:
        import plyvel

        stack = ExitStack()
        folder = stack.enter_context(temporary(_links(), is_folder=True))
        self._finalizer = finalize(self, stack.close)
        for name in os.listdir(path):
            if name not in OWN_FILES:
                os.symlink(os.path.join(os.path.abspath(path), name), os.path.join(folder, name))
        try:
            # without paranoid_checks LevelDB skips damaged records silently
            self._database = plyvel.DB(folder, paranoid_checks=True)
        except plyvel.Error:
            self._finalizer()
            raise
        self.iterator, self.raw_iterator = self._database.iterator, self._database.raw_iterator

    def close(self) -> None:
        del self.iterator, self.raw_iterator
        self._database.close()
        self._finalizer()


def _cursor(database: _Linked) -> Any:
    return database.raw_iterator(verify_checksums=True)


def import_plyvel(purpose: str) -> Any:
    """The module plyvel; DataError, which starts with `purpose`, if it is not installed."""
    try:
        import plyvel
    except ImportError:
        remedy = f"{install('leveldb')}, or use an LMDB"
        raise DataError(f"{purpose} needs plyvel: {remedy}") from None
    return plyvel
