"""`weights convert` from and to files of safetensors, which the package safetensors reads too."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.commands.safetensors import what_stars_stand_for
from caffepy.commands.weights import convert, show
from caffepy.core.errors import CaffeError
from caffepy.device.blob import Array
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import NetParameter

files = pytest.importorskip("safetensors.numpy")
DIGITS = Path(__file__).parents[1] / "golden" / "digits" / "digits_iter_500.caffemodel"
TORCH = {  # as PyTorch names a small net, a fully connected weight turned as TensorFlow's
    "net.conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "net.bn.weight": np.float32([2, 3]),
    "net.bn.bias": np.float32([4, 5]),
    "net.bn.running_mean": np.float32([6, 7]),
    "net.bn.running_var": np.float32([8, 9]),
    "net.bn.num_batches_tracked": np.array(11),
    "net.fc.kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "net.fc.bias": np.float32([0, 1, 2]),
    "logit_scale": np.array(3, np.float32),
}
NAMES = """
# tensor        blob
net.fc.kernel   ip.weight  1,0
net.fc.bias     ip.1
net.bn.weight   "scale 1.weight"
net.bn.bias     "scale 1.bias"
logit_*         -   # not for Caffe
net.*           *
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text(NAMES)
    files.save_file(TORCH, "torch.safetensors")
    return tmp_path


def blobs(path: str) -> dict[str, list[Array]]:
    return {
        layer.name: [binary.blob_to_array(blob) for blob in layer.blobs]
        for layer in binary.read_net(path).layer
    }


def test_there_and_back_with_a_map() -> None:
    convert("torch.safetensors", "x.caffemodel", names="names.txt")
    found = blobs("x.caffemodel")
    assert found.keys() == {"conv", "bn", "scale 1", "ip"}
    np.testing.assert_array_equal(found["conv"][0], TORCH["net.conv.weight"])
    np.testing.assert_array_equal(found["ip"][0], TORCH["net.fc.kernel"].T)
    np.testing.assert_array_equal(found["ip"][1], [0, 1, 2])
    np.testing.assert_array_equal(found["scale 1"], [[2, 3], [4, 5]])
    assert [x.tolist() for x in found["bn"]] == [[6, 7], [8, 9], [1]]
    convert("x.caffemodel", "back.safetensors", names="names.txt")
    back = files.load_file("back.safetensors")
    assert back.keys() == TORCH.keys() - {"logit_scale", "net.bn.num_batches_tracked"}
    for name, array in back.items():
        np.testing.assert_array_equal(array, TORCH[name], err_msg=name)


def test_names_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """BatchNorm takes scale and bias as NVCaffe's; what has no place is listed."""
    tensors = {name: x for name, x in TORCH.items() if "fc" not in name}
    files.save_file(tensors, "x.safetensors")
    convert("x.safetensors", "x.h5")
    assert "Left out, as they belong to no blob: logit_scale" in caplog.text
    convert("x.h5", "x.caffemodel")
    bn = blobs("x.caffemodel")["net.bn"]
    assert [x.tolist() for x in bn] == [[6, 7], [8, 9], [1], [2, 3], [4, 5]]


def test_a_trained_net_there_and_back() -> None:
    convert(str(DIGITS), "digits.safetensors")
    convert("digits.safetensors", "digits.caffemodel")
    want = {name: arrays for name, arrays in blobs(str(DIGITS)).items() if arrays}
    found = blobs("digits.caffemodel")
    assert found.keys() == want.keys()
    for name, arrays in want.items():
        for x, y in zip(found[name], arrays, strict=True):
            np.testing.assert_array_equal(x, y)
    (tensor,) = (t for t in show("digits.safetensors").layers if t.name == "conv2.weight")
    assert tensor.blobs[0].shape == (32, 16, 3, 3)


def test_a_number_without_axes_stays_one() -> None:
    """As the scale of a Normalize layer with channel_shared, or the slope of such a PReLU."""
    blob = binary.array_to_blob(np.array(7, np.float32))
    net = NetParameter(layer=[{"name": "norm", "type": "Normalize", "blobs": [blob]}])
    Path("x.caffemodel").write_bytes(net.SerializeToString())
    convert("x.caffemodel", "x.safetensors")
    assert files.load_file("x.safetensors")["norm.weight"].shape == ()
    convert("x.safetensors", "y.caffemodel")
    assert [x.shape for x in blobs("y.caffemodel")["norm"]] == [()]


