from math import ceil, floor

import numpy as np
import pytest
from google.protobuf.text_format import Parse

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.layer.pooling import pooled_size
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_on_gpu, check_plain_on_gpu

GOLDEN = [
    "pool_ave_ceil",
    "pool_ave_pad",
    "pool_global_ave",
    "pool_max_ceil",
    "pool_max_mask",
    "pool_max_pad",
    "pool_overlap_stride1",
]

CASES = {
    "2x2": "kernel_size: 2 stride: 2",
    "overhang": "kernel_size: 3 stride: 2",
    "pad": "kernel_size: 3 stride: 2 pad: 1",
    "h and w": "kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 2 pad_h: 2 pad_w: 1",
    "floor": "kernel_size: 3 stride: 2 round_mode: FLOOR",
    "global": "global_pooling: true",
    "gaps": "kernel_size: 1 stride: 3",
}


def text(param):
    return f'name: "pool" type: "Pooling" pooling_param {{ {param} }}'


def distinct(*shape):
    """Values far enough apart that a small step changes no maximum."""
    return seeded().permutation(int(np.prod(shape))).reshape(shape) / 10


@pytest.mark.parametrize("method", ["MAX", "AVE"])
@pytest.mark.parametrize("case", CASES)
def test_gradient(case, method):
    check_gradient(text(f"{CASES[case]} pool: {method}"), distinct(2, 2, 5, 6))


SIDES = {
    "behind": "kernel_size: 3 stride: 2 pad_r: 1 pad_b: 1",
    "four": "kernel_size: 3 stride: 1 pad_l: 2 pad_r: 1 pad_t: 0 pad_b: 2",
    "overhang": "kernel_size: 3 stride: 3 pad_l: 1 pad_t: 2",
    "even": "kernel_size: 3 stride: 2 pad_l: 1 pad_r: 1 pad_t: 2 pad_b: 2",
    "same": "kernel_size: 3 stride: 2 pad_type: 1",
    "same, one": "kernel_size: 1 stride: 3 pad_type: 1",
    "floor": "kernel_h: 2 kernel_w: 3 stride: 2 pad_r: 1 round_mode: FLOOR",
    "pad": "kernel_size: 3 stride: 2 pad: 1",
}


def pooled(x, text, method):
    """Each window by itself, as the fork's loops."""
    given = dict(zip(*[iter(text.replace(":", "").split())] * 2, strict=True))
    names = ("pad_t", "pad_b"), ("pad_l", "pad_r")
    axes = []
    for size, side, pads in zip(x.shape, "hw", names, strict=True):
        k = int(given.get("kernel_size", given.get(f"kernel_{side}", 0)))
        s = int(given["stride"])
        before, behind = (int(given.get(name, given.get("pad", 0))) for name in pads)
        padded = any(name.startswith("pad") for name in given)
        steps = (size + before + behind - k) / s
        out = (floor(steps) if "round_mode" in given else ceil(steps)) + 1
        if padded and (out - 1) * s >= size + before:
            out -= 1
        if "pad_type" in given:
            out = ceil(size / s)
            lacking = max((out - 1) * s + k - size, 0)
            before, behind = lacking // 2, lacking - lacking // 2
        axes.append([(i * s - before, min(i * s - before + k, size + behind)) for i in range(out)])
    rows = []
    for top, bottom in axes[0]:
        row = []
        for left, right in axes[1]:
            inside = x[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
            count = inside.size if method == "AVE_EXC_PAD" else (bottom - top) * (right - left)
            count = 1 if method == "SUM" else count
            row.append(inside.max() if method == "MAX" else inside.sum() / count)
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("method", ["MAX", "AVE", "AVE_EXC_PAD", "SUM"])
@pytest.mark.parametrize("case", SIDES)
def test_pads_that_differ_against_a_loop(case, method):
    it, x = text(f"{SIDES[case]} pool: {method}"), distinct(1, 1, 6, 7)
    (y,) = Single(it, x).forward()
    np.testing.assert_allclose(y[0, 0], pooled(x[0, 0], SIDES[case], method), rtol=1e-12)
    check_gradient(it, distinct(2, 2, 6, 7))


def test_ave_tf_is_the_old_name_of_ave_exc_pad():
    x = distinct(1, 2, 5, 5)
    new, old = (
        Single(text(f"kernel_size: 3 pad: 1 pool: {name}"), x).forward()[0]
        for name in ("AVE_EXC_PAD", "AVE_TF")
    )
    np.testing.assert_array_equal(new, old)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["MAX", "AVE", "AVE_EXC_PAD", "SUM"])
@pytest.mark.parametrize("case", [case for case in SIDES if case not in ("even", "pad")])
def test_pads_that_differ_on_gpu(case, method):
    it = text(f"{SIDES[case]} pool: {method}")
    check_plain_on_gpu(it, distinct(2, 2, 6, 7), propagate_down=[True])


