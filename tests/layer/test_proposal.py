"""Proposed boxes against a loop, against the forks' figures, and on a GPU."""

from math import exp, floor, sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter
from caffepy.proto.text import parse

from .harness import FORKS, Single, check_golden, random, seeded

TEXT = (
    'type: "Proposal" proposal_param {{ feat_stride: 16 min_size: {} ratio: 0.5 ratio: 2 '
    "scale: 2 scale: 4 pre_nms_topn: {} post_nms_topn: {} nms_thresh: 0.6 }}"
)
SCORES = seeded().permutation(2 * 8 * 4 * 5).reshape(2, 8, 4, 5) / 400
DELTAS = random(2, 16, 4, 5) / 3
INFO = np.array([[60.0, 75, 1.5], [999, 999, 9]])
CASES = {
    "many": (TEXT.format(16, 6000, 300), INFO),
    "few": (TEXT.format(16, 30, 5), INFO),
    "two scales": (TEXT.format(20, 50, 50), np.array([[60, 75, 1, 2.5]])),
    "sizes in pixels": (
        TEXT.format(0, 60, 20).replace("scale: 2", "scale: 32").replace("scale: 4", "scale: 50"),
        INFO,
    ),
    "in C++": (TEXT.format(20, 6000, 300).replace('"Proposal"', '"FrcnnProposal"'), INFO),
    "few in C++": (TEXT.format(20, 30, 5).replace('"Proposal"', '"FrcnnProposal"'), INFO),
}


def anchors_by_hand(ratios, scales, base, in_pixels):
    for ratio in ratios:
        w = sqrt(base * base / ratio)
        h = w * ratio if in_pixels else floor(floor(w + 0.5) * ratio + 0.5)
        w = w if in_pixels else floor(w + 0.5)
        for scale in scales:
            half = [0.5 * (side * scale - 1) for side in (w, h)]
            if in_pixels:
                half = [0.5 * floor(side * scale / base - 1 + 0.5) for side in (w, h)]
            middle = 0.5 * (base - 1)
            yield middle - half[0], middle - half[1], middle + half[0], middle + half[1]


def share(a, b):
    wide, high = (min(a[k + 2], b[k + 2]) - max(a[k], b[k]) + 1 for k in (0, 1))
    both = max(wide, 0) * max(high, 0)
    areas = [(c[2] - c[0] + 1) * (c[3] - c[1] + 1) for c in (a, b)]
    return both / (sum(areas) - both)


def by_hand(text, scores, deltas, info):
    param = parse(text, LayerParameter()).proposal_param
    numbers = info.flat
    high, wide, down = numbers[:3]
    across = numbers[3] if info.shape[1] > 3 else down
    rois, best = [], []
    for n in range(2):
        found = []
        for i, j in np.ndindex(scores.shape[2:]):
            anchors = anchors_by_hand(param.ratio, param.scale, 16, min(param.scale) >= 16)
            for a, (x1, y1, x2, y2) in enumerate(anchors):
                box = []
                for lo, hi, k, size in ((x1, x2, 0, wide), (y1, y2, 1, high)):
                    lo, hi = lo + 16 * (j, i)[k], hi + 16 * (j, i)[k]
                    length = hi - lo + 1
                    d, grow = deltas[n, 4 * a + k, i, j], deltas[n, 4 * a + 2 + k, i, j]
                    centre, half = lo + length / 2 + d * length, exp(grow) * length / 2
                    box.append([max(0, min(size - 1, v)) for v in (centre - half, centre + half)])
                (x1, x2), (y1, y2) = box
                fits = x2 - x1 + 1 >= param.min_size * across
                fits = fits and y2 - y1 + 1 >= param.min_size * down
                if fits or "Frcnn" not in text:
                    found.append((scores[n, 4 + a, i, j] if fits else 0, (x1, y1, x2, y2)))
        found.sort(key=lambda each: -each[0])
        kept = []
        for score, box in found[: param.pre_nms_topn]:
            if len(kept) < param.post_nms_topn and all(share(box, k) <= 0.6 for _, k in kept):
                kept.append((score, box))
        rois += [(n, *box) for _, box in kept]
        best += [score for score, _ in kept]
    return rois, best


