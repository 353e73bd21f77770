"""N + M iterations in one go are N, a snapshot, a new solver, M: to the last bit.

What is shown: weights, losses and tests are the same, wherever the run was stopped,

- between iterations and within a test, whose batches are then taken anew;
- with random numbers in the data (crops, mirrors), in fillers and in Dropout;
- with histories of the update rule, averaged losses and several passes an iteration.
"""

from pathlib import Path

import numpy as np
import pytest

from caffepy.solver import Action
from tests.nets import library
from tests.solver.cases import AskAt, Recorder, solver_of

NET = library.perceptron(
    library.digits(7, 11, "scale: 0.004 crop_size: 7 mirror: true"),
    library.dummies("noise", 'type: "uniform" max: 0.01', noise=())
    + library.layer("Bias", "bias", "ip1 noise", "bias_param { axis: 0 num_axes: 0 }", top="noisy"),
)
SETTINGS = (
    "momentum: 0.9 average_loss: 3 display: 2 test_iter: 2 test_interval: 4 weight_decay: 0.001 "
    "iter_size: 2 "
)
TYPES = ["SGD", "Adam"]


def run(
    folder: Path, settings: str, until: list[int], ask: AskAt | None = None
) -> tuple[Recorder, np.ndarray]:
    """Train up to each of `until` in turn, each part by a solver of its own that goes on from the
    one before.
    """
    recorder, state = Recorder(), None
    for end in until:
        text = f'{settings} max_iter: {end} snapshot_prefix: "{folder}/s" '
        solver = solver_of(text, NET, reporter=recorder)
        if ask:
            solver.action, ask = ask, None
        if state:
            solver.restore(state)
            assert solver.iter < end
        solver.step(end - solver.iter)
        if not solver.resume_state.saved_now:
            solver.snapshot()
        state = solver.resume_state.saved_now
        solver.close()
    return recorder, np.concatenate([solver.params.data, *solver.history])


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
@pytest.mark.parametrize("kind", TYPES)
def test_stop_and_resume_changes_nothing(kind: str, form: str, tmp_path: Path) -> None:
    settings = SETTINGS + f'type: "{kind}" snapshot_format: {form} base_lr: 0.01 '
    whole, weights = run(tmp_path, settings, [13])
    parts, weights_of_parts = run(tmp_path, settings, [3, 8, 13])
    np.testing.assert_array_equal(weights, weights_of_parts)
    assert whole.losses == parts.losses
    assert whole.rates == parts.rates
    assert [float(t["loss"]) for t in whole.tests] == [float(t["loss"]) for t in parts.tests]


@pytest.mark.parametrize("action", [Action.STOP, Action.STOP | Action.SNAPSHOT])
def test_stop_in_a_test_repeats_that_test(action: Action, tmp_path: Path) -> None:
    whole, weights = run(tmp_path, SETTINGS, [9])
    # polls: 2 of the test at 0, 4 iterations, then the second batch of the test at 4
    parts, weights_of_parts = run(tmp_path, SETTINGS, [9, 9], AskAt(8, action))
    np.testing.assert_array_equal(weights, weights_of_parts)
    assert whole.losses == parts.losses
    assert [float(t["loss"]) for t in whole.tests] == [float(t["loss"]) for t in parts.tests]


def test_the_case_is_sensitive(tmp_path: Path) -> None:
    _, weights = run(tmp_path, SETTINGS, [8])
    parts, state = [], None
    for end in (3, 8):
        solver = solver_of(f'{SETTINGS} max_iter: {end} snapshot_prefix: "{tmp_path}/t" ', NET)
        if state:
            solver.restore(state)
        solver.step(end - solver.iter)
        solver.snapshot()
        state = solver.resume_state.saved_now
        (tmp_path / f"t_iter_{end}.caffepystate").unlink()
        parts.append(solver)
        solver.close()
    assert (np.concatenate([parts[-1].params.data, *parts[-1].history]) != weights).any()
