from math import exp, log

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.ops import cpu
from caffepy.proto.binary import array_to_blob

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu, check_problem_on_gpu

GOLDEN = [
    "contrastive",
    "euclidean",
    "hinge_l1",
    "infogain",
    "multinomial",
    "sigmoid_ce",
    "softmax",
    "softmaxloss",
    "softmaxloss_batch",
    "softmaxloss_none",
    "softmaxloss_spatial_ignore",
]


def labels(*shape, classes=3, seed=5):
    return seeded(seed).integers(0, classes, shape).astype(float)


def probabilities(*shape):
    p = np.exp(random(*shape))
    return p / p.sum(1, keepdims=True)


FIRST = [True, False]
# name: prototxt, bottoms, propagate_down
GRADIENTS = {
    "Softmax": ('type: "Softmax"', [random(2, 3, 2)], None),
    "Softmax of vectors": ('type: "Softmax"', [random(2, 5)], None),
    "Softmax axis": ('type: "Softmax" softmax_param { axis: -1 }', [random(2, 3, 4)], None),
    "SoftmaxWithLoss": (
        'type: "SoftmaxWithLoss" loss_weight: 0.7',
        [random(4, 3), labels(4)],
        FIRST,
    ),
    "SoftmaxWithLoss spatial": (
        'type: "SoftmaxWithLoss" loss_param { ignore_label: 1 }',
        [random(2, 3, 2, 2), labels(2, 1, 2, 2)],
        FIRST,
    ),
    "SoftmaxWithLoss weights": (
        'type: "SoftmaxWithLoss" loss_param { ignore_label: 1 weight_by_label_freqs: true '
        "class_weighting: 0.5 class_weighting: 9 class_weighting: 2 }",
        [random(2, 3, 2, 2), labels(2, 1, 2, 2)],
        FIRST,
    ),
    "SoftmaxWithLoss axis": (
        'type: "SoftmaxWithLoss" softmax_param { axis: 2 } loss_param { normalization: FULL }',
        [random(2, 2, 3), labels(2, 2)],
        FIRST,
    ),
    "SoftmaxWithLoss legacy": (
        'type: "SoftmaxWithLoss" loss_param { normalize: false }',
        [random(2, 3, 2), labels(2, 2)],
        FIRST,
    ),
    "SoftmaxWithLoss nothing counts": (
        'type: "SoftmaxWithLoss" loss_param { ignore_label: 1 }',
        [random(2, 3), np.ones(2)],
        FIRST,
    ),
    "EuclideanLoss": (
        'type: "EuclideanLoss" loss_weight: 2',
        [random(3, 4), random(3, 4, seed=1)],
        None,
    ),
    "SigmoidCrossEntropyLoss": (
        'type: "SigmoidCrossEntropyLoss"',
        [3 * random(3, 4), seeded(1).random((3, 4))],
        FIRST,
    ),
    "SigmoidCrossEntropyLoss ignore": (
        'type: "SigmoidCrossEntropyLoss" loss_param { ignore_label: 1 normalization: VALID }',
        [random(3, 4), labels(3, 4, classes=2)],
        FIRST,
    ),
    "InfogainLoss": (
        'type: "InfogainLoss" loss_weight: 0.7',
        [random(4, 3), labels(4), seeded(1).random((1, 1, 3, 3))],
        [True, False, False],
    ),
    "InfogainLoss spatial": (
        'type: "InfogainLoss" infogain_loss_param { axis: -2 } loss_param { ignore_label: 0 }',
        [random(2, 3, 4), labels(2, 4), seeded(1).random((3, 3))],
        [True, False, False],
    ),
    "MultinomialLogisticLoss": (
        'type: "MultinomialLogisticLoss"',
        [probabilities(4, 3), labels(4)],
        FIRST,
    ),
    "HingeLoss": ('type: "HingeLoss"', [random(4, 3), labels(4)], FIRST),
    "HingeLoss L2": (
        'type: "HingeLoss" hinge_loss_param { norm: L2 }',
        [random(4, 3), labels(4)],
        FIRST,
    ),
    "ContrastiveLoss legacy": (
        'type: "ContrastiveLoss" contrastive_loss_param { margin: 9 legacy_version: true }',
        [random(4, 3), random(4, 3, seed=1), np.array([0.0, 1, 0, 1])],
        [True, True, False],
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradient(case):
    text, bottoms, propagate_down = GRADIENTS[case]
    check_gradient(text, *bottoms, propagate_down=propagate_down)


def test_gradient_of_contrastive_loss():
    # Caffe divides by d + 1e-4 where the derivative has d.
    a, b, y = random(4, 3), random(4, 3, seed=1), np.array([0.0, 1, 0, 1])
    text = 'type: "ContrastiveLoss" contrastive_loss_param { margin: 3 }'
    check_gradient(text, a, b, y, propagate_down=[True, True, False], tolerance=1e-3)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", ["Softmax", "Softmax of vectors", "Softmax axis"])
def test_gradient_of_softmax_in_place(case, in_place):
    text, bottoms, _ = GRADIENTS[case]
    check_gradient(text, *bottoms, in_place=in_place)


@pytest.mark.parametrize("case", GOLDEN)
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("axis", [1, 2])
def test_softmax_against_a_loop(axis):
    x = random(2, 3, 4)
    (y,) = Single(f'type: "Softmax" softmax_param {{ axis: {axis} }}', x).forward()
    for index in np.ndindex(x.shape):
        line = list(index)
        line[axis] = slice(None)
        assert y[index] == pytest.approx(exp(x[index]) / sum(exp(v) for v in x[tuple(line)]))


def test_softmax_of_large_scores():
    (y,) = Single('type: "Softmax"', np.array([[1000.0, 0, -1000]]), dtype=np.float32).forward()
    np.testing.assert_array_equal(y, [[1, 0, 0]])


def test_softmax_of_no_channels_reads_nothing():
    """What lies where the first channel would be is not the process's, for a plane so large."""
    single = Single('type: "Softmax"', np.zeros((1, 0, 2000, 2000)))
    (y,) = single.forward()
    ((dx,), _) = single.backward([0])
    assert y.shape == dx.shape == (1, 0, 2000, 2000)


NORMALIZATIONS = {"FULL": 8, "VALID": 5, "BATCH_SIZE": 2, "NONE": 1}


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_softmax_loss_against_a_loop(normalization):
    x, y = random(2, 3, 2, 2), np.array([0.0, 1, 2, 2, 1, 1, 0, 2]).reshape(2, 2, 2)
    text = (
        f'type: "SoftmaxWithLoss" loss_param {{ ignore_label: 1 normalization: {normalization} }}'
    )
    total = 0.0
    for n, h, w in np.ndindex(2, 2, 2):
        k = int(y[n, h, w])
        if k != 1:
            total -= x[n, k, h, w] - log(sum(exp(v) for v in x[n, :, h, w]))
    (loss,) = Single(text, x, y).forward()
    assert loss == pytest.approx(total / NORMALIZATIONS[normalization])


def test_softmax_loss_of_each_label():
    """The third top of SoftmaxWithLoss, which has no gradient."""
    x, y = random(2, 3, 2, 2), np.array([0.0, 1, 2, 2, 1, 1, 0, 2]).reshape(2, 2, 2)
    text = 'type: "SoftmaxWithLoss" loss_param { ignore_label: 1 }'
    single = Single(text, x, y, tops=3)
    loss, p, each = single.forward()
    assert each.shape == y.shape
    for n, h, w in np.ndindex(2, 2, 2):
        k = int(y[n, h, w])
        want = 0 if k == 1 else log(sum(exp(v) for v in x[n, :, h, w])) - x[n, k, h, w]
        assert each[n, h, w] == pytest.approx(want)
    np.testing.assert_allclose(loss, each.sum() / 5)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    alone = Single(text, x, y)
    alone.forward()
    down = [True, False]
    assert (single.backward([1, 0, 0], down)[0][0] == alone.backward([1], down)[0][0]).all()


@pytest.mark.gpu
def test_softmax_loss_of_each_label_on_gpu():
    y = np.array([0.0, 1, 2, 2, 1, 1, 0, 2]).reshape(2, 2, 2)
    text = 'type: "SoftmaxWithLoss" loss_param { ignore_label: 1 }'
    check_plain_on_gpu(text, random(2, 3, 2, 2), y, propagate_down=FIRST, tops=3)


def test_softmax_loss_with_weights_of_classes():
    x, y, weights = random(4, 3), labels(4), [0.5, 3, 2]
    text = " ".join(f"class_weighting: {w}" for w in weights)
    single = Single(
        f'type: "SoftmaxWithLoss" loss_param {{ weight_by_label_freqs: true {text} }}', x, y
    )
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    expected = -sum(weights[int(t)] * log(p[n, int(t)]) for n, t in enumerate(y)) / 4
    assert single.forward()[0] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="4 classes need as many class_weighting, not 3"):
        Single(
            f'type: "SoftmaxWithLoss" loss_param {{ weight_by_label_freqs: true {text} }}',
            random(4, 4),
            y,
        )
    with pytest.raises(ConfigError, match="is for SoftmaxWithLoss"):
        Single('type: "FocalLoss" loss_param { weight_by_label_freqs: true }', x, y)


def test_softmax_loss_saturates_as_caffes():
    x = np.array([[1000.0, 0]])
    (loss,) = Single('type: "SoftmaxWithLoss"', x, np.array([1.0]), dtype=np.float32).forward()
    assert f"{loss:.6g}" == "87.3365"


def test_softmax_loss_shows_what_is_not_a_number():
    (loss,) = Single('type: "SoftmaxWithLoss"', np.array([[np.nan, 0]]), np.array([1.0])).forward()
    assert np.isnan(loss)


def test_softmax_loss_gives_its_probabilities():
    x, y = random(4, 3), labels(4)
    single = Single('type: "SoftmaxWithLoss"', x, y, tops=2)
    assert single.weights == [1, 0]
    _, p = single.forward()
    np.testing.assert_allclose(p, np.exp(x) / np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize(
    "type_", ["SoftmaxWithLoss", "HingeLoss", "MultinomialLogisticLoss", "InfogainLoss"]
)
@pytest.mark.parametrize("label", [3, -1, np.nan])
def test_label_outside_is_named(type_, label):
    matrix = [np.eye(3)] if type_ == "InfogainLoss" else []
    single = Single(f'type: "{type_}"', probabilities(2, 3), np.array([0, label]), *matrix)
    with pytest.raises(DataError, match=f"label {label:g} is not one of the 3 classes 0 to 2"):
        single.forward()


@pytest.mark.parametrize("label", [-2, 3, 4, np.nan])
def test_the_gradient_of_a_label_outside_writes_nowhere_else(label):
    """A script may catch forward's error and run backward."""
    room, p = np.zeros((6, 3, 1), np.float32), random(2, 3, 1).astype(np.float32)
    labels, weight, norm = np.full((2, 1), label, np.float32), np.ones(1, np.float32), np.array(2.0)
    cpu.softmax_loss_backward(p, labels, None, weight, norm, room[2:4])
    np.testing.assert_array_equal(room[2:4], p / 2)
    assert not room[:2].any()
    assert not room[4:].any()


def test_label_outside_may_be_the_ignored_one():
    x, y = random(2, 3), np.array([1, 255.0])
    (loss,) = Single('type: "SoftmaxWithLoss" loss_param { ignore_label: 255 }', x, y).forward()
    (alone,) = Single('type: "SoftmaxWithLoss"', x[:1], y[:1]).forward()
    assert loss == pytest.approx(alone)


def test_euclidean_loss_against_a_loop():
    a, b = random(3, 2, 2), random(3, 2, 2, seed=1)
    (loss,) = Single('type: "EuclideanLoss"', a, b).forward()
    assert loss == pytest.approx(sum((a[i] - b[i]) ** 2 for i in np.ndindex(a.shape)) / 6)


def test_sigmoid_loss_against_a_loop():
    x, t = random(3, 4), labels(3, 4, classes=2)
    expected = -sum(
        log(1 / (1 + exp(-v)) if u else 1 - 1 / (1 + exp(-v)))
        for v, u in zip(x.flat, t.flat, strict=True)
    )
    (loss,) = Single('type: "SigmoidCrossEntropyLoss"', x, t).forward()
    assert loss == pytest.approx(expected / 3)
    (loss,) = Single(
        'type: "SigmoidCrossEntropyLoss" loss_param { normalization: FULL }', x, t
    ).forward()
    assert loss == pytest.approx(expected / 12)


def test_sigmoid_loss_of_large_scores_is_finite():
    single = Single(
        'type: "SigmoidCrossEntropyLoss"',
        np.array([[1e4, -1e4]]),
        np.array([[0.0, 0]]),
        dtype=np.float32,
    )
    assert single.forward()[0] == 1e4


def test_hinge_loss_against_a_loop():
    x, y = random(4, 3), labels(4)
    margins = [max(0, 1 + x[n, c] * (-1 if c == y[n] else 1)) for n, c in np.ndindex(4, 3)]
    (loss,) = Single('type: "HingeLoss"', x, y).forward()
    assert loss == pytest.approx(sum(margins) / 4)
    (loss,) = Single('type: "HingeLoss" hinge_loss_param { norm: L2 }', x, y).forward()
    assert loss == pytest.approx(sum(m * m for m in margins) / 4)


def test_contrastive_loss_against_a_loop():
    a, b, y = random(4, 3), random(4, 3, seed=1), np.array([0.0, 1, 0, 1])
    for legacy in (False, True):
        total = 0.0
        for n in range(4):
            d2 = sum((a[n] - b[n]) ** 2)
            total += d2 if y[n] else max(3 - d2, 0) if legacy else max(3 - d2**0.5, 0) ** 2
        param = f"margin: 3 legacy_version: {str(legacy).lower()}"
        (loss,) = Single(
            f'type: "ContrastiveLoss" contrastive_loss_param {{ {param} }}', a, b, y
        ).forward()
        assert loss == pytest.approx(total / 8)


def test_infogain_loss_reads_its_matrix_and_equals_softmax_loss_for_the_identity(tmp_path):
    x, y = random(4, 3), labels(4)
    path = tmp_path / "matrix.binaryproto"
    path.write_bytes(array_to_blob(np.eye(3, dtype=np.float32)).SerializeToString())
    single = Single(
        f'type: "InfogainLoss" infogain_loss_param {{ source: "{path}" }}', x, y, tops=2
    )
    loss, p = single.forward()
    assert loss == pytest.approx(Single('type: "SoftmaxWithLoss"', x, y).forward()[0])
    np.testing.assert_allclose(p.sum(1), 1)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    {
        "labels": (
            'type: "SoftmaxWithLoss"',
            [(4, 3, 2), (4,)],
            "with 3 classes need 8 labels, not 4",
        ),
        "items": (
            'type: "SoftmaxWithLoss"',
            [(4, 3), (3,)],
            r"agree in their first axis: \[4, 3\] and \[3\]",
        ),
        "euclidean": ('type: "EuclideanLoss"', [(4, 3), (4, 2)], "12 of shape.*8 of shape"),
        "sigmoid": ('type: "SigmoidCrossEntropyLoss"', [(4, 3), (4, 2)], "12 predictions"),
        "hinge": ('type: "HingeLoss"', [(4, 3), (4, 2)], "need 4 labels, not 8"),
        "infogain": ('type: "InfogainLoss"', [(4, 3), (4,), (2, 2)], "9 elements, not 4"),
        "infogain source": ('type: "InfogainLoss"', [(4, 3), (4,)], "give source"),
        "infogain normalize": (
            'type: "InfogainLoss" loss_param { normalize: true }',
            [(4, 3), (4,), (3, 3)],
            "give normalization",
        ),
        "pairs": ('type: "ContrastiveLoss"', [(4, 3), (4, 2), (4,)], "same count"),
        "pair labels": (
            'type: "ContrastiveLoss"',
            [(4, 3), (4, 3), (4, 2)],
            "4 pairs need as many labels, not 8",
        ),
    }.values(),
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*s) for s in shapes))


