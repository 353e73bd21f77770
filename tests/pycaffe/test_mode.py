import threading
import time

import pytest

import caffepy as caffe
from caffepy.pycaffe import mode


def gpu() -> int | None:
    return mode._mode.index if mode._mode.gpu else None


def test_what_is_set_is_the_threads() -> None:
    caffe.set_solver_count(4)
    caffe.set_solver_rank(3)
    caffe.set_multiprocess(True)
    caffe.set_mode_gpu()
    caffe.set_device(2)
    seen: list[object] = []

    def look() -> None:
        seen.extend([caffe.solver_count(), caffe.solver_rank(), mode.multiprocess(), gpu()])

    try:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    finally:
        caffe.set_solver_count(1)
        caffe.set_solver_rank(0)
        caffe.set_multiprocess(False)
        caffe.set_mode_cpu()
        caffe.set_device(0)
    assert seen == [1, 0, False, None, 4, 3, True, 2]
    assert gpu() is None


def test_counts_and_ranks_are_checked() -> None:
    with pytest.raises(RuntimeError, match="solver count is 1 or more, not 0"):
        caffe.set_solver_count(0)
    with pytest.raises(RuntimeError, match="a GPU has a number from 0, not -1"):
        caffe.set_device(-1)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        caffe.set_device("0")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="solver rank is 0 or more, not -1"):
        caffe.set_solver_rank(-1)


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
