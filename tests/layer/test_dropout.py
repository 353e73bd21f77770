import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu


def on_gpu(text, device, bottom, top):
    """The layer of a prototxt, set up on blobs of a GPU."""
    layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
    layer.setup([bottom], [top])
    layer.reshape([bottom], [top])
    return layer


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


@pytest.mark.parametrize("type_", ["SeLuDropout", "SeLUDropout"])
def test_selu_dropout_keeps_mean_and_variance(type_):
    x = seeded().standard_normal((300, 1000))
    alpha = -1.75809934
    text = f'type: "{type_}" selu_dropout_param {{ dropout_ratio: 0.2 }}'
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
        made = on_gpu(text, device, bottom, top)
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
@pytest.mark.parametrize(
    "param",
    [
        '"SpatialDropout" dropout_param',
        '"SpatialDropout" spatial_dropout_param',
        '"ChannelDropout" dropout_param',
    ],
)
def test_spatial_dropout_drops_whole_planes(param, in_place):
    text = f"type: {param} {{ dropout_ratio: 0.2 }}"
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
    for type_ in ("SpatialDropout", "ChannelDropout"):
        check_gradient(f'type: "{type_}"', random(2, 6, 3))


GUIDED = 'type: "GuidedDropout" guided_dropout_param { type: "stochastic" sigmoid_scaler: 2 }'
THRESHOLD = 'type: "GuidedDropout" guided_dropout_param { guidance_threshold: 0.5 }'


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_guided_dropout_keeps_what_is_above_the_threshold(phase):
    x, guidance = random(3, 5, 2), random(3, 5, seed=1)
    guidance[1] = -1
    single = Single(THRESHOLD, x, guidance, phase=phase)
    (y,) = single.forward()
    dy = random(*x.shape, seed=2)
    (dx, _), _ = single.backward([dy], [True, False])
    for i in range(3):
        kept = guidance[i] > 0.5
        factor = kept * 5 / max(kept.sum(), 1)
        np.testing.assert_allclose(y[i], x[i] * factor[:, None], rtol=1e-6)
        np.testing.assert_allclose(dx[i], dy[i] * factor[:, None], rtol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_guided_dropout_draws_by_its_guidance(in_place):
    x, guidance = random(2000, 3, 2), np.tile([[-1.0, 0, 2]], (2000, 1))
    single = Single(GUIDED, x, guidance, tops=1, in_place=in_place)
    (y,) = single.forward()
    chance = 1 / (1 + np.exp(-2 * guidance[0]))
    kept = (y != 0).all(axis=2)
    np.testing.assert_allclose(kept.mean(axis=0), chance, atol=0.03)
    factor = kept[:, :, None] * 3 / chance.sum()
    np.testing.assert_allclose(y, x * factor, rtol=1e-5)
    (dx, _), _ = single.backward([np.ones(x.shape)], [True, False])
    np.testing.assert_allclose(dx, factor * np.ones(x.shape), rtol=1e-5)
    (y,) = Single(GUIDED, x, guidance, in_place=in_place, phase=TEST).forward()
    np.testing.assert_array_equal(y, x)


def test_guided_dropout_gradient():
    for text in (GUIDED, THRESHOLD):
        check_gradient(text, random(3, 4, 2), random(3, 4, seed=1), propagate_down=[True, False])


@pytest.mark.parametrize(
    ("text", "guidance", "message"),
    [
        (GUIDED, (3, 4, 2), r"a guidance \(N, C\), not \[3, 4, 2\] and \[3, 4, 2\]"),
        (GUIDED.replace("stochastic", "both"), (3, 4), 'deterministic or stochastic, not "both"'),
    ],
)
def test_guided_dropout_that_does_not_fit(text, guidance, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, random(3, 4, 2), random(*guidance))


@pytest.mark.gpu
def test_guided_dropout_on_a_gpu():
    bottoms = random(3, 4, 2), random(3, 4, seed=1)
    check_plain_on_gpu(THRESHOLD, *bottoms, propagate_down=[True, False])
    device = CudaDevice(seed=1)
    with device.scope():
        bottom = [Blob((2000, 3, 2), device=device), Blob((2000, 3), device=device)]
        top = Blob(device=device)
        layer = create_layer(text_format.Parse(GUIDED, LayerParameter()), TRAIN, device)
        layer.setup(bottom, [top])
        layer.reshape(bottom, [top])
        bottom[0].host_data.fill(1)
        bottom[1].host_data[...] = [-1, 0, 2]
        layer.forward(bottom, [top])
        chance = 1 / (1 + np.exp([2.0, 0, -4]))
        kept = top.host_data[:, :, 0] != 0
        np.testing.assert_allclose(kept.mean(axis=0), chance, atol=0.03)
        top.host_diff.fill(1)
        layer.backward([top], [True, False], bottom)
        np.testing.assert_array_equal(bottom[0].host_diff, top.host_data)
        np.testing.assert_allclose(top.host_data[kept], 3 / chance.sum(), rtol=1e-5)


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


@pytest.mark.gpu
@pytest.mark.parametrize("type_", ["SpatialDropout", "ChannelDropout", *RANDOMIZED])
def test_random_layers_on_a_gpu(type_):
    """A mask and its gradient of the share and the mean that they should have, anew each pass."""
    device = CudaDevice(seed=1)
    with device.scope():
        bottom, top = Blob((50, 60, 2), device=device), Blob(device=device)
        layer = on_gpu(f'type: "{type_}"', device, bottom, top)
        bottom.host_data.fill(-1)
        passes = []
        for number in range(2):
            device.step_count = number
            layer.forward([bottom], [top])
            passes.append(top.host_data.copy())
        top.host_diff.fill(-1)
        layer.backward([top], [True], [bottom])
        np.testing.assert_array_equal(bottom.host_diff, passes[1])
    means = {"RReLU": -np.log(8 / 3) / 5, "Insanity": -np.log(2) / 5}
    means |= {"SpatialDropout": -1, "ChannelDropout": -1}
    for y in passes:
        assert y.mean() == pytest.approx(means[type_], abs=0.06)
    assert (passes[0] != passes[1]).mean() > 0.4


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


@pytest.mark.gpu
def test_dropout_on_a_gpu_has_one_seed_and_counts_passes():
    device = CudaDevice(seed=1)
    with device.scope():
        bottom, top = Blob((50, 50), device=device), Blob(device=device)
        first, resumed, other = (on_gpu('type: "Dropout"', device, bottom, top) for _ in range(3))
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


@pytest.mark.parametrize(
    ("type_", "param"),
    [
        ("Dropout", "dropout_param"),
        ("SeLuDropout", "selu_dropout_param"),
        ("SpatialDropout", "spatial_dropout_param"),
    ],
)
@pytest.mark.parametrize("ratio", [-0.1, 1])
def test_impossible_ratios_are_refused(type_, param, ratio):
    with pytest.raises(ConfigError, match=f"at least 0 and below 1, not {ratio}"):
        Single(f'type: "{type_}" {param} {{ dropout_ratio: {ratio} }}', random(2, 3))
