import time

from caffepy.device.device import Device
from caffepy.ops.cpu import PhaseTimer


def test_each_lap_is_the_time_since_the_one_before() -> None:
    phase_timer = PhaseTimer(Device())
    phase_timer.running = True
    phase_timer.start()
    time.sleep(0.02)
    phase_timer.begin()
    before = time.perf_counter()
    phase_timer.mark("forward")
    time.sleep(0.01)
    phase_timer.mark("backward")
    whole = time.perf_counter() - before
    seconds = phase_timer.read()
    assert seconds["backward"] >= 0.01
    assert seconds["forward"] + seconds["backward"] <= whole + 0.001
    assert seconds["data"] == seconds["synchronization"] == seconds["update"] == 0


def test_nothing_counts_when_stopped_or_not_running() -> None:
    phase_timer = PhaseTimer(Device())
    phase_timer.start()
    phase_timer.begin()
    phase_timer.mark("forward")
    phase_timer.running = True
    phase_timer.start()
    phase_timer.stop()
    phase_timer.mark("forward")
    assert not any(phase_timer.read().values())


def test_data_that_is_waited_for_before_an_iteration() -> None:
    phase_timer = PhaseTimer(Device())
    phase_timer.running = True
    with phase_timer.fetching():
        time.sleep(0.01)
    assert phase_timer.read()["data"] >= 0.01
