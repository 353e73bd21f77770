"""The policy "plateau": steps by the loss."""

from math import inf
from pathlib import Path

import numpy as np
import pytest

from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.plateau import Plateau
from caffepy.solver.policy import rate
from caffepy.solver.solver import Solver
from tests.nets import library

LOSSES = [9, 8, 7, 7.5, 7.2, 7.1, 7, 6.9, 7, 7, 7, 7, 7, 5, 5, 5, 5, 5, 5, 5]


def settings(**fields: object) -> SolverParameter:
    return SolverParameter(
        base_lr=1,
        gamma=0.5,
        lr_policy="plateau",
        plateau_winsize=[3, 4, 2],
        **fields,  # type: ignore[arg-type]
    )


def of_the_forks(losses: list[float], sizes: list[int]) -> list[int]:
    """The steps of iterations, each of which knows the losses of those before it."""
    minimum, last, step, steps = inf, 0, 0, []
    for iteration in range(len(losses)):
        if iteration and losses[iteration - 1] < minimum:
            minimum, last = losses[iteration - 1], iteration - 1
        if step < len(sizes) and iteration >= last + sizes[step]:
            step, last = step + 1, iteration
        steps.append(step)
    return steps


def test_a_step_follows_where_the_loss_stays() -> None:
    param = settings()
    plateau, step, steps = Plateau(param), 0, []
    for iteration, loss in enumerate(LOSSES):
        step = plateau.step(iteration, step)
        steps.append(step)
        plateau.add(iteration, loss)
    assert steps == of_the_forks(LOSSES, [3, 4, 2])
    assert steps[-1] == 3
    assert rate(param, 19, 3) == 0.125


def test_it_goes_on_from_its_state() -> None:
    param = settings(average_loss=2)
    whole, parts, steps = Plateau(param), Plateau(param), [0, 0]
    for iteration, loss in enumerate(LOSSES):
        again = Plateau(param)
        again.restore(parts.state(), iteration)
        parts = again
        for k, plateau in enumerate((whole, parts)):
            steps[k] = plateau.step(iteration, steps[k])
            plateau.add(iteration, loss)
        assert steps[0] == steps[1], iteration
    assert steps[0] > 0
    assert whole.event == parts.event


NET = (
    'layer { name: "x" type: "DummyData" top: "x" top: "y" dummy_data_param { '
    "shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 } data_filler { type: 'gaussianstatic' } } } "
    + library.inner_product("ip", "x", 1)
    + 'layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }'
)


def test_a_solver_lowers_its_rate_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    param = settings(net="net.prototxt", max_iter=12, random_seed=1, snapshot_prefix="s")
    param.base_lr = 0  # the loss stays
    solver = Solver(param)
    solver.step(6)
    solver.snapshot()
    solver.step(6)
    resumed = Solver(param)
    resumed.restore("s_iter_6.solverstate")
    assert resumed.iterations.current_step == 1
    resumed.step(6)
    assert solver.iterations.current_step == resumed.iterations.current_step == 3
    assert np.isfinite(solver.iterations.plateau.event.minimum)
