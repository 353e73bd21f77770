"""Our Python layers of DetectNet: boxes of maps, and how many of them are true."""

from math import log

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.layer.detectnet_boxes import group, score
from caffepy.proto.caffe_pb2 import TEST

from .harness import seeded
from .test_detectnet import maps_of, tables, transformation
from .test_rpn import answers, layer_of, net_of

CLUSTERING, MEAN_AP = (f"caffe.layers.detectnet.{name}" for name in ("clustering", "mean_ap"))


def groups(boxes, least, share):
    """What OpenCV's groupRectangles says: like boxes are joined pair by pair."""
    kinds = list(range(len(boxes)))
    for i, a in enumerate(boxes):
        for j, b in enumerate(boxes):
            delta = share * (min(a[2], b[2]) + min(a[3], b[3])) / 2
            ends = [(a[k], b[k]) for k in (0, 1)] + [
                (a[k] + a[k + 2], b[k] + b[k + 2]) for k in (0, 1)
            ]
            if all(abs(p - q) <= delta for p, q in ends):
                old, new = kinds[j], kinds[i]
                kinds = [new if kind == old else kind for kind in kinds]
    members = [
        [b for b, k in zip(boxes, kinds, strict=True) if k == kind] for kind in dict.fromkeys(kinds)
    ]
    members = [m for m in members if len(m) > least]
    means = [[round(sum(b[k] for b in m) / len(m)) for k in range(4)] for m in members]
    out = []
    for i, (x, y, w, h) in enumerate(means):
        count = len(members[i])
        for j, (x2, y2, w2, h2) in enumerate(means):
            dx, dy, other = round(w2 * share), round(h2 * share), len(members[j])
            within = (
                x >= x2 - dx and y >= y2 - dy and x + w <= x2 + w2 + dx and y + h <= y2 + h2 + dy
            )
            if i != j and within and (other > max(3, count) or count < 3):
                break
        else:
            out.append(((x, y, w, h), count))
    return out


@pytest.mark.parametrize(("least", "share"), [(1, 0.02), (2, 0.2), (3, 0.4), (1, 0.5)])
def test_like_boxes_are_grouped(least, share):
    rng = seeded(least)
    centres = rng.integers(0, 60, (9, 4)) + np.array([0, 0, 10, 10])
    boxes = centres[rng.integers(0, 9, 70)] + rng.integers(-2, 3, (70, 4))
    means, counts = group(boxes, least, share)
    wanted = groups(boxes.tolist(), least, share)
    assert [(tuple(m), c) for m, c in zip(means.tolist(), counts.tolist(), strict=True)] == wanted
    assert wanted


def test_detected_and_true_boxes_of_maps():
    """What the maps of true boxes say is found again, of both classes."""
    boxes = [(3, 4, 20, 16, 1), (30, 10, 15, 14, 8), (1, 20, 12, 11, 8)]
    maps = maps_of(boxes, {1: 0, 8: 1})[None]
    shapes = [(1, 2, 8, 12), (1, 4, 8, 12)]
    inputs = maps[:, 8:], maps[:, 1:5]
    true = layer_of(CLUSTERING, "ClusterGroundtruth", shapes, 2, "48, 32, 4, 2", TEST)
    first, second = answers(true, *inputs)
    assert first.shape == (1, 50, 5)
    assert [row for row in first[0].tolist() if any(row)] == [[3, 4, 23, 20, 0]]
    assert sorted(row for row in second[0].tolist() if any(row)) == [
        [1, 20, 13, 31, 0],
        [30, 10, 45, 24, 0],
    ]
    text = "48, 32, 4, 0.6, 1, 0.02, 12, 2"
    found = answers(layer_of(CLUSTERING, "ClusterDetections", shapes, 2, text, TEST), *inputs)
    cells = int(maps[0, 8].sum())
    np.testing.assert_allclose(found[0][0, 0], [3, 4, 23, 20, log(cells)], rtol=1e-3)
    assert found[1][0, 0, :4].tolist() == [30, 10, 45, 24]  # the other is too low
    assert not found[1][0, 1:].any()


