import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

GOLDEN = [
    "conv_3d",
    "conv_basic",
    "conv_dilation",
    "conv_group",
    "conv_hw",
    "conv_stride_pad",
    "conv_two_bottoms",
]

CASES = {
    "basic": ((2, 3, 5, 4), "num_output: 4 kernel_size: 3"),
    "pad, stride, dilation": (
        (2, 2, 6, 5),
        "num_output: 3 kernel_size: 2 pad: 1 stride: 2 dilation: 2",
    ),
    "each axis its own": (
        (2, 2, 6, 5),
        "num_output: 2 kernel_size: 3 kernel_size: 2 pad: 1 pad: 0 stride: 1 stride: 2",
    ),
    "h and w": (
        (2, 2, 6, 5),
        "num_output: 2 kernel_h: 3 kernel_w: 2 pad_h: 1 stride_h: 2 stride_w: 1",
    ),
    "group, no bias": (
        (2, 4, 4, 4),
        "num_output: 6 kernel_size: 3 group: 2 pad: 1 bias_term: false",
    ),
    "larger than its input": ((2, 3, 6, 11), "num_output: 4 kernel_size: 4 dilation: 2 stride: 2"),
    "larger and padded": ((2, 2, 3, 3), "num_output: 2 kernel_size: 6 stride: 3 pad: 1"),
    "pads that differ": (
        (2, 2, 4, 5),
        "num_output: 2 kernel_size: 3 stride: 2 pad_l: 1 pad_r: 2 pad_t: 2 pad_b: 0",
    ),
    "pads of equal outputs": ((2, 2, 5, 4), "num_output: 2 kernel_size: 3 stride: 2 pad_type: 1"),
    "1x1": ((2, 3, 3, 4), "num_output: 2 kernel_size: 1"),
    "1 axis": ((2, 3, 9), "num_output: 2 kernel_size: 3"),
    "3 axes": ((1, 2, 3, 4, 3), "num_output: 2 kernel_size: 2 pad: 1"),
    "no spatial axis": ((4, 3), "num_output: 2 kernel_size: 1"),
    "axis 2": ((2, 2, 3, 5, 4), "num_output: 2 kernel_size: 3 axis: 2 pad: 1"),
    "axis -2": ((2, 2, 3, 5), "num_output: 2 kernel_size: 3 axis: -2 pad: 1"),
}


def text(param):
    return (
        f'name: "conv" type: "Convolution" convolution_param {{ '
        f'{param} weight_filler {{ type: "gaussian" }} }}'
    )


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    shape, param = CASES[case]
    check_gradient(text(param), random(*shape))


def test_bottoms_share_the_weights():
    param = "num_output: 2 kernel_size: 3"
    check_gradient(text(param), random(2, 2, 4, 5), random(2, 2, 4, 5, seed=1), tops=2)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


def test_weights_are_zero_without_a_filler():
    single = Single(
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 }', random(1, 2, 5, 5)
    )
    assert not any(p.any() for p in single.params)


@pytest.mark.parametrize(
    ("given", "sides"),
    [
        ("pad_t: 2 pad_b: 0 pad_l: 1 pad_r: 3", [(2, 0), (1, 3)]),
        ("pad_t: 1 pad_b: 1 pad_l: 2 pad_r: 2", [(1, 1), (2, 2)]),
        ("pad_type: 1", [(1, 1), (0, 1)]),
    ],
)
def test_pads_that_differ_are_zeros(given, sides):
    x = random(2, 3, 5, 6)
    setting = "num_output: 4 kernel_size: 3 stride: 2"
    single = Single(text(f"{setting} {given}"), x, dtype=np.float32)
    (y,) = single.forward()
    padded = np.pad(x, [(0, 0), (0, 0), *sides])
    plain = Single(text(setting), padded, dtype=np.float32)
    plain.params[0][...] = single.params[0]
    np.testing.assert_allclose(y, plain.forward()[0], 1e-5, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["pads that differ", "pads of equal outputs"])
def test_pads_that_differ_on_gpu(case):
    shape, param = CASES[case]
    check_plain_on_gpu(text(param), random(*shape), propagate_down=[True])


@pytest.mark.parametrize(
    ("shape", "param"),
    [
        ((2, 3, 4, 5, 6), "num_output: 2 kernel_size: 3"),
        ((2, 3, 4, 5, 6), "num_output: 5 kernel_size: 1 stride: 2"),
        ((2, 3, 4, 5, 6), "num_output: 4 kernel_size: 3 group: 4"),
        ((2, 3, 16, 12, 12), "num_output: 20 kernel_size: 3 pad: 1"),
    ],
    ids=["kernel", "1x1", "depthwise", "many channels"],
)
def test_axis_batches_everything_before_it(shape, param):
    x, size = random(*shape), shape[2:]
    a = Single(text(f"{param} axis: 2"), x)
    b = Single(text(param), x.reshape(6, *size))
    (y,), (z,) = a.forward(), b.forward()
    assert y.shape == (2, 3, *z.shape[1:])
    np.testing.assert_array_equal(y.reshape(z.shape), z)
    dz = random(*z.shape, seed=3)
    ((dx,), dws), ((dv,), dvs) = a.backward([dz.reshape(y.shape)]), b.backward([dz])
    np.testing.assert_array_equal(dx.reshape(dv.shape), dv)
    for dw, other in zip(dws, dvs, strict=True):
        np.testing.assert_array_equal(dw, other)


