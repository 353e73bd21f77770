"""Losses of detectors against loops, numerical gradients, and a GPU."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

A, B = 2 * random(4, 6, 2), random(4, 6, 2, seed=1)
INSIDE, OUTSIDE = seeded(2).random((2, 4, 6, 2))
MASK = seeded(3).integers(0, 2, (4, 6, 2)).astype(float)
LABELS = np.array([[2.0, 0], [-1, 1], [1, 1], [2, -1]])
RCNN = 'type: "SmoothL1Loss" smooth_l1_loss_param { sigma: 1.5 } loss_weight: 2'
OHEM = 'type: "SmoothL1LossOHEM" loss_weight: 1'
SOFTMAX = 'type: "SoftmaxWithLossOHEM" loss_param { ignore_label: -1 normalization: PRE_FIXED '
# name: prototxt, bottoms, propagate_down
CASES = {
    "SmoothL1Loss": ('type: "SmoothL1Loss"', [A, B], [True, True]),
    "SmoothL1Loss of SSD": ('type: "SmoothL1Loss"', [A, B, MASK], [True, True, False]),
    "SmoothL1Loss of Fast R-CNN": (RCNN, [A, B, INSIDE, OUTSIDE], [True, True, False, False]),
    "SmoothL1LossOHEM": (OHEM, [A, B, MASK], [True, True, False]),
    "SmoothL1LossOHEM by batch": (
        OHEM + " loss_param { normalization: BATCH_SIZE }",
        [A, B],
        [True, True],
    ),
    "SoftmaxWithLossOHEM": (
        SOFTMAX + "pre_fixed_normalizer: 3 }",
        [random(4, 3, 2), LABELS],
        [True, False],
    ),
}


def smooth(d, sigma=1.0):
    edge = 1 / sigma**2
    return sum(0.5 * v * v / edge if abs(v) < edge else abs(v) - 0.5 * edge for v in d.flat)


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    text, bottoms, propagate_down = CASES[case]
    check_gradient(text, *bottoms, propagate_down=propagate_down)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    text, bottoms, propagate_down = CASES[case]
    check_plain_on_gpu(text, *bottoms, propagate_down=propagate_down)


def test_smooth_l1_loss_against_a_loop():
    (loss,) = Single('type: "SmoothL1Loss"', A, B, MASK).forward()
    assert loss == pytest.approx(smooth((A - B) * MASK) / 4)
    (loss,) = Single(RCNN, A, B, INSIDE, np.full(A.shape, 0.5)).forward()
    assert loss == pytest.approx(0.5 * smooth((A - B) * INSIDE, 1.5) / 4)


@pytest.mark.parametrize("shape", [(8, 6), (4, 6, 2), (2, 3, 4, 2)])
def test_second_top_is_the_sum_over_channels(shape):
    """Without a gradient of its own: what the bottoms get is that of the loss."""
    rest = (*shape[2:], 1, 1)[: max(2, len(shape) - 2)]
    both = [x.reshape(shape) for x in (A, B, INSIDE, OUTSIDE)]
    loss, sums = Single(RCNN, *both, tops=2).forward()
    assert sums.shape == (shape[0], 1, *rest)
    places = [np.moveaxis(x, 1, -1).reshape(-1, shape[1]) for x in both]
    expected = [
        sum(o * smooth(w * (a - b), 1.5) for a, b, w, o in zip(*rows, strict=True))
        for rows in zip(*places, strict=True)
    ]
    np.testing.assert_allclose(sums.reshape(-1), expected)
    np.testing.assert_allclose(loss, sums.sum() / shape[0])
    single = Single(RCNN, *both, tops=2)
    single.forward()
    (da, *_), _ = single.backward([2.0, np.ones(sums.shape)], [True, True, False, False])
    alone = Single(RCNN, *both)
    alone.forward()
    (wanted, *_), _ = alone.backward([2.0], [True, True, False, False])
    np.testing.assert_array_equal(da, wanted)


@pytest.mark.gpu
def test_second_top_on_gpu():
    check_plain_on_gpu(
        RCNN,
        *(A, B, INSIDE, OUTSIDE),
        tops=2,
        propagate_down=[True, True, False, False],
    )


def test_smooth_l1_loss_of_fast_rcnn_has_weight_0_unless_told():
    assert Single('type: "SmoothL1Loss"', A, B).weights == [1]
    assert Single('type: "SmoothL1Loss" smooth_l1_loss_param { }', A, B).weights == [0]
    four = 'type: "SmoothL1Loss" bottom: "a" bottom: "b" bottom: "c" bottom: "d"'
    assert Single(four, A, B, INSIDE, OUTSIDE).weights == [0]
    assert Single(RCNN, A, B).weights == [2]


def test_axes_of_1_at_the_end_do_not_count_and_weights_have_no_gradient():
    four = [A.reshape(24, 2, 1, 1), B.reshape(24, 2), *np.reshape([INSIDE, OUTSIDE], (2, 24, 2))]
    for text, bottoms in ((RCNN, four), (OHEM, four[:3])):
        single, plain = Single(text, *bottoms), Single(text, *(b.reshape(24, 2) for b in bottoms))
        assert single.forward()[0] == pytest.approx(plain.forward()[0])
        one, other = (s.backward(propagate_down=[True] * len(bottoms))[0] for s in (single, plain))
        for got, want, given in zip(one, other, bottoms, strict=True):
            assert got.shape == given.shape
            np.testing.assert_array_equal(got.ravel(), want.ravel())
        assert one[1].any()
        assert not any(weights.any() for weights in one[2:])


def test_gradients_of_weights_of_ssd_and_rfcn_lack_a_factor():
    for kind in ("SmoothL1Loss", "SmoothL1LossOHEM"):
        single = Single(f'type: "{kind}" loss_weight: 1', A, B, np.full(A.shape, 0.25))
        single.forward()
        (da, *_), _ = single.backward([np.array(1.0)], [True, True, False])
        d = 0.25 * (A - B)
        slope = np.where(np.abs(d) < 1, d, np.sign(d))
        np.testing.assert_allclose(da, slope / (4 if kind == "SmoothL1Loss" else 8))


def test_losses_of_boxes_against_a_loop():
    x = random(4, 3, 2)
    single = Single(SOFTMAX + "} loss_weight: 1 loss_weight: 0 loss_weight: 0", x, LABELS, tops=3)
    loss, p, each = single.forward()
    assert single.weights == [1, 0, 0]
    want = np.zeros((4, 2))
    for n, i in np.ndindex(4, 2):
        if LABELS[n, i] >= 0:
            want[n, i] = -np.log(p[n, int(LABELS[n, i]), i])
    np.testing.assert_allclose(each, want)
    assert loss == pytest.approx(want.sum())
    loss, each = Single(f"{OHEM} loss_weight: 0", A, B, MASK, tops=2).forward()
    want = np.array([[smooth(((A - B) * MASK)[n, :, i]) for i in range(2)] for n in range(4)])
    np.testing.assert_allclose(each, want[:, None, :, None])
    assert loss == pytest.approx(want.sum() / 8)
    _, each = Single(f"{OHEM} loss_weight: 0", A[..., 0], B[..., 0], tops=2).forward()
    assert each.shape == (len(A), 1, 1, 1)  # so that it can be added to that of labels


@pytest.mark.parametrize("places", [(), (2, 2)])
def test_the_hardest_boxes_are_kept(places):
    """Of each image; of equal losses the first."""
    n = 7
    rois = np.zeros((n, 5, *places))
    rois[:, 0] = np.array([0, 1, 0, 0, 1, 2, 0]).reshape(n, *[1] * len(places))
    losses, labels = random(n, 1, *places).round(1), seeded(1).integers(0, 5, (n, 1, *places))
    losses[2], losses[3] = 0.5, 0.5
    weights = random(n, 8, *places, seed=2)
    text = 'type: "BoxAnnotatorOHEM" box_annotator_ohem_param { roi_per_img: 2 ignore_label: -3 }'
    single = Single(text, rois, losses, labels.astype(float), weights, tops=2)
    tops = single.forward()
    sides = places or (1, 1)  # the fork's tops have four axes
    assert [top.shape for top in tops] == [(n, 1, *sides), (n, 8, *sides)]
    got_labels, got_weights = tops[0].reshape(losses.shape), tops[1].reshape(weights.shape)
    order = sorted(np.ndindex(n, *places), key=lambda at: -losses[at[0], 0, *at[1:]])
    kept, counts = set(), {}
    for at in order:
        image = rois[at[0], 0, *at[1:]]
        counts[image] = counts.get(image, 0) + 1
        if counts[image] <= 2:
            kept.add(at)
    for at in np.ndindex(n, *places):
        n_, rest = at[0], at[1:]
        assert got_labels[n_, 0, *rest] == (labels[n_, 0, *rest] if at in kept else -3)
        expected = weights[(n_, slice(None), *rest)] if at in kept else 0
        np.testing.assert_array_equal(got_weights[(n_, slice(None), *rest)], expected)
    gradients, _ = single.backward(tops, [True] * 4)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.gpu
def test_the_hardest_boxes_on_gpu():
    text = 'type: "BoxAnnotatorOHEM" box_annotator_ohem_param { roi_per_img: 2 }'
    rois = np.array([0, 0, 0, 1, 1.0]).reshape(5, 1) * np.ones((1, 5))
    bottoms = rois, random(5, 1), random(5, 1, seed=1), random(5, 8)
    check_plain_on_gpu(text, *bottoms, propagate_down=[False] * 4, tops=2)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "SmoothL1Loss"', [(3, 4), (3, 5)], r"bottom 1 has shape \[3, 5\], bottom 0"),
        (RCNN, [(3, 4)] * 3, "takes 2 or 4 bottoms, not 3"),
        ('type: "BoxAnnotatorOHEM"', [(3, 5), (3, 1), (3, 1), (3, 4)], "roi_per_img must be 1"),
        (
            'type: "BoxAnnotatorOHEM" box_annotator_ohem_param { roi_per_img: 1 }',
            [(3, 5), (2, 1), (3, 1), (3, 4)],
            "a loss and a label each",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*shape) for shape in shapes), tops=2 if "Box" in text else 1)


def test_box_annotator_of_no_boxes():
    text = 'type: "BoxAnnotatorOHEM" box_annotator_ohem_param { roi_per_img: 2 }'
    shapes = [(0, 5), (0, 1), (0, 1), (0, 4)]
    labels, weights = Single(text, *map(np.zeros, shapes), tops=2).forward()
    assert (labels.shape, weights.shape) == ((0, 1, 1, 1), (0, 4, 1, 1))
