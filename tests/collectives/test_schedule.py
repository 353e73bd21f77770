import random

import numpy as np
import pytest

from caffepy.collectives.schedule import (
    EIGHT,
    FOUR,
    TWO,
    Action,
    Operation,
    Part,
    Schedule,
    Step,
    adding,
    copying,
    flat,
    muji,
    part,
    totals,
    tree,
)
from caffepy.collectives.topology import Topology
from tests.collectives.test_topology import topology


def groups(*sizes: int) -> Topology:
    """Devices that reach those of their own group only."""
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    access = tuple(tuple(a == b for b in group) for a in group)
    return Topology(tuple(range(len(group))), (None,) * len(group), access)


def assert_sums(schedule: Schedule, size: int) -> None:
    buffers = [
        np.random.default_rng(rank).integers(-9, 9, 5).astype(np.float32) for rank in range(size)
    ]
    expected = sum(buffers)
    for level in schedule:
        written = [step.destination for step in level]
        assert len(set(written)) == len(written), "steps of a level write to one buffer"
        assert not {step.source for step in level} & set(written), "steps wait for one another"
        for step in level:
            step.apply(buffers)
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("size", range(1, 65))
def test_schedules_sum_and_never_use_memory_that_is_out_of_reach(size: int) -> None:
    for seed, access in enumerate((0.0, 0.3, 0.8, 1.0)):
        shape = topology(size, access, seed=seed)
        for schedule in (tree(shape), flat(shape), muji(shape)):
            if schedule is None:
                continue
            assert_sums(schedule, size)
            for level in schedule:
                for step in level:
                    assert step.staged or shape.reaches(step.source, step.destination)


def test_a_tree_of_a_power_of_two_has_a_level_up_and_one_down_for_each_doubling() -> None:
    assert [len(level) for level in tree(topology(8))] == [4, 2, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("shape", "copies"),
    [(topology(1), []), (topology(8), [7]), (topology(8, 0.0), [7]), (groups(3, 2), [2, 2])],
)
def test_flat_sends_the_sum_to_all_at_once(shape: Topology, copies: list[int]) -> None:
    schedule = flat(shape)
    assert len(adding(schedule)) == shape.size - 1
    assert [len(level) for level in copying(schedule)] == copies
    assert all(len({step.staged for step in level}) == 1 for level in schedule)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (topology(2), TWO),
        (topology(4), FOUR),
        (groups(2, 2), FOUR),
        (topology(8), EIGHT),
        (groups(4, 4), EIGHT),
        (groups(1, 1), None),
        (groups(3, 1), None),
        (groups(2, 2, 2, 2), None),
        (topology(3), None),
        (topology(6), None),
    ],
)
def test_muji_is_for_2_4_or_8_devices_in_one_group_or_two(
    shape: Topology, expected: Schedule | None
) -> None:
    found = muji(shape)
    plain = found and tuple(tuple(step._replace(staged=False) for step in level) for level in found)
    assert plain == expected


def test_between_groups_buffers_go_through_the_host() -> None:
    found = muji(groups(4, 4))
    assert found
    staged = [(step.source, step.destination) for level in found for step in level if step.staged]
    assert staged == [(4, 0), (0, 4)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("access", [0.4, 1.0])
def test_actions_that_run_at_once_and_only_wait_for_levels_give_sums_in_any_order_of_events(
    size: int, access: float
) -> None:
    rng = random.Random(size)
    shape = topology(size, access, seed=size)
    for schedule in filter(None, (tree(shape), flat(shape), muji(shape))):
        parts = [part(schedule, rank) for rank in range(size)]
        for _ in range(10):
            execute_at_random(parts, 3, rng, size)


def execute_at_random(parts: list[Part], chunks: int, rng: random.Random, size: int) -> None:
    """The kernel's protocol: a count of chunks for each rank and level, each level going through
    the chunks in order.

    Ranks begin and end at any time; a buffer that its rank has done with is overwritten at once.
    """
    buffers = [[rank + 1] * chunks for rank in range(size)]
    done: dict[tuple[int, int], int] = {(rank, 0): 0 for rank in range(size)}
    done |= {(rank, action.level): 0 for rank, mine in enumerate(parts) for action in mine.actions}
    todo: list[tuple[int, Action | None]] = [
        (rank, None) for rank in range(size)
    ]  # None: the rank begins
    todo += [(rank, action) for rank, mine in enumerate(parts) for action in mine.actions]
    ending = set(range(size))
    while todo or ending:
        ready = [
            (rank, action)
            for rank, action in todo
            if action is None or all(done[wait] > done[rank, action.level] for wait in action.waits)
        ]
        over = [
            rank
            for rank in ending
            if all(done[wait] == chunks for wait in parts[rank].last)
            and not any(rank == other for other, _ in todo)
        ]
        assert ready or over, "the ranks wait for one another"
        if over and (not ready or rng.random() < 0.5):
            rank = rng.choice(over)
            assert buffers[rank] == [size * (size + 1) // 2] * chunks
            buffers[rank] = [-1000] * chunks
            ending.discard(rank)
            continue
        rank, action = rng.choice(ready)
        level = action.level if action else 0
        if action is None:
            done[rank, 0] = chunks
        else:
            chunk = done[rank, level]
            own = buffers[rank][chunk] if action.operation is Operation.ADD else 0
            buffers[rank][chunk] = own + buffers[action.source][chunk]
            done[rank, level] += 1
        if done[rank, level] == chunks:
            todo.remove((rank, action))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 13])
def test_actions_wait_for_lower_levels_only(size: int) -> None:
    shape = topology(size)
    for schedule in filter(None, (tree(shape), flat(shape), muji(shape))):
        for rank in range(size):
            for action in part(schedule, rank).actions:
                assert all(level < action.level for _, level in action.waits)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 13])
def test_a_sum_is_complete_once(size: int) -> None:
    shape = topology(size)
    for schedule in filter(None, (tree(shape), flat(shape), muji(shape))):
        ((level, rank),) = totals(schedule, size)
        assert rank == 0
        assert schedule[level] == (Step(Operation.ADD, schedule[level][0].source, 0),)
        assert (*adding(schedule), *copying(schedule)) == schedule
        assert len(adding(schedule)) == level + 1
