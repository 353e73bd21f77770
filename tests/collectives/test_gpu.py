"""Synchronizers on several GPUs: sums, parameters, replays, staging, and the end when a rank fails."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caffepy.collectives import peers
from caffepy.collectives.buckets import Bucket
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import NAMES, Choice, choose
from caffepy.collectives.synchronizer import BF16, FlatParams, Synchronizer
from caffepy.collectives.topology import Topology
from caffepy.core.errors import DataError
from caffepy.device.blob import from_bfloat16, to_bfloat16
from caffepy.device.cuda import CudaDevice
from caffepy.device.gpus import count_gpus
from tests.collectives.test_rank_group import synchronize, together

pytestmark = pytest.mark.gpus(2)

COUNTS = (1, 3, 16, 1000, 4097, 200_003, 2_000_000, 4_500_000)

ALONE = "nccl alone"
"""NCCL for all buckets, also for the small ones."""

Work = Callable[[Synchronizer, CudaDevice, Any, Any], None]


def machine(joined: bool = True) -> Topology:
    """All GPUs, at most 8; not joined: as if none reached another's memory."""
    found = peers.prepare(peers.query(range(min(count_gpus(), 8))))
    return found if joined else replace(found, access=((False,) * found.size,) * found.size)


WAYS = (*NAMES, ALONE)


def way(name: str, shape: Topology) -> Choice:
    if name == ALONE:
        return choose("nccl", shape, gpu=True)._replace(joined=False)
    if name == "muji" and shape.size not in (2, 4, 8):
        pytest.skip(f"muji has no schedule for {shape.size} GPUs")
    return choose(name, shape, gpu=True)


