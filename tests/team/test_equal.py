"""Several solvers as one: n with batch b follow one with batch n * b."""

from functools import cache

import numpy as np
import pytest

from caffepy.blob import Array
from caffepy.errors import UsageError
from tests.solver.cases import Recorder, solver_of
from tests.team.cases import ITERATIONS, SETTINGS, Run, net


@cache
def alone(batch: int) -> tuple[list[float], Array, list[dict[str, Array]]]:
    """Losses, weights and test results of one solver."""
    recorder = Recorder()
    solver = solver_of(SETTINGS, net(batch), reporter=recorder)
    solver.step(ITERATIONS)
    solver.test_all()
    solver.close()
    return recorder.losses, solver.params.data, recorder.tests


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("sync", ["tree", "muji", "flat"])
def test_solvers_follow_one_with_their_batches_together(size: int, sync: str) -> None:
    if sync == "muji" and size not in (2, 4, 8):
        with pytest.raises(UsageError, match="it is for 2, 4 or 8 devices"):
            Run(size, net(3), sync)
        return
    run = Run(size, net(3), sync)
    losses, data, tests = alone(3 * size)
    np.testing.assert_allclose(run.losses, losses, rtol=2e-4)
    np.testing.assert_allclose(run.data[0], data, rtol=1e-3, atol=1e-4)
    assert len(run.tests) == len(tests) == 4
    for own, other in zip(run.tests, tests, strict=True):
        np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=5e-4)
        assert own["accuracy"] == other["accuracy"]
    for data in run.data[1:]:
        if sync == "tree":
            assert not np.isnan(data).any()
        else:
            np.testing.assert_array_equal(data, run.data[0])


@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_runs_repeat_bit_for_bit(sync: str) -> None:
    first, again = Run(3, net(3), sync, until=15), Run(3, net(3), sync, until=15)
    assert first.losses == again.losses
    for a, b in zip([*first.data, first.history], [*again.data, again.history], strict=True):
        np.testing.assert_array_equal(a, b)
