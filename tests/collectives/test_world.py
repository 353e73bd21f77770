import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from caffepy.collectives import world
from caffepy.collectives.rank_group import GroupStoppedError, RankGroup
from caffepy.collectives.schedule import flat, muji, tree
from caffepy.collectives.sync import Choice, crossing_bytes
from caffepy.collectives.synchronizer import BF16, FLOAT32, FlatParams
from caffepy.collectives.topology import all_joined
from caffepy.collectives.world import DeadNodeError, World
from caffepy.core.errors import (
    CaffeError,
    ConfigError,
    DataError,
    RecordError,
    SyncError,
    UserCodeError,
)
from caffepy.device.blob import Array, from_bfloat16, to_bfloat16
from caffepy.device.device import Device
from tests.collectives.test_rank_group import synchronize
from tests.collectives.threads_world import ThreadsTransport, Wires, run_nodes


def test_all_nodes_have_the_values_of_all() -> None:
    def work(world: World) -> object:
        world.barrier()
        values = [world.gather((world.node, i)) for i in range(3)]
        return values, [world.broadcast(f"{world.node} {i}") for i in range(2)]

    values = [[(node, i) for node in range(3)] for i in range(3)]
    assert run_nodes(3, work) == [(values, ["0 0", "0 1"])] * 3


def test_one_process_is_a_world() -> None:
    world = World(solvers=2)
    assert world.gather(7) == [7]
    assert world.broadcast(7) == 7
    assert (world.first_rank, world.size, world.writes_files, world.vote(5)) == (0, 2, True, 5)
    world.barrier()
    world.close()


