"""Biases and ReLUs of convolutions on a GPU, and their gradients, against numpy."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.core.errors import DeviceError  # noqa: E402
from caffepy.device.blob import Layout, from_bfloat16  # noqa: E402
from caffepy.ops import cuda  # noqa: E402
from caffepy.ops.cuda.bias_relu import bias_relu  # noqa: E402

TYPES = ["float32", "float64", "float16", "uint16"]

SHAPES = {
    "rows": (37, 24),
    "one row": (1, 1000),
    "one column": (3000, 1),
    "one element": (1, 1),
    "odd columns": (300, 7),
    "columns in pairs": (65, 50),
    "wide rows": (19, 4400),
    "few columns of many": (5, 2056),
    "many rows": (40_000, 16),
    "odd planes": (3, 5, 11, 9),
    "planes": (4, 16, 16, 16),
    "planes of more than a line": (2, 3, 40, 64),
    "one image": (1, 20, 24, 24),
    "one axis": (3, 6, 13),
    "three axes": (2, 8, 3, 4, 5),
    "single points": (6, 12, 1, 1),
    "many channels": (2, 300, 3, 3),
    "none": (0, 5, 3, 3),
    "no points": (2, 5, 0),
}


def on_gpu(values, layout, offset=0):
    """The values, and as they are once they are of this layout."""
    flat = np.empty(values.size, layout.dtype)
    layout.write(values, flat)
    whole = cupy.zeros(values.size + offset, layout.dtype)
    whole[offset:] = cupy.asarray(flat)
    array = layout.view(whole[offset:], values.shape)
    return array, host(array)


def host(array):
    values = array.get()
    return (from_bfloat16(values) if values.dtype == np.uint16 else values).astype(np.float64)


def arrays(shape, layout, offset):
    rng = np.random.default_rng(0)
    wide = np.float64 if layout.dtype == np.float64 else np.float32
    y, dy = (rng.standard_normal(shape).astype(wide) for _ in range(2))
    y[rng.random(shape) < 0.1] = 0
    db = rng.standard_normal(shape[1]).astype(wide)
    return (
        on_gpu(y, layout, offset),
        on_gpu(dy, layout, offset),
        (cupy.asarray(db), db.astype(np.float64)),
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, dtype, last):
    if last and len(SHAPES[shape]) < 3:
        return
    layout = Layout(np.dtype(dtype), last)
    axes = (0, *range(2, len(SHAPES[shape])))
    for offset in (0, 1) if shape in ("rows", "planes") else (0,):
        (gy, y), (gdy, dy), (gdb, db) = arrays(SHAPES[shape], layout, offset)
        scale = np.abs(dy).sum(axis=axes).max(initial=1) * (1e-14 if dtype == "float64" else 3e-7)
        cuda.relu_bias_backward(None, gdy, gdb)
        np.testing.assert_array_equal(host(gdy), dy)
        np.testing.assert_allclose(gdb.get(), db + dy.sum(axis=axes), rtol=1e-6, atol=scale)
        before = gdb.copy()
        cuda.relu_bias_backward(gy, gdy, gdb)
        want = np.where(y > 0, dy, 0)
        np.testing.assert_array_equal(host(gdy), want)
        np.testing.assert_allclose(
            (gdb - before).get(), want.sum(axis=axes), rtol=1e-6, atol=4 * scale
        )
        np.testing.assert_array_equal(host(gy), y)
        gdy[...] = gy
        cuda.relu_bias_backward(gy, gdy, None)
        np.testing.assert_array_equal(host(gdy), np.maximum(y, 0))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", ["rows", "odd columns", "odd planes", "planes", "three axes", "none"]
)
def test_bias_and_relu(shape, dtype, last):
    if last and len(SHAPES[shape]) < 3:
        return
    layout = Layout(np.dtype(dtype), last)
    for offset in (0, 1):
        for with_bias in (False, True):
            for relu in (False, True):
                (gy, y), _, (gb, b) = arrays(SHAPES[shape], layout, offset)
                bias_relu(gy, gb if with_bias else None, relu)
                want = y + b.reshape(-1, *[1] * (y.ndim - 2)) if with_bias else y
                tolerance = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "uint16": 8e-3}[
                    dtype
                ]
                np.testing.assert_allclose(
                    host(gy), np.maximum(want, 0) if relu else want, tolerance, tolerance
                )


def test_nan_stays():
    y = cupy.asarray(np.array([[np.nan, -1.0, 1.0, -np.inf]], np.float32))
    bias_relu(y, None, True)
    np.testing.assert_array_equal(y.get(), [[np.nan, 0, 1, 0]])


WIDTHS = {"packs": (16, 40, 8), "odd widths": (3, 8, 16), "one part": (24,), "many": (8,) * 11}


@pytest.mark.parametrize("many", [1, 2, 5, 9])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_gradient_of_relus_that_are_joined(widths, dtype, last, many):
    layout, widths = Layout(np.dtype(dtype), last), WIDTHS[widths]
    rng = np.random.default_rng(0)

    def quarters(channels):
        """Few bits, so that no sum is rounded."""
        values = np.round(4 * rng.standard_normal((5, channels, 9, 7))) / 4
        return on_gpu(np.clip(values, -3, 3).astype(np.float32), layout)

    dys = [quarters(sum(widths)) for _ in range(many)]
    ys, dxs = ([quarters(width) for width in widths] for _ in range(2))
    dbs = [cupy.ones(width, np.promote_types(dtype, np.float32)) for width in widths]
    dbs[0] = None
    cuda.cut_relu_backward(*([gpu for gpu, _ in arrays] for arrays in (dys, ys, dxs)), dbs)
    parts = np.split(sum(dy for _, dy in dys), np.cumsum(widths)[:-1], axis=1)
    for (_, y), (dx, _), db, part in zip(ys, dxs, dbs, parts, strict=True):
        want = np.where(y > 0, part, 0)
        np.testing.assert_array_equal(host(dx), want)
        if db is not None:
            np.testing.assert_array_equal(db.get(), 1 + want.sum((0, 2, 3)))


def test_sums_repeat_to_the_last_bit_and_follow_a_capture():
    layout = Layout(np.dtype(np.uint16), True)
    (gy, y), (gdy, dy), (gdb, _) = arrays((8, 48, 20, 20), layout, 0)
    cupy.cuda.get_current_stream().synchronize()  # the next stream does not wait for this one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        results = set()
        for _ in range(2):
            gdb.fill(0)
            cuda.relu_bias_backward(gy, on_gpu(dy.astype(np.float32), layout)[0], gdb)
            results.add(gdb.get().tobytes())
        stream.begin_capture()
        cuda.relu_bias_backward(gy, gdy, gdb)
        graph = stream.end_capture()
        gdb.fill(0)
        graph.launch(stream)
        stream.synchronize()
        results.add(gdb.get().tobytes())
    assert len(results) == 1
    np.testing.assert_array_equal(host(gdy), np.where(y > 0, dy, 0))


def test_arrays_that_lie_differently_are_refused():
    shape = (2, 3, 4, 5)
    (y, _), (dy, _), _ = arrays(shape, Layout(np.dtype(np.float32), True), 0)
    with pytest.raises(DeviceError, match="different orders"):
        cuda.relu_bias_backward(y, cupy.ascontiguousarray(dy), None)
