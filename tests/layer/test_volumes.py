"""C3D's Convolution3D, Deconvolution3D and Pooling3D against loops, the fork's figures, numerical
gradients, and a GPU.
"""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import FORKS, Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

X = random(2, 2, 4, 5, 6)
FILLERS = 'weight_filler { type: "gaussian" } bias_filler { type: "gaussian" }'
CONVOLUTION = {
    "same size": "kernel_depth: 3 kernel_size: 3 pad: 1 temporal_pad: 1",
    "strides": "kernel_depth: 2 kernel_size: 3 stride: 2 temporal_stride: 2 pad: 1",
    "no bias": "kernel_depth: 1 kernel_size: 2 bias_term: false filter_group: 3",
}
POOLING = {
    "max": ("kernel_size: 2 kernel_depth: 2 stride: 2 temporal_stride: 2", (2, 3, 3)),
    "max, overlapping": ("kernel_size: 3 kernel_depth: 2 stride: 2", (3, 2, 3)),
    "mean": ("pool: AVE kernel_size: 3 kernel_depth: 3 stride: 2 temporal_stride: 2", (2, 2, 3)),
    "P3D's max, padded": (
        "kernel_size: 3 kernel_l: 2 pad: 1 pad_l: 1 stride: 2 stride_l: 2",
        (3, 3, 4),
    ),
    "P3D's mean": (
        "pool: AVE kernel_h: 2 kernel_w: 3 kernel_l: 2 pad_h: 1 pad_w: 2 stride_l: 3 "
        "stride_h: 4 stride_w: 1",
        (2, 2, 8),
    ),
    "P3D's mean of all": ("pool: AVE global_pooling: true", (1, 1, 1)),
    "3D-Caffe's max, padded": ("ND kernel_size: 3 stride: 2 pad: 1", (3, 3, 4)),
    "3D-Caffe's mean": ("ND pool: AVE kernel_size: [2, 3, 2] stride: [3, 4, 1]", (2, 2, 5)),
    "3D-Caffe's max of all": ("ND global_pooling: true", (1, 1, 1)),
    "mean, padded": ("pool: AVE kernel_size: 3 kernel_depth: 2 stride: 2 pad: 1", (3, 3, 4)),
}


def convolution(case, type_="Convolution3D"):
    return f'type: "{type_}" convolution3d_param {{ num_output: 3 {CONVOLUTION[case]} {FILLERS} }}'


def pooling(case):
    settings = POOLING[case][0]
    if settings.startswith("ND "):
        return f'type: "PoolingND" pooling_nd_param {{ {settings.removeprefix("ND ")} }}'
    return f'type: "Pooling3D" pooling3d_param {{ {settings} }}'


def sizes(layer):
    """Kernel, stride and pad of the three axes."""
    return [np.array(s) for s in layer.window[:3]]


@pytest.mark.parametrize("case", CONVOLUTION)
def test_convolution_against_a_loop(case):
    single = Single(convolution(case), X)
    (y,) = single.forward()
    kernel, stride, pad = sizes(single.layer)
    weight, *bias = single.params
    assert [b.shape for b in bias] == [(1, 1, 1, 1, 3)] * (case != "no bias")
    padded = np.pad(X, [(0, 0), (0, 0), *zip(pad, pad, strict=True)])
    for at in np.ndindex(y.shape[2:]):
        begin = np.array(at) * stride
        window = padded[(..., *map(slice, begin, begin + kernel))]
        want = np.einsum("ncijk,ocijk->no", window, weight)
        np.testing.assert_allclose(y[(..., *at)], want + sum(b.ravel() for b in bias), atol=1e-10)


@pytest.mark.parametrize("case", CONVOLUTION)
def test_deconvolution_is_the_transpose(case):
    text = convolution(case, "Deconvolution3D")
    single = Single(text, X)
    (y,) = single.forward()
    kernel, stride, pad = sizes(single.layer)
    weight, *bias = single.params
    want = np.zeros((2, 3, *(np.array(X.shape[2:]) - 1) * stride + kernel))
    for at in np.ndindex(X.shape[2:]):
        begin = np.array(at) * stride
        spread = np.einsum("nc,coijk->noijk", X[(..., *at)], weight)
        want[(..., *map(slice, begin, begin + kernel))] += spread
    want = want[(..., *(slice(p, n - p) for p, n in zip(pad, want.shape[2:], strict=True)))]
    for b in bias:
        want += b.reshape(1, 3, 1, 1, 1)
    np.testing.assert_allclose(y, want, atol=1e-10)


