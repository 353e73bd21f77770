"""A solver of pycaffe that trains by a parameter server, and an update of its own at the servers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import caffepy
from caffepy.core.errors import UsageError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server import attachment
from caffepy.parallel.parameter_server.messages import Nesterov, Push, Rule, View
from caffepy.parallel.parameter_server.range_state import RangeState
from tests.commands.test_server import Engine
from tests.parallel.cases import NET, net
from tests.parallel.parameter_server.test_worker import SETTINGS, Served

SOLVER = f"""
{SETTINGS} max_iter: 1000 net_param {{ name: "noise" {net(3, NET)} }}
"""


def half(values: Array, change: Array, state: dict[str, Any]) -> Array:
    """Take half a step, and count the clocks."""
    state["clocks"] = state.get("clocks", 0) + 1
    new: Array = values + np.float32(0.5) * change
    return new


def frozen(values: Array, change: Array, state: dict[str, Any]) -> Array:
    """Take no step."""
    return values


def pushed(rule: Rule, changes: list[list[float]]) -> RangeState:
    state = RangeState(np.zeros(2, np.float32), rule, is_mean=False)
    state.set_members(View(members={0: 0, 1: 0}))
    for clock, change in enumerate(changes):
        for worker in (1, 0):
            payload = np.float32(change) * (worker + 0.5)  # whose mean is the change
            state.push(Push(0, worker, clock, 2, payload), lambda array: array)
    return state


def test_servers_update_as_they_are_told() -> None:
    state = pushed(Rule(0, update=half), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(state.values, [2, 3])
    assert state.update_state == {"clocks": 2}


def test_nesterov_momentum_goes_on_from_clock_to_clock() -> None:
    state = pushed(Rule(0, update=Nesterov(0.5, 1)), [[1, 2], [0, 0]])
    np.testing.assert_array_equal(state.values, [1.75, 3.5])  # 1.5, and 0.5 * 0.5 * 1 more


def test_workers_follow_an_update_of_the_servers() -> None:
    """Servers with replicas, each of which updates."""
    text = net(3, NET)
    begun = Served(2, text, Rule(0, update=frozen), 2, until=2)
    stayed = Served(2, text, Rule(0, update=frozen), 2, until=8)
    moved = Served(2, text, Rule(0, update=half), 2, until=8)
    np.testing.assert_array_equal(stayed.data[0], begun.data[0])
    assert abs(moved.data[0] - begun.data[0]).max() > 1e-3
    np.testing.assert_array_equal(moved.data[0], moved.data[1])


def flat(solver: caffepy.Solver) -> Array:
    return np.concatenate([b.data.ravel() for blobs in solver.net.params.values() for b in blobs])


@pytest.fixture
def solver(tmp_path: Path) -> caffepy.Solver:
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    caffepy.set_mode_cpu()
    return caffepy.get_solver(tmp_path / "solver.prototxt")


def test_a_solver_trains_by_servers_in_a_block(solver: caffepy.Solver, ray_address: str) -> None:
    begun = flat(solver)
    with solver.served(ray_address, workers=2, every=2, update=frozen):
        solver.step(5)
    assert solver.iter == 5
    np.testing.assert_array_equal(flat(solver), begun)
    with solver.served(ray_address, workers=2, consistency="ssp:1", every=2, cpus=2):
        solver.step(5)
    assert abs(flat(solver) - begun).max() > 1e-3
    solver.step(1)
    assert solver.iter == 11


def test_a_solver_goes_on_with_servers_that_outlive_its_block(
    solver: caffepy.Solver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    monkeypatch.setattr(attachment, "connect", lambda *_: engine)
    engine.spawn_detached(2, 2, 5)
    engine.ask("attend", "a test")
    named: dict[str, Any] = {"cluster": "10.0.0.1:6379", "name": "digits", "workers": 1, "every": 2}
    try:
        with solver.served(**named, update=half):
            solver.step(4)
        learned = flat(solver)
        another = caffepy.get_solver(tmp_path / "solver.prototxt")
        with another.served(**named, update=half):
            assert another.iter == 4
            np.testing.assert_array_equal(flat(another), learned)
            another.step(2)
        assert engine.ask("status").iteration == 6
        with (
            pytest.raises(UsageError, match='--server-update add: the servers "digits" train with'),
            solver.served(**named),
        ):
            pass
    finally:
        engine.end_actors()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "digits"}, "--name digits is for a cluster that runs already"),
        ({"update": half}, "--every 2 or more"),
        ({"update": half, "every": 2, "consistency": "ssp:1"}, "--consistency sync"),
        ({"replicas": 3}, "give --servers 3 or more"),
        ({"gpus": [0]}, "the one that the solver was built on"),
        ({"cpus": 0}, "give 1 or more"),
    ],
)
def test_options_that_do_not_go_together_are_told(
    solver: caffepy.Solver, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told), solver.served(**given):
        pass
