"""Convolution on a GPU against ops.cpu in float64."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cpu, cuda  # noqa: E402
from caffepy.ops.cuda import plans, precision  # noqa: E402
from tests.ops.test_convolution import CASES as CPU_CASES  # noqa: E402

TOLERANCE = {"fp32": 5e-5, "tf32": 3e-3}  # of the largest number of a result

CASES = {
    **CPU_CASES,
    "first of CaffeNet": ((2, 3, 227, 227), (96, 3, 11, 11), (4, 4), (0, 0), (1, 1), 1),
    "second of CaffeNet": ((2, 96, 27, 27), (256, 48, 5, 5), (1, 1), (2, 2), (1, 1), 2),
    "first of LeNet": ((64, 1, 28, 28), (20, 1, 5, 5), (1, 1), (0, 0), (1, 1), 1),
    "one by one": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "asymmetric": ((3, 8, 17, 23), (16, 8, 3, 5), (2, 1), (0, 2), (1, 2), 1),
    "wide": ((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride that leaves a rest": ((2, 8, 12, 12), (8, 8, 3, 3), (2, 2), (0, 0), (1, 1), 1),
    "four axes of images": ((2, 4, 3, 9, 8), (6, 2, 1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 2),
}


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(autouse=True)
def untimed():
    plans.autotune(False)
    yield
    plans.autotune(True)


@pytest.fixture
def exactness(request):
    before = precision.get()
    precision.set(request.param)
    yield TOLERANCE[request.param]
    precision.set(before)


def arrays(case):
    x_shape, w_shape, *rest = case
    want = cpu.Convolution(x_shape, w_shape, *rest, np.float64)
    rng = np.random.default_rng(0)
    return want, [rng.standard_normal(s) for s in (x_shape, w_shape, w_shape[:1], want.y_shape, w_shape, w_shape[:1])]


def close(name, have, want, tolerance):
    error = np.abs(have.get() - want).max(initial=0) / max(1, np.abs(want).max(initial=0))
    assert error < tolerance, f"{name}: error {error:.2e}, allowed {tolerance}"


def check(case, tolerance, dtype=np.float32, make=cuda.Convolution):
    x_shape, w_shape, *rest = case
    reference, (x, w, b, dy, dw, db) = arrays(case)
    conv = make(x_shape, w_shape, *rest, dtype)
    assert conv.y_shape == reference.y_shape
    gx, gw, gb, gdy, gdw, gdb = (cupy.asarray(a.astype(dtype)) for a in (x, w, b, dy, dw, db))
    gy, gdx = cupy.full(dy.shape, np.nan, dtype), cupy.full(x.shape, np.nan, dtype)
    y, dx = np.empty_like(dy), np.empty_like(x)
    reference.forward(x, w, None, y)
    conv.forward(gx, gw, None, gy)
    close("y without bias", gy, y, tolerance)
    conv.forward(gx, gw, gb, gy)
    close("y", gy, y + b.reshape(-1, *[1] * (x.ndim - 2)), tolerance)
    reference.backward_data(dy, w, dx)
    conv.backward_data(gdy, gw, gdx)
    close("dx", gdx, dx, tolerance)
    reference.backward_weight(x, dy, dw, db)
    conv.backward_weight(gx, gdy, gdw, gdb)
    close("dw", gdw, dw, tolerance)
    close("db", gdb, db, min(tolerance, 1e-5))
    reference.backward_weight(x, dy, None, db)
    conv.backward_weight(gx, gdy, None, gdb)
    close("db again", gdb, db, min(tolerance, 1e-5))
    close("dw again", gdw, dw, tolerance)


@pytest.mark.parametrize("exactness", ["fp32", "tf32"], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case, exactness):
    check(CASES[case], exactness)


@pytest.mark.parametrize("case", CPU_CASES)
def test_doubles(case):
    check(CASES[case], 1e-12, np.float64)


@pytest.mark.parametrize("exactness", ["fp32"], indirect=True)
@pytest.mark.parametrize("case", [case for case in CPU_CASES if case != "many images"])
def test_columns_where_cudnn_has_no_plan(case, exactness, monkeypatch):
    monkeypatch.setattr(plans, "find", lambda *arguments: None)
    check(CASES[case], exactness)


def test_every_case_has_plans_of_cudnn(monkeypatch):
    """A convolution that fell back to columns would be right and slow."""
    find, missing = plans.find, []

    def watched(name, *rest):
        plan = find(name, *rest)
        if plan is None and not name.startswith("forward_bias"):
            missing.append(name)
        return plan

    monkeypatch.setattr(plans, "find", watched)
    for case in CASES.values():
        check(case, TOLERANCE["tf32"])
    assert not missing


@pytest.mark.parametrize("exactness", ["fp32"], indirect=True)
@pytest.mark.parametrize("seed", range(25))
def test_random_shapes(seed, exactness):
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(1, 4))
    group = int(rng.choice([1, 1, 2, 3]))
    kernel, stride, pad, dilation = (tuple(rng.integers(lo, hi, axes)) for lo, hi in ((1, 5), (1, 4), (0, 4), (1, 3)))
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [max(1, s - 2 * p) + int(rng.integers(0, 9 if axes < 3 else 4)) for s, p in zip(span, pad, strict=True)]
    x_shape = (int(rng.integers(1, 6)), group * int(rng.integers(1, 5)), *size)
    w_shape = (group * int(rng.integers(1, 8)), x_shape[1] // group, *kernel)
    check((x_shape, w_shape, stride, pad, dilation, group), exactness)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_parts_of_larger_arrays(offset):
    """Weights are parts of the solver's flat array and begin anywhere in it."""

    class Shifted(cuda.Convolution):
        def forward(self, x, w, b, y):
            moved = shift(y)
            super().forward(shift(x), shift(w), b if b is None else shift(b), moved)
            y[...] = moved

        def backward_data(self, dy, w, dx):
            moved = shift(dx)
            super().backward_data(shift(dy), shift(w), moved)
            dx[...] = moved

        def backward_weight(self, x, dy, dw, db):
            moved, sums = (a if a is None else shift(a) for a in (dw, db))
            super().backward_weight(shift(x), shift(dy), moved, sums)
            for a, b in ((dw, moved), (db, sums)):
                if a is not None:
                    a[...] = b

    def shift(a):
        larger = cupy.empty(a.size + offset, a.dtype)
        larger[offset:] = a.ravel()
        return larger[offset:].reshape(a.shape)

    for case in ("basic", "group", "wide"):
        check(CASES[case], TOLERANCE["tf32"], make=Shifted)


