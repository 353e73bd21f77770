"""Key ranges are dealt evenly to servers, and few move when one comes or goes."""

from collections import Counter

import pytest

from caffepy.parallel.parameter_server.ranges import Blob, key_ranges, owners

SIZES = {"conv": 34, "bias": 1, "fc6": 3700, "fc7": 1600, "fc8": 400}
RANGES = key_ranges(
    [Blob(name, 10_000 * i, size) for i, (name, size) in enumerate(SIZES.items())], largest=100
)
SIZE = sum(SIZES.values())


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_no_server_has_much_more_than_others(count: int) -> None:
    found = owners(RANGES, [f"server-{i}" for i in range(count)], 2)
    for copy in range(2):
        loads = Counter[str]()
        for key_range, own in zip(RANGES, found, strict=True):
            loads[own[copy]] += key_range.stop - key_range.start
        assert max(loads.values()) <= 1.1 * SIZE / count + 100


def test_copies_are_on_servers_that_differ() -> None:
    servers = ["server-0", "server-1", "server-2"]
    for copies in range(1, 5):
        for own in owners(RANGES, servers, copies):
            assert len(own) == len(set(own)) == min(copies, 3)


@pytest.mark.parametrize("count", [4, 8])
def test_few_ranges_move_when_a_server_dies(count: int) -> None:
    servers = [f"server-{i}" for i in range(count)]
    before = owners(RANGES, servers, 2)
    after = owners(RANGES, servers[1:], 2)
    moved = sum(
        (r.stop - r.start) * len(set(now) - set(own))
        for r, own, now in zip(RANGES, before, after, strict=True)
    )
    assert moved < 2.5 * (2 * SIZE / count)  # what the server had; all anew would move 1.4 * SIZE
