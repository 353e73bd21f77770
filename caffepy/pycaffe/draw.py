"""Pictures of nets in graphviz's style: layers as boxes, blobs as octagons, Caffe's colours."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from caffepy.core.errors import UsageError
from caffepy.core.files import written
from caffepy.drawing import labels
from caffepy.drawing.bitmap import encoded
from caffepy.drawing.svg import Graph, Node, svg
from caffepy.models.synthetic import synthetic as without_data
from caffepy.net import Net
from caffepy.net.build import filter_state
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter, PoolingParameter
from caffepy.report.text import extension_of

TEXT = ("dot", "gv")
SIMPLE = ("svg", "png", "jpg")
FORMATS = ("png", "svg", "pdf", "jpg", "gif", "eps", "ps", *TEXT)

LAYER = "#6495ED"
IN_PLACE = "box", "#90EE90"
BLOB = "octagon", "#E0E0E0"
COLOURS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
LAYER_STYLE_DEFAULT, NEURON_LAYER_STYLE, BLOB_STYLE = (
    {"shape": shape, "fillcolor": colour, "style": "filled"}
    for shape, colour in (("record", LAYER), ("record", IN_PLACE[1]), BLOB)
)
"""Caffe's styles, for scripts that draw their own graphs by pydot."""
Shapes = Sequence[Sequence[tuple[int, ...]]]


def get_pydot_graph(
    caffe_net: NetParameter,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
) -> Any:
    """Return the graph of `dot_text` as an object of pydot, for scripts that change it.

    UsageError if pydot is not installed; nothing else here needs it.
    """
    try:
        import pydot
    except ImportError:
        raise UsageError(
            "a graph of pydot needs pydot: pip install pydot; dot_text gives the same as text"
        ) from None
    text = dot_text(caffe_net, rankdir, label_edges, phase, display_lrm)
    graphs = pydot.graph_from_dot_data(text)
    assert graphs, "pydot reads what dot_text writes"
    return graphs[0]


def draw_net_to_file(
    caffe_net: NetParameter,
    filename: str,
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
    shapes: Shapes | None = None,
) -> None:
    """Write the picture of an upgraded net, in the format of the file's extension.

    UsageError for an unknown extension, or for a format that needs graphviz if it is not installed.
    """
    ext = extension_of(filename, FORMATS)
    content = draw_net(caffe_net, rankdir, ext, phase, display_lrm, shapes)
    with written(filename) as temporary, open(temporary, "wb") as file:
        file.write(content)


def draw_net(
    caffe_net: NetParameter,
    rankdir: str,
    ext: str = "png",
    phase: int | None = None,
    display_lrm: bool = False,
    shapes: Shapes | None = None,
) -> bytes:
    """Return a picture of the graph of `dot_text` as the content of a file of the format `ext`.

    SVG, PNG and JPEG are drawn by graphviz if it is installed, else in a simpler way; other formats
    are a UsageError without it.
    """
    graph = _graph(caffe_net, rankdir, True, phase, display_lrm, shapes)
    if ext in TEXT:
        return _dot(graph).encode()
    if ext in SIMPLE and shutil.which("dot") is None:
        return svg(graph).encode() if ext == "svg" else encoded(graph, ext)
    try:
        done = subprocess.run(
            ["dot", f"-T{ext}"], input=_dot(graph).encode(), capture_output=True, check=False
        )
    except OSError:
        raise UsageError(
            f'pictures in {ext.upper()} are drawn by graphviz, whose program "dot" was not found: '
            "install graphviz (apt-get install graphviz, brew install graphviz, conda install "
            "graphviz), or draw to a .png or .svg file"
        ) from None
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        raise UsageError(f"graphviz could not draw {ext.upper()}: {output}")
    return done.stdout


def dot_text(
    net: NetParameter,
    rankdir: str = "LR",
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
    shapes: Shapes | None = None,
) -> str:
    """Return the graph of an upgraded net in graphviz's DOT language.

    `rankdir` is the direction of the data: LR, RL, TB or BT. With a `phase` only its layers are
    drawn. `label_edges` labels arrows with numbers of outputs and batch sizes, or with `shapes`, as
    `shapes_of` returns them for this phase; `display_lrm` adds the lr_mults of parameters to the
    layers.
    """
    return _dot(_graph(net, rankdir, label_edges, phase, display_lrm, shapes))


def shapes_of(
    net: NetParameter,
    phase: int | None = None,
    path: str | None = None,
    synthetic: bool = False,
    image: Sequence[int] | None = None,
) -> Shapes:
    """Return the shapes of the tops of each layer in a picture of this phase, empty if unknown.

    Without a phase, layers of both phases have the shapes of training. `path` is the net's file;
    `synthetic` replaces data by random images, of the shape `image` (C, H, W) if the net does not
    state it. ConfigError and DataError say why a net cannot be built.
    """
    ruled = any(
        rule.HasField("phase") for layer in net.layer for rule in (*layer.include, *layer.exclude)
    )
    phases = (TRAIN, TEST) if phase is None and ruled else (TEST if phase is None else phase,)
    drawn = list(net.layer if phase is None else _in_phase(net, phase).layer)
    shapes: list[Sequence[tuple[int, ...]]] = [()] * len(drawn)
    for one in phases:
        state = _in_phase(net, one)
        shown = without_data(state, image=image) if synthetic else state
        built = Net(shown, device=ShapesOnlyDevice(seed=0), path=path)
        found = [(node.name, node.tops) for node in built.nodes]
        built.close()
        place = 0
        for layer in state.layer:
            place = next(i for i in range(place, len(drawn)) if drawn[i] == layer)
            tops = next(tops for name, tops in found if name == layer.name)
            shapes[place] = shapes[place] or [top.shape for top in tops]
    return shapes


