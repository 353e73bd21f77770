"""What OpenPose's nets find in their maps, against loops that follow the fork's rules."""

from math import floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, random
from .on_gpu import check_plain_on_gpu

SIZES = {
    "one scale": ("factor: 4", (1, 2, 5, 6)),
    "scales": ("factor: 3 start_scale: 0.9 scale_gap: 0.3", (3, 2, 10, 12)),
    "given": ("target_spatial_width: 7 target_spatial_height: 4 scale_gap: 0", (2, 1, 9, 11)),
    "few": ("factor: 2", (1, 1, 3, 2)),
}


def resize(case):
    return f'type: "ImResize" imresize_param {{ {SIZES[case][0]} }}'


def cubic(v, d):
    a, b, c, e = v
    first = -0.5 * a + 1.5 * b - 1.5 * c + 0.5 * e
    return first * d**3 + (a - 2.5 * b + 2 * c - 0.5 * e) * d**2 + (-0.5 * a + 0.5 * c) * d + b


def neighbours(place, size, pad):
    near = max(int(place + 1e-5), 0)
    beside = min(near + 1, size - 1)
    return [max(near - 1, 0) + pad, near + pad, beside + pad, min(beside + 1, size - 1) + pad], (
        place - near
    )


@pytest.mark.parametrize("case", SIZES)
def test_resized_against_a_loop(case):
    """ImResize."""
    x = random(*SIZES[case][1])
    single = Single(resize(case), x)
    (y,) = single.forward()
    param = single.layer.param.imresize_param
    want = np.zeros_like(y)
    for n, planes in enumerate(x):
        pads = [
            floor(size // 2 * (1 - param.start_scale + n * param.scale_gap)) for size in x.shape[2:]
        ]
        sizes = [size - 2 * pad for size, pad in zip(x.shape[2:], pads, strict=True)]
        for _, c, i, j in np.ndindex(y.shape):
            found = []
            for place, size, pad, whole in zip((i, j), sizes, pads, y.shape[2:], strict=True):
                where = (place - (whole / size / 2 - 0.5)) * size / whole
                found.append(neighbours(where, size, pad))
            (rows, down), (columns, right) = found
            across = [cubic([planes[c, row, column] for column in columns], right) for row in rows]
            want[0, c, i, j] += cubic(across, down) / len(x)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_a_scale_that_leaves_nothing():
    with pytest.raises(ConfigError, match=r"scale 2 leaves -?\d+ of 6 rows or columns"):
        Single('type: "ImResize" imresize_param { factor: 2 scale_gap: 0.6 }', random(3, 1, 6, 6))
    with pytest.raises(ConfigError, match="scale 0 leaves"):
        Single('type: "ImResize" imresize_param { factor: 2 start_scale: 2 }', random(1, 1, 6, 6))


@pytest.mark.parametrize("setting", ["factor: inf", "start_scale: nan", "scale_gap: -1e38"])
def test_scales_that_are_no_sizes(setting):
    with pytest.raises(ConfigError, match="start_scale and scale_gap must be at most 1000"):
        Single(f'type: "ImResize" imresize_param {{ {setting} }}', random(2, 1, 6, 6))


def peaks(parts=2, most=3, threshold=0.5):
    return (
        f'type: "Nms" nms_param {{ threshold: {threshold} max_peaks: {most} num_parts: {parts} }}'
    )


@pytest.mark.parametrize("shape", [(2, 3, 9, 12), (1, 2, 12, 9), (1, 2, 2, 5)])
def test_peaks_against_a_loop(shape):
    """Nms."""
    x = random(*shape)
    single = Single(peaks(), x)
    single.top[0].data.fill(np.nan)
    (y,) = single.forward()
    h, w = shape[2:]
    want = np.zeros((shape[0], 2, 4, 3))
    for n, c in np.ndindex(shape[0], 2):
        count, plane = 0, x[n, c]
        for i in range(1, h - 1):
            for j in range(1, w - 1):
                around = plane[i - 1 : i + 2, j - 1 : j + 2].copy()
                around[1, 1] = -np.inf
                if not (plane[i, j] > 0.5 and plane[i, j] > around.max()):
                    continue
                count += 1
                if count > 3:
                    continue
                near = [
                    (plane[a, b], b, a)
                    for a in range(max(i - 3, 1), min(i + 4, h))
                    for b in range(max(j - 3, 1), min(j + 4, w))
                    if plane[a, b] > 0
                ]
                total = sum(value for value, _, _ in near)
                want[n, c, count, 0] = sum(value * b for value, b, _ in near) / total
                want[n, c, count, 1] = sum(value * a for value, _, a in near) / total
                want[n, c, count, 2] = plane[i, j]
        want[n, c, 0, 0] = count
    np.testing.assert_allclose(y, want)
    assert min(shape[2:]) < 3 or want[:, :, 0, 0].max() > 3  # more than are kept


def test_maps_that_are_not_there():
    with pytest.raises(ConfigError, match="num_parts 4 or more"):
        Single(peaks(parts=4), random(1, 3, 5, 5))
    with pytest.raises(ConfigError, match="max_peaks"):
        Single(peaks(most=0), random(1, 3, 5, 5))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
def test_on_gpu():
    """ImResize and Nms."""
    for case, (_, shape) in SIZES.items():
        check_plain_on_gpu(resize(case), random(*shape), propagate_down=[False])
    check_plain_on_gpu(peaks(), random(2, 3, 9, 12), propagate_down=[False])


def test_maps_without_places_have_no_peaks():
    with pytest.raises(ConfigError, match=r"Nms needs \(N, C, H, W\)"):
        Single('type: "Nms" nms_param { num_parts: 1 max_peaks: 2 }', np.zeros((2, 2, 0, 3)))


HEATMAPS = 'type: "EuclideanLossHeatmap" visualise: false visualise_channel: 3 loss_weight: 2'
MAPS = random(2, 3, 4, 5), random(2, 3, 4, 5, seed=1)


@pytest.mark.parametrize("drawn", [(), (random(2, 1, 3, 3),)], ids=["two bottoms", "three"])
def test_heatmap_loss_against_numpy(drawn):
    """The gradient is that of the sum of squares / 2."""
    x, t = MAPS
    single = Single(HEATMAPS, x, t, *drawn)
    (loss,) = single.forward()
    assert loss == pytest.approx(((x - t) ** 2).mean())
    (dx, *_), _ = single.backward([np.array(2.0)], [True, False, False][: 2 + len(drawn)])
    np.testing.assert_allclose(dx, 2 * (x - t), rtol=1e-6)


@pytest.mark.gpu
def test_heatmap_loss_on_gpu():
    check_plain_on_gpu(HEATMAPS, *MAPS, propagate_down=[True, False])


def test_heatmap_loss_needs_maps_of_one_shape():
    with pytest.raises(ConfigError, match=r"of shape \[2, 3, 4, 5\] need labels like them"):
        Single(HEATMAPS, MAPS[0], random(2, 4, 3, 5))
