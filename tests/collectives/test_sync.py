import logging

import numpy as np
import pytest

from caffepy.collectives import sync
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.schedule import muji, tree
from caffepy.collectives.sync import Choice, choose
from caffepy.collectives.synchronizer import FlatParams
from caffepy.collectives.topology import Topology
from caffepy.core.errors import UsageError
from caffepy.device.device import Device
from tests.collectives.test_rank_group import synchronize, together
from tests.collectives.test_topology import topology


@pytest.mark.parametrize(
    ("shape", "version", "expected"),
    [
        (topology(4), 22809, "nccl"),
        (topology(4), 20900, "muji"),
        (topology(4), None, "muji"),
        (topology(3), None, "tree"),
        (topology(4, access=0.0), None, "flat"),
    ],
)
def test_auto_takes_the_fastest_that_can_be_had_and_says_why(
    shape: Topology,
    version: int | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nccl_version() -> int:
        if version is None:
            raise ImportError("no libnccl")
        return version

    monkeypatch.setattr(sync, "nccl_version", nccl_version)
    with caplog.at_level(logging.INFO, logger="caffepy"):
        assert choose("auto", shape, gpu=True).name == expected
    (line,) = caplog.messages
    assert f"by {expected}: " in line
    if version != 22809:
        assert "too old" in line if version else "no libnccl" in line


def test_the_cpu_has_no_nccl() -> None:
    assert choose("auto", topology(2), gpu=False) == Choice("muji", muji(topology(2)))
    with pytest.raises(UsageError, match="--sync nccl: NCCL is for GPUs"):
        choose("nccl", topology(2), gpu=False)


def test_a_tree_that_is_asked_for_is_caffes_in_which_the_root_updates() -> None:
    assert choose("tree", topology(4), gpu=True) == Choice(
        "tree", tree(topology(4)), root_updates=True
    )
    assert not choose("flat", topology(4), gpu=True).root_updates


def test_what_cannot_be_had_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"2, 4 or 8 devices .* not for these 3"):
        choose("muji", topology(3), gpu=True)
    with pytest.raises(UsageError, match="'ring' is none of auto, nccl, tree, muji, flat"):
        choose("ring", topology(3), gpu=True)


def test_an_all_gather_gives_all_ranks_the_values_of_all() -> None:
    group = RankGroup(3)
    seen = []

    def work(rank: int) -> None:
        for i in range(5):
            seen.append(group.all_gather(rank, (rank, i)) == [(other, i) for other in range(3)])

    assert together(3, work, group) == [None] * 3
    assert seen == [True] * 15


@pytest.mark.parametrize("name", ["auto", "tree", "muji", "flat"])
def test_ranks_of_the_cpu_get_the_mean(name: str) -> None:
    group = RankGroup(4)
    choice = choose(name, topology(4), gpu=False)
    diffs = [np.full(5, rank + 1, np.float32) for rank in range(4)]
    data = [np.full(5, rank, np.float32) for rank in range(4)]
    updates = [False] * 4

    def work(rank: int) -> None:
        mine = choice.join(group, rank, FlatParams(Device(), data[rank], diffs[rank]))
        synchronize(mine, 0)
        updates[rank] = mine.updates
        mine.close()

    assert together(4, work, group) == [None] * 4
    for rank in range(4):
        assert updates[rank] == (rank == 0 or name != "tree")
        assert data[rank][0] == (0 if name == "tree" else rank)
        if updates[rank]:
            np.testing.assert_array_equal(diffs[rank], 2.5)
