import logging
from math import e, inf

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer, registry
from caffepy.layer.neuron import Elementwise
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter

from .cases import NEURONS
from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_on_gpu, check_plain_on_gpu

GOLDEN = [
    "bnll_43",
    "clip_45",
    "elu_39",
    "exp_46",
    "log",
    "power",
    "prelu_37",
    "relu_35",
    "sigmoid_40",
    "swish_44",
    "tanh_41",
    "threshold_48",
]


def text(case):
    return f'type: "{case.split()[0]}" {NEURONS[case][0]}'


def phase(case):
    return {"phase": TEST} if "TEST" in case else {}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", [c for c in NEURONS if c != "Threshold"])
def test_gradient(case, in_place):
    check_gradient(text(case), random(2, 3, 2, 2), in_place=in_place, **phase(case))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", [c for c in NEURONS if NEURONS[c][1]])
def test_against_the_formula(case, dtype, in_place):
    single = Single(text(case), random(2, 3, 4), dtype=dtype, in_place=in_place, **phase(case))
    (y,) = single.forward()
    assert y.dtype == dtype
    expected = np.vectorize(NEURONS[case][1], otypes=[float])(single.inputs[0].astype(float))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("case", [c for c in NEURONS if "TEST" not in c])
def test_empty_and_odd_shapes(case):
    no_axes = [] if case.startswith("PReLU") else [()]  # PReLU has channels
    for shape in ((0, 3), (1, 3), (3, 1, 1), *no_axes):
        (y,) = Single(text(case), random(*shape)).forward()
        assert y.shape == shape


def test_power_of_zero_has_a_gradient():
    single = Single('type: "Power" power_param { power: 3 }', np.zeros((1, 2)))
    single.forward()
    (dx,), _ = single.backward([np.ones((1, 2))])
    np.testing.assert_array_equal(dx, 0)


def test_fractional_power_of_a_negative_number_is_nan_without_a_warning():
    (y,) = Single('type: "Power" power_param { power: 0.3 }', -np.ones((1, 2))).forward()
    assert np.isnan(y).all()


def test_relu_keeps_nan_and_infinity():
    x = np.array([[np.nan, np.inf, -np.inf, -0.0]])
    (y,) = Single('type: "ReLU"', x).forward()
    np.testing.assert_array_equal(y, [[np.nan, np.inf, 0, 0]])


ENDS = np.array([[np.nan, np.inf, 6, 5, 2, 0, -1, -3, -np.inf]])


@pytest.mark.parametrize(
    ("prototxt", "y", "dx"),
    {
        "relu6": (
            'type: "ReLU6" relu6_param { negative_slope: 0.5 }',
            [np.nan, 6, 6, 5, 2, 0, -0.5, -1.5, -np.inf],
            [1, 0, 0, 1, 1, 0.5, 0.5, 0.5, 0.5],
        ),
        "hard sigmoid": (
            'type: "HardSigmoid"',
            [np.nan, 1, 1, 1, 0.9, 0.5, 0.3, 0, 0],
            [0.2] * 9,  # the fork's, not the derivative
        ),
    }.values(),
    ids=["ReLU6", "HardSigmoid"],
)
def test_ends_of_a_range(prototxt, y, dx):
    single = Single(prototxt, ENDS)
    (got,) = single.forward()
    np.testing.assert_allclose(got, [y])
    (gradient,), _ = single.backward([np.ones_like(ENDS)])
    np.testing.assert_allclose(gradient, [dx])


def test_prelu_reads_its_filler_and_checks_the_channels():
    single = Single('type: "PReLU" prelu_param { filler { value: 0.5 } }', random(2, 3, 4))
    assert single.params[0].shape == (3,)
    np.testing.assert_array_equal(single.params[0], 0.5)
    single.bottom[0].reshape((2, 4, 4))
    with pytest.raises(ConfigError, match="4 channels do not fit the 3 slopes"):
        single.layer.reshape(single.bottom, single.top)
    with pytest.raises(ConfigError, match="at least 2 axes"):
        Single('type: "PReLU"', random(3))


def test_crelu():
    x = random(2, 3, 4)
    single = Single('type: "CReLU"', x)
    np.testing.assert_array_equal(
        single.forward()[0], np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=1)
    )
    check_gradient('type: "CReLU"', x)
    with pytest.raises(ConfigError, match="needs"):
        Single('type: "CReLU"', random(3))


@pytest.mark.gpu
def test_crelu_on_a_gpu():
    check_plain_on_gpu('type: "CReLU"', random(2, 3, 4), propagate_down=[True])


