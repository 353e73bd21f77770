"""Nets from text, their models in memory, and what onnxruntime makes of them beside what caffepy
does.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from caffepy.commands import export
from caffepy.device.blob import Array
from caffepy.export import write
from caffepy.export.graph import Graph
from caffepy.export.trace import Trace, trace
from caffepy.net import Net
from tests.net.nets import net_of

onnx = pytest.importorskip("onnx")

INPUT = 'layer { name: "in%d" type: "Input" top: "x%d" input_param { shape { %s } } }\n'


@dataclass
class Model:
    """A net, what of it was written, and the file's content."""

    net: Net
    found: Trace
    graph: Graph
    content: bytes

    @property
    def proto(self) -> "onnx.ModelProto":
        return onnx.load_from_string(self.content)


def inputs(*shapes: tuple[int, ...]) -> str:
    """Input layers with the tops x0, x1, ... of these shapes."""
    return "".join(
        INPUT % (i, i, " ".join(f"dim: {d}" for d in shape)) for i, shape in enumerate(shapes)
    )


def randomize(net: Net, scale: float | None = None) -> Net:
    """Random parameters that keep the size of what goes through them; the variances of BatchNorm
    are positive.
    """
    rng = np.random.default_rng(0)
    for layer in net.layers:
        for k, blob in enumerate(layer.blobs):
            if layer.type == "BatchNorm":
                blob.data[...] = rng.uniform(0.5, 2, blob.shape) if k != 2 else 2
            elif layer.type == "BN":
                blob.data[...] = rng.uniform(0.5, 2, blob.shape)
            elif len(blob.shape) > 1:
                fan = blob.count // blob.shape[0]
                blob.data[...] = rng.standard_normal(blob.shape) * (scale or (2 / fan) ** 0.5)
            else:
                blob.data[...] = rng.uniform(0.5, 1.5, blob.shape)
    return net


def model_of(net: Net, opset: int = 17, dynamic: bool = False) -> Model:
    """The net as a model, for the batch that it has or for any."""
    from caffepy.export.model import to_model

    found = trace(net)
    if dynamic:
        graph, shapes = write.write_dynamic(net, found, opset)
    else:
        graph = write.write_graph(net, found, opset)
        shapes = graph.shapes
    content = to_model(
        graph, net.name, [name for name, _ in found.inputs], found.output_names, shapes
    )
    return Model(net, found, graph, content)


def written(text: str, **how: object) -> Model:
    """The net of this text in its TEST phase, with random parameters, as a model."""
    return model_of(randomize(net_of("state { phase: TEST }" + text)), **how)  # type: ignore[arg-type]


def answers(model: Model, given: dict[str, Array]) -> dict[str, Array]:
    """onnxruntime's outputs by name."""
    pytest.importorskip("onnxruntime")
    from caffepy.export.model import Runtime

    names = model.found.output_names
    return dict(zip(names, Runtime(model.content).run(names, given), strict=True))


def forward(net: Net, given: dict[str, Array]) -> None:
    """caffepy's pass, with these inputs."""
    for name, array in given.items():
        net.blobs[name].data[...] = array
    net.forward()


def compare(model: Model, given: dict[str, Array] | None = None, relative: float = 1e-5) -> None:
    """Hold onnxruntime's outputs to caffepy's: differences up to `relative` of the largest value of
    the output.
    """
    inputs = export.random_inputs(model.net, model.found) | (given or {})
    forward(model.net, inputs)
    for (_, blob), (name, answer) in zip(
        model.found.outputs, answers(model, inputs).items(), strict=True
    ):
        expected = model.net.blobs[blob].data
        assert answer.shape == expected.shape, (
            f"{name}: {answer.shape}, caffepy's has {expected.shape}"
        )
        allowed = relative * max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(answer, expected, rtol=relative, atol=allowed, err_msg=name)
