import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import caffepy
from caffepy import models
from caffepy.cli import main
from caffepy.device.blob import Array
from caffepy.net import weights
from caffepy.proto import binary, text
from caffepy.proto.caffe_pb2 import BlobProto, NetParameter

pytestmark = pytest.mark.usefixtures("folder")

Captured = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parents[1] / "golden"
DIGITS = GOLDEN / "digits" / "digits_iter_500.caffemodel"
ADAM = GOLDEN / "solvers" / "adam_iter_10"


def show(path: object, capsys: Captured) -> Any:
    assert main.run(["weights", "show", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def convert(source: object, target: str) -> None:
    assert main.run(["weights", "convert", str(source), target]) == 0


def save(path: str, net: NetParameter) -> None:
    Path(path).write_bytes(net.SerializeToString())


def save_hdf5(path: str, **arrays: object) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace("__", "/")] = array


def tree(path: object) -> dict[str, Array]:
    """The datasets of an HDF5 file by path, and its groups as empty arrays."""
    found: dict[str, Array] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: found.update(
                {name: item[()] if hasattr(item, "dtype") else np.empty(0)}
            )
        )
    return found


def assert_same(left: dict[str, Array], right: dict[str, Array]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.shape, array.dtype) == (right[name].shape, right[name].dtype), name
        np.testing.assert_array_equal(array, right[name])


def test_figures(capsys: Captured) -> None:
    info = show(DIGITS, capsys)
    assert (info["kind"], info["name"], info["count"]) == ("weights (binary)", "digits", 13706)
    layers = {layer.name: layer for layer in binary.read_net(str(DIGITS)).layer}
    assert [layer["name"] for layer in info["layers"]] == list(layers)
    (layer,) = (layer for layer in info["layers"] if layer["name"] == "conv2")
    array = binary.blob_to_array(layers["conv2"].blobs[0]).astype(float)
    assert layer["type"] == "Convolution"
    blob = layer["blobs"][0]
    assert (blob["shape"], blob["count"], blob["not_finite"]) == ([32, 16, 3, 3], 4608, 0)
    expected = (array.min(), array.mean(), array.max(), array.std())
    assert (blob["min"], blob["mean"], blob["max"], blob["std"]) == pytest.approx(expected)


