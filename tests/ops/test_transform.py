"""The transformation of a batch against its formula, pixel by pixel."""

import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu

MEANS = {"none": None, "value": (1, 1, 1), "values": (3, 1, 1), "image": (3, 9, 11)}


def formula(x, h_off, w_off, mirror, mean, scale, shape):
    y = np.empty(shape)
    width = shape[-1]
    mean = np.zeros((1, 1, 1)) if mean is None else mean
    mean = np.broadcast_to(mean, x.shape[1:])
    for n, c, h, w in np.ndindex(shape):
        row, column = h_off[n] + h, w_off[n] + w
        y[n, c, h, width - 1 - w if mirror[n] else w] = (
            float(x[n, c, row, column]) - mean[c, row, column]
        ) * scale
    return y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("record", [np.uint8, np.float32])
@pytest.mark.parametrize("mean", MEANS)
def test_as_the_formula(mean, record, dtype):
    rng = np.random.default_rng(0)
    records = (rng.random((5, 3, 9, 11)) * 255).astype(record)
    mean = None if MEANS[mean] is None else (rng.random(MEANS[mean]) * 255).astype(np.float32)
    out = np.empty((5, 3, 6, 6), dtype)
    h_off, w_off = rng.integers(0, 4, 5), rng.integers(0, 6, 5)
    mirror = np.array([True, False, True, False, False])
    cpu.transform_batch(records, out, (h_off, w_off, mirror), mean, 0.5)
    expected = formula(records, h_off, w_off, mirror, mean, 0.5, out.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)


def test_any_number_of_threads_gives_the_same():
    rng = np.random.default_rng(1)
    records = rng.integers(0, 256, (7, 3, 100, 100), np.uint8)
    mean = rng.random((3, 100, 100)).astype(np.float32)
    mirror = rng.random(7) < 0.5
    outs = []
    before = num_threads()
    try:
        for threads in (1, 3):
            cpu.set_num_threads(threads)
            out = np.empty((7, 3, 90, 90), np.float32)
            crops = np.arange(7), np.arange(7)[::-1].copy(), mirror
            cpu.transform_batch(records, out, crops, mean, 0.1)
            outs.append(out)
    finally:
        cpu.set_num_threads(before)
    np.testing.assert_array_equal(*outs)
