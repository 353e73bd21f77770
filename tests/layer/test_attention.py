"""Attention from place to place, against a loop over places, and numerical gradients."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

CASES = {
    "all around": ("", (2, 3, 3, 4), (5, 7)),
    "small masks": ("attention_mask_height: 3 attention_mask_width: 5", (2, 2, 4, 3), (3, 5)),
    "as published": (
        "normalization_factor: 2 is_softmax: true psa_type: DISTRIBUTE",
        (2, 3, 3, 2),
        (5, 3),
    ),
    "collected": (
        "is_softmax: true psa_type: COLLECT normalization_factor: 0.5",
        (1, 2, 2, 3),
        (3, 5),
    ),
    "spread": ("psa_type: DISTRIBUTE", (1, 3, 3, 3), (5, 5)),
}


def attention(case):
    return (
        'type: "PointwiseSpatialAttention" '
        f"pointwise_spatial_attention_param {{ {CASES[case][0]} }}"
    )


def bottoms(case):
    _, (n, channels, h, w), (rows, columns) = CASES[case]
    return random(n, channels, h, w), random(n, rows * columns, h, w, seed=1)


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    text, (n, _, h, w), (rows, columns) = CASES[case]
    x, masks = bottoms(case)
    weights = np.zeros((n, h, w, h, w))  # of place q in the sum at p
    for k, py, px, i, j in np.ndindex(n, h, w, rows, columns):
        qy, qx = py + i - rows // 2, px + j - columns // 2
        if 0 <= qy < h and 0 <= qx < w:
            value = masks[k, i * columns + j, py, px]
            if "DISTRIBUTE" in text:
                weights[k, py, px, qy, qx] = value
            else:
                weights[k, qy, qx, py, px] = value
    if "is_softmax" in text:
        weights = np.exp(weights)
        weights /= weights.sum(axis=(1, 2), keepdims=True)
    factor = 1 / (rows * columns)
    if "normalization_factor" in text:
        factor = 1 / float(text.split("normalization_factor: ")[1].split()[0])
    want = np.zeros_like(x)
    for k, c, py, px in np.ndindex(x.shape):
        want[k, c, py, px] = factor * (x[k, c] * weights[k, :, :, py, px]).sum()
    (y,) = Single(attention(case), x, masks).forward()
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    check_gradient(attention(case), *bottoms(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    check_plain_on_gpu(attention(case), *bottoms(case), propagate_down=[True, True])


@pytest.mark.parametrize(
    ("text", "masks", "message"),
    [
        ("attention_mask_height: 3", (2, 9, 3, 4), "go together"),
        (
            "attention_mask_height: 4 attention_mask_width: 3",
            (2, 12, 3, 4),
            "odd and above 1, not 4 and 3",
        ),
        ("", (2, 12, 3, 4), r"masks of 5 x 7 .* need shape .2, 35, 3, 4., not .2, 12, 3, 4."),
        ("normalization_factor: 0", (2, 35, 3, 4), "normalization_factor must not be 0"),
        ("", (2, 35), "4 axes, not .2, 3, 3, 4. and .2, 35."),
    ],
)
def test_what_does_not_fit_is_refused(text, masks, message):
    layer = f'type: "PointwiseSpatialAttention" pointwise_spatial_attention_param {{ {text} }}'
    with pytest.raises(ConfigError, match=message):
        Single(layer, random(2, 3, 3, 4), random(*masks))
