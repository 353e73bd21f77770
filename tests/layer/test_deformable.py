"""Convolutions that read where offsets say, against a loop over outputs, taps and channels."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

CASES = {
    "plain": ("kernel_size: 3 pad: 1 deformable_group: 1", (2, 4, 5, 6)),
    "parts": ("kernel_size: 3 pad: 2 dilation: 2 deformable_group: 2 group: 2", (1, 4, 5, 6)),
    "strides": (
        "kernel_h: 2 kernel_w: 3 stride: 2 bias_term: false deformable_group: 4",
        (2, 4, 6, 7),
    ),
    "point": ("kernel_size: 1", (1, 4, 3, 1)),
}


def deformable(case):
    return (
        f'type: "DeformableConvolution" deformable_convolution_param {{ num_output: 6 engine: CAFFE '
        f'{CASES[case][0]} weight_filler {{ type: "gaussian" }} bias_filler {{ value: 0.5 }} }}'
    )


def bottoms(case, scale=1.0):
    """An input, and offsets away from whole numbers, where the slope jumps."""
    shape = CASES[case][1]
    x = random(*shape)
    probe = Single(deformable(case), x, np.zeros(offset_shape(case)))
    offsets = random(*probe.bottom[1].shape, seed=5) * 1.5 * scale
    fraction = offsets - np.floor(offsets)
    return x, np.floor(offsets) + 0.2 + 0.6 * fraction


def offset_shape(case):
    n, _, h, w = CASES[case][1]
    return {
        "plain": (n, 18, h, w),
        "parts": (n, 36, h, w),
        "strides": (n, 48, 3, 3),
        "point": (n, 8, h, w),
    }[case]


def at(plane, u, v):
    """Bilinear; the last row and column count up to their end, 0 outside."""
    h, w = plane.shape
    if not (0 <= u < h and 0 <= v < w):
        return 0
    i, j = int(u), int(v)
    below, behind = min(i + 1, h - 1), min(j + 1, w - 1)
    t, s = (u - i if below > i else 0), (v - j if behind > j else 0)
    upper = (1 - s) * plane[i, j] + s * plane[i, behind]
    return (1 - t) * upper + t * ((1 - s) * plane[below, j] + s * plane[below, behind])


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    x, offsets = bottoms(case)
    single = Single(deformable(case), x, offsets)
    (y,) = single.forward()
    w, layer = single.params[0], single.layer
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = layer.window
    parts, group = layer.parts, layer.group
    channels, outputs = x.shape[1], w.shape[0]
    want = np.zeros_like(y)
    for n, o, p, q in np.ndindex(y.shape):
        for c, i, j in np.ndindex(w.shape[1:]):
            channel = o // (outputs // group) * (channels // group) + c
            part, tap = channel // (channels // parts), i * kw + j
            down, right = offsets[n, (part * kh * kw + tap) * 2 :][:2, p, q]
            u, v = p * sh - ph + i * dh + down, q * sw - pw + j * dw + right
            want[n, o, p, q] += w[o, c, i, j] * at(x[n, channel], u, v)
        if len(single.params) > 1:
            want[n, o, p, q] += single.params[1][o]
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    check_gradient(deformable(case), *bottoms(case, 0.5), step=1e-6, tolerance=1e-5)


def test_without_offsets_it_is_a_convolution():
    x = random(2, 4, 5, 6)
    ours = Single(deformable("plain"), x, np.zeros((2, 18, 5, 6)))
    other = Single(
        'type: "Convolution" convolution_param { num_output: 6 kernel_size: 3 pad: 1 }', x
    )
    for mine, given in zip(ours.params, other.params, strict=True):
        given[...] = mine
    np.testing.assert_allclose(ours.forward()[0], other.forward()[0], rtol=1e-9, atol=1e-12)


def test_gradients_of_one_bottom_only():
    single = Single(deformable("plain"), *bottoms("plain"))
    single.forward()
    dy = random(*single.top[0].shape)
    both, _ = single.backward([dy])
    for k, flags in enumerate(((True, False), (False, True))):
        one, _ = single.backward([dy], flags)
        np.testing.assert_array_equal(one[k], both[k])


@pytest.mark.parametrize(
    ("text", "x", "offsets", "message"),
    [
        ("", (2, 4, 5, 6), (2, 72, 5, 5), r"the offsets need shape \[2, 72, 5, 6\]"),
        ("deformable_group: 3", (2, 4, 5, 6), (2, 54, 5, 6), "4 input channels cannot be split into 3"),
        ("group: 4", (2, 4, 5, 6), (2, 72, 5, 6), "6 outputs cannot be split into 4 groups"),
        ("", (2, 4, 5), (2, 72, 5), r"needs \(N, C, H, W\)"),
        ("pad_h: 1", (2, 4, 5, 6), (2, 72, 5, 6), "exclude each other"),
        ("dilation: 9", (2, 4, 5, 6), (2, 72, 5, 6), "does not fit its input of 5x6"),
    ],
)  # fmt: skip
def test_refused(text, x, offsets, message):
    full = deformable("plain").replace("deformable_group: 1", text)
    with pytest.raises(ConfigError, match=message):
        Single(full, random(*x), random(*offsets))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    """DeformableConvolution, with and without one of the gradients."""
    x, offsets = bottoms(case)
    for down in ((True, True), (True, False), (False, True)):
        check_plain_on_gpu(deformable(case), x, offsets, propagate_down=down)


def modulated(case):
    settings = deformable(case).partition("deformable_convolution_param")[2]
    return (
        f'type: "ModulatedDeformableConvolution" modulated_deformable_convolution_param{settings}'
    )


def masks(case):
    n, rest, *size = offset_shape(case)
    return random(n, rest // 2, *size, seed=7)


def between_zeros(plane, u, v):
    """Bilinear, among zeros on all sides."""
    framed = np.pad(plane, 1)
    h, w = plane.shape
    if not (-1 < u < h and -1 < v < w):
        return 0
    i, j = int(np.floor(u)), int(np.floor(v))
    t, s = u - i, v - j
    upper = (1 - s) * framed[i + 1, j + 1] + s * framed[i + 1, j + 2]
    return (1 - t) * upper + t * ((1 - s) * framed[i + 2, j + 1] + s * framed[i + 2, j + 2])


@pytest.mark.parametrize("case", CASES)
def test_modulated_against_a_loop(case):
    x, offsets = bottoms(case)
    mask = masks(case)
    single = Single(modulated(case), x, offsets, mask)
    (y,) = single.forward()
    w, layer = single.params[0], single.layer
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = layer.window
    parts, group, channels, outputs = layer.parts, layer.group, x.shape[1], w.shape[0]
    want = np.zeros_like(y)
    for n, o, p, q in np.ndindex(y.shape):
        for c, i, j in np.ndindex(w.shape[1:]):
            channel = o // (outputs // group) * (channels // group) + c
            tap = channel // (channels // parts) * kh * kw + i * kw + j
            down, right = offsets[n, tap * 2 :][:2, p, q]
            u, v = p * sh - ph + i * dh + down, q * sw - pw + j * dw + right
            read = between_zeros(x[n, channel], u, v) * mask[n, tap, p, q]
            want[n, o, p, q] += w[o, c, i, j] * read
        if len(single.params) > 1:
            want[n, o, p, q] += single.params[1][o]
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_modulated_gradient(case):
    bottom = *bottoms(case, 0.5), masks(case)
    check_gradient(modulated(case), *bottom, step=1e-6, tolerance=1e-5)


def test_modulated_gradients_of_some_bottoms():
    single = Single(modulated("plain"), *bottoms("plain"), masks("plain"))
    single.forward()
    dy = random(*single.top[0].shape)
    every, _ = single.backward([dy])
    for k in range(3):
        one, _ = single.backward([dy], [k == 0, k == 1, k == 2])
        np.testing.assert_array_equal(one[k], every[k])


def test_modulated_masks_must_fit():
    with pytest.raises(ConfigError, match=r"the masks need shape \[2, 9, 5, 6\], one for each tap"):
        Single(modulated("plain"), *bottoms("plain"), random(2, 18, 5, 6))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", CASES)
def test_modulated_on_gpu(case):
    bottom = *bottoms(case), masks(case)
    for down in ((True, True, True), (False, False, True)):
        check_plain_on_gpu(modulated(case), *bottom, propagate_down=down)
