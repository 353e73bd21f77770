"""Arrays that a thread sends to the GPU: they arrive before they are used and stay until they were
used.
"""

import threading

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def layout(n):
    return (((n, 3, 5), np.dtype(np.uint8)), ((n,), np.dtype(np.int64)), ((n,), np.dtype(np.bool_)))


def fill(staging, n, value):
    for array in staging.room(layout(n)):
        array[...] = value
    staging.send()


def test_arrays_arrive():
    import cupy

    from caffepy.ops import cuda

    staging = cuda.Staging()
    with cupy.cuda.Stream(non_blocking=True):
        for n, value in ((4, 1), (4, 0), (7, 1), (2, 1)):
            fill(staging, n, value)
            arrays = staging.take()
            for array, (shape, dtype) in zip(arrays, layout(n), strict=True):
                assert array.data.ptr % 256 == 0
                np.testing.assert_array_equal(array.get(), np.full(shape, value, dtype))
            staging.done()


def test_rows_that_are_there_are_not_sent():
    import cupy

    from caffepy.ops import cuda

    for there in ([], [0], [1, 2], [5], [0, 2, 3, 5], range(6)):
        staging, stream = cuda.Staging(), cupy.cuda.Stream(non_blocking=True)
        assert staging.gpu == cupy.cuda.Device().id
        for array in staging.room(layout(6)):
            array[...] = 1
        with stream:
            staging.target(stream)[...] = 9
        stream.synchronize()
        staging.send(there)
        first, *others = staging.take()
        want = [9 if row in there else 1 for row in range(6)]
        assert first[:, 0, 0].tolist() == first[:, -1, -1].tolist() == want
        assert all(array.all() for array in others)


SIZES = [(375, 500), (256, 256), (100, 80), (12, 700), (1, 1), (64, 30), (32, 15)]


def test_images_are_resized_as_opencv_does():
    import cupy
    import cv2

    from caffepy.ops import cuda

    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (3, *size), np.uint8) for size in SIZES]
    for height, width in ((32, 15), (227, 227)):
        staging, stream = cuda.Staging(), cupy.cuda.Stream(non_blocking=True)
        specs = (((9, 3, height, width), np.dtype(np.uint8)), ((9,), np.dtype(np.bool_)))
        for array in staging.room(specs):
            array[...] = 1
        there = [cupy.asarray(image) for image in images]
        cupy.cuda.Device().synchronize()
        to = [8, 0, 1, 2, 5, 4, 7]
        staging.resize(stream, [(x.data.ptr, *x.shape[1:]) for x in there], to)
        stream.synchronize()
        staging.send(to)
        got, _ = (array.get() for array in staging.take())
        assert (got[[3, 6]] == 1).all()
        for image, place in zip(images, to, strict=True):
            want = cv2.resize(image.transpose(1, 2, 0), (width, height)).transpose(2, 0, 1)
            np.testing.assert_array_equal(got[place], want)


def test_the_same_layout_has_the_same_memory():
    from caffepy.ops import cuda

    staging = cuda.Staging()
    first, second = staging.room(layout(4)), staging.room(layout(4))
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert staging.room(layout(5)) is not first


def test_nothing_is_overwritten_before_it_was_used():
    """A slow kernel before each use: the next values have long been sent when the ones before are
    added.
    """
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda.compiler import kernel

    stagings = [cuda.Staging() for _ in range(2)]
    free = [threading.Semaphore(1) for _ in stagings]
    full = [threading.Semaphore(0) for _ in stagings]
    big = (((1 << 20,), np.dtype(np.int64)),)

    def load():
        for k in range(12):
            free[k % 2].acquire()
            stagings[k % 2].room(big)[0].fill(k)
            stagings[k % 2].send()
            full[k % 2].release()

    thread = threading.Thread(target=load)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel("spin", "spin")((1,), (1,), (np.int64(1),))
        seen = cupy.zeros((12, 1 << 20), np.int64)
        thread.start()
        for k in range(12):
            full[k % 2].acquire()
            (array,) = stagings[k % 2].take()
            kernel("spin", "spin")((1,), (1,), (np.int64(3_000_000),))
            cuda.copy(array, seen[k])
            stagings[k % 2].done()
            free[k % 2].release()
        result = seen.get()
    thread.join()
    np.testing.assert_array_equal(result, np.broadcast_to(np.arange(12)[:, None], result.shape))