@pytest.mark.parametrize(
    ("prototxt", "message"),
    {
        "clip": ('type: "Clip" clip_param { min: 2 max: 1 }', "min 2 and max 1"),
        "exp": ('type: "Exp" exp_param { base: -2 }', "greater than 0, or -1 for e, not -2"),
        "log": ('type: "Log" log_param { base: 1 }', "no logarithm to the base 1"),
    }.values(),
)
def test_impossible_numbers_are_refused(prototxt, message):
    with pytest.raises(ConfigError, match=message):
        Single(prototxt, random(2, 3))


def test_base_e_is_the_default():
    (y,) = Single('type: "Exp"', np.ones((1, 1))).forward()
    assert y[0, 0] == pytest.approx(e)


def test_a_factor_of_exp_beyond_all_numbers_is_infinite_without_a_warning():
    (y,) = Single('type: "Exp" exp_param { shift: 1e30 }', np.ones((1, 1))).forward()
    assert y[0, 0] == inf


def test_threshold_has_no_gradient():
    single = Single('type: "Threshold"', random(2, 3))
    single.forward()
    assert not single.layer.allow_force_backward(0)
    with pytest.raises(ConfigError, match="cannot be differentiated"):
        single.backward([np.ones((2, 3))])


def on_gpu(case, device, bottom, top):
    """The layer of a case, set up on blobs of a GPU."""
    layer = create_layer(text_format.Parse(text(case), LayerParameter()), TRAIN, device)
    layer.setup([bottom], [top])
    layer.reshape([bottom], [top])
    layer.param_propagate_down = [True] * len(layer.blobs)
    return layer


NATIVE = [
    case
    for case in NEURONS
    if case.split()[0] in ("ELU", "PReLU", "ReLU", "Sigmoid", "Swish", "TanH")
] + [
    "Power square",
    "Power inverse",
]


# Types that take the plain layout alone, as plain array arithmetic does.
PLAIN = [case for case in NEURONS if not issubclass(registry[case.split()[0]], Elementwise)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*PLAIN, *(c for c in NATIVE if "PReLU" not in c)])
def test_on_a_gpu(case):
    x = np.round(4 * random(2, 8, 3, 5)) / 4
    if case in PLAIN:
        has_gradient = Single(text(case), x).layer.allow_force_backward(0)
        phase = TEST if case.endswith(" TEST") else TRAIN
        check_plain_on_gpu(text(case), x, propagate_down=[has_gradient], phase=phase)
    else:
        check_on_gpu(text(case), x)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float16", "uint16"])
@pytest.mark.parametrize("case", NATIVE)
def test_in_place_with_the_channels_last(case, kind):
    shape, tolerance = (2, 8, 3, 5), 0.03
    device = CudaDevice(seed=1)
    reference = Single(text(case), random(*shape), in_place=True)
    with device.scope():
        blob = Blob(shape, device=device)
        blob.set_layout(Layout(np.dtype(kind), True))
        layer = on_gpu(case, device, blob, blob)
        blob.host_data[...] = reference.inputs[0]
        layer.forward([blob], [blob])
        y = blob.host_data.copy()
        blob.host_diff[...] = random(*shape, seed=1)
        layer.backward([blob], [True], [blob])
    np.testing.assert_allclose(y, reference.forward()[0], rtol=tolerance, atol=tolerance)
    (dx,), diffs = reference.backward([random(*shape, seed=1)])
    np.testing.assert_allclose(blob.host_diff, dx, rtol=tolerance, atol=tolerance)
    for parameter, diff in zip(layer.blobs, diffs, strict=True):
        np.testing.assert_allclose(parameter.host_diff, diff, rtol=tolerance, atol=tolerance)


SCALER = 'type: "GradientScaler" gradient_scaler_param {{ max_iter: 4 alpha: 3 {} }}'


def reversed_by(t, lower=0.0, upper=1.0, threshold=0):
    """By how much a gradient is reversed after t passes."""
    if threshold and t <= threshold:
        return 0.0
    share = min((t - threshold) / (threshold + 4), 1)
    return lower + (upper - lower) * (2 / (1 + e ** (-3 * share)) - 1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, ""),
        ({"lower": 0.2, "upper": 0.6}, "lower_bound: 0.2 upper_bound: 0.6"),
        ({"threshold": 2}, "threshold_iter: 2"),
    ],
)
def test_gradients_are_reversed_more_with_each_pass(given, more, in_place):
    x, dy = random(2, 3), random(2, 3, seed=5)
    single = Single(SCALER.format(more), x, in_place=in_place)
    for t in range(8):
        np.testing.assert_array_equal(single.forward()[0], x)
        (dx,), _ = single.backward([dy])
        np.testing.assert_allclose(dx, -reversed_by(t, **given) * dy, rtol=1e-6)
    other = Single(SCALER.format(more), x)
    other.layer.set_state(single.layer.state())
    other.forward()
    np.testing.assert_allclose(other.backward([dy])[0][0], -reversed_by(8, **given) * dy, rtol=1e-6)


