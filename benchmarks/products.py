"""Products of 1x1 convolutions by register tiles of our own beside numpy's BLAS, on one core.

usage: python benchmarks/products.py [--rounds 15]

Each line is a convolution of resnet50 with batch 8: GFLOP/s forward, of the gradients of data and
of weights, beside those of the same products by numpy, an image each. Least CPU time of rounds in
turns, which other processes disturb less than wall time. OPENBLAS_CORETYPE chooses BLAS's kernels.
"""

import argparse
import sys
from collections.abc import Callable
from time import process_time

import numpy as np
from threadpoolctl import threadpool_info

from caffepy.device.threads import blas_scope, set_num_threads
from caffepy.ops.cpu.pointwise import Pointwise

IMAGES = 8
SHAPES = [(256, 64, 56), (64, 256, 56), (512, 128, 28), (128, 512, 28), (1024, 256, 14)]
SHAPES += [(256, 1024, 14), (2048, 512, 7), (512, 2048, 7)]
"""Inputs, outputs, height and width."""


def rates(work: float, functions: list[Callable[[], object]], rounds: int) -> list[str]:
    """Return the GFLOP/s of each function, called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, of in zip(functions, times, strict=True):
            start = process_time()
            function()
            of.append(process_time() - start)
    return [f"{work / min(of[1:]) / 1e9:.0f}" for of in times]


def line(inputs: int, outputs: int, size: int, rounds: int) -> str:
    """Return the rates of a shape: ours and BLAS's of each pass."""
    rng = np.random.default_rng(0)
    shapes = (IMAGES, inputs, size, size), (outputs, inputs, 1, 1)
    plan = Pointwise(*shapes, (1, 1), 1, np.float32)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in (*shapes, plan.y_shape))
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.zeros_like(w)
    a, planes, out = w[:, :, 0, 0], x.reshape(*x.shape[:2], -1), y.reshape(*y.shape[:2], -1)
    data, gradient = dx.reshape(planes.shape), dy.reshape(out.shape)
    parts = np.empty((IMAGES, outputs, inputs), np.float32)
    pairs: dict[str, list[Callable[[], object]]] = {
        "forward": [lambda: plan.forward(x, w, None, y), lambda: np.matmul(a, planes, out=out)],
        "data": [
            lambda: plan.backward_data(dy, w, dx),
            lambda: np.matmul(a.T, gradient, out=data),
        ],
        "weights": [
            lambda: plan.backward_weight(x, dy, dw, None),
            lambda: np.matmul(gradient, planes.transpose(0, 2, 1), out=parts).sum(0),
        ],
    }
    work = 2.0 * y.size * inputs
    figures = [f"{name} {' '.join(rates(work, both, rounds))}" for name, both in pairs.items()]
    return f"{inputs:5d} -> {outputs:4d} at {size:2d}: {', '.join(figures)}\n"


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    set_num_threads(1)
    blas = [info["architecture"] for info in threadpool_info() if info["user_api"] == "blas"]
    sys.stdout.write(f"BLAS: {', '.join(blas)}\n")
    with blas_scope():
        for shape in SHAPES:
            sys.stdout.write(line(*shape, rounds))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
