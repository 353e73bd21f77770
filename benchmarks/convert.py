"""convert-imageset beside a plain loop that does in one thread what Caffe's tool does, and the
memory it takes.

usage: python benchmarks/convert.py FOLDER [--count 10000] [--size 256] [--resize 0] [--rounds 3]

The loop calls what Caffe's tool calls: cv2.imread, cv2.resize, a Datum's serialization, LMDB's put,
a commit with its flush to the disk each 1000 records. Both take turns, in processes of their own.
FOLDER keeps the images.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import cv2
import lmdb
import numpy as np

from caffepy.proto.caffe_pb2 import Datum

MAP_SIZE = 1 << 40  # what Caffe begins with
EVERY = 0.25  # seconds between looks at the memory


class Cost(NamedTuple):
    """Seconds of a process by the clock and on the cores, and MiB of memory over its time."""

    seconds: float
    cpu: float
    memory: list[float]


def make_images(folder: str, count: int, size: int) -> str:
    """Noisy JPEGs of about 24 kB, as photographs of 256 x 256 are, and their list; returns the
    list's name.
    """
    names = os.path.join(folder, f"list_{count}_{size}.txt")
    if os.path.exists(names):
        return names
    rng = np.random.default_rng(0)
    os.makedirs(os.path.join(folder, "images"), exist_ok=True)
    for i in range(count):
        smooth = cv2.resize(
            rng.integers(0, 256, (16, 16, 3), np.uint8), (size, size), interpolation=cv2.INTER_CUBIC
        )
        noisy = np.clip(
            smooth.astype(np.int16) + rng.integers(-12, 13, smooth.shape, np.int16), 0, 255
        )
        cv2.imwrite(
            f"{folder}/images/{size}_{i:06d}.jpg",
            noisy.astype(np.uint8),
            [cv2.IMWRITE_JPEG_QUALITY, 90],
        )
    with open(names, "w") as file:
        file.writelines(f"{size}_{i:06d}.jpg {i % 1000}\n" for i in range(count))
    return names


def plain_loop(root: str, names: str, database: str, resize: int) -> None:
    """Convert as Caffe's tool does."""
    environment = lmdb.open(database, map_size=MAP_SIZE)
    transaction = environment.begin(write=True)
    with open(names) as lines:
        for i, line in enumerate(lines):
            name, label = line.rsplit(" ", 1)
            image = cv2.imread(root + name)
            if resize:
                image = cv2.resize(image, (resize, resize))
            height, width, channels = image.shape
            datum = Datum(
                channels=channels, height=height, width=width, label=int(label), encoded=False
            )
            datum.data = np.stack(cv2.split(image)).tobytes()
            transaction.put(f"{i:08d}_{name}".encode(), datum.SerializeToString())
            if (i + 1) % 1000 == 0:
                transaction.commit()
                transaction = environment.begin(write=True)
    transaction.commit()
    environment.close()


def cost_of(command: list[str]) -> Cost:
    """Run a command and watch it."""
    begin, memory = time.perf_counter(), []
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    done = 0
    while not done:
        done, code, usage = os.wait4(child.pid, os.WNOHANG)
        if not done:
            with open(f"/proc/{child.pid}/status") as file:
                known = dict(line.split(":", 1) for line in file)
            if "VmRSS" in known:
                memory.append(int(known["VmRSS"].split()[0]) / 1024)
            time.sleep(EVERY)
    assert code == 0, f"{command} ended with {code}"
    child.returncode = 0
    return Cost(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, memory)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--resize", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = os.path.join(args.folder, "images", "")
    if args.loop:
        plain_loop(root, *args.loop, args.resize)
        return
    names = make_images(args.folder, args.count, args.size)
    database = os.path.join(args.folder, "database")
    size = f"{args.resize}"
    flags = ["-resize_width", size, "-resize_height", size]
    commands = {
        "plain loop": [
            sys.executable,
            __file__,
            args.folder,
            "--resize",
            size,
            "--loop",
            names,
            database,
        ],
        "caffepy": [
            sys.executable,
            "-m",
            "caffepy",
            "convert-imageset",
            *flags,
            root,
            names,
            database,
        ],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            shutil.rmtree(database, ignore_errors=True)
            costs[name].append(cost_of(command))
    shutil.rmtree(database, ignore_errors=True)
    for name, runs in costs.items():
        seconds, cpu = median(run.seconds for run in runs), median(run.cpu for run in runs)
        memory = runs[-1].memory
        quarters = [
            max(memory[len(memory) * k // 4 : len(memory) * (k + 1) // 4] or [0]) for k in range(4)
        ]
        sys.stdout.write(
            f"{name}: {args.count / seconds:.0f} images/s ({', '.join(f'{run.seconds:.1f}' for run in runs)} s), "
            f"{cpu:.1f} s on the cores; most memory in each quarter {', '.join(f'{q:.0f}' for q in quarters)} MiB\n"
        )


if __name__ == "__main__":
    main()
