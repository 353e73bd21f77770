import os
from pathlib import Path

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.proto import binary, text
from caffepy.proto.caffe_pb2 import BlobProto, NetParameter, SolverParameter

pytestmark = pytest.mark.usefixtures("folder")

Captured = pytest.CaptureFixture[str]
V1 = """
name: "old" input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2
  convolution_param { num_output: 4 kernel_size: 3 } }
"""
V0 = """
name: "older" input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { layer { name: "pad" type: "padding" pad: 1 } bottom: "data" top: "pad" }
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 %s } bottom: "pad" top: "conv" }
"""
NEW = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 } } }\n'
ALREADY = "File already in latest proto format: "


def read(path: str) -> NetParameter:
    """The net as it stands in the text file, which must be of today's format."""
    return text.parse(Path(path).read_text(), NetParameter(), path)


@pytest.mark.parametrize("out", ["new.prototxt", "in.prototxt"])
@pytest.mark.parametrize(("source", "pad"), [(V1, []), (V0 % "", [1])], ids=["V1", "V0"])
def test_old_text(source: str, pad: list[int], out: str, folder: Path, capsys: Captured) -> None:
    Path("in.prototxt").write_text(source)
    assert main.run(["upgrade-net", "in.prototxt", out]) == 0
    net = read(out)
    assert not net.layers
    assert [layer.type for layer in net.layer] == ["Input", "Convolution"]
    assert list(net.layer[1].convolution_param.pad) == pad
    log = capsys.readouterr().err
    assert (
        "Attempting to upgrade input file specified using deprecated V1LayerParameter: in.prototxt"
        in log
    )
    assert f"Wrote upgraded NetParameter text proto to {out}" in log
    assert ALREADY not in log
    assert set(os.listdir(folder)) == {"in.prototxt", out}


def test_old_binary_keeps_its_weights() -> None:
    net = text.parse(V1, NetParameter())
    weights = np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    net.layers[0].blobs.add(num=1, channels=1, height=3, width=4, data=weights.ravel())
    Path("old.caffemodel").write_bytes(net.SerializeToString())
    assert main.run(["upgrade-net", "old.caffemodel", "new.caffemodel"]) == 0
    new = NetParameter.FromString(Path("new.caffemodel").read_bytes())
    assert [layer.name for layer in new.layer] == ["input", "conv"]
    np.testing.assert_array_equal(binary.blob_to_array(new.layer[1].blobs[0]), weights)
    assert main.run(["upgrade-net", "--text", "old.caffemodel", "new.prototxt"]) == 0
    assert read("new.prototxt") == new
    assert main.run(["upgrade-net", "-binary", "new.prototxt", "again.caffemodel"]) == 0
    assert NetParameter.FromString(Path("again.caffemodel").read_bytes()) == new


NV = """
layer { name: "x" type: "InnerProduct" bottom: "a" top: "b" blobs { shape { dim: 1 dim: 2 }
  raw_data_type: FLOAT16 raw_data: "\\000<\\000\\300"
  raw_diff_type: FLOAT raw_diff: "\\000\\000\\200?\\000\\000\\000@" } }
"""


@pytest.mark.parametrize("flag", ["--binary", "--text"])
def test_raw_values_of_nvcaffe_become_floats(flag: str, capsys: Captured) -> None:
    net = text.parse(NV, NetParameter())
    Path("nv.caffemodel").write_bytes(net.SerializeToString())
    assert main.run(["upgrade-net", flag, "nv.caffemodel", "out"]) == 0
    assert ALREADY not in capsys.readouterr().err
    new = read("out") if flag == "--text" else NetParameter.FromString(Path("out").read_bytes())
    net.layer[0].blobs[0].CopyFrom(
        text.parse("shape { dim: 1 dim: 2 } data: 1 data: -2 diff: 1 diff: 2", BlobProto())
    )
    assert new == net