def test_only_what_is_wanted_is_computed():
    single = Single(text("num_output: 2 kernel_size: 3"), random(2, 2, 5, 5))
    single.forward()
    single.layer.param_propagate_down = [False, True]
    (dx,), (dw, db) = single.backward([random(2, 2, 3, 3)], [False])
    assert dx is None
    assert not dw.any()
    assert db.all()
    assert np.isnan(single.bottom[0].diff).all()


@pytest.mark.parametrize("pad", [0, 1])
def test_a_larger_kernel_reads_zeros_behind_its_input(pad):
    """As in Caffe, whose division of a negative number by the stride gives 0."""
    x, param = (
        random(2, 3, 6 - 2 * pad, 11),
        f"num_output: 4 kernel_size: 4 dilation: 2 stride: 2 pad: {pad}",
    )
    single = Single(text(param), x)
    padded = Single(text(param), np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]))
    (y,), (z,) = single.forward(), padded.forward()
    assert y.shape == z.shape == (2, 4, 1, 3 + pad)
    np.testing.assert_array_equal(y, z)
    dy = random(*y.shape, seed=3)
    ((dx,), dws), ((dz,), dvs) = single.backward([dy]), padded.backward([dy])
    np.testing.assert_array_equal(dx, dz[:, :, :-1])
    for dw, dv in zip(dws, dvs, strict=True):
        np.testing.assert_array_equal(dw, dv)


ERRORS = {
    "kernel larger by a stride": (
        "num_output: 1 kernel_h: 5 kernel_w: 4 stride: 2",
        r"kernel 5x4 does not fit its 3x4 input \(pad 0\)",
    ),
    "num_output": ("kernel_size: 3", "num_output must be 1 or more"),
    "kernel beyond input": (
        "num_output: 1 kernel_size: 5",
        r"kernel 5x5 does not fit its 3x4 input \(pad 0\)",
    ),
    "dilated kernel": (
        "num_output: 1 kernel_size: 3 dilation: 3 pad: 1",
        r"kernel 3x3 does not fit its 3x4 input \(pad 1, dilation 3\)",
    ),
    "no kernel": (
        "num_output: 1",
        "kernel_size must be given once or once for each of 2 spatial axes, not 0 times",
    ),
    "zero kernel": (
        "num_output: 1 kernel_size: 0",
        "kernel_size must be 1 or more along every axis, not 0x0",
    ),
    "half a kernel": (
        "num_output: 1 kernel_h: 3",
        "kernel_size must be 1 or more along every axis, not 3x0",
    ),
    "half a stride": (
        "num_output: 1 kernel_size: 1 stride_h: 2",
        "stride must be 1 or more along every axis, not 2x0",
    ),
    "kernel twice": (
        "num_output: 1 kernel_size: 3 kernel_h: 3 kernel_w: 3",
        "kernel_size and kernel_h/kernel_w exclude",
    ),
    "three pads": (
        "num_output: 1 kernel_size: 3 pad: 1 pad: 1 pad: 1",
        "pad must be given once or once for each of 2",
    ),
    "group of inputs": (
        "num_output: 4 kernel_size: 1 group: 4",
        "6 input channels cannot be split into 4 groups",
    ),
    "group of outputs": (
        "num_output: 4 kernel_size: 1 group: 3",
        "4 outputs cannot be split into 3 groups",
    ),
    "no group": (
        "num_output: 4 kernel_size: 1 group: 0",
        "6 input channels cannot be split into 0 groups",
    ),
    "axis": ("num_output: 4 kernel_size: 1 axis: 4", "axis 4 is out of range"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_refused(case):
    param, message = ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        Single(text(param), random(2, 6, 3, 4))


def test_h_and_w_need_two_axes():
    with pytest.raises(
        ConfigError, match="kernel_h and kernel_w are for inputs with 2 spatial axes, not 1"
    ):
        Single(text("num_output: 1 kernel_h: 1 kernel_w: 1"), random(2, 6, 3))


def test_bottoms_must_agree():
    with pytest.raises(ConfigError, match="all inputs must have one shape"):
        Single(text("num_output: 1 kernel_size: 1"), random(2, 3, 4, 4), random(2, 3, 4, 5), tops=2)


def test_channels_must_stay():
    single = Single(text("num_output: 1 kernel_size: 1"), random(2, 3, 4, 4))
    single.bottom[0].reshape((2, 4, 4, 4))
    with pytest.raises(ConfigError, match="the weights are for 3 input channels, not 4"):
        single.layer.reshape(single.bottom, single.top)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution", "Im2col"])
def test_sizes_beyond_any_image(kind: str, group: int) -> None:
    """A stride that steps over the whole image is as good as any other; larger planes than blobs
    can hold are refused.
    """
    sizes = f"num_output: 3 group: {group} weight_filler {{ type: 'xavier' }}"
    one = f"type: '{kind}' convolution_param {{ {sizes} kernel_size: 1"
    x = random(1, 3, 1, 1)
    far, near = (Single(f"{one} stride: {stride} }}", x) for stride in (2**31 - 1, 5))
    np.testing.assert_array_equal(far.forward()[0], near.forward()[0])
    with pytest.raises(ConfigError, match=r"have more than 2\^31 elements|leaves nothing of"):
        Single(f"{one} pad: {2**31 - 1} }}", random(0, 3, 8, 8))
    if kind == "Deconvolution":
        with pytest.raises(ConfigError, match=r"outputs padded to \S+ have more than 2\^31"):
            Single(f"{one} stride: {2**31 - 1} }}", random(0, 3, 8, 8))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("DepthwiseConvolution", "num_output: 6 group: 6"),
        ("DepthwiseConv", "num_output: 6 group: 6"),
        ("ConvolutionDepthwise", "num_output: 9"),
    ],
)
def test_depthwise_types_are_convolutions_in_groups(name, numbers):
    """ConvolutionDepthwise reads neither num_output nor group."""
    window = 'kernel_size: 3 stride: 2 pad: 1 weight_filler { type: "gaussian" }'
    x = random(2, 6, 5, 4)
    runs = []
    for kind, given in (("Convolution", "num_output: 6 group: 6"), (name, numbers)):
        text = f'type: "{kind}" convolution_param {{ {given} {window} }}'
        single = Single(text, x)
        assert [p.shape for p in single.params] == [(6, 1, 3, 3), (6,)]
        if kind == name:
            check_gradient(text, x)
        runs.append((single.forward(), single.backward([np.ones((2, 6, 3, 2))])))
    (tops, gradients), (own_tops, own_gradients) = runs
    np.testing.assert_array_equal(own_tops[0], tops[0])
    np.testing.assert_array_equal(own_gradients[0][0], gradients[0][0])
    for got, want in zip(own_gradients[1], gradients[1], strict=True):
        np.testing.assert_array_equal(got, want)