@pytest.mark.parametrize("rounds", ["round_mode: FLOOR", "ceil_mode: false"])
def test_rounding_down_has_two_names(rounds):
    (y,) = Single(text(f"kernel_size: 3 stride: 2 {rounds}"), distinct(1, 1, 5, 6)).forward()
    assert y.shape == (1, 1, 2, 2)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


def test_the_second_top_tells_where():
    single = Single(
        text("kernel_size: 2 stride: 2"), distinct(1, 2, 4, 4), tops=2, dtype=np.float32
    )
    y, index = single.forward()
    assert index.dtype == np.float32
    x = single.inputs[0].reshape(2, 16)
    np.testing.assert_array_equal(
        np.take_along_axis(x, index.reshape(2, 4).astype(int), 1), y.reshape(2, 4)
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if "pad:" not in CASES[case] and "pad_h" not in CASES[case]]
)
def test_stochastic_gradient(case):
    single = Single(text(f"{CASES[case]} pool: STOCHASTIC"), distinct(2, 2, 5, 6), dtype=np.float64)
    (y,) = single.forward()
    single.top[0].diff[...] = dy = random(*y.shape)
    single.layer.backward(single.top, [True], single.bottom)
    # y is a sum of elements of x: their gradients times x is y times its gradient
    assert (single.bottom[0].diff * single.inputs[0]).sum() == pytest.approx((y * dy).sum())
    assert np.isin(y, single.inputs[0]).all()


def test_stochastic_at_test():
    x = distinct(1, 2, 4, 4)
    single = Single(text("kernel_size: 2 stride: 2 pool: STOCHASTIC"), x, phase=TEST)
    (y,) = single.forward()
    windows = x.reshape(1, 2, 2, 2, 2, 2)
    np.testing.assert_allclose(y, (windows**2).sum((3, 5)) / windows.sum((3, 5)))
    with pytest.raises(ConfigError, match="in the TRAIN phase only"):
        single.layer.backward(single.top, [True], single.bottom)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad", "up", "out"),
    [
        (8, 3, 2, 0, True, 4),
        (8, 3, 2, 0, False, 3),
        (6, 3, 2, 1, True, 4),
        (5, 2, 2, 1, True, 3),  # a fourth window would begin beyond the input
        (4, 2, 2, 1, True, 3),
        (3, 5, 3, 0, True, 1),
        (3, 5, 1, 0, True, -1),
    ],
)
def test_number_of_windows(size, kernel, stride, pad, up, out):
    assert pooled_size(size, kernel, stride, pad, pad > 0, up) == out


def test_global_pooling_follows_its_input():
    single = Single(text("global_pooling: true pool: AVE"), random(2, 3, 4, 5))
    single.bottom[0].reshape((2, 3, 6, 6))
    single.layer.reshape(single.bottom, single.top)
    assert single.top[0].shape == (2, 3, 1, 1)
    single.bottom[0].data[...] = 2
    single.layer.forward(single.bottom, single.top)
    np.testing.assert_allclose(single.top[0].data, 2)