LABELLED = [
    "SoftmaxWithLoss",
    "SigmoidCrossEntropyLoss",
    "InfogainLoss",
    "MultinomialLogisticLoss",
    "HingeLoss",
]


@pytest.mark.parametrize("case", [*LABELLED, "ContrastiveLoss legacy"])
def test_labels_have_no_gradient(case):
    text, bottoms, propagate_down = GRADIENTS[case]
    single = Single(text, *bottoms)
    single.forward()
    for i, wanted in enumerate(propagate_down):
        assert single.layer.allow_force_backward(i) == wanted
        if not wanted:
            with pytest.raises(ConfigError, match="cannot differentiate its"):
                single.backward(None, [k == i for k in range(len(bottoms))])


@pytest.mark.parametrize(
    "kind",
    [
        "SigmoidCrossEntropyLoss",
        "MultinomialLogisticLoss",
        "HingeLoss",
        "SoftmaxWithLoss",
        "ContrastiveLoss",
    ],
)
def test_scalars_are_refused(kind):
    with pytest.raises(ConfigError, match="out of range for a blob with 0 axes"):
        Single(f'type: "{kind}"', *[np.float64(1)] * (3 if kind == "ContrastiveLoss" else 2))


ON_GPU = [
    case
    for case in GRADIENTS
    if case.startswith(("Infogain", "Multinomial", "Hinge", "Contrastive"))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ON_GPU, "ContrastiveLoss"])
