import logging
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from caffepy.collectives.rank_group import GroupStoppedError, RankGroup
from caffepy.collectives.rank_names import REMOTE
from caffepy.collectives.round_robin import RoundRobin
from caffepy.collectives.schedule import flat, muji, tree
from caffepy.collectives.sync import HostSync
from caffepy.collectives.synchronizer import Synchronizer
from caffepy.core.errors import DataError, SyncError
from tests.collectives.test_topology import topology


def together(
    size: int, work: Callable[[int], object], group: RankGroup
) -> list[BaseException | None]:
    """Run work(rank) in a thread each; what each raised."""
    raised: list[BaseException | None] = [None] * size

    def guarded(rank: int) -> None:
        try:
            with group.guard(rank):
                work(rank)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def pass_deadline(group: RankGroup, seconds: float, *ranks: int) -> None:
    """Begin a step whose deadline passes soon after these ranks wait, however late they come."""
    group.phase = "step"

    def lower() -> None:
        while not group.waiting.keys() >= set(ranks):
            time.sleep(0.01)
        group.deadlines = {"step": seconds}

    threading.Thread(target=lower, daemon=True).start()


def synchronize(sync: Synchronizer, *layers: int) -> None:
    """Make the calls of an iteration whose backward pass goes through these layers."""
    sync.on_start()
    for layer in layers:
        sync.after_backward(layer)
    sync.on_gradients_ready()


def test_turns_go_round_in_the_order_of_ranks() -> None:
    group, seen = RankGroup(5), []
    turns = RoundRobin(group)

    def work(rank: int) -> None:
        for _ in range(20):
            with turns.lock(rank, "data"):
                seen.append(rank)

    assert together(5, work, group) == [None] * 5
    assert seen == list(range(5)) * 20


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    group, counts = RankGroup(4), [0] * 4

    def work(rank: int) -> None:
        for round_ in range(1, 50):
            counts[rank] = round_
            group.barrier(rank)
            assert min(counts) >= round_
            group.barrier(rank)

    assert together(4, work, group) == [None] * 4


@pytest.mark.parametrize("where", ["barrier", "turn"])
def test_an_error_of_one_rank_stops_all_and_the_root_gets_it(where: str) -> None:
    group, told = RankGroup(3), []
    turns = RoundRobin(group)
    group.on_abort(lambda: told.append("aborted"))

    def work(rank: int) -> None:
        if rank == 1:
            raise DataError("no more records")
        if where == "barrier":
            group.barrier(rank)
        else:
            for _ in range(2):
                with turns.lock(rank, "data"):
                    pass

    raised = together(3, work, group)
    assert isinstance(raised[1], DataError)
    with pytest.raises(DataError, match="rank 1: no more records"):
        raise raised[0] or AssertionError
    with pytest.raises(GroupStoppedError, match="rank 1 failed: no more records"):
        raise raised[2] or AssertionError
    assert told == ["aborted"]


@pytest.mark.parametrize("rank", [REMOTE, 1])
def test_an_error_has_not_the_place_where_the_root_heard_of_it(rank: int) -> None:
    group, told = RankGroup(2), "node 1 has died" if rank == REMOTE else "rank 1 made no progress"
    group.abort(rank, SyncError(told))
    with pytest.raises(SyncError) as raised:
        group.check(0)
    heard = raised.value.at('layer "data" (Data)')  # as the net does whose layer waits
    assert str(group.root_cause(heard)) == told


def test_a_rank_that_hangs_is_named_with_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    group, release = RankGroup(3), threading.Event()
    pass_deadline(group, 0.2, 0, 1)

    def work(rank: int) -> None:
        if rank == 2:
            release.wait(20)
            return
        try:
            group.barrier(rank)
        finally:
            release.set()

    with caplog.at_level(logging.ERROR, "caffepy"):
        raised = together(3, work, group)
    assert raised[2] is None
    assert all(isinstance(raised[rank], SyncError) for rank in (0, 1))
    assert str(group.failure and group.failure[1]).startswith("rank 2 made no progress for 0.2 s (")
    assert "release.wait(20)" in caplog.text
    assert "rank 2:" in caplog.text