def test_statistics_are_divided_by_their_weight_and_others_are_numbered() -> None:
    net = NetParameter()
    arrays = np.float32([2, 4]), np.float32([6, 8]), np.float32([2])
    net.layer.add(name="bn", type="BatchNorm", blobs=map(binary.array_to_blob, arrays))
    net.layer.add(name="lstm", type="LSTM", blobs=map(binary.array_to_blob, arrays))
    Path("x.caffemodel").write_bytes(net.SerializeToString())
    convert("x.caffemodel", "x.safetensors")
    found = {name: x.tolist() for name, x in files.load_file("x.safetensors").items()}
    assert found == {
        "bn.running_mean": [1, 2],
        "bn.running_var": [3, 4],
        "lstm.0": [2, 4],
        "lstm.1": [6, 8],
        "lstm.2": [2],
    }


@pytest.mark.filterwarnings("error")
def test_statistics_that_are_no_numbers_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    net = NetParameter()
    for name, mean, weight in (("a", 2, 1e-45), ("b", 2, np.nan), ("c", np.inf, 0), ("d", 2, 1)):
        arrays = np.float32([mean, 4]), np.float32([6, 8]), np.float32([weight])
        net.layer.add(name=name, type="BatchNorm", blobs=map(binary.array_to_blob, arrays))
    Path("x.caffemodel").write_bytes(net.SerializeToString())
    convert("x.caffemodel", "x.safetensors")
    assert files.load_file("x.safetensors")["d.running_mean"].tolist() == [2, 4]
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "not all finite, of layers: a (weight 1.4013e-45), b (weight nan), c (weight 0)"
    )


@pytest.mark.parametrize(
    ("pattern", "name", "parts"),
    [
        ("a.*.c", "a.b.c", ["b"]),
        ("*.*", "a.b.c", ["a", "b.c"]),
        ("*", "", [""]),
        ("a*a", "a", None),
        ("a", "a", []),
        ("a*b*c", "acb", None),
        ("*a" * 30 + "b", "a" * 200, None),
    ],
)
def test_what_stars_stand_for(pattern: str, name: str, parts: list[str] | None) -> None:
    assert what_stars_stand_for(pattern, name) == parts


def raw(path: str, kind: str, data: bytes, shape: Sequence[int] = (2,)) -> None:
    header = {"a.weight": {"dtype": kind, "shape": [*shape], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_types_become_float32() -> None:
    raw("x.safetensors", "BF16", b"\xc0\x3f\x20\xc0")
    convert("x.safetensors", "x.caffemodel")
    assert blobs("x.caffemodel")["a"][0].tolist() == [1.5, -2.5]


WRONG = {
    "damaged": ("damaged.safetensors x", "", '"damaged.safetensors" is damaged: '),
    "type": ("f8.safetensors x", "", 'f8.safetensors: "a.weight" has values of type F8_E4M3'),
    "axes of a blob": ("axes.safetensors x", "", '"a.weight" has 40 axes; a blob has 32 at most'),
    "words": ("torch.safetensors x", "a", "names.txt:1: a line has a tensor, a blob, and perhaps"),
    "stars": ("torch.safetensors x", "\na.* b", 'names.txt:2: "a.*" and "b" must have as many *'),
    "axes": ("torch.safetensors x", "a b.0 1,1", 'names.txt:1: "1,1" is no order of axes'),
    "rank": ("torch.safetensors x", "net.fc.bias b.0 1,0", 'names.txt:1: "net.fc.bias" of shape'),
    "blob": ("torch.safetensors x", "net.fc.bias b.c", 'names.txt:1: "b.c" is no blob; it must'),
    "unused": ("torch.safetensors x", "x.* y.*", "names.txt:1: no tensor has a name of the map"),
    "twice": ("torch.safetensors x", "*.* a.weight", "must have as many * each"),
    "both": (
        "torch.safetensors x",
        "net.fc.bias a.1\nnet.bn.bias a.1",
        'torch.safetensors: both "net.bn.bias" and "net.fc.bias" are "a.1"',
    ),
    "no weight": (
        "torch.safetensors x",
        "net.fc.kernel -",
        'layer "net.fc" has bias, but no weigh',
    ),
    "no safetensors": (f"{DIGITS} x", "a b", "--map is for files of safetensors, and neither"),
    "only": ("torch.safetensors x.safetensors", "", "both files are of safetensors"),
    "one tensor": (
        f"{DIGITS} x.safetensors",
        "x conv1.bias\nx conv1.weight",
        "and another blob are both",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    files_, names, message = WRONG[case]
    Path("damaged.safetensors").write_bytes(Path("torch.safetensors").read_bytes()[:-1])
    raw("f8.safetensors", "F8_E4M3", b"ab")
    raw("axes.safetensors", "F32", bytes(8), [1] * 39 + [2])
    Path("names.txt").write_text(names)
    before = sorted(os.listdir())
    line = f"weights convert {files_}" + (" --map names.txt" if names else "")
    assert main.run(line.split()) in (2, 3)
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == before


def test_weights_say_what_the_file_is() -> None:
    with pytest.raises(
        CaffeError, match=r"looks like a safetensors file, not a caffemodel; caffepy"
    ):
        binary.read_net("torch.safetensors")