def test_on_gpu(case):
    text, bottoms, propagate_down = GRADIENTS[
        case if case in GRADIENTS else "ContrastiveLoss legacy"
    ]
    text = text.replace("legacy_version: true", "") if case == "ContrastiveLoss" else text
    check_plain_on_gpu(text, *bottoms, propagate_down=propagate_down or [True] * len(bottoms))


@pytest.mark.gpu
def test_infogain_matrix_of_a_file_on_gpu(tmp_path):
    path = tmp_path / "matrix.binaryproto"
    path.write_bytes(array_to_blob(random(3, 3).astype(np.float32)).SerializeToString())
    text = f'type: "InfogainLoss" infogain_loss_param {{ source: "{path}" }}'
    check_plain_on_gpu(text, random(4, 3), labels(4), propagate_down=FIRST, tops=2)


@pytest.mark.gpu
@pytest.mark.parametrize("type_", ["HingeLoss", "MultinomialLogisticLoss", "InfogainLoss"])
@pytest.mark.parametrize("label", [3, -1, np.nan])
def test_label_outside_is_named_on_gpu(type_, label):
    matrix = [np.eye(3)] if type_ == "InfogainLoss" else []
    check_problem_on_gpu(
        f'name: "l" type: "{type_}"', probabilities(3, 3), np.array([0, label, 7]), *matrix
    )


