"""Layers of nets with few bits, against loops, and as other layers with rounded weights."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

X = np.array([[-2, -0.5, 0, 0.2, 0.5, 0.75, 0.9, 1.5, 3, 9]], np.float32)
CENTERS = [0.5, 1, 2]
QUANT = {
    "hwgq": f"clip_thr: 2 negative_slope: 0.25 {' '.join(f'centers: {c}' for c in CENTERS)}",
    "sign": 'forward_func: "sign" backward_func: "hard_tanh" clip_thr: 1',
    "hard_tanh": 'forward_func: "hard_tanh" backward_func: "hard_tanh"',
    "relu": 'forward_func: "relu" negative_slope: 0.25',
}


def quant(case):
    return f'type: "Quant" quant_param {{ {QUANT[case]} }}'


def rounded(case, x):
    if case == "hwgq":
        if x <= 0:
            return -0.25
        return next(c for c, n in zip(CENTERS, [*CENTERS[1:], 99], strict=True) if x <= (c + n) / 2)
    return {"sign": 1 if x >= 0 else -1, "hard_tanh": min(max(x, -1), 1), "relu": max(x, x / 4)}[
        case
    ]


def slope(case, x):
    return {
        "hwgq": (1 if x > 0 else 0.25) * (x <= 2),
        "sign": float(-1 <= x <= 1),
        "hard_tanh": 1,
        "relu": 1 if x > 0 else 0.25,
    }[case]


@pytest.mark.parametrize("case", QUANT)
def test_quant_against_a_loop(case):
    single = Single(quant(case), X)
    (y,) = single.forward()
    np.testing.assert_allclose(y, [[rounded(case, x) for x in X[0]]])
    (dx,), _ = single.backward([np.full(X.shape, 2.0)])
    np.testing.assert_allclose(dx, [[2 * slope(case, x) for x in X[0]]])


def test_gradients_of_what_is_not_rounded():
    check_gradient(quant("relu"), random(3, 4, seed=3))
    for kind, (text, setting, shape) in LAYERS.items():
        plain = f"{text.format(kind)} {setting} {{ use_binarization: false }}"
        check_gradient(plain, random(*shape))


@pytest.mark.gpu
@pytest.mark.parametrize("case", QUANT)
def test_quant_on_gpu(case):
    check_plain_on_gpu(quant(case), random(3, 4, 5, seed=3), propagate_down=[True])


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("", "needs centers"),
        ("centers: 1 centers: -1", "all above 0"),
        ("centers: 2 centers: 1 centers: 0.5", "must rise"),
        ('forward_func: "round"', "forward_func is"),
        ('forward_func: "sign" backward_func: "sign"', "backward_func is"),
    ],
)
def test_quant_refuses(param, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "Quant" quant_param {{ {param} }}', X)


LAYERS = {
    "BinaryConvolution": (
        'type: "{}" convolution_param {{ num_output: 4 kernel_size: 3 pad: 1 group: 2 '
        'weight_filler {{ type: "gaussian" }} bias_filler {{ value: 0.5 }} }}',
        "binary_convolution_param",
        (2, 4, 5, 6),
    ),
    "BinaryInnerProduct": (
        'type: "{}" inner_product_param {{ num_output: 4 '
        'weight_filler {{ type: "gaussian" }} bias_filler {{ value: 0.5 }} }}',
        "binary_inner_product_param",
        (2, 4, 3),
    ),
}


@pytest.mark.parametrize("param", ["", "use_alpha: true", "use_binarization: false"])
@pytest.mark.parametrize("kind", LAYERS)
def test_binary_weights_against_a_loop(kind, param):
    """As the plain layer with binary weights; also the gradients."""
    text, setting, shape = LAYERS[kind]
    x = random(*shape, seed=1)
    single = Single(f"{text.format(kind)} {setting} {{ {param} }}", x)
    plain = Single(text.format(kind.removeprefix("Binary")), x)
    weight = single.params[0]
    weight[0].reshape(-1)[0] = 0
    single.load()
    binary = weight.copy()
    for i, row in enumerate(weight if "false" not in param else []):
        size = np.abs(row).mean() if "alpha" in param else 1
        binary[i] = np.where(row < 0, -size, size)
    plain.params[0][...] = binary
    plain.params[1][...] = single.params[1]
    plain.load()
    (y,), (expected,) = single.forward(), plain.forward()
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    dy = random(*y.shape, seed=2)
    (dx,), diffs = single.backward([dy])
    (expected_dx,), expected_diffs = plain.backward([dy])
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-5)
    for got, wanted in zip(diffs, expected_diffs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("param", ["", "use_alpha: true"])
@pytest.mark.parametrize("kind", LAYERS)
def test_binary_weights_on_gpu(kind, param):
    text, setting, shape = LAYERS[kind]
    text = f"{text.format(kind)} {setting} {{ {param} }}"
    check_plain_on_gpu(text, random(*shape), propagate_down=[True])


def test_binary_inner_product_refuses_a_transposed_weight():
    with pytest.raises(ConfigError, match="neither transpose"):
        Single(
            'type: "BinaryInnerProduct" inner_product_param { num_output: 2 transpose: true }', X
        )
