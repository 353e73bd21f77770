"""CTCLoss, WarpCTCLoss and CtcLoss against all paths there are, numerical gradients, and a GPU."""

from itertools import groupby, product

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

T, N, C = 5, 3, 4
X = random(T, N, C)
STARTS = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1.0]])  # 5, 4, 5 steps
LABELS = np.array([[0, 1, 2], [2, 1, -1], [2, -1, -1], [-1, -1, -1], [-1, -1, -1.0]])
STEPS, COUNTS = np.array([5, 4, 3.0]), np.array([3, 2, 0.0])
PADDED = np.array([[1, 3, 3, 0], [0, 2, 0, 0], [0, 0, 0, 0.0]])
DELAY = "ctc_loss_param { output_delay: 1 }"
CRNN = "ctc_loss_param { alphabet_size: 4 time_step: 4 }"
CASES = {
    'type: "CTCLoss"': (X, STARTS, LABELS),
    f'type: "CTCLoss" {DELAY}': (X, STARTS[:, [0, 0, 0]], LABELS),
    'type: "CTCLoss" ctc_loss_param { ctc_merge_repeated: false }': (X, STARTS, LABELS),
    'type: "CTCLoss" ctc_loss_param { preprocess_collapse_repeated: true }': (X, STARTS, LABELS),
    'type: "CTCLoss" ctc_loss_param { blank_index: 3 } ': (X, STEPS, COUNTS, LABELS),
    'type: "WarpCTCLoss"': (X, STARTS, LABELS),
    'type: "WarpCTCLoss" ctc_loss_param { blank_index: 3 }': (X, STEPS, COUNTS, LABELS),
    'type: "WarpCTCLoss" ctc_loss_param { blank_index: 0 }': (X[..., None], PADDED),
    f'type: "CtcLoss" {CRNN}': (X, PADDED),
}


def sequences(text, *bottoms):
    """Return for each item its first and last step and its labels, and the blank."""
    if len(bottoms) == 2:
        end = 4 if "CtcLoss" in text else T
        return [(0, end, [int(v) for v in row if v]) for row in bottoms[1]], 0
    shift = int(text == 'type: "WarpCTCLoss"')
    found = []
    for n in range(N):
        column = [int(v) + shift for v in bottoms[-1][:, n]]
        count = next((i for i, v in enumerate(column) if v < shift), len(column))
        end = T
        if len(bottoms) == 4:
            end, count = int(bottoms[1][n]), int(bottoms[2][n])
        else:
            end = next((t for t in range(1, T) if bottoms[1][t, n] == 0), T)
        labels = column[:count]
        if "collapse" in text:
            labels = [k for k, _ in groupby(labels)]
        found.append((int("delay" in text), end if count or len(bottoms) == 4 else 0, labels))
    return found, 0 if shift else 3


def loss_of(x, begin, end, labels, blank, merge):
    """Return -log of the sum over all paths that become the labels, 0 if there are none."""
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    total = 0.0
    for path in product(range(C), repeat=max(end - begin, 0)):
        read = [k for k, _ in groupby(path)] if merge else path
        if end > begin and [c for c in read if c != blank] == labels:
            total += np.prod([p[begin + t, c] for t, c in enumerate(path)])
    return -np.log(total) if total else 0.0


@pytest.mark.parametrize("text", CASES)
def test_against_all_paths(text):
    bottoms = CASES[text]
    (loss,) = Single(text, *bottoms).forward()
    found, blank = sequences(text, *bottoms)
    x = X.reshape(T, N, C)
    want = [loss_of(x[:, n], *item, blank, "false" not in text) for n, item in enumerate(found)]
    assert loss == pytest.approx(np.mean(want))
    assert max(want) > 0


def gradient(text, bottoms, wanted):
    single = Single(text + " loss_weight: 2", *bottoms)
    single.forward()
    return single.backward(propagate_down=wanted)[0][0]


@pytest.mark.parametrize("text", CASES)
def test_gradient(text):
    """With one item the gradient is that of the loss; with several that of their sum."""
    x, *others = CASES[text]
    wanted = [True] + [False] * len(others)
    whole = gradient(text, [x, *others], wanted)
    for n in range(N):
        item = [x[:, n : n + 1]]
        for other in others:
            along = slice(n, n + 1)
            by_item = other.shape[0] == N and (other.ndim == 1 or len(others) == 1)
            item.append(other[along] if by_item else other[:, along])
        alone = gradient(text, item, wanted)
        np.testing.assert_allclose(whole[:, n], alone[:, 0])
        check_gradient(text + " loss_weight: 2", *item, propagate_down=wanted)


