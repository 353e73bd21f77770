import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.device.blob import Blob, Layout
from caffepy.ops.update_state import Limits, StepStatus

pytestmark = pytest.mark.gpu


class Judging:
    """An UpdateState of losses with these values and weights of 1; a gradient of four numbers."""

    def __init__(self, limits: Limits, *losses: float) -> None:
        from caffepy.device.cuda import CudaDevice
        from caffepy.ops import cuda

        self.device = CudaDevice(0)
        self.losses = [Blob((), device=self.device) for _ in losses]
        for blob in self.losses:
            blob.host_diff[...] = 1
        self.write(*losses)
        self.problem = self.device.error_flag(lambda value: DataError(f"{value:g}"))
        self.update_state = cuda.UpdateState(limits, self.losses, self.device)
        self.gradient = self.device.zeros(4, np.dtype(np.float32))

    def write(self, *losses: float) -> None:
        for blob, loss in zip(self.losses, losses, strict=True):
            blob.host_data[...] = loss

    def check_and_scale(self, *gradient: float, passes: int = 1):
        """One iteration; returns the only step_result."""
        with self.device.scope():
            self.update_state.set_hyperparams(0.5, 0.25, 3.0)
            self.update_state.begin([self.gradient])
            for _ in range(passes):
                self.update_state.accumulate_loss()
            self.device.upload(np.resize(np.array(gradient, np.float32), 4), self.gradient)
            self.update_state.check_and_scale(self.gradient)
            self.update_state.mark_enqueued()
            (step_result,) = self.update_state.step_results(wait=True)
        return step_result

    def numbers(self) -> dict[str, float]:
        names = ("rate", "decay", "correction", "scale", "go")
        return {
            name: float(self.device.on_host(getattr(self.update_state, name))) for name in names
        }


def test_numbers_arrive_and_losses_are_added() -> None:
    judging = Judging(Limits(-1, 2), 1.5, 0.25)
    step_result = judging.check_and_scale(3, 4, passes=2)
    assert step_result == (1.75, 0, 1, 1, StepStatus.DONE)
    assert judging.numbers() == {"rate": 0.5, "decay": 0.25, "correction": 3, "scale": 0.5, "go": 1}
    assert judging.update_state.loss() == 1.75
    assert (
        int(judging.device.on_host(judging.device.step_counter)) == judging.device.step_count == 2
    )


def test_long_gradients_are_clipped() -> None:
    judging = Judging(Limits(1, 2), 1.0)
    assert judging.check_and_scale(3, 4, passes=2) == (
        1,
        pytest.approx(50**0.5),
        pytest.approx(50**-0.5),
        1,
        StepStatus.DONE,
    )
    assert judging.numbers()["scale"] == pytest.approx(50**-0.5 / 2)
    assert judging.check_and_scale(0.1, passes=2).factor == 1
    assert judging.numbers()["scale"] == 0.5


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_all(loss: float) -> None:
    judging = Judging(Limits(-1, 1), loss, 1.0)
    assert judging.check_and_scale(1).status is StepStatus.STOPPED
    assert judging.numbers()["go"] == 0
    judging.write(1, 1)
    assert judging.check_and_scale(1).status is StepStatus.STOPPED
    judging.update_state.resume()
    assert judging.check_and_scale(1).status is StepStatus.DONE
    assert judging.numbers()["go"] == 1


def test_a_problem_stops_all() -> None:
    judging = Judging(Limits(-1, 1), 1.0)
    judging.device.upload(np.array([1, 7.0]), judging.problem.found)
    judging.problem.check()
    assert judging.check_and_scale(1).status is StepStatus.STOPPED
    with pytest.raises(DataError, match=r"^7$"):
        judging.device.check_errors()
    judging.device.check_errors()
    judging.update_state.resume()
    assert judging.check_and_scale(1).status is StepStatus.DONE


