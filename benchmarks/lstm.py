"""An LSTM layer beside PyTorch's on the CPU: forward + backward, the gradient of the input
included.

Processes of caffepy, PyTorch and a large matrix product of numpy take turns; the best step and the
median of the rounds' medians are printed. A step has 6 * T * N * 4H * (D + H) operations in its
matrix products; the large product says what the machine gives to matrix products at that time.

usage: python benchmarks/lstm.py [--steps 20] [--streams 32] [--inputs 256] [--size 256] [--rounds
5] [--seconds 2]

Needs PyTorch's CPU build in the environment of caffepy.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

SIDE = 1536
"""Of the matrices in numpy's product."""

NET = """force_backward: true
layer { name: "input" type: "Input" top: "x" top: "cont"
        input_param { shape { dim: %(steps)d dim: %(streams)d dim: %(inputs)d }
                      shape { dim: %(steps)d dim: %(streams)d } } }
layer { name: "lstm" type: "LSTM" bottom: "x" bottom: "cont" top: "y"
        recurrent_param { num_output: %(size)d weight_filler { type: "uniform" min: -0.06 max: 0.06 } } }"""


def caffepy_step(x: Any, dy: Any, sizes: dict[str, int]) -> Callable[[], None]:
    """One forward and backward pass of caffepy's layer in a net."""
    from google.protobuf import text_format

    from caffepy.net import Net
    from caffepy.proto.caffe_pb2 import NetParameter

    net = Net(text_format.Parse(NET % sizes, NetParameter()))
    net.blobs["x"].data[...] = x
    net.blobs["cont"].data[1:] = 1
    net.blobs["y"].diff[...] = dy

    def step() -> None:
        net.clear_param_diffs()
        net.forward()
        net.backward()

    return step


def torch_step(x: Any, dy: Any, sizes: dict[str, int]) -> Callable[[], None]:
    """The same of PyTorch."""
    import torch

    lstm = torch.nn.LSTM(sizes["inputs"], sizes["size"])
    x, dy = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def step() -> None:
        for p in (x, *lstm.parameters()):
            p.grad = None
        y, _ = lstm(x)
        y.backward(dy)

    return step


def product_step(x: Any, dy: Any, sizes: dict[str, int]) -> Callable[[], None]:
    """One large product."""
    a, b, c = (np.ones((SIDE, SIDE), np.float32) for _ in range(3))

    def step() -> None:
        np.matmul(a, b, out=c)

    return step


STEPS = {"caffepy": caffepy_step, "torch": torch_step, "product": product_step}


def measure(what: str, sizes: dict[str, int], seconds: float) -> None:
    """Print the milliseconds of each step as JSON."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sizes["steps"], sizes["streams"], sizes["inputs"]), np.float32)
    dy = rng.standard_normal((sizes["steps"], sizes["streams"], sizes["size"]), np.float32)
    step = STEPS[what](x, dy, sizes)
    for _ in range(3):
        step()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    sys.stdout.write(json.dumps(times))


def main() -> None:
    """Take turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("steps", 20),
        ("streams", 32),
        ("inputs", 256),
        ("size", 256),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--measure", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("steps", "streams", "inputs", "size")}
    if args.measure:
        return measure(args.measure, sizes, args.seconds)
    times: dict[str, list[list[float]]] = {what: [] for what in STEPS}
    for _ in range(args.rounds):
        for what, rounds in times.items():
            command = [sys.executable, *sys.argv, "--measure", what]
            rounds.append(
                json.loads(
                    subprocess.run(command, capture_output=True, check=True, text=True).stdout
                )
            )
    work = 6 * args.steps * args.streams * 4 * args.size * (args.inputs + args.size)
    sys.stdout.write("| | best ms | median ms | GFLOP/s at best |\n|---|---|---|---|\n")
    for what, rounds in times.items():
        best, middle = min(map(min, rounds)), median(map(median, rounds))
        rate = (2 * SIDE**3 if what == "product" else work) / best / 1e6
        sys.stdout.write(f"| {what} | {best:.2f} | {middle:.2f} | {rate:.0f} |\n")


if __name__ == "__main__":
    main()