def test_plans_are_timed_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_winners_of", {})
    plans.autotune(True)
    case = CASES["second of CaffeNet"]
    check(case, TOLERANCE["tf32"])
    (file,) = (tmp_path / "caffepy").iterdir()
    winners = json.loads(file.read_text())
    assert winners

    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_winners_of", {})
    choose = plans._choose

    def watched(cudnn, name, *rest):
        assert name not in winners, "a winner was timed again"
        return choose(cudnn, name, *rest)

    monkeypatch.setattr(plans, "_choose", watched)
    check(case, TOLERANCE["tf32"])


def test_a_damaged_file_of_winners_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_winners_of", {})
    plans.autotune(True)
    path = plans._path()
    path.parent.mkdir()
    path.write_text("{")
    check(CASES["basic"], TOLERANCE["tf32"])
    assert json.loads(path.read_text())


def test_deterministic_plans_repeat_to_the_last_bit(monkeypatch):
    before = precision.deterministic()
    precision.set_deterministic(True)
    x_shape, w_shape, *rest = case = CASES["wide"]
    _, (x, w, _, dy, _, _) = arrays(case)
    x, w, dy = (cupy.asarray(a.astype(np.float32)) for a in (x, w, dy))
    conv, results = cuda.Convolution(x_shape, w_shape, *rest, np.float32), set()
    for _ in range(5):
        y, dx, dw = cupy.empty_like(dy), cupy.empty_like(x), cupy.zeros_like(w)
        conv.forward(x, w, None, y)
        conv.backward_data(dy, w, dx)
        conv.backward_weight(x, dy, dw, None)
        results.add(b"".join(a.get().tobytes() for a in (y, dx, dw)))
    precision.set_deterministic(before)
    assert len(results) == 1


@pytest.mark.parametrize("case", ["basic", "group", "wide", "second of CaffeNet", "three axes"])
def test_a_captured_step_follows_its_inputs(case, stream):
    x_shape, w_shape, *rest = CASES[case]
    reference, (x, w, b, dy, dw, db) = arrays(CASES[case])
    conv = cuda.Convolution(x_shape, w_shape, *rest, np.float32)
    gx, gw, gb, gdy, gdw, gdb = (cupy.asarray(a.astype(np.float32)) for a in (x, w, b, dy, dw, db))
    gy, gdx = cupy.empty_like(gdy), cupy.empty_like(gx)

    def step():
        conv.forward(gx, gw, gb, gy)
        conv.backward_data(gdy, gw, gdx)
        conv.backward_weight(gx, gdy, gdw, gdb)

    step()
    stream.synchronize()
    stream.begin_capture()
    step()
    graph = stream.end_capture()
    gx *= 2
    gdy *= -1
    gdw.fill(0)
    gdb.fill(0)
    graph.launch(stream)
    x, dy, dw, db = 2 * x, -dy, 0 * dw, 0 * db
    y, dx = np.empty_like(dy), np.empty_like(x)
    reference.forward(x, w, b, y)
    reference.backward_data(dy, w, dx)
    reference.backward_weight(x, dy, dw, db)
    for name, have, want in (("y", gy, y), ("dx", gdx, dx), ("dw", gdw, dw), ("db", gdb, db)):
        close(name, have, want, TOLERANCE["tf32"])


def test_streams_do_not_share_memory():
    first = plans.context()
    with cupy.cuda.Stream(non_blocking=True):
        second = plans.context()
        there = second.array("product", (3,), np.float32)
    here = first.array("product", (3,), np.float32)
    assert first is not second
    assert here.data.ptr != there.data.ptr
