"""Convolution on a GPU, in every layout, against ops.cpu in float64."""

import json
from typing import NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.core.errors import DeviceError  # noqa: E402
from caffepy.device import cudnn, math_mode  # noqa: E402
from caffepy.device.blob import Layout, from_bfloat16  # noqa: E402
from caffepy.ops import cpu, cuda  # noqa: E402
from caffepy.ops.cuda import (  # noqa: E402
    autotune,
    filters,
    plans,
    small_convolution,
    small_images,
)
from caffepy.ops.cuda.context import context  # noqa: E402
from tests.ops.test_convolution import CASES as CPU_CASES  # noqa: E402
from tests.ops.test_convolution import random_case  # noqa: E402


class Kind(NamedTuple):
    """A precision and how the arrays of its nets lie."""

    precision: str
    layout: Layout
    tolerance: float  # of the largest number of a result

    def round(self, values):
        """Values that the layout has."""
        flat, rounded = np.empty(values.size, self.layout.dtype), np.empty(values.shape, np.float32)
        self.layout.write(values.astype(np.float32), flat)
        self.layout.read(flat, rounded)
        return rounded.astype(values.dtype)

    def on_gpu(self, values, offset=0):
        """The values on the device, at so many elements from the beginning of its memory."""
        flat = cupy.empty(values.size + offset, self.layout.dtype)
        host = np.empty(values.size, self.layout.dtype)
        with np.errstate(invalid="ignore"):
            self.layout.write(
                values.astype(self.layout.dtype if self.layout.dtype.kind == "f" else np.float32),
                host,
            )
        flat[offset:] = cupy.asarray(host)
        return self.layout.view(flat[offset:], values.shape)


# Sums are float32 everywhere. bf16 and fp16 round results to 8 and 11 bits, tf32 factors to 11.
PLAIN = Kind("fp32", Layout(np.dtype(np.float32), False), 5e-5)
DOUBLE = Kind("fp32", Layout(np.dtype(np.float64), False), 1e-12)
MOVED = Kind("tf32", Layout(np.dtype(np.float32), False), 3e-3)
KINDS = {
    "fp32": PLAIN,
    "tf32": Kind("tf32", Layout(np.dtype(np.float32), True), 3e-3),
    "bf16": Kind("bf16", Layout(np.dtype(np.uint16), True), 1e-2),
    "fp16": Kind("fp16", Layout(np.dtype(np.float16), True), 2e-3),
}
LAST = {name: kind for name, kind in KINDS.items() if kind.layout.channels_last}

