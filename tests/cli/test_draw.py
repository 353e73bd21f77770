import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from caffepy.cli import main
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter
from caffepy.pycaffe import draw

Captured = pytest.CaptureFixture[str]
NET = r"""
name: "a \"net\"\\"
layer { name: "data" type: "Data" top: "x" include { phase: TRAIN } data_param { batch_size: 64 } }
layer { name: "data" type: "Input" top: "x" include { phase: TEST } }
layer { name: "conv/1" type: "Convolution" bottom: "x" top: "c" param { lr_mult: 1 } param { lr_mult: 0.5 }
  convolution_param { num_output: 20 kernel_size: 5 } }
layer { name: "relu" type: "ReLU" bottom: "c" top: "c" }
layer { name: "pool" type: "Pooling" bottom: "c" top: "p" pooling_param { kernel_size: 3 stride: 2 pool: AVE } }
layer { name: "ip" type: "InnerProduct" bottom: "p" top: "y" inner_product_param { num_output: 10 } }
layer { name: "mine" type: "Python" bottom: "y" top: "z" python_param { module: "m" layer: "Mine" } }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    return tmp_path


def lines_of(*arguments: str) -> list[str]:
    assert main.run(["draw", "net.prototxt", "net.dot", *arguments]) == 0
    return [line.strip() for line in Path("net.dot").read_text().splitlines()]


def test_boxes_octagons_and_arrows(capsys: Captured) -> None:
    assert lines_of("--phase=TRAIN") == [
        r'digraph "a \"net\"\\" {',
        "rankdir=LR;",
        r'"layer 0 data" [label="data\n(Data)", shape="box", style="filled", fillcolor="#6495ED"];',
        r'"layer 1 conv/1" [label="conv/1\n(Convolution)\nkernel size: 5\nstride: 1\npad: 0\noutputs: 20", '
        'shape="box", style="filled", fillcolor="#FF5050"];',
        r'"layer 2 relu" [label="relu\n(ReLU)", shape="box", style="filled", fillcolor="#90EE90"];',
        r'"layer 3 pool" [label="pool\n(AVE Pooling)\nkernel size: 3\nstride: 2\npad: 0", '
        'shape="box", style="filled", fillcolor="#FF9900"];',
        r'"layer 4 ip" [label="ip\n(InnerProduct)\noutputs: 10", shape="box", style="filled", fillcolor="#CC33FF"];',
        r'"layer 5 mine" [label="mine\n(Python Mine)", shape="box", style="filled", fillcolor="#6495ED"];',
        *(
            f'"blob {b}" [label="{b}", shape="octagon", style="filled", fillcolor="#E0E0E0"];'
            for b in "xcpyz"
        ),
        '"layer 0 data" -> "blob x" [label="Batch 64"];',
        '"blob x" -> "layer 1 conv/1";',
        '"layer 1 conv/1" -> "blob c" [label="20"];',
        '"blob c" -> "layer 2 relu";',
        '"layer 2 relu" -> "blob c";',
        '"blob c" -> "layer 3 pool";',
        '"layer 3 pool" -> "blob p";',
        '"blob p" -> "layer 4 ip";',
        '"layer 4 ip" -> "blob y" [label="10"];',
        '"blob y" -> "layer 5 mine";',
        '"layer 5 mine" -> "blob z";',
        "}",
    ]
    told = capsys.readouterr()
    assert (told.out, told.err) == ("net.dot\n", "")


def test_phases() -> None:
    def data_layers(*arguments: str) -> list[str]:
        return [
            line.split("(")[1].split(")")[0]
            for line in lines_of(*arguments)
            if 'label="data' in line
        ]

    assert data_layers("-phase", "TRAIN") == ["Data"]
    assert data_layers("-phase", "TEST") == ["Input"]
    assert data_layers() == data_layers("-phase=ALL") == ["Data", "Input"]


def test_direction_and_multipliers() -> None:
    lines = lines_of("-rankdir", "TB", "-display_lrm")
    assert lines[1] == "rankdir=TB;"
    assert (
        "conv/1 (Convolution) kernel size: 5 stride: 1 pad: 0 outputs: 20 lr mult: 1, 0.5"
        in lines[4]
    )


LABELS = {
    "sides": (
        'type: "Convolution" convolution_param { num_output: 2 kernel_h: 3 kernel_w: 5 '
        "stride_h: 2 stride_w: 2 }",
        "(Convolution) kernel size: 3x5 stride: 2 pad: 0 outputs: 2",
    ),
    "axes": (
        'type: "Deconvolution" convolution_param { num_output: 2 kernel_size: [1, 2, 3] '
        "dilation: 2 group: 4 }",
        "(Deconvolution) kernel size: 1x2x3 stride: 1 pad: 0 dilation: 2 group: 4 outputs: 2",
    ),
    "pooling": (
        'type: "Pooling" pooling_param { kernel_h: 2 kernel_w: 4 }',
        "(MAX Pooling) kernel size: 2x4 stride: 1 pad: 0",
    ),
    "global": ('type: "Pooling" pooling_param { global_pooling: true }', "(MAX Pooling) global"),
    "recurrent": ('type: "LSTM" recurrent_param { num_output: 8 }', "(LSTM) outputs: 8"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels(case: str) -> None:
    source, label = LABELS[case]
    layer = text.parse(f'name: "it" {source}', LayerParameter())
    assert draw.layer_label(layer, beside=True) == f"it {label}"


def test_as_pycaffe_calls_it() -> None:
    net = text.parse(NET, NetParameter())
    draw.draw_net_to_file(net, "net.gv", "LR", TEST)
    assert Path("net.gv").read_bytes() == draw.draw_net(net, "LR", "dot", phase=TEST)
    assert "Batch 64" not in draw.dot_text(net, label_edges=False, phase=TRAIN)
    assert not net.HasField("state")


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
@pytest.mark.parametrize(("name", "start"), [("net.png", b"\x89PNG"), ("net.SVG", b"<?xml")])
def test_pictures(name: str, start: bytes) -> None:
    assert main.run(["draw", "net.prototxt", name]) == 0
    assert Path(name).read_bytes().startswith(start)


@pytest.mark.parametrize(("name", "start"), [("net.png", b"\x89PNG"), ("net.JPG", b"\xff\xd8\xff")])
def test_bitmaps_need_no_graphviz(name: str, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main.run(["draw", "net.prototxt", name]) == 0
    assert Path(name).read_bytes().startswith(start)


def test_an_svg_needs_no_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main.run(["draw", "net.prototxt", "net.svg", "--phase=TRAIN"]) == 0
    picture = ElementTree.parse("net.svg").getroot()
    texts = [
        "\n".join(filter(None, text.itertext()))
        for text in picture.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "conv/1\n(Convolution)\nkernel size: 5\nstride: 1\npad: 0\noutputs: 20" in texts
    assert {"x", "c", "p", "y", "z", "Batch 64"} <= set(texts)


def shapes_in(*arguments: str) -> dict[str, str]:
    """Return the labels of the arrows from layers to blobs."""
    assert main.run(["draw", *arguments, "net.dot", "--shapes"]) == 0
    found = re.findall(
        r'"layer (\d+) \S+" -> "blob (\S+)" \[label="(.*)"\];', Path("net.dot").read_text()
    )
    return {f"{layer} {blob}": label for layer, blob, label in found}


def test_shapes() -> None:
    told = shapes_in("lenet", "--phase", "TRAIN", "--synthetic")
    assert (told["0 data"], told["0 label"], told["1 conv1"]) == ("64 1 28 28", "64", "64 20 24 24")
    assert (told["6 ip1"], told["8 loss"]) == ("64 500", "()")


def test_shapes_of_each_phase_and_of_training_for_what_is_in_both() -> None:
    told = shapes_in("lenet", "--synthetic")
    assert (told["0 data"], told["1 data"], told["2 conv1"]) == (
        "64 1 28 28",
        "100 1 28 28",
        "64 20 24 24",
    )
    assert told["9 accuracy"] == "()"


def test_shapes_of_a_net_without_phases() -> None:
    Path("net.prototxt").write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [2, 6] } } }'
        'layer { name: "a" type: "Slice" bottom: "x" top: "y" top: "z" slice_param { axis: 1 '
        "slice_point: 2 } }"
        'layer { name: "b" type: "ReLU" bottom: "x" top: "r" }'
    )
    told = shapes_in("net.prototxt")
    assert told == {"0 x": "2 6", "1 y": "2 2", "1 z": "2 4", "2 r": "2 6"}


WRONG = {
    "no data": ("lenet net.dot --shapes", 4, "to go without the data, add --synthetic"),
    "no shapes": ("lenet net.dot --synthetic", 2, "--synthetic and --image are for --shapes"),
    "no extension": (
        "net.prototxt net",
        2,
        'the extension of "net" must name the format: .png, .svg',
    ),
    "unknown extension": (
        "net.prototxt net.doc",
        2,
        'the extension of "net.doc" must name the format',
    ),
    "no net": (
        "nte.prototxt net.dot",
        3,
        'could not open "nte.prototxt": no such file, did you mean "net.prototxt"?',
    ),
    "no folder": ("net.prototxt nowhere/net.dot", 2, 'cannot write "nowhere/net.dot"'),
    "no graphviz": ("lenet net.pdf", 2, "install graphviz (apt-get install graphviz, "),
    "direction": ("lenet net.dot -rankdir=XY", 2, "'XY' is not one of 'LR', 'RL', 'TB', 'BT'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    line, code, message = WRONG[case]
    monkeypatch.setenv("PATH", "")
    assert main.run(["draw", *line.split()]) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["net.prototxt"]


def test_graphviz_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no cairo >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert main.run(["draw", "net.prototxt", "net.png"]) == 2
    assert capsys.readouterr().err == "caffepy: error: graphviz could not draw PNG: no cairo\n"
    assert not Path("net.png").exists()