def test_ranks_that_wait_for_each_other_are_named_and_their_stacks_come_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = RankGroup(3)
    turns = RoundRobin(group)
    pass_deadline(group, 0.2, 0, 1, 2)

    def work(rank: int) -> None:
        if rank == 2:  # the first turn is rank 0's
            turns.wait(rank, "data")
        group.barrier(rank)

    with caplog.at_level(logging.ERROR, "caffepy"):
        raised = together(3, work, group)
    assert all(isinstance(error, SyncError) for error in raised)
    told = re.match(
        r"rank (\d) made no progress for 0.2 s \(step\); rank (\d) waited for it; "
        r"rank (\d) waited for rank (\d)\nrank (\d):\n",
        caplog.messages[0],
    )
    assert told, caplog.text
    assert told.groups() in [("2", "0", "2", "0", "2"), ("2", "1", "2", "0", "2"), tuple("02020")]


def test_a_rank_whose_wait_is_over_is_not_said_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    """It has not woken yet: nothing is missing any more."""
    group, ended = RankGroup(2), threading.Event()
    group.on_abort(ended.set)
    pass_deadline(group, 0.3, 0, 1)

    def work(rank: int) -> None:
        if rank:
            group.waiting[rank] = list
            assert ended.wait(20)
        else:
            group.until(rank, lambda: False, lambda: [1])

    with caplog.at_level(logging.ERROR, "caffepy"):
        together(2, work, group)
    message = caplog.messages[0].splitlines()[0]
    assert message == "rank 1 made no progress for 0.3 s (step); rank 0 waited for it"


def test_a_process_that_was_stopped_has_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    group, looks, stopped_for = RankGroup(2, {"set-up": 60.0}), [], 0.0
    monkeypatch.setattr(
        "caffepy.collectives.rank_group.time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_for),
    )
    group.interrupted = lambda: looks.append(stopped_for)

    def work(rank: int) -> None:
        nonlocal stopped_for
        if rank == 1:
            while not looks:
                time.sleep(0.01)
            stopped_for = 1000.0
            while looks.count(stopped_for) < 2 and not group.stopped:
                time.sleep(0.01)
        group.barrier(rank)

    assert together(2, work, group) == [None, None]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["tree", "muji", "flat"])
def test_any_schedule_gives_every_rank_the_mean(size: int, name: str) -> None:
    shape = topology(size)
    schedule = {"tree": tree, "muji": muji, "flat": flat}[name](shape)
    if schedule is None:
        assert name == "muji"
        return
    group = RankGroup(size)
    rng = np.random.default_rng(size)
    diffs = [rng.normal(size=33).astype(np.float32) for _ in range(size)]
    expected = sum(d.astype(np.float64) for d in diffs) / size
    syncs = [HostSync(group, rank, schedule, {}, dict(enumerate(diffs))) for rank in range(size)]
    assert together(size, lambda rank: syncs[rank].on_gradients_ready(), group) == [None] * size
    for diff in diffs:
        np.testing.assert_allclose(diff, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(diff, diffs[0])


def test_where_only_the_root_updates_it_has_the_mean_and_gives_its_parameters() -> None:
    size = 5
    schedule, group = tree(topology(size)), RankGroup(size)
    data = [np.full(7, rank, np.float32) for rank in range(size)]
    diffs = [np.full(7, rank, np.float32) for rank in range(size)]
    syncs = [
        HostSync(
            group, rank, schedule, dict(enumerate(data)), dict(enumerate(diffs)), root_updates=True
        )
        for rank in range(size)
    ]
    assert [sync.updates for sync in syncs] == [True] + [False] * 4

    assert together(size, lambda rank: synchronize(syncs[rank]), group) == [None] * size
    assert all((d == 0).all() for d in data)
    np.testing.assert_array_equal(diffs[0], np.full(7, 2, np.float32))


def test_what_is_met_while_the_culprit_is_found_does_not_count() -> None:
    group, ended = RankGroup(3, {"step": 0.2}), threading.Event()
    group.phase = "step"
    group.on_abort(ended.set)

    def hung_ranks(missing: list[int]) -> list[int]:
        assert missing == [0]
        time.sleep(0.3)
        return [2]

    group.hung_ranks = hung_ranks

    def work(rank: int) -> None:
        if rank == 1:
            group.until(rank, lambda: False, lambda: [0])
        assert ended.wait(20)  # where nobody can wake it
        if rank == 2:
            raise DataError("damaged")
        group.check(rank)

    raised = together(3, work, group)
    assert str(raised[0]) == "rank 2 made no progress for 0.2 s (step)"
    assert isinstance(raised[1], GroupStoppedError)
    assert isinstance(raised[2], DataError)
    assert group.missing == [2]