def test_text_from_a_pipe(capsys: Captured) -> None:
    for source, code in ((V1.encode(), 0), (NetParameter(name="\0").SerializeToString(), 3)):
        reading, writing = os.pipe()
        os.write(writing, source)
        os.close(writing)
        assert main.run(["upgrade-net", f"/dev/fd/{reading}", "out"]) == code
        os.close(reading)
    assert [layer.type for layer in read("out").layer] == ["Input", "Convolution"]
    assert "is a pipe that gives binary data; save its content as a file" in capsys.readouterr().err


def test_a_new_net_is_said_to_be_new_and_written(capsys: Captured) -> None:
    Path("in.prototxt").write_text(NEW)
    assert main.run(["upgrade_net", "in.prototxt", "out.prototxt"]) == 0
    assert f"] {ALREADY}in.prototxt\n" in capsys.readouterr().err
    assert read("out.prototxt") == read("in.prototxt")


def test_settings_without_a_place_are_told_by_the_exit_code(capsys: Captured) -> None:
    Path("in.prototxt").write_text(V0 % "dropout_ratio: 0.5")
    assert main.run(["upgrade-net", "in.prototxt", "out.prototxt"]) == 1
    assert "Unknown parameter dropout_ratio for layer type conv" in capsys.readouterr().err
    assert len(read("out.prototxt").layer) == 2
    assert main.run(["upgrade-net", "-minloglevel=3", "in.prototxt", "out.prototxt"]) == 1


def test_solver(capsys: Captured) -> None:
    Path("in.prototxt").write_text('net: "n.prototxt" base_lr: 0.1 solver_type: ADAM')
    assert main.run(["upgrade-solver", "in.prototxt", "in.prototxt"]) == 0
    solver = text.parse(Path("in.prototxt").read_text(), SolverParameter())
    assert solver == SolverParameter(net="n.prototxt", base_lr=0.1, type="Adam")
    log = capsys.readouterr().err
    assert "Wrote upgraded SolverParameter text proto to in.prototxt" in log
    assert ALREADY not in log
    assert main.run(["upgrade-solver", "in.prototxt", "out.prototxt"]) == 0
    assert ALREADY in capsys.readouterr().err
    assert Path("out.prototxt").read_text() == Path("in.prototxt").read_text()


def test_what_is_no_file_is_written_to_and_not_replaced(folder: Path) -> None:
    (folder / "in.prototxt").write_text(NEW)
    (folder / "out").symlink_to(os.devnull)
    assert main.run(["upgrade-net", "in.prototxt", "out"]) == 0
    assert os.path.samefile("out", os.devnull)


WRONG = {
    "missing": ("upgrade-net nowhere out", 3, 'could not open "nowhere": no such file'),
    "empty": ("upgrade-net empty out", 3, '"empty" is empty'),
    "syntax": (
        "upgrade-net typo out",
        3,
        'typo:1:9: unknown field "tpye" in LayerParameter, did you mean "type"?',
    ),
    "a solver": ("upgrade-net solver out", 3, "it is a field of a solver"),
    "a net": ("upgrade-solver typo out", 3, "it is a field of a net"),
    "both types": (
        "upgrade-solver both out",
        3,
        'give either "type" or the old "solver_type", not both',
    ),
    "folder": (
        "upgrade-net new nowhere/out",
        2,
        'cannot write "nowhere/out": no such file or directory',
    ),
    "onto a folder": ("upgrade-solver solver .", 2, 'cannot write ".": is a directory'),
    "no OUT": ("upgrade-net typo", 2, "Missing argument 'OUT'"),
}


@pytest.mark.parametrize(("line", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong(line: str, code: int, message: str, folder: Path, capsys: Captured) -> None:
    Path("empty").touch()
    Path("typo").write_text("layer { tpye: 'x' }")
    Path("new").write_text(NEW)
    Path("solver").write_text("base_lr: 1")
    Path("both").write_text("type: 'SGD' solver_type: SGD")
    before = sorted(os.listdir(folder))
    assert main.run([*line.split(), "-minloglevel=3"]) == code
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == before
