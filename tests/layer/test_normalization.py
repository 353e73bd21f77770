import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from tests.net.nets import net_of

from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_on_gpu, check_plain_on_gpu

GOLDEN = [
    "bias_two_bottoms",
    "lrn_across",
    "lrn_within",
    "mvn",
    "mvn_across",
    "scale_param_bias",
    "scale_two_bottoms",
]

# name: prototxt, shape
ONE_BOTTOM = {
    "LRN across": (
        'type: "LRN" lrn_param { local_size: 3 alpha: 0.7 beta: 0.6 k: 1.5 }',
        (2, 5, 2, 2),
    ),
    "LRN within": (
        'type: "LRN" lrn_param { local_size: 3 alpha: 0.7 beta: 0.6 norm_region: WITHIN_CHANNEL }',
        (2, 2, 3, 4),
    ),
    "MVN": ('type: "MVN"', (2, 3, 2, 3)),
    "MVN across": ('type: "MVN" mvn_param { across_channels: true }', (2, 3, 2, 3)),
    "MVN mean only": ('type: "MVN" mvn_param { normalize_variance: false }', (2, 3, 2, 3)),
    "Normalize across": ('type: "Normalize"', (2, 3, 2, 2)),
    "Normalize each place": (
        'type: "Normalize" norm_param { across_spatial: false eps: 0.1 }',
        (2, 3, 2, 2),
    ),
    "Normalize one channel": ('type: "Normalize" norm_param { channel_shared: false }', (3, 1, 4)),
    "Normalize of happynear": ('type: "Normalize" normalize_param { }', (3, 4, 1, 2)),
    "Normalize by absolutes": (
        'type: "Normalize" normalize_param { normalize_type: "L1" }',
        (2, 3, 2, 2),
    ),
    "Scale": ('type: "Scale"', (2, 3, 2, 2)),
    "Scale with bias": ('type: "Scale" scale_param { bias_term: true }', (2, 3, 2, 2)),
    "Scale of vectors": ('type: "Scale" scale_param { bias_term: true }', (4, 3)),
    "Scale of one item": ('type: "Scale" scale_param { bias_term: true }', (1, 3, 2, 2)),
    "Scale of two axes": (
        'type: "Scale" scale_param { axis: -3 num_axes: 2 bias_term: true }',
        (2, 3, 2, 2),
    ),
    "Scale of everything": (
        'type: "Scale" scale_param { axis: 0 num_axes: -1 bias_term: true }',
        (2, 3, 2),
    ),
    "Scale by one number": ('type: "Scale" scale_param { num_axes: 0 bias_term: true }', (2, 3, 2)),
    "EltwiseAffine": ('type: "EltwiseAffine"', (2, 3, 2, 2)),
    "EltwiseAffine of one number": (
        'type: "EltwiseAffine" eltwise_affine_param { channel_shared: true }',
        (2, 3, 2),
    ),
    "Bias": ('type: "Bias"', (2, 3, 2, 2)),
    "Bias of vectors": ('type: "Bias"', (4, 3)),
    "Bias of one number": ('type: "Bias" bias_param { num_axes: 0 }', (2, 3, 2)),
}
TWO_BOTTOMS = {
    "Scale": ('type: "Scale" scale_param { bias_term: true }', (2, 3, 2, 2), (3, 2)),
    "Scale axis 0": ('type: "Scale" scale_param { axis: 0 }', (2, 3, 2), (2,)),
    "Scale by one number": ('type: "Scale"', (2, 3), ()),
    "Bias": ('type: "Bias"', (2, 3, 2, 2), (3, 2)),
    "Bias axis 0": ('type: "Bias" bias_param { axis: 0 }', (2, 3, 2), (2, 3, 2)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", ONE_BOTTOM)
def test_gradient(case, in_place):
    text, shape = ONE_BOTTOM[case]
    check_gradient(text, random(*shape), in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", TWO_BOTTOMS)
def test_gradient_of_two_bottoms(case, in_place):
    text, shape, operand = TWO_BOTTOMS[case]
    check_gradient(text, random(*shape), random(*operand, seed=1), in_place=in_place)


@pytest.mark.parametrize("shared", [False, True])
def test_eltwise_affine_against_a_loop(shared):
    x = random(2, 3, 2, 2)
    text = f'type: "EltwiseAffine" eltwise_affine_param {{ channel_shared: {str(shared).lower()} }}'
    single = Single(text, x)
    assert [blob.shape for blob in single.layer.blobs] == [() if shared else (3,)] * 2
    np.testing.assert_allclose(single.params[0], 1.0001)
    np.testing.assert_allclose(single.params[1], 0.0001)
    single.params[0][...] = 2 if shared else [1, 2, 3]
    single.params[1][...] = -1 if shared else [0, -1, 5]
    (y,) = single.forward()
    (dx,), (dslope, dbias) = single.backward([2 * x])
    slopes, biases = np.zeros(3), np.zeros(3)
    for n, c, h, w in np.ndindex(x.shape):
        slope, bias = (2, -1) if shared else ((1, 2, 3)[c], (0, -1, 5)[c])
        assert y[n, c, h, w] == pytest.approx(slope * x[n, c, h, w] + bias)
        assert dx[n, c, h, w] == pytest.approx(slope * 2 * x[n, c, h, w])
        slopes[c] += 2 * x[n, c, h, w] ** 2
        biases[c] += 2 * x[n, c, h, w]
    np.testing.assert_allclose(dslope, slopes.sum() if shared else slopes)
    np.testing.assert_allclose(dbias, biases.sum() if shared else biases, atol=1e-12)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("in_place", [False, True])
def test_lrn_within_against_a_loop(in_place):
    text, shape = ONE_BOTTOM["LRN within"]
    x = random(*shape)
    (y,) = Single(text, x, in_place=in_place).forward()
    squares = np.pad(x * x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    for n, c, h, w in np.ndindex(shape):
        mean = squares[n, c, h : h + 3, w : w + 3].sum() / 9
        assert y[n, c, h, w] == pytest.approx(x[n, c, h, w] * (1 + 0.7 * mean) ** -0.6)


def test_lrn_across_against_a_loop():
    text, shape = ONE_BOTTOM["LRN across"]
    x = random(*shape)
    (y,) = Single(text, x).forward()
    for n, c, h, w in np.ndindex(shape):
        s = 1.5 + 0.7 / 3 * (x[n, max(0, c - 1) : c + 2, h, w] ** 2).sum()
        assert y[n, c, h, w] == pytest.approx(x[n, c, h, w] * s**-0.6)


@pytest.mark.parametrize(
    ("bounds", "want"),
    [
        ("min_value: -0.5 max_value: 1", [-0.5, 0.3, 1]),
        ("min_value: -0.5", [-0.5, 0.3, 2]),
        ("max_value: 1", [-4, 0.3, 1]),
    ],
)
def test_scale_is_cut_to_its_bounds(bounds, want):
    x = random(2, 3, 4)
    single = Single(f'type: "Scale" scale_param {{ {bounds} }}', x)
    single.params[0][...] = -4, 0.3, 2
    (y,) = single.forward()
    np.testing.assert_allclose(single.params[0], want)
    np.testing.assert_allclose(y, x * single.params[0][:, None])
    with pytest.raises(ConfigError, match="for a scale that is a parameter"):
        Single(f'type: "Scale" scale_param {{ {bounds} }}', x, random(3))


@pytest.mark.parametrize(
    "text", ['type: "LRN" lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 }', 'type: "MVN"']
)
def test_gradient_when_a_layer_in_place_has_overwritten_the_top(text):
    single = Single(text, random(2, 3, 4, 5))
    single.forward()
    dy = random(2, 3, 4, 5, seed=1)
    ((expected,), _) = single.backward([dy])
    single.tops[0][...] = 7
    ((dx,), _) = single.backward([dy])
    np.testing.assert_array_equal(dx, expected)


def test_mvn_against_numpy():
    x = random(2, 3, 4, 5)
    (y,) = Single('type: "MVN"', x).forward()
    std = x.std((2, 3), keepdims=True)
    np.testing.assert_allclose(y, (x - x.mean((2, 3), keepdims=True)) / (std + 1e-9))


def test_mvn_of_fewer_axes_gives_four_as_in_caffe():
    text, x = 'type: "MVN" mvn_param { across_channels: true }', random(2, 3, 4)
    (y,) = Single(text, x).forward()
    assert y.shape == (2, 3, 4, 1)
    std = x.std((1, 2), keepdims=True)
    np.testing.assert_allclose(y[..., 0], (x - x.mean((1, 2), keepdims=True)) / (std + 1e-9))
    check_gradient(text, x)


def test_mvn_of_fewer_axes_in_place():
    data = (
        'layer { name: "d" type: "DummyData" top: "x" '
        "dummy_data_param { shape { dim: 3 dim: 4 } } } layer { "
    )
    data += (
        'name: "ip" type: "InnerProduct" bottom: "x" top: "y" '
        "inner_product_param { num_output: 5 } } "
    )
    net = net_of(
        data
        + 'layer { name: "m" type: "MVN" bottom: "y" top: "y" mvn_param { across_channels: true } }'
    )
    x, (w, b) = random(3, 4).astype(np.float32), net.params
    net.blobs["x"].data[...], w.data[...], b.data[...] = x, random(5, 4, seed=1), random(5, seed=2)
    for _ in range(2):
        net.forward()
        product = x @ w.data.T + b.data
        expected = (product - product.mean(1, keepdims=True)) / product.std(1, keepdims=True)
        np.testing.assert_allclose(
            net.blobs["y"].data, expected[:, :, None, None], rtol=1e-4, atol=1e-5
        )


def test_scale_and_bias_start_as_identity():
    x = random(2, 3, 2)
    for text in ('type: "Scale" scale_param { bias_term: true }', 'type: "Bias"'):
        (y,) = Single(text, x).forward()
        np.testing.assert_array_equal(y, x)
    (y,) = Single('type: "Scale" scale_param { filler { } }', x).forward()
    np.testing.assert_array_equal(y, 0)


def test_scale_and_bias_against_numpy():
    x, s, b = random(2, 3, 4), random(3, seed=1), random(3, seed=2)
    single = Single('type: "Scale" scale_param { bias_term: true }', x)
    for param, value in zip(single.params, (s, b), strict=True):
        param[...] = value
    np.testing.assert_allclose(single.forward()[0], x * s[:, None] + b[:, None])
    (y,) = Single('type: "Bias"', x, b).forward()
    np.testing.assert_allclose(y, x + b[:, None])


@pytest.mark.parametrize("text", ['type: "Scale"', 'type: "Bias"'])
def test_operand_bottom_gets_its_gradient_written(text):
    single = Single(text, random(2, 3), np.ones(3))
    single.forward()
    for _ in range(2):
        (_, gradient), _ = single.backward([np.ones((2, 3))])
    expected = single.inputs[0].sum(0) if "Scale" in text else [2, 2, 2]
    np.testing.assert_allclose(gradient, expected)


def test_frozen_parameters_keep_their_diff():
    single = Single('type: "Scale" scale_param { bias_term: true }', random(2, 3, 2))
    single.forward()
    single.layer.param_propagate_down = [False, True]
    _, (scale, bias) = single.backward([np.ones((2, 3, 2))], [False])
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(bias, 4)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    {
        "even LRN": (
            'type: "LRN" lrn_param { local_size: 4 }',
            [(1, 2, 3, 3)],
            "must be odd, not 4",
        ),
        "LRN of vectors": ('type: "LRN"', [(2, 3)], r"4 axes, not \[2, 3\]"),
        "Scale axis": ('type: "Scale" scale_param { axis: 3 }', [(2, 3)], "axis 3 is out of range"),
        "Scale num_axes": (
            'type: "Scale" scale_param { num_axes: 2 }',
            [(2, 3)],
            r"do not lie within \[2, 3\]",
        ),
        "Scale bottom": (
            'type: "Scale"',
            [(2, 3), (2,)],
            r"shape \[2\] does not fit \[2, 3\] from axis 1 on",
        ),
        "Bias bottom": ('type: "Bias"', [(2, 3), (3, 1)], r"shape \[3, 1\] does not fit \[2, 3\]"),
        "MVN": ('type: "MVN"', [(1, 1, 1, 1, 2)], "at most 4 axes"),
    }.values(),
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*s) for s in shapes))


def test_a_change_of_channels_is_refused():
    for text in ('type: "Scale"', 'type: "Bias"'):
        single = Single(text, random(2, 3))
        single.bottom[0].reshape((2, 4))
        with pytest.raises(ConfigError, match="fit"):
            single.layer.reshape(single.bottom, single.top)


def test_absurd_windows():
    with pytest.raises(ConfigError, match=r"more than 2\^31 elements"):
        Single(
            'type: "LRN" lrn_param { local_size: 4294967295 norm_region: WITHIN_CHANNEL }',
            random(1, 1, 3, 3),
        )
    x = random(2, 3, 2, 2)
    wide, enough = (
        Single(f'type: "LRN" lrn_param {{ local_size: {size} alpha: {size} }}', x).forward()
        for size in (4294967295, 7)
    )
    np.testing.assert_allclose(wide, enough)


NORMALIZE = {
    "ssd": ("norm_param { across_spatial: false channel_shared: false eps: 0.25 }", 1),
    "ssd across": ("norm_param { channel_shared: false }", 1),
    "happynear": ("normalize_param { bp_norm: true }", 2),
    "happynear's absolutes": ('normalize_param { normalize_type: "L1" bp_norm: true }', 2),
    "happynear, not divided": ("normalize_param { bp_norm: true fix_gradient: true }", 2),
}


@pytest.mark.parametrize("case", NORMALIZE)
def test_normalize_against_numpy(case):
    """With scales that differ SSD's gradient of x is no derivative."""
    text, tops = NORMALIZE[case]
    x = random(2, 3, 4, 300)
    single = Single(f'type: "Normalize" {text}', x, tops=tops)
    axes = (1, 2, 3) if "across" in case else 1
    eps = 0.25 if case == "ssd" else 0 if tops == 1 else 1e-6
    power = 1 if "L1" in text else 2
    norm = ((np.abs(x) ** power).sum(axes, keepdims=True) + eps) ** (1 / power)
    scale = np.ones((1, 1, 1, 1))
    if tops == 1:
        single.params[0][...] = [2, -3, 0]
        scale = single.params[0].reshape(1, 3, 1, 1)
    y, *norms = single.forward()
    np.testing.assert_allclose(y, x / norm * scale, rtol=1e-10)
    for got in norms:
        np.testing.assert_allclose(got, norm, rtol=1e-10)
    dy, dn = random(*x.shape, seed=1), random(*norm.shape, seed=2)
    (dx,), dparams = single.backward([dy, dn][:tops])
    slope = np.sign(x) if power == 1 else x / norm
    divisor = 1 if "fix_gradient" in text else norm
    want = scale * (dy - slope * (x / norm * dy).sum(axes, keepdims=True)) / divisor
    want = want + slope * dn if tops == 2 else want
    np.testing.assert_allclose(dx, want, rtol=1e-8, atol=1e-10)
    for dscale in dparams:
        np.testing.assert_allclose(dscale, (x / norm * dy).sum((0, 2, 3)), rtol=1e-10)


@pytest.mark.parametrize(
    ("text", "tops", "message"),
    [
        ("norm_param { } normalize_param { }", 1, "happynear's; give one"),
        ("norm_param { }", 2, "happynear's; give one"),
        ('normalize_param { normalize_type: "L3" }', 1, "L1 or L2"),
        (
            "norm_param { channel_shared: false } blobs { shape { dim: 1 } data: 1 }",
            1,
            "scale shape",
        ),
    ],
)
def test_what_cannot_be_normalized_is_refused(text, tops, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "Normalize" {text}', random(2, 3, 4, 5), tops=tops)


NORMS_OF_FORKS = {
    "GRN": ('type: "GRN"', 1e-7, (1,)),
    "GRN with a bias": ('type: "GRN" grn_param { bias: 0.5 }', 0.5, (1,)),
    "of an item": ('type: "NormalizationL2"', 0, (1, 2, 3)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", NORMS_OF_FORKS)
def test_norms_of_forks_against_numpy(case, in_place):
    text, bias, axes = NORMS_OF_FORKS[case]
    x = random(2, 3, 4, 5)
    (y,) = Single(text, x, in_place=in_place).forward()
    norm = np.sqrt((x * x).sum(axis=axes, keepdims=True) + bias)
    np.testing.assert_allclose(y, x / norm, rtol=1e-7)
    check_gradient(text, x, in_place=in_place)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4)])
def test_l2_normalize_against_numpy(shape):
    x = random(*shape)
    (y,) = Single('type: "L2Normalize"', x).forward()
    norm = np.sqrt((x * x).reshape(len(x), -1).sum(axis=1) + 1e-7).reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(y, x.reshape(*shape, *(1,) * (4 - x.ndim)) / norm, rtol=1e-12)
    check_gradient('type: "L2Normalize"', x)


@pytest.mark.gpu
def test_l2_normalize_on_gpu():
    check_plain_on_gpu('type: "L2Normalize"', random(3, 4), propagate_down=[True])


def test_norms_of_forks_at_their_ends():
    single = Single('type: "NormalizationL2"', np.zeros((2, 3)), dtype=np.float32)
    np.testing.assert_array_equal(single.forward()[0], 0)
    assert np.isfinite(single.backward([random(2, 3)])[0][0]).all()
    for in_place in (False, True):
        text, dy = 'type: "GRN" grn_param { dummy_backward: true }', random(2, 3, 4, seed=1)
        single = Single(text, random(2, 3, 4), in_place=in_place)
        single.forward()
        if not in_place:
            np.testing.assert_array_equal(single.backward([dy])[0][0], dy)
    with pytest.raises(ConfigError, match="bias must be 0 or more, not -1"):
        Single('type: "GRN" grn_param { bias: -1 }', random(2, 3))
    with pytest.raises(ConfigError, match=r"GRN needs \(N, C, ...\), not \[3\]"):
        Single('type: "GRN"', random(3))
    single.bottom[0].reshape((3,))
    with pytest.raises(ConfigError, match=r"GRN needs \(N, C, ...\), not \[3\]"):
        single.layer.reshape(single.bottom, single.top)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NORMS_OF_FORKS)
def test_norms_of_forks_on_gpu(case):
    check_plain_on_gpu(NORMS_OF_FORKS[case][0], random(2, 37, 5, 6), propagate_down=[True])


@pytest.mark.gpu
@pytest.mark.parametrize("case", NORMALIZE)
def test_normalize_on_gpu(case):
    text, tops = NORMALIZE[case]
    text = f'type: "Normalize" {text}'
    x = random(2, 37, 5, 6)
    if case == "ssd":
        check_on_gpu(text, np.round(x, 1))
    else:
        check_plain_on_gpu(text, x, propagate_down=[True], tops=tops)
    check_plain_on_gpu(
        text.replace("across_spatial: false", ""), x, propagate_down=[True], tops=tops
    )