@pytest.mark.parametrize("case", CASES)
def test_proposals_against_a_loop(case):
    text, info = CASES[case]
    rois, scores = Single(text, SCORES, DELTAS, info, tops=2).forward()
    want, best = by_hand(text, SCORES, DELTAS, info)
    assert len(want) > 4
    np.testing.assert_allclose(rois, want, 1e-5, 1e-4)
    np.testing.assert_allclose(scores, best, 1e-6)


@pytest.mark.parametrize(("phase", "counts"), [(TEST, (6000, 300)), (TRAIN, (12000, 2000))])
def test_numbers_of_voc_config(phase, counts):
    scores, deltas = random(1, 18, 2, 3), random(1, 36, 2, 3)
    single = Single('type: "FrcnnProposal"', scores, deltas, INFO[:1], phase=phase)
    param = single.layer.settings
    assert (param.pre_nms_topn, param.post_nms_topn) == counts
    assert (param.min_size, param.feat_stride) == (16, 16)
    assert param.nms_thresh == pytest.approx(0.7)
    anchors = single.layer.anchors.data
    np.testing.assert_array_equal(
        anchors[[0, 4, 8]], [[-84, -40, 99, 55], [-120, -120, 135, 135], [-168, -344, 183, 359]]
    )
    single.layer.param.proposal_param.scale.extend([4, 8])
    assert list(single.layer.stated().scale) == [4, 8]


@pytest.mark.parametrize("name", ["proposal_pva", "proposal_pva_few"])
def test_proposals_are_those_of_pvanet(name):
    check_golden(name, folder=FORKS)


def test_rois_come_again_for_other_values_and_alone():
    text = CASES["many"][0]
    single = Single(text, SCORES, DELTAS, INFO)
    assert single.top[0].shape == (600, 5)
    first = single.forward()[0]
    single.inputs[1] = DELTAS / 2
    second = single.forward()[0]
    assert len(first) != len(second) < 600
    single.inputs[1] = DELTAS
    np.testing.assert_array_equal(single.forward()[0], first)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "Proposal"', [(1, 8, 4, 5), (1, 16, 4, 5), (1, 3)], "needs ratio and scale"),
        (TEXT.format(1, 0, 1), [(1, 8, 4, 5), (1, 16, 4, 5), (1, 3)], "must be above 0"),
        (TEXT.format(1, 1, 1), [(1, 4, 4, 5), (1, 16, 4, 5), (1, 3)], r"need .*\(N, 8, H, W\)"),
        (TEXT.format(1, 1, 1), [(1, 8, 4, 5), (1, 16, 5, 4), (1, 3)], r"shape \[1, 16, 4, 5\]"),
        (TEXT.format(1, 1, 1), [(1, 8, 4, 5), (1, 16, 4, 5), (1, 2)], r"height, width and scale"),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(np.zeros(shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_proposals_on_gpu(case):
    text, info = CASES[case]
    want = Single(text, SCORES, DELTAS, info, tops=2, dtype=np.float32).forward()
    device = CudaDevice(seed=1)
    with device.scope():
        bottom = [Blob(values.shape, device=device) for values in (SCORES, DELTAS, info)]
        top = [Blob(device=device) for _ in range(2)]
        layer = create_layer(parse(text, LayerParameter()), TEST, device)
        assert not layer.on_host
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
        for blob, values in zip(bottom, (SCORES, DELTAS, info), strict=True):
            blob.host_data[...] = values
        layer.forward(bottom, top)
    for blob, values in zip(top, want, strict=True):
        np.testing.assert_allclose(blob.host_data, values, 1e-5, 1e-4)
