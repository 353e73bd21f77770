"""The graph as ONNX's protobuf, checked by onnx; and onnxruntime, to compare results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caffepy import __version__
from caffepy.core.errors import ConfigError, UsageError, install
from caffepy.device.blob import Array
from caffepy.export.graph import Body, Dim, Graph, Node

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ImportError as error:
    raise UsageError(f"an ONNX file needs the package onnx ({error}): {install('onnx')}") from None

LIMIT = 1 << 31
"""Number of bytes that a protobuf file cannot reach."""


def to_model(
    graph: Graph,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: Mapping[str, Sequence[Dim]],
) -> bytes:
    """Return the file's content, checked by onnx; ConfigError if it would reach 2 GB."""
    used = {name for node in graph.nodes for name in _reads(node)}
    values = {name: value for name, value in graph.values.items() if name in used}
    size = sum(value.nbytes for value in values.values())
    if size >= LIMIT - (1 << 20):
        raise ConfigError(
            f"the parameters take {size / 1e9:.1f} GB, and an ONNX file must stay below 2 GB"
        )
    inner = [t for node in graph.nodes for t in node.outputs if t in shapes and t not in outputs]
    proto = helper.make_graph(
        _nodes(graph.nodes),
        name or "net",
        [_typed(t, shapes[t]) for t in inputs],
        [_typed(t, shapes[t]) for t in outputs],
        [numpy_helper.from_array(np.asarray(value, order="C"), t) for t, value in values.items()],
        value_info=[_typed(t, shapes[t]) for t in inner],
    )
    opset = helper.make_opsetid("", graph.opset)
    model = helper.make_model(
        proto,
        opset_imports=[opset],
        ir_version=helper.find_min_ir_version_for([opset]),
        producer_name="caffepy",
        producer_version=__version__,
    )
    content: bytes = model.SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    return content


def _reads(node: Node) -> list[str]:
    bodies = [value for value in node.attributes.values() if isinstance(value, Body)]
    return node.inputs + [name for body in bodies for inner in body.nodes for name in _reads(inner)]


def _nodes(nodes: Sequence[Node], suffix: str = "") -> list[Any]:
    """Name the last operator of a layer after the layer, and number those before it."""
    total, count = Counter(node.layer for node in nodes), Counter[str]()
    written = []
    for node in nodes:
        count[node.layer] += 1
        number = "" if count[node.layer] == total[node.layer] else f"_{count[node.layer]}"
        attributes = {key: _attribute(value) for key, value in node.attributes.items()}
        name = f"{node.layer}{suffix}{number}"
        written.append(helper.make_node(node.op, node.inputs, node.outputs, name, **attributes))
    return written


def _attribute(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return helper.np_dtype_to_tensor_dtype(value)
    if isinstance(value, np.ndarray):
        return numpy_helper.from_array(value)
    if isinstance(value, Body):
        inputs = [_typed(name, shape) for name, shape in value.inputs]
        outputs = [_typed(name, shape) for name, shape in value.outputs]
        return helper.make_graph(_nodes(value.nodes, "_step"), "body", inputs, outputs)
    return value


def _typed(name: str, shape: Sequence[Dim]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


class Runtime:
    """onnxruntime with a model; UsageError if it is not installed, ConfigError if it cannot run."""

    def __init__(self, content: bytes) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise UsageError(
                f"checking a model needs onnxruntime ({error}): pip install onnxruntime"
            ) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        cpu = ["CPUExecutionProvider"]
        try:
            self.session = onnxruntime.InferenceSession(content, options, providers=cpu)
        except Exception as error:
            raise ConfigError(
                f"onnxruntime {onnxruntime.__version__} does not take the model: {error}"
            ) from None

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
        """The outputs' values."""
        try:
            found: list[Array] = self.session.run(list(outputs), dict(inputs))
        except Exception as error:  # onnxruntime's errors have no public base class
            raise ConfigError(f"onnxruntime cannot compute the model: {error}") from None
        return found
