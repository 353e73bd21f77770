import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import TEST

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_on_gpu, check_plain_on_gpu

# name: eltwise_param, y of the values at one place
CASES = {
    "SUM": ("", sum),
    "SUM coeff": (
        "coeff: 1 coeff: -0.5 coeff: 2",
        lambda v: v[0] - 0.5 * v[1] + (2 * v[2] if len(v) > 2 else 0),
    ),
    "PROD": ("operation: PROD", np.prod),
    "PROD unstable": ("operation: PROD stable_prod_grad: false", np.prod),
    "MAX": ("operation: MAX", max),
}


def make(case, n):
    param = CASES[case][0]
    if n == 2:
        param = param.replace(" coeff: 2", "")
    return f'type: "Eltwise" eltwise_param {{ {param} }}', [
        random(2, 3, 4, seed=i) for i in range(n)
    ]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradient(case, n):
    text, bottoms = make(case, n)
    check_gradient(text, *bottoms)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradient_in_place(case, n):
    text, bottoms = make(case, n)
    check_gradient(text, *bottoms, in_place=True)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case, n):
    text, bottoms = make(case, n)
    (y,) = Single(text, *bottoms).forward()
    for index in np.ndindex(y.shape):
        assert y[index] == pytest.approx(CASES[case][1]([b[index] for b in bottoms]))


@pytest.mark.parametrize("case", ["eltwise_max", "eltwise_prod", "eltwise_sum_coeff"])
def test_as_caffe(case):
    check_golden(case)


def test_ties_of_a_maximum():
    single = Single('type: "Eltwise" eltwise_param { operation: MAX }', *[np.ones((1, 1))] * 3)
    single.forward()
    diffs, _ = single.backward([np.ones((1, 1))])
    assert [d[0, 0] for d in diffs] == [0, 1, 0]


def test_product_with_a_zero_has_a_gradient():
    text = 'type: "Eltwise" eltwise_param { operation: PROD stable_prod_grad: false }'
    single = Single(text, np.zeros((1, 1)), np.full((1, 1), 3.0))
    single.forward()
    diffs, _ = single.backward([np.ones((1, 1))])
    assert [d[0, 0] for d in diffs] == [3, 0]


@pytest.mark.parametrize(
    ("param", "shapes", "message"),
    {
        "coeff of a product": (
            "operation: PROD coeff: 1 coeff: 1",
            [(2, 3)] * 2,
            "coeff is for SUM",
        ),
        "too few coeff": ("coeff: 1 coeff: 1", [(2, 3)] * 3, "2 coeff do not fit 3 bottoms"),
        "shapes": (
            "",
            [(2, 3), (2, 4)],
            r"bottom 1 has shape \[2, 4\], bottom 0 has \[2, 3\]: they must be equal",
        ),
    }.values(),
)
def test_what_does_not_fit_is_refused(param, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(
            f'type: "Eltwise" eltwise_param {{ {param} }}',
            *(random(*s) for s in shapes),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_on_gpu_in_all_formats(case, n):
    text, _ = make(case, n)
    check_on_gpu(text, *(seeded(i).integers(-20, 20, (2, 8, 3, 5)) / 4 for i in range(n)))


@pytest.mark.parametrize("rest", [(), (1, 1)])
def test_axpy(rest):
    a, x, y = random(2, 3, *rest, seed=1), random(2, 3, 4, 5, seed=2), random(2, 3, 4, 5, seed=3)
    text = 'type: "Axpy"'
    (z,) = Single(text, a, x, y).forward()
    np.testing.assert_allclose(z, a.reshape(2, 3, 1, 1) * x + y)
    check_gradient(text, a, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("down", [(True, True, True), (True, False, False), (False, True, False)])
def test_axpy_on_gpu(down):
    a, x, y = random(2, 3), random(2, 3, 4, 5, seed=2), random(2, 3, 4, 5, seed=3)
    check_plain_on_gpu('type: "Axpy"', a, x, y, propagate_down=down)


@pytest.mark.parametrize(
    ("a", "y", "message"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 5), r"one number for each image and channel of bottom 1"),
        ((2, 4), (2, 3, 4, 5), r"bottom 0 has shape \[2, 4\]"),
        ((2, 3), (2, 3, 4, 6), r"bottom 2 has shape \[2, 3, 4, 6\], bottom 1 has \[2, 3, 4, 5\]"),
    ],
)
def test_axpy_of_wrong_shapes(a, y, message):
    with pytest.raises(ConfigError, match=message):
        Single('type: "Axpy"', random(*a), random(2, 3, 4, 5), random(*y))


CHANNEL_SCALES = {
    "both": "",
    "fixed features": "do_backward_feature: false",
    "fixed scale": "do_backward_scale: false",
    "passed on": "do_forward: false",
}


def channel_scale(param):
    return f'type: "ChannelScale" channel_scale_param {{ {param} }}'


@pytest.mark.parametrize("rest", [(), (4, 5)])
def test_channel_scale(rest):
    x, scale = random(2, 3, *rest), random(2, 1, *rest, seed=2)
    (y,) = Single(channel_scale(""), x, scale).forward()
    np.testing.assert_allclose(y, x * scale)
    check_gradient(channel_scale(""), x, scale)


@pytest.mark.parametrize("case", CHANNEL_SCALES)
def test_channel_scale_leaves_parts_out(case):
    x, scale, dy = random(2, 3, 4), random(2, 1, 4, seed=2), random(2, 3, 4, seed=3)
    single = Single(channel_scale(CHANNEL_SCALES[case]), x, scale)
    (y,) = single.forward()
    (dx, ds), _ = single.backward([dy])
    np.testing.assert_allclose(y, x if case == "passed on" else x * scale)
    np.testing.assert_allclose(dx, dy if case == "fixed features" else dy * scale)
    want = 0 * scale if case == "fixed scale" else (x * dy).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ds, want)