ERRORS = {
    "no kernel": ("", "kernel_size, or kernel_h and kernel_w, is needed"),
    "half a kernel": ("kernel_h: 2", "kernel_h and kernel_w must be given together"),
    "kernel twice": (
        "kernel_size: 2 kernel_h: 2 kernel_w: 2",
        "kernel_size and kernel_h/kernel_w exclude each other",
    ),
    "half a pad": ("kernel_size: 3 pad_w: 1", "pad_h and pad_w must be given together"),
    "half a stride": ("kernel_size: 3 stride_w: 1", "stride_h and stride_w must be given together"),
    "zero kernel": ("kernel_size: 0", "kernel sizes must be 1 or more"),
    "zero stride": ("kernel_size: 1 stride: 0", "strides must be 1 or more"),
    "global with kernel": ("global_pooling: true kernel_size: 2", "give no kernel size"),
    "global with pad": ("global_pooling: true pad: 1", "global_pooling needs pad 0 and stride 1"),
    "pad": ("kernel_size: 2 pad: 2", "pad 2x2 must be smaller than the kernel 2x2"),
    "stochastic pad": ("kernel_size: 2 pad: 1 pool: STOCHASTIC", "STOCHASTIC pooling takes no pad"),
    "pads twice": ("kernel_size: 3 pad: 1 pad_l: 1", "pad and pad_t, pad_b, pad_l, pad_r exclude"),
    "pad_type": ("kernel_size: 3 pad_type: 2", "pad_type must be 0 or 1, not 2"),
    "same pad": ("kernel_size: 3 pad_type: 1 pad: 1", "pad_type 1 and a pad exclude each other"),
    "kernel beyond input": ("kernel_size: 9", "kernel 9x9 does not fit its 4x4 input"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_refused(case):
    param, message = ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        Single(text(param), random(2, 3, 4, 4))


@pytest.mark.parametrize("size", [(0, 4), (4, 0)])
@pytest.mark.parametrize("param", ["kernel_size: 3 pad: 1", "global_pooling: true"])
def test_an_image_without_pixels_is_refused(param, size):
    with pytest.raises(ConfigError, match=f"nothing to pool in a {size[0]}x{size[1]} input"):
        Single(text(param), random(2, 3, *size))


def test_four_axes_are_needed():
    with pytest.raises(ConfigError, match="pooling needs an input with 4 axes"):
        Single(text("kernel_size: 2"), random(2, 3, 4))


def test_only_max_has_a_second_top():
    with pytest.raises(ConfigError, match="only MAX pooling has a second top"):
        Single(text("kernel_size: 2 pool: AVE"), random(2, 3, 4, 4), tops=2)


SPP = 'name: "s" type: "SPP" spp_param { pyramid_height: %d pool: %s }'


@pytest.mark.parametrize("pool", ["MAX", "AVE"])
@pytest.mark.parametrize("height", [1, 2, 3])
def test_spp_gradient(height, pool):
    check_gradient(SPP % (height, pool), random(2, 3, 9, 8))


def test_spp_levels():
    (y,) = Single(SPP % (2, "MAX"), x := random(2, 3, 4, 6)).forward()
    assert y.shape == (2, 3 * 5)
    np.testing.assert_array_equal(y[:, :3], x.max((2, 3)))
    np.testing.assert_array_equal(y[0, 3:7], x[0, 0].reshape(2, 2, 2, 3).max((1, 3)).reshape(-1))


def test_spp_as_caffe():
    check_golden("spp")


@pytest.mark.parametrize("height", [1, 2])
def test_spp_of_no_image(height):
    single = Single(SPP % (height, "MAX"), random(0, 3, 4, 4))
    (y,) = single.forward()
    assert y.shape == ((0, 3, 1, 1) if height == 1 else (0, 15))
    (dx,), _ = single.backward([y])
    assert dx.shape == (0, 3, 4, 4)


@pytest.mark.parametrize("rounded", ["CEIL", "FLOOR"])
@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_a_stride_beyond_the_image(method, rounded):
    x, layer = random(2, 3, 5, 5), f"pool: {method} kernel_size: 2 round_mode: {rounded} stride:"
    near, far = (Single(text(f"{layer} {stride}"), x) for stride in (9, 2**32 - 1))
    np.testing.assert_array_equal(far.forward()[0], near.forward()[0])


def test_spp_with_more_bins_than_pixels():
    with pytest.raises(ConfigError, match="must be smaller than the kernel"):
        Single(SPP % (3, "MAX"), random(1, 1, 3, 3))


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_absurd_sizes_are_refused(method):
    layer = text(f"pool: {method} kernel_size: 100000 pad: 99999 stride: 100000")
    with pytest.raises(
        ConfigError, match=r"6x6 inputs padded to 200004x200004 have more than 2\^31 elements"
    ):
        Single(layer, random(1, 1, 6, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["MAX", "AVE"])
@pytest.mark.parametrize("case", CASES)
def test_on_gpu_in_all_formats(case, method):
    x = seeded().integers(-20, 20, (2, 8, 5, 6)) / 4
    check_on_gpu(text(f"{CASES[case]} pool: {method}"), x)


@pytest.mark.gpu
def test_stochastic_on_gpu():
    device = CudaDevice(seed=1)
    with device.scope():
        bottom, top = Blob((2, 8, 6, 6), device=device), Blob(device=device)
        for blob in (bottom, top):
            blob.set_layout(Layout(np.dtype(np.uint16), True))
        layer = create_layer(
            Parse(text("kernel_size: 2 stride: 2 pool: STOCHASTIC"), LayerParameter()),
            TRAIN,
            device,
        )
        layer.setup([bottom], [top])
        layer.reshape([bottom], [top])
        bottom.host_data[...] = x = seeded().integers(1, 100, bottom.shape)

        def forward(number):
            device.step_count = number
            layer.forward([bottom], [top])
            return top.host_data.copy()

        y, other, again = forward(0), forward(1), forward(0)
        assert (y != other).any()
        np.testing.assert_array_equal(y, again)
        top.host_diff[...] = 1
        layer.backward([top], [True], [bottom])
        windows = (bottom.host_diff * x).reshape(2, 8, 3, 2, 3, 2)
        np.testing.assert_array_equal(windows.sum((3, 5)), y)
        assert layer.state() == {"seed": layer.seed}


def test_only_what_draws_has_a_seed_to_keep():
    assert Single(text("kernel_size: 2"), random(1, 1, 4, 4)).layer.state() == {}
    assert (
        Single(text("kernel_size: 2 pool: STOCHASTIC"), random(1, 1, 4, 4)).layer.state() == {}
    )  # drawn by the CPU
