import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, random, seeded
from .on_gpu import check_plain_on_gpu

LOSS = 'type: "YoloSeg" yolo_seg_param { object_scale: 0.2 } loss_weight: 3'


def given(weighted):
    x, labels = random(2, 3, 4, 5), seeded(1).integers(0, 2, (2, 3, 4, 5)).astype(float)
    return [x, labels, labels.sum(axis=(2, 3))] if weighted else [x, labels]


@pytest.mark.parametrize("weighted", [False, True])
def test_yolo_seg_against_a_loop(weighted):
    x, labels, *pixels = bottoms = given(weighted)
    single = Single(LOSS, *bottoms)
    loss, delta = 0.0, np.empty_like(x)
    for n, k, i, j in np.ndindex(*x.shape):
        scale = 0.2
        if weighted and labels[n, k, i, j] > 0.5:
            mine = sum(pixels[0][m, k] for m in range(2))
            others = sum(20 - pixels[0][m, k] for m in range(2))
            scale = 0.2 * (2 - mine / others)
        delta[n, k, i, j] = scale * (1 / (1 + np.exp(-x[n, k, i, j])) - labels[n, k, i, j])
        loss += delta[n, k, i, j] ** 2 / 2
    np.testing.assert_allclose(single.forward()[0], loss)
    (dx, *_), _ = single.backward(propagate_down=[True] + [False] * (len(bottoms) - 1))
    np.testing.assert_allclose(dx, 3 * delta / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_yolo_seg_on_gpu(weighted):
    bottoms = given(weighted)
    check_plain_on_gpu(LOSS, *bottoms, propagate_down=[True] + [False] * (len(bottoms) - 1))


def scores():
    labels = (random(2, 3, 4, 5, seed=1) > 0.5).astype(float)
    labels[:, 2] = 0
    return random(2, 3, 4, 5), labels


JUDGE = 'type: "SegmentationEvaluate" segmentation_evaluate_param { threshold: 0.3 }'


def test_overlaps_of_classes_against_a_loop():
    x, labels = scores()
    (y,) = Single(JUDGE, x, labels).forward()
    for k in range(3):
        found = {(i, j) for i, j in np.ndindex(4, 5) if x[0, k, i, j] > 0.3}
        true = {(i, j) for i, j in np.ndindex(4, 5) if labels[0, k, i, j] > 0.3}
        assert y[0, 0, 0, k] == pytest.approx(len(found & true) / len(found | true))
    assert y[0, 0, 0, 2] == 0


@pytest.mark.gpu
def test_overlaps_of_classes_on_gpu():
    check_plain_on_gpu(JUDGE, *scores(), propagate_down=[False, False])


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        (LOSS, [(1, 2, 3, 3), (1, 2, 2, 2)], "scores .* and as many labels, not"),
        (LOSS, [(1, 2, 3, 3)] * 2 + [(1, 3)], "for each of 2 classes of 1 items, not"),
        (JUDGE, [(1, 2, 3, 3), (1, 2, 2, 2)], "of one size, not"),
    ],
)
def test_what_does_not_fit(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *map(np.zeros, shapes))
