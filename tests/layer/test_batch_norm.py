import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import TEST, TRAIN

from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

BLOBS = """blobs { shape { dim: 3 } data: 1 data: -2 data: 3 }
blobs { shape { dim: 3 } data: 4 data: 5 data: 6 } blobs { shape { dim: 1 } data: 2 }"""
SCALED = """
type: "BatchNorm" batch_norm_param {
  scale_bias: true scale_filler { value: 3 } bias_filler { value: 4 } moving_average_fraction: 0.5
}
"""

# name: prototxt, shape, parameters that learn
CASES = {
    "4 axes": ('type: "BatchNorm"', (3, 2, 2, 3), ()),
    "vectors": ('type: "BatchNorm"', (5, 3), ()),
    "global": (
        'type: "BatchNorm" batch_norm_param { use_global_stats: true }' + BLOBS,
        (2, 3, 2, 2),
        (),
    ),
    "scaled": ('type: "BatchNorm" batch_norm_param { scale_bias: true }', (3, 2, 2, 3), (3, 4)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_batch_norm_gradient(case, in_place):
    text, shape, params = CASES[case]
    check_gradient(text, random(*shape), params=params, in_place=in_place)


@pytest.mark.parametrize("case", ["batchnorm_global", "batchnorm_train"])
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    {
        "numbers": ('type: "BatchNorm"', (3,), r"at least 2 axes, not \[3\]"),
        "blobs": ('type: "BatchNorm"' + BLOBS, (2, 4), "4 channels do not fit the statistics of 3"),
        "blobs to scale": (SCALED + BLOBS, (2, 3), "incorrect number of parameters: 3, not 5"),
    }.values(),
)
def test_batch_norm_that_does_not_fit_is_refused(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, random(*shape))


def test_a_change_of_channels_is_refused():
    single = Single('type: "BatchNorm"', random(2, 3))
    single.bottom[0].reshape((2, 4))
    with pytest.raises(ConfigError, match="fit"):
        single.layer.reshape(single.bottom, single.top)


def test_batch_norm_normalizes_and_collects_statistics():
    x = random(4, 3, 5)
    single = Single(
        'type: "BatchNorm" batch_norm_param { moving_average_fraction: 0.5 eps: 1e-4 }' + BLOBS, x
    )
    (y,) = single.forward()
    mean, var = x.mean((0, 2)), x.var((0, 2))
    np.testing.assert_allclose(y, (x - mean[:, None]) / np.sqrt(var + 1e-4)[:, None])
    sums = single.params
    np.testing.assert_allclose(sums[0], 0.5 * np.array([1, -2, 3]) + mean)
    np.testing.assert_allclose(sums[1], 0.5 * np.array([4, 5, 6]) + var * 20 / 19)
    np.testing.assert_allclose(sums[2], 2)


def test_batch_norm_under_its_other_name():
    x = random(4, 3, 5)
    (y,) = Single('type: "CuDNNBatchNorm"', x).forward()
    spread = np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, (x - x.mean((0, 2), keepdims=True)) / spread)
    check_gradient('type: "CuDNNBatchNorm"', x, params=[])


HALVES = {"disable_mean": (False, True), "disable_variance": (True, False)}


def half(disabled, more=""):
    return f'type: "BatchNorm" batch_norm_param {{ {disabled}: true eps: 0.1 {more} }}'


@pytest.mark.parametrize("phase", [TRAIN, TEST])
@pytest.mark.parametrize("disabled", HALVES)
def test_batch_norm_of_which_a_half_is_disabled(disabled, phase):
    x, (subtracts, divides) = random(4, 3, 5), HALVES[disabled]
    single = Single(half(disabled, "moving_average_fraction: 0.5") + BLOBS, x, phase=phase)
    before = [p.copy() for p in single.params]
    (y,) = single.forward()
    mean, var = before[0] / before[2], before[1] / before[2]
    if phase == TRAIN:
        mean = x.mean((0, 2))
        var = x.var((0, 2)) if subtracts else (x**2).mean((0, 2))
    mean, var = mean * subtracts, (var + 0.1 if divides else np.ones(3))
    np.testing.assert_allclose(y, (x - mean[:, None]) / np.sqrt(var)[:, None], rtol=1e-6)
    if phase == TRAIN:
        want = [0.5 * b for b in before[:2]] + [0.5 * before[2] + 1]
        want[0] = want[0] + mean if subtracts else before[0]
        want[1] = want[1] + (var - 0.1) * 20 / 19 if divides else before[1]
        for param, value in zip(single.params, want, strict=True):
            np.testing.assert_allclose(param, value, rtol=1e-6)
    check_gradient(half(disabled) + BLOBS, x, params=[], phase=phase)
    check_gradient(half(disabled) + BLOBS, x, params=[], phase=phase, in_place=True)


