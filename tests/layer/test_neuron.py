from math import e

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
from .harness import Single, check_golden, check_gradient, random, seeded
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


@pytest.mark.parametrize("ratio", [0, 0.2, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(ratio):
    x = np.ones((100, 1000))
    single = Single(
        f'type: "Dropout" dropout_param {{ dropout_ratio: {ratio} }}', x, dtype=np.float32
    )
    (y,) = single.forward()
    assert set(np.unique(y)) <= {0, np.float32(1 / (1 - np.float32(ratio)))}
    assert (y > 0).mean() == pytest.approx(1 - ratio, abs=0.01)
    (dx,), _ = single.backward([x])
    np.testing.assert_array_equal(dx, y)


def test_selu_dropout_keeps_mean_and_variance():
    x = seeded().standard_normal((300, 1000))
    alpha = -1.75809934
    text = 'type: "SeLuDropout" selu_dropout_param { dropout_ratio: 0.2 }'
    single = Single(text, x)
    (y,) = single.forward()
    a = (0.8 * (1 + alpha**2 * 0.2)) ** -0.5
    kept, dropped = a * x - a * 0.2 * alpha, a * alpha - a * 0.2 * alpha
    (dx,), _ = single.backward([np.ones(y.shape)])
    mask = dx != 0
    np.testing.assert_allclose(y[~mask], dropped, rtol=1e-5)
    assert mask.mean() == pytest.approx(0.8, abs=0.01)
    np.testing.assert_allclose(y[mask], kept[mask], rtol=1e-5, atol=1e-6)
    assert (y.mean(), y.var()) == pytest.approx((0, 1), abs=0.02)
    np.testing.assert_allclose(dx, a * mask, rtol=1e-6)
    np.testing.assert_array_equal(Single(text, x, phase=TEST).forward()[0], x)


@pytest.mark.gpu
def test_selu_dropout_on_a_gpu():
    text = 'type: "SeLuDropout" selu_dropout_param { dropout_ratio: 0.2 }'
    device = CudaDevice(seed=1)
    x = seeded().standard_normal((300, 1000)).astype(np.float32)
    with device.scope():
        bottom, top = Blob(x.shape, device=device), Blob(device=device)
        made = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
        made.setup([bottom], [top])
        made.reshape([bottom], [top])
        bottom.host_data[...] = x
        made.forward([bottom], [top])
        y = top.host_data.copy()
        top.host_diff[...] = 1
        made.backward([top], [True], [bottom])
        assert (y.mean(), y.var()) == pytest.approx((0, 1), abs=0.02)
        kept = bottom.host_diff > 0
        assert kept.mean() == pytest.approx(0.8, abs=0.01)
        np.testing.assert_allclose(y[kept], made.slope * x[kept] + made.shift, 1e-4, 1e-5)


def test_dropout_draws_a_new_mask_each_time_from_the_device_seed():
    single = Single('type: "Dropout"', np.ones((50, 50)))
    (a,) = single.forward()
    single.layer.forward(single.bottom, single.top)
    assert (single.tops[0] != a).mean() == pytest.approx(0.5, abs=0.1)
    (again,) = single.forward()
    np.testing.assert_array_equal(again, a)


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_dropout_with_the_root_as_its_scale(phase):
    single = Single(
        'type: "Dropout" dropout_param { dropout_ratio: 0.75 sqrt_scale: true }',
        np.ones((50, 50)),
        phase=phase,
    )
    (y,) = single.forward()
    np.testing.assert_allclose(np.unique(y), [0, 2] if phase == TRAIN else [1])
    (dx,), _ = single.backward([np.ones(y.shape)])
    np.testing.assert_array_equal(dx, y)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("param", ["dropout_param", "spatial_dropout_param"])
def test_spatial_dropout_drops_whole_planes(param, in_place):
    text = f'type: "SpatialDropout" {param} {{ dropout_ratio: 0.2 }}'
    x = random(40, 50, 3, 2)
    single = Single(text, x, in_place=in_place)
    (y,) = single.forward()
    kept = (y != 0).all(axis=(2, 3))
    assert kept.mean() == pytest.approx(0.8, abs=0.03)
    np.testing.assert_allclose(y, x * kept[:, :, None, None] / 0.8, rtol=1e-6)
    dy = random(*x.shape, seed=1)
    (dx,), _ = single.backward([dy])
    np.testing.assert_allclose(dx, dy * kept[:, :, None, None] / 0.8, rtol=1e-6)
    (y,) = Single(text, x, in_place=in_place, phase=TEST).forward()
    np.testing.assert_array_equal(y, x)


def test_spatial_dropout_gradient():
    check_gradient('type: "SpatialDropout"', random(2, 6, 3))


RANDOMIZED = {
    "RReLU": ("rrelu_param { negative_slope_lower: 2 negative_slope_upper: 6 }", 4),
    "Insanity": ("insanity_param { lb: 2 ub: 6 }", 4 / np.log(3)),
}
OF_DUCHA_AIKI = {"RReLU of ducha-aiki": ("rrelu_param { lb: 2 ub: 6 }", 4 / np.log(3))}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("type_", RANDOMIZED | OF_DUCHA_AIKI)
def test_randomized_relu(type_, in_place):
    settings, mean = (RANDOMIZED | OF_DUCHA_AIKI)[type_]
    text = f'type: "{type_.split()[0]}" {settings}'
    x = random(100, 200)
    single = Single(text, x, in_place=in_place)
    (y,) = single.forward()
    np.testing.assert_array_equal(y[x > 0], x[x > 0])
    divisor = (x / y)[x < 0]
    assert 2 <= divisor.min() < 2.01
    assert 5.99 < divisor.max() <= 6
    assert divisor.mean() == pytest.approx(4, abs=0.05)
    (dx,), _ = single.backward([np.ones(x.shape)])
    np.testing.assert_allclose(dx[x < 0], 1 / divisor)
    tested = Single(text, x, in_place=in_place, phase=TEST)
    np.testing.assert_allclose(tested.forward()[0], np.where(x > 0, x, x / mean))
    np.testing.assert_allclose(
        tested.backward([np.ones(x.shape)])[0][0], np.where(x > 0, 1, 1 / mean)
    )
    check_gradient(text, random(4, 5), in_place=in_place)


@pytest.mark.parametrize("type_", RANDOMIZED)
def test_bounds_of_randomized_relu(type_):
    text = RANDOMIZED[type_][0].replace("2", "0")
    with pytest.raises(ConfigError, match="needs bounds above 0"):
        Single(f'type: "{type_}" {text}', random(3))


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
@pytest.mark.parametrize("type_", ["SpatialDropout", *RANDOMIZED])
def test_random_layers_on_a_gpu(type_):
    """A mask and its gradient of the share and the mean that they should have, anew each pass."""
    device = CudaDevice(seed=1)
    with device.scope():
        bottom, top = Blob((50, 60, 2), device=device), Blob(device=device)
        layer = create_layer(LayerParameter(type=type_), TRAIN, device)
        layer.setup([bottom], [top])
        layer.reshape([bottom], [top])
        bottom.host_data.fill(-1)
        passes = []
        for number in range(2):
            device.step_count = number
            layer.forward([bottom], [top])
            passes.append(top.host_data.copy())
        top.host_diff.fill(-1)
        layer.backward([top], [True], [bottom])
        np.testing.assert_array_equal(bottom.host_diff, passes[1])
    means = {"SpatialDropout": -1, "RReLU": -np.log(8 / 3) / 5, "Insanity": -np.log(2) / 5}
    for y in passes:
        assert y.mean() == pytest.approx(means[type_], abs=0.06)
    assert (passes[0] != passes[1]).mean() > 0.4


@pytest.mark.gpu
def test_crelu_on_a_gpu():
    check_plain_on_gpu('type: "CReLU"', random(2, 3, 4), propagate_down=[True])


@pytest.mark.parametrize("in_place", [False, True])
def test_dropout_that_scales_in_test(in_place):
    text = 'type: "Dropout" dropout_param { dropout_ratio: 0.2 scale_train: false }'
    x = np.ones((100, 100))
    single = Single(text, x, in_place=in_place)
    (y,) = single.forward()
    np.testing.assert_allclose(np.unique(y), [0, 1])
    (dx,), _ = single.backward([x])
    np.testing.assert_allclose(dx, y)
    single = Single(text, x, phase=TEST, in_place=in_place)
    np.testing.assert_allclose(single.forward()[0], 0.8 * x)
    (dx,), _ = single.backward([x])
    np.testing.assert_allclose(dx, 0.8 * x)


def test_dropout_that_draws_in_test():
    text = 'type: "Dropout" dropout_param { sample_weights_test: true }'
    (y,) = Single(text, np.ones((10, 10)), phase=TEST).forward()
    assert set(np.unique(y)) == {0, 2}


def test_dropout_has_no_mask_in_test():
    x = random(4, 5)
    (y,) = Single('type: "Dropout"', x, phase=TEST).forward()
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("in_place", [False, True])
def test_dropout_of_fast_rcnn_scales_in_test_instead(in_place):
    x, ratio = random(4, 5), np.float32(0.2)
    for phase in (TRAIN, TEST):
        text = 'type: "Dropout" dropout_param { dropout_ratio: 0.2 %s }'
        plain, other = (
            Single(text % more, x, phase=phase, in_place=in_place)
            for more in ("", "scale_train: false")
        )
        (y,), (z,) = plain.forward(), other.forward()
        np.testing.assert_allclose(z, y * (1 - ratio))
        (dy,), (dz,) = (single.backward([x])[0] for single in (plain, other))
        np.testing.assert_allclose(dz, dy * (1 - ratio))


@pytest.mark.parametrize(
    ("prototxt", "message"),
    {
        "dropout": (
            'type: "Dropout" dropout_param { dropout_ratio: 1 }',
            "at least 0 and below 1, not 1",
        ),
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


@pytest.mark.gpu
def test_dropout_on_a_gpu_has_one_seed_and_counts_passes():
    device = CudaDevice(seed=1)
    with device.scope():
        bottom, top = Blob((50, 50), device=device), Blob(device=device)
        first, resumed, other = (on_gpu("Dropout", device, bottom, top) for _ in range(3))
        bottom.host_data.fill(1)

        def mask(layer, number):
            device.step_count = number
            layer.forward([bottom], [top])
            return top.host_data > 0

        assert first.state() == {"seed": None}
        masks = [mask(first, number) for number in (0, 1, 0)]
        resumed.set_state(first.state())
        masks += [mask(resumed, 1), mask(other, 1)]
    assert (masks[0] != masks[1]).mean() == pytest.approx(0.5, abs=0.1)
    np.testing.assert_array_equal(masks[2], masks[0])
    np.testing.assert_array_equal(masks[3], masks[1])
    assert (masks[4] != masks[1]).mean() == pytest.approx(0.5, abs=0.1)


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
