"""One open handle a database file: LMDB and LevelDB both refuse to open it twice in a process."""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import finalize

from caffepy.data.sources.databases import Database


class _Handle:
    """An open database and the number of its users."""

    def __init__(self, identity: tuple[int, int], database: Any) -> None:
        self.identity = identity
        self.database = database
        self.users = 0


class _Use:
    """One user of a handle, with its cursor, which must go before the database is closed."""

    def __init__(self, handle: _Handle, cursor: Any) -> None:
        self.handle = handle
        self.cursor = cursor


_open: dict[tuple[int, int], _Handle] = {}
_open_lock = threading.Lock()
# Uses by databases that were collected without being closed. The garbage collector may run while
# any thread holds the lock, so it must not wait for it: it queues here.
_forgotten: deque[_Use] = deque()


class SharedDatabase(Database):
    """A Database with a cursor of its own in a handle that others may share."""

    def __init__(
        self, path: str, file: str, opener: Callable[[str], Any], cursor_of: Callable[[Any], Any]
    ) -> None:
        self._use = use = _acquire(file, opener, cursor_of)
        self._database, self._cursor = use.handle.database, use.cursor
        self._finalizer = finalize(self, _forget, use)
        super().__init__(path)

    def close(self) -> None:
        """Release the database; no record may be used any more."""
        if self._finalizer.detach():
            del self._database, self._cursor
            with _open_lock:
                _release(self._use)


def _acquire(path: str, opener: Callable[[str], Any], cursor_of: Callable[[Any], Any]) -> _Use:
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    with _open_lock:
        _release_forgotten()
        handle = _open.get(identity) or _Handle(identity, opener(path))
        use = _Use(handle, cursor_of(handle.database))
        handle.users += 1
        _open[identity] = handle
        return use


def _forget(use: _Use) -> None:
    """Release a use now if the lock is free, else when the next database is opened."""
    _forgotten.append(use)
    if _open_lock.acquire(blocking=False):
        try:
            _release_forgotten()
        finally:
            _open_lock.release()


def _release_forgotten() -> None:
    while _forgotten:
        _release(_forgotten.popleft())


def _release(use: _Use) -> None:
    handle = use.handle
    use.cursor = None
    handle.users -= 1
    if not handle.users:
        del _open[handle.identity]
        handle.database.close()