def test_a_global_scale_follows_the_mean():
    x, scale = random(2, 3, 4), random(2, 1, 4, seed=2)
    text = channel_scale("global_scale: true max_global_scale: 1.5")
    single = Single(text, x, scale, tops=2)
    y, shown = single.forward()
    mean = np.abs(scale).mean()
    np.testing.assert_allclose(y, x * mean)
    np.testing.assert_allclose(shown, [mean])
    single.inputs[1] = scale * 3
    np.testing.assert_allclose(single.forward()[1], [0.99 * mean + 0.03 * mean])
    single.params[0][...] = 1.6
    y, shown = single.forward()
    np.testing.assert_allclose(shown, [1.5])
    (dx, _), _ = single.backward([x, 0])
    np.testing.assert_allclose(dx, x * scale * 3)  # as the fork: place by place
    tested = Single(text, x, scale, tops=2, phase=TEST)
    tested.params[0][...] = 0.7
    np.testing.assert_allclose(tested.forward()[0], x * 0.7)
    assert single.layer.param.param[0].lr_mult == 0


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("", (2, 3, 4), "one number for each place of each image"),
        ("global_scale: true } param { lr_mult: 1", (2, 1, 4), "its lr_mult must be 0"),
    ],
)
def test_channel_scale_refused(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(channel_scale(text), random(2, 3, 4), random(*shape))
    with pytest.raises(ConfigError, match="goes with global_scale"):
        Single(channel_scale(""), random(2, 3, 4), random(2, 1, 4), tops=2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CHANNEL_SCALES)
def test_channel_scale_on_gpu(case):
    """ChannelScale, also with a global scale that a pass at its bound does not move."""
    x, scale = random(2, 3, 4, 5), random(2, 1, 4, 5, seed=2)
    for param in (CHANNEL_SCALES[case], "global_scale: true max_global_scale: 0.01"):
        check_plain_on_gpu(channel_scale(param), x, scale, propagate_down=(True, True))


def test_channel_scale_of_nothing():
    text = 'type: "ChannelScale" channel_scale_param { global_scale: true }'
    assert Single(text, np.zeros((2, 3, 0)), np.zeros((2, 0))).forward()[0].shape == (2, 3, 0)
    with pytest.raises(ConfigError, match="one number for each place"):
        Single(text, np.zeros((2, 0)), np.zeros((2, 3)))


BROADCAST = {
    "alike": ((2, 3), (2, 3)),
    "one channel": ((2, 3, 4), (2, 1, 4)),
    "both repeated": ((2, 1, 4), (3, 1)),
    "a number": ((2, 3), ()),
    "more axes": ((3,), (2, 3)),
}


@pytest.mark.parametrize("case", BROADCAST)
@pytest.mark.parametrize(("type_", "function"), [("Add", np.add), ("Mul", np.multiply)])
def test_repeated_operands(type_, function, case):
    a, b = (random(*shape, seed=k) for k, shape in enumerate(BROADCAST[case]))
    (y,) = Single(f'type: "{type_}"', a, b).forward()
    np.testing.assert_array_equal(y, function(a, b))
    check_gradient(f'type: "{type_}"', a, b)


def test_a_factor_that_is_a_parameter():
    text = 'type: "Mul" mul_param { mul_shape: [3, 1] }'
    single = Single(text, random(2, 3, 4))
    single.params[0][...] = [[1], [2], [3]]
    (y,) = single.forward()
    np.testing.assert_array_equal(y, single.inputs[0] * [[1], [2], [3]])
    check_gradient(text, random(2, 3, 4))


@pytest.mark.parametrize("type_", ["Add", "Mul"])
def test_operands_that_do_not_fit(type_):
    with pytest.raises(ConfigError, match=r"\[2, 3\] and \[2, 4\] must agree from their last"):
        Single(f'type: "{type_}"', random(2, 3), random(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("case", BROADCAST)
@pytest.mark.parametrize("type_", ["Add", "Mul"])
def test_repeated_operands_on_gpu(type_, case):
    a, b = (random(*shape, seed=k) for k, shape in enumerate(BROADCAST[case]))
    if b.ndim:  # a number has no other order of items
        check_plain_on_gpu(f'type: "{type_}"', a, b, propagate_down=[True, True])


def test_one_bottom_and_its_coefficient():
    text = 'type: "Eltwise" eltwise_param { coeff: 0.625 }'
    x = random(2, 3)
    np.testing.assert_allclose(Single(text, x).forward()[0], 0.625 * x)
    check_gradient(text, x)
    with pytest.raises(ConfigError, match="not 1, or one and its coeff"):
        Single('type: "Eltwise"', x)
