"""Compare a net's images a second on synthetic data, on a database, and the database read alone.

usage: python benchmarks/pipeline.py --lmdb FOLDER [--net caffenet] [--precision bf16] [--gpu 0] [--rounds 2]
           [--iterations 100] [--batch 256]

Makes the database if there is none (make_lmdb.py). Synthetic data and database take turns, each
time in a process of its own; then the data are read alone, into memory of the host, with 1, 2, 4...
threads.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

import numpy as np
from make_lmdb import make

from caffepy import models
from caffepy.data.loader import SequentialLoader
from caffepy.data.reader import Reader
from caffepy.data.sources import open_database
from caffepy.data.transformer import Transformer
from caffepy.device.device import Device
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TRAIN
from caffepy.proto.text import read_net

SECONDS = 1.5


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def trained(args: argparse.Namespace, data: str) -> dict[str, float]:
    """Return the result of `caffepy bench train`."""
    command = [
        sys.executable,
        "-m",
        "caffepy",
        "bench",
        "train",
        "--model",
        args.net,
        "--json",
        "--data",
        data,
    ]
    command += [
        "--precision",
        args.precision,
        "--iterations",
        str(args.iterations),
        "--batch",
        str(args.batch),
    ]
    command += ["--gpu", args.gpu] if args.gpu else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def read_alone(args: argparse.Namespace, threads: int) -> float:
    """Images a second that are read ahead, as the net's data layer would have it."""
    path = models.path(args.net, "train_val")
    assert path, f"no bundled model {args.net}"
    layer = next(layer for layer in read_net(path).layer if layer.type == "Data")
    cpu.set_num_threads(threads)
    transformer = Transformer(layer.transform_param, TRAIN, Device(seed=1), path)
    depth = layer.data_param.prefetch
    reader = Reader(
        SequentialLoader(open_database(args.lmdb), transformer, args.batch),
        depth,
        np.float32,
        cpu.Staging,
    )
    for _ in range(2 * depth):
        reader.give_back(reader.take())
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        reader.give_back(reader.take())
        count += 1
    seconds = time.perf_counter() - begin
    reader.close()
    return count * args.batch / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lmdb", required=True)
    parser.add_argument("--net", default="caffenet")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    if not os.path.exists(args.lmdb):
        make(args.lmdb, 20_000, (3, 256, 256), 1000)
    rounds = [(trained(args, "synthetic"), trained(args, args.lmdb)) for _ in range(args.rounds)]
    synthetic, database = (
        median(result["images_per_s"] for result in results)
        for results in zip(*rounds, strict=True)
    )
    say(
        f"{args.net} {args.precision}, batch {args.batch}: synthetic {synthetic:.0f}, database {database:.0f} images/s"
    )
    say(f"{database / synthetic:.1%} of the rate on synthetic data")
    source = open_database(args.lmdb)
    size = len(source.peek()[1])
    source.close()
    threads = 1
    while threads <= (os.cpu_count() or 1):
        rate = read_alone(args, threads)
        say(f"read alone, {threads} threads: {rate:.0f} images/s, {rate * size / 1e9:.1f} GB/s")
        threads *= 2
    say(json.dumps({"synthetic": synthetic, "database": database, "rounds": rounds}))


if __name__ == "__main__":
    main()
