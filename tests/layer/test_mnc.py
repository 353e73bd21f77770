"""MNC's Python layers in the TEST phase, against loops."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import TEST, TRAIN

from .harness import random
from .test_rpn import INFO, answers, layer_of

BRIDGE = "pylayer.stage_bridge_layer", "StageBridgeLayer"


def test_masks_become_images():
    net = layer_of("pylayer.mask_layer", "MaskLayer", [(3, 16)], 1, "", TEST)
    masks = random(3, 16).astype(np.float32)
    (y,) = answers(net, masks)
    np.testing.assert_array_equal(y, masks.reshape(3, 1, 4, 4))


def test_boxes_move_by_the_deltas_of_their_likeliest_class():
    rois = np.array([[0, 10.0, 20, 59, 69], [0, 0, 0, 30, 40], [0, 90, 50, 120, 90]])
    deltas, scores = random(3, 12, seed=1) * 0.3, random(3, 3, seed=2)
    net = layer_of(*BRIDGE, [(3, 5), (3, 12), (3, 3), (1, 3)], 1, "", TEST)
    (y,) = answers(net, rois, deltas, scores, INFO)
    for roi, delta, score, got in zip(rois, deltas, scores, y, strict=True):
        k = 4 * int(np.argmax(score))
        width, height = roi[3] - roi[1] + 1, roi[4] - roi[2] + 1
        x = roi[1] + width / 2 + delta[k] * width
        y0 = roi[2] + height / 2 + delta[k + 1] * height
        w, h = width * np.exp(delta[k + 2]) / 2, height * np.exp(delta[k + 3]) / 2
        want = np.clip([x - w, y0 - h, x + w, y0 + h], 0, [127, 95, 127, 95])
        np.testing.assert_allclose(got, [0, *want], rtol=1e-5, atol=1e-4)


def test_proposals_are_those_of_py_faster_rcnn():
    shapes = [(1, 18, 4, 5), (1, 36, 4, 5), (1, 3)]
    given = random(*shapes[0]), random(*shapes[1], seed=1) * 0.2, INFO
    text = "{'feat_stride': 16, 'rpn_min_size': 4}"
    theirs = answers(layer_of("rpn.proposal_layer", "ProposalLayer", shapes, 1, text, TEST), *given)
    text = "{'feat_stride': 16, 'rpn_min_size': 4, 'gradient_scale': 1}"
    ours = answers(
        layer_of("pylayer.proposal_layer", "ProposalLayer", shapes, 1, text, TEST), *given
    )
    assert len(ours[0]) > 3
    np.testing.assert_array_equal(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("module", "name", "shapes", "phase", "message"),
    [
        ("pylayer.mask_layer", "MaskLayer", [(3, 16)], TRAIN, "runs in the TEST phase only; to train"),
        ("pylayer.mask_layer", "MaskLayer", [(3, 15)], TEST, r"needs masks \(R, S \* S\)"),
    ],
)  # fmt: skip
def test_refused(module, name, shapes, phase, message):
    with pytest.raises(ConfigError, match=message):
        layer_of(module, name, shapes, 1, "", phase)


def test_deltas_must_be_those_of_the_scores():
    net = layer_of(*BRIDGE, [(3, 5), (3, 8), (3, 3), (1, 3)], 1, "", TEST)
    with pytest.raises(ConfigError, match="3 scores of a box need 12 deltas"):
        net.forward()
