"""One registry class: names to things, filled by decorators, helpful about unknown names."""

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import TypeVar

from caffepy.core.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean "X"?` for the nearest known name, or an empty string."""
    by_fold = {k.casefold(): k for k in known}
    match = get_close_matches(name.casefold(), by_fold, n=1, cutoff=0.6)
    return f', did you mean "{by_fold[match[0]]}"?' if match else ""


class Registry(dict[str, T]):
    """Names to things of one kind, the word for which in messages is `kind` ("layer type")."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, *names: str) -> Callable[[T], T]:
        """Decorator that registers its target under the names."""

        def register(entry: T) -> T:
            for name in names:
                assert name not in self, f"{self.kind} {name!r} registered twice"
                self[name] = entry
            return entry

        return register

    def __missing__(self, name: str) -> T:
        known = ", ".join(self)
        raise ConfigError(f'unknown {self.kind} "{name}"{nearest(name, self)} (known: {known})')

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.keys()))
