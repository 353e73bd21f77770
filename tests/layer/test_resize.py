"""Interp, Upsample and Unpooling against loops, numerical gradients, and a GPU."""

from math import ceil, floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

X = random(2, 3, 5, 4)
INTERP = {
    "larger": ("height: 8 width: 11", (8, 11)),
    "smaller": ("height: 3 width: 2", (3, 2)),
    "one row": ("height: 1 width: 4", (1, 4)),
    "as it is": ("height: 5 width: 4", (5, 4)),
    "zoomed": ("zoom_factor: 3", (13, 10)),
    "shrunk": ("shrink_factor: 2", (3, 2)),
    "shrunk, then zoomed": ("shrink_factor: 2 zoom_factor: 4", (9, 5)),
    "cropped": ("height: 4 width: 4 pad_beg: -1 pad_end: -1", (4, 4)),
}
UPSAMPLE = {
    "blocks": ("scale: 3", [X], (15, 12)),
    "as it is": ("", [X], (5, 4)),
    "blocks of yolov5_caffe": ("height_scale: 2 width_scale: 3 mode: NEAREST", [X], (10, 12)),
    "twice the height, as yolov5_caffe": ("width_scale: 3 mode: NEAREST", [X], (10, 12)),
    "twice, as yolov5_caffe": ("mode: NEAREST", [X], (10, 8)),
    "places": ("", [X, np.argsort(random(2, 3, 5, 4), axis=-1) + 20.0], (10, 8)),
    "places, padded": ("pad_out_h: 1", [X, np.zeros(X.shape) + np.arange(4)], (9, 8)),
    "places, given": ("upsample_h: 6 upsample_w: 7", [X, np.zeros(X.shape) + np.arange(4)], (6, 7)),
}


def interp(case):
    return f'type: "Interp" interp_param {{ {INTERP[case][0]} }}'


def upsample(case):
    return f'type: "Upsample" upsample_param {{ {UPSAMPLE[case][0]} }}'


def place(i, size, out):
    """The neighbours that output i reads and the share of the second."""
    at = i * (size - 1) / (out - 1) if out > 1 else 0
    first = int(at)
    return first, min(first + 1, size - 1), at - first


def test_interp_to_the_size_of_a_blob():
    text = 'type: "Interp" interp_param {{ {} }}'
    single = Single(text.format("use_blob_size: true"), X, random(1, 2, 8, 11))
    given = Single(text.format("height: 8 width: 11"), X)
    (y,) = single.forward()
    np.testing.assert_array_equal(y, *given.forward())
    ((dx, none), _), ((want,), _) = single.backward([y]), given.backward([y])
    np.testing.assert_array_equal(dx, want)
    assert none.shape == (1, 2, 8, 11)
    assert not none.any()
    with pytest.raises(ConfigError, match="goes with a second bottom"):
        Single(text.format("use_blob_size: true"), X)


@pytest.mark.parametrize("case", INTERP)
def test_interp_against_a_loop(case):
    x = X[:, :, 1:-1, 1:-1] if case == "cropped" else X
    (h, w), (rows, columns) = x.shape[2:], INTERP[case][1]
    if "then" in case:
        h, w = 5, 4
    (y,) = Single(interp(case), X).forward()
    assert y.shape == (2, 3, rows, columns)
    for i, j in np.ndindex(rows, columns):
        (a, b, down), (c, d, right) = place(i, h, rows), place(j, w, columns)
        top = (1 - right) * x[:, :, a, c] + right * x[:, :, a, d]
        bottom = (1 - right) * x[:, :, b, c] + right * x[:, :, b, d]
        np.testing.assert_allclose(y[:, :, i, j], (1 - down) * top + down * bottom, atol=1e-5)


@pytest.mark.parametrize("case", INTERP)
def test_interp_gradient(case):
    check_gradient(interp(case), X)


