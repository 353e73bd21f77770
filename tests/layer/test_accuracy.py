import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_golden, random, seeded


def labels(*shape, classes=3):
    return seeded(5).integers(0, classes, shape).astype(float)


@pytest.mark.parametrize("case", ["accuracy", "accuracy_top3_ignore_perclass"])
def test_as_caffe(case):
    check_golden(case)


def count_correct(x, y, top_k):
    hits = 0
    for n in range(len(x)):
        hits += sum(x[n, c] >= x[n, int(y[n])] for c in range(x.shape[1]) if c != y[n]) < top_k
    return hits / len(x)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_accuracy_against_a_loop(top_k):
    x, y = random(20, 5).round(), labels(20, classes=5)
    (share,) = Single(f'type: "Accuracy" accuracy_param {{ top_k: {top_k} }}', x, y).forward()
    assert share == pytest.approx(count_correct(x, y, top_k))


def test_accuracy_of_scores_that_are_better_if_lower():
    x, y = random(20, 5), labels(20, classes=5)
    text = 'type: "Accuracy" accuracy_param { top_k: 2 min_is_better: true }'
    (share,) = Single(text, x, y).forward()
    assert share == pytest.approx(count_correct(-x, y, 2))


def test_accuracy_of_each_class():
    x, y = np.eye(3)[[0, 1, 1, 0]], np.array([0.0, 1, 0, 0])
    share, each = Single('type: "Accuracy"', x, y, tops=2).forward()
    assert share == 0.75
    np.testing.assert_allclose(each, [2 / 3, 1, 0])


def test_accuracy_counts_ties_and_nan_as_wrong():
    y = np.array([2.0])
    for x in (np.zeros((1, 3)), np.full((1, 3), np.nan), np.array([[0, 0, np.nan]])):
        assert Single('type: "Accuracy"', x, y).forward()[0] == 0


def test_accuracy_of_nothing_is_zero():
    text = 'type: "Accuracy" accuracy_param { ignore_label: 1 }'
    assert Single(text, random(2, 3), np.ones(2)).forward()[0] == 0


def test_accuracy_has_no_gradient():
    single = Single('type: "Accuracy"', random(2, 3), labels(2))
    assert not single.layer.allow_force_backward(0)
    single.layer.backward(single.top, [False, False], single.bottom)
    with pytest.raises(ConfigError, match="cannot be differentiated"):
        single.layer.backward(single.top, [True, False], single.bottom)


def seg_counts(scores, labels, ignored=()):
    """Counts of (truth, prediction); of equal scores the higher class."""
    counts = np.zeros((scores.shape[1],) * 2)
    for n, h, w in np.ndindex(labels.shape[0], *labels.shape[2:]):
        truth, column = int(labels[n, 0, h, w]), scores[n, :, h, w]
        if truth not in ignored:
            counts[truth, max(range(len(column)), key=lambda k: (column[k], k))] += 1
    return counts


def seg_scores(counts):
    hits, union = np.diag(counts), counts.sum(0) + counts.sum(1) - np.diag(counts)
    recall = [h / n for h, n in zip(hits, counts.sum(1), strict=True) if n]
    iou = [h / n if n else 1 for h, n in zip(hits, union, strict=True)]
    return [hits.sum() / counts.sum(), np.mean(recall), np.mean(iou)]


@pytest.mark.parametrize("ignored", [(), (1,), (0, 3)])
def test_seg_accuracy_against_a_loop(ignored):
    x, y = random(2, 5, 3, 4).round(), labels(2, 1, 3, 4, classes=4)
    param = " ".join(f"ignore_label: {k}" for k in ignored)
    (got,) = Single(f'type: "SegAccuracy" seg_accuracy_param {{ {param} }}', x, y).forward()
    np.testing.assert_allclose(got.ravel(), seg_scores(seg_counts(x, y, ignored)))


def test_seg_accuracy_sums_batches_without_reset():
    x, y = random(2, 3, 3, 4), labels(2, 1, 3, 4)
    single = Single('type: "SegAccuracy" seg_accuracy_param { reset: false }', x, y)
    total = seg_counts(x, y)
    single.forward()
    single.bottom[0].data[...] = x2 = random(2, 3, 3, 4, seed=5)
    single.layer.forward(single.bottom, single.top)
    np.testing.assert_allclose(single.tops[0].ravel(), seg_scores(total + seg_counts(x2, y)))


def test_seg_accuracy_names_a_label_outside():
    y = np.full((1, 1, 2, 2), 255.0)
    with pytest.raises(DataError, match="label 255 is not one of the 3 classes"):
        Single('type: "SegAccuracy"', random(1, 3, 2, 2), y).forward()


def test_accuracy_of_pixels_needs_classes():
    with pytest.raises(ConfigError, match="have no classes"):
        Single('type: "SegAccuracy"', np.zeros((1, 0, 2, 2)), np.zeros((1, 1, 2, 2)))


@pytest.mark.parametrize("label", [3, -1, np.nan])
def test_accuracy_names_a_label_outside(label):
    single = Single('type: "Accuracy"', random(2, 3), np.array([0, label]))
    with pytest.raises(DataError, match=f"label {label:g} is not one of the 3 classes 0 to 2"):
        single.forward()


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    {
        "labels": ('type: "Accuracy"', [(4, 3), (3,)], "need 4 labels, not 3"),
        "top_k": (
            'type: "Accuracy" accuracy_param { top_k: 4 }',
            [(4, 3), (4,)],
            "top_k 4.*between 1 and the 3 classes",
        ),
    }.values(),
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*s) for s in shapes))