def test_labels_that_need_more_steps_than_there_are_count_nothing():
    labels = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0.0]])  # 1 1 1 needs 5 steps
    single = Single(f'type: "CtcLoss" {CRNN}', X, labels)
    (loss,) = single.forward()
    (dx, _), _ = single.backward(propagate_down=[True, False])
    assert not dx[:, 0].any()
    assert dx[:4, 1:].all()
    assert not dx[4].any()
    (two,) = Single(f'type: "CtcLoss" {CRNN}', X[:, 1:], labels[1:]).forward()
    assert loss == pytest.approx(two * 2 / 3)


@pytest.mark.parametrize(
    ("text", "bottoms", "error", "message"),
    [
        (
            'type: "CTCLoss"',
            (X, STARTS, LABELS + 2),
            DataError,
            "label 4 is not one of the 4 class",
        ),
        ('type: "CTCLoss"', (X, STARTS, LABELS + 1), DataError, "without the blank, 3"),
        ('type: "CTCLoss"', (X, STEPS + 1, COUNTS, LABELS), DataError, "6 steps, but there are 5"),
        ('type: "CTCLoss"', (X, PADDED), ConfigError, "CTCLoss takes 3 or 4 bottoms, not 2"),
        ('type: "CTCLoss"', (X[0], STARTS, LABELS), ConfigError, r"needs scores \(T, N, C\)"),
        ('type: "CTCLoss"', (X, STARTS[:3], LABELS), ConfigError, "15 numbers are needed"),
        ('type: "CTCLoss"', (X, STARTS, LABELS[:, :2]), ConfigError, r"needs labels \(L, N\)"),
        ('type: "WarpCTCLoss"', (X, PADDED[:2]), ConfigError, r"needs labels \(N, L\)"),
        (
            'type: "CTCLoss" ctc_loss_param { blank_index: 4 }',
            (X, STARTS, LABELS),
            ConfigError,
            "the blank 4 is not one of 4 classes",
        ),
        (
            f'type: "CTCLoss" {DELAY}'.replace("1", "-1"),
            CASES['type: "CTCLoss"'],
            ConfigError,
            "0 or",
        ),
        ('type: "CTCGreedyDecoder"', (X, STARTS[:2]), ConfigError, "15 numbers are needed"),
        ('type: "CTCGreedyDecoder"', (X[0], STARTS), ConfigError, r"needs scores \(T, N, C\)"),
        ('type: "CTCGreedyDecoder"', (X, STARTS, LABELS.T), ConfigError, r"labels \(L, 3\) are"),
        ('type: "CtcLoss"', (X, PADDED), ConfigError, "alphabet_size is 0, the scores have 4"),
        (
            f'type: "CtcLoss" {CRNN.replace("time_step: 4", "time_step: 6")}',
            (X, PADDED),
            ConfigError,
            "time_step must be 1 to 5, not 6",
        ),
    ],
)
def test_what_is_wrong(text, bottoms, error, message):
    with pytest.raises(error, match=message):
        Single(text, *bottoms).forward()


def distance(a, b):
    """The edit distance, by its definition."""
    if not a or not b:
        return len(a) + len(b)
    changed = distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(changed, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)


@pytest.mark.parametrize("merge", ["true", "false"])
def test_greedy_decoder_against_a_loop(merge):
    text = f'type: "CTCGreedyDecoder" ctc_decoder_param {{ ctc_merge_repeated: {merge} }}'
    x = random(6, 4, 3, seed=7)
    starts = np.ones((6, 4))
    starts[0], starts[4, 1], starts[1, 2] = 0, 0, 0
    labels = seeded(8).integers(0, 2, (5, 4)).astype(float)
    labels[3:, 0] = labels[0, 3] = -1
    y, scores, accuracy = Single(text, x, starts, labels, tops=3).forward()
    errors = 0
    for n in range(4):
        end = next((t for t in range(1, 6) if starts[t, n] == 0), 6)
        best = [int(v) for v in x[:end, n].argmax(1)]
        if merge == "true":
            best = [k for k, _ in groupby(best)]
        read = [k for k in best if k != 2]
        np.testing.assert_array_equal(y[n].ravel(), read + [-1] * (6 - len(read)))
        assert scores[n] == pytest.approx(-x[:end, n].max(1).sum())
        truth = [int(v) for v in labels[:, n]]
        truth = truth[: truth.index(-1)] if -1 in truth else truth
        errors += distance(truth, read) / max(len(truth), len(read), 1)
    assert accuracy == pytest.approx(1 - errors / 4)
    (alone,) = Single(text, x, starts).forward()
    np.testing.assert_array_equal(alone, y)
    _, score = Single(text, x, starts, tops=2).forward()
    np.testing.assert_array_equal(score, scores)