def test_passes_of_the_test_phase_reverse_no_more():
    single = Single(SCALER.format(""), random(2, 3), phase=TEST)
    for _ in range(3):
        single.forward()
    assert single.layer.state() == {"passes": 0}


@pytest.mark.parametrize("more", ["alpha: -1", "max_iter: 0"])
def test_scalers_of_gradients_that_are_refused(more):
    text = f'type: "GradientScaler" gradient_scaler_param {{ {more} }}'
    with pytest.raises(ConfigError, match="max_iter must be 1 or more and alpha 0 or more"):
        Single(text, random(2, 3))


@pytest.mark.gpu
def test_reversed_gradients_on_gpu():
    check_plain_on_gpu(SCALER.format("lower_bound: 0.5"), random(2, 3), propagate_down=[True])


def test_signed_square_roots(caplog):
    """The gradient is bounded, as in the fork: 1 / 2(|y| + 0.03), and the log says so."""
    caplog.set_level(logging.INFO, "caffepy")
    x, dy = np.array([-4, -0.01, 0, 0.25, 9.0]), np.array([1, -2, 3, 4, 5.0])
    for in_place in (False, True):
        single = Single('type: "SignedSqrt"', x, in_place=in_place)
        (y,) = single.forward()
        np.testing.assert_allclose(y, [-2, -0.1, 0, 0.5, 3])
        if in_place:
            single.top[0].diff[...] = dy
            single.layer.backward(single.top, [True], single.bottom)
            dx = single.bottom[0].diff
        else:
            dx = single.backward([dy])[0][0]
        np.testing.assert_allclose(dx, dy / (2 * np.array([2.03, 0.13, 0.03, 0.53, 3.03])))
    assert "SignedSqrt: its gradient is 1 / (2 |y| + 0.06)" in caplog.text


@pytest.mark.gpu
def test_signed_square_roots_on_gpu():
    check_plain_on_gpu('type: "SignedSqrt"', random(3, 5, 4), propagate_down=[True])


APL = {"two": ("", 2), "three": ("apl_param { sums: 3 }", 3)}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", APL)
def test_piecewise_linear_units_against_a_loop(case, in_place):
    (settings, sums), x = APL[case], random(3, 2, 3)
    single = Single(f'type: "APL" {settings}', x, in_place=in_place)
    slopes, offsets = (blob.copy() for blob in single.params)
    assert slopes.shape == offsets.shape == (1, 1, sums, 6)
    assert (abs(slopes) <= 0.5 / sums).all()
    (y,) = single.forward()
    for (n, k), value in np.ndenumerate(x.reshape(3, 6)):
        expected = max(value, 0)
        for s in range(sums):  # the numbers of an element lie side by side
            a, b = (blob.reshape(-1)[k * sums + s] for blob in (slopes, offsets))
            expected += a * max(b - value, 0)
        assert y.reshape(3, 6)[n, k] == pytest.approx(expected)
    check_gradient(f'type: "APL" {settings}', x, in_place=in_place)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ("", (3,), r"at least 2 axes, not \[3\]"),
        ("apl_param { sums: 0 }", (2, 3), "sums must be 1 or more"),
    ],
)
def test_piecewise_linear_units_that_do_not_fit(settings, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "APL" {settings}', random(*shape))


@pytest.mark.parametrize(("shape", "elements"), [((2, 4, 2), 8), ((), 1)])
def test_items_of_another_size_have_no_piecewise_linear_units(shape, elements):
    single = Single('type: "APL"', random(2, 3, 2))
    single.bottom[0].reshape(shape)
    with pytest.raises(ConfigError, match=f"{elements} elements do not fit slopes for each of 6"):
        single.layer.reshape(single.bottom, single.top)


@pytest.mark.gpu
@pytest.mark.parametrize("case", APL)
def test_piecewise_linear_units_on_gpu(case):
    check_plain_on_gpu(f'type: "APL" {APL[case][0]}', random(4, 5, 3), propagate_down=[True])
