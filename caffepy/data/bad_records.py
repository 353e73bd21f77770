"""Records that cannot be read, of which a run may pass over some: each is counted once, however
often it comes.
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
    """Sources that are opened in this block, by its thread, let so many bad records be passed over,
    each source.
    """
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)


class BadRecords:
    """The names of a source's bad records."""

    def __init__(self) -> None:
        self.most = _most.get()
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, error: DataError) -> None:
        """Pass over one more, which the error names; RecordError if that is too many."""
        if name in self:
            return
        if len(self) >= self.most:
            told = f"; {self.most} bad records were passed over before" if self.most else ""
            raise RecordError(f"{error.message}{told}", error.where)
        self._names.append(name)
        log.warning(
            "Bad record %d of at most %d is passed over: %s", len(self), self.most, error.message
        )

    def state(self) -> dict[str, Any]:
        """The names, if there are any."""
        return {"bad": list(self._names)} if self._names else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Know those of `state`, and no others."""
        self._names = list(map(str, state.get("bad", [])))
