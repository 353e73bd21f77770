"""Records that cannot be read. A run may skip some of them; each counts once, however often it
is met.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from caffepy.core.errors import DataError, RecordError

log = logging.getLogger(__name__)

_most: ContextVar[int] = ContextVar("most", default=0)


@contextmanager
def tolerating(most: int) -> Iterator[None]:
    """Allow each source that this thread opens in this block to skip `most` bad records."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)


class BadRecords:
    """The names of a source's bad records; `most` may be skipped."""

    def __init__(self) -> None:
        self.most = _most.get()
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, error: DataError) -> None:
        """Skip one more, whose error this is; RecordError if that is one too many."""
        if name in self:
            return
        if len(self) >= self.most:
            skipped = f"; {self.most} bad records were skipped before" if self.most else ""
            raise RecordError(f"{error.message}{skipped}", error.where)
        self._names.append(name)
        log.warning(
            "Bad record %d of at most %d is skipped: %s", len(self), self.most, error.message
        )

    def state(self) -> dict[str, Any]:
        """The names; empty if there are none."""
        return {"bad": list(self._names)} if self._names else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replace the names by those of `state`."""
        self._names = list(map(str, state.get("bad", [])))
