import logging
import random

import pytest

from caffepy.collectives.topology import (
    NO_PARENT,
    Topology,
    device_pairs,
    draw,
    show,
)
from caffepy.core.errors import CaffeError, UsageError


def topology(n: int, access: float = 1.0, boards: int = 0, seed: int = 0) -> Topology:
    """n devices; each pair reaches each other with this probability; `boards` devices a board, 0
    for none shared.
    """
    rng = random.Random(seed)
    rows = [[False] * n for _ in range(n)]
    for a in range(n):
        for b in range(a):
            rows[a][b] = rows[b][a] = rng.random() < access
    numbers = tuple(i // boards if boards else None for i in range(n))
    return Topology(tuple(range(n)), numbers, tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("size", "tree"),
    [
        (1, ""),
        (2, "0:1"),
        (3, "0:1, 0:2"),
        (4, "0:1, 2:3, 0:2"),
        (5, "0:1, 2:3, 0:2, 0:4"),
        (8, "0:1, 2:3, 4:5, 6:7, 0:2, 4:6, 0:4"),
    ],
)
def test_devices_that_all_reach_each_other_are_paired_as_caffe_pairs_them(
    size: int, tree: str
) -> None:
    assert show(device_pairs(topology(size))) == tree


def test_devices_of_a_board_come_first_then_peers_then_the_rest() -> None:
    boards = (0, None, 0, None, None, None)
    access = [[False] * 6 for _ in range(6)]
    access[1][4] = access[4][1] = True
    pairs = device_pairs(Topology((0, 1, 2, 3, 4, 5), boards, tuple(map(tuple, access))))
    assert [(p.parent, p.device) for p in pairs[1:3]] == [(0, 2), (1, 4)]
    assert pairs[0] == (NO_PARENT, 0)


def test_the_log_says_what_paired_which(caplog: pytest.LogCaptureFixture) -> None:
    access = tuple(tuple({a, b} == {2, 3} for b in range(5)) for a in range(5))
    with caplog.at_level(logging.DEBUG, "caffepy"):
        device_pairs(Topology((0, 1, 2, 3, 4), (0, 0, None, None, None), access))
    assert caplog.messages == [
        "GPUs paired by boards: 0:1, remaining: 0, 2, 3, 4",
        "GPUs paired by P2P access: 2:3, remaining: 0, 2, 4",
        "GPUs paired regardless of that: 0:2, 0:4, remaining: 0",
    ]


def test_the_first_device_that_is_given_is_the_root() -> None:
    access = ((True,) * 3,) * 3
    assert show(device_pairs(Topology((5, 0, 3), (None,) * 3, access))) == "5:0, 5:3"


@pytest.mark.parametrize("size", range(1, 65))
def test_any_devices_become_a_tree(size: int) -> None:
    for seed, access in enumerate((0.0, 0.1, 0.5, 0.9, 1.0)):
        for boards in (0, 2, 3):
            shape = topology(size, access, boards, seed)
            pairs = device_pairs(shape)
            assert len(pairs) == size
            assert pairs[0] == (NO_PARENT, 0)
            assert sorted(pair.device for pair in pairs) == list(shape.devices)
            # Gradients are summed along the list from its second entry: no child sends twice, and
            # none receives after it has sent.
            sent: set[int] = set()
            for parent, device in pairs[1:]:
                assert device not in sent
                assert parent not in sent
                sent.add(device)
            assert sent == set(shape.devices[1:])


def test_a_device_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="device 1 is named twice"):
        Topology((0, 1, 1), (None,) * 3, ((True,) * 3,) * 3)
    with pytest.raises(UsageError, match="no device"):
        Topology((), (), ())


def test_the_tree_is_drawn() -> None:
    assert draw(device_pairs(topology(4))).splitlines() == ["0", "├── 1", "└── 2", "    └── 3"]


def test_access_must_be_given_for_every_pair() -> None:
    with pytest.raises(CaffeError, match="3 rows of 3"):
        Topology((0, 1, 2), (None,) * 3, ((True,) * 2,) * 3)
