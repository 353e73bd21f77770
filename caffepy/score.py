"""`caffe test`: the means of a net's outputs over a number of test batches."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from caffepy import ops
from caffepy.device import first_device
from caffepy.net import Net
from caffepy.net.weights import load_weights
from caffepy.proto.caffe_pb2 import TEST
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import read_net
from caffepy.report.text import number, scalars
from caffepy.reporter import Output

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """What a net scored: mean loss and mean outputs (name, values, loss weight) over `iterations` batches."""

    iterations: int
    loss: float
    outputs: Sequence[Output]

    def table(self) -> str:
        """One line a scalar, as Caffe prints it."""
        return "\n".join(scalars(self.outputs))

    def json(self) -> str:
        """An object with iterations, loss, and outputs by name; an output of several scalars is a list of them."""
        outputs = {name: np.asarray(values).tolist() for name, values, _ in self.outputs}
        return json.dumps({"iterations": self.iterations, "loss": self.loss, "outputs": outputs})


def score(
    model: str,
    weights: Iterable[str],
    *,
    iterations: int = 50,
    gpu: str | None = None,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
) -> Score:
    """Run the net of the file `model` in its TEST phase with these trained weights; logs each batch as Caffe does.

    `gpu`: the number of a GPU, of which Caffe's tool takes the first; `precision` there: "fp32", "tf32", "bf16" or
    "fp16". ConfigError and DataError say what is wrong with the net, the weights or the data.
    """
    device = first_device(gpu)
    if threads:
        ops.backend(device).set_num_threads(threads)
    param = read_net(model)
    ops.set_precision(device, choose_precision(param, precision))
    param.state.phase, param.state.level = TEST, level
    param.state.stage.extend(stages)
    net = Net(param, device=device, path=model)
    try:
        for path in weights:
            load_weights(net, path)
        return _run(net, iterations)
    finally:
        net.close()


def _run(net: Net, iterations: int) -> Score:
    log.info("Running for %d iterations.", iterations)
    loss, sums = 0.0, [np.zeros(net.blobs[name].shape) for name in net.outputs]
    loss_weights = net.blob_loss_weights
    steps = net.steps if net.device.store is not None and not net.debug_info else None
    for batch in range(iterations):
        net.forward(steps=steps)
        net.device.look()
        loss += net.loss()
        for name, total in zip(net.outputs, sums, strict=True):
            values = net.blobs[name].host_data
            total += values
            for value in values.reshape(-1):
                log.info("Batch %d, %s = %s", batch, name, number(value))
    outputs = [
        (name, (total / iterations).astype(np.float32), loss_weights[name])
        for name, total in zip(net.outputs, sums, strict=True)
    ]
    log.info("Loss: %s", number(loss / iterations))
    for line in scalars(outputs):
        log.info(line)
    return Score(iterations, loss / iterations, outputs)
