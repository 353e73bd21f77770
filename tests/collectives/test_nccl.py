"""NcclSync without GPUs: solvers on the CPU, in threads, with something that does what NCCL does to
memory.
"""

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caffepy.collectives import buckets, one_shot
from caffepy.collectives.buckets import Bucket
from caffepy.collectives.peer_copies import PeerCopies
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.synchronizer import BF16, FLOAT32
from caffepy.collectives.world import World
from caffepy.core.errors import SyncError
from caffepy.device.blob import Array, from_bfloat16, to_bfloat16
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import gradients
from caffepy.net.gradients import large_products
from caffepy.parallel.synchronization import flat_params
from caffepy.solver import Solver
from tests.collectives import test_one_shot, test_peer_copies
from tests.collectives.test_rank_group import together
from tests.collectives.threads_world import ThreadsTransport, Wires
from tests.nets import library
from tests.solver.cases import solver_of

SIZE = 3
NCCL_BFLOAT16 = 9
NET = (
    library.dummies("in", 'type: "gaussian"', 'type: "uniform"', x=(2, 8), y=(2, 4))
    + library.inner_product("first", "x", 12, filler=library.NARROW, top="a")
    + library.inner_product("second", "x", 12, "transpose: true", filler=library.NARROW, top="b")
    + library.relu("relu", "a")
    + library.layer("Eltwise", "sum", "a b", top="c")
    + library.inner_product("last", "c", 4, filler=library.NARROW, top="o")
    + library.euclidean_loss("o", "y")
)


class Communicator:
    """One rank's: waits for all in every call, then reads theirs."""

    calls: list[list[str]]
    meet: threading.Barrier
    given: list[int]

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        assert unique_id == b"id"
        self.size, self.rank = size, rank

    def _all(self, name: str, mine: int, count: int, kind: Any) -> list[Array]:
        self.calls[self.rank].append(name)
        self.given[self.rank] = mine
        self.meet.wait()
        found = [at(pointer, count, kind).copy() for pointer in self.given]
        self.meet.wait()
        return found

    def broadcast(self, mine: int, to: int, count: int, kind: Any, root: int, stream: int) -> None:
        at(to, count, kind)[:] = self._all("broadcast", mine, count, kind)[root]

    def allReduce(self, mine: int, to: int, count: int, kind: Any, how: str, stream: int) -> None:  # noqa: N802
        if kind == NCCL_BFLOAT16:
            assert how == "sum"
            parts = self._all(f"reduce {count} narrow", mine, count, np.uint16)
            total = parts[0]
            for part in parts[1:]:
                total = to_bfloat16(from_bfloat16(total) + from_bfloat16(part))
            at(to, count, np.uint16)[:] = total
            return
        assert how == "mean"
        at(to, count, kind)[:] = np.mean(self._all(f"reduce {count}", mine, count, kind), axis=0)

    def allGather(self, mine: int, to: int, count: int, kind: Any, stream: int) -> None:  # noqa: N802
        at(to, self.size * count, kind)[:] = np.concatenate(self._all("gather", mine, count, kind))

    def destroy(self) -> None:
        self.calls[self.rank].append("destroy")

    def abort(self) -> None:
        self.calls[self.rank].append("abort")


def waited() -> None:
    """The thread of a rank has waited for its GPU."""
    rank = int(threading.current_thread().name)
    Communicator.calls[rank].append("wait")