@pytest.mark.parametrize("type_", ["Convolution3D", "Deconvolution3D"])
def test_convolution_gradient(type_):
    check_gradient(convolution("strides", type_), X[:1, :, :3, :4, :4])


@pytest.mark.parametrize("case", POOLING)
def test_pooling_against_a_loop(case):
    single = Single(pooling(case), X)
    (y,) = single.forward()
    assert y.shape == (2, 2, *POOLING[case][1])
    kernel, stride, pad = sizes(single.layer)
    outside = 0 if "mean" in case else -np.inf
    sides = [(0, 0), (0, 0), *zip(pad, pad, strict=True)]
    padded = np.pad(X, sides, constant_values=outside)
    for at in np.ndindex(y.shape[2:]):
        begin = np.array(at) * stride
        window = padded[(..., *map(slice, begin, begin + kernel))]
        how = np.mean if "mean" in case else np.max
        np.testing.assert_allclose(y[(..., *at)], how(window, axis=(2, 3, 4)), atol=1e-12)


@pytest.mark.parametrize("case", POOLING)
def test_pooling_gradient(case):
    check_gradient(pooling(case), X)


def test_equal_maxima_each_get_the_gradient():
    single = Single(pooling("max"), np.ones((1, 1, 2, 2, 2)))
    single.forward()
    (dx,), _ = single.backward([np.full((1, 1, 1, 1, 1), 3.0)])
    np.testing.assert_array_equal(dx, 3)


@pytest.mark.parametrize(
    "case", ["conv3d_c3d", "conv3d_stride", "pool3d_ave_pad", "pool3d_c3d_pool1", "pool3d_max"]
)
def test_figures_of_the_fork(case):
    check_golden(case, folder=FORKS)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        (convolution("same size"), (2, 3, 4, 4), r"needs \(N, C, L, H, W\), not \[2, 3, 4, 4\]"),
        (convolution("no bias").replace("group: 3", "group: 2"), X.shape, "into 2 filter_groups"),
        (convolution("same size").replace("kernel_depth: 3", ""), X.shape, "not 0x3x3"),
        ('type: "Convolution" convolution_param { kernel_depth: 3 }', X.shape, "layers of C3D"),
        ('type: "Pooling" pooling_param { kernel_depth: 3 }', (1, 1, 4, 4), "is for Pooling3D"),
        ('type: "Pooling3D"', X.shape, "must be 1 or more"),
        (pooling("max"), (2, 3, 4, 4), r"needs \(N, C, L, H, W\)"),
        (pooling("max"), (1, 1, 0, 4, 4), "nothing to pool in a 0x4x4 input"),
        (pooling("P3D's mean of all"), (1, 1, 2, 0, 4), "nothing to pool in a 2x0x4 input"),
        (pooling("max").replace("pool", "pad: 1 pool"), X.shape, "only AVE"),
        (pooling("P3D's max, padded").replace("pad_l: 1", "pad_l: 2"), X.shape, "pad 2x1x1 must"),
        (pooling("P3D's mean of all").replace("AVE", "AVE pad_l: 1"), X.shape, "needs no kernel"),
        (pooling("mean").replace("AVE", "STOCHASTIC"), X.shape, "no STOCHASTIC pooling"),
        (pooling("3D-Caffe's mean"), (2, 3, 4, 4), "for images write Pooling"),
        (
            'type: "PoolingND" pooling_nd_param { kernel_size: [2, 3] }',
            X.shape,
            "kernel_size needs a number, or 3, not 2",
        ),
        ('type: "PoolingND"', X.shape, "kernel_size needs a number, or 3, not 0"),
        (
            'type: "Pooling" pooling_param { kernel_size: 2 }',
            X.shape,
            "not 5; volumes have Pooling3D or PoolingND",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(text.replace("pad: 1 pooling3d_param {", "pooling3d_param { pad: 1"), random(*shape))


@pytest.mark.gpu
@pytest.mark.parametrize("case", POOLING)
def test_pooling_on_gpu(case):
    check_plain_on_gpu(pooling(case), X, propagate_down=[True])
