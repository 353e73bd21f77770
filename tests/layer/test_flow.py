"""FlowNet's layers against loops, numerical gradients, and a GPU."""

from math import ceil, floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto import binary

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

A, B = random(2, 3, 5, 6), random(2, 3, 5, 6, seed=1)
FLOW = seeded(2).uniform(-2.4, 2.4, (2, 2, 5, 6)).round(1) + 0.03
CORRELATIONS = [
    "kernel_size: 1 max_displacement: 2 pad: 2 stride_2: 2",
    "kernel_size: 3 max_displacement: 2 pad: 3 stride_1: 2",
    "kernel_size: 1 max_displacement: 1",
    "kernel_size: 3 max_displacement: 3 pad: 4 stride_1: 3 stride_2: 2 correlation_type: SUBTRACT",
]
FLAT = [
    "kernel_size: 1 max_displacement: 2 pad: 2",
    "kernel_size: 3 max_displacement: 2 pad: 3 stride_2: 2 single_direction: -1",
    "kernel_size: 1 max_displacement: 3 pad: 3 stride_1: 2 single_direction: 1",
]
LOSSES = {
    'type: "L1Loss" l1_loss_param { }': lambda d: np.abs(d),
    'type: "L1Loss" l1_loss_param { l2_per_location: true }': lambda d: np.sqrt(
        (d * d).sum(1) + 0.01
    ),
    'type: "L1Loss" l1_loss_param { l2_per_location: true l2_prescale_by_channels: true epsilon: 1 }': (
        lambda d: np.sqrt((d * d).mean(1) + 1)
    ),
    'type: "LpqLoss" lpq_loss_param { p: 0.8 q: 1.2 p_epsilon: 0.1 }': lambda d: (
        (((np.abs(d) + 0.1) ** 0.8).sum(1) + 0.01) ** 1.2
    ),
    'type: "LpqLoss" lpq_loss_param { p: 2 q: 0.5 l2_prescale_by_channels: true }': lambda d: (
        np.sqrt((d * d).mean(1) + 0.01)
    ),
}
ENTRIES = "normalize_by_num_entries: true"


def correlation(text):
    type_ = "Correlation1D" if text in FLAT else "Correlation"
    return f'type: "{type_}" correlation_param {{ {text} }}'


def setting(text, name, default):
    words = text.replace(":", "").split()
    return int(words[words.index(name) + 1]) if name in words else default