CASES = {
    **CPU_CASES,
    "first of CaffeNet": ((2, 3, 227, 227), (96, 3, 11, 11), (4, 4), (0, 0), (1, 1), 1),
    "second of CaffeNet": ((2, 96, 27, 27), (256, 48, 5, 5), (1, 1), (2, 2), (1, 1), 2),
    "first of ResNet": ((2, 3, 49, 64), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    "first of LeNet": ((64, 1, 28, 28), (20, 1, 5, 5), (1, 1), (0, 0), (1, 1), 1),
    "one by one": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "single points": ((3, 16, 1, 1), (24, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "asymmetric": ((3, 8, 17, 23), (16, 8, 3, 5), (2, 1), (0, 2), (1, 2), 1),
    "wide": ((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1 wide": ((4, 64, 14, 14), (128, 64, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "stride that leaves a rest": ((2, 8, 12, 12), (8, 8, 3, 3), (2, 2), (0, 0), (1, 1), 1),
    "stride of one axis": ((2, 3, 12, 13), (8, 3, 3, 5), (1, 3), (0, 1), (1, 1), 1),
    "three channels, dilation": ((2, 3, 12, 13), (8, 3, 3, 3), (2, 2), (1, 1), (2, 2), 1),
    "many taps": ((2, 40, 14, 14), (8, 40, 13, 13), (1, 1), (1, 1), (1, 1), 1),
    "four axes of images": ((2, 4, 3, 9, 8), (6, 2, 1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 2),
}
SEVERAL_WAYS = [
    "basic",
    "group",
    "1x1 group",
    "one axis",
    "stride pad",
    "stride of one axis",
    "first of CaffeNet",
    "first of ResNet",
    "second of CaffeNet",
    "three channels, dilation",
]


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(scope="module")
def side():
    return cupy.cuda.Stream(non_blocking=True)


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    default = math_mode.default()
    monkeypatch.setattr(default, "precision", default.precision)
    monkeypatch.setattr(autotune, "_autotune", False)


def arrays(case, kind):
    x_shape, w_shape, *window, group = case
    want = cpu.Convolution(x_shape, w_shape, window, group, np.float64)
    rng = np.random.default_rng(0)
    shapes = (x_shape, w_shape, w_shape[:1], want.y_shape, w_shape, w_shape[:1])
    made = [rng.standard_normal(s) for s in shapes]
    return want, [kind.round(a) for a in made[:4]] + made[4:]


def host(array):
    values = array.get()
    return from_bfloat16(values) if values.dtype == np.uint16 else values


def close(name, have, want, tolerance):
    error = np.abs(host(have) - want).max(initial=0) / max(1, np.abs(want).max(initial=0))
    assert error < tolerance, f"{name}: error {error:.2e}, allowed {tolerance}"


def on_gpu(case, kind, offset=0):
    """The reference, its arrays, those on the device, and empty y and dx."""
    reference, (x, w, b, dy, dw, db) = arrays(case, kind)
    own = DOUBLE if kind is DOUBLE else PLAIN
    there = [
        kind.on_gpu(a, offset) if a is x or a is dy else own.on_gpu(a, offset)
        for a in (x, w, b, dy, dw, db)
    ]
    empty = [kind.on_gpu(np.full(a.shape, np.nan), offset) for a in (dy, x)]
    return reference, (x, w, b, dy, dw, db), there, empty


def check(case, kind, offset=0):
    math_mode.default().precision = kind.precision
    x_shape, w_shape, *window, group = case
    reference, (x, w, b, dy, dw, db), (gx, gw, gb, gdy, gdw, gdb), (gy, gdx) = on_gpu(
        case, kind, offset
    )
    dtype = DOUBLE.layout.dtype if kind is DOUBLE else np.float32
    conv = cuda.Convolution(x_shape, w_shape, window, group, dtype)
    assert conv.y_shape == reference.y_shape
    y, dx, tolerance = np.empty_like(dy), np.empty_like(x), kind.tolerance
    reference.forward(x, w, None, y)
    conv.forward(gx, gw, None, gy)
    close("y without bias", gy, y, tolerance)
    conv.forward(gx, gw, None, gy, relu=True)
    close("relu(y) without bias", gy, np.maximum(y, 0), tolerance)
    y += b.reshape(-1, *[1] * (x.ndim - 2))
    conv.forward(gx, gw, gb, gy)
    close("y", gy, y, tolerance)
    conv.forward(gx, gw, gb, gy, relu=True)
    close("relu(y)", gy, np.maximum(y, 0), tolerance)
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


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case, kind, monkeypatch):
    """By plans of cuDNN: a convolution that fell back to columns would be right and slow."""
    find, missing = plans.find, []

    def watched(name, *rest):
        plan = find(name, *rest)
        if plan is None:
            missing.append(name)
        return plan

    monkeypatch.setattr(plans, "find", watched)
    check(CASES[case], KINDS[kind])
    assert not missing


@pytest.mark.parametrize(
    "case", ["basic", "group", "1x1 pad", "first of ResNet", "one axis", "three axes", "wide"]
)
def test_halves(case):
    check(CASES[case], KINDS["fp16"])


@pytest.mark.parametrize("case", ["basic", "group", "wide"])
def test_tensor_cores_in_the_order_of_the_axes(case):
    check(CASES[case], MOVED)


@pytest.mark.parametrize("kind", ["tf32", "bf16"])
@pytest.mark.parametrize("case", SEVERAL_WAYS)
def test_the_other_way(case, kind, monkeypatch):
    """Groups as one, and images in blocks or not, for which there is no time to be taken here."""

    def last(name, dtype, ways, arguments, launches=1):
        found = [(i, run) for i, way in enumerate(ways) if (run := way()) is not None]
        return found[-1] if found else None

    monkeypatch.setattr(autotune, "fastest", last)
    for module in (small_convolution, small_images):
        monkeypatch.setattr(module, "suits", lambda *arguments: False)
    check(CASES[case], KINDS[kind])


@pytest.mark.parametrize("case", ["basic", "group", "one axis", "three axes", "many outputs"])
def test_doubles(case):
    check(CASES[case], DOUBLE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["basic", "1x1 pad", "group", "dilation", "one axis", "three axes", "no image"]
)
def test_what_cudnn_has_no_plan_for(case, kind, monkeypatch):
    monkeypatch.setattr(plans, "find", lambda *arguments: None)
    check(CASES[case], KINDS[kind])


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes(seed):
    check(random_case(seed), list(KINDS.values())[seed % 4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [1, 2])
def test_parts_of_larger_arrays(offset, kind):
    """Weights are parts of the solver's flat array and may begin anywhere in it."""
    for case in ("basic", "group", "wide"):
        check(CASES[case], KINDS[kind], offset)


@pytest.mark.parametrize("kind", LAST)
def test_bottoms_that_share_the_weights(kind):
    """The blocks of one image do not serve another; a forward is not needed either."""
    kind = KINDS[kind]
    math_mode.default().precision = kind.precision
    for case in ("first of ResNet", "second of CaffeNet"):
        x_shape, w_shape, *window, group = CASES[case]
        reference, (x, w, _, dy, *_), (gx, gw, gb, gdy, *_), (gy, gdx) = on_gpu(CASES[case], kind)
        other = kind.on_gpu(-2 * x)
        conv = cuda.Convolution(x_shape, w_shape, window, group, np.float32)
        dx, dw = np.empty_like(x), np.zeros_like(w)
        reference.backward_data(dy, w, dx)
        reference.backward_weight(x, dy, dw, None)
        for forward in (False, True):
            if forward:
                conv.forward(gx, gw, gb, gy)
                conv.forward(other, gw, gb, gy)
            gdw = cupy.zeros(w_shape, np.float32)
            conv.backward_weight(gx, gdy, gdw, None)
            conv.backward_data(gdy, gw, gdx)
            close("dw of one", gdw, dw, kind.tolerance)
            conv.backward_weight(other, gdy, gdw, None)
            close("dw of both", gdw, -dw, kind.tolerance)
            close("dx", gdx, dx, kind.tolerance)


@pytest.mark.parametrize(
    "case", ["wide", "1x1 wide", "group", "first of ResNet", "58 channels", "1x1 bias"]
)
@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_weights_arranged_ahead(name, case):
    """They are those of the next forward passes, whatever becomes of the weights meanwhile."""
    kind = KINDS[name]
    math_mode.default().precision = kind.precision
    others = {"58 channels": ((2, 58, 6, 8), (58, 58, 1, 1), (1, 1), (0, 0), (1, 1), 1)}
    shapes = {**CASES, **others, "1x1 bias": CASES["1x1 wide"]}[case]
    x_shape, w_shape, *window, group = shapes
    reference, (x, w, b, *_), (gx, gw, gb, *_), (gy, _) = on_gpu(shapes, kind)
    conv, bias = cuda.Convolution(x_shape, w_shape, window, group, np.float32), "bias" in case
    y = np.empty(reference.y_shape)

    def check(factor):
        conv.forward(gx, gw, gb if bias else None, gy)
        reference.forward(x, factor * w, b if bias else None, y)
        close("y", gy, y, kind.tolerance)

    assert not conv.arrange_ahead(gw)  # nothing is known of a forward pass
    check(1)
    gw *= 2
    ahead = conv.arrange_ahead(gw)
    assert ahead or (name, "1x1" in case or "58" in case) == ("tf32", True)
    gw *= 2
    check(2 if ahead and not bias else 4)
    conv.end_ahead()
    check(4)


def test_numbers_of_16_bits_in_the_order_of_the_axes_are_refused():
    x_shape, w_shape, *window, group = CASES["basic"]
    conv = cuda.Convolution(x_shape, w_shape, window, group, np.float32)
    x, y = (cupy.zeros(shape, np.float16) for shape in (x_shape, conv.y_shape))
    with pytest.raises(DeviceError, match="16 bits must lie with the channels last"):
        conv.forward(x, cupy.zeros(w_shape, np.float32), None, y)


def forget(monkeypatch):
    """Forget what this process knows of plans."""
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "_searches", {})
    monkeypatch.setattr(autotune, "_loaded", {})


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["basic", "group", "1x1 pad"])
def test_ahead_plans_are_searched_for_and_nothing_runs(case, kind, monkeypatch):
    forget(monkeypatch)
    kind = KINDS[kind]
    math_mode.default().precision = kind.precision
    x_shape, w_shape, *window, group = CASES[case]
    _, _, (x, w, b, dy, dw, db), (y, dx) = on_gpu(CASES[case], kind)
    conv = cuda.Convolution(x_shape, w_shape, window, group, np.float32)
    before = dw.copy(), db.copy()

    def passes():
        conv.forward(x, w, b, y)
        conv.backward_data(dy, w, dx)
        conv.backward_weight(x, dy, dw, db)

    with cuda.compile_ahead():
        passes()
    begun = set(plans._searches)
    assert not plans._plans
    assert np.isnan(host(y)).all()
    assert np.isnan(host(dx)).all()
    for now, then in zip((dw, db), before, strict=True):
        np.testing.assert_array_equal(now.get(), then.get())
    passes()
    assert plans._plans.keys() <= begun
    assert any(name.startswith("backward_data") for _, name in plans._plans)
    check(CASES[case], kind)


@pytest.mark.parametrize("case", ["group", "stride of one axis"])
def test_what_wins_is_kept(case, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    monkeypatch.setattr(autotune, "seconds_spent", 0.0)
    monkeypatch.setattr(autotune, "_autotune", True)
    kind = KINDS["bf16"]
    check(CASES[case], kind)
    autotune.write()
    (file,) = (tmp_path / "caffepy").iterdir()
    winners = json.loads(file.read_text())
    assert any("backward_data" in name for name in winners)
    assert any("apart" in name for name in winners)

    forget(monkeypatch)

    def timed(*arguments):
        raise AssertionError("a winner was timed again")

    monkeypatch.setattr(autotune, "milliseconds", timed)
    check(CASES[case], kind)


def test_where_no_plan_of_a_heuristic_runs_the_next_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    monkeypatch.setattr(autotune, "seconds_spent", 0.0)
    monkeypatch.setattr(autotune, "_autotune", True)
    build, run, bad, asked = plans._Search._build, plans.Plan.run, set(), []

    def building(search, heuristic, without):
        build(search, heuristic, without)
        asked.append(heuristic)
        if heuristic == cudnn.HEURISTIC_A:
            bad.update(id(plan) for _, plan in search.plans)
            kept.extend(search.plans)  # so that no other has their ids

    def running(plan, *arrays):
        if id(plan._built) in bad:
            raise cudnn.CudnnError("does not run")
        run(plan, *arrays)

    kept = []
    monkeypatch.setattr(plans._Search, "_build", building)
    monkeypatch.setattr(plans.Plan, "run", running)
    check(CASES["basic"], KINDS["tf32"])
    assert cudnn.HEURISTIC_FALLBACK in asked
    assert bad


def test_a_damaged_file_of_winners_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    monkeypatch.setattr(autotune, "_autotune", True)
    path = autotune.path()
    path.parent.mkdir()
    path.write_text("{")
    check(CASES["basic"], KINDS["tf32"])
    autotune.write()
    assert json.loads(path.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_plans_repeat_to_the_last_bit(kind, monkeypatch):
    monkeypatch.setattr(math_mode.default(), "deterministic", True)
    kind = KINDS[kind]
    math_mode.default().precision = kind.precision
    x_shape, w_shape, *window, group = case = CASES["wide"]
    _, _, (x, w, b, dy, *_), (y, dx) = on_gpu(case, kind)
    conv, results = cuda.Convolution(x_shape, w_shape, window, group, np.float32), set()
    for _ in range(3):
        dw = cupy.zeros_like(w)
        conv.forward(x, w, b, y, relu=True)
        conv.backward_data(dy, w, dx)
        conv.backward_weight(x, dy, dw, None)
        results.add(b"".join(a.get().tobytes() for a in (y, dx, dw)))
    assert len(results) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["group", "wide", "first of ResNet", "three axes"])
def test_a_captured_step_follows_its_inputs(case, kind, stream, side):
    """Gradients of the weights on a second stream, which the first capture sees first."""
    kind = KINDS[kind]
    math_mode.default().precision = kind.precision
    x_shape, w_shape, *window, group = CASES[case]
    reference, (x, w, b, dy, dw, db), (gx, gw, gb, gdy, gdw, gdb), (gy, gdx) = on_gpu(
        CASES[case], kind
    )
    conv = cuda.Convolution(x_shape, w_shape, window, group, np.float32)

    def step(other):
        conv.forward(gx, gw, gb, gy, relu=True)
        other.wait_event(stream.record())
        with other:
            conv.backward_weight(gx, gdy, gdw, gdb)
        conv.backward_data(gdy, gw, gdx)
        stream.wait_event(other.record())

    step(stream)
    stream.synchronize()
    stream.begin_capture()
    step(side)
    graph = stream.end_capture()
    for array, value in ((gx, x := 2 * x), (gdy, dy := -dy), (gw, w := w / 4)):
        array[...] = (kind if array is not gw else PLAIN).on_gpu(value)
    gdw.fill(0)
    gdb.fill(0)
    graph.launch(stream)
    dw, db, y, dx = 0 * dw, 0 * db, np.empty_like(dy), np.empty_like(x)
    reference.forward(x, w, b, y)
    reference.backward_data(dy, w, dx)
    reference.backward_weight(x, dy, dw, db)
    for name, have, want in (
        ("y", gy, np.maximum(y, 0)),
        ("dx", gdx, dx),
        ("dw", gdw, dw),
        ("db", gdb, db),
    ):
        close(name, have, want, kind.tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_images_in_blocks(dtype):
    """Against the same by numpy; places of no pixel and channels that fill up are 0."""
    from caffepy.ops.cuda.graphs import Geometry

    geometry = Geometry((2, 3, 7, 10), (4, 3, 5, 3), (2, 4, 4, 4), (2, 3), (2, 1), (1, 1))
    blocks = filters.Blocks(geometry, dtype)
    assert filters.suits_blocks(geometry, dtype)
    n, depth, rows, columns = blocks.geometry.x
    x = np.arange(1, 2 * 7 * 10 * 3 + 1).reshape(2, 7, 10, 3).astype(dtype)
    padded = np.zeros((2, 2 * rows + 2, 3 * columns + 3, 3), dtype)
    padded[:, 2:9, 1:11] = x
    want = np.zeros((n, rows, columns, depth), dtype)
    tiles = (
        padded[:, : 2 * rows, : 3 * columns]
        .reshape(2, rows, 2, columns, 3, 3)
        .transpose(0, 1, 3, 2, 4, 5)
    )
    want[..., : 2 * 3 * 3] = tiles.reshape(2, rows, columns, -1)
    have = blocks.take(cupy.asarray(x).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(have.get(), want)


def test_streams_do_not_share_memory():
    first = context()
    with cupy.cuda.Stream(non_blocking=True):
        second = context()
        there = second.array("product", (3,), np.float32)
    here = first.array("product", (3,), np.float32)
    assert first is not second
    assert here.data.ptr != there.data.ptr
