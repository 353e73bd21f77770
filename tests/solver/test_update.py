"""The update rules against loops over numpy arrays in float64."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from caffepy.device.blob import Array
from caffepy.ops import cpu
from caffepy.ops.update_state import Segments
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.update import Update, rules

STEPS = 4
SIZES = [5, 1, 700, 3]


def sgd(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    h[0] = p.momentum * h[0] + r * g
    return h[0]


def nesterov(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    before = h[0]
    h[0] = p.momentum * before + r * g
    return (1 + p.momentum) * h[0] - p.momentum * before


def adagrad(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    h[0] = h[0] + g * g
    return r * g / (np.sqrt(h[0]) + p.delta)


def rmsprop(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    h[0] = p.rms_decay * h[0] + (1 - p.rms_decay) * g * g
    return r * g / (np.sqrt(h[0]) + p.delta)


def adadelta(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    h[0] = p.momentum * h[0] + (1 - p.momentum) * g * g
    v = g * np.sqrt((h[1] + p.delta) / (h[0] + p.delta))
    h[1] = p.momentum * h[1] + (1 - p.momentum) * v * v
    return r * v


def adam(p: SolverParameter, t: int, h: list[Array], g: Array, r: Array) -> Array:
    h[0] = p.momentum * h[0] + (1 - p.momentum) * g
    h[1] = p.momentum2 * h[1] + (1 - p.momentum2) * g * g
    correction = np.sqrt(1 - p.momentum2 ** (t + 1)) / (1 - p.momentum ** (t + 1))
    return r * correction * h[0] / (np.sqrt(h[1]) + p.delta)


Naive = Callable[[SolverParameter, int, list[Array], Array, Array], Array]
NAIVE: dict[str, tuple[Naive, dict[str, float]]] = {
    "SGD": (sgd, {"momentum": 0.9}),
    "Nesterov": (nesterov, {"momentum": 0.9}),
    "AdaGrad": (adagrad, {"delta": 1e-3}),
    "RMSProp": (rmsprop, {"rms_decay": 0.9, "delta": 1e-3}),
    "AdaDelta": (adadelta, {"momentum": 0.9, "delta": 1e-3}),
    "Adam": (adam, {"momentum": 0.9, "momentum2": 0.99, "delta": 1e-3}),
}


def test_every_rule_has_its_loop() -> None:
    assert set(NAIVE) == set(rules)


@pytest.mark.parametrize("regularization", ["L1", "L2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", NAIVE)
def test_rule_moves_as_its_formula(kind: str, dtype: type, regularization: str) -> None:
    naive, settings = NAIVE[kind]
    param = SolverParameter(type=kind, **settings)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    ends = np.cumsum(SIZES)
    rates, decays = np.array([0.1, 0.2, 0.05, 0], dtype), np.array([0.01, 0, 0.02, 0.1], dtype)
    w = rng.standard_normal(ends[-1]).astype(dtype)
    w[[0, 10]] = 0
    history = [np.zeros_like(w) for _ in range(rules[kind].histories)]
    w64, h64 = w.astype(float), [h.astype(float) for h in history]
    for t in range(STEPS):
        g = rng.standard_normal(w.size).astype(dtype)
        regular = np.sign(w64) if regularization == "L1" else w64
        g64 = 0.5 * g.astype(float) + np.repeat(decays, SIZES) * regular
        step = naive(param, t, h64, g64, np.repeat(rates, SIZES).astype(float))
        w64 = w64 - step
        segments = Segments(ends, rates, decays, 0.5, regularization == "L1")
        rules[kind].apply(
            cpu, Update(param, w, g, history, segments, rules[kind].correction(param, t))
        )
        np.testing.assert_allclose(g, step, rtol=1e-4, atol=1e-6, err_msg=f"{kind} step {t}")
    np.testing.assert_allclose(w, w64, rtol=1e-4, atol=1e-5)
    for own, expected in zip(history, h64, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)
    assert (
        tuple(i for i, own in enumerate(history) if (own >= 0).all()) == rules[kind].never_negative
    )


@pytest.mark.parametrize("kind", NAIVE)
def test_result_does_not_depend_on_where_threads_split(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    param = SolverParameter(type=kind, momentum=0.5)
    ends, rates, decays = (
        np.array([100, 300]),
        np.full(2, 0.1, np.float32),
        np.full(2, 0.1, np.float32),
    )
    results = []
    for cuts in ([0, 300], [0, 1, 99, 100, 101, 257, 300]):

        def split(
            f: Callable[[int, int], None], n: int, grain: int, cuts: list[int] = cuts
        ) -> None:
            for lo, hi in pairwise(cuts):
                f(lo, hi)

        monkeypatch.setattr("caffepy.ops.cpu.update.parallel", split)
        rng = np.random.default_rng(2)
        w, g = rng.standard_normal((2, 300)).astype(np.float32)
        history = [
            np.abs(rng.standard_normal(300)).astype(np.float32)
            for _ in range(rules[kind].histories)
        ]
        rules[kind].apply(
            cpu, Update(param, w, g, history, Segments(ends, rates, decays, 1.0, False), 0.5)
        )
        results.append(w)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", NAIVE)
def test_factors_of_all_rates_and_decays(kind: str) -> None:
    rng = np.random.default_rng(4)
    ends, rates, decays = (
        np.array([100, 300]),
        *np.abs(rng.standard_normal((2, 2))).astype(np.float32),
    )
    param, results = SolverParameter(type=kind, momentum=0.5), []
    together = Segments(ends, rates, decays, 1.0, False, 0.5, 0.25)
    apart = Segments(ends, rates / 2, decays / 4, 1.0, False)
    for segments in (together, apart, together._replace(go=0.0)):
        w, g, *history = (np.linspace(0.1, 1, 300, dtype=np.float32) * (i + 1) for i in range(4))
        history = history[: rules[kind].histories]
        rules[kind].apply(cpu, Update(param, w, g, history, segments))
        results.append(np.concatenate([w, g, *history]))
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[2][:300] == np.linspace(0.1, 1, 300, dtype=np.float32)).all()
    assert (results[1][:300] != results[2][:300]).any()


def test_rules_need_nothing_of_ops_but_their_function() -> None:
    seen = []
    ops = SimpleNamespace(update_params=lambda *arguments: seen.append(arguments))
    empty = np.zeros(1)
    segments = Segments(empty, empty, empty, 1.0, False)
    rules["SGD"].apply(ops, Update(SolverParameter(momentum=0.5), empty, empty, [empty], segments))  # type: ignore[arg-type]
    assert seen == [("sgd", (empty, empty, empty), segments, [0.5])]
