import numpy as np
import pytest

from caffepy.ops.update_state import Segments
from tests.ops.cuda.compare import agree, data

pytestmark = pytest.mark.gpu

RULES = {  # histories, numbers
    "sgd": (1, (0.9,)),
    "nesterov": (1, (0.9,)),
    "rms": (1, (0.95, 0.05, 1e-4)),
    "adadelta": (2, (0.95, 1e-4)),
    "adam": (2, (0.9, 0.999, 1e-4, 0.3)),
}
STEPS = (
    1e-4,
    5e-5,
)  # of float32 numbers: m of Adam may be the difference of two larger ones, over a small root
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
    arrays = w, g, *map(np.abs, h)
    agree("update_params", rule, arrays, segments(ENDS[ends], dtype, l1), numbers, tolerance=STEPS)


@pytest.mark.parametrize("rule", RULES)
def test_elements_beyond_the_last_segment_stay(rule):
    histories, numbers = RULES[rule]
    w, g, *h = (data(100, seed=seed) for seed in range(2 + histories))
    arrays = w, g, *map(np.abs, h)
    agree("update_params", rule, arrays, segments([10, 61], np.float32), numbers, tolerance=STEPS)


def test_segments_of_the_host():
    import cupy

    from caffepy.ops import cpu, cuda

    w, g, h = (data(100, seed=seed) for seed in range(3))
    with cupy.cuda.Stream(non_blocking=True):
        on_gpu = [cupy.asarray(a) for a in (w, g, h)]
        cuda.update_params("sgd", on_gpu, segments([10, 100], np.float32), [0.9])
        cpu.update_params("sgd", [w, g, h], segments([10, 100], np.float32), [0.9])
        np.testing.assert_allclose(on_gpu[0].get(), w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_happens_without_go(rule):
    histories, numbers = RULES[rule]
    arrays = [data(100, seed=seed) for seed in range(2 + histories)]
    agree(
        "update_params",
        rule,
        arrays,
        segments([10, 100], np.float32)._replace(go=np.array(0.0)),
        numbers,
        tolerance=(0, 0),
    )


def test_a_captured_update_follows_all_numbers():
    import cupy

    from caffepy.ops import cpu, cuda

    host = segments([10, 100], np.float32)
    names = ("scale", "rate", "decay", "go")
    w, g, m, v = (np.abs(data(100, seed=seed)) for seed in range(4))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = [cupy.asarray(a) for a in (w, g, m, v)]
        said = {name: cupy.ones((), "d") for name in (*names, "correction")}
        places = {name: cupy.asarray(getattr(host, name)) for name in ("ends", "rates", "decays")}
        device = host._replace(**places, **{name: said[name] for name in names})
        numbers = 0.9, 0.99, 1e-3, said["correction"]
        cuda.update_params("adam", [cupy.zeros(100, "f") for _ in range(4)], device, numbers)
        stream.begin_capture()
        cuda.update_params("adam", arrays, device, numbers)
        graph = stream.end_capture()
        for i, go in enumerate((1.0, 0.0, 1.0)):
            values = {
                "scale": 0.5 + i,
                "rate": 0.2 * i,
                "decay": 0.3,
                "go": go,
                "correction": 0.7 + i,
            }
            for name, value in values.items():
                said[name].fill(value)
            arrays[1].set(g, stream=stream)
            graph.launch(stream)
            gradient, correction = g.copy(), values.pop("correction")
            numbers = 0.9, 0.99, 1e-3, correction
            cpu.update_params("adam", (w, gradient, m, v), host._replace(**values), numbers)
            np.testing.assert_allclose(arrays[0].get(), w, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(arrays[1].get(), gradient, rtol=1e-5, atol=1e-6)
