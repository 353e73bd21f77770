"""MultiStageMeanfield, and the filter on a permutohedral lattice, against loops point by point,
numerical gradients, and a GPU.
"""

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy import ops
from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.layer.meanfield import FARTHEST
from caffepy.ops.cpu.permutohedral import lattice_of
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu


def naive_filter(features, x):
    """Splat, blur and slice with dictionaries; each corner is the tuple of its d + 1 parts."""
    points, d = features.shape
    placed, corners = [], {}
    for k in range(points + -points % 4):
        f = features[k].astype(np.float64) if k < points else np.zeros(d)
        scaled = [f[j] * sqrt(2 / 3) * (d + 1) / sqrt((j + 1) * (j + 2)) for j in range(d)]
        raised = [sum(scaled[i:]) - (i * scaled[i - 1] if i else 0) for i in range(d + 1)]
        base = [round(v / (d + 1)) * (d + 1) for v in raised]
        # bring the sum of the nearest multiples back to 0, where that costs least
        off = sum(base) // (d + 1)
        lean = sorted(range(d + 1), key=lambda i: -(raised[i] - base[i]))
        for i in lean[d + 1 - off :] if off > 0 else lean[: max(-off, 0)]:
            base[i] -= (d + 1) * np.sign(off)
        lean = sorted(range(d + 1), key=lambda i: -(raised[i] - base[i]))
        rest = sorted((raised[i] - base[i] for i in range(d + 1)), reverse=True)
        shares = [0.0] * (d + 1)
        for r in range(1, d + 1):
            shares[r] = (rest[d - r] - rest[d - r + 1]) / (d + 1)
        shares[0] = 1 - sum(shares)
        at = []
        for r in range(d + 1):
            key = list(base)
            for place, i in enumerate(lean):
                key[i] += r if place <= d - r else r - (d + 1)
            corners.setdefault(tuple(key), 0.0)
            at.append((tuple(key), shares[r]))
        if k < points:
            placed.append(at)
    for value, at in zip(x, placed, strict=True):
        for key, share in at:
            corners[key] += share * value
    for axis in range(d + 1):
        old = dict(corners)
        for key in old:
            for sign in (1, -1):
                other = [v - sign for v in key]
                other[axis] += sign * (d + 1)
                corners[key] += old.get(tuple(other), 0.0) / 2
    return [sum(share * corners[key] for key, share in at) / (1 + 2.0**-d) for at in placed]


@pytest.mark.parametrize(("points", "d"), [(1, 1), (30, 2), (33, 3), (40, 5)])
def test_filter_against_dictionaries(points, d):
    features, x = 1.5 * random(points, d, seed=1), random(2, points, seed=2)
    lattice, y = ops.backend(Device()).Lattice(features, Device()), np.empty_like(x)
    lattice.filter(x, y)
    want = [naive_filter(features.astype(np.float32), row) for row in x]
    np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-5)


def test_filter_is_a_gaussian():
    """An impulse in the middle of a plane; the lattice's kernel is a Gaussian, to some percent."""
    places = np.indices((41, 41)).reshape(2, -1).T / 4
    lattice = ops.backend(Device()).Lattice(places, Device())
    x, y = np.zeros((1, 41 * 41)), np.empty((1, 41 * 41))
    x[0, 20 * 41 + 20] = 1
    lattice.filter(x, y)
    distances = np.sum((places - 5) ** 2, axis=1)
    want = np.exp(-distances / 2)
    np.testing.assert_allclose(
        y[0] / y.sum(), want / want.sum(), atol=0.12 * want.max() / want.sum()
    )


@pytest.mark.parametrize("d", [2, 5])
def test_transposed_filter(d):
    features, x, z = random(50, d, seed=3), random(3, 50, seed=4), random(3, 50, seed=5)
    lattice = ops.backend(Device()).Lattice(features, Device())
    y, back = np.empty_like(x), 7 * np.ones_like(x)
    lattice.filter(x, y)
    lattice.filter(z, back, transposed=True)
    np.testing.assert_allclose(np.sum(y * z), np.sum(x * (back - 7)), rtol=1e-9)


N, C, H, W = 2, 3, 4, 5
TEXT = (
    'type: "MultiStageMeanfield" multi_stage_meanfield_param { num_iterations: 3 theta_alpha: 4 '
    "theta_beta: 6 theta_gamma: 2 spatial_filter_weight: 1.5 bilateral_filter_weight: 2 }"
)


