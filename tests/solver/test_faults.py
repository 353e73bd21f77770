"""What was learned is saved before a run ends by an error or a signal."""

import logging
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.solver import Action, sidecar
from tests.solver.cases import AskAt, fed, state_of


def test_failing_data_does_not_cost_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whole").mkdir()
    whole = fed(tmp_path / "whole")
    whole.solve()
    solver = fed(tmp_path)
    good = {path: path.read_bytes() for path in tmp_path.glob("?.h5")}
    solver.step(3)
    for path in good:
        path.write_bytes(b"")
    with pytest.raises(DataError):
        solver.solve()
    assert "what was learned up to" in caplog.text
    for path, content in good.items():
        path.write_bytes(content)
    resumed = fed(tmp_path)
    resumed.restore(state_of(tmp_path, solver.iter))
    resumed.solve()
    np.testing.assert_array_equal(resumed.params.data, whole.params.data)


def test_an_error_of_one_solver_does_not_cost_what_was_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whole").mkdir()
    whole = fed(tmp_path / "whole")
    whole.solve()
    solver = fed(tmp_path)

    def fail(layer: int) -> None:
        if solver.iter == 5:
            raise ZeroDivisionError

    solver.net.before_backward.append(fail)
    with pytest.raises(ZeroDivisionError):
        solver.solve()
    assert "A solver failed; what was learned up to iteration 5 is saved" in caplog.text
    resumed = fed(tmp_path)
    resumed.restore(state_of(tmp_path, 5))
    resumed.solve()
    np.testing.assert_array_equal(resumed.params.data, whole.params.data)


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_in_the_last_test_saves_what_was_trained(
    saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the forward pass that shows the last loss, which takes a batch."""
    settings = (
        f"display: 2 test_iter: 3 test_interval: 4 snapshot_after_train: {str(saves).lower()} "
    )
    contents = {}
    caplog.set_level(logging.INFO)
    for name, ask in ("whole", None), ("stopped", AskAt(16, Action.STOP | Action.SNAPSHOT)):
        (tmp_path / name).mkdir()
        solver = fed(tmp_path / name, settings)
        if ask:
            solver.action = ask
        if not ask and not saves:
            solver.step(8)
            solver.snapshot()
        else:
            solver.solve()
        assert solver.stopped == bool(ask)
        contents[name] = sidecar.read(str(tmp_path / name / "s_iter_8.caffepystate"))
    whole, stopped = contents["whole"], contents["stopped"]
    assert whole
    assert stopped
    np.testing.assert_equal(stopped["positions"]["net"], whole["positions"]["net"])
    np.testing.assert_equal(stopped["positions"]["rng"], whole["positions"]["rng"])
    held = f"{tmp_path}/stopped/s_iter_8.solverstate holds this iteration"
    assert (held in caplog.messages) == saves
