"""PhaseTimer by a GPU's clock, recorded or not."""

import time

import pytest

from caffepy import ops
from caffepy.device.cuda import CudaDevice
from caffepy.ops.objects import HOST, PARTS

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture
def phase_timer(device: CudaDevice):
    from caffepy.ops.cuda.timers import PhaseTimer

    with device.scope():
        phase_timer = PhaseTimer(device)
        phase_timer.running = True
        yield phase_timer


def iteration(phase_timer) -> None:
    phase_timer.begin()
    for part in PARTS[1:]:
        phase_timer.mark(part)


def test_every_part_of_a_recorded_iteration_has_its_time(device: CudaDevice, phase_timer) -> None:
    phase_timer.start()
    iteration(phase_timer)
    recording = device.capture(lambda: iteration(phase_timer))
    device.synchronize()
    before = phase_timer.read()
    for _ in range(20):
        recording.replay()
    device.synchronize()
    spent = {part: seconds - before[part] for part, seconds in phase_timer.read().items()}
    assert spent.pop("data") == 0
    assert all(0 < seconds < 10 for seconds in spent.values()), spent


def test_the_last_of_several_iterations_stands_for_all(device: CudaDevice, phase_timer) -> None:
    """Whose third, and fourth, phase takes 20 ms, in the others 40."""
    watch = ops.backend(device).Stopwatch()

    def several() -> None:
        for number in range(4):
            phase_timer.sample(number, 4)
            phase_timer.begin()
            phase_timer.mark(PARTS[1])
            watch.hold(20 if number == 3 else 40)
            phase_timer.mark(PARTS[2])
            for part in PARTS[3:]:
                phase_timer.mark(part)
        phase_timer.sample(0, 1)

    phase_timer.start()
    several()
    device.synchronize()
    spent = phase_timer.read()
    held = spent.pop(PARTS[2])
    assert 0.9 * 4 * 20e-3 < held < 4 * 35e-3, held  # ticks of the clock are not quite 2 GHz
    assert sum(spent.values()) < 0.02, spent


def test_what_goes_by_while_stopped_does_not_count(device: CudaDevice, phase_timer) -> None:
    phase_timer.start()
    iteration(phase_timer)
    phase_timer.stop()
    iteration(phase_timer)
    device.synchronize()
    before = phase_timer.read()
    time.sleep(0.3)
    phase_timer.start()
    iteration(phase_timer)
    device.synchronize()
    assert sum(phase_timer.read().values()) - sum(before.values()) < 0.3


def test_what_nobody_asked_for_is_not_measured(device: CudaDevice, phase_timer) -> None:
    phase_timer.running = False
    phase_timer.start()
    iteration(phase_timer)
    device.synchronize()
    assert not any(phase_timer.read().values())


def test_idle_time_is_shared_out_as_the_hosts_was(device: CudaDevice, phase_timer) -> None:
    phase_timer.start()
    with phase_timer.fetching():
        time.sleep(0.02)
        phase_timer.mark("forward")  # data layers tell of their turns
    with phase_timer.issuing():
        iteration(phase_timer)
    device.synchronize()
    first = phase_timer.read()
    assert first["data"] > first[HOST] >= 0
    with phase_timer.issuing():
        time.sleep(0.02)
        iteration(phase_timer)
    device.synchronize()
    second = phase_timer.read()
    assert second["data"] == first["data"]
    assert second[HOST] > first[HOST]
