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
