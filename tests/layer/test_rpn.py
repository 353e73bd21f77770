"""Our Python layers of py-faster-rcnn against its figures and against loops."""

from math import log
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.device import Device
from caffepy.layer.rpn import anchors_of, read_settings
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from caffepy.proto.text import parse

from .harness import FORKS, seeded
from .test_proposal import share

# overlaps none by 0.7, one by more, none at all; the last lies partly outside
TRUTHS = np.array([[20.0, 18, 60, 70, 3], [0, 0, 31, 31, 1], [90, 60, 140, 99, 2]])
INFO = np.array([[96.0, 128, 1]])


def net_of(text: str, phase: int = TRAIN, seed: int = 1) -> Net:
    param = parse(text, NetParameter())
    param.state.phase = phase
    return Net(param, device=Device(seed=seed))


def layer_of(
    module: str, name: str, shapes: list[tuple[int, ...]], tops: int, text: str, phase: int = TRAIN
) -> Net:
    """A net of inputs x0, x1, ... and the Python layer "it" with tops y0, y1, ..."""
    dims = ["".join(f" dim: {size}" for size in shape) for shape in shapes]
    inputs = "".join(
        f'layer {{ name: "x{k}" type: "Input" top: "x{k}" input_param {{ shape {{{d} }} }} }}'
        for k, d in enumerate(dims)
    )
    names = "".join(f' bottom: "x{k}"' for k in range(len(shapes)))
    names += "".join(f' top: "y{k}"' for k in range(tops))
    code = f'module: "{module}" layer: "{name}" param_str: "{text}"'
    layer = f'layer {{ name: "it" type: "Python" {names} python_param {{ {code} }} }}'
    return net_of(inputs + layer, phase)


def answers(net: Net, *inputs: np.ndarray) -> list[np.ndarray]:
    for k, values in enumerate(inputs):
        net.blobs[f"x{k}"].data[...] = values
    net.forward()
    return [net.blobs[name].data.copy() for name in net.blobs if name.startswith("y")]


@pytest.mark.parametrize(
    "text",
    [
        "'feat_stride': 16 \n'scales': !!python/tuple [4, 8]",
        "{'feat_stride': 16, 'scales': [4, 8]}",
        "{feat_stride: 16, Scales: (4, 8)}",
        "\n'FEAT_STRIDE': 16\n\n'scales': [4, 8]\n",
    ],
)
def test_settings_are_read_as_python_and_yaml_write_them(text: str) -> None:
    found = read_settings(text)
    assert found == {"feat_stride": 16, "scales": type(found["scales"])((4, 8))}
    assert read_settings("'a': true\nb: false") == {"a": True, "b": False}


