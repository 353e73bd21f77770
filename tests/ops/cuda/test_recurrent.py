import numpy as np
import pytest

from caffepy.device import math_mode
from tests.ops.cuda.compare import CLOSE, agree, compare, copied, data

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 1), (4, 3, 5), (7, 2, 32), (20, 8, 100)]  # steps, streams, units
DTYPES = [np.float32, np.float64]
STEPS = {
    np.float32: (1e-3, 1e-4),
    np.float64: CLOSE,
}  # each step adds to what the last ones rounded


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")


def going_on(*shape):
    return (np.random.default_rng(5).random(shape) < 0.7).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "h"), [(1, 1), (3, 5), (10, 100)])
def test_unit(n, h, dtype):
    a, before, cont = data((n, 4 * h), dtype), data((n, h), dtype, 1), going_on(n).astype(dtype)
    c, y, dy, dc = (data((n, h), dtype, seed) for seed in range(2, 6))
    agree("lstm_unit_forward", a, before, cont, c, y)
    agree("lstm_unit_backward", np.abs(a) % 1, before, c, dy, dc, np.empty_like(a))


def run_both(kind, sizes, dtype, calls):
    """Each of the calls (name, arguments) on both devices, and replayed."""
    import cupy

    from caffepy.ops import cpu, cuda

    seen = {}
    on_cpu = [(name, copied(arguments, np.copy, seen)) for name, arguments in calls]
    layer = getattr(cpu, kind)(*sizes, dtype)
    for name, arguments in on_cpu:
        getattr(layer, name)(*arguments)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        layer = getattr(cuda, kind)(*sizes, dtype)
        for replayed in (False, True):
            seen = {}
            on_gpu = [(name, copied(arguments, cupy.asarray, seen)) for name, arguments in calls]
            if replayed:
                stream.begin_capture()
            for name, arguments in on_gpu:
                getattr(layer, name)(*arguments)
            if replayed:
                stream.end_capture().launch(stream)
            stream.synchronize()
            compare(
                [a for _, a in on_cpu],
                [a for _, a in on_gpu],
                STEPS[dtype],
                f"{kind}, replayed: {replayed}",
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_lstm(sizes, dtype):
    t, n, h = sizes
    a, w, cont = (
        data((t, n, 4 * h), dtype),
        data((4 * h, h), dtype, 1) / 4,
        going_on(t, n).astype(dtype),
    )
    h_first, c_first = data((n, h), dtype, 2), data((n, h), dtype, 3)
    kept, y, c = (np.empty((t, n, h), dtype) for _ in range(3))
    dy, da = data((t, n, h), dtype, 4), np.empty_like(a)
    forward, backward = (
        (a, w, cont, (h_first, c_first), kept, y, c),
        (a, w, cont, c_first, c, dy, da),
    )
    run_both("LSTM", sizes, dtype, [("forward", forward), ("backward", backward)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rnn(sizes, dtype):
    t, n, h = sizes
    y, w, cont = data((t, n, h), dtype), data((h, h), dtype, 1) / 4, going_on(t, n).astype(dtype)
    dy = data((t, n, h), dtype, 4)
    forward, backward = (y, w, cont, data((n, h), dtype, 2), np.empty_like(y)), (y, w, cont, dy)
    run_both("RNN", sizes, dtype, [("forward", forward), ("backward", backward)])
