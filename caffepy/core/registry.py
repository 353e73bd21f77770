"""One registry class: names to things, filled by decorators, helpful about unknown names."""

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from caffepy.core.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean "X"?` for the nearest known name, or an empty string."""
    by_fold = {k.casefold(): k for k in known}
    match = get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.6)
    return f', did you mean "{by_fold[match[0]]}"?' if match else ""


class Registry(Generic[T]):
    """Names to things of one kind; `kind` is the word used in messages ("layer type")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def __call__(self, *names: str) -> Callable[[T], T]:
        """Decorator that registers its target under the names."""

        def register(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} registered twice"
                self._entries[name] = entry
            return entry

        return register

    def __getitem__(self, name: str) -> T:
        """Return the thing registered under the name; ConfigError names the nearest known one and
        lists all.
        """
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(self)
            hint = nearest(name, self._entries)
            raise ConfigError(f'unknown {self.kind} "{name}"{hint} (known: {known})') from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