def test_halves_of_batch_norm_that_do_not_fit():
    with pytest.raises(ConfigError, match="exclude each other"):
        Single(half("disable_mean", "scale_bias: true"), random(2, 3))
    with pytest.raises(ConfigError, match="are for the own batch"):
        Single(half("disable_mean"), random(2, 3)).layer.meet(lambda values: values[None])


@pytest.mark.gpu
@pytest.mark.parametrize("disabled", HALVES)
def test_batch_norm_of_which_a_half_is_disabled_on_gpu(disabled):
    check_plain_on_gpu(half(disabled), random(4, 3, 5), propagate_down=[True])


def test_batch_norm_uses_stored_statistics_in_test():
    x = random(2, 3, 2)
    single = Single('type: "BatchNorm"' + BLOBS, x, phase=TEST)
    (y,) = single.forward()
    mean, var = np.array([0.5, -1, 1.5])[:, None], np.array([2, 2.5, 3])[:, None]
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5))
    (untrained,) = Single('type: "BatchNorm"', x, phase=TEST).forward()
    np.testing.assert_allclose(untrained, x / np.sqrt(1e-5), rtol=1e-5)


def test_batch_norm_statistics_are_not_learned():
    single = Single('type: "BatchNorm" param { name: "mean" }', random(2, 3))
    assert [p.lr_mult for p in single.layer.param.param] == [0, 0, 0]
    with pytest.raises(
        ConfigError, match=r"Cannot configure batch normalization statistics as layer parameters\."
    ):
        Single('type: "BatchNorm" param { lr_mult: 1 }', random(2, 3))


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_scale_bias_is_batch_norm_before_scale(phase):
    x, dy = random(4, 3, 2), [random(4, 3, 2, seed=1)]
    whole = Single(SCALED, x, phase=phase)
    norm = Single(
        'type: "BatchNorm" batch_norm_param { moving_average_fraction: 0.5 }', x, phase=phase
    )
    for single in (whole, norm):
        single.params[1].fill(2)
    (y,), (between,) = whole.forward(), norm.forward()
    scale = Single('type: "Scale" scale_param { bias_term: true }', between)
    for array, value in zip(scale.params, (3, 4), strict=True):
        array.fill(value)
    np.testing.assert_allclose(y, scale.forward()[0])
    (dbetween,), scale_diffs = scale.backward(dy)
    (expected,), _ = norm.backward([dbetween])
    (dx,), diffs = whole.backward(dy)
    np.testing.assert_allclose(dx, expected, atol=1e-12)
    for answer, truth in zip(diffs[3:], scale_diffs, strict=True):
        np.testing.assert_allclose(answer, truth)
    for answer, truth in zip(whole.params, norm.params, strict=False):
        np.testing.assert_array_equal(answer, truth)


def test_scale_bias_learns_without_a_gradient_below():
    single = Single(SCALED, random(4, 3, 2))
    single.forward()
    _, diffs = single.backward([random(4, 3, 2, seed=1)], propagate_down=[False])
    assert all(d.all() for d in diffs[3:])
    single.layer.param_propagate_down[3] = False
    _, diffs = single.backward([random(4, 3, 2, seed=1)])
    assert not diffs[3].any()


@pytest.mark.parametrize(
    "given", ["", "param { lr_mult: 1 } param { lr_mult: 1 } param { lr_mult: 0 }"]
)
def test_scale_bias_is_learned_and_statistics_are_not(given):
    single = Single(SCALED + given, random(2, 3))
    assert [p.lr_mult for p in single.layer.param.param] == [0, 0, 0, 1, 1]


def test_large_means_do_not_spoil_the_variance():
    x = random(8, 2, 50).astype(np.float32) + 1000
    (y,) = Single('type: "BatchNorm"', x, dtype=np.float32).forward()
    np.testing.assert_allclose(y.std((0, 2)), 1, rtol=1e-3)


def test_an_empty_batch_leaves_the_statistics_alone():
    single = Single('type: "BatchNorm"', random(4, 3, 2))
    single.forward()
    before = [blob.data.copy() for blob in single.layer.blobs]
    single.bottom[0].reshape((0, 3, 2))
    single.layer.reshape(single.bottom, single.top)
    single.layer.forward(single.bottom, single.top)
    for blob, old in zip(single.layer.blobs, before, strict=True):
        np.testing.assert_array_equal(blob.data, old)


SEGNET = 'scale_filler { type: "gaussian" std: 1 } shift_filler { type: "gaussian" std: 1 }'


