"""caffepy beside PyTorch on the CPU: forward + backward of one training batch on random input.

Both run the same prototxt, alternately, each time in a process of its own; medians over all rounds
are printed.

usage: python benchmarks/beside_torch.py [--nets lenet:64,cifar10_quick:100] [--rounds 5] [--seconds
3]

Needs PyTorch's CPU build in the environment of caffepy.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from google.protobuf import text_format

from caffepy import models
from caffepy.models.synthetic import image_shape, synthetic
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter, NetParameter, PoolingParameter

NETS = "lenet:64,cifar10_quick:100,caffenet:32,googlenet:16"


def definition(name: str, batch: int) -> NetParameter:
    """The bundled net in phase TRAIN on random images."""
    path = models.path(name, "train_val")
    assert path, f"no bundled model {name}"
    with open(path) as file:
        param = text_format.Parse(file.read(), NetParameter())
    param.state.phase = TRAIN
    return synthetic(param, batch, image_shape(name))


def caffepy_step(param: NetParameter) -> Callable[[], None]:
    """One forward and backward pass of caffepy's net."""
    from caffepy.net import Net

    net = Net(param)
    data = next(i for i, layer in enumerate(net.layers) if layer.type != "DummyData")
    net.forward()

    def step() -> None:
        net.clear_param_diffs()
        net.forward(start=data)
        net.backward()

    return step


def torch_step(param: NetParameter) -> Callable[[], None]:
    """The same of PyTorch: each layer of the prototxt as its module, tops by name."""
    import torch

    from caffepy.net import Net, filter_state

    param = filter_state(param)
    shapes = {name: blob.shape for name, blob in Net(param).blobs.items()}
    generator = torch.Generator().manual_seed(0)
    blobs: dict[str, Any] = {}
    modules: list[tuple[LayerParameter, Any]] = []
    for layer in param.layer:
        if layer.type == "DummyData":
            blobs[layer.top[0]] = torch.randn(shapes[layer.top[0]], generator=generator)
            blobs[layer.top[1]] = torch.zeros(shapes[layer.top[1]], dtype=torch.long)
        else:
            modules.append((layer, torch_module(layer, shapes[layer.bottom[0]])))
    parameters = [p for _, m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()]

    def step() -> None:
        for p in parameters:
            p.grad = None
        values, loss = dict(blobs), torch.zeros(())
        for layer, module in modules:
            out = module(*(values[b] for b in layer.bottom))
            values[layer.top[0]] = out
            if layer.type == "SoftmaxWithLoss":
                loss = loss + (layer.loss_weight[0] if layer.loss_weight else 1) * out
        loss.backward()

    return step


def torch_module(layer: LayerParameter, shape: tuple[int, ...]) -> Any:
    """PyTorch's form of one layer on a bottom of this shape."""
    import torch
    from torch import nn

    if layer.type == "Convolution":
        p = layer.convolution_param
        pair = {
            "stride": p.stride[0] if p.stride else 1,
            "padding": p.pad[0] if p.pad else 0,
            "groups": p.group,
        }
        return nn.Conv2d(shape[1], p.num_output, p.kernel_size[0], bias=p.bias_term, **pair)
    if layer.type == "Pooling":
        return torch_pooling(layer.pooling_param, shape)
    if layer.type == "InnerProduct":
        flat = 1
        for d in shape[1:]:
            flat *= d
        return nn.Sequential(nn.Flatten(), nn.Linear(flat, layer.inner_product_param.num_output))
    if layer.type == "LRN":
        r = layer.lrn_param
        return nn.LocalResponseNorm(r.local_size, r.alpha, r.beta, r.k)
    return {
        "ReLU": nn.ReLU(inplace=True),
        "Dropout": nn.Dropout(layer.dropout_param.dropout_ratio),
        "Concat": lambda *x: torch.cat(x, 1),
        "SoftmaxWithLoss": nn.CrossEntropyLoss(),
    }[layer.type]


def torch_pooling(p: PoolingParameter, shape: tuple[int, ...]) -> Any:
    """Caffe rounds up; PyTorch's ceil_mode does the same where padding adds nothing beyond."""
    from torch import nn

    if p.pool == PoolingParameter.MAX:
        return nn.MaxPool2d(p.kernel_size, p.stride, p.pad, ceil_mode=True)
    size = shape[2] if p.global_pooling else p.kernel_size
    return nn.AvgPool2d(size, p.stride, p.pad, ceil_mode=True)


def measure(framework: str, name: str, batch: int, seconds: float) -> None:
    """Print the milliseconds of each step and the peak memory in MiB, as JSON."""
    step = {"caffepy": caffepy_step, "torch": torch_step}[framework](definition(name, batch))
    for _ in range(3):
        step()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps({"ms": times, "peak": peak}))


def main() -> None:
    """Alternate the two frameworks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, batch = args.nets.split(":")
        return measure(args.measure, name, int(batch), args.seconds)
    sys.stdout.write(
        "| net | batch | caffepy ms | PyTorch ms | ratio | caffepy MiB | PyTorch MiB |\n|---|---|---|---|---|---|---|\n"
    )
    for net in args.nets.split(","):
        times: dict[str, list[float]] = {"caffepy": [], "torch": []}
        peaks = {}
        for _ in range(args.rounds):
            for framework in times:
                command = [
                    sys.executable,
                    __file__,
                    "--measure",
                    framework,
                    "--nets",
                    net,
                    "--seconds",
                    str(args.seconds),
                ]
                result = json.loads(
                    subprocess.run(command, capture_output=True, check=True, text=True).stdout
                )
                times[framework].append(median(result["ms"]))
                peaks[framework] = result["peak"]
        ours, theirs = (median(times[f]) for f in times)
        name, batch = net.split(":")
        sys.stdout.write(
            f"| {name} | {batch} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} "
            f"| {peaks['caffepy']:.0f} | {peaks['torch']:.0f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
