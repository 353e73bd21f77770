"""The one-shot all-reduce without GPUs: its chunks, and its protocol in threads and numpy."""

import random
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType

import numpy as np
import pytest

from caffepy.collectives import peers
from caffepy.collectives.buckets import Bucket
from caffepy.collectives.one_shot import BLOCKS, OneShot, chunks_of, small
from caffepy.collectives.rank_group import RankGroup
from caffepy.device.blob import Array
from caffepy.device.device import Device
from tests.collectives.test_rank_group import together

MIB = 1 << 18  # elements


class Run:
    """OneShotRun in numpy: what `kernels/one_shot.cu` does, in as many threads as ranks; `launches`
    has those of each rank.
    """

    launches: dict[int, list[tuple[int, int, bool]]]

    def __init__(
        self, rank: int, ranks: int, floats: Array, chunks: Sequence[tuple[int, int]], flag: int
    ) -> None:
        self._rank, self._ranks, self._floats, self._chunks = rank, ranks, floats, chunks
        *self._places, room = accumulate((size for _, size in chunks), initial=0)
        self.inbox = np.full((2, ranks - 1, room), np.nan, np.float32)
        self.arrived = np.zeros((ranks, len(chunks)), np.int64)
        self._sent, self._added = np.zeros((2, len(chunks)), np.int64)

    def connect(self, inboxes: Sequence[Array], arrived: Sequence[Array]) -> None:
        self._inboxes, self._arrived = inboxes, arrived

    def _row(self, source: int, destination: int, chunk: int, turn: int) -> Array:
        place, (_, size) = self._places[chunk], self._chunks[chunk]
        row = self._inboxes[destination][turn % 2, source - (source > destination)]
        return row[place : place + size]

    def run(self, first: int, stop: int, adds: bool) -> None:
        rank, ranks = self._rank, range(self._ranks)
        self.launches.setdefault(rank, []).append((first, stop, adds))
        for chunk in range(first, stop):
            turn, own = self._sent[chunk], self._own(chunk)
            for other in ranks:
                if other != rank:
                    self._row(rank, other, chunk, turn)[:] = own
                    self._arrived[other][rank, chunk] = turn + 1
            self._sent[chunk] += 1
        for chunk in range(len(self._chunks)) if adds else ():
            turn, own = self._added[chunk], self._own(chunk)
            for other in ranks:
                while other != rank and self.arrived[other, chunk] <= turn:
                    time.sleep(1e-5)
            total = np.zeros_like(own)
            for source in ranks:
                total += own if source == rank else self._row(source, rank, chunk, turn)
            own[:] = total * np.float32(1 / self._ranks)
            self._added[chunk] += 1

    def _own(self, chunk: int) -> Array:
        start, size = self._chunks[chunk]
        return self._floats[start : start + size]


def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put Run in the place of OneShotRun."""
    Run.launches = {}
    fake = ModuleType("caffepy.ops.cuda.one_shot")
    fake.OneShotRun = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "caffepy.ops.cuda", ModuleType("caffepy.ops.cuda"))
    monkeypatch.setitem(sys.modules, "caffepy.ops.cuda.one_shot", fake)
    monkeypatch.setattr(peers, "enable", lambda device, others: [])


def bucket(*ranges: tuple[int, int]) -> Bucket:
    return Bucket(ranges, frozenset([1]))


@pytest.mark.parametrize(
    "ranges", [((0, 1),), ((5, 2000), (2500, 2501)), ((16, 3 * MIB), (4 * MIB, 9 * MIB + 7))]
)
def test_chunks_are_each_element_once_in_few_blocks(ranges: tuple[tuple[int, int], ...]) -> None:
    chunks = chunks_of(bucket(*ranges))
    elements = [np.arange(start, start + size) for start, size in chunks]
    expected = [np.arange(start, stop) for start, stop in ranges]
    np.testing.assert_array_equal(np.concatenate(elements), np.concatenate(expected))
    assert len(chunks) <= BLOCKS + len(ranges)
    assert len({size for start, size in chunks if start + size not in np.ravel(ranges)}) <= 1


def test_the_last_buckets_are_small_as_far_as_there_is_room() -> None:
    factors, first, second, third = (
        Bucket((), frozenset([9])),
        bucket((4 * MIB, 40 * MIB)),
        bucket((MIB, 4 * MIB)),
        bucket((0, MIB)),
    )
    parts = [factors, first, second, third]
    assert small(parts, 2) == [second, third]
    assert small([factors, second, third], 2) == [second, third]
    assert small(parts, 5) == [second, third]
    assert small(parts, 6) == [third]
    assert small(parts, 9) == []
    assert small(parts, 1) == []


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_mean_however_far_one_is_ahead(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some iterations all is sent at the end, of others a bucket or both before."""
    in_numpy(monkeypatch)
    parts = [bucket((100, 3000)), bucket((0, 60), (61, 100))]
    diffs = [np.zeros(3001, np.float32) for _ in range(size)]
    group, results = RankGroup(size), [list[Array]() for _ in range(size)]

    def given(rank: int, iteration: int) -> Array:
        return np.random.default_rng(rank + 10 * iteration).normal(size=3001).astype("f4")

    def work(rank: int) -> None:
        gather, draw = (lambda value: group.all_gather(rank, value)), random.Random(rank)
        mine = OneShot(rank, size, gather, Device(), diffs[rank], parts, 0)
        for iteration in range(12):
            mine.restart()
            diffs[rank][:] = given(rank, iteration)
            for part in parts[: iteration % 3]:
                mine.send(part)
            time.sleep(draw.choice([0, 0, 0.003]))
            mine.finish()
            results[rank].append(diffs[rank].copy())

    assert together(size, work, group) == [None] * size
    reduced = np.r_[0:60, 61:3000]
    for iteration, mine in enumerate(results[0]):
        every = [given(rank, iteration) for rank in range(size)]
        np.testing.assert_allclose(mine[reduced], np.mean(every, axis=0)[reduced], atol=1e-6)
        for rank in range(size):
            np.testing.assert_array_equal(results[rank][iteration][reduced], mine[reduced])
            for left_out in (60, 3000):
                assert results[rank][iteration][left_out] == every[rank][left_out]
