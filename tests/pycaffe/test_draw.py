import sys

import caffepy.draw
import pytest
from google.protobuf import text_format

from caffepy.proto import caffe_pb2

NET = text_format.Parse(
    """
    name: "it" input: "x" input_dim: 1
    layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 7 kernel_size: 3 } }
    layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
    layer { name: "d" type: "Dropout" bottom: "c" top: "d" include { phase: TRAIN } }
    """,
    caffe_pb2.NetParameter(),
)


@pytest.mark.parametrize("graphviz", [True, False])
def test_a_net_as_scripts_read_it_is_drawn(graphviz: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not upgraded, and whether graphviz is installed or not."""
    if not graphviz:
        monkeypatch.setenv("PATH", "")
    before = NET.SerializeToString()
    assert caffepy.draw.draw_net(NET, "LR").startswith(b"\x89PNG")
    assert NET.SerializeToString() == before
    assert b"Dropout" in caffepy.draw.draw_net(NET, "TB", "dot", phase=caffepy.TRAIN)
    assert b"Dropout" not in caffepy.draw.draw_net(NET, "TB", "dot", caffepy.TEST)


def test_parts_for_graphs_that_scripts_draw_themselves() -> None:
    draw = caffepy.draw
    conv, relu, _ = NET.layer
    assert (
        draw.get_layer_label(conv, "TB")
        == '"c (Convolution) kernel size: 3 stride: 1 pad: 0 outputs: 7"'
    )
    assert draw.get_layer_label(relu, "LR") == r'"r\n(ReLU)"'
    assert [draw.get_edge_label(layer) for layer in (conv, relu)] == ["7", '""']
    assert draw.get_layer_lr_mult(conv) == (1, 1)
    with pytest.raises(ValueError, match="ReLU layers do not have a learning rate multiplier"):
        draw.get_layer_lr_mult(relu)
    of_caffe, of_forks = {0: "MAX", 1: "AVE", 2: "STOCHASTIC"}, {3: "AVE_TF", 100: "SUM"}
    assert draw.get_pooling_types_dict() == {**of_caffe, **of_forks}
    assert draw.choose_color_by_layertype("Convolution") == "#FF5050"
    assert draw.choose_color_by_layertype("ReLU") == draw.LAYER_STYLE_DEFAULT["fillcolor"]
    assert draw.NEURON_LAYER_STYLE["fillcolor"] == "#90EE90"
    assert draw.BLOB_STYLE == {"shape": "octagon", "fillcolor": "#E0E0E0", "style": "filled"}
    assert draw.draw_net(caffe_net=NET, rankdir="LR", ext="dot").startswith(b"digraph")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what pydot imports
def test_a_graph_of_pydot() -> None:
    pytest.importorskip("pydot")
    graph = caffepy.draw.get_pydot_graph(NET, "LR", label_edges=True, phase=caffepy.TEST)
    labels = {node.get_label().strip('"') for node in graph.get_nodes() if node.get_label()}
    assert {"x", "c"} <= labels
    assert len(graph.get_edges()) == 4
    assert [edge.get_label() for edge in graph.get_edges() if edge.get_label()] == ['"7"']


def test_without_pydot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(RuntimeError, match="a graph of pydot needs pydot: pip install pydot"):
        caffepy.draw.get_pydot_graph(NET, "LR")