def test_what_is_true_false_and_missed():
    true = np.array([[0.0, 0, 10, 10], [20, 20, 40, 40], [20, 20, 40, 41]])
    found = np.array([[50.0, 50, 60, 60], [20, 20, 40, 40], [0, 0, 10, 8]])
    scored = score(true, found)
    assert scored[:, 4].tolist() == [1, 1, 2, 3]
    assert scored[0, :4].tolist() == found[1].tolist()
    assert scored[3, :4].tolist() == true[2].tolist()
    lists = np.zeros((2, 2, 50, 5))
    lists[0, 0, :3, :4], lists[1, 0, :3, :4] = true, found
    marked = answers(layer_of(MEAN_AP, "ScoreDetections", [(2, 50, 5)] * 2, 1, "", TEST), *lists)[0]
    np.testing.assert_allclose(marked[0, :4], scored)
    assert not marked[1].any()
    values = answers(layer_of(MEAN_AP, "mAP", [(2, 50, 5)], 3, "48, 32, 4", TEST), marked)
    np.testing.assert_allclose(np.ravel(values), [4 / 9 * 100, 200 / 3, 200 / 3], rtol=1e-5)
    none = answers(layer_of(MEAN_AP, "mAP", [(2, 50, 5)], 3, "", TEST), 0 * marked)
    assert not np.any(none)


def test_a_net_finds_its_labels_again():
    """From the boxes' table over maps to lists and precision, as the tests of DetectNet go."""
    text = f"""
    layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 3 dim: 32 dim: 48 }} }} }}
    layer {{ name: "t" type: "Input" top: "t" input_param {{ shape {{ dim: 2 dim: 1 dim: 8 dim: 16 }} }} }}
    layer {{ name: "it" bottom: "x" bottom: "t" top: "image" top: "maps" {transformation()} }}
    layer {{ name: "slice" type: "Slice" bottom: "maps" top: "front" top: "box" top: "more" top: "class"
      slice_param {{ slice_point: 1 slice_point: 5 slice_point: 8 }} }}
    layer {{ name: "true" type: "Python" bottom: "class" bottom: "box" top: "true"
      python_param {{ module: "{CLUSTERING}" layer: "ClusterGroundtruth" param_str: "48, 32, 4" }} }}
    layer {{ name: "found" type: "Python" bottom: "class" bottom: "box" top: "found"
      python_param {{ module: "{CLUSTERING}" layer: "ClusterDetections" param_str: "48,32,4,0.5,1,0.02,5" }} }}
    layer {{ name: "score" type: "Python" bottom: "true" bottom: "found" top: "marked"
      python_param {{ module: "{MEAN_AP}" layer: "ScoreDetections" }} }}
    layer {{ name: "map" type: "Python" bottom: "marked" top: "map" top: "precision" top: "recall"
      python_param {{ module: "{MEAN_AP}" layer: "mAP" param_str: "48, 32, 4" }} }}
    """
    net = net_of(text, TEST)
    net.blobs["t"].data[...] = tables([(4, 4, 20, 16, 1)], [(8, 4, 30, 20, 1)])
    net.forward()
    assert [net.blobs[name].data.item() for name in ("map", "precision", "recall")] == [100] * 3


@pytest.mark.parametrize(
    ("name", "shapes", "tops", "text", "message"),
    [
        ("ClusterGroundtruth", [(1, 1, 8, 12), (1, 4, 8, 12)], 1, "48, 32", "param_str of"),
        ("ClusterDetections", [(1, 1, 8, 12), (1, 4, 8, 12)], 1, "48, 32, 4", "least_height"),
        ("ClusterGroundtruth", [(1, 1, 8, 12), (1, 4, 8, 12)], 1, "48, nan, 4", "param_str of"),
        ("ClusterGroundtruth", [(1, 1, 8, 12), (1, 4, 8, 12)], 1, "48, 32, 4, inf", "param_str of"),
        (
            "ClusterGroundtruth",
            [(1, 1, 8, 12), (1, 4, 8, 12)],
            1,
            "48, 32, 40",
            "too large for 48 x 32",
        ),
        ("ClusterGroundtruth", [(1, 1, 8, 12), (1, 4, 8, 12)], 1, "48, 32, 4, 2", "of 2 classes"),
        ("ClusterGroundtruth", [(1, 2, 8, 12), (1, 4, 8, 12)], 1, "48, 32, 4", "needs maps"),
        ("ScoreDetections", [(1, 50, 5), (2, 50, 5)], 1, "", "two lists"),
        ("ScoreDetections", [(1, 50, 5)], 1, "", "two bottoms"),
        ("mAP", [(1, 50, 5)], 1, "", "three tops"),
    ],
)
def test_what_is_refused(name, shapes, tops, text, message):
    module = CLUSTERING if name.startswith("Cluster") else MEAN_AP
    with pytest.raises(ConfigError) as error:
        layer_of(module, name, shapes, tops, text, TEST)
    assert message in str(error.value)
