import numpy as np
import pytest

from caffepy.ops.segments import Segments
from tests.ops.cuda.compare import agree, data

pytestmark = pytest.mark.gpu

RULES = {  # histories, numbers
    "sgd_update": (1, (0.9,)),
    "nesterov_update": (1, (0.9,)),
    "adagrad_update": (1, (1e-4,)),
    "rmsprop_update": (1, (0.95, 1e-4)),
    "adadelta_update": (2, (0.95, 1e-4)),
    "adam_update": (2, (0.9, 0.999, 1e-4, 0.3)),
}
STEPS = (1e-4, 5e-5)  # of float32 numbers: m of Adam may be the difference of two larger ones, over a small root
ENDS = {
    "one": [1],
    "one segment": [1001],
    "odd": [1, 2, 5, 5, 130, 131, 1000, 1003],
    "many": list(range(7, 7000, 7)),
    "large": [3, 2_000_001, 2_000_501],
}


def segments(ends, dtype, l1=False, scale=0.5):
    rng = np.random.default_rng(9)
    rates, decays = (rng.random(len(ends)).astype(dtype) * 0.1 for _ in range(2))
    return Segments(np.array(ends), rates, decays, scale, l1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("rule", RULES)
def test_as_on_the_cpu(rule, ends, l1, dtype):
    histories, numbers = RULES[rule]
    n = ENDS[ends][-1]
    w, g, *h = (data(n, dtype, seed) for seed in range(2 + histories))
    w[: n // 3] = 0
    agree(rule, w, g, *map(np.abs, h), segments(ENDS[ends], dtype, l1), *numbers, tolerance=STEPS)


@pytest.mark.parametrize("rule", RULES)
def test_elements_beyond_the_last_segment_stay(rule):
    histories, numbers = RULES[rule]
    w, g, *h = (data(100, seed=seed) for seed in range(2 + histories))
    agree(rule, w, g, *map(np.abs, h), segments([10, 61], np.float32), *numbers, tolerance=STEPS)


def test_segments_of_the_host():
    import cupy

    from caffepy.ops import cpu, cuda

    w, g, h = (data(100, seed=seed) for seed in range(3))
    with cupy.cuda.Stream(non_blocking=True):
        on_gpu = [cupy.asarray(a) for a in (w, g, h)]
        cuda.sgd_update(*on_gpu, segments([10, 100], np.float32), 0.9)
        cpu.sgd_update(w, g, h, segments([10, 100], np.float32), 0.9)
        np.testing.assert_allclose(on_gpu[0].get(), w, rtol=1e-6, atol=1e-6)


def test_a_captured_update_follows_rates_and_scale():
    import cupy

    from caffepy.ops import cpu, cuda

    host = segments([10, 100], np.float32)
    w, g, h = (data(100, seed=seed) for seed in range(3))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        u, v, k = (cupy.asarray(a) for a in (w, g, h))
        scale, rates = cupy.ones((), "f"), cupy.zeros(2, "f")
        device = Segments(cupy.asarray(host.ends), rates, cupy.asarray(host.decays), scale, False)
        cuda.sgd_update(cupy.zeros(100, "f"), cupy.zeros(100, "f"), cupy.zeros(100, "f"), device, 0.9)
        stream.begin_capture()
        cuda.sgd_update(u, v, k, device, 0.9)
        graph = stream.end_capture()
        for factor in (0.5, 0.25):
            scale.fill(factor)
            rates[:] = cupy.asarray(host.rates * np.float32(factor))
            v.set(g, stream=stream)
            graph.launch(stream)
            gradient = g.copy()
            cpu.sgd_update(w, gradient, h, host._replace(scale=factor, rates=host.rates * np.float32(factor)), 0.9)
            np.testing.assert_allclose(u.get(), w, rtol=1e-6, atol=1e-6)
