"""Pictures of nets in graphviz's style: layers as boxes, blobs as octagons, Caffe's colours."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from caffepy.core.errors import UsageError
from caffepy.core.files import written
from caffepy.drawing.bitmap import encoded
from caffepy.drawing.labels import (
    batch_size,
    has_windows,
    is_convolution,
    num_output,
    window_size,
)
from caffepy.drawing.svg import Graph, Node, svg
from caffepy.models.synthetic import synthetic as without_data
from caffepy.net import Net
from caffepy.net.build import filter_state
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter, PoolingParameter

TEXT = ("dot", "gv")
SIMPLE = ("svg", "png", "jpg")
PICTURES = ("png", "svg", "pdf", "jpg", "gif", "eps", "ps")

LAYER = "#6495ED"
IN_PLACE = "box", "#90EE90"
BLOB = "octagon", "#E0E0E0"
COLOURS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
Shapes = Sequence[Sequence[tuple[int, ...]]]


def get_pydot_graph(
    caffe_net: NetParameter,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
) -> Any:
    """Return the graph as an object of pydot, for scripts that change it; for the arguments see
    `dot_text`.

    UsageError if pydot is not installed; nothing else here needs it.
    """
    try:
        import pydot
    except ImportError:
        raise UsageError(
            "a graph of pydot needs pydot: pip install pydot; dot_text gives the same as text"
        ) from None
    graphs = pydot.graph_from_dot_data(
        dot_text(caffe_net, rankdir, label_edges, phase, display_lrm)
    )
    assert graphs, "pydot reads what dot_text writes"
    return graphs[0]


def draw_net_to_file(
    net: NetParameter,
    filename: str,
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
    shapes: Shapes | None = None,
) -> None:
    """Write the picture of an upgraded net, in the format of the file's extension.

    UsageError for an unknown extension, or for a format that needs graphviz if it is not installed.
    """
    content = draw_net(net, rankdir, extension(filename), phase, display_lrm, shapes)
    with written(filename) as temporary, open(temporary, "wb") as file:
        file.write(content)


def draw_net(
    net: NetParameter,
    rankdir: str,
    ext: str = "png",
    phase: int | None = None,
    display_lrm: bool = False,
    shapes: Shapes | None = None,
) -> bytes:
    """Return the content of a picture file of the format `ext`; see `dot_text` for the other
    arguments.

    SVG, PNG and JPEG are drawn by graphviz if it is installed, else in a simpler way; other formats
    are a UsageError without it.
    """
    graph = _graph(net, rankdir, True, phase, display_lrm, shapes)
    if ext in TEXT:
        return _dot(graph).encode()
    if ext in SIMPLE and shutil.which("dot") is None:
        return svg(graph).encode() if ext == "svg" else encoded(graph, ext)
    return _rendered(_dot(graph), ext)


def extension(filename: str) -> str:
    """Return the format of a file name; UsageError if it is unknown."""
    ext = filename.rpartition(".")[2].lower()
    if ext not in TEXT + PICTURES:
        known = ", ".join(f".{name}" for name in PICTURES + TEXT)
        raise UsageError(f'the extension of "{filename}" must tell the format: {known}')
    return ext


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
        built = Net(without_data(state, image=image) if synthetic else state, path=path)
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
        graph.nodes[name] = Node(layer_label(layer, beside, display_lrm), *_style(layer))
        blobs.update((f"blob {blob}", Node(blob, *BLOB)) for blob in (*layer.bottom, *layer.top))
        graph.edges += [(f"blob {blob}", name, "") for blob in layer.bottom]
        labels = [edge_label(layer) if label_edges else ""] * len(layer.top)
        if shapes and shapes[i]:
            labels = [" ".join(map(str, shape)) or "()" for shape in shapes[i]]
        graph.edges += [
            (name, f"blob {blob}", label) for blob, label in zip(layer.top, labels, strict=True)
        ]
    graph.nodes.update(blobs)
    return graph


def _dot(graph: Graph) -> str:
    lines = [f"rankdir={graph.rankdir};"]
    lines += [_node(name, node) for name, node in graph.nodes.items()]
    lines += [_edge(*edge) for edge in graph.edges]
    return f"digraph {_quoted(graph.name)} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def layer_label(layer: LayerParameter, beside: bool = False, display_lrm: bool = False) -> str:
    """Return name, type and sizes of a layer, one line each, or all in one line if `beside`."""
    lines = [layer.name, f"({_type(layer)})", *_sizes(layer)]
    if display_lrm and layer.param:
        lines.append("lr mult: " + ", ".join(f"{spec.lr_mult:g}" for spec in layer.param))
    return (" " if beside else "\n").join(lines)


def edge_label(layer: LayerParameter) -> str:
    """Return the label of a layer's outgoing arrows: the batch size of data, the number of
    outputs."""
    size, outputs = batch_size(layer), num_output(layer)
    if size is not None:
        return f"Batch {size}"
    return "" if outputs is None else f"{outputs}"


def _style(layer: LayerParameter) -> tuple[str, str]:
    if len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]:
        return IN_PLACE
    return "box", COLOURS.get(layer.type, LAYER)


def _type(layer: LayerParameter) -> str:
    if layer.HasField("pooling_param"):
        return f"{PoolingParameter.PoolMethod.Name(layer.pooling_param.pool)} Pooling"
    if layer.HasField("python_param"):
        return f"Python {layer.python_param.layer}"
    return layer.type


def _sizes(layer: LayerParameter) -> Iterator[str]:
    """Yield lines with kernel, stride, padding and outputs, of the layers that have them."""
    if has_windows(layer):
        for name in ("kernel_size", "stride", "pad"):
            yield f"{name.replace('_', ' ')}: {window_size(layer, name)}"
    elif layer.HasField("pooling_param"):
        yield "global"
    if is_convolution(layer):
        for name in ("dilation", "group"):
            size = window_size(layer, name)
            if size != "1":
                yield f"{name}: {size}"
    outputs = num_output(layer)
    if outputs is not None:
        yield f"outputs: {outputs}"


def _node(name: str, node: Node) -> str:
    style = {"label": node.label, "shape": node.shape, "style": "filled", "fillcolor": node.colour}
    attributes = ", ".join(f"{key}={_quoted(value)}" for key, value in style.items())
    return f"{_quoted(name)} [{attributes}];"


def _edge(start: str, end: str, label: str = "") -> str:
    return f"{_quoted(start)} -> {_quoted(end)}" + (f" [label={_quoted(label)}];" if label else ";")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _rendered(text: str, ext: str) -> bytes:
    try:
        done = subprocess.run(
            ["dot", f"-T{ext}"], input=text.encode(), capture_output=True, check=False
        )
    except OSError:
        raise UsageError(
            f'pictures in {ext.upper()} are drawn by graphviz, whose program "dot" was not '
            f"found: install graphviz "
            "(apt-get install graphviz, brew install graphviz, conda install graphviz), or "
            "draw to a .png or .svg file"
        ) from None
    if done.returncode:
        raise UsageError(
            f"graphviz could not draw {ext.upper()}: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout
