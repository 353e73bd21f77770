"""Boxes that nets of SSD, YOLO and Faster R-CNN find in images, and `caffepy detect` with them.

The nets of these tests see images as 2 x 2 cells, and find a box of half a cell's sides in the
middle of each red cell (class 1) and blue cell (class 2).
"""

import json
from itertools import chain
from pathlib import Path

import cv2
import numpy as np
import pytest

import caffepy
from caffepy.cli import main
from caffepy.commands.detect_boxes import BoxDetections, check_output, detect_boxes, drawings
from caffepy.core.errors import ConfigError, DataError, UsageError

CELLS = """
layer { name: "in" type: "Input" top: "in" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "cells" type: "Pooling" bottom: "in" top: "cells"
  pooling_param { pool: AVE kernel_size: 4 stride: 4 } }
"""
CONV = """
layer {{ name: "{0}" type: "Convolution" bottom: "cells" top: "{0}"
  convolution_param {{ num_output: {1} kernel_size: 1 }} }}
"""
SSD = f"""{CELLS}
layer {{ name: "prior" type: "PriorBox" bottom: "cells" bottom: "in" top: "prior"
  prior_box_param {{ min_size: 2 variance: 0.1 }} }}
{CONV.format("loc", 4)}
layer {{ name: "loc_p" type: "Permute" bottom: "loc" top: "loc_p"
  permute_param {{ order: 0 order: 2 order: 3 order: 1 }} }}
layer {{ name: "loc_f" type: "Flatten" bottom: "loc_p" top: "loc_f" }}
{CONV.format("scores", 3)}
layer {{ name: "p" type: "Softmax" bottom: "scores" top: "p" }}
layer {{ name: "p_p" type: "Permute" bottom: "p" top: "p_p"
  permute_param {{ order: 0 order: 2 order: 3 order: 1 }} }}
layer {{ name: "p_f" type: "Flatten" bottom: "p_p" top: "p_f" }}
layer {{ name: "found" type: "DetectionOutput" bottom: "loc_f" bottom: "p_f" bottom: "prior"
  top: "found" detection_output_param {{ num_classes: 3 code_type: CENTER_SIZE
  nms_param {{ nms_threshold: 0.45 }} confidence_threshold: 0.01 }} }}
"""
YOLO = f"""{CELLS}
{CONV.format("scores", 7)}
layer {{ name: "found" type: "YoloDetectionOutput" bottom: "scores" top: "found"
  yolo_detection_output_param {{ num_classes: 2 num_box: 1 biases: 0.5 biases: 0.5
  confidence_threshold: 0.01 }} }}
"""
NETS = {"ssd": SSD, "yolo": YOLO}
RCNN = """
layer { name: "in" type: "Input" top: "in" input_param { shape { dim: 1 dim: 3 dim: 32 dim: 32 } } }
layer { name: "info" type: "Input" top: "im_info" input_param { shape { dim: 1 dim: 3 } } }
layer { name: "cells" type: "Pooling" bottom: "in" top: "cells"
  pooling_param { pool: AVE kernel_size: 16 stride: 16 } }
layer { name: "rpn_p" type: "Convolution" bottom: "cells" top: "rpn_p"
  convolution_param { num_output: 2 kernel_size: 1 bias_filler { type: "constant" value: 0.5 } } }
layer { name: "rpn_d" type: "Convolution" bottom: "cells" top: "rpn_d"
  convolution_param { num_output: 4 kernel_size: 1 } }
layer { name: "proposal" type: "Python" bottom: "rpn_p" bottom: "rpn_d" bottom: "im_info" top: "rois"
  python_param { module: "rpn.proposal_layer" layer: "ProposalLayer" param_str:
  "{'feat_stride': 16, 'scales': [1], 'ratios': [1], 'rpn_min_size': 0}" } }
layer { name: "pool" type: "ROIPooling" bottom: "cells" bottom: "rois" top: "pool"
  roi_pooling_param { pooled_w: 2 pooled_h: 2 spatial_scale: 0.0625 } }
layer { name: "scores" type: "InnerProduct" bottom: "pool" top: "scores"
  inner_product_param { num_output: 3 } }
layer { name: "cls_prob" type: "Softmax" bottom: "scores" top: "cls_prob" }
layer { name: "bbox_pred" type: "InnerProduct" bottom: "pool" top: "bbox_pred"
  inner_product_param { num_output: OUT } }
"""
RED, BLUE = (0, 0, 255), (255, 0, 0)  # as OpenCV has them


