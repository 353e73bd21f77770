"""Losses of edges whose labels are bits, against loops over pixels and classes."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

IGNORED = 1 << 31


def bits(n, channels, h, w, classes):
    """Random sets of classes as float32, a few places of them ignored."""
    sets = np.zeros((n, channels, h, w), np.uint32)
    for k in range(classes):
        chosen = seeded(k).random((n, h, w)) < 0.2
        sets[:, k // 32] |= chosen.astype(np.uint32) << (k % 32)
    sets[:, -1] |= (seeded(99).random((n, h, w)) < 0.2).astype(np.uint32) * np.uint32(IGNORED)
    return sets.view(np.float32)


NUMBERS = np.where(seeded(3).random((2, 1, 4, 3)) < 0.3, 1.0, 0.0)
NUMBERS[0, 0, 0] = -1
# type, x, labels
CASES = {
    "of one class": ("ReweightedSigmoidCrossEntropyLoss", random(2, 1, 4, 3), NUMBERS),
    "of classes": (
        "MultiChannelReweightedSigmoidCrossEntropyLoss",
        random(2, 3, 4, 3),
        bits(2, 1, 4, 3, 3),
    ),
    "of many classes": (
        "MultiChannelReweightedSigmoidCrossEntropyLoss",
        random(1, 34, 2, 3),
        bits(1, 2, 2, 3, 34),
    ),
    "without weights": (
        "MultiChannelSigmoidCrossEntropyLoss",
        random(2, 31, 2, 3),
        bits(2, 1, 2, 3, 31),
    ),
    "unlabelled": (
        "MultiChannelReweightedSigmoidCrossEntropyLoss",
        random(1, 2, 2, 2),
        np.full((1, 1, 2, 2), -0.0),
    ),
}


def text(case, weight=2):
    return f'type: "{CASES[case][0]}" loss_weight: {weight}'


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    type_, x, labels = CASES[case]
    sets = labels.astype(np.float32).view(np.uint32)
    total = 0.0
    for n in range(len(x)):
        places = list(np.ndindex(*x.shape[2:]))
        labelled = [p for p in places if not sets[n, -1][p] & IGNORED]
        used = sets[n, : x.shape[1] // 32 + 1]
        edges = [p for p in labelled if any(channel[p] for channel in used)]
        positive, count = len(edges), max(len(labelled), 1)
        weights = ((count - positive) / count, positive / count)
        if type_ == "MultiChannelSigmoidCrossEntropyLoss":
            weights = 1, 1
        for k in range(x.shape[1]):
            for p in labelled:
                is_edge = sets[n, k // 32][p] >> (k % 32) & 1
                if type_.startswith("Reweighted"):
                    is_edge = sets[n, 0][p] != 0
                value = x[n, k][p]
                loss = np.log1p(np.exp(-value)) if is_edge else np.log1p(np.exp(value))
                total += weights[0 if is_edge else 1] * loss
    (loss,) = Single(text(case), x, labels).forward()
    assert loss == pytest.approx(total / len(x))


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    check_gradient(text(case), *CASES[case][1:], propagate_down=[True, False])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    check_plain_on_gpu(text(case), *CASES[case][1:], propagate_down=[True, False])


@pytest.mark.parametrize(
    ("type_", "x", "labels", "message"),
    [
        ("Reweighted", (2, 2, 3), (2, 1, 3), "12 predictions need as many labels, not 6"),
        ("MultiChannelReweighted", (2, 32, 3), (2, 1, 3), "more than K / 32 channels"),
        ("MultiChannel", (2, 3, 3), (2, 2, 3), "labels of one channel, not 2"),
    ],
)
def test_what_does_not_fit_is_refused(type_, x, labels, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "{type_}SigmoidCrossEntropyLoss"', random(*x), np.zeros(labels))
