import json
from pathlib import Path

import pytest

from caffepy import models
from caffepy.commands.summarize import MARKS, as_json, summarize
from caffepy.core.errors import ConfigError
from caffepy.drawing.labels import arguments
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter

NET = """
name: "it"
layer { name: "in" type: "Input" top: "x" top: "spare" input_param { shape { dim: [2, 3, 8, 8] } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c" param { name: "w" lr_mult: 0.5 } param { decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 } }
layer { name: "relu" type: "ReLU" bottom: "c" top: "c" }
layer { name: "a" type: "InnerProduct" bottom: "c" top: "a" param { } inner_product_param { num_output: 5 } }
layer { name: "b" type: "InnerProduct" bottom: "c" top: "b" inner_product_param { num_output: 5 bias_term: false } }
layer { name: "far" type: "EuclideanLoss" bottom: "a" bottom: "b" top: "far" loss_weight: 0.25 }
"""


def write(folder: Path, definition: str) -> str:
    path = folder / "net.prototxt"
    path.write_text(definition)
    return str(path)


def test_what_a_net_is_made_of(tmp_path: Path) -> None:
    (net,) = summarize(write(tmp_path, NET))
    rows = {layer.name: layer for layer in net.layers}
    assert [*rows] == [
        "in",
        "conv",
        "relu",
        "a",
        "b",
        "far",
    ]  # without the splits that Caffe puts in
    assert rows["conv"].shapes == [(2, 4, 4, 4)]
    assert (rows["conv"].parameters, rows["conv"].macs, rows["conv"].memory) == (
        112,
        2 * 27 * 64,
        4 * 128,
    )
    assert (rows["b"].parameters, rows["b"].macs) == (320, 640)
    assert (net.parameters, net.macs) == (112 + 325 + 320, 3456 + 2 * 640)
    assert net.unconsumed == ["spare", "far"]
    assert (net.unknown, net.problem) == ([], None)


def test_the_table(tmp_path: Path) -> None:
    (net,) = summarize(write(tmp_path, NET))
    lines = MARKS.sub("", net.table()).splitlines()
    cells = [line.split() for line in lines]
    assert lines[0] == "TEST net of 'it'"
    assert (
        " ".join(cells[3])
        == "conv Convolution (w x0.5, Dx0) x -> c 3/2+1 4 2 4 4 4 112 3.46 k 0.00 MiB"
    )
    assert " ".join(cells[4]) == "relu ReLU c -> c 2 4 4 4"
    assert cells[5][:5] == ["a", "InnerProduct", "c", "->", "a"]  # usual multipliers are not shown
    assert "0.25 * far" in lines[7]
    assert " ".join(cells[8]) == "all 757 4.74 k 0.00 MiB"
    assert lines[9] == "read by no layer: spare, far"
    assert len({line.index("->") for line in lines[2:8]}) == 1
    assert len({len(line) for line in (lines[1], lines[2], lines[3], lines[8])}) == 1


def test_colours(tmp_path: Path) -> None:
    (net,) = summarize(write(tmp_path, NET.replace('bottom: "b"', 'bottom: "bb"')))
    lines = net.table().splitlines()
    assert "\033[92mx\033[0m, \033[93;1;4mspare\033[0m" in lines[2]
    assert "\033[92mx\033[0m -> \033[94mc\033[0m" in " ".join(lines[3].split())
    assert "\033[41mbb\033[0m" in lines[7]
    assert lines[-1] == "written by no layer: bb"


def test_what_cannot_be_built_is_shown_as_far_as_it_is_defined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (net,) = summarize(write(tmp_path, NET.replace('bottom: "b"', 'bottom: "bb"')))
    assert net.unknown == ["bb"]
    assert net.parameters is None
    assert all(layer.shapes is None for layer in net.layers)
    assert "Unknown bottom" in str(net.problem) or '"bb"' in str(net.problem)
    assert "the TEST net is shown without shapes: " in caplog.text
    assert MARKS.sub("", net.table()).splitlines()[1].split()[-1] == "arguments"


def test_data_that_is_absent(caplog: pytest.LogCaptureFixture) -> None:
    path = models.path("lenet", "train_val")
    assert path
    train, test = summarize(path)
    assert (train.role, test.role) == ("TRAIN net", "TEST net")
    assert "--synthetic goes without the data" in caplog.text
    train, test = summarize(path, synthetic=True, image=(1, 28, 28))
    assert train.layers[1].shapes == [(64, 20, 24, 24)]
    assert (train.parameters, test.unconsumed) == (431080, ["accuracy", "loss"])


def test_one_phase() -> None:
    net, solver = models.path("digits", "train_val"), models.path("digits", "solver")
    assert net
    assert solver
    assert [it.role for it in summarize(net, phase=TRAIN)] == ["TRAIN net"]
    assert [it.role for it in summarize(solver, phase=TEST)] == ["test net #0"]
    assert len(summarize(solver)) == 2


def test_a_blob_that_is_taken_in_place_at_the_end_hangs_loose(tmp_path: Path) -> None:
    (net,) = summarize(write(tmp_path, NET.partition('layer { name: "a"')[0]))
    assert net.unconsumed == ["spare", "c"]


def test_wide_cells_move_the_rest_as_little_as_possible(tmp_path: Path) -> None:
    (net,) = summarize(
        write(tmp_path, NET.replace('name: "relu"', 'name: "a_long_name_for_a_relu"'))
    )
    rows = MARKS.sub("", net.table(max_width=8)).splitlines()[1:]
    assert rows[3].startswith("a_long_name_for_a_relu  ReLU")
    assert rows[0].index("type") == 10
    assert rows[0].index("arguments") == rows[4].index(" 5  ") + 1  # in its place again


def test_json(tmp_path: Path) -> None:
    (told,) = json.loads(as_json(summarize(write(tmp_path, NET))))
    assert (told["name"], told["macs"], told["unconsumed"]) == ("it", 4736, ["spare", "far"])
    assert told["layers"][1]["params"][0] == {"name": "w", "lr_mult": 0.5, "decay_mult": 1.0}
    assert told["layers"][1]["shapes"] == [[2, 4, 4, 4]]


def test_a_prototxt_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layr"):
        summarize(write(tmp_path, "layr { }"))


ARGUMENTS = {
    'type: "Convolution" convolution_param { num_output: 8 kernel_size: 5 stride: 2 pad: 1 group: 4 }': "5/2+1 8/4",
    'type: "Convolution" convolution_param { num_output: 8 kernel_h: 1 kernel_w: 3 dilation: 2 }': "1x3*2 8",
    'type: "Pooling" pooling_param { kernel_size: 3 stride: 2 }': "3/2",
    'type: "Pooling" pooling_param { kernel_h: 2 kernel_w: 4 pad_h: 1 pad_w: 2 }': "2x4+1x2",
    'type: "Pooling" pooling_param { global_pooling: true }': "global",
    'type: "InnerProduct" inner_product_param { num_output: 10 }': "10",
    'type: "ReLU"': "",
}


@pytest.mark.parametrize("definition", ARGUMENTS)
def test_arguments(definition: str) -> None:
    assert arguments(text.parse(definition, LayerParameter())) == ARGUMENTS[definition]