def given():
    image = np.round(random(N, 3, H, W, seed=7) * 6).astype(np.float32).astype(np.float64)
    return random(N, C, H, W, seed=8), random(N, C, H, W, seed=9), image


def naive(unary, q, image, spatial, bilateral, compatibility):
    result = np.empty_like(unary)
    places = [(x, y) for y in range(H) for x in range(W)]
    for n in range(N):
        colours = image[n].reshape(3, -1).T
        near = np.array(places) / 2
        alike = np.hstack([np.array(places) / 4, colours / 6])
        now, own = q[n].reshape(C, -1), unary[n].reshape(C, -1)
        for _ in range(3):
            p = np.exp(now) / np.exp(now).sum(axis=0)
            message = np.zeros_like(p)
            for weights, features in ((spatial, near), (bilateral, alike)):
                features = features.astype(np.float32)
                ones = np.array(naive_filter(features, np.ones(H * W)))
                message += weights @ np.array([naive_filter(features, row) / ones for row in p])
            now = own - compatibility @ message
        result[n] = now.reshape(C, H, W)
    return result


def filled(dtype=np.float64):
    single = Single(TEXT, *given(), dtype=dtype)
    for k, blob in enumerate(single.layer.blobs):
        blob.data[0, 0] += 0.3 * random(C, C, seed=20 + k)
    return single


def test_against_a_loop():
    single = filled()
    (y,) = single.forward()
    want = naive(*given(), *(blob.data[0, 0] for blob in single.layer.blobs))
    np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-4)


def test_gradient():
    check_gradient(TEXT, *given(), propagate_down=[True, True, False])


def test_gradients_are_added_and_the_image_has_none():
    single = filled()
    (y,) = single.forward()
    dy = random(*y.shape, seed=11)
    (first, second, image), once = single.backward([dy])
    assert first.any()
    assert second.any()
    np.testing.assert_array_equal(image, 0)
    for blob, gradient in zip(single.layer.blobs, once, strict=True):
        blob.diff[...] = gradient
    single.top[0].diff[...] = dy
    single.layer.backward(single.top, [True] * 3, single.bottom)
    for blob, gradient in zip(single.layer.blobs, once, strict=True):
        np.testing.assert_allclose(blob.diff, 2 * gradient, rtol=1e-9)


@pytest.mark.gpu
def test_on_gpu():
    """The lattice is made on the host, so that a step is not captured."""
    single = Single(TEXT, *given(), dtype=np.float32)
    (want,) = single.forward()
    dy = random(*want.shape, seed=13).astype(np.float32)
    bottoms, params = single.backward([dy])
    device = CudaDevice(seed=single.seed)
    device.math_mode.precision = "fp32"
    with device.scope():
        bottom = [Blob(values.shape, device=device) for values in given()]
        top = [Blob(device=device)]
        layer = create_layer(text_format.Parse(TEXT, LayerParameter()), TRAIN, device)
        assert not layer.on_host
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
        layer.param_propagate_down = [True] * 3
        for blob, values in zip(bottom, given(), strict=True):
            blob.host_data[...] = values
        layer.forward(bottom, top)
        np.testing.assert_allclose(top[0].host_data, want, 1e-4, 1e-4)
        top[0].host_diff[...] = dy
        layer.backward(top, [True] * 3, bottom)
        for blob, gradient in zip([*bottom, *layer.blobs], [*bottoms, *params], strict=True):
            np.testing.assert_allclose(blob.host_diff, gradient, 1e-3, 1e-4)


def test_weights_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def begun():
        return [blob.data[0, 0] for blob in Single(TEXT, *given()).layer.blobs]

    for got, diagonal in zip(begun(), ([1.5] * 3, [2] * 3, [-1] * 3), strict=True):
        np.testing.assert_array_equal(got, np.diag(diagonal))
    (tmp_path / "spatial.par").write_text("3 4 5 6\n")
    (tmp_path / "bilateral.par").write_text("1\n2\n.5")
    for got, diagonal in zip(begun(), ([3, 4, 5], [1, 2, 0.5], [-1] * 3), strict=True):
        np.testing.assert_array_equal(got, np.diag(diagonal))
    for text, message in (("3 4", "has 2 numbers; 3 classes"), ("a b c", "'a'")):
        (tmp_path / "spatial.par").write_text(text)
        with pytest.raises(ConfigError, match=f"spatial.par: .*{message}"):
            begun()


