import time

from caffepy.device.device import Device
from caffepy.ops.cpu.phase_timer import Laps


def test_each_lap_is_the_time_since_the_one_before() -> None:
    laps = Laps(Device())
    laps.running = True
    laps.start()
    time.sleep(0.02)
    laps.begin()
    before = time.perf_counter()
    laps.lap("forward")
    time.sleep(0.01)
    laps.lap("backward")
    whole = time.perf_counter() - before
    seconds = laps.read()
    assert seconds["backward"] >= 0.01
    assert seconds["forward"] + seconds["backward"] <= whole + 0.001
    assert seconds["data"] == seconds["synchronization"] == seconds["update"] == 0


def test_nothing_counts_when_stopped_or_not_running() -> None:
    laps = Laps(Device())
    laps.start()
    laps.begin()
    laps.lap("forward")
    laps.running = True
    laps.start()
    laps.stop()
    laps.lap("forward")
    assert not any(laps.read().values())


def test_data_that_is_waited_for_before_an_iteration() -> None:
    laps = Laps(Device())
    laps.running = True
    with laps.fetching():
        time.sleep(0.01)
    assert laps.read()["data"] >= 0.01
