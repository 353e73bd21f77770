"""Convolution against a loop over the definition, for random shapes."""

from itertools import product

import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu
from caffepy.ops.objects import Maxima, NormGradient, NormSums


def naive(x, w, stride, pad, dilation, group):
    """Every product (output element, weight element, input element) of a convolution, as index
    arrays.
    """
    o, c = w[0], w[1]
    axes = len(x) - 2
    out = [
        (x[2 + a] + 2 * pad[a] - dilation[a] * (w[2 + a] - 1) - 1) // stride[a] + 1
        for a in range(axes)
    ]
    for q in product(*map(range, out)):
        for k in product(*map(range, w[2:])):
            at = tuple(q[a] * stride[a] - pad[a] + k[a] * dilation[a] for a in range(axes))
            if all(0 <= at[a] < x[2 + a] for a in range(axes)):
                for g in range(group):
                    yield (
                        q,
                        k,
                        at,
                        slice(g * o // group, (g + 1) * o // group),
                        slice(g * c, (g + 1) * c),
                    )


def reference(x, w, b, dy, stride, pad, dilation, group):
    y = np.zeros(dy.shape) + b.reshape(-1, *[1] * (x.ndim - 2))
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for q, k, at, o, c in naive(x.shape, w.shape, stride, pad, dilation, group):
        xs, ws, ds = x[(slice(None), c, *at)], w[(o, slice(None), *k)], dy[(slice(None), o, *q)]
        y[(slice(None), o, *q)] += xs @ ws.T
        dx[(slice(None), c, *at)] += ds @ ws
        dw[(o, slice(None), *k)] += ds.T @ xs
    return y, dx, dw, dy.sum(axis=(0, *range(2, x.ndim)))


def check(x_shape, w_shape, stride, pad, dilation, group, dtype=np.float64):
    rng = np.random.default_rng(0)
    conv = cpu.Convolution(x_shape, w_shape, (stride, pad, dilation), group, dtype)
    x, w, b, dy, dw0, db0 = (
        rng.standard_normal(s)
        for s in (x_shape, w_shape, w_shape[:1], conv.y_shape, w_shape, w_shape[:1])
    )
    y, dx, dw, db = reference(x, w, b, dy, stride, pad, dilation, group)
    x, w, b, dy, have_dw, have_db = (a.astype(dtype) for a in (x, w, b, dy, dw0, db0))
    have_y, have_dx = np.full(y.shape, np.nan, dtype), np.full(dx.shape, np.nan, dtype)
    conv.forward(x, w, b, have_y)
    conv.backward_data(dy, w, have_dx)
    conv.backward_weight(x, dy, have_dw, have_db)
    tolerance = 1e-10 if dtype == np.float64 else 1e-5
    for name, have, want in (
        ("y", have_y, y),
        ("dx", have_dx, dx),
        ("dw", have_dw, dw0 + dw),
        ("db", have_db, db0 + db),
    ):
        error = np.abs(have - want).max(initial=0) / max(1, np.abs(want).max(initial=0))
        assert error < tolerance, f"{name}: {error}"
    conv.forward(x, w, None, have_y)
    assert np.abs(have_y + b.reshape(-1, *[1] * (x.ndim - 2)) - y).max(initial=0) < tolerance * max(
        1, np.abs(y).max(initial=0)
    )
    without = have_y.copy()
    conv.forward(x, w, None, have_y, relu=True)
    np.testing.assert_array_equal(have_y, np.maximum(without, 0))
    conv.backward_weight(x, dy, None, have_db)
    conv.backward_weight(x, dy, have_dw, None)
    assert np.abs(have_dw - dw0 - 2 * dw).max() < 2 * tolerance * max(1, np.abs(dw).max())


CASES = {
    "basic": ((2, 3, 9, 8), (4, 3, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    "1x1": ((3, 5, 7, 7), (6, 5, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 stride": ((3, 5, 7, 7), (6, 5, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    "1x1 many rows": ((3, 40, 12, 13), (300, 40, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 many images": ((24, 5, 7, 7), (6, 5, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 stride group": ((4, 6, 25, 23), (4, 3, 1, 1), (2, 1), (0, 0), (1, 1), 2),
    "1x1 pad": ((3, 5, 7, 7), (6, 5, 1, 1), (1, 1), (1, 1), (1, 1), 1),
    "1x1 group": ((3, 6, 5, 5), (4, 3, 1, 1), (1, 1), (0, 0), (1, 1), 2),
    "stride pad": ((2, 3, 11, 10), (4, 3, 5, 5), (3, 2), (2, 1), (1, 1), 1),
    "dilation": ((2, 3, 12, 11), (4, 3, 3, 3), (1, 1), (2, 2), (2, 2), 1),
    "group": ((3, 6, 7, 7), (9, 2, 3, 3), (1, 1), (1, 1), (1, 1), 3),
    "depthwise": ((2, 6, 7, 7), (6, 1, 3, 3), (1, 1), (1, 1), (1, 1), 6),
    "whole plane": ((4, 3, 5, 5), (7, 3, 5, 5), (1, 1), (0, 0), (1, 1), 1),
    "pad beyond kernel": ((2, 2, 3, 3), (2, 2, 2, 2), (1, 1), (3, 4), (1, 1), 1),
    "stride beyond kernel": ((2, 2, 11, 11), (2, 2, 2, 2), (4, 3), (0, 0), (1, 1), 1),
    "one axis": ((2, 3, 17), (4, 3, 5), (2,), (2,), (1,), 1),
    "three axes": ((2, 2, 5, 6, 7), (3, 2, 3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), 1),
    "one image": ((1, 3, 20, 20), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many images": ((37, 2, 4, 4), (5, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "wide plane": ((2, 2, 33, 37), (20, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "wide plane without pad": ((2, 2, 33, 37), (50, 2, 3, 2), (1, 1), (0, 0), (1, 1), 1),
    "wide plane with stride": ((2, 3, 67, 65), (7, 3, 5, 5), (2, 2), (2, 2), (1, 1), 1),
    "wide line": ((1, 2, 2000), (5, 2, 3), (1,), (1,), (1,), 1),
    "many outputs": ((6, 5, 7, 7), (100, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "many inputs": ((6, 70, 7, 7), (10, 70, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "3x3 of many channels": ((7, 33, 12, 11), (37, 33, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "3x3 of many images": ((12, 32, 7, 9), (32, 32, 3, 3), (1, 1), (0, 2), (1, 1), 1),
    "3x3 in strips": ((2, 32, 45, 61), (32, 32, 3, 3), (1, 1), (1, 0), (1, 1), 1),
    "no image": ((0, 2, 4, 4), (5, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_as_the_definition(case):
    check(*CASES[case])
    check(*CASES[case], dtype=np.float32)


def random_case(seed):
    """Shapes of x and w, stride, pad, dilation and group, over one to three axes."""
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(1, 4))
    group = int(rng.choice([1, 1, 2, 3]))
    kernel, stride, pad, dilation = (
        tuple(rng.integers(lo, hi, axes)) for lo, hi in ((1, 5), (1, 4), (0, 4), (1, 3))
    )
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [
        max(1, s - 2 * p) + int(rng.integers(0, 9 if axes < 3 else 4))
        for s, p in zip(span, pad, strict=True)
    ]
    x_shape = (int(rng.integers(1, 6)), group * int(rng.integers(1, 5)), *size)
    w_shape = (group * int(rng.integers(1, 8)), x_shape[1] // group, *kernel)
    return x_shape, w_shape, stride, pad, dilation, group


@pytest.mark.parametrize("seed", range(25))
def test_random_shapes(seed):
    for dtype in (np.float32, np.float64):
        check(*random_case(seed), dtype)


@pytest.mark.parametrize(
    "case", ["basic", "group", "many images", "many outputs", "1x1", "stride pad", "wide plane"]
)
def test_the_number_of_threads_changes_no_bit(case):
    x_shape, w_shape, *window, group = CASES[case]
    rng = np.random.default_rng(1)
    conv = cpu.Convolution(x_shape, w_shape, window, group, np.float32)
    x, w, b, dy = (
        rng.standard_normal(s, np.float32) for s in (x_shape, w_shape, w_shape[:1], conv.y_shape)
    )
    before, results = num_threads(), []
    with cpu.blas_scope():
        for n in (1, 2, 5):
            cpu.set_num_threads(n)
            y, dx, dw, db = np.empty_like(dy), np.empty_like(x), np.zeros_like(w), np.zeros_like(b)
            conv.forward(x, w, b, y)
            conv.backward_data(dy, w, dx)
            conv.backward_weight(x, dy, dw, db)
            results.append(b"".join(a.tobytes() for a in (y, dx, dw, db)))
    cpu.set_num_threads(before)
    assert len(set(results)) == 1


def data(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("sums", [False, True], ids=["alone", "with sums"])
def test_gradients_past_that_of_a_normalization(sums):
    """backward_norm_gradient is norm_gradient, then the gradients of it."""
    x, w, z, g = (
        data((2, 6, 5, 4), 0),
        data((6, 1, 3, 3), 1),
        data((2, 6, 5, 4), 2),
        data((2, 6, 5, 4), 3),
    )
    conv = cpu.Convolution(x.shape, w.shape, ((1, 1), (1, 1), (1, 1)), 6, np.float64)
    numbers, line, of_x = data((4, 6), 4), data((2, 6), 5), data((4, 6), 6)
    answers = []
    for together in (True, False):
        dw, masked, sums_of, its_line = (np.ones(s) for s in (w.shape, x.shape, (2, 6), (2, 6)))
        to = NormSums(x, of_x, None, None, None, np.inf, masked, *sums_of, its_line)
        if together:
            dy = NormGradient(z, numbers, line, g)
            conv.backward_norm_gradient(x, w, dy, dw, to if sums else masked)
        else:
            dy = np.empty(g.shape)
            flat = (a.reshape(2, 6, -1) for a in (z, g, dy))
            of_z, of_g, of_dy = flat
            cpu.norm_gradient(of_z, numbers, line, of_g, of_dy)
            conv.backward_weight(x, dy, dw, None)
            if sums:
                conv.backward_data_norm(dy, w, to)
            else:
                conv.backward_data(dy, w, masked)
        answers.append([dw, masked, sums_of, its_line])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_array_equal(a, b)


def test_numbers_of_a_normalization_after_it():
    """forward_prepare is forward, then batch_norm_prepare."""
    x, w = data((2, 3, 5, 4), 0), data((6, 3, 3, 3), 1)
    conv = cpu.Convolution(x.shape, w.shape, ((1, 1), (1, 1), (1, 1)), 1, np.float64)
    answers = []
    for together in (True, False):
        y, running, numbers = (
            np.empty(conv.y_shape),
            [np.ones(6), np.ones(6), np.ones(1)],
            data((4, 6), 2),
        )
        preparation = running, 0.9, 1e-5, (data(6, 3), data(6, 4)), numbers
        if together:
            conv.forward_prepare(x, w, None, y, preparation)
        else:
            conv.forward(x, w, None, y)
            cpu.batch_norm_prepare(y.reshape(2, 6, -1), *preparation)
        answers.append([y, *running, numbers])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("relu", [False, True])
def test_maxima_of_its_output(relu):
    """forward_maxima and backward_weight_maxima are the passes one after the other."""
    x, w, b = data((2, 3, 7, 6), 0), data((4, 3, 3, 3), 1), data(4, 2)
    conv = cpu.Convolution(x.shape, w.shape, ((1, 1), (1, 1), (1, 1)), 1, np.float64)
    window, answers = ((3, 3), (2, 2), (0, 0)), []
    for together in (True, False):
        output, y = np.empty(conv.y_shape), np.empty((2, 4, 3, 3))
        index, dy, dw, db = np.empty(y.shape, np.int32), data(y.shape, 3), data(w.shape, 4), b * 2
        maxima = Maxima(y, index, window, relu)
        if together:
            conv.forward_maxima(x, w, b, output, maxima)
            conv.backward_weight_maxima(x, output, maxima._replace(y=dy), dw, db)
        else:
            conv.forward(x, w, b, output)
            cpu.max_pool_forward(output, y, index, window)
            if relu:
                index[y <= 0] = -1
                y = np.maximum(y, 0)
            cpu.max_pool_backward(dy, index, output, window)
            conv.backward_weight(x, output, dw, db)
        answers.append([y, index, dw, db])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ceiling", [None, np.inf, 0.5])
@pytest.mark.parametrize("masks_by", ["x", "y"])
@pytest.mark.parametrize("more", [False, True])
def test_half_the_gradient_of_a_normalization_before_it(more, masks_by, ceiling):
    """backward_data_norm and norm_gradient are backward_data and norm_backward."""
    x, w, dy = data((2, 3, 5, 4), 0), data((6, 3, 3, 3), 1), data((2, 6, 5, 4), 2)
    conv = cpu.Convolution(x.shape, w.shape, ((1, 1), (1, 1), (1, 1)), 1, np.float64)
    numbers, other, y = data((4, 3), 3), data(x.shape, 4), data(x.shape, 5)
    numbers[1] **= 2
    y = y if masks_by == "y" else None
    dx, sums = np.empty(x.shape), np.ones((2, 3))
    masked, line, have, have_sums = (
        np.empty(x.shape),
        np.empty((2, 3)),
        np.empty(x.shape),
        sums.copy(),
    )
    conv.backward_data(dy, w, dx)

    def flat(a):
        return a if a is None else a.reshape(2, 3, -1)

    dys = [flat(dx), flat(other)] if more else [flat(dx)]
    given = (flat(x), numbers, dys, flat(y), ceiling, flat(dx), flat(dx), *sums, False)
    cpu.norm_backward(*given)
    addend = other if more else None
    norm = NormSums(x, numbers, addend, y, None, ceiling, masked, *have_sums, line)
    conv.backward_data_norm(dy, w, norm)
    cpu.norm_gradient(flat(x), numbers, line, flat(masked), flat(have))
    np.testing.assert_allclose(have, dx, 1e-9, 1e-9)
    np.testing.assert_allclose(have_sums, sums, 1e-9)