def test_a_plane_of_another_size_has_a_lattice_of_its_own():
    single = filled()
    single.forward()
    unary, q, image = (np.ascontiguousarray(b[:, :, :3, :]) for b in given())
    for blob, values in zip(single.bottom, (unary, q, image), strict=True):
        blob.reshape(values.shape)
        blob.data[...] = values
    single.layer.reshape(single.bottom, single.top)
    single.layer.forward(single.bottom, single.top)
    other = Single(TEXT, unary, q, image)
    for blob, mine in zip(other.layer.blobs, single.layer.blobs, strict=True):
        blob.data[...] = mine.data
    np.testing.assert_array_equal(single.top[0].data, other.forward()[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_iterations: 3", "", "num_iterations must be 2 or more, not 1"),
        ("theta_beta: 6", "theta_beta: 0", "must be above 0, not 4, 0, 2"),
        ("theta_alpha: 4", "theta_alpha: nan", "must be above 0, not nan, 6, 2"),
        ("theta_beta: 6", "theta_beta: nan", "must be above 0, not 4, nan, 2"),
        ("theta_gamma: 2", "theta_gamma: nan", "must be above 0, not 4, 6, nan"),
    ],
)
def test_settings_that_are_refused(old: str, new: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Single(TEXT.replace(old, new), *given())


def test_bottoms_that_are_refused():
    unary, q, image = given()
    with pytest.raises(ConfigError, match=r"not \[2, 3, 4, 5\], \[2, 3, 4, 5\] and \[2, 1, 4, 5\]"):
        Single(TEXT, unary, q, image[:, :1])
    image[0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="not finite"):
        Single(TEXT, unary, q, image).forward()


@pytest.mark.parametrize(("theta", "values"), [(6, 1e10), (6, -1e6), (1e-9, 1)])
def test_colours_too_far_away_for_the_lattice(theta, values):
    """They would lie outside of every simplex, and shares of them outside of the arrays."""
    unary, q, image = given()
    text = TEXT.replace("theta_beta: 6", f"theta_beta: {theta}")
    image[1, 2, 3, 4] = 50 * values
    with pytest.raises(DataError, match=rf"the image has .* theta_beta {theta:g} .*raise theta_b"):
        Single(text, unary, q, image).forward()


@pytest.mark.parametrize(("name", "theta"), [("theta_alpha", 4), ("theta_gamma", 2)])
@pytest.mark.parametrize("small", [1e-8, 1e-30])
def test_places_too_far_away_for_the_lattice(name, theta, small):
    text = TEXT.replace(f"{name}: {theta}", f"{name}: {small}")
    with pytest.raises(ConfigError, match=rf"{name} {small:g} is too small for planes of 4 x 5"):
        Single(text, *given())


@pytest.mark.parametrize("d", [2, 5])
def test_as_far_as_the_layer_lets_them_points_have_shares_of_corners(d):
    features = random(4000, d, seed=30)
    features *= FARTHEST / np.abs(features).max(axis=0)
    corners, shares, _ = lattice_of(features)
    assert corners.min() >= 0
    assert np.abs(shares.sum(axis=1) - 1).max() < 1e-5
    assert -0.01 < shares.min() <= shares.max() < 1.01


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (0, 0, 0, 0)])
def test_bottoms_without_values(shape):
    image = random(shape[0], 3, *shape[2:])
    single = Single(TEXT, np.zeros(shape), np.zeros(shape), image)
    (y,) = single.forward()
    (dunary, dq, dimage), gradients = single.backward([0])
    assert y.shape == dunary.shape == dq.shape == shape
    np.testing.assert_array_equal(dimage, np.zeros_like(image))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros((1, 1, shape[1], shape[1])))


CRF = (
    'type: "DenseCRF" dense_crf_param { max_iter: 2 pos_w: 1.5 pos_xy_std: 2 pos_w: 0.5 '
    "pos_xy_std: 3 bi_w: 2 bi_xy_std: 4 bi_rgb_std: 6 }"
)
SIZES = np.array([[3.0, 4], [9, 9]]).reshape(N, 1, 1, 2)  # the second image was cut to the top


