"""Key ranges of the parameters, and the consistent ring that says which servers hold them.

The keys are the elements of one flat array: the parameters of all blobs and the running statistics.
A range is a part of one blob. Its place on the ring is the hash of its name, so a server that comes
or goes moves few ranges but those next to it.
"""

import hashlib
from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LARGEST = 1 << 20
"""Elements of a range, at most: large blobs then lie on several servers."""

POINTS = 64
"""Places of each server on the ring: more spread the ranges more evenly."""

FULLEST = 1.1
"""Elements of which a server may be the primary, as part of the mean of all: less moves more
ranges when servers come and go.
"""


class KeyRange(NamedTuple):
    """Elements `start` to `stop` of the flat array, of the blob that `name` begins with.

    With `is_mean` its value is the mean of what the workers have, as of running statistics; else
    workers push changes or gradients. `row` is the number of elements in a row of a blob of which
    only some rows may change, else 0.
    """

    name: str
    start: int
    stop: int
    is_mean: bool = False
    row: int = 0


class Blob(NamedTuple):
    """A blob in the flat array: see `KeyRange`; `size` elements from `start`."""

    name: str
    start: int
    size: int
    is_mean: bool = False
    row: int = 0


def key_ranges(blobs: Iterable[Blob], largest: int = LARGEST) -> list[KeyRange]:
    """Return the ranges of these blobs; those of blobs with rows end with a row."""
    ranges = list[KeyRange]()
    for name, first, size, is_mean, row in blobs:
        whole = max(row, 1)
        rows = -(-size // whole)
        parts = max(1, -(-size // largest))
        for i in range(parts):
            start, stop = (min(size, rows * k // parts * whole) for k in (i, i + 1))
            if start < stop:
                part = f"{name}/{i}" if parts > 1 else name
                ranges.append(KeyRange(part, first + start, first + stop, is_mean, row))
    return ranges


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def owners(
    ranges: Sequence[KeyRange], servers: Sequence[str], copies: int
) -> tuple[tuple[str, ...], ...]:
    """Return the servers of each range: the primary, then its replicas; fewer servers than copies
    hold one each. They are the next ones on a consistent ring (Karger et al., 1997) that have room:
    no server is the primary of much more than others, or the first replica, and so on (consistent
    hashing with bounded loads, Mirrokni et al., 2016), since workers wait for the slowest.
    """
    points = sorted((_place(f"{s}#{i}"), s) for s in servers for i in range(POINTS))
    most = FULLEST * sum(r.stop - r.start for r in ranges) / max(len(servers), 1)
    loads = [dict.fromkeys(servers, 0) for _ in range(min(copies, len(servers)))]
    found = list[tuple[str, ...]]()
    for key_range in ranges:
        first, size = bisect(points, (_place(key_range.name), "")), key_range.stop - key_range.start
        left = list(dict.fromkeys(server for _, server in points[first:] + points[:first]))
        own = list[str]()
        for load in loads:
            room = (server for server in left if load[server] + size <= most)
            server = next(room, min(left, key=load.__getitem__))
            left.remove(server)
            load[server] += size
            own.append(server)
        found.append(tuple(own))
    return tuple(found)
