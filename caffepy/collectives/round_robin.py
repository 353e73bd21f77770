"""RoundRobin: locks that the ranks of a group take in turn."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from caffepy.collectives.rank_group import RankGroup


class RoundRobin:
    """Locks that ranks 0, 1, ... of a group take in turn, and again from 0; each has a key."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._turns: dict[object, int] = {}  # by key: the rank that may enter next

    @contextmanager
    def lock(self, rank: int, key: object) -> Iterator[None]:
        """A block of a rank in its turn."""
        self.wait(rank, key)
        yield
        following = self._turns[key] = (rank + 1) % self._group.size
        self._group.wake(following)

    def wait(self, rank: int, key: object) -> None:
        """Wait until the rank may take the lock, without taking it."""
        turns = self._turns
        self._group.until(rank, lambda: turns.get(key, 0) == rank, lambda: [turns.get(key, 0)])

    def restart(self, keys: Iterable[object] | None = None) -> None:
        """Make rank 0 the next at these locks, which nobody may hold or wait for, or at all."""
        for key in list(self._turns) if keys is None else keys:
            self._turns.pop(key, None)
