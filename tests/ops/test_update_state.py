import numpy as np
import pytest

from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.ops import cpu
from caffepy.ops.update_state import Limits, StepStatus


def losses() -> list[Blob]:
    blobs = [Blob((2,)), Blob(())]
    blobs[0].data[...], blobs[0].diff[...] = (1, 2), 0.5
    blobs[1].data[...], blobs[1].diff[...] = 3, 1
    return blobs


def test_gradients_are_clipped_and_divided() -> None:
    update_state = cpu.UpdateState(Limits(1, 2), losses(), Device())
    diff = np.ones(4, np.float32)
    update_state.set_hyperparams(0.1, 0.2, 0.3)
    update_state.begin([diff])
    assert not diff.any()
    update_state.accumulate_loss()
    update_state.accumulate_loss()
    assert update_state.loss() == 4.5
    diff[:] = 3
    update_state.check_and_scale(diff)
    update_state.mark_enqueued()
    assert update_state.step_results(wait=False) == [
        (4.5, 6, pytest.approx(1 / 6), 1, StepStatus.DONE)
    ]
    assert update_state.step_results(wait=True) == []
    assert (update_state.rate, update_state.decay, update_state.correction, update_state.go) == (
        0.1,
        0.2,
        0.3,
        1,
    )
    assert update_state.scale == pytest.approx(1 / 12)


def test_gradients_below_the_limit_stay() -> None:
    for limit, norm in ((-1, 0), (9, 6)):
        update_state = cpu.UpdateState(Limits(limit, 1), [], Device())
        update_state.check_and_scale(np.full(4, 3, np.float32))
        assert update_state.step_results(wait=True) == [(0, norm, 1, 1, StepStatus.DONE)]
        assert update_state.scale == 1


def test_the_loss_is_that_of_the_metrics_if_there_are_some() -> None:
    update_state = cpu.UpdateState(Limits(-1, 2), losses(), Device())
    metrics = np.zeros(4, np.float32)
    update_state.accumulate_loss()
    update_state.accumulate_loss()
    update_state.pack_metrics(metrics)
    assert metrics[0] == 9
    metrics *= 3
    update_state.check_and_scale(np.ones(4, np.float32), metrics)
    (result,) = update_state.step_results(wait=True)
    assert result.loss == 13.5


def test_sums() -> None:
    blobs = losses()
    sums = cpu.Sums(blobs, blobs[1:], Device())
    for _ in range(2):
        sums.clear()
        sums.add()
        sums.add()
        (first, second), loss = sums.read()
        np.testing.assert_array_equal(first, [2, 4])
        assert (float(second), loss) == (6, 6)
