"""Laps by a GPU's clock, recorded or not."""

import time

import pytest

from caffepy.device.device import CudaDevice
from caffepy.ops.phase_timer import HOST, PARTS

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture
def laps(device: CudaDevice):
    from caffepy.ops.cuda.phase_timer import Laps

    with device.scope():
        laps = Laps(device)
        laps.running = True
        yield laps


def iteration(laps) -> None:
    laps.begin()
    for part in PARTS[1:]:
        laps.lap(part)


def test_every_part_of_a_recorded_iteration_has_its_time(device: CudaDevice, laps) -> None:
    laps.start()
    iteration(laps)
    recording = device.capture(lambda: iteration(laps))
    device.synchronize()
    before = laps.read()
    for _ in range(20):
        recording.replay()
    device.synchronize()
    spent = {part: seconds - before[part] for part, seconds in laps.read().items()}
    assert spent.pop("data") == 0
    assert all(0 < seconds < 10 for seconds in spent.values()), spent


def test_what_goes_by_while_stopped_does_not_count(device: CudaDevice, laps) -> None:
    laps.start()
    iteration(laps)
    laps.stop()
    iteration(laps)
    device.synchronize()
    before = laps.read()
    time.sleep(0.3)
    laps.start()
    iteration(laps)
    device.synchronize()
    assert sum(laps.read().values()) - sum(before.values()) < 0.3


def test_what_nobody_asked_for_is_not_measured(device: CudaDevice, laps) -> None:
    laps.running = False
    laps.start()
    iteration(laps)
    device.synchronize()
    assert not any(laps.read().values())


def test_idle_time_is_shared_out_as_the_hosts_was(device: CudaDevice, laps) -> None:
    laps.start()
    with laps.fetching():
        time.sleep(0.02)
        laps.lap("forward")  # data layers tell of their turns
    with laps.issuing():
        iteration(laps)
    device.synchronize()
    first = laps.read()
    assert first["data"] > first[HOST] >= 0
    with laps.issuing():
        time.sleep(0.02)
        iteration(laps)
    device.synchronize()
    second = laps.read()
    assert second["data"] == first["data"]
    assert second[HOST] > first[HOST]
