from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy import models
from caffepy.cli import main
from caffepy.net import Net
from caffepy.net.weights import load_weights, save_binary
from caffepy.proto.binary import blob_to_array, read_net
from caffepy.proto.caffe_pb2 import TEST
from caffepy.proto.text import read_net as read_text
from caffepy.report import grid

pytestmark = pytest.mark.usefixtures("folder")

WEIGHTS = str(Path(__file__).parents[1] / "golden" / "digits" / "digits_iter_500.caffemodel")
TRAIN_VAL = str(models.path("digits", "train_val"))
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("flags", "layer"), [("", "conv1"), ("--layer conv2", "conv2")])
@pytest.mark.parametrize("form", ["binary", "HDF5"])
def test_filters(form: str, flags: str, layer: str, capsys: Captured) -> None:
    weights = WEIGHTS
    if form == "HDF5":
        weights = "w.h5"
        assert main.run(["weights", "convert", WEIGHTS, weights]) == 0
    assert main.run(["visualize", "f.png", "-weights", weights, *flags.split()]) == 0
    stored = next(one for one in read_net(WEIGHTS).layer if one.name == layer)
    filters = blob_to_array(stored.blobs[0])
    np.testing.assert_array_equal(cv2.imread("f.png"), grid.grid(*grid.filter_tiles(filters)))
    assert capsys.readouterr().out == f"{layer} ({' x '.join(map(str, filters.shape))}): f.png\n"


def values_of(blob: str, image: int) -> np.ndarray:
    """Return a blob of the digits net for an image of the first batch of test data."""
    param = read_text(TRAIN_VAL)
    param.state.phase = TEST
    net = Net(param, path=TRAIN_VAL)
    load_weights(net, WEIGHTS)
    net.forward()
    values: np.ndarray = net.blobs[blob].host_data[image].copy()
    net.close()
    return values


@pytest.mark.parametrize("blob", ["conv1", "ip1", "ip2"])
def test_what_a_net_makes_of_its_data(blob: str) -> None:
    flags = [] if blob == "conv1" else ["--blob", blob]
    line = ["visualize", "b.png", "--weights", WEIGHTS, "--model", TRAIN_VAL, "--item", "5", *flags]
    assert main.run(line) == 0
    np.testing.assert_array_equal(
        cv2.imread("b.png"), grid.grid(*grid.blob_tiles(values_of(blob, 5)))
    )


def test_what_a_net_makes_of_an_image() -> None:
    cv2.imwrite("digit.png", (values_of("data", 3)[0] / 0.00416667).round().astype(np.uint8))
    line = ["visualize", "b.png", "--weights", WEIGHTS, "--model", "digits", "--image", "digit.png"]
    assert main.run([*line, "--input-scale", "0.00416667", "--blob", "pool1"]) == 0
    expected = grid.grid(*grid.blob_tiles(values_of("pool1", 3)))
    assert np.abs(cv2.imread("b.png").astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "--layer cnv2",
            3,
            'no layer "cnv2", did you mean "conv2"? (layers with filters: conv1, conv2)',
        ),
        ("--layer ip1", 3, '"ip1" has no filters (layers with filters: conv1, conv2)'),
        ("--model digits", 2, 'the net takes "data": give an image'),
        ("--model digits --image no.png", 4, "no.png: cannot be read: no such file or directory"),
        (f"--model {TRAIN_VAL} --blob pool9", 3, 'no blob "pool9" in the net, did you mean "pool'),
        (f"--model {TRAIN_VAL} --item 99", 2, "item 99 is not in a batch of 99"),
        (f"--model {TRAIN_VAL} --blob loss --item 1", 2, "item 1 is not in a batch of 1"),
        (f"--model {TRAIN_VAL} --image x.png", 3, "needs an input for images"),
        ("--model rows.prototxt --image x.png --blob x", 3, "deploy nets have; it has x of 2 3"),
        ("--image x.png", 2, "give --model FILE"),
        ("--model digits --layer conv1", 2, "Give --layer for filters"),
        ("--model digits --image x.png --mean-file m --mean-values 1", 2, "not both"),
        ("--model digits --image x.png --channel-swap a,b", 2, "'a,b' is not a list of numbers"),
    ],
)
def test_what_cannot_be_drawn(line: str, code: int, message: str, capsys: Captured) -> None:
    cv2.imwrite("x.png", np.zeros((8, 8), np.uint8))
    Path("rows.prototxt").write_text('input: "x" input_shape { dim: 2 dim: 3 }')
    assert main.run(["visualize", "f.png", "--weights", WEIGHTS, *line.split()]) == code
    assert message in capsys.readouterr().err
    assert not Path("f.png").exists()


def test_weights_without_filters(capsys: Captured) -> None:
    Path("net.prototxt").write_text('name: "none"')
    net = Net(read_text("net.prototxt"))
    save_binary(net, "none.caffemodel")
    assert main.run(["visualize", "f.png", "--weights", "none.caffemodel"]) == 3
    assert "none.caffemodel: no layer has filters" in capsys.readouterr().err
    assert main.run(["visualize", "f.png"]) == 2
    assert main.run(["visualize", "f.gif", "--weights", WEIGHTS]) == 2
