"""One registry class: names to things, filled by decorators, helpful about unknown names."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from caffepy.core.errors import ConfigError
from caffepy.core.names import FEW, listed, nearest

T = TypeVar("T")


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