BALANCED = 'type: "SigmoidCrossEntropyBalanceLoss" loss_weight: 3'


def edges(*shape):
    return (random(*shape, seed=7) > 0.8).astype(float)


def test_balanced_sigmoid_loss_against_a_loop():
    x, t = random(2, 1, 4, 5), edges(2, 1, 4, 5)
    t[0, 0, 0, 0] = 2  # neither
    single = Single(BALANCED, x, t)
    want = 0.0
    for n in range(2):
        ones, zeros = (t[n] == 1).sum(), (t[n] == 0).sum()
        for at in np.ndindex(1, 4, 5):
            p, target = 1 / (1 + np.exp(-x[(n, *at)])), t[(n, *at)]
            if target == 1:
                want -= np.log(p) * zeros / (ones + zeros) / 2
            elif target == 0:
                want -= np.log(1 - p) * ones / (ones + zeros) / 2
    np.testing.assert_allclose(single.forward()[0], want)
    (dx, _), _ = single.backward(propagate_down=[True, False])
    assert dx[0, 0, 0, 0] == pytest.approx(3 / 2 * (1 / (1 + np.exp(-x[0, 0, 0, 0])) - 2))


def test_balanced_sigmoid_loss_gradient():
    x = random(2, 1, 3, 4)
    check_gradient(BALANCED, x, edges(2, 1, 3, 4), propagate_down=[True, False])
    single = Single(BALANCED, x, np.ones((2, 1, 3, 4)))  # nothing to balance against
    assert single.forward()[0] == 0
    with pytest.raises(ConfigError, match="24 predictions need as many targets, not 2"):
        Single(BALANCED, x, np.ones((2, 1)))