OLDER = SEGNET + " var_eps: 0.1 decay: 0.7"  # happynear's older one
PSPNET = 'slope_filler { type: "gaussian" std: 1 } bias_filler { type: "gaussian" std: 1 }'


BN = {
    "SegNet learns": (SEGNET, TRAIN),
    "SegNet learns in TEST": (SEGNET, TEST),
    "SegNet infers": (SEGNET + " bn_mode: INFERENCE", TRAIN),
    "PSPNet": (PSPNET, TRAIN),
    "PSPNet in TEST": (PSPNET, TEST),
    "PSPNet frozen": (PSPNET + " frozen: true", TRAIN),
    "older": (OLDER, TRAIN),
    "older in TEST": (OLDER, TEST),
    "older in TEST by the batch": (OLDER + " moving_average: false", TEST),
    "SegStereo": (SEGNET + " var_eps: 0.1 decay: 0.3", TRAIN),
}


def bn(case):
    return f'type: "BN" bn_param {{ {BN[case][0]} }}'


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", BN)
def test_bn_against_numpy(case, in_place):
    x = 3 + random(4, 3, 2, 5)
    single = Single(bn(case), x, phase=BN[case][1], in_place=in_place)
    blobs = [blob.data.reshape(-1) for blob in single.layer.blobs]
    if case == "PSPNet in TEST":
        blobs[3][:] = 1
    stored = [blob.copy() for blob in blobs[2:]]
    (y,) = single.forward()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    parts = {"PSPNet": 0.1, "older": 0.3, "SegStereo": 0.3}
    if part := parts.get(case):  # momentum is a float of the prototxt
        np.testing.assert_allclose(blobs[2], part * mean, rtol=1e-6)
        np.testing.assert_allclose(blobs[3], part * variance + (1 - part) * stored[1], rtol=1e-6)
    elif stored and "by the batch" not in case:
        mean, variance = stored
    elif "infers" in case:
        mean, variance = np.zeros(3), np.ones(3)
    if case not in parts:
        np.testing.assert_array_equal(blobs[2:], stored)
    eps = 1e-5 if "PSPNet" in case else 0 if "infers" in case else 0.1 if stored else 1e-9
    inverse = 1 / np.sqrt(variance + eps)
    expected = (x.swapaxes(1, 3) - mean) * inverse * blobs[0] + blobs[1]
    np.testing.assert_allclose(y, expected.swapaxes(1, 3), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", ["SegNet learns", "SegNet infers", "PSPNet", "older"])
def test_bn_gradient(case):
    check_gradient(bn(case), random(4, 2, 3), phase=BN[case][1])


def test_frozen_bn_leaves_its_parameters():
    single = Single(bn("PSPNet frozen"), random(4, 2, 3))
    single.forward()
    (dx,), params = single.backward([np.ones((4, 2, 3))])
    slope = single.params[0].reshape(1, 2, 1)
    np.testing.assert_allclose(dx, np.broadcast_to(slope / np.sqrt(1 + 1e-5), dx.shape), rtol=1e-6)
    assert not any(diff.any() for diff in params)
    assert [spec.lr_mult for spec in single.layer.param.param] == [0, 0, 0, 0]


def test_segnets_bn_gives_its_statistics():
    x = random(4, 3, 2, 5)
    _, mean, variance = Single(bn("SegNet learns"), x, tops=3).forward()
    untold = Single('type: "BN"', x, tops=3)  # the tops tell
    assert len(untold.layer.blobs) == 2
    np.testing.assert_array_equal(untold.forward()[1:], [mean, variance])
    np.testing.assert_allclose(mean.reshape(-1), x.mean((0, 2, 3)))
    np.testing.assert_allclose(variance.reshape(-1), x.var((0, 2, 3)))


@pytest.mark.parametrize(
    ("param", "tops", "message"),
    [
        ("scale_filler { } frozen: true", 1, "scale_filler of SegNet and frozen of PSPNet"),
        ("decay: 0.9 eps: 1", 1, "eps of PSPNet and decay of happynear's, whose layers differ"),
        ("decay: 0.9 bn_mode: LEARN", 1, "bn_mode of SegNet and decay of happynear's"),
        ("frozen: true", 3, "only SegNet's BN, with scale_filler, has tops"),
    ],
)
def test_bn_of_two_forks_is_refused(param, tops, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "BN" bn_param {{ {param} }}', random(2, 3), tops=tops)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["SegNet learns", "SegNet infers", "PSPNet", "PSPNet frozen", "older"]
)
def test_bn_on_gpu(case):
    check_plain_on_gpu(bn(case), random(4, 3, 2, 5), propagate_down=[True])