LOCAL = {
    "plain": "num_output: 2 kernel_size: 3",
    "padded": "num_output: 2 kernel_size: 3 pad: 1 stride: 2",
    "no bias": "num_output: 3 kernel_size: 1 stride: 2 bias_term: false",
}


def local(case):
    fillers = 'weight_filler { type: "gaussian" } bias_filler { type: "gaussian" }'
    return f'type: "Local" local_param {{ {LOCAL[case]} {fillers} }}'


@pytest.mark.parametrize("case", LOCAL)
def test_local_against_a_loop(case):
    x = random(2, 3, 5, 6)
    single = Single(local(case), x)
    (y,) = single.forward()
    side, stride, pad = single.layer.window
    weight, *bias = single.params
    assert weight.shape == (y.shape[1], 1, 3 * side * side, y[0, 0].size)
    padded = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    for p, (r, q) in enumerate(np.ndindex(y.shape[2:])):
        window = padded[:, :, r * stride : r * stride + side, q * stride : q * stride + side]
        want = window.reshape(2, -1) @ weight[:, 0, :, p].T
        want += sum(b[0, 0, :, p] for b in bias)
        np.testing.assert_allclose(y[:, :, r, q], want, atol=1e-12)


@pytest.mark.parametrize("case", LOCAL)
def test_local_gradient(case):
    check_gradient(local(case), random(2, 2, 4, 5))


@pytest.mark.parametrize(
    ("param", "shape", "message"),
    [
        (local("plain"), (2, 3, 4), r"needs \(N, C, H, W\)"),
        (local("plain"), (2, 3, 2, 4), "kernel 3 does not fit its 2x4 input"),
        ('type: "Local" local_param { num_output: 1 }', (2, 3, 4, 4), "must be 1 or more"),
    ],
)
def test_local_that_does_not_fit_is_refused(param, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(param, random(*shape))


def test_local_for_images_of_one_size():
    single = Single(local("plain"), random(2, 3, 4, 4))
    single.bottom[0].reshape((2, 3, 5, 4))
    with pytest.raises(ConfigError, match=r"are for \[3, 4, 4\], not \[3, 5, 4\]"):
        single.layer.reshape(single.bottom, single.top)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LOCAL)
def test_local_on_gpu(case):
    check_plain_on_gpu(local(case), random(2, 3, 5, 6), propagate_down=[True])
