"""Filters: payloads are small, decode to what was sent, and what was kept back comes later."""

import pickle
import random
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager
from math import inf, nan, sqrt
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import UsageError
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.filters import Filters, decode, differing_rows, nbytes, parse
from caffepy.parallel.parameter_server.messages import COORDINATOR, Nesterov, Push, Rule
from caffepy.parallel.parameter_server.ranges import Blob, KeyRange, key_ranges
from tests.parallel.parameter_server.threads_engine import ThreadsEngine, serving

SIZE = 100_000
RANGE = KeyRange("ip", 0, SIZE)
ROWS = KeyRange("embed", 0, SIZE, row=50)
MEAN = KeyRange("bn", 0, SIZE, is_mean=True)


def noise(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def some_rows(seed: int, share: float = 0.05) -> np.ndarray:
    array = noise(seed).reshape(-1, ROWS.row)
    array[np.random.default_rng(seed).random(len(array)) >= share] = 0
    return array.reshape(-1)


def test_a_list_of_filters_is_read() -> None:
    assert parse("") == Filters()
    assert parse("bf16,significant:1.5,zlib") == Filters(True, 1.5, True)
    assert parse("zlib") == Filters(zlib=True)


WRONG = (
    "bf17 bf16:1 zlib:9 top:3 significant significant: significant:x significant:0 significant:-1 "
    "significant:nan significant:inf"
)


@pytest.mark.parametrize("text", [*WRONG.split(), "bf16, zlib"])
def test_another_filter_is_refused_with_the_names_of_all(text: str) -> None:
    with pytest.raises(UsageError, match=r"is none of bf16, significant:T .*, zlib"):
        parse(text)


def test_without_filters_an_array_is_sent_as_it_is() -> None:
    filters, array = Filters(), noise()
    assert filters.encode(0, RANGE, array) is array
    assert filters.bytes_before == filters.bytes_after == array.nbytes


def nearest_bfloat16(x: float) -> float:
    """The neighbour with the smaller distance; of two the one with the even last bit."""
    below = np.array([x], np.float32).view(np.uint32) & 0xFFFF0000
    both = [float((below + step).view(np.float32)[0]) for step in (0, 0x10000)]
    distances = [abs(x - y) for y in both]
    if distances[0] != distances[1]:
        return both[distances.index(min(distances))]
    return both[int(below[0] >> 16 & 1)]


def test_bf16_rounds_to_the_nearest_and_ties_to_even() -> None:
    ties = (np.arange(0x3F80, 0x3F90, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    array = np.concatenate([noise(size=5000), 1e-39 * noise(1, 100), ties, -ties])
    payload = parse("bf16").encode(0, RANGE, array)
    assert nbytes(payload) == array.nbytes / 2
    np.testing.assert_array_equal(decode(payload), [nearest_bfloat16(float(x)) for x in array])


@pytest.mark.parametrize("text", ["bf16", "significant:1.5", "bf16,significant:1.5,zlib"])
def test_what_is_not_finite_arrives_and_does_not_stay(text: str) -> None:
    filters, array = parse(text), noise()
    array[[3, 4, 50_000]] = inf, -inf, nan
    array.view(np.uint32)[50_000] |= 0x3FFFFF  # a NaN that another rounding makes -0
    sent = decode(filters.encode(0, RANGE, array))
    np.testing.assert_array_equal(sent[[3, 4, 50_000]], array[[3, 4, 50_000]])
    assert np.isfinite(decode(filters.encode(0, RANGE, noise(1)))).all()


@pytest.mark.parametrize("text", ["significant:1.75", "bf16,significant:1.5"])
def test_significant_sends_the_large_elements_in_a_tenth_of_the_bytes(text: str) -> None:
    filters, array = parse(text), np.random.default_rng(0).laplace(size=SIZE).astype(np.float32)
    payload = filters.encode(0, RANGE, array)
    sent = decode(payload)
    large = np.abs(array) > filters.significant * sqrt(np.mean(array.astype(float) ** 2))
    np.testing.assert_array_equal(sent != 0, large)
    np.testing.assert_allclose(sent[large], array[large], rtol=2**-8)
    assert nbytes(payload) < 0.13 * array.nbytes
    assert filters.bytes_after == nbytes(payload)


@pytest.mark.parametrize("text", ["significant:1.75", "bf16,significant:1.5"])
def test_what_was_not_significant_is_sent_later(text: str) -> None:
    filters, pushed, received = parse(text), np.zeros(SIZE), np.zeros(SIZE)
    for seed in range(5):
        array = noise(seed)
        pushed += array
        received += decode(filters.encode(0, RANGE, array))
    assert np.abs(pushed - received).max() > 1
    for _ in range(60):
        received += decode(filters.encode(0, RANGE, np.zeros(SIZE, np.float32)))
    np.testing.assert_allclose(received, pushed, atol=1e-3)


@pytest.mark.parametrize("text", ["", "significant:1.75", "bf16,significant:1.5"])
def test_a_worker_has_its_own_changes_whether_sent_or_not(text: str) -> None:
    filters, own, servers = parse(text), np.zeros(SIZE), np.zeros(SIZE, np.float32)
    for seed in range(5):
        array = noise(seed)
        own += array
        servers += decode(filters.encode(0, RANGE, array))
        np.testing.assert_allclose(filters.add_rest(0, servers), own, atol=1e-5)


def test_ranges_do_not_share_what_was_kept() -> None:
    filters = parse("significant:1.5")
    filters.encode(0, RANGE, noise())
    payload = filters.encode(1, RANGE, noise(1))
    np.testing.assert_array_equal(
        decode(payload), decode(parse("significant:1.5").encode(0, RANGE, noise(1)))
    )


@pytest.mark.parametrize("text", ["", "bf16", "zlib", "bf16,zlib"])
def test_rows_that_are_zero_are_not_sent(text: str) -> None:
    filters, array = parse(text), some_rows(0)
    payload = filters.encode(0, ROWS, array)
    used = array.reshape(-1, ROWS.row).any(axis=1).mean()
    assert nbytes(payload) < 1.05 * used * array.nbytes / (2 if "bf16" in text else 1)
    np.testing.assert_allclose(decode(payload), array, rtol=2**-8 if "bf16" in text else 0)
    everywhere = noise()
    assert nbytes(Filters().encode(0, ROWS, everywhere)) == everywhere.nbytes


@pytest.mark.parametrize("share", [0, 0.1, 0.6, 1])
def test_rows_that_differ_are_found_wherever_they_do(share: float) -> None:
    rng = np.random.default_rng(0)
    others = rng.standard_normal((200, 5)).astype(np.float32)
    rows, differ = others.copy(), rng.random(200) < share
    for k in np.flatnonzero(differ):
        rows[k, rng.integers(5) if rng.random() < 0.5 else 0] += 1
    np.testing.assert_array_equal(differing_rows(rows, others), differ)


def test_rows_far_apart_find_their_places() -> None:
    for distance in (1, 253, 254, 255, 256, 509, 510, 511, 1999):
        array = np.zeros(SIZE, np.float32)
        array.reshape(-1, ROWS.row)[::distance] = 1
        array.reshape(-1, ROWS.row)[-1] = 2
        np.testing.assert_array_equal(decode(Filters().encode(0, ROWS, array)), array)
    nothing = np.zeros(SIZE, np.float32)
    payload = Filters().encode(0, ROWS, nothing)
    assert nbytes(payload) == 0
    np.testing.assert_array_equal(decode(payload), nothing)


def test_means_lose_nothing() -> None:
    array = noise()
    payload = parse("bf16,significant:1.5,zlib").encode(0, MEAN, array)
    np.testing.assert_array_equal(decode(payload), array)


def test_zlib_deflates_what_shrinks_and_nothing_else() -> None:
    filters, steps = parse("zlib"), np.round(noise())
    payload = filters.encode(0, RANGE, steps)
    assert nbytes(payload) < 0.5 * steps.nbytes
    np.testing.assert_array_equal(decode(payload), steps)
    bits = np.random.default_rng(0).integers(0, 2**30, SIZE, np.uint32)  # 15 bytes hold 16
    array = bits.view(np.float32)
    assert filters.encode(0, RANGE, array) is array


def test_pickle_carries_arrays_out_of_band() -> None:
    payload = parse("bf16,significant:1.5").encode(0, RANGE, noise())
    buffers: list[pickle.PickleBuffer] = []
    push = pickle.dumps([Push(0, 0, 0, 1, payload)], protocol=5, buffer_callback=buffers.append)
    assert len(push) < 1000
    assert len(buffers) == 2
    carried = pickle.loads(push, buffers=[buffer.raw().toreadonly() for buffer in buffers])
    np.testing.assert_array_equal(decode(carried[0].payload), decode(payload))


# with servers

BLOBS = [Blob("embed", 0, 6000, row=20), Blob("ip", 6000, 500), Blob("bn", 6500, 10, is_mean=True)]
RANGES = key_ranges(BLOBS, largest=2000)
ALL = 6510


class Engine(ThreadsEngine):
    """An engine that can lose what a primary sends to its replicas."""

    loses = False

    def call(self, actor: str, method: str, *arguments: object) -> "Future[Any]":
        if self.loses and method == "replicate":
            return Future()
        return super().call(actor, method, *arguments)


def servers(rule: Rule, watch: bool = False) -> AbstractContextManager[Engine]:
    return serving(Engine(), RANGES, rule, deadline=5.0, watch=watch)


def joined(engine: ThreadsEngine, count: int, **options: Any) -> list[Client]:
    clients = [Client(engine, worker, patience=10, **options) for worker in range(count)]
    for client in clients:
        client.join(1)
    return clients


def change(seed: int) -> np.ndarray:
    """Of the rows of the first blob some; of the last blob nothing. All of one sign."""
    rng, array = np.random.default_rng(seed), (-1) ** seed * np.abs(noise(seed, ALL))
    array[:6000].reshape(-1, 20)[rng.random(300) > 0.03] = 0
    array[6500:] = 0
    return array


def push(client: Client, filters: Filters, array: np.ndarray) -> np.ndarray:
    """Push; return what the payloads stand for."""
    payloads = [filters.encode(i, r, array[r.start : r.stop]) for i, r in enumerate(RANGES)]
    client.push(payloads)
    return np.concatenate([decode(payload) for payload in payloads])


def read(engine: ThreadsEngine) -> np.ndarray:
    return np.concatenate(engine.call(COORDINATOR, "cut").result(20)[0])


@pytest.mark.parametrize("rule", [Rule(0), Rule(0, update=Nesterov(0.5, 0.5)), Rule(2), Rule(inf)])
def test_pulled_rows_are_the_servers(rule: Rule) -> None:
    with servers(rule) as engine:
        first, second = joined(engine, 2)
        for clock in range(12):
            push(first, Filters(), change(2 * clock))
            push(second, Filters(), change(2 * clock + 1))
            pulls = [first, second] if clock % 3 or not rule.slack else [first]
            for client in pulls:
                np.testing.assert_array_equal(np.concatenate(client.pull()), read(engine))
        share = first.pulled.bytes_after / first.pulled.bytes_before
        assert share < (1 if rule.update else 0.35)


def test_gradients_are_pulled_by_rows() -> None:
    with servers(Rule(0, gradients=True)) as engine:
        (client,) = joined(engine, 1)
        for clock in range(8):
            push(client, Filters(), change(clock))
            np.testing.assert_array_equal(np.concatenate(client.pull()), change(clock))
        assert client.pulled.bytes_after < 0.35 * client.pulled.bytes_before


def test_values_are_pulled_in_bfloat16_but_for_means() -> None:
    with servers(Rule(inf)) as engine:
        (client,) = joined(engine, 1, bf16=True)
        array = noise(1, ALL)
        push(client, Filters(), array)
        pulled = np.concatenate(client.pull())
        expected = decode(parse("bf16").encode(0, RANGE, array))
        expected[6500:] = array[6500:]
        np.testing.assert_array_equal(pulled, expected)
        np.testing.assert_array_equal(read(engine), array)
        assert client.pulled.bytes_after == client.pulled.bytes_before / 2 + 2 * 10


def test_rows_that_died_with_a_primary_are_pulled_anew() -> None:
    with servers(Rule(inf)) as engine:
        pusher, puller = joined(engine, 2)
        view = puller.view = pusher.view = engine.call(COORDINATOR, "current").result(10)
        puller.pull()
        engine.loses = True
        primary = view.owners[0][0]
        pushes = [Push(0, 0, clock, 1, noise(clock, 2000)) for clock in range(4)]
        lost = engine.call(primary, "push", view.epoch, pushes)
        until = time.monotonic() + 10
        while not puller.pull()[0].any():
            assert time.monotonic() < until
        engine.kill(primary)
        assert lost.exception(10)
        engine.loses = False
        np.testing.assert_array_equal(np.concatenate(puller.pull()), read(engine))
        assert not read(engine)[:2000].any()


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("text", ["bf16,zlib", "bf16,significant:1.5"])
def test_servers_hold_what_payloads_stand_for_when_others_die(text: str, slack: float) -> None:
    """And their replicas hold the same bits, since they take over."""
    random.seed(0)
    with servers(Rule(slack), watch=True) as engine:
        clients = joined(engine, 2)
        sums = [np.zeros(ALL) for _ in clients]

        def work(worker: int) -> None:
            client, filters = clients[worker], parse(text)
            for clock in range(60):
                sums[worker] += push(client, filters, change(100 * worker + clock))
                client.pull()

        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.25)
            alive = [n for n, a in engine.actors.items() if n != COORDINATOR and not a.dead]
            if len(alive) > 2:
                engine.kill(random.choice(alive))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"
        np.testing.assert_allclose(read(engine), (sums[0] + sums[1]) / 2, atol=1e-4)
