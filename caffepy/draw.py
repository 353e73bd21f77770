"""Pictures of nets, as graphviz draws them: layers as boxes, blobs as octagons, Caffe's colours."""

import subprocess
from collections.abc import Iterator
from typing import Any

from caffepy.errors import UsageError
from caffepy.files import written
from caffepy.layer_text import CONVOLUTIONS, OUTPUTS, has_windows, num_output, window_size
from caffepy.net.build import filter_state
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, PoolingParameter

TEXT = ("dot", "gv")
PICTURES = ("png", "svg", "pdf", "jpg", "gif", "eps", "ps")
RANKDIRS = ("LR", "RL", "TB", "BT")

LAYER = {"shape": "box", "style": "filled", "fillcolor": "#6495ED"}
IN_PLACE = LAYER | {"fillcolor": "#90EE90"}
BLOB = {"shape": "octagon", "style": "filled", "fillcolor": "#E0E0E0"}
COLOURS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
BATCHES = {
    "Data": "data_param",
    "HDF5Data": "hdf5_data_param",
    "ImageData": "image_data_param",
    "MemoryData": "memory_data_param",
    "WindowData": "window_data_param",
}


def get_pydot_graph(
    caffe_net: NetParameter,
    rankdir: str,
    label_edges: bool = True,
    phase: int | None = None,
    display_lrm: bool = False,
) -> Any:
    """The graph as an object of pydot, for scripts that change it; for the arguments see `dot_text`.

    UsageError where pydot is not installed; nothing else here needs it.
    """
    try:
        import pydot
    except ImportError:
        raise UsageError("a graph of pydot needs pydot: pip install pydot; dot_text gives the same as text") from None
    (graph,) = pydot.graph_from_dot_data(dot_text(caffe_net, rankdir, label_edges, phase, display_lrm))
    return graph


def draw_net_to_file(
    net: NetParameter, filename: str, rankdir: str = "LR", phase: int | None = None, display_lrm: bool = False
) -> None:
    """Write the picture of an upgraded net, in the format that the file's extension names.

    UsageError for an unknown extension, or if a picture is asked for where graphviz is not installed.
    """
    content = draw_net(net, rankdir, extension(filename), phase, display_lrm)
    with written(filename) as temporary, open(temporary, "wb") as file:
        file.write(content)


def draw_net(
    net: NetParameter, rankdir: str, ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """The content of a picture file of the format `ext`; see `dot_text` for the other arguments."""
    text = dot_text(net, rankdir, phase=phase, display_lrm=display_lrm)
    return text.encode() if ext in TEXT else _rendered(text, ext)


def extension(filename: str) -> str:
    """The format that a file name asks for; UsageError if there is no such format."""
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
) -> str:
    """The graph of an upgraded net in graphviz's DOT language.

    `rankdir` is the direction of the data: LR, RL, TB or BT. Of a `phase` only its layers are drawn. `label_edges` puts
    numbers of outputs and batch sizes beside the arrows, `display_lrm` the lr_mults of parameters into the layers.
    """
    if phase is not None:
        state = NetParameter()
        state.CopyFrom(net)
        state.state.phase = phase  # type: ignore[assignment] # phases are numbers to pycaffe's users
        net = filter_state(state)
    beside = rankdir in ("TB", "BT")
    layers, edges = [], []
    blobs: dict[str, str] = {}
    for i, layer in enumerate(net.layer):
        node = f"layer {i} {layer.name}"
        layers.append(_node(node, layer_label(layer, beside, display_lrm), _style(layer)))
        blobs.update((name, _node(f"blob {name}", name, BLOB)) for name in (*layer.bottom, *layer.top))
        edges += [_edge(f"blob {name}", node) for name in layer.bottom]
        label = edge_label(layer) if label_edges else ""
        edges += [_edge(node, f"blob {name}", label) for name in layer.top]
    lines = [f"rankdir={rankdir};", *layers, *blobs.values(), *edges]
    return f"digraph {_quoted(net.name or 'Net')} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def layer_label(layer: LayerParameter, beside: bool = False, display_lrm: bool = False) -> str:
    """Name, type and the numbers that shape the tops; a line each, or in one line if `beside`."""
    lines = [layer.name, f"({_type(layer)})", *_sizes(layer)]
    if display_lrm and layer.param:
        lines.append("lr mult: " + ", ".join(f"{spec.lr_mult:g}" for spec in layer.param))
    return (" " if beside else "\n").join(lines)


def edge_label(layer: LayerParameter) -> str:
    """What the arrows to the tops say: the batch size of data, the number of outputs."""
    if layer.type in BATCHES:
        return f"Batch {getattr(layer, BATCHES[layer.type]).batch_size}"
    return f"{num_output(layer)}" if layer.type in OUTPUTS else ""


def _style(layer: LayerParameter) -> dict[str, str]:
    if len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]:
        return IN_PLACE
    return LAYER | {"fillcolor": COLOURS.get(layer.type, LAYER["fillcolor"])}


def _type(layer: LayerParameter) -> str:
    if layer.type == "Pooling":
        return f"{PoolingParameter.PoolMethod.Name(layer.pooling_param.pool)} Pooling"
    if layer.type == "Python":
        return f"Python {layer.python_param.layer}"
    return layer.type


def _sizes(layer: LayerParameter) -> Iterator[str]:
    """The lines about kernel, stride, padding and outputs, of the layers that have them."""
    if has_windows(layer):
        for name in ("kernel_size", "stride", "pad"):
            yield f"{name.replace('_', ' ')}: {window_size(layer, name)}"
    elif layer.type == "Pooling":
        yield "global"
    if layer.type in CONVOLUTIONS:
        for name in ("dilation", "group"):
            size = window_size(layer, name)
            if size != "1":
                yield f"{name}: {size}"
    if layer.type in OUTPUTS:
        yield f"outputs: {num_output(layer)}"


def _node(name: str, label: str, style: dict[str, str]) -> str:
    attributes = ", ".join(f"{key}={_quoted(value)}" for key, value in {"label": label, **style}.items())
    return f"{_quoted(name)} [{attributes}];"


def _edge(start: str, end: str, label: str = "") -> str:
    return f"{_quoted(start)} -> {_quoted(end)}" + (f" [label={_quoted(label)}];" if label else ";")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _rendered(text: str, ext: str) -> bytes:
    try:
        done = subprocess.run(["dot", f"-T{ext}"], input=text.encode(), capture_output=True, check=False)
    except OSError:
        raise UsageError(
            f'pictures in {ext.upper()} are drawn by graphviz, whose program "dot" was not found: install graphviz '
            "(apt-get install graphviz, brew install graphviz, conda install graphviz), or give a file name in .dot"
        ) from None
    if done.returncode:
        raise UsageError(f"graphviz could not draw {ext.upper()}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