def test_a_node_that_waits_may_answer_late_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sleep takes 100 times as long there, and the answer comes at the fourth look."""

    class Request:
        value, looks = True, 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 3

    def sleep(pause: float) -> None:
        clock[0] += 100 * pause

    clock = [0.0]
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    transport = SimpleNamespace(node=0, nodes=2, hosts="ab")
    transport.receive = transport.send = lambda *_: Request()
    assert World(transport, 1).find_hung([]) == []


def test_a_long_wait_polls_seldom_and_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time in which a poll takes 20 us."""

    class Request:
        value = None

        def done(self) -> bool:
            clock[0] += 20e-6
            polls.append(clock[0])
            return clock[0] >= seconds

    def sleep(pause: float) -> None:
        clock[0] += pause + 60e-6  # what Linux adds

    monkeypatch.setattr(world, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    waiting = World()
    waiting.poll = lambda missing: None
    for seconds in (1e-3, 10e-3, 0.1, 3.0):
        clock, polls = [0.0], list[float]()
        waiting.wait([(1, Request())])
        assert clock[0] < 1.07 * seconds + 200e-6
    assert 20e-6 * len(polls) < 0.02 * seconds


def test_ranks_are_counted_over_unequal_nodes() -> None:
    def work(world: World) -> object:
        world.join([2, 1, 3][world.node])
        assert [world.node_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
        return world.first_rank, world.size, world.describe(1), world.describe(2)

    names = "node 1 (host host1, universal rank 2)", "node 2 (host host2, universal ranks 3 to 5)"
    assert run_nodes(3, work) == [(first, 6, *names) for first in (0, 2, 3)]


def test_a_vote_is_heard_by_all_at_the_same_call() -> None:
    def work(world: World) -> object:
        heard = []
        for call in range(400):
            asked = {1: 1, 2: 4}.get(world.node, 0) if call == 40 + 17 * world.node else 0
            if flags := world.vote(asked):
                heard.append((call, flags))
            if world.node == 2:
                time.sleep(2e-4)
        world.close()
        return heard

    first, *others = run_nodes(3, work)
    assert others == [first, first]
    assert np.bitwise_or.reduce([flags for _, flags in first]) == 5
    assert all(call > 57 for call, _ in first)


def test_arrays_cross_in_their_order() -> None:
    def work(world: World) -> object:
        other, mine = 1 - world.node, [np.full(5, 10 * world.node + i, "f4") for i in range(2)]
        got = [np.empty(5, "f4") for _ in range(2)]
        world.exchange([(other, a) for a in mine], [(other, a) for a in got])
        return [float(a[4]) for a in got]

    assert run_nodes(2, work) == [[10.0, 11.0], [0.0, 1.0]]


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize("name", ["muji", "tree", "flat"])
def test_the_mean_does_not_depend_on_the_split(
    name: str, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of four solvers on 1, 2 or 4 nodes, sent in several pieces, to the bit."""
    monkeypatch.setattr("caffepy.collectives.sync.PIECE", 300)
    shape = all_joined(4)
    schedule = {"tree": tree, "muji": muji, "flat": flat}[name](shape)
    rng = np.random.default_rng(0)
    given = rng.normal(size=(4, 1001)).astype("f4")
    params = rng.normal(size=(4, 1001)).astype("f4")

    def work(world: World) -> object:
        size = split[world.node]
        world.join(size)
        group = RankGroup(size, world=world)
        first, results = world.first_rank, {}

        def rank(i: int) -> None:
            data, diff = params[first + i].copy(), given[first + i].copy()
            flats = FlatParams(Device(), data, diff)
            sync = Choice(name, schedule, name == "tree").join(group, i, flats)
            with group.guard(i):
                synchronize(sync)
            results[first + i] = (data, diff if sync.updates else None)

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(1, size)]
        [thread.start() for thread in threads]
        rank(0)
        [thread.join() for thread in threads]
        return results

    results = {}
    for part in run_nodes(len(split), work):
        if isinstance(part, BaseException):
            raise part
        results |= part
    want = ((given[0] + given[1]) + (given[2] + given[3])) * np.float32(0.25)
    if name == "flat":
        want = (((given[0] + given[1]) + given[2]) + given[3]) * np.float32(0.25)
    for rank in range(4):
        data, diff = results[rank]
        np.testing.assert_array_equal(data, params[0] if name == "tree" else params[rank])
        if diff is not None:
            np.testing.assert_array_equal(diff, want)
    assert (results[1][1] is None) == (name == "tree")


def averaged(
    split: list[int], choice: Choice, given: Array, metrics: int
) -> tuple[dict[int, Array], int, float]:
    """Return the mean of these gradients in each rank that updates, the bytes of arrays that nodes
    sent, and those that are told of.
    """
    sent, put, lock = [0], ThreadsTransport.send_array, threading.Lock()

    def send_array(self: ThreadsTransport, node: int, tag: world.Tag, array: Array) -> object:
        with lock:
            sent[0] += array.nbytes
        return put(self, node, tag, array)

    def work(world: World) -> object:
        size = split[world.node]
        world.join(size)
        group = RankGroup(size, world=world)
        first, results = world.first_rank, {}

        def rank(i: int) -> None:
            diff = given[first + i].copy()
            flats = FlatParams(Device(), np.zeros_like(diff), diff, metrics=metrics)
            sync = choice.join(group, i, flats)
            with group.guard(i):
                sync.on_gradients_ready()
            if sync.updates:
                results[first + i] = diff

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(1, size)]
        [thread.start() for thread in threads]
        rank(0)
        [thread.join() for thread in threads]
        count = given.shape[1] - metrics
        return results, crossing_bytes(choice, world, count, metrics) * world.nodes

    results, told = {}, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadsTransport, "send_array", send_array)
        for part in run_nodes(len(split), work):
            if isinstance(part, BaseException):
                raise part
            results |= part[0]
            told = part[1]
    return results, sent[0], told


@pytest.mark.parametrize("split", [[2, 2], [1, 3], [3, 1], [1, 1, 1, 1], [6, 2], [3, 2, 3]])
@pytest.mark.parametrize("name", ["muji", "tree", "flat"])
def test_gradients_between_nodes_as_bf16(
    name: str, split: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the bytes; the same bits in all ranks; off by a rounding on each way; metrics exact."""
    monkeypatch.setattr("caffepy.collectives.sync.PIECE", 300)
    size, metrics = sum(split), 16
    shape = all_joined(size)
    schedule = {"tree": tree, "muji": muji, "flat": flat}[name](shape)
    given = np.random.default_rng(0).normal(size=(size, 1000 + metrics)).astype("f4")
    choice = Choice(name, schedule, name == "tree")
    exact, before, told = averaged(split, choice, given, metrics)
    ways = before // (4 * given.shape[1])
    if name == "tree":  # what is told counts the parameters that go back, too
        told -= crossing_back(choice, split) * 4 * given.shape[1]
    assert told == before == ways * 4 * given.shape[1]
    rounded, now, told = averaged(split, choice._replace(wire=BF16), given, metrics)
    if name == "tree":
        told -= crossing_back(choice, split) * 4 * given.shape[1]
    assert told == now == ways * (2 * 1000 + 4 * metrics)
    assert rounded.keys() == exact.keys() == ({0} if name == "tree" else set(range(size)))
    for array in rounded.values():
        np.testing.assert_array_equal(array, rounded[0])
    np.testing.assert_array_equal(rounded[0][1000:], exact[0][1000:])
    error = np.abs(rounded[0] - exact[0])[:1000]
    # A partial sum of at most all ranks' is rounded on each way, to 2^-9 of it.
    bound = (ways + 1) * 2**-9 * np.abs(given).sum(axis=0)[:1000] / size
    assert error.max() > 0
    assert np.all(error <= bound)


def crossing_back(choice: Choice, split: list[int]) -> int:
    """The number of arrays that go between nodes where the root's come to all."""
    assert choice.schedule
    nodes = np.repeat(range(len(split)), split)
    back = [level for level in choice.schedule if level[0].operation.name == "COPY"]
    ways = [{(s.source, nodes[s.destination]) for s in level} for level in back]
    return sum(nodes[source] != node for level in ways for source, node in level)


def test_the_sum_itself_is_rounded_so_that_all_have_what_is_sent() -> None:
    given = np.array([[1 + 2**-9], [2**-12]], "f4")
    choice = Choice("flat", flat(all_joined(2)), wire=BF16)
    means, _, _ = averaged([1, 1], choice, given, 0)
    want = from_bfloat16(to_bfloat16(given[0] + given[1])) / 2
    assert want != (given[0] + given[1]) / 2
    np.testing.assert_array_equal([means[0], means[1]], [want, want])
    alone, sent, _ = averaged([2], choice, given, 0)
    np.testing.assert_array_equal(alone[0], (given[0] + given[1]) / 2)
    assert sent == 0
    assert choice._replace(wire=FLOAT32) == Choice("flat", flat(all_joined(2)))


class WaitingGroups:
    """Three nodes of two ranks that meet again and again, until node 1 does `act` instead, once all
    have met; `groups` are theirs.
    """

    def __init__(self) -> None:
        self.groups: dict[int, RankGroup] = {}
        self._ended = threading.Semaphore(0)  # released by each node

    def run(self, wires: Wires, act: dict[int, Callable[[], object]]) -> list[object]:
        """Return the errors of the roots."""

        def work(world: World) -> object:
            world.join(2)
            group = self.groups[world.node] = RankGroup(2, {}, world)
            group.phase = "step"
            group.watch_nodes()
            errors: dict[int, BaseException] = {}

            def rank(i: int) -> None:
                try:
                    with group.guard(i):
                        for number in range(10**6):
                            if number == 5 and world.node == 1 and i in act:
                                act[i]()
                            group.barrier(i)
                except BaseException as error:
                    errors[i] = error

            thread = threading.Thread(target=rank, args=(1,))
            thread.start()
            rank(0)
            thread.join()
            group.leave_nodes()
            self._ended.release()
            assert isinstance(errors[1], GroupStoppedError | DataError)
            return errors[0]

        return run_nodes(3, work, wires)

    def end_after_the_others(self) -> None:
        """End a root as soon as the other nodes have ended."""
        for _ in range(2):
            assert self._ended.acquire(timeout=40)
        raise SystemExit


def test_an_error_of_one_rank_ends_all_nodes_with_its_name() -> None:
    def fails() -> None:
        raise DataError("no record 7", "layer data")

    errors = WaitingGroups().run(Wires(3), {1: fails})
    assert [(type(e), str(e)) for e in errors] == [
        (DataError, "rank 3 (host host1): layer data: no record 7")
    ] * 3


def test_a_dead_node_is_named() -> None:
    wires, nodes = Wires(3), WaitingGroups()

    def dies() -> None:
        wires.kill(1)
        nodes.end_after_the_others()

    results = nodes.run(wires, {0: dies})
    for error in (results[0], results[2]):
        assert isinstance(error, DeadNodeError)
        assert str(error) == "node 1 (host host1, universal ranks 2 to 3) has died"


def test_nodes_that_are_cut_off_end_at_the_deadline() -> None:
    wires, nodes = Wires(3), WaitingGroups()

    def cut() -> None:
        wires.cut()
        for group in nodes.groups.values():
            group.deadlines = {"step": 1.0}

    results = nodes.run(wires, {0: cut})
    names = [f"node {n} (host host{n}, universal ranks {2 * n} to {2 * n + 1})" for n in range(3)]
    assert [(type(error), str(error)) for error in results] == [
        (SyncError, f"{names[a]} and {names[b]} made no progress for 1 s (step)")
        for a, b in ((1, 2), (0, 2), (0, 1))
    ]


def test_a_node_that_hangs_is_named_and_not_those_that_wait_for_it() -> None:
    """Node 2 waits for node 0, which waits for node 1, and loses its patience first."""
    nodes = WaitingGroups()

    def hangs() -> None:
        nodes.groups[2].deadlines = {"step": 1.0}
        nodes.end_after_the_others()

    results = nodes.run(Wires(3), {0: hangs})
    told = "node 1 (host host1, universal ranks 2 to 3) made no progress for 1 s (step)"
    assert [str(error) for error in (results[0], results[2])] == [told] * 2


def test_the_lowest_node_that_answers_writes_files() -> None:
    """Node 2 finds that nodes 0 and 1 do not answer; node 3 hears it from node 2."""
    wires = Wires(4)

    def work(world: World) -> object:
        if world.node == 2:
            world.dead |= {0, 1}
            world.send_failure(SyncError("no progress"))
        if world.node == 3:
            while world.failure() is None:
                time.sleep(1e-3)
        return world.node < 2 or world.close(failed=True), world.writes_files

    begun = time.monotonic()
    assert run_nodes(4, work, wires)[2:] == [(False, True), (True, False)]
    assert time.monotonic() - begun < world.LAST_WAIT / 2


@pytest.mark.parametrize("kind", [DataError, ConfigError, RecordError, UserCodeError, SyncError])
def test_another_nodes_error_ends_with_its_exit_code(kind: type[CaffeError]) -> None:
    def work(world: World) -> object:
        if world.node:
            world.send_failure(kind("wrong", *[ValueError()] * (kind is UserCodeError)))
            return None
        while not (error := world.failure()):
            time.sleep(1e-3)
        return error

    error, _ = run_nodes(2, work)
    assert (error.exit_code, str(error)) == (kind.exit_code, "wrong")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_is_late_in_the_set_up_is_named_by_all(late: int) -> None:
    others = threading.Barrier(3)  # the late one goes on when all others have told it

    def work(world: World) -> object:
        world.join(1)
        world.set_up.deadline = 1.0
        if world.node == late:
            others.wait(20)
            return None
        with pytest.raises(SyncError) as caught:
            world.barrier()
        world.send_failure(caught.value)
        others.wait(20)
        return str(caught.value)

    told = run_nodes(3, work)
    del told[late]
    name = f"node {late} (host host{late}, universal rank {late})"
    assert set(told) == {f"{name} did not answer for 1 s (set-up)"}
