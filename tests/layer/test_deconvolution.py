import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_golden, check_gradient, random

CASES = {
    "basic": ((2, 3, 4, 3), "num_output: 2 kernel_size: 3"),
    "pad, stride, dilation": (
        (2, 2, 4, 5),
        "num_output: 3 kernel_size: 3 pad: 1 stride: 2 dilation: 2",
    ),
    "group, no bias": (
        (2, 4, 3, 3),
        "num_output: 6 kernel_size: 2 group: 2 stride: 2 bias_term: false",
    ),
    "1 axis": ((2, 3, 5), "num_output: 2 kernel_size: 3 stride: 2"),
    "3 axes": ((1, 2, 2, 3, 2), "num_output: 2 kernel_size: 2 pad: 1 stride: 2"),
    "axis 2": ((2, 2, 3, 3, 4), "num_output: 2 kernel_size: 3 axis: 2 stride: 2"),
    "h and w": (
        (2, 2, 4, 3),
        "num_output: 2 kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0",
    ),
}
WINDOWS = {
    "basic": ((2, 3, 5, 4), "kernel_size: 3"),
    "pad, stride": ((2, 2, 6, 5), "kernel_size: 3 pad: 1 stride: 2"),
    "dilation": ((1, 2, 7, 6), "kernel_size: 2 dilation: 2 pad: 1"),
    "larger than its input": ((2, 3, 6, 11), "kernel_size: 4 dilation: 2 stride: 2"),
    "1 axis": ((2, 3, 9), "kernel_size: 3"),
    "axis 2": ((2, 2, 3, 5, 4), "kernel_size: 3 axis: 2"),
}


def text(param: str) -> str:
    return (
        f'name: "d" type: "Deconvolution" convolution_param {{ {param} '
        f'weight_filler {{ type: "gaussian" }} }}'
    )


def unfold(param: str) -> str:
    return f'name: "i" type: "Im2col" convolution_param {{ {param} }}'


@pytest.mark.parametrize("case", CASES)
def test_gradient(case: str) -> None:
    shape, param = CASES[case]
    check_gradient(text(param), random(*shape))


@pytest.mark.parametrize("case", ["deconv_basic", "deconv_group_pad", "im2col"])
def test_as_caffe(case: str) -> None:
    check_golden(case)


def test_every_input_element_spreads_its_kernel() -> None:
    single = Single(text("num_output: 2 kernel_size: 3 stride: 2 pad: 1"), random(2, 3, 4, 5))
    (x,), (w, b) = single.inputs, single.params
    full = np.zeros((2, 2, 2 * 3 + 3, 2 * 4 + 3)) + b[None, :, None, None]
    for n, c, i, j in np.ndindex(*x.shape):
        full[n, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += x[n, c, i, j] * w[c]
    (y,) = single.forward()
    np.testing.assert_allclose(y, full[:, :, 1:-1, 1:-1])


def test_two_bottoms_share_the_weights() -> None:
    check_gradient(
        text("num_output: 2 kernel_size: 2"), random(2, 2, 3, 3), random(2, 2, 3, 3, seed=1), tops=2
    )


def test_padding_that_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="pad 2 leaves nothing"):
        Single(text("num_output: 2 kernel_size: 2 pad: 2"), random(1, 2, 2, 2))


@pytest.mark.parametrize("case", WINDOWS)
def test_im2col_gradient(case: str) -> None:
    shape, param = WINDOWS[case]
    check_gradient(unfold(param), random(*shape))


@pytest.mark.parametrize("case", WINDOWS)
def test_im2col_times_the_weights_is_convolution(case: str) -> None:
    shape, param = WINDOWS[case]
    x = random(*shape)
    (columns,) = Single(unfold(param), x).forward()
    filler = 'weight_filler { type: "gaussian" }'
    conv = Single(f'type: "Convolution" convolution_param {{ {param} num_output: 2 {filler} }}', x)
    (y,), (w, _) = conv.forward(), conv.params
    axis = 2 if "axis" in param else 1
    product = np.tensordot(columns, w.reshape(2, -1), (axis, 1))
    np.testing.assert_allclose(y, np.moveaxis(product, -1, axis), atol=1e-12)
