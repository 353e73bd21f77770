"""The bundled nets with random weights, and the digits trained: logits of onnxruntime and of
caffepy.
"""

from pathlib import Path

import numpy as np
import pytest

from caffepy import models
from caffepy.commands.export import export_onnx
from caffepy.commands.test import test as score
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.export.write import Batch
from caffepy.net import Net
from caffepy.net.weights import load_weights
from caffepy.proto.caffe_pb2 import TEST, NetParameter
from caffepy.proto.text import read_net

from ..models.test_detectors import DETECTORS
from .models import compare, model_of, randomize

GOLDEN = Path(__file__).parents[1] / "golden" / "digits"
WIDEST = 256  # outputs of inner products in the nets that have 4096


def deploy(name: str) -> NetParameter:
    """The deploy net for one image without its Softmax, which would hide differences, and with thin
    inner products.
    """
    path = models.path(name, "deploy")
    assert path is not None
    net = read_net(path)
    assert net.layer[-1].type == "Softmax"
    del net.layer[-1]
    net.layer[0].input_param.shape[0].dim[0] = 1
    for layer in net.layer:
        if layer.inner_product_param.num_output > 1000:
            layer.inner_product_param.num_output = WIDEST
    return net


# Of deep nets with random weights the scores are a matter of rounding, and they take long; all their
# layers are in test_layers.py. Detectors choose boxes by such scores.
DEEP = {"densenet121", "digits_ssd", "mobilenet_v2", "se_resnet50", "segnet", *DETECTORS}


@pytest.mark.parametrize("name", sorted(set(models.names()) - DEEP))
def test_bundled_nets(name: str) -> None:
    net = randomize(Net(deploy(name), device=Device(seed=1)))
    model = model_of(net, dynamic=True)
    (data,) = model.proto.graph.input
    assert [d.dim_param or d.dim_value for d in data.type.tensor_type.shape.dim] == [
        "N",
        *net.blobs["data"].shape[1:],
    ]
    stored = {t.name for t in model.proto.graph.initializer}
    layers = zip(net.layer_names, net.layers, strict=True)
    assert {f"{name}.{k}" for name, layer in layers for k in range(len(layer.blobs[:2]))} <= stored
    compare(model, relative=1e-4)
    if name in ("lenet", "digits", "cifar10_quick"):
        Batch(net).resize(3)
        compare(model, relative=1e-4)


def test_trained_digits_are_recognized(tmp_path: Path) -> None:
    weights, file = str(GOLDEN / "digits_iter_500.caffemodel"), str(tmp_path / "digits.onnx")
    train_val = str(GOLDEN / "train_val.prototxt")
    done = export_onnx(train_val, [weights], file, probabilities=True, check=True)
    assert done.outputs == {"prob": [99, 10]}
    net = read_net(train_val)
    net.state.phase = TEST
    built = Net(net, path=train_val)
    try:
        load_weights(built, weights)
        right = []
        for _ in range(3):
            built.forward()
            found = answers_of_file(file, built.blobs["data"].data)
            right.append(float((found.argmax(1) == built.blobs["label"].data).mean()))
    finally:
        built.close()
    scores = {
        name: float(values) for name, values, _ in score(train_val, [weights], iterations=3).outputs
    }
    assert scores["accuracy"] == pytest.approx(np.mean(right), abs=1e-6)


def answers_of_file(file: str, data: Array) -> Array:
    """Outputs of the model in the file for the data."""
    pytest.importorskip("onnxruntime")
    from caffepy.export.model import Runtime

    (answer,) = Runtime(Path(file).read_bytes()).run(["prob"], {"data": data})
    return answer
