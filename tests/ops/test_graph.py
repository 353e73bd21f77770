"""Calls that a graph replays give what the calls themselves give, to the last bit."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from caffepy.device.blob import Array
from caffepy.device.recording import call, recorder, recording
from caffepy.device.threads import num_threads, parallel, parallel_calls, set_num_threads
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.graph import Graph

RNG = np.random.default_rng(0)


def random(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def recorded(work: Callable[[], object]) -> Graph:
    graph = Graph()
    with recording(graph):
        work()
    graph.finish(0)
    return graph


class Numbers(NamedTuple):
    real: Any
    whole: int
    places: Array


@kernel
def _everything(
    x: Array, none: Array | None, yes: bool, numbers: Any, out: Array, more: Any, lo: int, hi: int
) -> None:
    a, b, c, d, e, f, g, h, i, j = more  # more floats than there are registers
    for n in range(lo, hi):
        out[n] = x[n, 1] * numbers.real + numbers.whole + numbers.places[n]
        out[n] += a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j
        if yes and none is None:
            out[n] *= 2


def test_arguments_of_each_kind() -> None:
    x, out = random(3, 4)[:, ::2], np.zeros(3, np.float32)
    numbers = Numbers(np.float32(1.5), -3, np.arange(3, dtype=np.int16))
    more = tuple(np.float64(1.1) * k if k % 2 else np.float32(0.3) * k for k in range(10))
    graph = recorded(lambda: parallel(partial(_everything, x, None, True, numbers, out, more), 3))
    assert not graph.python_calls or num_threads() > 1
    x[...] = random(3, 2)
    again = np.zeros_like(out)
    _everything(x, None, True, numbers, again, more, 0, 3)
    graph.replay()
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.parametrize("n", [1, 2, 17])
def test_products_of_matrices(m: int, k: int, n: int, dtype: Any) -> None:
    for turned in range(8):
        a, b, out = (
            random(*shape[::-1], dtype=dtype).T
            if turned >> bit & 1
            else random(*shape, dtype=dtype)
            for bit, shape in enumerate([(m, k), (k, n), (m, n)])
        )
        graph = recorded(lambda a=a, b=b, out=out: call(np.matmul, a, b, out))  # type: ignore[misc]
        assert not graph.python_calls
        a[...], b[...] = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
        out[...] = np.nan
        graph.replay()
        np.testing.assert_array_equal(out, np.matmul(a, b, out=np.empty_like(out)))


def test_a_square_of_a_matrix() -> None:
    a, out = random(5, 7), random(5, 5)
    graph = recorded(lambda: call(np.matmul, a, a.T, out))
    a[...] = random(5, 7)
    graph.replay()
    np.testing.assert_array_equal(out, np.matmul(a, a.T))


@pytest.mark.parametrize("ufunc", [np.exp, np.positive, np.negative, np.tanh, np.sqrt])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_functions_of_elements(ufunc: Any, size: int) -> None:
    x, y = np.abs(random(size)), random(size)
    graph = recorded(lambda: call(ufunc, x, y))
    assert not graph.python_calls
    x[...] = np.abs(random(size))
    graph.replay()
    np.testing.assert_array_equal(y, ufunc(x))


def test_calls_that_only_python_can_make() -> None:
    x, y = random(4, 6), random(6, 4)
    graph = recorded(lambda: (call(np.copyto, y, x.T), call(np.exp, x[:, ::2], x[:, 1::2])))
    assert len(graph.python_calls) == 2
    x[...] = random(4, 6)
    expected = np.exp(x[:, ::2])
    graph.replay()
    np.testing.assert_array_equal(y[::2], x.T[::2])
    np.testing.assert_array_equal(x[:, 1::2], expected)


def test_pieces_of_several_threads() -> None:
    before = num_threads()
    x, y = random(100), np.zeros(100, np.float32)

    def piece(lo: int, hi: int) -> None:
        call(np.multiply, x[lo:hi], x[lo:hi], y[lo:hi])

    try:
        for threads, python_calls in ((1, []), (3, ["piece"])):
            set_num_threads(threads)
            graph = recorded(lambda: parallel_calls(piece, 100))
            assert graph.python_calls == python_calls
            x[...] = random(100)
            graph.replay()
            np.testing.assert_array_equal(y, x * x)
    finally:
        set_num_threads(before)


def test_a_check_stops_a_replay_and_raises() -> None:
    found, x = np.zeros(2), np.zeros(1, np.float32)

    def check() -> None:
        if found[0]:
            found[0] = 0
            raise ValueError("found")

    def work() -> None:
        call(np.add, x, np.ones_like(x), x)
        keeps = recorder()
        assert keeps is not None
        keeps.check(found, check)
        call(np.add, x, np.ones_like(x), x)

    graph = recorded(work)
    graph.replay()
    assert x[0] == 4
    found[0] = 1
    with pytest.raises(ValueError, match="found"):
        graph.replay()
    assert x[0] == 5
    graph.replay()
    assert x[0] == 7


def test_nothing_is_kept_outside_of_the_block() -> None:
    graph = Graph()
    with recording(graph):
        assert recorder() is graph
        with recording(None):
            assert recorder() is None
        assert recorder() is graph
    assert recorder() is None