@pytest.mark.parametrize("case", UPSAMPLE)
def test_upsample_against_a_loop(case):
    _, bottoms, size = UPSAMPLE[case]
    (y,) = Single(upsample(case), *bottoms).forward()
    want = np.zeros((2, 3, *size))
    for n, c, i, j in np.ndindex(X.shape):
        if len(bottoms) > 1:
            want[n, c].reshape(-1)[int(bottoms[1][n, c, i, j])] = X[n, c, i, j]
        else:
            down, right = size[0] // 5, size[1] // 4
            rows, columns = slice(down * i, down * (i + 1)), slice(right * j, right * (j + 1))
            want[n, c, rows, columns] = X[n, c, i, j]
    np.testing.assert_array_equal(y, want)


def test_upsample_gradient():
    check_gradient(upsample("blocks"), X)
    places = np.arange(40.0).reshape(1, 1, 5, 8)[..., ::2]
    check_gradient('type: "Upsample"', random(1, 1, 5, 4), places, propagate_down=[True, False])


def test_values_that_share_a_place_share_its_gradient():
    x, places = random(1, 1, 1, 2), np.full((1, 1, 1, 2), 3.0)
    single = Single('type: "Upsample"', x, places)
    (y,) = single.forward()
    np.testing.assert_array_equal(y.ravel(), [0, 0, 0, x[0, 0, 0, 1], 0, 0, 0, 0])
    (dx, dplaces), _ = single.backward([np.arange(8.0).reshape(y.shape)])
    np.testing.assert_array_equal(dx.ravel(), [3, 3])
    np.testing.assert_array_equal(dplaces, 0)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_place_outside_is_named(wrong):
    single = Single('type: "Upsample"', random(1, 1, 1, 2), np.array([[[[0.0, wrong]]]]))
    with pytest.raises(DataError, match=f"place {wrong} lies outside the plane"):
        single.forward()


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "Interp"', [(1, 1, 2, 2)], "needs height and width, a shrink_factor or a zoom"),
        ('type: "Interp" interp_param { zoom_factor: 2 pad_beg: 1 }', [(1, 1, 2, 2)], "0 or less"),
        (
            'type: "Interp" interp_param { zoom_factor: 2 pad_beg: -2 }',
            [(1, 1, 2, 3)],
            "makes -1x1 of 2x3, cropped to 0x1",
        ),
        ('type: "Upsample"', [(1, 1, 2, 2), (1, 1, 2, 3)], r"bottom 1 has shape \[1, 1, 2, 3\]"),
        ('type: "Upsample" upsample_param { scale: 0 }', [(1, 1, 2, 2)], "must be 1 or more"),
        (
            'type: "Upsample" upsample_param { height_scale: 2 width_scale: 2 }',
            [(1, 1, 2, 2)],
            "mode: NEAREST; for others write an Interp layer",
        ),
        (
            'type: "Upsample" upsample_param { mode: NEAREST }',
            [(1, 1, 2, 2)] * 2,
            "are for one bottom",
        ),
        (
            'type: "Upsample" upsample_param { scale: 2 pad_out_h: true }',
            [(1, 1, 2, 2)],
            "for a scale of 2 and two bottoms",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("case", INTERP)
def test_interp_on_gpu(case):
    check_plain_on_gpu(interp(case), X, propagate_down=[True])


@pytest.mark.gpu
@pytest.mark.parametrize("case", UPSAMPLE)
def test_upsample_on_gpu(case):
    """With places of their own: of values that share one, any may win."""
    bottoms = [X, np.arange(float(X.size)).reshape(X.shape) % 20][: len(UPSAMPLE[case][1])]
    check_plain_on_gpu(upsample(case), *bottoms, propagate_down=[True, False][: len(bottoms)])


UNPOOLING = {
    "places": ("kernel_size: 2 stride: 2 unpool_h: 10 unpool_w: 8", 2),
    "own places": ("kernel_size: 2 stride: 2", 1),
    "own places, given": ("kernel_size: 2 stride: 2 unpool_h: 7 unpool_w: 9", 1),
    "share": ("unpool: AVE kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1", 1),
    "share, cut": ("unpool: AVE kernel_size: 3 stride: 2 unpool_h: 9 unpool_w: 8", 1),
    "tiles": ("unpool: TILE kernel_size: 3 stride: 2", 1),
}
PLACES = np.argsort(random(2, 3, 5, 4, seed=4), axis=-1) + 8.0 * np.arange(5)[:, None]


def unpooling(case):
    text, count = UNPOOLING[case]
    return f'type: "Unpooling" unpooling_param {{ {text} }}', [X, PLACES][:count]


@pytest.mark.parametrize("case", UNPOOLING)
def test_unpooling_against_a_loop(case):
    text, bottoms = unpooling(case)
    (y,) = Single(text, *bottoms).forward()
    kernel, stride = ((3, 2), (2, 1)) if "kernel_h" in text else ((3, 3), (2, 2))
    kernel = (2, 2) if "places" in case else kernel
    high, wide = ((s - 1) * by + k for s, by, k in zip((5, 4), stride, kernel, strict=True))
    high, wide = (max(high, 5 * stride[0] + 1), max(wide, 4 * stride[1] + 1))
    if "unpool_h" in text:
        high, wide = (int(text.split(f"unpool_{axis}: ")[1].split()[0]) for axis in "hw")
    want = np.zeros((2, 3, high, wide))
    for n, c, i, j in np.ndindex(X.shape):
        row, column = min(i * stride[0], high - 1), min(j * stride[1], wide - 1)
        if case == "places":
            want[n, c].reshape(-1)[int(PLACES[n, c, i, j])] = X[n, c, i, j]
        elif "places" in case:
            want[n, c, row, column] = X[n, c, i, j]
        else:
            window = want[n, c, i * stride[0] :, j * stride[1] :][: kernel[0], : kernel[1]]
            window += X[n, c, i, j] / (window.size if "AVE" in text else 1)
    np.testing.assert_allclose(y, want)


@pytest.mark.parametrize("case", ["places", "own places", "share", "share, cut"])
def test_unpooling_gradient(case):
    text, bottoms = unpooling(case)
    check_gradient(text, *bottoms, propagate_down=[True, False][: len(bottoms)])


def test_the_gradient_of_tiles_is_the_mean_over_the_window():
    text, bottoms = unpooling("tiles")
    single = Single(text, *bottoms)
    (y,) = single.forward()
    dy = random(*y.shape, seed=5)
    (dx,), _ = single.backward([dy])
    assert dx[1, 2, 3, 2] == pytest.approx(dy[1, 2, 6:9, 4:7].mean())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a kernel_size, or a kernel_h and a kernel_w"),
        ("kernel_size: 2 kernel_h: 2 kernel_w: 2", "needs a kernel_size, or"),
        ("kernel_size: 2 stride: 0", "must be 1 or more"),
        ("kernel_size: 2 pad: 1", "only a pad of 0"),
    ],
)
def test_what_unpooling_does_not_know(text, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "Unpooling" unpooling_param {{ {text} }}', X)


def test_a_place_outside_of_unpooling_is_named():
    text, _ = unpooling("places")
    with pytest.raises(DataError, match="place 80 lies outside the plane"):
        Single(text, X, PLACES + 80 * (PLACES == 0)).forward()


@pytest.mark.gpu
@pytest.mark.parametrize("case", UNPOOLING)
def test_unpooling_on_gpu(case):
    text, bottoms = unpooling(case)
    wanted = [True, False][: len(bottoms)]
    bottoms[1:] = [np.arange(float(X.size)).reshape(X.shape) % 20][: len(bottoms) - 1]
    check_plain_on_gpu(text, *bottoms, propagate_down=wanted)


def test_upsample_by_place_of_no_items():
    single = Single('type: "Upsample"', *np.zeros((2, 0, 3, 2, 2)))
    assert single.forward()[0].shape == (0, 3, 4, 4)
    (dx, _), _ = single.backward([np.zeros((0, 3, 4, 4))])
    assert dx.shape == (0, 3, 2, 2)


HALF = "half_pixel_centers: true"
RESIZED = {
    "larger": "output_height: 7 output_width: 10",
    "smaller": "output_height: 2 output_width: 3",
    "corners": "output_height: 7 output_width: 1 align_corners: true",
    "half pixels": f"output_height: 9 output_width: 2 {HALF}",
    "scaled": "scale_height: 2 scale_width: 0.5",
}
CONVERTED = [
    *(("ResizeBilinear", "resize_bilinear_param", case) for case in RESIZED.values()),
    ("ResizeBilinear", "resize_bilinear_param", "output_height: 1 pytorch_half_pixel: true"),
    *(("ResizeNearestNeighbor", "resize_nearest_neighbor_param", r) for r in RESIZED.values()),
    (
        "ResizeNearestNeighbor",
        "resize_nearest_neighbor_param",
        "output_height: 9 output_width: 3 half_pixel_onnx: true",
    ),
]


def resized(x, text, bilinear):
    """Each output by itself, along one axis after the other, as TensorFlow's code says it."""
    settings = dict(zip(*[iter(text.replace(":", "").split())] * 2, strict=True))
    for axis, name in ((2, "height"), (3, "width")):
        size = x.shape[axis]
        scaled = int(size * float(settings.get(f"scale_{name}", 1)))
        out = int(settings.get(f"output_{name}", scaled))
        corners = "align_corners" in settings and out > 1
        step = (size - 1) / (out - 1) if corners else size / out
        rows = []
        for i in range(out):
            at = i * step
            if "half_pixel_centers" in settings:
                at = (i + 0.5) * step - (0.5 if bilinear else 0)
            elif "pytorch_half_pixel" in settings or "half_pixel_onnx" in settings:
                at = (i + 0.5) * step - 0.5 if out > 1 or not bilinear else -0.5
            if bilinear:
                low, high = max(floor(at), 0), min(ceil(at), size - 1)
                share = at - floor(at)
                rows.append((1 - share) * x.take(low, axis) + share * x.take(high, axis))
            else:
                nearest = floor(at + 0.5) if corners else floor(at)
                rows.append(x.take(min(max(nearest, 0), size - 1), axis))
        x = np.stack(rows, axis)
    return x


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize(("type_", "param", "setting"), CONVERTED)
def test_resizing_of_tensorflow_against_a_loop(type_, param, setting, last):
    x = random(2, 3, 5, 4)
    want = resized(x, setting, type_ == "ResizeBilinear")
    text = f'type: "{type_}" {param} {{ {setting} '
    if last:
        x, want, text = x.transpose(0, 2, 3, 1), want.transpose(0, 2, 3, 1), text + "}"
    else:
        text += 'data_format: "NCHW" }'
    np.testing.assert_allclose(Single(text, x).forward()[0], want, 1e-5, 1e-6)
    check_gradient(text, x)


@pytest.mark.parametrize("scale", ["inf", "-inf", "nan", "1e30"])
def test_a_scale_that_is_no_number_is_refused(scale):
    text = f'type: "ResizeBilinear" resize_bilinear_param {{ scale_width: {scale} }}'
    with pytest.raises(ConfigError, match="is too large"):
        Single(text, random(2, 3, 5, 4))


def test_upsample_darknet():
    text = 'type: "UpsampleDarknet" upsample_darknet_param { stride: 2 }'
    x = random(2, 3, 2, 3)
    np.testing.assert_array_equal(Single(text, x).forward()[0], x.repeat(2, 2).repeat(2, 3))
    check_gradient(text, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("type_", "param", "setting"), CONVERTED)
def test_resizing_of_tensorflow_on_gpu(type_, param, setting):
    check_plain_on_gpu(
        f'type: "{type_}" {param} {{ {setting} }}', random(2, 5, 4, 3), propagate_down=[True]
    )


@pytest.mark.gpu
def test_upsample_darknet_on_gpu():
    text = 'type: "UpsampleDarknet" upsample_darknet_param { stride: 2 }'
    check_plain_on_gpu(text, random(2, 3, 2, 3), propagate_down=[True])
