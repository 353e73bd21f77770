"""Bounds of operations of detectors on one GPU: kernels that do one part of an operation alone.

usage: python benchmarks/detection_bounds.py [--rounds 7]

Timed as detection_ops.py does, in a captured graph and on arrays that come from memory, us a part:
launches of kernels that do nothing, and kernels that read and write as many bytes as an operation,
and compute nothing.
"""

import argparse
import re
import sys
from collections.abc import Callable

import cupy
import numpy as np
from detection_ops import (
    CACHE,
    COUNT,
    IMAGES,
    Work,
    time_of,
)

from caffepy.device.cuda import CudaDevice

MOVES = r"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void moves(const int4* from, int4* to, long long reads, long long writes) {
  const long long first = blockIdx.x * 256ll + threadIdx.x, step = gridDim.x * 256ll;
  int4 sum = {};
#pragma unroll 8
  for (long long i = first; i < reads; i += step) {
    const int4 x = from[i];
    sum.x ^= x.x; sum.y ^= x.y; sum.z ^= x.z; sum.w ^= x.w;
  }
#pragma unroll 8
  for (long long i = first; i < writes; i += step) to[i] = sum;
  if (sum.x == 0x12345678) to[0] = sum;
}
"""

X, Y = 4 * 512 * 38 * 63, 4 * 128 * 512 * 49
PARTS, Y_PARTS = 4 * 1029 * 38 * 63, 4 * 128 * 1029
SCORES, PLACES = 4 * 21 * IMAGES * COUNT, 4 * IMAGES * COUNT

BYTES = {
    "ROIPooling forward": (X, 2 * Y),
    "ROIPooling backward": (2 * Y, X),
    "PSROIPooling forward": (PARTS, Y_PARTS),
    "PSROIPooling backward": (Y_PARTS, PARTS),
    "losses of MultiBoxLoss": (SCORES + PLACES, 3 * PLACES),
    "MultiBoxLoss backward": (2 * PLACES + SCORES // 25, SCORES + 4 * PLACES),
    "mining": (4 * PLACES, PLACES),
}
"""Bytes that are read, and written."""


def moves(reads: int, writes: int) -> Callable[[], Work]:
    """A function that makes a kernel which reads and writes so many bytes."""
    run = cupy.RawModule(code=MOVES).get_function("moves")

    def make() -> Work:
        source, to = (cupy.zeros(max(n, 16) // 4, np.float32) for n in (reads, writes))
        blocks = min(132 * 8, -(-max(reads, writes) // 16 // 256))
        return lambda: run((blocks,), (256,), (source, to, reads // 16, writes // 16))

    return make


def nothing() -> Work:
    run = cupy.RawModule(code=MOVES).get_function("nothing")
    return lambda: run((132,), (256,), ())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="parts in whose name this is found")
    args = parser.parse_args()
    device = CudaDevice(0)
    with device.scope():
        parts: list[tuple[str, float, Callable[[], Work]]] = [("a launch", 0, nothing)]
        parts += [(f"bytes of {n}", sum(b), moves(*b)) for n, b in BYTES.items()]
    sys.stdout.write("| part | us | MB |\n|---|---|---|\n")
    for name, size, make in parts:
        if not re.search(args.only, name):
            continue
        sets = int(min(24, max(2, -(-CACHE // size)))) if size else 2
        with device.scope():
            works = [make() for _ in range(sets)]
        us = time_of(device, works, args.rounds)
        sys.stdout.write(f"| {name} | {us:.2f} | {size / 1e6:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
