"""Enqueued iterations do what eager ones do, and roll back what was stopped.

This is shown on the CPU, where results are delayed as those of a GPU are.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from caffepy.core.errors import DivergenceError
from caffepy.device.device import Device
from caffepy.ops.update_state import StepResult, StepStatus
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Action, Solver
from caffepy.solver.capture import GraphRunner
from caffepy.solver.update import rules
from tests.solver.cases import (
    NET,
    STAYING,
    AskAt,
    Graphs,
    Recorder,
    Several,
    ask,
    change_numbers,
    no_signal,
    solver_of,
)

SETTINGS = (
    'lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 7 snapshot_after_train: false '
)
SHOWN = "display: 3 average_loss: 4 test_iter: 2 test_interval: 5 "


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> Callable[[Solver], Solver]:
    """Makes a solver on the CPU enqueue its iterations."""
    monkeypatch.setattr(GraphRunner, "run", lambda runner, name, work, *conditions: work())

    def enqueue(solver: Solver) -> Solver:
        monkeypatch.setattr(solver.iterations.step.graphs, "can_capture", lambda: True)
        state = solver.update_state
        read = state.step_results

        def late(wait: bool, room: int = 1) -> list[StepResult]:
            return read(wait) if wait else []

        monkeypatch.setattr(state, "step_results", late)
        return solver

    return enqueue


Enqueue = Callable[[Solver], Solver]


def is_idle(solver: Solver) -> bool:
    """True if nothing is pending, and no step was interrupted."""
    return not (solver.iterations._pending or solver.iterations.interrupted)


@pytest.mark.parametrize("settings", ["", "iter_size: 2 ", "clip_gradients: 0.25 "])
def test_order_and_numbers_are_the_same(
    settings: str, enqueued: Enqueue, caplog: pytest.LogCaptureFixture
) -> None:
    lines, found = [], []
    for how in (lambda solver: solver, enqueued):
        recorder = Recorder()
        solver = how(solver_of(SETTINGS + SHOWN + settings, reporter=recorder))
        caplog.clear()
        with caplog.at_level(logging.INFO, "caffepy.solver"):
            solver.step(10)
        assert is_idle(solver)
        found.append((solver.params.data.copy(), solver.iterations.current_step, recorder))
        lines.append([line for line in caplog.messages if "clipping" not in line])
    (mine, step, heard), (theirs, other_step, other) = found
    np.testing.assert_array_equal(mine, theirs)
    assert step == other_step == 2
    assert heard.events == other.events
    assert (heard.losses, heard.rates) == (other.losses, other.rates)
    assert lines[0] == lines[1]


def test_iterations_are_pending_until_they_are_collected(enqueued: Enqueue) -> None:
    solver = enqueued(solver_of(SETTINGS))
    seen = []

    def ask() -> Action:
        seen.append(len(solver.iterations._pending))
        return Action.NONE

    solver.action = ask
    solver.step(3)
    assert seen == [1, 2, 3]
    assert is_idle(solver)
    assert len(solver.iterations.display.window.losses) == 1


def test_a_stopped_iteration_is_rolled_back(enqueued: Enqueue) -> None:
    solver = enqueued(solver_of(SETTINGS))
    solver.step(5)
    results = solver.update_state.step_results
    before = []
    solver.action = lambda: before.append(solver.iterations.positions()) or Action.NONE  # type: ignore[func-returns-value]

    def stopped(wait: bool, room: int = 1) -> list[StepResult]:
        """As of a GPU whose seventh loss is not a number: it updates nothing from there on."""
        found = results(wait)
        return [
            *found[:1],
            *(result._replace(loss=np.nan, status=StepStatus.STOPPED) for result in found[1:]),
        ]

    solver.update_state.step_results = stopped  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match="iteration 6: the loss is nan"):
        solver.step(4)
    assert solver.iterations.interrupted
    assert (solver.iter, solver.iterations.current_step) == (6, 1)
    assert not solver.iterations._pending
    assert str(solver.iterations.positions()) == str(before[0])


def test_an_interrupted_run_recovers(enqueued: Enqueue) -> None:
    solver = enqueued(solver_of(SETTINGS, NET))

    def interrupt() -> Action:
        raise KeyboardInterrupt

    going_on, solver.action = solver.action, interrupt
    with pytest.raises(KeyboardInterrupt):
        solver.step(5)
    assert solver.iterations.interrupted
    solver.action = going_on
    solver.step(5)
    assert is_idle(solver)
    assert solver.iter == 6


class Capturing:
    """A device that captures: what it replays has the settings of the capture."""

    allocation_version = 0

    def __init__(self, param: SolverParameter) -> None:
        self._param = param
        self.overlapping, self.synchronize = nullcontext, nullcontext

    def capture(self, work: Callable[[], None]) -> SimpleNamespace:
        kept = SolverParameter.FromString(self._param.SerializeToString())

        def replay() -> None:
            now = SolverParameter.FromString(self._param.SerializeToString())
            self._param.CopyFrom(kept)
            work()
            self._param.CopyFrom(now)

        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize("rule", rules)
def test_numbers_of_the_rule_that_python_changes_count(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    for capture in (False, True):
        momentum = "" if rule in ("SGD", "Nesterov", "AdaDelta", "Adam") else "momentum: 0 "
        solver = solver_of(f'type: "{rule}" lr_policy: "fixed" delta: 1e-6 {momentum}')
        graphs = solver.iterations.step.graphs
        monkeypatch.setattr(graphs, "_gpu", Capturing(solver.param))
        monkeypatch.setattr(graphs, "can_capture", lambda capture=capture: capture)
        for i in range(12):
            if i == 6:
                change_numbers(solver.param)
            solver.step(1)
        assert (graphs._replayed, graphs._captured) == ((10, 2) if capture else (0, 0))
        ended.append(np.concatenate([solver.params.data, *solver.history]))
    np.testing.assert_array_equal(*ended)


def test_a_stop_leaves_nothing_pending(enqueued: Enqueue) -> None:
    solver = enqueued(solver_of(SETTINGS))
    solver.action = AskAt(4, Action.STOP)
    solver.step(9)
    assert (solver.iter, solver.stopped) == (4, True)
    assert is_idle(solver)


def test_iterations_of_one_graph_are_those_that_are_enqueued_singly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = "display: 20 average_loss: 3 test_iter: 2 test_interval: 25 "
    ended, heard, graphs = [], [], Graphs()
    for several in (False, True):
        if several:
            graphs.use(monkeypatch)
        recorder = Several()
        solver = solver_of(SETTINGS + shown, STAYING, reporter=recorder)
        solver.action = no_signal
        solver.step(60)
        ended.append(np.concatenate([solver.params.data, *solver.history]))
        heard.append((recorder.events, recorder.losses, recorder.rates))
        assert (solver.iter, solver.iterations.current_step) == (60, 2)
        assert is_idle(solver)
    np.testing.assert_array_equal(*ended)
    assert heard[0] == heard[1]
    singly = graphs.count("iteration")
    # before a display at 20 and 40, a test at 25 and 50, and the end
    assert graphs.count("8 iterations") == 5
    assert singly + 8 * 5 == 60


def test_a_stopped_iteration_of_one_graph_has_its_own_count_of_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From which masks are drawn when a snapshot of before it is resumed."""
    graphs = Graphs()
    graphs.use(monkeypatch)
    solver = solver_of(SETTINGS, STAYING, reporter=Several())
    solver.action = no_signal
    monkeypatch.setattr(Device, "step_count", property(lambda device: 100 + solver.iter))
    read = solver.update_state.step_results

    def stopped(wait: bool, room: int = 1) -> list[StepResult]:
        """As of a GPU whose loss of iteration 28 is not a number."""
        pending = solver.iterations._pending
        return [
            result._replace(loss=np.nan, status=StepStatus.STOPPED)
            if step.iteration > 27
            else result
            for step, result in zip(list(pending), read(wait, room), strict=False)
        ]

    monkeypatch.setattr(solver.update_state, "step_results", stopped)
    with pytest.raises(DivergenceError, match="iteration 28: the loss is nan"):
        solver.step(64)
    assert graphs[-1] == "8 iterations"
    assert solver.iterations.positions()["tick"] == 128


