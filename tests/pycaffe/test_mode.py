import threading

import pytest

import caffepy as caffe
from caffepy.pycaffe import mode


def test_what_is_set_is_the_threads() -> None:
    caffe.set_solver_count(4)
    caffe.set_solver_rank(3)
    caffe.set_multiprocess(True)
    caffe.set_mode_gpu()
    caffe.set_device(2)
    seen: list[object] = []

    def look() -> None:
        seen.extend([caffe.solver_count(), caffe.solver_rank(), mode.multiprocess(), mode.gpu()])

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
    assert mode.gpu() is None


def test_counts_and_ranks_are_checked() -> None:
    with pytest.raises(RuntimeError, match="solver count is 1 or more, not 0"):
        caffe.set_solver_count(0)
    with pytest.raises(RuntimeError, match="a GPU has a number from 0, not -1"):
        caffe.set_device(-1)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        caffe.set_device("0")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="solver rank is 0 or more, not -1"):
        caffe.set_solver_rank(-1)
