"""Copies into the memory of other ranks without GPUs: what goes by them, and the order of copies,
signals and sums in threads and numpy.
"""

import ctypes
import random
import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from caffepy.collectives import peer_copies, peers
from caffepy.collectives.buckets import Bucket
from caffepy.collectives.peer_copies import PeerCopies, copied, room_of, shares
from caffepy.collectives.rank_group import RankGroup
from caffepy.device.blob import Array
from caffepy.device.device import Device
from tests.collectives.test_rank_group import together

MIB = 1 << 18  # elements


class Run:
    """PeerCopiesRun in numpy: what `kernels/peer_copies.cu` does, in as many threads as ranks."""

    def __init__(self, rank: int, ranks: int, room: int, signals: int, flag: int) -> None:
        self._rank, self._ranks = rank, range(ranks)
        self.inbox = np.full((ranks - 1, room), np.nan, np.float32)
        self.arrived = np.zeros((ranks, signals), np.int64)
        self._given = np.zeros(signals, np.int64)

    def connect(self, arrived: Sequence[Array]) -> None:
        self._arrived = arrived

    def signal(self, which: int) -> None:
        self._given[which] += 1
        for other in self._ranks:
            self._arrived[other][self._rank, which] = self._given[which]

    def wait(self, which: int) -> None:
        until = time.monotonic() + 20
        while self.arrived[:, which].min() < self._given[which]:
            assert time.monotonic() < until, f"signal {which} has not come"
            time.sleep(1e-5)

    def add(self, own: Array, first: int, count: int, place: int) -> None:
        assert place % 4 == first % 4  # both are read by packs of four
        mine, total = own[first : first + count], np.zeros(count, np.float32)
        for source in self._ranks:
            row = source - (source > self._rank)
            given = mine if source == self._rank else self.inbox[row, place : place + count]
            total += given
        mine[:] = total * np.float32(1 / len(self._ranks))


def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put Run in the place of PeerCopiesRun, and the host's copies in that of CUDA's."""
    fake = ModuleType("caffepy.ops.cuda.peer_copies")
    fake.PeerCopiesRun = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "caffepy.ops.cuda", ModuleType("caffepy.ops.cuda"))
    monkeypatch.setitem(sys.modules, "caffepy.ops.cuda.peer_copies", fake)
    monkeypatch.setattr(peers, "enable", lambda device, others: [])

    def copy(to: int, mine: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(to, mine, size)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyDefault=4)
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0), runtime=runtime)
    monkeypatch.setattr(peer_copies, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peer_copies, "_address", lambda array: array.ctypes.data)


def bucket(*ranges: tuple[int, int]) -> Bucket:
    return Bucket(ranges, frozenset([1]))


def test_all_buckets_but_the_small_ones_are_copied_if_there_is_room() -> None:
    parts = [Bucket((), frozenset([9])), bucket((4 * MIB, 90 * MIB)), bucket((MIB, 4 * MIB))]
    small = [bucket((0, MIB))]
    for ranks in (2, 3, 8):  # shares of all others are together no larger than a bucket
        assert copied([*parts, *small], small, ranks) == parts[1:]
    assert copied([*parts, bucket((90 * MIB, 2000 * MIB)), *small], small, 2) == []


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_each_rank_adds_up_a_share(ranks: int) -> None:
    parts = [bucket((5 * MIB, 40 * MIB + 3)), bucket((7, 5000), (6001, 7000)), bucket((0, 1))]
    *rooms, room = room_of(parts, ranks)
    found = [shares(part, ranks, first) for part, first in zip(parts, rooms, strict=True)]
    for part, pieces in zip(parts, found, strict=True):
        ranges = [np.arange(start, stop) for start, stop in part.ranges]
        every = [np.arange(start, stop) for each in pieces for start, stop, _ in each]
        np.testing.assert_array_equal(np.sort(np.concatenate(every)), np.concatenate(ranges))
    for rank in range(ranks):
        places = [
            np.arange(place, place + stop - start)
            for pieces in found
            for start, stop, place in pieces[rank]
        ]
        used = np.concatenate(places)
        assert len(set(used)) == len(used)
        assert used.max() < room


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_mean_and_factors_however_far_one_is_ahead(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is added up after the next one was sent; in one iteration of three factors go, too.
    Some ranks begin by a graph in which they called `restart`.
    """
    in_numpy(monkeypatch)
    parts = [bucket((101, 3000)), bucket((2, 60), (61, 101))]
    diffs = [np.zeros(3001, np.float32) for _ in range(size)]
    group, results = RankGroup(size), [list[Array]() for _ in range(size)]

    def given(rank: int, iteration: int) -> Array:
        return np.random.default_rng(rank + 10 * iteration).normal(size=3001).astype("f4")

    def work(rank: int) -> None:
        gather, draw = (lambda value: group.all_gather(rank, value)), random.Random(rank)
        mine = PeerCopies(rank, size, gather, Device(), diffs[rank], parts, 0)
        wholes = [np.zeros((size, 5, count), np.uint16) for count in (2, 7)]
        for iteration in range(12):
            if rank or not iteration:
                mine.restart()
            diffs[rank][:] = given(rank, iteration)
            if iteration % 3 == 0:
                for whole in wholes:
                    whole[rank] = 100 * iteration + rank
                mine.gather(wholes)
            mine.send(parts[0])
            time.sleep(draw.choice([0, 0, 0.003]))
            mine.send(parts[1])
            mine.add(parts[0])
            mine.add(parts[1])
            mine.finish()
            if iteration % 3 == 0:
                mine.wait_gathered()
            results[rank].append(diffs[rank].copy())
            for whole in wholes:
                expected = 100 * (iteration // 3 * 3) + np.arange(size)
                np.testing.assert_array_equal(whole[:, 4, 1], expected)

    assert together(size, work, group) == [None] * size
    reduced = np.r_[2:60, 61:3000]
    for iteration, mine in enumerate(results[0]):
        every = [given(rank, iteration) for rank in range(size)]
        np.testing.assert_allclose(mine[reduced], np.mean(every, axis=0)[reduced], atol=1e-6)
        for rank in range(size):
            np.testing.assert_array_equal(results[rank][iteration][reduced], mine[reduced])
            for left_out in (0, 60, 3000):
                assert results[rank][iteration][left_out] == every[rank][left_out]