@pytest.mark.parametrize(
    ("size", "parts"), [(1, ["iteration"]), (2, ["begin", "pass", "pass", "close"])]
)
def test_what_the_host_wrote_is_uploaded_before_a_graph_that_reads_it(
    size: int, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture cannot upload it, and a replay would take older values."""
    graphs = Graphs()
    graphs.use(monkeypatch)
    monkeypatch.setattr(Device, "flush", lambda device: graphs.append("flush"))
    solver_of(f"{SETTINGS} iter_size: {size} ").iterations.run(show=False)
    assert [part for part in graphs if part != "flush"] == parts
    for part in parts[:3]:
        assert graphs[graphs.index(part) - 1] == "flush"


def test_a_resumed_run_measures_its_own_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the seconds since the system's start, by the number of iterations before."""
    Graphs().use(monkeypatch)
    monkeypatch.setattr("caffepy.solver.iteration.LONGEST", 1e9)
    iterations = solver_of(SETTINGS, STAYING).iterations
    monkeypatch.setattr(iterations.captured, "can_repeat", lambda: True)
    iterations.move_to(10**9, 0)
    assert iterations.prepare(8) == 0
    iterations.move_to(10**9 + 3, 0)
    assert iterations.prepare(8) == 8


def test_what_changes_between_iterations_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    graphs.use(monkeypatch)
    for settings, net, asks in (
        ("", NET, no_signal),
        ("", STAYING, ask),
        ("iter_size: 2 ", STAYING, no_signal),
        ("display: 7 ", STAYING, no_signal),
    ):
        solver = solver_of(SETTINGS + settings, net, reporter=Several())
        solver.action = asks
        solver.step(30)
    assert "8 iterations" not in graphs
