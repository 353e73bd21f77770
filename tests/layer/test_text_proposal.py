"""CTPN's Python layer against a loop."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import TEST

from .harness import random
from .test_rpn import answers, layer_of

LAYER = "layers.text_proposal_layer", "ProposalLayer"
SHAPES = [(1, 20, 2, 3), (1, 20, 2, 3), (1, 3)]
ROWS = [
    (2, 12),
    (0, 15),
    (-3, 18),
    (-8, 23),
    (-16, 31),
    (-26, 41),
    (-40, 55),
    (-61, 76),
    (-91, 106),
]
"""First and last rows of CTPN's anchors but the last, in the first cell."""


def test_against_a_loop():
    scores, deltas = random(*SHAPES[0]), random(*SHAPES[1], seed=1) * 0.4
    net = layer_of(*LAYER, SHAPES, 2, "'feat_stride': 16", TEST)
    boxes, found = answers(net, scores, deltas, np.array([[30.0, 44, 1]]))
    assert boxes.shape == (60, 4)
    assert found.shape == (60, 1)
    for i, j, a in np.ndindex(2, 3, 9):
        first, last = (row + 16 * i for row in ROWS[a])
        size = last - first + 1
        shift, growth = deltas[0, 2 * a : 2 * a + 2, i, j]
        high = np.exp(growth) * size
        start = shift * size + (first + last) / 2 - high / 2
        want = np.clip([16 * j, start, 16 * j + 15, start + high], 0, [43, 29, 43, 29])
        k = (i * 3 + j) * 10 + a
        np.testing.assert_allclose(boxes[k], want, rtol=1e-5, atol=1e-4)
        assert found[k] == pytest.approx(scores[0, 10 + a, i, j])


def test_refused():
    net = layer_of(*LAYER, [(1, 20, 2, 3), (1, 40, 2, 3), (1, 3)], 2, "'feat_stride': 16", TEST)
    with pytest.raises(ConfigError, match="deltas must have the shape of the scores"):
        net.forward()
    net = layer_of(*LAYER, [(1, 18, 2, 3), (1, 18, 2, 3), (1, 3)], 2, "'feat_stride': 16", TEST)
    with pytest.raises(ConfigError, match=r"10 anchors .* need scores of shape \[1, 20, H, W\]"):
        net.forward()