@pytest.mark.parametrize("text", CORRELATIONS)
def test_correlation_against_a_loop(text):
    (y,) = Single(correlation(text), A, B).forward()
    pad, size = setting(text, "pad", 0), setting(text, "kernel_size", 1)
    stride, step = setting(text, "stride_1", 1), setting(text, "stride_2", 1)
    reach = setting(text, "max_displacement", 0)
    around = [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    a, b = np.pad(A, around), np.pad(B, around)
    grid, border = reach // step, reach + size // 2
    side = 2 * grid + 1
    high, wide = (ceil((s + 2 * pad - 2 * border) / stride) for s in A.shape[2:])
    assert y.shape == (2, side * side, high, wide)
    for n, k, i, j in np.ndindex(y.shape):
        p, o = (k // side - grid) * step, (k % side - grid) * step
        r, q = i * stride + reach, j * stride + reach
        u = a[n, :, r : r + size, q : q + size]
        v = b[n, :, r + p : r + p + size, q + o : q + o + size]
        want = np.abs(u - v) if "SUBTRACT" in text else u * v
        assert y[n, k, i, j] == pytest.approx(want.mean())


@pytest.mark.parametrize("text", FLAT)
def test_correlation_along_rows(text):
    (y,) = Single(correlation(text), A, B).forward()
    pad, size = setting(text, "pad", 0), setting(text, "kernel_size", 1)
    stride, step = setting(text, "stride_1", 1), setting(text, "stride_2", 1)
    reach, direction = setting(text, "max_displacement", 0), setting(text, "single_direction", 0)
    grid, more = reach // step, 8  # zeros on both sides, so that nothing lies outside
    a, b = (np.pad(x, [(0, 0), (0, 0), (0, 0), (pad + more, pad + more)]) for x in (A, B))
    moves = {0: range(-grid, grid + 1), 1: range(grid + 1), -1: range(-grid - 1, 0)}[direction]
    assert y.shape[1] == len(moves)
    for n, k, i, j in np.ndindex(y.shape):
        r, q = i * stride, j * stride + reach + more
        u = a[n, :, r : r + size, q : q + size]
        v = b[n, :, r : r + size, q + moves[k] * step :][..., :size]
        assert y[n, k, i, j] == pytest.approx((u * v).mean())


@pytest.mark.parametrize("text", CORRELATIONS + FLAT)
def test_correlation_gradient(text):
    check_gradient(correlation(text), A[:1, :2], B[:1, :2])


def bilinear(plane, y, x):
    top, left = floor(y), floor(x)
    bottom, right = min(top + 1, plane.shape[0] - 1), min(left + 1, plane.shape[1] - 1)
    s, t = x - left, y - top
    upper = (1 - s) * plane[top, left] + s * plane[top, right]
    return (1 - t) * upper + t * ((1 - s) * plane[bottom, left] + s * plane[bottom, right])


@pytest.mark.parametrize("fill", ["ZERO", "NOT_A_NUMBER"])
def test_flow_warp_against_a_loop(fill):
    text = f'type: "FlowWarp" flow_warp_param {{ fill_value: {fill} }}'
    (y,) = Single(text, A, FLOW).forward()
    outside = 0
    for n, c, i, j in np.ndindex(y.shape):
        right, down = FLOW[n, 0, i, j] + j, FLOW[n, 1, i, j] + i
        if 0 <= right < 6 and 0 <= down < 5:
            assert y[n, c, i, j] == pytest.approx(bilinear(A[n, c], down, right))
        else:
            outside += 1
            assert np.isnan(y[n, c, i, j]) if fill == "NOT_A_NUMBER" else y[n, c, i, j] == 0
    assert 0 < outside < y.size


def test_flow_warp_gradient():
    check_gradient('type: "FlowWarp"', A, FLOW)


def test_channel_norm():
    (y,) = Single('type: "ChannelNorm"', A).forward()
    np.testing.assert_allclose(y, np.linalg.norm(A, axis=1, keepdims=True))
    check_gradient('type: "ChannelNorm"', A)


ACCUMS = {
    "": (5, 6),
    "size_divisible_by: 4": (8, 8),
    "top_height: 7 top_width: 9": (7, 9),
    "top_height: 7 top_width: 5": (5, 6),
    "have_reference: true": (3, 4),
}


@pytest.mark.parametrize("text", ACCUMS)
def test_accum_against_a_loop(text):
    single = Single(f'type: "Accum" accum_param {{ {text} }}', A, B[:, :2, :3, :4])
    (y,) = single.forward()
    maps = [A] if "reference" in text else [A, B[:, :2, :3, :4]]
    high, wide = ACCUMS[text]
    want = [
        [
            [
                bilinear(
                    plane, i / (high - 1) * (len(plane) - 1), j / (wide - 1) * (len(plane.T) - 1)
                )
                for i, j in np.ndindex(high, wide)
            ]
            for x in maps
            for plane in x[n]
        ]
        for n in range(2)
    ]
    np.testing.assert_allclose(y, np.reshape(want, y.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ["size_divisible_by: 4", "have_reference: true"])
def test_accum_gradient(text):
    check_gradient(f'type: "Accum" accum_param {{ {text} }}', A[:1], B[:1, :2, :3, :4])


def test_mean_of_values_and_of_a_file(tmp_path):
    scales = "mean_scale: 2 input_scale: 3 output_scale: 0.5"
    text = f'type: "Mean" mean_param {{ value: 1 value: 2 value: 4 {scales} }}'
    (y,) = Single(text, A).forward()
    np.testing.assert_allclose(y, 0.5 * (3 * A + 2 * np.array([1, 2, 4])[:, None, None]))
    check_gradient(text, A[:1], B[:1, :, :2], tops=2)
    image = random(1, 1, 5, 6, seed=3)
    path = tmp_path / "mean.binaryproto"
    path.write_bytes(binary.array_to_blob(image).SerializeToString())
    text = f'type: "Mean" mean_param {{ file: "{path}" operation: SUBTRACT }}'
    (y,) = Single(text, A).forward()
    np.testing.assert_allclose(y, A - image, rtol=1e-6, atol=1e-6)


def filtered(x, size, kind, antialias):
    """Resample a plane as FlowNet2 does: weights of places whose halves are exchanged."""
    out = np.zeros(size)
    fy, fx = (s / o for s, o in zip(x.shape, size, strict=True))
    ay, ax = (1 / f if antialias and max(fx, fy) > 1 else 1 for f in (fy, fx))

    def weight(d):
        d = abs(d)
        if kind == "LINEAR":
            return max(1 - d, 0)
        if d <= 1:
            return (1.5 * d - 2.5) * d * d + 1
        return ((2.5 - 0.5 * d) * d - 4) * d + 2 if d < 2 else 0

    def rounded(v):
        return floor(abs(v) + 0.5) * (1 if v >= 0 else -1)

    for i, j in np.ndindex(size):
        right, down = j * fx + fy / 2 - 0.5, i * fy + fx / 2 - 0.5
        if kind == "NEAREST":
            row, column = min(rounded(down), len(x) - 1), min(rounded(right), len(x.T) - 1)
            out[i, j] = x[max(row, 0), max(column, 0)]
            continue
        total = share = 0
        for (r, q), value in np.ndenumerate(x):
            w = weight(ay * (down - r)) if abs(down - r) < 4 * max(fy, 1) else 0
            w *= weight(ax * (right - q)) if abs(right - q) < 4 * max(fx, 1) else 0
            total, share = total + w * value, share + w
        out[i, j] = total / share if share else 0
    return out


RESAMPLINGS = ["LINEAR", "CUBIC", "NEAREST", "LINEAR antialias: false"]


@pytest.mark.parametrize("size", [(8, 11), (3, 4), (10, 3)])
@pytest.mark.parametrize("kind", RESAMPLINGS)
def test_resample_against_a_loop(kind, size):
    text = f'type: "Resample" resample_param {{ height: {size[0]} width: {size[1]} type: {kind} }}'
    (y,) = Single(text, A).forward()
    for n, c in np.ndindex(y.shape[:2]):
        want = filtered(A[n, c], size, kind.split()[0], "false" not in kind)
        np.testing.assert_allclose(y[n, c], want, rtol=1e-4, atol=1e-5)
    (like,) = Single(
        f'type: "Resample" resample_param {{ type: {kind} }}', A, A[:, :1, :2]
    ).forward()
    assert like.shape == (2, 3, 2, 6)


def test_downsample_against_a_loop():
    x = A.copy()
    x[0, 0, :3, :3] = np.nan
    (y,) = Single('type: "Downsample" downsample_param { top_height: 3 top_width: 4 }', x).forward()
    for n, c, i, j in np.ndindex(y.shape):
        down, right = i / 2 * 4, j / 3 * 5
        total = share = missing = 0
        for (r, q), value in np.ndenumerate(x[n, c]):
            w = max(0, 1 - abs(r - down) / 2) * max(0, 1 - abs(q - right) / (5 / 3))
            if np.isnan(value):
                missing += w
            else:
                total, share = total + w * value, share + w
        want = np.nan if missing > share / 2 else total / share
        assert y[n, c, i, j] == pytest.approx(want, nan_ok=True, rel=1e-5, abs=1e-6)
    assert 0 < np.isnan(y).sum() < y[0, 0].size
    (same,) = Single('type: "Downsample"', x, x[:, :1]).forward()
    np.testing.assert_array_equal(same, x)


@pytest.mark.parametrize("text", LOSSES)
def test_losses_against_numpy(text):
    (loss,) = Single(text, A, B).forward()
    assert loss == pytest.approx(LOSSES[text](A - B).sum() / 2)
    check_gradient(text, A, B)
    x = A.copy()
    x[0, 1, 2] = np.nan
    single = Single(text.replace("{", "{ " + ENTRIES, 1), x)
    (loss,) = single.forward()
    entries = np.isfinite(x).sum() / 3
    assert loss == pytest.approx(LOSSES[text](np.nan_to_num(x)).sum() / entries)
    (dx,), _ = single.backward()
    np.testing.assert_array_equal(dx == 0, np.isnan(x))


def test_what_is_less_than_the_plateau_counts_as_nothing():
    text = 'type: "L1Loss" l1_loss_param { plateau: 0.5 %s }'
    d = np.where(np.abs(A) < 0.5, 0, A)
    (loss,) = Single(text % "", A).forward()
    assert loss == pytest.approx(np.abs(d).sum() / 2)
    check_gradient(text % "", A)
    norms = np.sqrt((A * A).sum(1))
    single = Single(text.replace("0.5", "1.5") % "l2_per_location: true", A)
    (loss,) = single.forward()
    want = np.where(norms < 1.5, 0.1, np.sqrt(norms**2 + 0.01)).sum() / 2
    assert loss == pytest.approx(want)
    (dx,), _ = single.backward()
    np.testing.assert_array_equal((dx == 0).all(1), norms < 1.5)


@pytest.mark.parametrize(
    ("text", "bottoms", "message"),
    [
        ('type: "Correlation"', (A, B), "needs a kernel_size and a max_displacement"),
        (correlation("kernel_size: 2 max_displacement: 1"), (A, B), "kernel_size 2 is not odd"),
        (correlation(f"{CORRELATIONS[2]} stride_2: 0"), (A, B), "must be 1 or more"),
        (correlation(f"{CORRELATIONS[2]} do_abs: true"), (A, B), "do_abs and single_direction"),
        (
            correlation("kernel_size: 1 max_displacement: 4"),
            (A, B),
            "too small for a max_displacement of 4",
        ),
        (correlation(FLAT[0]).replace("pad", "single_direction"), (A, B), "must be -1, 0 or 1"),
        (correlation(CORRELATIONS[2]), (A, B[:, :2]), r"bottom 1 has shape \[2, 2, 5, 6\]"),
        (correlation(CORRELATIONS[2]), (A[0], B[0]), r"Correlation needs \(N, C, H, W\)"),
        ('type: "FlowWarp"', (A, B), r"the flow needs shape \[2, 2, 5, 6\]"),
        ('type: "Accum"', (A, B[:1]), r"batches of \[2, 1\] items"),
        ('type: "Accum" accum_param { have_reference: true }', (A,), "needs two bottoms or more"),
        ('type: "Accum" accum_param { size_divisible_by: 0 }', (A,), "must be 1 or more"),
        ('type: "Mean"', (A,), "needs a file, or values"),
        (
            'type: "Mean" mean_param { value: 1 value: 2 }',
            (A,),
            "does not fit a bottom of shape 2 3",
        ),
        ('type: "Resample" resample_param { type: AREA }', (A,), "are known, not AREA"),
        ('type: "Resample" resample_param { width: 3 }', (A,), "needs a height and a width"),
        (
            'type: "Downsample" downsample_param { top_height: 9 top_width: 3 }',
            (A,),
            "no 9 rows or",
        ),
        (
            'type: "L1Loss" l1_loss_param { }',
            (A, B[:1]),
            r"needs bottoms \(N, C, ...\) of one shape",
        ),
        ('type: "LpqLoss" lpq_loss_param { p: 1 p: 2 q: 1 q: 2 }', (A,), "one p and one q, not 2"),
    ],
)
def test_what_does_not_fit_is_refused(text, bottoms, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *bottoms)


ON_GPU = {
    **{correlation(text): (A, B) for text in CORRELATIONS + FLAT},
    'type: "FlowWarp"': (A, FLOW),
    'type: "FlowWarp" flow_warp_param { fill_value: NOT_A_NUMBER }': (A, FLOW),
    'type: "ChannelNorm"': (A,),
    'type: "Accum" accum_param { size_divisible_by: 4 }': (A, B[:, :2, :3, :4]),
    'type: "Mean" mean_param { value: 3 }': (A,),
    **dict.fromkeys(LOSSES, (A, B)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("text", ON_GPU)
def test_on_gpu(text):
    check_plain_on_gpu(text, *ON_GPU[text], propagate_down=[True] * len(ON_GPU[text]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RESAMPLINGS)
def test_resampling_on_gpu(kind):
    sizes = [("Resample", f"height: 8 width: 4 type: {kind}")]
    sizes.append(("Downsample", "top_height: 3 top_width: 4"))
    for type_, size in sizes:
        text = f'type: "{type_}" {type_.lower()}_param {{ {size} }}'
        check_plain_on_gpu(text, A, propagate_down=[False])