@pytest.mark.parametrize(
    ("module", "name", "shapes", "tops", "text", "message"),
    [
        ("rpn.proposal_layer", "ProposalLayer", [], 1, "16", "param_str is not a dictionary"),
        ("rpn.proposal_layer", "ProposalLayer", [], 1, "", "needs 'feat_stride'"),
        (
            "rpn.proposal_layer",
            "ProposalLayer",
            [],
            1,
            "'stride': 1",
            'no setting "stride" .*on PYTHONPATH',
        ),
        ("rpn.proposal_layer", "Proposals", [], 1, "", 'has no class "Proposals", did you mean'),
        (
            "rpn.proposal_layer",
            "ProposalLayer",
            [(1, 18, 2, 2)],
            1,
            "'feat_stride': 16, 'scales': 8",
            "scales must be numbers above 0, not 8",
        ),
        (
            "rpn.anchor_target_layer",
            "AnchorTargetLayer",
            [(2, 18, 2, 2)],
            4,
            "'feat_stride': 16",
            r"9 anchors .* \[1, 18, H, W\], not \[2, 18, 2, 2\]",
        ),
        ("roi_data_layer.layer", "RoIDataLayer", [], 2, "'num_classes': 21", "not 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    module: str, name: str, shapes: list[tuple[int, ...]], tops: int, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        layer_of(module, name, shapes, tops, text)
    assert ".py:" not in str(told.value)


@pytest.mark.parametrize("case", ["train", "test", "top_n"])
def test_proposals_are_those_of_py_faster_rcnn(case: str) -> None:
    golden = np.load(FORKS / f"proposal_py_{case}.npz")
    text = str(golden["prototxt"])
    if case == "top_n":
        names = ("pre_nms_top_n", "post_nms_top_n", "nms_thresh", "min_size")
        given = "".join(f", 'rpn_{name}': {golden[name]}" for name in names)
        text = text.replace("[2, 4]", f"[2, 4]{given}")
    net = net_of(text, TRAIN if str(golden["phase"]) == "TRAIN" else TEST)
    for key in golden.files:
        if key.startswith("in:"):
            net.blobs[key[3:]].data[...] = golden[key]
    net.forward()
    for name in ("t0", "t1"):
        np.testing.assert_allclose(net.blobs[name].data, golden[f"out:{name}"], 2e-4, 2e-3)


def deltas_by_hand(box: list[float], goal: list[float]) -> list[float]:
    size = [box[k + 2] - box[k] + 1 for k in (0, 1)]
    wanted = [goal[k + 2] - goal[k] + 1 for k in (0, 1)]
    shift = [(goal[k] + wanted[k] / 2 - box[k] - size[k] / 2) / size[k] for k in (0, 1)]
    return [*shift, *(log(wanted[k] / size[k]) for k in (0, 1))]


@pytest.mark.parametrize("truths", [TRUTHS, TRUTHS[:0]], ids=["three", "none"])
def test_targets_of_anchors_against_a_loop(truths: np.ndarray) -> None:
    text = "'feat_stride': 16, 'scales': [1, 2, 3], 'rpn_batchsize': 10000, 'rpn_fg_fraction': 1.0"
    shapes = [(1, 18, 6, 8), truths.shape, (1, 3)]
    net = layer_of("rpn.anchor_target_layer", "AnchorTargetLayer", shapes, 4, text)
    labels, targets, inner, outer = answers(net, 0, truths, INFO)
    assert labels.shape == (1, 1, 54, 8)
    anchors = anchors_of({"scales": (1, 2, 3), "ratios": (0.5, 1, 2)})
    boxes = {
        (a, i, j): [v + 16 * (j, i)[k % 2] for k, v in enumerate(anchor)]
        for a, anchor in enumerate(anchors)
        for i, j in np.ndindex(6, 8)
    }
    inside = {
        at: [share(box, truth) for truth in truths]
        for at, box in boxes.items()
        if min(box[:2]) >= 0 and box[2] < 128 and box[3] < 96
    }
    best = np.max([*inside.values()], axis=0)
    seen = {0: 0, 1: 0, -1: 0}
    for (a, i, j), box in boxes.items():
        shares = inside.get((a, i, j))
        want = -1
        if shares is not None:
            most = max(shares, default=0)
            want = 0 if most < 0.3 else -1
            if most >= 0.7 or any(s == b for s, b in zip(shares, best, strict=True)):
                want = 1
        seen[want] += 1
        assert labels[0, 0, a * 6 + i, j] == want
        goal = deltas_by_hand(box, truths[np.argmax(shares)]) if shares else [0] * 4
        np.testing.assert_allclose(targets[0, 4 * a : 4 * a + 4, i, j], goal, 1e-4, 1e-5)
        np.testing.assert_array_equal(inner[0, 4 * a : 4 * a + 4, i, j], want == 1)
    assert seen[0] > 0
    assert seen[-1] > 0
    assert (seen[1] >= 3) == bool(len(truths))
    drawn = np.repeat(labels.reshape(9, 6, 8) >= 0, 4, axis=0)
    np.testing.assert_allclose(outer[0], drawn / drawn.sum() * 4)


def test_anchors_are_drawn() -> None:
    text = "'feat_stride': 16, 'scales': [1, 2, 3], 'rpn_batchsize': 20, 'rpn_positive_weight': 0.6"
    shapes = [(1, 18, 6, 8), TRUTHS.shape, (1, 3)]
    net = layer_of("rpn.anchor_target_layer", "AnchorTargetLayer", shapes, 4, text)
    first, _, _, outer = answers(net, 0, TRUTHS, INFO)
    second = answers(net, 0, TRUTHS, INFO)[0]
    for labels in (first, second):
        assert 3 <= (labels == 1).sum() <= 10
        assert (labels >= 0).sum() == 20
    assert (first != second).any()
    assert outer.sum() == pytest.approx(4)
    objects = np.repeat(first.reshape(9, 6, 8) == 1, 4, axis=0)
    assert outer[0][objects].sum() == pytest.approx(4 * 0.6)


@pytest.mark.parametrize("classes", [2, 5])
def test_targets_of_proposals_against_a_loop(classes: int) -> None:
    text = f"'num_classes': {classes}, 'batch_size': -1, 'bg_thresh_lo': 0.05"
    rng = seeded()
    low = rng.uniform(0, 60, (40, 2))
    low[:20] = TRUTHS[rng.integers(0, 3, 20), :2] + rng.uniform(-5, 5, (20, 2))
    rois = np.hstack([np.zeros((40, 1)), low, low + rng.uniform(25, 55, (40, 2))])
    net = layer_of("rpn.proposal_target_layer", "ProposalTargetLayer", [(40, 5), (3, 5)], 5, text)
    found, labels, targets, inner, outer = answers(net, rois, TRUTHS)
    assert labels.shape == (len(found), 1, 1, 1)
    every = [*rois.astype(np.float32), *(np.array([0, *truth[:4]]) for truth in TRUTHS)]
    shares = [[share(roi[1:], truth) for truth in TRUTHS] for roi in every]
    objects = [k for k, s in enumerate(shares) if max(s) >= 0.5]
    others = [k for k, s in enumerate(shares) if 0.05 <= max(s) < 0.5]
    assert len(objects) > 4
    assert len(others) > 4
    np.testing.assert_array_equal(found, [every[k] for k in objects + others])
    for row, k in enumerate(objects + others):
        want = np.zeros((classes, 4))
        weights = np.zeros((classes, 4))
        if row < len(objects):
            truth = TRUTHS[np.argmax(shares[k])]
            assert labels[row] == truth[4]
            place = 1 if classes == 2 else int(truth[4])
            want[place] = np.array(deltas_by_hand(every[k][1:], truth)) / (0.1, 0.1, 0.2, 0.2)
            weights[place] = 1
        else:
            assert labels[row] == 0
        np.testing.assert_allclose(targets[row], want.ravel(), 1e-4, 1e-5)
        np.testing.assert_array_equal(inner[row], weights.ravel())
        np.testing.assert_array_equal(outer[row], weights.ravel())


def test_proposals_are_drawn_and_checked() -> None:
    rois = np.hstack([np.zeros((50, 1)), np.tile([20.0, 18, 60, 70], (50, 1))])
    rois[25:, 1:] = [0, 50, 40, 90]
    layer = "rpn.proposal_target_layer", "ProposalTargetLayer", [(50, 5), (3, 5)], 5
    net = layer_of(*layer, "'num_classes': 4, 'batch_size': 16")
    labels = answers(net, rois, TRUTHS)[1]
    assert len(labels) == 16
    assert (labels[:4] > 0).all()
    assert not labels[4:].any()
    with pytest.raises(ConfigError, match="a true box has class 3; num_classes is 3"):
        answers(layer_of(*layer, "'num_classes': 3"), rois, TRUTHS)
    rois[1, 0] = 1
    with pytest.raises(ConfigError, match="rois of one image"):
        answers(net, rois, TRUTHS)


def write_voc(folder: Path) -> None:
    """Two images with objects, one with a difficult one alone."""
    import cv2

    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    (folder / "ImageSets/Main/trainval.txt").write_text("a\nb\nc\n\n")
    for k, name in enumerate("abc"):
        pixels = np.full((40, 60, 3), 50 * (k + 1), np.uint8)
        pixels[:, :30] = 0
        cv2.imwrite(str(folder / f"JPEGImages/{name}.jpg"), pixels)
        box = f"<xmin>{k + 1}</xmin><ymin>11</ymin><xmax>21</xmax><ymax>31</ymax>"
        (folder / f"Annotations/{name}.xml").write_text(
            f"<annotation><size><width>60</width></size><object><name>{'Cat' if k else 'dog'}</name>"
            f"<difficult>{k // 2}</difficult><bndbox>{box}</bndbox></object></annotation>"
        )


def test_images_of_voc(tmp_path: Path) -> None:
    write_voc(tmp_path)
    text = f"'num_classes': 3, 'classes': ['cat', 'dog'], 'scales': [80], 'voc': '{tmp_path}'"
    net = layer_of("roi_data_layer.layer", "RoIDataLayer", [], 3, text)
    assert net.blobs["y0"].shape == (1, 3, 80, 1000)
    want = {
        (0.0, 20, 40, 60, 2.0): 0,  # dog, times 2
        (78.0, 20, 118, 60, 2.0): 0,  # flipped: 59 - 20 and 59 - 0
        (2.0, 20, 40, 60, 1.0): 0,
        (78.0, 20, 116, 60, 1.0): 0,
    }
    for _ in range(3 * 4):
        data, info, truths = answers(net)
        assert data.shape == (1, 3, 80, 120)
        np.testing.assert_array_equal(info, [[80, 120, 2]])
        (truth,) = map(tuple, truths.tolist())
        want[truth] += 1
        dark, bright = (data[0, :, 40, x] for x in ((10, 110) if truth[0] < 50 else (110, 10)))
        np.testing.assert_allclose(dark, np.multiply(-1, [102.9801, 115.9465, 122.7717]), atol=3)
        assert (bright - dark).mean() == pytest.approx(100 if truth[4] == 1 else 50, abs=5)
    assert [*want.values()] == [3] * 4


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    layer = "roi_data_layer.layer", "RoIDataLayer", [], 3
    text = f"'num_classes': 3, 'classes': ['cat', 'cow'], 'voc': '{tmp_path}'"
    with pytest.raises(DataError, match=r"No such file.*give param_str of RoIDataLayer 'voc'"):
        answers(layer_of(*layer, text))
    write_voc(tmp_path)
    with pytest.raises(DataError, match=r'a\.xml: "dog" is not one of the classes cat, cow'):
        answers(layer_of(*layer, text))
    (tmp_path / "Annotations/a.xml").write_text("<annotation")
    with pytest.raises(DataError, match=r"a\.xml: not an annotation of PASCAL VOC"):
        answers(layer_of(*layer, text))
    with pytest.raises(ConfigError, match="20 classes and the background are not num_classes 3"):
        answers(layer_of(*layer, f"'num_classes': 3, 'voc': '{tmp_path}'"))
    net = layer_of("roi_data_layer.layer", "RoIDataLayer", [], 6, "'num_classes': 3")
    with pytest.raises(DataError, match="call its set_roidb"):
        answers(net)


def test_boxes_of_fast_rcnn(tmp_path: Path) -> None:
    write_voc(tmp_path)
    text = "'num_classes': 3, 'scales': [20], 'batch_size': 8, 'pixel_means': [0, 0, 0]"
    net = layer_of("roi_data_layer.layer", "RoIDataLayer", [], 6, text)
    most = np.array([0.9, 0.6, 0.3, 0.2, 0.05, 0.1, 0.15])
    image = {
        "image": str(tmp_path / "JPEGImages/a.jpg"),
        "flipped": False,
        "boxes": np.arange(28).reshape(7, 4),
        "max_overlaps": most,
        "max_classes": np.array([1, 2, 1, 1, 1, 1, 2]),
        "bbox_targets": np.hstack([[[1], [2], *[[0]] * 5], np.arange(28).reshape(7, 4)]),
    }
    net.layers[0].instance.set_roidb([image, image])
    data, rois, labels, targets, inner, outer = answers(net)
    assert data.shape == (2, 3, 20, 30)
    assert rois.shape == (8, 5)
    np.testing.assert_array_equal(rois[:, 0], np.repeat([0, 1], 4))
    for k in (0, 4):
        row = int(rois[k, 1] * 2) // 4  # half the size
        assert row in (0, 1)
        assert labels[k] == row + 1
        at = slice(4 * (row + 1), 4 * (row + 2))
        np.testing.assert_array_equal(targets[k, at], image["bbox_targets"][row, 1:])
        assert inner[k].sum() == inner[k, at].sum() == 4
        np.testing.assert_array_equal(outer[k], inner[k])
        assert not labels[k + 1 : k + 4].any()
        assert (rois[k + 1 : k + 4, 1] * 2 // 4 != 4).all()


def test_a_module_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "roi_data_layer").mkdir()
    (tmp_path / "roi_data_layer/__init__.py").write_text("")
    (tmp_path / "roi_data_layer/layer.py").write_text(
        dedent(
            """
            class RoIDataLayer:
                def reshape(self, bottom, top):
                    top[0].reshape(7)

                def forward(self, bottom, top):
                    pass
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    net = layer_of("roi_data_layer.layer", "RoIDataLayer", [], 1, "")
    assert net.blobs["y0"].shape == (7,)


def test_a_faster_rcnn_trains(tmp_path: Path) -> None:
    """From images to all four losses, whose shapes change from step to step."""
    write_voc(tmp_path)
    text = (Path(__file__).parent / "faster_rcnn.prototxt").read_text()
    net = net_of(text.replace("VOC", str(tmp_path)))
    losses = []
    for _ in range(12):
        net.clear_param_diffs()
        net.forward()
        net.backward()
        losses.append([float(net.blobs[f"loss{k}"].data) for k in range(4)])
        for blob in (blob for layer in net.layers for blob in layer.blobs):
            assert np.isfinite(blob.diff).all()
            blob.data[...] -= 0.02 * blob.diff
    sums = np.sum(losses, axis=1)
    assert sums[-4:].mean() < 0.8 * sums[:4].mean()