@pytest.mark.gpu
def test_balanced_sigmoid_loss_on_gpu():
    x, t = random(2, 1, 4, 5), edges(2, 1, 4, 5)
    check_plain_on_gpu(BALANCED, x, t, propagate_down=[True, False])


LEARNED_FROM = {
    "classes": ("", (4, 3)),
    "places": ("", (2, 3, 4)),
    "of each": ("loss_param { normalize: true }", (2, 3, 4)),
    "last axis": ("softmax_param { axis: -1 }", (2, 3, 4)),
}


@pytest.mark.parametrize("case", LEARNED_FROM)
def test_softmax_with_cross_entropy_against_numpy(case):
    settings, shape = LEARNED_FROM[case]
    text = f'type: "SoftmaxWithCrossEntropyLoss" {settings}'
    x, t = random(*shape), random(*shape, seed=1)
    loss, prob = Single(text, x, t, tops=2).forward()
    axis = -1 if case == "last axis" else 1
    p, q = (np.exp(a) / np.exp(a).sum(axis=axis, keepdims=True) for a in (x, t))
    count = {"classes": 4, "places": 2, "of each": 8, "last axis": 6}[case]
    np.testing.assert_allclose(loss, (q * (np.log(q) - np.log(p))).sum() / count)
    np.testing.assert_allclose(prob, p)
    check_gradient(f"{text} loss_weight: 0.3", x, t, propagate_down=[True, False])


def test_softmax_with_cross_entropy_of_other_shapes():
    with pytest.raises(ConfigError, match="must have one shape"):
        Single('type: "SoftmaxWithCrossEntropyLoss"', random(2, 3), random(2, 4))
    single = Single('type: "SoftmaxWithCrossEntropyLoss"', random(2, 3), random(2, 3))
    single.forward()
    with pytest.raises(ConfigError, match="cannot differentiate its target scores"):
        single.backward(propagate_down=[True, True])


@pytest.mark.gpu
@pytest.mark.parametrize("case", LEARNED_FROM)
def test_softmax_with_cross_entropy_on_gpu(case):
    settings, shape = LEARNED_FROM[case]
    text = f'type: "SoftmaxWithCrossEntropyLoss" {settings}'
    arrays = random(*shape), random(*shape, seed=1)
    check_plain_on_gpu(text, *arrays, propagate_down=[True, False])