def _in_phase(net: NetParameter, phase: int) -> NetParameter:
    state = NetParameter()
    state.CopyFrom(net)
    state.state.phase = phase  # type: ignore[assignment] # phases are numbers to pycaffe's users
    return filter_state(state)


def _graph(
    net: NetParameter,
    rankdir: str,
    label_edges: bool,
    phase: int | None,
    display_lrm: bool,
    shapes: Shapes | None,
) -> Graph:
    if phase is not None:
        net = _in_phase(net, phase)
    graph = Graph(net.name or "Net", rankdir)
    beside = rankdir in ("TB", "BT")
    blobs: dict[str, Node] = {}
    for i, layer in enumerate(net.layer):
        name = f"layer {i} {layer.name}"
        style = "box", COLOURS.get(layer.type, LAYER)
        if len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]:
            style = IN_PLACE
        graph.nodes[name] = Node(layer_label(layer, beside, display_lrm), *style)
        blobs.update((f"blob {blob}", Node(blob, *BLOB)) for blob in (*layer.bottom, *layer.top))
        graph.edges += [(f"blob {blob}", name, "") for blob in layer.bottom]
        texts = [edge_label(layer) if label_edges else ""] * len(layer.top)
        if shapes and shapes[i]:
            texts = [" ".join(map(str, shape)) or "()" for shape in shapes[i]]
        for blob, text in zip(layer.top, texts, strict=True):
            graph.edges.append((name, f"blob {blob}", text))
    graph.nodes.update(blobs)
    return graph


def _dot(graph: Graph) -> str:
    lines = [f"rankdir={graph.rankdir};"]
    for name, (label, shape, colour) in graph.nodes.items():
        style = {"label": label, "shape": shape, "style": "filled", "fillcolor": colour}
        attributes = ", ".join(f"{key}={_quoted(value)}" for key, value in style.items())
        lines.append(f"{_quoted(name)} [{attributes}];")
    for start, end, label in graph.edges:
        labelled = f" [label={_quoted(label)}]" if label else ""
        lines.append(f"{_quoted(start)} -> {_quoted(end)}{labelled};")
    return f"digraph {_quoted(graph.name)} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def layer_label(layer: LayerParameter, beside: bool = False, display_lrm: bool = False) -> str:
    """Return name, type and sizes of a layer, one line each, or all in one line if `beside`."""
    kind = layer.type
    if layer.HasField("pooling_param"):
        kind = f"{PoolingParameter.PoolMethod.Name(layer.pooling_param.pool)} Pooling"
    elif layer.HasField("python_param"):
        kind = f"Python {layer.python_param.layer}"
    lines = [layer.name, f"({kind})"]
    if labels.has_windows(layer):
        for name in ("kernel_size", "stride", "pad"):
            lines.append(f"{name.replace('_', ' ')}: {labels.window_size(layer, name)}")
    elif layer.HasField("pooling_param"):
        lines.append("global")
    if labels.is_convolution(layer):
        sizes = {name: labels.window_size(layer, name) for name in ("dilation", "group")}
        lines += [f"{name}: {size}" for name, size in sizes.items() if size != "1"]
    outputs = labels.number(layer, "num_output")
    if outputs is not None:
        lines.append(f"outputs: {outputs}")
    if display_lrm and layer.param:
        lines.append("lr mult: " + ", ".join(f"{spec.lr_mult:g}" for spec in layer.param))
    return (" " if beside else "\n").join(lines)


def edge_label(layer: LayerParameter) -> str:
    """Return the label of a layer's outgoing arrows: batch size of data, or number of outputs."""
    size, outputs = labels.number(layer, "batch_size"), labels.number(layer, "num_output")
    if size is not None:
        return f"Batch {size}"
    return "" if outputs is None else f"{outputs}"


def get_layer_label(layer: LayerParameter, rankdir: str, display_lrm: bool = False) -> str:
    """Return `layer_label` in quotes, for a node of pydot."""
    return _quoted(layer_label(layer, rankdir in ("TB", "BT"), display_lrm))


def get_edge_label(layer: LayerParameter) -> str:
    """Return `edge_label`, or empty quotes, for an edge of pydot."""
    return edge_label(layer) or '""'


def get_layer_lr_mult(layer: LayerParameter) -> tuple[float, ...]:
    """Return the lr_mults of weights and biases; ValueError for layers without them."""
    if layer.type not in ("Convolution", "Deconvolution", "InnerProduct"):
        raise ValueError(f"{layer.type} layers do not have a learning rate multiplier")
    given = [spec.lr_mult for spec in layer.param]
    return (*given, *[1.0] * (2 - len(given)))


def get_pooling_types_dict() -> dict[int, str]:
    """Return the names of the ways to pool by number."""
    return {number: name for name, number in PoolingParameter.PoolMethod.items()}


def choose_color_by_layertype(layertype: str) -> str:
    """Return the colour of layers of a type."""
    return COLOURS.get(layertype, LAYER)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
