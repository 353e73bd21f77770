import time

import pytest

import caffepy as caffe


def test_the_time_between_start_and_stop() -> None:
    timer = caffe.Timer()
    assert timer.ms == 0
    timer.start()
    time.sleep(0.002)
    timer.stop()
    first = timer.ms
    assert first >= 2
    assert timer.ms == first
    timer.start()
    assert timer.ms != first  # a running one is stopped


@pytest.mark.gpu
def test_the_work_of_a_gpu_counts() -> None:
    caffe.set_mode_gpu()
    try:
        timer = caffe.Timer()
        timer.start()
        assert timer.ms > 0
    finally:
        caffe.set_mode_cpu()