def picture(width: int, height: int, *cells: tuple[int, int, tuple[int, int, int]]) -> np.ndarray:
    """An image, blue first, black but for its quarters (row, column) of these colours."""
    image = np.zeros((2, 2, 3), np.uint8)
    for row, column, colour in cells:
        image[row, column] = colour
    return image.repeat(height // 2, axis=0).repeat(width // 2, axis=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the nets, their weights, and three images in photos/."""
    monkeypatch.chdir(tmp_path)
    for name, text in NETS.items():
        Path(f"{name}.prototxt").write_text(text)
        net = caffepy.Net(f"{name}.prototxt", caffepy.TEST)
        weights, bias = (blob.data for blob in net.params["scores"])
        weights[...] = bias[...] = 0
        weights[-2:, :, 0, 0] = [[0, 0, 20 / 255], [20 / 255, 0, 0]]  # of red, of blue
        if name == "ssd":
            bias[0] = 10  # the background
            net.params["loc"][0].data[...] = 0
        else:
            weights[4] = 20 / 255  # an object
            bias[4] = -10
        net.save(f"{name}.caffemodel")
    Path("photos").mkdir()
    cv2.imwrite("photos/a.png", picture(200, 100, (0, 0, RED), (1, 1, BLUE)))
    cv2.imwrite("photos/b.bmp", picture(40, 40))
    cv2.imwrite("photos/c.png", picture(80, 160, (1, 0, BLUE)))
    return tmp_path


def found_by(net: str, *inputs: str, **flags: object) -> BoxDetections:
    files = inputs or ("photos",)
    return detect_boxes(files, f"{net}.prototxt", [f"{net}.caffemodel"], **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("net", NETS)
def test_boxes_are_in_pixels_of_each_image(net: str) -> None:
    found = found_by(net, batch=2)
    assert [image.image for image in found.images] == [
        "photos/a.png",
        "photos/b.bmp",
        "photos/c.png",
    ]
    a, b, c = found.images
    assert [
        (box.number, *np.round(box.sides, 3)) for box in sorted(a.boxes, key=lambda b: b.number)
    ] == [
        (1, 25, 12.5, 75, 37.5),
        (2, 125, 62.5, 175, 87.5),
    ]
    assert (a.width, a.height, b.boxes) == (200, 100, [])
    assert [(box.number, *np.round(box.sides, 3)) for box in c.boxes] == [(2, 10, 100, 30, 140)]
    score = 1 / (1 + np.exp(-10)) if net == "ssd" else 1 / (1 + np.exp(-10)) / (1 + np.exp(-20))
    assert c.boxes[0].score == pytest.approx(score, rel=1e-3)
    lines = found.table().splitlines()
    assert lines[0].split() == ["image", "class", "score", "xmin", "ymin", "xmax", "ymax"]
    assert lines[3].split() == ["photos/b.bmp", *"------"]
    assert lines[4].split()[3:] == ["10.0", "100.0", "30.0", "140.0"]


@pytest.mark.parametrize("outputs", [12, 8])
def test_regions(outputs: int) -> None:
    """A region's boxes are moved as py-faster-rcnn moves them, in pixels of the image."""
    Path("rcnn.prototxt").write_text(RCNN.replace("OUT", str(outputs)))
    net = caffepy.Net("rcnn.prototxt", caffepy.TEST)
    weights, bias = (blob.data for blob in net.params["scores"])
    weights[...] = 0
    corner = weights.reshape(3, 3, 2, 2)[:, :, 0, 0]  # of the region: its own cell
    corner[1, 2] = corner[2, 0] = 20 / 255
    bias[0] = 10
    deltas = np.linspace(-0.3, 0.2, outputs)
    net.params["bbox_pred"][0].data[...] = 0
    net.params["bbox_pred"][1].data[...] = deltas
    net.params["rpn_d"][0].data[...] = 0
    net.params["rpn_p"][0].data[...] = 0
    net.save("rcnn.caffemodel")
    images = found_by("rcnn", sides=(32, 64)).images
    cells = [[(1, 0, 0), (1, 1, 0), (2, 2, 1), (2, 3, 1)], [], [(2, 0, 2), (2, 0, 3)]]  # of 16 x 16
    for image, scale, regions in zip(images, (0.32, 0.8, 0.4), cells, strict=True):
        expected = []
        for label, x, y in regions:
            d = deltas.reshape(-1, 4)[label if outputs == 12 else -1]
            sides = []
            for start, shift, grow, most in (
                (x, *d[::2], image.width),
                (y, *d[1::2], image.height),
            ):
                last = min(16 * start + 16, most * scale - 1)  # the proposal is moved alike
                size = (last - 16 * start) / scale + 1
                middle = 16 * start / scale + size / 2 + shift * size
                ends = middle + np.array([-1, 1]) * np.exp(grow) * size / 2
                sides.append(ends.clip(0, most - 1))
            expected.append([label, *np.transpose(sides).ravel()])
        found = sorted([box.number, *box.sides] for box in image.boxes)
        np.testing.assert_allclose(
            np.reshape(found, (-1, 5)), np.reshape(sorted(expected), (-1, 5)), atol=1e-3
        )
        assert all(box.score > 0.99 for box in image.boxes)


LEARNING = """
layer { name: "truth" type: "Input" top: "gt_boxes" input_param { shape { dim: 2 dim: 5 } } }
layer { name: "roi-data" type: "Python" bottom: "rois" bottom: "gt_boxes"
  top: "chosen" top: "labels" top: "bbox_targets" top: "inside" top: "outside"
  python_param { module: "rpn.proposal_target_layer" layer: "ProposalTargetLayer"
  param_str: "'num_classes': 3" } }
layer { name: "loss" type: "SmoothL1Loss" bottom: "bbox_pred" bottom: "bbox_targets"
  bottom: "inside" bottom: "outside" top: "loss" loss_weight: 1 }
"""


def test_regions_of_a_net_as_it_was_trained() -> None:
    """Its targets are divided by their standard deviations, which published weights are not."""
    text = RCNN.replace("OUT", "12")
    Path("rcnn.prototxt").write_text(text)
    pooled = 'bottom: "cells" bottom: "rois" top: "pool"'
    assert pooled in text
    start = text.index('layer { name: "pool"')
    chosen = text[start:].replace(pooled, pooled.replace("rois", "chosen"))
    roi_data, loss = LEARNING.split('layer { name: "loss"')
    Path("train.prototxt").write_text(
        text[:start] + roi_data + chosen + 'layer { name: "loss"' + loss
    )
    trained, published = (
        caffepy.Net(f"{name}.prototxt", phase)
        for name, phase in (("train", caffepy.TRAIN), ("rcnn", caffepy.TEST))
    )
    deltas = np.linspace(-0.3, 0.2, 12)
    for net, stds in (trained, (0.1, 0.1, 0.2, 0.2)), (published, (1, 1, 1, 1)):
        for name in ("scores", "bbox_pred", "rpn_d", "rpn_p"):
            net.params[name][0].data[...] = 0
        net.params["scores"][1].data[...] = 0, 10, 8
        net.params["bbox_pred"][1].data[...] = deltas / np.tile(stds, 3)
        net.save("rcnn.caffemodel")
        found = [image.boxes for image in found_by("rcnn", sides=(32, 64), threshold=0.1).images]
        if net is trained:
            learned = found
    assert [len(boxes) for boxes in learned] == [len(boxes) for boxes in found] != [0, 0, 0]
    for one, other in zip(chain(*learned), chain(*found), strict=True):
        assert one.number == other.number
        np.testing.assert_allclose(one.sides, other.sides, atol=1e-3)


def test_the_best_comes_first_and_those_below_the_threshold_not() -> None:
    dim = tuple(v * 6 // 10 for v in RED)
    cv2.imwrite("d.png", picture(16, 16, (0, 0, dim), (1, 1, BLUE)))
    boxes = found_by("ssd", "d.png").images[0].boxes
    assert [box.number for box in boxes] == [2, 1]
    assert boxes[0].score > 0.99 > boxes[1].score > 0.8
    assert [box.number for box in found_by("ssd", "d.png", threshold=0.99).images[0].boxes] == [2]
    many = found_by("ssd", "d.png", threshold=0).images[0].boxes
    assert len(many) == 2, "confidence_threshold of the net"


def test_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("map.prototxt").write_text(
        'item { name: "none" label: 0 } item { name: "n1" label: 1 display_name: "berry" } '
        'item { name: "sky" label: 2 }'
    )
    Path("names.txt").write_text("berry\nsky\n")
    Path("bad.png").write_text("bad")
    line = "--model ssd.prototxt --weights ssd.caffemodel --labels map.prototxt --draw drawn/all"
    assert main.run(["detect", "photos", "bad.png", "boxes.json", *line.split()]) == 4
    shown = capsys.readouterr()
    table = shown.out.splitlines()
    assert " ".join(table[0].split()) == "image label class score xmin ymin xmax ymax"
    assert " ".join(table[4].split()) == "photos/c.png sky 2 0.999955 10.0 100.0 30.0 140.0"
    assert table[5].split() == ["bad.png", "unreadable", *"-----"]
    assert shown.err == "caffepy: error: bad.png: not an image that can be decoded (3 bytes)\n"
    a, b, c, bad = json.loads(Path("boxes.json").read_text())
    assert (a["image"], a["width"], a["height"]) == ("photos/a.png", 200, 100)
    assert sorted((box["class"], box["label"]) for box in a["boxes"]) == [(1, "berry"), (2, "sky")]
    assert b["boxes"] == []
    box = c["boxes"][0]
    assert [round(box[s], 3) for s in ("xmin", "ymin", "xmax", "ymax")] == [10, 100, 30, 140]
    assert bad == {
        "image": "bad.png",
        "error": "bad.png: not an image that can be decoded (3 bytes)",
    }

    assert sorted(p.name for p in Path("drawn/all").iterdir()) == ["a.png", "b.bmp", "c.png"]
    before, after = cv2.imread("photos/c.png"), cv2.imread("drawn/all/c.png")
    changed = np.any(before != after, axis=2)
    assert changed[100, 10:30].all()
    assert changed[100:140, 30].all()
    assert not changed[105:138, 12:28].any(), "inside of the box"
    assert not changed[:80].any()
    assert len(np.unique(after[140, 10:30], axis=0)) == 1, "a line of one colour"
    np.testing.assert_array_equal(cv2.imread("drawn/all/b.bmp"), cv2.imread("photos/b.bmp"))

    line = "--model yolo.prototxt --weights yolo.caffemodel --labels names.txt"
    assert main.run(["detect", "photos/c.png", "bad.png", *line.split(), "--json"]) == 4
    c, bad = json.loads(capsys.readouterr().out)
    assert c["boxes"][0]["label"] == "sky"
    assert main.run(["detect", "photos/c.png", "bad.png", *line.split()]) == 4
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows[1][:3] == ["photos/c.png", "sky", "2"]
    assert rows[2][:2] == ["bad.png", "unreadable"]


def test_images_that_cannot_be_read_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "detect gone.png --model ssd.prototxt --weights ssd.caffemodel"
    message = "gone.png: cannot be read: no such file or directory"
    assert main.run(line.split()) == 4
    assert capsys.readouterr() == ("", f"caffepy: error: {message}\n")
    assert main.run([*line.split(), "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == [{"image": "gone.png", "error": message}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "photos boxes.csv --model ssd",
            'the extension of "boxes.csv" must name the format: .json',
        ),
        ("photos boxes.txt --model ssd", 'extension of "boxes.txt" must name the format: .json'),
        ("photos no/boxes.json --model ssd", 'cannot write "no/boxes.json"'),
        ("photos --model ssd --context-pad 4", "--context-pad is for nets that score windows"),
        ("photos --model ssd --windows w.csv", "--windows is for nets that score windows"),
        ("photos --model ssd --sides 600", "--sides: give a shorter and a longer side"),
        ("photos --model ssd --sides 600,500", "--sides: give a shorter and a longer side"),
        ("photos --model ssd --threshold 2", "not in the range 0<=x<=1"),
        ("photos --model ssd --draw photos", '"photos/a.png" is an image to search'),
        ("photos photos/../photos/a.png --model ssd --draw d", 'be drawn to "d/a.png"'),
        ("photos --model ssd --draw ssd.prototxt/d", 'cannot make the folder "ssd.prototxt/d"'),
        (
            "photos --model cells",
            "cells.prototxt has no layer that finds boxes in images (Detection",
        ),
        ("photos/a.png --model cells", "cells.prototxt has no layer that finds boxes"),
        ("a.csv b.csv c.csv --model cells", "cells.prototxt has no layer that finds boxes"),
        ("w.csv --model cells --draw d", "--draw is for nets that find boxes"),
        ("w.csv --model cells --ext png", "--ext is for nets that find boxes"),
    ],
)
def test_what_cannot_be_typed(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("cells.prototxt").write_text(CELLS)
    words = [f"{word}.prototxt" if word in ("ssd", "cells") else word for word in line.split()]
    assert main.run(["detect", *words, "--weights", "ssd.caffemodel"]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit() -> None:
    Path("names.txt").write_text("berry\n")
    with pytest.raises(ConfigError, match=r"names.txt: 1 labels, a line each, for the 2 classes"):
        found_by("yolo", labels="names.txt")
    with pytest.raises(ConfigError, match=r"no.txt: cannot be read"):
        found_by("yolo", labels="no.txt")
    Path("none").mkdir()
    with pytest.raises(DataError, match=r"none: no files \*.gif are in this folder"):
        found_by("ssd", "none", extensions=["gif"])
    Path("two.prototxt").write_text(
        'layer { name: "i" type: "Input" top: "im_info" input_param { shape { dim: 1 dim: 3 } } }'
    )
    Path("ssd.prototxt").write_text(SSD + Path("two.prototxt").read_text())
    with pytest.raises(ConfigError, match=r"whose inputs are images, not in Blob.*im_info"):
        found_by("ssd")
    Path("rcnn.prototxt").write_text(
        RCNN.replace("dim: 1 dim: 3 } }", "dim: 5 } }").replace("OUT", "8")
    )
    with pytest.raises(ConfigError, match=r"images and then their height, width and scale, not in"):
        detect_boxes(["photos"], "rcnn.prototxt", [])
    Path("ssd.prototxt").write_text(SSD.replace("dim: 3", "dim: 4"))
    with pytest.raises(ConfigError, match="takes images of 4 channels"):
        detect_boxes(["photos"], "ssd.prototxt", [])


def test_names_of_drawings() -> None:
    assert drawings(["x/a.ppm", "b.JPG", "b.JPG"], "d") == {
        "x/a.ppm": "d/a.ppm.png",
        "b.JPG": "d/b.JPG",
    }
    with pytest.raises(UsageError, match=r'two images would be drawn to "d/a.png"'):
        drawings(["x/a.png", "y/a.png"], "d")
    with pytest.raises(UsageError, match=r"must name the format: .json"):
        check_output("boxes.h5")
