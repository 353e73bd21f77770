"""The gradients that are shown are those of the iteration shown, before clipping and update."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from caffepy.collectives.topology import all_joined
from caffepy.core.events import Reporter
from caffepy.device import math_mode
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.solver import Solver, Watch
from tests.parallel.cases import NET as DIGITS_NET
from tests.parallel.cases import net
from tests.solver import cases, test_capture

HARSH = "clip_gradients: 0.01 weight_decay: 0.5 iter_size: 2 "


class Looker(Reporter):
    """Looks at the parameters after each iteration."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.replayed = 0
        self.seen: list[dict[str, tuple[Array, Array | None]]] = []

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        assert self.watch
        parameters = self.watch.parameters()
        self.seen.append(
            {name: (w.copy(), None if g is None else g.copy()) for name, w, g in parameters}
        )


def looked_at(
    make: Callable[..., Solver], *given: Any, every: int = 1, steps: int = 3, **more: Any
) -> Looker:
    looker = Looker()
    solver = make(*given, reporter=looker, **more)
    looker.watch = Watch(solver, every)
    solver.step(steps)
    looker.replayed = test_capture.replays(solver)
    solver.close()
    return looker


def gradient(settings: str, steps: int) -> list[Array]:
    """That of the iteration after so many, by hand: the mean of its passes."""
    solver = cases.solver_of(settings)
    solver.step(steps)
    solver.params.diff.fill(0)
    for _ in range(solver.param.iter_size):
        solver.net.forward()
        solver.net.backward()
    return [part / solver.param.iter_size for part in solver.params.split(solver.params.diff)]


@pytest.mark.parametrize("settings", ["", HARSH, 'type: "Adam" momentum2: 0.9 '])
def test_gradients_before_the_update(settings: str) -> None:
    looker = looked_at(cases.solver_of, settings)
    for steps, seen in enumerate(looker.seen):
        assert list(seen) == ["ip/0", "ip/1"]
        by_hand = gradient(settings, steps)
        for (_, own), other in zip(seen.values(), by_hand, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6)


def test_weights_are_those_after_the_update() -> None:
    solver = cases.solver_of("")
    solver.step(1)
    first = looked_at(cases.solver_of, "").seen[0]
    for (weights, _), own in zip(
        first.values(), solver.params.split(solver.params.data), strict=True
    ):
        np.testing.assert_array_equal(weights, own)


def test_on_the_cpu_only_the_iterations_that_are_shown_cost_something() -> None:
    each = [seen["ip/0"][1] for seen in looked_at(cases.solver_of, "", steps=5).seen]
    some = [seen["ip/0"][1] for seen in looked_at(cases.solver_of, "", steps=5, every=2).seen]
    for i, own in enumerate(some):
        np.testing.assert_array_equal(own, each[i - i % 2])


def test_watching_changes_nothing_and_never_means_no_gradients() -> None:
    plain, watched = cases.solver_of(HARSH), cases.solver_of(HARSH)
    watch, idle = Watch(watched, 1), Watch(plain, 0)
    plain.step(3)
    watched.step(3)
    np.testing.assert_array_equal(plain.params.data, watched.params.data)
    assert [seen.gradient for seen in idle.parameters()] == [None, None]
    assert plain.iterations.step.callbacks == []
    assert watch.filters() is None


def test_what_learns_nothing_has_no_gradient() -> None:
    frozen = cases.NET.replace('top: "o"', 'top: "o" param { lr_mult: 0 }')
    (seen,) = looked_at(cases.solver_of, "", frozen, steps=1).seen
    assert seen["ip/0"][1] is None
    assert seen["ip/1"][1] is not None


def test_the_first_convolution_of_images() -> None:
    solver = cases.solver_of("", net(3))
    shown = Watch(solver, 0).filters()
    solver.close()
    assert shown
    assert (shown[0], shown[1].shape) == ("conv", (4, 1, 3, 3))
    np.testing.assert_array_equal(
        shown[1], solver.net.layers[solver.net.layer_names.index("conv")].blobs[0].data
    )


@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_of_a_team_they_are_the_mean_of_all(sync: str) -> None:
    looker = Looker()
    root = cases.solver_of(HARSH, net(3), reporter=looker)
    with P2PManager(root, [root.device, Device(), Device()], all_joined(3), SyncOptions(sync)):
        looker.watch = Watch(root, 1)
        root.step(3)
    root.close()
    alone = looked_at(cases.solver_of, HARSH, net(9))
    for own, other in zip(looker.seen, alone.seen, strict=True):
        for name in other:
            np.testing.assert_allclose(own[name][1], other[name][1], rtol=1e-3, atol=1e-5)


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ["", HARSH])
def test_replayed_iterations_show_their_own(settings: str, in_float32: None) -> None:
    captured, plain = (
        looked_at(
            test_capture.solver_of, settings, net(7, DIGITS_NET), capture=capture, every=3, steps=7
        )
        for capture in (True, False)
    )
    assert captured.replayed > plain.replayed == 0
    for own, other in zip(captured.seen, plain.seen, strict=True):
        for name in other:
            np.testing.assert_array_equal(own[name][0], other[name][0])
            np.testing.assert_array_equal(own[name][1], other[name][1])


@pytest.mark.gpu
def test_gradients_of_fp16_are_shown_without_the_loss_scale(
    in_float32: None,
) -> None:
    exact = looked_at(test_capture.solver_of, "", net(7, DIGITS_NET), steps=4)
    half = looked_at(test_capture.solver_of, "", net(7, DIGITS_NET), steps=4, precision="fp16")
    for own, other in zip(half.seen, exact.seen, strict=True):
        for name in other:
            size = np.abs(other[name][1]).max()
            np.testing.assert_allclose(own[name][1], other[name][1], atol=0.05 * size)