def naive_crf(scores, sizes, image=None):
    result = np.zeros_like(scores)
    for n in range(N):
        h, w = (min(int(side), most) for side, most in zip(sizes[n, 0, 0], (H, W), strict=True))
        places = np.array([(x, y) for y in range(h) for x in range(w)])
        filters = [(1.5, places / 2), (0.5, places / 3)]
        if image is not None:
            colours = image[n, :, :h, :w].reshape(3, -1).T
            filters.append((2, np.hstack([places / 4, colours / 6])))
        own = scores[n, :, :h, :w].reshape(C, -1)
        p = np.exp(own) / np.exp(own).sum(axis=0)
        for _ in range(2):
            now = own.copy()
            for weight, features in filters:
                features = features.astype(np.float32)
                ones = np.array(naive_filter(features, np.ones(h * w)))
                now += weight * np.array([naive_filter(features, row) / ones for row in p])
            p = np.exp(now) / np.exp(now).sum(axis=0)
        result[n, :, :h, :w] = p.reshape(C, h, w)
    return result


@pytest.mark.parametrize("with_image", [True, False])
def test_dense_crf_against_a_loop(with_image):
    scores, _, image = given()
    bottoms = (scores, SIZES, image) if with_image else (scores, SIZES)
    (y,) = Single(CRF, *bottoms).forward()
    np.testing.assert_allclose(y, naive_crf(*bottoms), rtol=2e-4, atol=2e-5)
    (logarithm,) = Single(
        CRF.replace("max_iter", "output_probability: false max_iter"), *bottoms
    ).forward()
    np.testing.assert_allclose(logarithm[y > 0], np.log(y[y > 0]), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(logarithm[y == 0], 0)
    assert (y == 0).sum() == C * (H * W - 3 * 4)


@pytest.mark.gpu
def test_dense_crf_on_gpu():
    """The lattices are made on the host, so that a step is not captured."""
    scores, _, image = given()
    check_plain_on_gpu(CRF, scores, SIZES, image, propagate_down=[False] * 3, captured=False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pos_w: 0.5", "", "as many of each of a filter, not 1 pos_w, 2 pos_xy_std"),
        ("bi_rgb_std: 6", "bi_rgb_std: 0", "bi_rgb_std must be above 0, not 0"),
        ("pos_xy_std: 2", "pos_xy_std: nan", "pos_xy_std must be above 0, not nan"),
        ("bi_w: 2 bi_xy_std: 4 bi_rgb_std: 6", "", "has no bi_w, bi_xy_std and bi_rgb_std for"),
        ("max_iter: 2", "max_iter: -1", "max_iter must be 0 or more, not -1"),
        ("pos_xy_std: 3", "pos_xy_std: 1e-9", "dense_crf_param: pos_xy_std 1e-09 is too small"),
        ("bi_xy_std: 4", "bi_xy_std: 1e-9", "dense_crf_param: bi_xy_std 1e-09 is too small"),
    ],
)
def test_settings_of_a_dense_crf_that_are_refused(old: str, new: str, message: str):
    scores, _, image = given()
    with pytest.raises(ConfigError, match=message):
        Single(CRF.replace(old, new), scores, SIZES, image)


@pytest.mark.parametrize("height", [0, 0.5, -3, np.nan, np.inf])
def test_sizes_of_images_that_are_refused(height):
    scores, _, _ = given()
    sizes = SIZES.copy()
    sizes[1, 0, 0] = height, 5
    with pytest.raises(DataError, match=rf"image 1 of the batch has {height:g} x 5 pixels by the"):
        Single(CRF, scores, sizes).forward()


def test_a_dense_crf_of_scores_without_pixels():
    (y,) = Single(CRF, np.zeros((N, C, 0, W)), SIZES).forward()
    assert y.shape == (N, C, 0, W)


def test_bottoms_of_a_dense_crf_that_are_refused():
    scores, _, image = given()
    with pytest.raises(ConfigError, match=r"any, not \[2, 3, 4, 5\] and \[2, 2\]"):
        Single(CRF, scores, SIZES.reshape(2, 2))
    with pytest.raises(ConfigError, match=r"and \[2, 1, 4, 5\]$"):
        Single(CRF, scores, SIZES, image[:, :1])
    with pytest.raises(DataError, match="bi_rgb_std 6 they reach"):
        Single(CRF, scores, SIZES, image * 1e9).forward()
    single = Single(CRF, scores, SIZES, image)
    single.forward()
    with pytest.raises(ConfigError, match="propagate_down: false"):
        single.layer.backward(single.top, [True, False, False], single.bottom)