def test_greedy_decoder_without_indicators():
    text = 'type: "CTCGreedyDecoder"'
    x = random(6, 4, 3, seed=7)
    (y,) = Single(text, x).forward()
    np.testing.assert_array_equal(y, Single(text, x, np.ones((6, 4))).forward()[0])
    labels = np.full((4, 8), -1.0)
    errors, right = 0.0, 0
    for n in range(4):
        read = [int(k) for k in y[n].ravel() if k >= 0]
        truth = read if n % 2 else [*read, 1]
        labels[n, : len(truth)] = truth
        labels[n, len(truth)] = 2  # a blank says nothing
        errors += distance(truth, read) / max(len(truth), len(read))
        right += truth == read
    (judged,) = Single(text, x, labels).forward()
    np.testing.assert_allclose(judged.ravel(), [1 - errors / 4, right / 4])
    with pytest.raises(ConfigError, match="with labels as bottom 1 gives one top"):
        Single(text, x, labels, tops=2)


@pytest.mark.gpu
@pytest.mark.parametrize("text", CASES)
def test_on_gpu(text):
    """With labels that are the same from the last row to the first, as the second pass has them."""
    bottoms = list(CASES[text])
    if len(bottoms) > 2:
        bottoms[-1] = np.array([[0, 1, 2], [2, 1, -1], [-1, -1, -1], [2, 1, -1], [0, 1, 2.0]])
    if len(bottoms) == 4:
        bottoms[2] = np.array([2, 2, 1.0])
        bottoms[-1] = np.abs(bottoms[-1])
    check_plain_on_gpu(text, *bottoms, propagate_down=[True] + [False] * (len(bottoms) - 1))


def whole(scores, labels, blank):
    """The share of items that are read as their labels, by a loop."""
    right = 0
    for item, truth in zip(scores, labels, strict=True):
        read, before = [], blank
        for step in item:
            best = int(np.argmax(step))
            if best not in (before, blank):
                read.append(best)
            before = best
        right += read == [int(label) for label in truth if label != blank]
    return right / len(scores)


def whole_case(blank):
    """Some items that read as their labels, others not."""
    read = np.array(
        [[0, 0, 1, 1, 0, 1], [2, 2, 2, 2, 2, 2], [0, 2, 1, 0, 0, 0], [1, 1, 0, 1, 2, 2]]
    )
    scores = 0.1 * random(4, 6, 3) + 5 * np.eye(3)[read]
    labels = np.full((4, 4), float(blank))
    for row, truth in zip(labels, [[1, 1], [2], [2, 1], [1, 2, 1]], strict=True):
        row[: len(truth)] = truth
    return scores, labels


@pytest.mark.parametrize("blank", [0, 1, 2, 7])
def test_whole_labels_against_a_loop(blank):
    text = f'type: "LabelsequenceAccuracy" labelsequence_accuracy_param {{ blank_label: {blank} }}'
    scores, labels = whole_case(blank)
    (accuracy,) = Single(text, scores, labels).forward()
    assert accuracy == whole(scores, labels, blank)
    assert blank or accuracy == 0.75
    assert Single(text, scores[:, :, :, None], labels).forward()[0] == accuracy


def test_whole_labels_of_other_shapes():
    with pytest.raises(ConfigError, match=r"\(N, T, C\) and labels \(N, L\), not"):
        Single('type: "LabelsequenceAccuracy"', random(4, 6, 3), np.zeros((6, 4)))


@pytest.mark.gpu
def test_whole_labels_on_gpu():
    check_plain_on_gpu(
        'type: "LabelsequenceAccuracy"', *whole_case(0), propagate_down=[False, False]
    )