def test_table(capsys: Captured) -> None:
    assert main.run(["weights", "show", str(DIGITS)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[:2] == ["weights (binary)", "name: digits"]
    assert lines[3].split() == ["layer", "type", "blob", "shape", "min", "mean", "max", "std"]
    assert (
        " ".join(lines[4].split())
        == "conv1 Convolution 0 16 1 3 3 (144) -1.30495 0.0245106 1.37965 0.596536"
    )
    assert lines[-1] == "13,706 values, 54,824 bytes as float32"
    assert shown.err == ""


def test_values_that_are_not_finite(capsys: Captured) -> None:
    arrays = np.float32([1, np.nan, 3, -np.inf]), np.float32([np.nan]), np.empty((0, 2), np.float32)
    net = NetParameter()
    net.layer.add(name="x", blobs=map(binary.array_to_blob, arrays))
    save("x.caffemodel", net)
    first, second, third = show("x.caffemodel", capsys)["layers"][0]["blobs"]
    assert first == {
        "shape": [4],
        "count": 4,
        "min": 1,
        "mean": 2,
        "max": 3,
        "std": 1,
        "not_finite": 2,
    }
    assert (second["mean"], second["not_finite"]) == (None, 1)
    assert (third["shape"], third["mean"], third["not_finite"]) == ([0, 2], None, 0)
    assert main.run(["weights", "show", "x.caffemodel"]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[3].split()) == "x 0 4 (4) 1 2 3 1 2"


def test_other_files_of_caffe(capsys: Captured) -> None:
    for suffix, form in (("", "binary"), (".h5", "HDF5")):
        info = show(f"{ADAM}.solverstate{suffix}", capsys)
        assert info["kind"] == f"solver state ({form})"
        assert (info["iter"], info["current_step"]) == (10, 0)
        assert info["learned_net"] == f"adam_iter_10.caffemodel{suffix}"
        assert [len(blob["shape"]) for blob in info["layers"][0]["blobs"]] == [2, 1] * 4
    hdf5 = show(f"{ADAM}.caffemodel.h5", capsys)
    stored = {
        layer["name"]: layer["blobs"] for layer in show(f"{ADAM}.caffemodel", capsys)["layers"]
    }
    assert {layer["name"]: layer["blobs"] for layer in hdf5["layers"]} == stored
    mean = show(GOLDEN / "data" / "mean.binaryproto", capsys)
    assert (mean["kind"], mean["mean of each channel"]) == ("mean file", "135.137, 130.48, 127.093")


def test_binary_to_hdf5_is_what_caffe_writes() -> None:
    convert(f"{ADAM}.caffemodel", "adam.h5")
    assert_same(tree("adam.h5"), tree(f"{ADAM}.caffemodel.h5"))


def test_there_and_back() -> None:
    convert(DIGITS, "digits.caffemodel.h5")
    convert("digits.caffemodel.h5", "digits.caffemodel")
    before, after = (
        {
            layer.name: [binary.blob_to_array(blob) for blob in layer.blobs]
            for layer in binary.read_net(str(path)).layer
            if layer.blobs
        }
        for path in (DIGITS, "digits.caffemodel")
    )
    assert before.keys() == after.keys()
    for name, arrays in before.items():
        for left, right in zip(arrays, after[name], strict=True):
            np.testing.assert_array_equal(left, right)
    net = models.path("digits", "deploy")
    assert net
    for path in ("digits.caffemodel.h5", "digits.caffemodel"):
        loaded = caffepy.Net(net, caffepy.TEST, weights=path)
        np.testing.assert_array_equal(loaded.params["ip2"][0].data, before["ip2"][0])


OLD = """
name: "old"
layers { name: "conv" type: CONVOLUTION bottom: "x" top: "y"
  blobs { num: 1 channels: 1 height: 1 width: 2 data: [1, 2] } blobs { num: 1 channels: 1 height: 1 width: 1 data: 3 } }
layers { name: "ip" type: INNER_PRODUCT bottom: "y" top: "z"
  blobs { num: 1 channels: 1 height: 2 width: 3 data: [1, 2, 3, 4, 5, 6] }
  blobs { num: 1 channels: 1 height: 1 width: 2 data: [7, 8] } }
"""


def test_blobs_of_an_old_net_get_todays_shapes(capsys: Captured) -> None:
    save("old.caffemodel", text.parse(OLD, NetParameter()))
    convert("old.caffemodel", "new.h5")
    shapes = {name: array.shape for name, array in tree("new.h5").items() if array.size}
    assert shapes == {
        "data/conv/0": (1, 1, 1, 2),
        "data/conv/1": (1,),
        "data/ip/0": (2, 3),
        "data/ip/1": (2,),
    }
    convert("old.caffemodel", "old.caffemodel")
    capsys.readouterr()
    layers = show("old.caffemodel", capsys)["layers"]
    assert [(layer["name"], layer["type"]) for layer in layers] == [
        ("conv", "Convolution"),
        ("ip", "InnerProduct"),
    ]
    assert layers[1]["blobs"][0]["shape"] == [1, 1, 2, 3]


def test_gradients_go_along() -> None:
    net = NetParameter()
    net.layer.add(name="a/b", blobs=[binary.array_to_blob(np.ones((2, 3)), np.full((2, 3), 5))])
    net.layer.add(name="none")
    save("x.caffemodel", net)
    convert("x.caffemodel", "x.h5")
    found = tree("x.h5")
    assert {name: array.tolist() for name, array in found.items() if array.size} == {
        "data/a/b/0": [[1] * 3] * 2,
        "diff/a/b/0": [[5] * 3] * 2,
    }
    assert "data/none" in found
    convert("x.h5", "y.caffemodel")
    again = NetParameter.FromString(Path("y.caffemodel").read_bytes())
    assert list(again.layer) == list(net.layer[:1])


NV = """
layer { name: "x" type: "InnerProduct" bottom: "a" top: "b" blobs { shape { dim: 1 dim: 2 }
  raw_data_type: FLOAT16 raw_data: "\\000<\\000\\300"
  raw_diff_type: FLOAT raw_diff: "\\000\\000\\200?\\000\\000\\000@" } }
"""


@pytest.mark.parametrize("names", [("a", "a/bn"), ("a/bn", "a")])
def test_a_layer_in_the_group_of_another_is_another(names: tuple[str, str]) -> None:
    net = NetParameter()
    for k, name in enumerate(names):
        layer = net.layer.add(name=name, type="Scale")
        layer.blobs.add(data=[k + 1.0]).shape.dim.append(1)
    Path("x.caffemodel").write_bytes(net.SerializeToString())
    convert("x.caffemodel", "x.h5")
    convert("x.h5", "y.caffemodel")
    found = NetParameter.FromString(Path("y.caffemodel").read_bytes())
    values = {layer.name: list(layer.blobs[0].data) for layer in found.layer}
    assert values == {name: [k + 1.0] for k, name in enumerate(names)}


def test_raw_values_of_nvcaffe_become_floats() -> None:
    save("nv.caffemodel", text.parse(NV, NetParameter()))
    convert("nv.caffemodel", "x.caffemodel")
    (layer,) = NetParameter.FromString(Path("x.caffemodel").read_bytes()).layer
    assert list(layer.blobs) == [
        text.parse("shape { dim: 1 dim: 2 } data: 1 data: -2 diff: 1 diff: 2", BlobProto())
    ]


def test_names_stay_on_their_lines(capsys: Captured) -> None:
    net = NetParameter(name="n\nm")
    net.layer.add(name="a\nb", type="\t", blobs=[binary.array_to_blob(np.ones(1))])
    save("x.caffemodel", net)
    assert main.run(["weights", "show", "x.caffemodel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], len(lines)) == (r"name: n\nm", 7)
    assert lines[4].startswith(r"a\nb   \t    0     1 (1)")


def test_a_layer_that_shares_all_it_has_is_left_out() -> None:
    with h5py.File("x.h5", "w") as file:
        file["data/a/0"] = np.float64([1, 2])
        file.create_group("data/b")
    convert("x.h5", "x.caffemodel")
    (layer,) = binary.read_net("x.caffemodel").layer
    assert (layer.name, list(layer.blobs[0].data)) == ("a", [1, 2])


def test_more_than_a_binary_file_can_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(weights, "MAX_BINARY", 1000)
    assert main.run(["weights", "convert", str(DIGITS), "x.caffemodel"]) == 3
    assert (
        "x.caffemodel: a binary caffemodel holds less than 2 GiB; give a file name in .h5"
        in capsys.readouterr().err
    )
    assert not os.listdir()


WRONG = {
    "missing": ("show nowhere", 3, 'could not open "nowhere": no such file'),
    "prototxt": ("show net.prototxt", 3, '"net.prototxt" looks like text, not a caffemodel'),
    "data": (
        "show data.h5",
        3,
        "data.h5: has no group /data, so it holds no weights (it holds data, label)",
    ),
    "damaged": ("show damaged.h5", 3, "damaged.h5: cannot be read as HDF5: "),
    "damaged within": ("show within.h5", 3, "within.h5: cannot be read as HDF5: "),
    "wrong count": (
        "show count.caffemodel",
        3,
        'count.caffemodel: layer "x": a blob holds 1 values',
    ),
    "state": (
        f"convert {ADAM}.solverstate x.h5",
        3,
        "is a solver state, not weights; train --snapshot goes on from it",
    ),
    "state in HDF5": (f"convert {ADAM}.solverstate.h5 x", 3, "is a solver state, not weights"),
    "mean": (f"convert {GOLDEN}/data/mean.binaryproto x.h5", 3, "not a caffemodel"),
    "shared in part": (
        "convert shared.h5 x",
        3,
        'shared.h5: layer "a": only blobs 1 are stored, as the others are',
    ),
    "one name twice": (
        "convert twice.caffemodel x.h5",
        3,
        'two layers are named "x", which HDF5 cannot tell apart',
    ),
    "count while converting": (
        "convert count.caffemodel x.h5",
        3,
        'count.caffemodel: layer "x": a blob holds 1 values',
    ),
    "no folder": (
        f"convert {DIGITS} nowhere/x.h5",
        2,
        'cannot write "nowhere/x.h5": no such file or directory',
    ),
    "no OUT": ("convert a", 2, "Missing argument 'OUT'"),
    "no such command": (
        "shwo a",
        2,
        'no such command "shwo", did you mean "show"? (commands: convert, show)',
    ),
    "no such flag": ("show --jsn a", 2, 'no such option "--jsn", did you mean "--json"?'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, capsys: Captured) -> None:
    Path("net.prototxt").write_text("name: 'x'")
    save_hdf5("data.h5", data=[1], label=[1])
    save_hdf5("shared.h5", data__a__1=[1])
    Path("damaged.h5").write_bytes(Path(f"{ADAM}.caffemodel.h5").read_bytes()[:200])
    Path("within.h5").write_bytes(Path("shared.h5").read_bytes().replace(b"HEAP", b"PAEH"))
    save(
        "count.caffemodel",
        text.parse('layer { name: "x" blobs { shape { dim: 2 } data: 1 } }', NetParameter()),
    )
    one = 'layer { name: "x" blobs { shape { dim: 1 } data: 1 } }'
    save("twice.caffemodel", text.parse(one + one, NetParameter()))
    before = sorted(os.listdir())
    line, code, message = WRONG[case]
    assert main.run(["weights", *line.split(), "-minloglevel=3"]) == code
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("line", ["weights", "weights show --help", "weights convert -h"])
def test_help(line: str, capsys: Captured) -> None:
    assert main.run(line.split()) == 0
    assert "Examples:\n    caffepy weights " in capsys.readouterr().out
