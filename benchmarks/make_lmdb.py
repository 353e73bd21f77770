"""A database of random images, as raw uint8 records, for timing data layers: 20,000 of 3 x 256 x
256 in 4 GB.

usage: python benchmarks/make_lmdb.py FOLDER [--count 20000] [--shape 3,256,256] [--classes 1000]

On a RAM disk such as /dev/shm it takes no longer than the memory does, about 10 s.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.data.datum import head_of
from caffepy.data.write import write_database
from caffepy.proto.caffe_pb2 import Datum

POOL = 64 << 20  # random bytes that all images are parts of


def make(folder: str, count: int, shape: Sequence[int], classes: int) -> None:
    """Write the database."""
    rng = np.random.default_rng(0)
    size, head = prod(shape), head_of(tuple(shape))
    pool = memoryview(rng.bytes(POOL + size))
    labels = [Datum(label=label).SerializeToString() for label in range(classes)]
    with write_database(folder) as writer:
        for i, start in enumerate(rng.integers(0, POOL, count).tolist()):
            writer.put(
                f"{i:08d}", b"".join((head, pool[start : start + size], labels[i % classes]))
            )


def main() -> None:
    """Make it and say how long that took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--shape", default="3,256,256")
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args()
    begin = time.perf_counter()
    make(args.folder, args.count, [int(size) for size in args.shape.split(",")], args.classes)
    sys.stdout.write(
        f"{args.count} records in {args.folder}, {time.perf_counter() - begin:.1f} s\n"
    )


if __name__ == "__main__":
    main()
