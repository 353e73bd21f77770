"""One registry class: names to things, filled by decorators, helpful about unknown names."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from caffepy.core.errors import ConfigError

T = TypeVar("T")

LEAST, BEGINNING, SHORT = 0.6, 0.9, 3
"""Least likeness of a name that is suggested; weight of the likeness to its beginning, and letters
of a name for which that says nothing.
"""

FEW = 40
"""Number of names up to which a message lists all."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean "X"?` for the nearest known name, or an empty string.

    The name, if not too short, may be like the beginning of a known one; of several the first is
    the nearest. The dashes of flags count for nothing.
    """
    best = max(known, key=lambda one: _likeness(one, name), default="")
    return f', did you mean "{best}"?' if _likeness(best, name) >= LEAST else ""


def listed(names: Sequence[str], wrong: str) -> str:
    """Return the names, joined by commas; of many those that are most like the wrong one, the
    nearest first, and how many more there are.
    """
    if len(names) <= FEW:
        return ", ".join(names)
    likest = sorted(names, key=lambda one: _likeness(one, wrong), reverse=True)
    return f"{', '.join(likest[:FEW])} and {len(names) - FEW:,} more"


def _likeness(known: str, name: str) -> float:
    from difflib import SequenceMatcher  # only needed for a mistake

    known, name = (one.casefold().lstrip("-") for one in (known, name))
    whole, begin = (SequenceMatcher(None, x, name).ratio() for x in (known, known[: len(name)]))
    return max(whole, BEGINNING * begin * (len(name) > SHORT))


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
        near = nearest(name, self)
        known = "" if near and len(self) > FEW else f" (known: {listed(list(self), name)})"
        raise ConfigError(f'unknown {self.kind} "{name}"{near}{known}')

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.keys()))