def at(pointer: int, count: int, kind: Any) -> Array:
    whole = (ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(pointer)
    return np.frombuffer(whole, kind)


@pytest.fixture
def nccl_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class, of a module that was imported with a CuPy that needs no GPU."""
    Communicator.calls = [[] for _ in range(SIZE)]
    Communicator.meet, Communicator.given = threading.Barrier(SIZE, timeout=30), [0] * SIZE
    nccl = SimpleNamespace(
        NcclCommunicator=Communicator,
        NcclError=OSError,
        get_unique_id=lambda: b"id",
        groupStart=lambda: None,
        groupEnd=lambda: None,
        NCCL_AVG="mean",
        NCCL_SUM="sum",
        NCCL_FLOAT32=np.float32,
        NCCL_CHAR=np.int8,
    )
    fake = ModuleType("cupy.cuda")
    stream = SimpleNamespace(ptr=0, synchronize=waited)
    fake.nccl, fake.get_current_stream = nccl, lambda: stream  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake)
    before = sys.modules.pop("caffepy.collectives.nccl", None)
    module = importlib.import_module("caffepy.collectives.nccl")
    monkeypatch.setattr(module, "_address", lambda array: array.ctypes.data)
    monkeypatch.setattr(module, "AbortFlag", lambda: SimpleNamespace(address=0, set=lambda: None))
    yield module.NcclSync
    sys.modules.pop("caffepy.collectives.nccl", None)
    if before:
        sys.modules["caffepy.collectives.nccl"] = before


def trained(
    nccl_sync: Any,
    factors: bool,
    rows: tuple[int, ...] = (2,) * SIZE,
    wire: str = FLOAT32,
    wires: Wires | None = None,
    joined: bool = False,
) -> list[Solver]:
    """Solvers with batches of their own, after four iterations together; with `wires` each on a
    node of its own.
    """
    one_group = RankGroup(SIZE)
    solvers = [solver_of(f"weight_decay: 0.01 random_seed: {rank} ", NET) for rank in range(SIZE)]
    errors: list[BaseException] = []

    def work(rank: int, solver: Solver) -> None:
        group, local = one_group, rank
        if wires:
            world, local = World(ThreadsTransport(wires, rank)), 0
            world.join(1)
            group = RankGroup(1, world=world)
        group.join(local)
        for name in ("x", "y"):
            solver.net.blobs[name].reshape((rows[rank], solver.net.blobs[name].shape[1]))
        made = large_products(solver.net) if factors else {}
        try:
            gather, flats = partial(group.all_gather, local), flat_params(solver, made)
            sync = nccl_sync(group, local, gather, flats, wire=wire, joined=joined)
            solver.synchronize(sync)
            solver.step(4)
            solver.synchronize(None)
            sync.close()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, name=str(i), args=(i, s), daemon=True)
        for i, s in enumerate(solvers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return solvers


def test_factors_give_what_gradients_give(nccl_sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGE", 300)  # first and second
    made = trained(nccl_sync, True)
    calls, *others = Communicator.calls
    assert others == [calls] * (SIZE - 1)
    size = made[0].params.reduced_diff.size
    left = [call for call in calls if call.startswith("reduce")]
    iteration = [*["gather"] * 4, *left[: len(left) // 4]]  # dy and x of two layers come first
    later = 3 * iteration
    first, rest = calls[: -1 - len(later)], calls[-1 - len(later) :]
    assert rest == [*later, "destroy"]
    assert [call for call in first if call != "wait"] == ["broadcast", *iteration]
    assert first[:7] == ["broadcast", "wait", *["gather"] * 4, "wait"]
    assert first[-1] == "wait"
    assert sum(int(call.split()[1]) for call in left) == 4 * (size - 2 * 8 * 12)
    for other in made[1:]:
        np.testing.assert_array_equal(other.params.data, made[0].params.data)
    Communicator.calls = [[] for _ in range(SIZE)]
    reduced = trained(nccl_sync, False)
    assert "gather" not in Communicator.calls[0]
    np.testing.assert_allclose(made[0].params.data, reduced[0].params.data, rtol=1e-5, atol=1e-7)


def test_factors_of_several_nodes_give_what_those_of_one_give(
    nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LARGE", 300)
    one = trained(nccl_sync, True)
    Communicator.calls = [[] for _ in range(SIZE)]
    several = trained(nccl_sync, True, wires=Wires(SIZE))
    assert "gather" in Communicator.calls[0]
    for solver in several:
        np.testing.assert_array_equal(solver.params.data, one[0].params.data)


@pytest.mark.parametrize("factors", [False, True])
def test_gradients_go_as_bf16_and_metrics_do_not(
    factors: bool, nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each bucket one sum of all gradients, whose buffer is that of the largest bucket."""
    monkeypatch.setattr(gradients, "LARGE", 300)
    monkeypatch.setattr(buckets, "LEAST", 400)
    wide = trained(nccl_sync, factors)
    before = [call for call in Communicator.calls[0] if call.startswith("reduce")]
    Communicator.calls = [[] for _ in range(SIZE)]
    made = trained(nccl_sync, factors, wire=BF16)
    calls, *others = Communicator.calls
    assert others == [calls] * (SIZE - 1)
    sums = [call.split() for call in calls if call.startswith("reduce")]
    narrow = [int(call[1]) for call in sums if call[2:] == ["narrow"]]
    exact = [int(call[1]) for call in sums if not call[2:]]
    assert exact == [made[0].params.metrics.size] * 4
    assert sum(narrow) + sum(exact) == sum(int(call.split()[1]) for call in before)
    assert len(narrow) == (4 if factors else 8)  # buckets of four iterations
    for other in made[1:]:
        np.testing.assert_array_equal(other.params.data, made[0].params.data)
    moved = made[0].params.data - wide[0].params.data
    assert 0 < np.linalg.norm(moved) < 1e-2 * np.linalg.norm(wide[0].params.data)


@pytest.mark.parametrize("factors", [False, True])
def test_small_buckets_go_without_nccl(
    factors: bool, nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent during the backward pass but for the last, and the mean is the same; so are
    factors, which copy engines take.
    """
    test_one_shot.in_numpy(monkeypatch)
    test_peer_copies.in_numpy(monkeypatch)
    monkeypatch.setattr(gradients, "LARGE", 300)
    monkeypatch.setattr(buckets, "LEAST", 400)
    by_nccl = trained(nccl_sync, factors)
    Communicator.calls = [[] for _ in range(SIZE)]
    made = trained(nccl_sync, factors, joined=True)
    for calls in Communicator.calls:
        rest = [call for call in calls if call != "wait"]
        assert rest == ["broadcast", "destroy"]
    later = [(0, 1, False), (1, 2, True)] if not factors else [(0, 2, True)]
    for launches in test_one_shot.Run.launches.values():
        assert launches == [(0, 2, True), *later, *later, *later]
    for solver in made:
        np.testing.assert_array_equal(solver.params.data, made[0].params.data)
        np.testing.assert_allclose(solver.params.data, by_nccl[0].params.data, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factors", [False, True])
def test_other_buckets_go_by_copies(
    factors: bool, nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_one_shot.in_numpy(monkeypatch)
    test_peer_copies.in_numpy(monkeypatch)
    monkeypatch.setattr(gradients, "LARGE", 300)
    monkeypatch.setattr(buckets, "LEAST", 400)
    monkeypatch.setattr(one_shot, "MOST", 0)
    sent, send = list[Bucket](), PeerCopies.send
    monkeypatch.setattr(
        PeerCopies, "send", lambda self, part: [sent.append(part), send(self, part)]
    )
    made = trained(nccl_sync, factors, joined=True)
    for calls in Communicator.calls:
        assert [call for call in calls if call != "wait"] == ["broadcast", "destroy"]
    ranges = [r for part in set(sent) for r in part.ranges]
    left_out = 2 * 8 * 12 if factors else 0
    assert (
        sum(stop - start for start, stop in ranges) == made[0].params.reduced_diff.size - left_out
    )
    assert len(sent) == 4 * SIZE * len(set(sent))
    by_nccl = trained(nccl_sync, factors)
    for solver in made:
        np.testing.assert_array_equal(solver.params.data, made[0].params.data)
        np.testing.assert_allclose(solver.params.data, by_nccl[0].params.data, rtol=1e-5, atol=1e-7)


def test_batches_of_different_sizes_are_refused(
    nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LARGE", 300)
    with pytest.raises(SyncError, match="need batches of one size, but theirs differ"):
        trained(nccl_sync, True, rows=(2, 2, 3))


def test_in_the_first_iteration_nobody_sets_up_while_another_waits(
    nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 makes its first product of factors, and no other has launched what comes after that."""
    monkeypatch.setattr(gradients, "LARGE", 300)
    launched, early = threading.Event(), list[bool]()
    product, reduce = InnerProduct.weight_gradient, Communicator.allReduce

    def made(
        layer: InnerProduct, dy: Array, x: Array, accumulate: bool, scale: float = 1.0
    ) -> None:
        if threading.current_thread().name == "2" and scale != 1 and not early:
            early.append(launched.wait(0.2))
        product(layer, dy, x, accumulate, scale)

    def all_reduce(communicator: Communicator, *arguments: Any) -> None:
        launched.set()
        reduce(communicator, *arguments)

    monkeypatch.setattr(InnerProduct, "weight_gradient", made)
    monkeypatch.setattr(Communicator, "allReduce", all_reduce)
    trained(nccl_sync, True)
    assert early == [False]
    assert launched.is_set()


def test_a_communicator_ends_once(nccl_sync: Any) -> None:
    group, solver = RankGroup(1), solver_of("", NET)
    sync = nccl_sync(group, 0, lambda value: [value], flat_params(solver))
    group.abort(0, OSError("it went wrong"))
    sync.close()
    assert Communicator.calls[0] == ["abort"]
    solver.close()


def test_all_ranks_are_told_of_an_abort_before_a_communicator_ends(
    nccl_sync: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank that goes on may send more to one that still believes all that comes."""
    group, order = RankGroup(SIZE), list[str]()
    flag = SimpleNamespace(address=0, set=lambda: order.append("told"))
    monkeypatch.setattr(sys.modules[nccl_sync.__module__], "AbortFlag", lambda: flag)
    monkeypatch.setattr(nccl_sync, "_abort", lambda sync: order.append("abort"))

    def work(rank: int) -> None:
        solver = solver_of("", NET)
        nccl_sync(group, rank, partial(group.all_gather, rank), flat_params(solver))
        solver.close()

    assert together(SIZE, work, group) == [None] * SIZE
    group.abort(0, OSError("it went wrong"))
    assert order == ["told"] * SIZE + ["abort"] * SIZE


@pytest.mark.parametrize("ends", [True, False])
def test_an_abort_lets_a_call_end_first(
    nccl_sync: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A call that waits for a rank does not end by itself: the abort does not wait for it."""
    group, solver = RankGroup(1), solver_of("", NET)
    sync = nccl_sync(group, 0, lambda value: [value], flat_params(solver))
    inside, aborted, order = threading.Event(), threading.Event(), list[str]()

    def reduce(*arguments: Any) -> None:
        inside.set()
        if ends:
            time.sleep(0.2)
        else:
            assert aborted.wait(30)
        order.append("call")

    def abort(communicator: Communicator) -> None:
        order.append("abort")
        aborted.set()

    monkeypatch.setattr(Communicator, "allReduce", reduce)
    monkeypatch.setattr(Communicator, "abort", abort)

    def call() -> None:
        with suppress(OSError):  # for which the group has stopped
            sync.reduce(1)

    calling = threading.Thread(target=call, name="0", daemon=True)
    calling.start()
    assert inside.wait(30)
    group.abort(0, OSError("it went wrong"))
    assert aborted.wait(30)
    calling.join(30)
    assert order == (["call", "abort"] if ends else ["abort", "call"])
    solver.close()


def test_no_call_begins_after_an_abort(nccl_sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group, solver = RankGroup(1), solver_of("", NET)
    sync = nccl_sync(group, 0, lambda value: [value], flat_params(solver))
    monkeypatch.setattr(group, "check", lambda rank: None)  # it looked just before
    group.abort(0, OSError("it went wrong"))
    with pytest.raises(SyncError, match="was aborted"):
        sync.reduce(1)
    assert "reduce 1" not in Communicator.calls[0]
    solver.close()