def test_loss_scales() -> None:
    judging = Judging(Limits(2, 1, 8.0), 1.5, 0.5)
    assert [float(blob.host_diff) for blob in judging.losses] == [8, 8]
    assert judging.check_and_scale(3 * 8, 4 * 8) == (
        2,
        pytest.approx(50**0.5),
        pytest.approx(2 / 50**0.5),
        8,
        StepStatus.DONE,
    )
    assert judging.numbers()["scale"] == pytest.approx(2 / 50**0.5 / 8)
    assert judging.check_and_scale(1, np.inf)[3:] == (4, StepStatus.SKIPPED)
    assert judging.numbers()["go"] == 0
    assert [float(blob.host_diff) for blob in judging.losses] == [4, 4]
    assert judging.check_and_scale(1).loss == 2
    assert judging.update_state.state() == {"loss_scale": 4, "good": 1}
    judging.update_state.set_state({"loss_scale": 2, "good": 1999})
    assert judging.check_and_scale(1)[3:] == (4, StepStatus.DONE)
    assert judging.check_and_scale(np.nan)[3:] == (2, StepStatus.SKIPPED)
    assert judging.check_and_scale(np.nan)[3:] == (1, StepStatus.SKIPPED)
    assert judging.check_and_scale(np.nan)[3:] == (1, StepStatus.STOPPED)


@pytest.mark.parametrize("aborted", [False, True])
def test_the_loss_is_that_of_the_metrics_unless_the_all_reduce_was_aborted(aborted: bool) -> None:
    from caffepy.collectives.gpu import AbortFlag

    judging, flag = Judging(Limits(-1, 2), 1.0), AbortFlag()
    if aborted:
        flag.set()
    with judging.device.scope():
        metrics = judging.device.zeros(4, np.dtype(np.float32))
        judging.update_state.set_hyperparams(0.5, 0, 0)
        judging.update_state.accumulate_loss()
        judging.update_state.pack_metrics(metrics)
        metrics *= 6
        judging.update_state.check_and_scale(judging.gradient, metrics, flag.address)
        judging.update_state.mark_enqueued()
        (result,) = judging.update_state.step_results(wait=True)
    assert judging.numbers()["go"] == (not aborted)
    if aborted:
        assert result.status is StepStatus.STOPPED
    else:
        assert (result.loss, result.status) == (3, StepStatus.DONE)


def test_verdicts_come_in_order_and_late() -> None:
    judging = Judging(Limits(-1, 1), 0.0)
    heard = []
    with judging.device.scope():
        for i in range(50):
            heard += judging.update_state.step_results(wait=False)
            assert i - len(heard) < 16
            judging.write(i)
            judging.update_state.set_hyperparams(i, 0, 0)
            judging.update_state.accumulate_loss()
            judging.update_state.check_and_scale(judging.gradient)
            judging.update_state.mark_enqueued()
            if i == 21:
                heard += judging.update_state.step_results(wait=True)
                assert len(heard) == 22
            if i == 30:
                judging.update_state.resync()
                heard += [None] * (31 - len(heard))
        heard += judging.update_state.step_results(wait=True)
    assert [v.loss for i, v in enumerate(heard) if v] == [i for i, v in enumerate(heard) if v]
    assert len(heard) == 50


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_sums_are_those_of_the_host(dtype: str) -> None:
    from caffepy.device.cuda import CudaDevice
    from caffepy.ops import cuda

    device = CudaDevice(0)
    large, scalar, loss = (
        Blob((2, 3, 4, 5), device=device),
        Blob((), device=device),
        Blob((3,), device=device),
    )
    large.set_layout(Layout(np.dtype(dtype), True))
    rng = np.random.default_rng(1)
    sums = cuda.Sums([large, scalar], [loss], device)
    loss.host_diff[...] = 0.5
    for _ in range(2):
        total, losses = np.zeros(large.shape), 0.0
        with device.scope():
            sums.clear()
            for i in range(3):
                large.host_data[...] = rng.integers(-9, 9, large.shape)
                scalar.host_data[...] = i
                loss.host_data[...] = i, 1, 2
                total += large.host_data
                losses += (i + 3) / 2
                sums.add()
            (first, second), third = sums.read()
        np.testing.assert_array_equal(first, total)
        assert (float(second), third) == (3, losses)


def test_blobs_that_grew_are_summed_anew() -> None:
    from caffepy.device.cuda import CudaDevice
    from caffepy.ops import cuda

    device = CudaDevice(0)
    blob = Blob((2,), device=device)
    sums = cuda.Sums([blob], [], device)
    with device.scope():
        blob.reshape((5,))
        sums.clear()
        blob.host_data[...] = 3
        sums.add()
        ((total,), loss) = sums.read()
    np.testing.assert_array_equal(total, np.full(5, 3.0))
    assert loss == 0