def on_all(
    shape: Topology, choice: Choice, size: int, work: Work, group: RankGroup | None = None
) -> list[Any]:
    """Run work(synchronizer, device, data, diff) in all ranks; data is filled with rank, diff with
    random numbers.
    """
    group = group or RankGroup(shape.size)
    devices = [CudaDevice(index) for index in shape.devices]

    def rank_work(rank: int) -> None:
        device = devices[rank]
        with device.scope():
            data = device.on_device(np.full(size, rank, np.float32))
            diff = device.on_device(gradients(rank, size))
            buckets = [
                Bucket(((size // 2, size),), frozenset([2])),
                Bucket(((0, size // 2),), frozenset([1])),
            ]
            mine = choice.join(
                group, rank, FlatParams(device, data, diff, buckets if size > 1 else ())
            )
            work(mine, device, data, diff)
            device.synchronize()
            group.barrier(rank)
            mine.close()

    return together(shape.size, rank_work, group)


def gradients(rank: int, size: int) -> Any:
    return np.random.default_rng(rank).integers(-50, 50, size).astype(np.float32)


def mean(ranks: int, size: int) -> Any:
    return np.sum([gradients(rank, size) for rank in range(ranks)], axis=0) / ranks


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_mean_comes_to_all_who_update_and_the_roots_parameters_to_the_others(
    name: str, size: int, joined: bool
) -> None:
    shape = machine(joined)
    choice = way(name, shape) if joined or name != "muji" else way("flat", shape)
    expected = mean(shape.size, size)

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        assert mine.capturable == (joined or name == "nccl")
        for _ in range(3):
            device.upload(gradients(mine.rank, size), diff)
            synchronize(mine, 2, 1, 0)
            if mine.updates:
                np.testing.assert_allclose(device.on_host(diff), expected, rtol=1e-5, atol=1e-5)
            if name in ("nccl", "tree"):
                np.testing.assert_array_equal(device.on_host(data), 0)

    assert on_all(shape, choice, size, work) == [None] * shape.size


@pytest.mark.parametrize("size", [16, 4097, 400_000, 4_500_064])
@pytest.mark.parametrize("name", WAYS)
def test_replays_give_what_calls_give(name: str, size: int) -> None:
    shape = machine()
    expected = mean(shape.size, size)

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        fresh = diff.copy()

        def step() -> None:
            diff[...] = fresh
            synchronize(mine, 2, 1, 0)

        step()
        step()
        graph = device.capture(step)
        for _ in range(5):
            diff.fill(mine.rank)
            for _ in range(4):
                graph.replay()
            if mine.updates:
                np.testing.assert_allclose(device.on_host(diff), expected, rtol=1e-5, atol=1e-5)
            mine.reduce(size // 3)  # of another size, in between
        device.synchronize()

    assert on_all(shape, way(name, shape), size, work) == [None] * shape.size


@pytest.mark.parametrize("size", [7, 2048, 4097, 400_000, 4_500_064])
def test_replays_of_ranks_that_are_late_by_turns_mix_no_iterations(size: int) -> None:
    """Each has other gradients; all sums are exact."""
    shape = machine()
    expected = mean(shape.size, size)

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        fresh, number, total = diff.copy(), diff.copy(), diff.copy()
        number.fill(0)
        total.fill(0)

        def step() -> None:
            np.add(number, 1, out=number)
            np.multiply(fresh, number, out=diff)
            synchronize(mine, 2, 1, 0)
            np.add(total, diff, out=total)

        step()
        step()
        graph = device.capture(step)
        late = np.random.default_rng(mine.rank).choice([0, 0, 0, 0.002], 60)
        for seconds in late:
            time.sleep(seconds)
            graph.replay()
        count = 2 + len(late)
        found = device.on_host(total) / (count * (count + 1) // 2)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    assert on_all(shape, way("nccl", shape), size, work) == [None] * shape.size


@pytest.mark.parametrize("size", [16, 4097, 400_000])
def test_small_gradients_are_added_in_the_order_of_ranks(size: int) -> None:
    shape = machine()
    n = shape.size
    given = [np.random.default_rng(rank).normal(size=size).astype("f4") for rank in range(n)]
    expected = given[0].copy()
    for other in given[1:]:
        expected += other
    expected *= np.float32(1 / n)

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        device.upload(given[mine.rank], diff)
        mine.reduce(size)
        np.testing.assert_array_equal(device.on_host(diff), expected)

    assert on_all(shape, way("nccl", shape), size, work) == [None] * n


@pytest.mark.parametrize("size", [32, 4096, 2_000_000])
def test_gradients_in_16_bits_are_alike_in_all_ranks(size: int) -> None:
    """Each value and each sum of two is rounded to 8 bits; a replay gives what calls give."""
    shape = machine()
    n, results = shape.size, dict[int, Any]()
    given = [np.random.default_rng(rank).normal(size=size).astype("f4") for rank in range(n)]

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        fresh = device.on_device(given[mine.rank])

        def step() -> None:
            diff[...] = fresh
            synchronize(mine, 2, 1, 0)

        step()
        step()
        results[mine.rank] = called = device.on_host(diff)
        graph = device.capture(step)
        diff.fill(0)
        graph.replay()
        np.testing.assert_array_equal(device.on_host(diff), called)
        device.synchronize()

    choice = way("nccl", shape)._replace(wire=BF16)
    assert on_all(shape, choice, size, work) == [None] * n
    error = np.abs(results[0] - np.mean(given, axis=0))
    assert error.max() > 0
    assert np.all(error <= n * 2**-8 * (1 + 2**-8) * np.mean(np.abs(given), axis=0))
    if n == 2:
        rounded = [from_bfloat16(to_bfloat16(values)) for values in given]
        total = from_bfloat16(to_bfloat16(np.add(*rounded)))
        np.testing.assert_array_equal(results[0], total / 2)
    for array in results.values():
        np.testing.assert_array_equal(array, results[0])


@pytest.mark.parametrize("name", WAYS)
def test_a_rank_that_fails_ends_what_waits_on_the_gpus_of_others(name: str) -> None:
    shape, group = machine(), RankGroup(machine().size)
    choice = way(name, shape)._replace(root_updates=False)
    ended, sides = [], []

    def work(mine: Synchronizer, device: CudaDevice, data: Any, diff: Any) -> None:
        sides.append(mine)
        mine.reduce(diff.size)
        device.synchronize()
        group.barrier(mine.rank)
        if mine.rank == shape.size - 1:
            time.sleep(0.5)  # the others wait for this rank by now
            raise DataError("no more images")
        mine.reduce(diff.size)
        device.synchronize()
        ended.append(mine.rank)

    raised = on_all(shape, choice, 1_000_000, work, group)
    assert isinstance(raised[-1], DataError)
    assert all(raised)
    assert [ctypes.c_int.from_address(mine.abort_flag).value for mine in sides] == [1] * shape.size
    if not name.startswith("nccl"):  # which may refuse the call
        assert sorted(ended) == list(range(shape.size - 1))
