"""A net's images a second on 1, 2, 4... GPUs on synthetic data and on data that are read, and what is
read alone.

usage: python benchmarks/pipeline.py --lmdb FOLDER [--net caffenet] [--batch 256] [--gpu all]
           [--precision bf16] [--rounds 2] [--iterations 100] [--count 20000]
           [--out FILE.json]
       python benchmarks/pipeline.py --jpegs FOLDER --net resnet50 --batch 128
           [--decode threads,processes,gpu] ...

Makes the data if there are none: with --lmdb a database of raw images (make_lmdb.py), with --jpegs
JPEGs of about 24 kB (convert.py), as a database and as a list. Synthetic data and the others, with
each way of decoding, take turns, each time in a process of its own (`caffepy bench scaling`). Then a
raw database is read alone, into memory of the host, with 1, 2, 4... threads. --gpu '' tries the
program out on the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from convert import make_images
from make_lmdb import make

from caffepy import models
from caffepy.commands.data.convert_imageset import Recipe, convert_imageset
from caffepy.data.loader import SequentialLoader
from caffepy.data.reader import Reader
from caffepy.data.sources import open_database
from caffepy.data.transformer import Transformer
from caffepy.device.device import Device
from caffepy.device.threads import cores
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TRAIN
from caffepy.proto.text import read_net

SECONDS = 1.5
SIDE = 256  # of JPEGs
RAW, JPEGS = 20_000, 1024
"""Images that are made unless --count says how many."""
SYNTHETIC = "random", "synthetic", "threads"
Case = tuple[str, str, str]
"""Name of the data, their path, what decodes them."""


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def cases(args: argparse.Namespace) -> list[Case]:
    """Make what is missing; return what is to be compared."""
    found = [SYNTHETIC]
    if args.lmdb:
        if not os.path.exists(args.lmdb):
            make(args.lmdb, args.count or RAW, (3, 256, 256), 1000)
        found.append(("LMDB, raw", args.lmdb, "threads"))
    if args.jpegs:
        count = args.count or JPEGS
        names = make_images(args.jpegs, count, SIDE)
        root = os.path.join(args.jpegs, "images", "")
        database = os.path.join(args.jpegs, f"jpeg_{count}_{SIDE}")
        if not os.path.exists(database):
            convert_imageset(root, names, database, recipe=Recipe(encode=None))
        whole = os.path.join(args.jpegs, f"whole_{count}_{SIDE}.txt")
        with open(names) as lines, open(whole, "w") as file:
            file.writelines(f"{os.path.abspath(root)}/{line}" for line in lines)
        for decode in args.decode.split(","):
            found += [("LMDB, JPEG", database, decode), ("list of JPEGs", whole, decode)]
    return found


def trained(args: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """Return the points of `caffepy bench scaling`; none if it fails, of which it tells."""
    _, data, decode = case
    command = [sys.executable, "-m", "caffepy", "bench", "scaling", "--json", "--windows", "3"]
    command += ["--model", args.net, "--batch", str(args.batch), "--data", data]
    command += ["--decode", decode, "--iterations", str(args.iterations)]
    command += ["--gpu", args.gpu, "--precision", args.precision] if args.gpu else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return []
    points: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["points"]
    return points


def table(rounds: dict[Case, list[list[dict[str, Any]]]]) -> str:
    """A row for each number of devices and kind of data."""
    rows = [
        "| devices | data | decoded by | images/s | of random images |",
        "|---|---|---|---|---|",
    ]

    def rates(case: Case) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for points in rounds[case]:
            for point in points:
                found.setdefault(point["devices"], []).append(point["images_per_s"])
        return found

    synthetic = rates(SYNTHETIC)
    for count in synthetic:
        for case in rounds:
            if own := rates(case).get(count):
                each = " and ".join(f"{rate:,.0f}" for rate in own)
                share = f"{median(own) / median(synthetic[count]):.1%}"
                rows.append(f"| {count} | {case[0]} | {case[2]} | {each} | {share} |")
    return "\n".join(rows)


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
    parser.add_argument("--lmdb", default="")
    parser.add_argument("--jpegs", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--decode", default="threads")
    parser.add_argument("--net", default="caffenet")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--gpu", default="all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if not args.lmdb and not args.jpegs:
        parser.error("name a folder: --lmdb or --jpegs")
    rounds: dict[Case, list[list[dict[str, Any]]]] = {case: [] for case in cases(args)}
    for _ in range(args.rounds):
        for case, found in rounds.items():
            found.append(points := trained(args, case))
            rates = ", ".join(f"{p['images_per_s']:,.0f} on {p['devices']}" for p in points)
            say(f"{args.net}, {case[0]}, {case[2]}: {rates or 'failed'}")
            if args.out:
                with open(args.out, "w") as file:
                    json.dump([[*case, found] for case, found in rounds.items()], file, indent=1)
    say(f"{args.net} {args.precision}, batch {args.batch} of each device")
    say(table(rounds))
    if not any(rounds[SYNTHETIC]):
        sys.exit("nothing could be trained")
    if not args.lmdb:
        return
    source = open_database(args.lmdb)
    size = len(source.peek()[1])
    source.close()
    threads = 1
    while threads <= cores():
        rate = read_alone(args, threads)
        say(f"read alone, {threads} threads: {rate:.0f} images/s, {rate * size / 1e9:.1f} GB/s")
        threads *= 2


if __name__ == "__main__":
    main()
