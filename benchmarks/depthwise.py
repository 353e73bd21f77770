"""A depthwise convolution beside PyTorch's on the CPU: forward + backward, the gradient of the
input included.

Processes of caffepy and PyTorch take turns; the best step and the median of the rounds' medians are
printed. A step has 6 * kernel^2 operations for each element of the output.

usage: python benchmarks/depthwise.py [--images 32] [--channels 64] [--side 56] [--kernel 3] [--stride 1]
                                           [--threads 2] [--rounds 5] [--seconds 2]

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


def caffepy_step(x: Any, dy: Any, w: Any, sizes: dict[str, int]) -> Callable[[], None]:
    """One forward and backward pass of caffepy's loops."""
    from caffepy.ops import cpu

    cpu.set_num_threads(sizes["threads"])
    stride, pad = (sizes["stride"],) * 2, (sizes["kernel"] // 2,) * 2
    window = stride, pad, (1, 1)
    conv = cpu.Convolution(x.shape, w.shape, window, sizes["channels"], np.float32)
    b = np.zeros(len(w), np.float32)
    y, dx, dw, db = (np.zeros_like(a) for a in (dy, x, w, b))

    def step() -> None:
        dw[...] = 0
        db[...] = 0
        conv.forward(x, w, b, y)
        conv.backward_weight(x, dy, dw, db)
        conv.backward_data(dy, w, dx)

    return step


def torch_step(x: Any, dy: Any, w: Any, sizes: dict[str, int]) -> Callable[[], None]:
    """The same of PyTorch."""
    import torch

    torch.set_num_threads(sizes["threads"])
    channels, kernel = sizes["channels"], sizes["kernel"]
    conv = torch.nn.Conv2d(
        channels, channels, kernel, sizes["stride"], kernel // 2, groups=channels
    )
    x, dy = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def step() -> None:
        for p in (x, *conv.parameters()):
            p.grad = None
        conv(x).backward(dy)

    return step


STEPS = {"caffepy": caffepy_step, "torch": torch_step}
SIZES = {"images": 32, "channels": 64, "side": 56, "kernel": 3, "stride": 1, "threads": 2}


def out(sizes: dict[str, int]) -> int:
    """The side of the output."""
    return (sizes["side"] + 2 * (sizes["kernel"] // 2) - sizes["kernel"]) // sizes["stride"] + 1


def measure(what: str, sizes: dict[str, int], seconds: float) -> None:
    """Print the milliseconds of each step as JSON."""
    rng = np.random.default_rng(0)
    planes = sizes["images"], sizes["channels"]
    x = rng.standard_normal((*planes, sizes["side"], sizes["side"]), np.float32)
    dy = rng.standard_normal((*planes, out(sizes), out(sizes)), np.float32)
    w = rng.standard_normal((sizes["channels"], 1, sizes["kernel"], sizes["kernel"]), np.float32)
    step = STEPS[what](x, dy, w, sizes)
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
    for name, default in (*SIZES.items(), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--measure", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
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
    work = 6 * args.images * args.channels * out(sizes) ** 2 * args.kernel**2
    sys.stdout.write("| | best ms | median ms | GFLOP/s at best |\n|---|---|---|---|\n")
    for what, rounds in times.items():
        best, middle = min(map(min, rounds)), median(map(median, rounds))
        sys.stdout.write(f"| {what} | {best:.2f} | {middle:.2f} | {work / best / 1e6:.0f} |\n")


if __name__ == "__main__":
    main()
