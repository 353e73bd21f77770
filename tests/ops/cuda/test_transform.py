import numpy as np
import pytest

from caffepy.device.blob import Layout
from tests.ops.cuda.compare import agree

pytestmark = pytest.mark.gpu

MEANS = {"none": None, "value": (1, 1, 1), "values": (3, 1, 1), "image": (3, 37, 41)}
CROPS = {"small": (6, 6), "odd": (27, 27), "all": (37, 41)}


def batch(record, size):
    rng = np.random.default_rng(0)
    records = (rng.random((5, 3, 37, 41)) * 255).astype(record)
    h_off, w_off = rng.integers(0, 38 - size[0], 5), rng.integers(0, 42 - size[1], 5)
    return records, h_off, w_off, np.array([True, False, True, False, False])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("record", [np.uint8, np.float32])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("crop", CROPS)
def test_as_on_the_cpu(crop, mean, record, dtype):
    records, *how = batch(record, CROPS[crop])
    mean = (
        None
        if MEANS[mean] is None
        else (np.random.default_rng(1).random(MEANS[mean]) * 255).astype(np.float32)
    )
    agree(
        "transform_batch",
        records,
        np.empty((5, 3, *CROPS[crop]), dtype),
        how,
        mean,
        0.5,
        tolerance=(1e-6, 1e-5),
    )


@pytest.mark.parametrize("storage", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("crop", CROPS)
def test_formats(crop, mean, channels_last, storage):
    """Computed in float32, then rounded once: the very bits that the CPU's numbers have in the
    layout.
    """
    import cupy

    from caffepy.ops import cpu, cuda

    records, *how = batch(np.uint8, CROPS[crop])
    mean = (
        None
        if MEANS[mean] is None
        else (np.random.default_rng(1).random(MEANS[mean]) * 255).astype(np.float32)
    )
    plain = np.empty((5, 3, *CROPS[crop]), np.float32)
    cpu.transform_batch(records, plain, how, mean, 0.5)
    layout = Layout(np.dtype(storage), channels_last)
    expected = np.empty(plain.size, storage)
    layout.write(plain, expected)
    with cupy.cuda.Stream(non_blocking=True):
        flat = cupy.zeros(plain.size, storage)
        cuda.transform_batch(records, layout.view(flat, plain.shape), how, mean, 0.5)
        np.testing.assert_array_equal(flat.get(), expected)


def test_empty_batch():
    none = np.zeros(0, np.int64)
    agree(
        "transform_batch",
        np.zeros((0, 3, 4, 4), np.uint8),
        np.zeros((0, 3, 2, 2), "f"),
        (none, none, none > 0),
        None,
        1.0,
    )


def test_inputs_of_the_host():
    import cupy

    from caffepy.ops import cpu, cuda

    records, *how = batch(np.uint8, (27, 27))
    mean, expected = np.full((3, 37, 41), 100, np.float32), np.empty((5, 3, 27, 27), np.float32)
    cpu.transform_batch(records, expected, how, mean, 0.1)
    with cupy.cuda.Stream(non_blocking=True):
        out = cupy.empty((5, 3, 27, 27), np.float32)
        cuda.transform_batch(records, out, how, mean, 0.1)
        np.testing.assert_allclose(out.get(), expected, rtol=1e-6, atol=1e-5)
