"""Records a second of every source of data: what batches are filled with ahead of time, in memory
of the host.

usage: python benchmarks/sources.py FOLDER [--count 2000] [--size 256] [--batch 64] [--rounds 3]
[--threads 1,2] [--decode threads,processes] [--only JPEG]

Images are JPEGs of about 24 kB (convert.py), in FOLDER, and databases and files that are made of
them there. Batches are cut to 227 x 227 and mirrored by the net, which is not timed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median

import cv2
import h5py
import numpy as np
from convert import make_images
from google.protobuf import text_format

from caffepy.commands.data.convert_imageset import Recipe, convert_imageset
from caffepy.data.decoders import decoding
from caffepy.data.reader import Reader
from caffepy.data.sources.hdf5 import HDF5Rows
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.layer import create_layer
from caffepy.layer.feed import Prefetching
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

SECONDS = 1.5
ROWS = 1000  # of an HDF5 file
CROP = 227


def make(folder: str, count: int, size: int) -> dict[str, str]:
    """Make what is missing; returns the text of a layer for each source."""
    names = make_images(folder, count, size)
    root = os.path.join(folder, "images", "")
    paths = {
        name: os.path.join(folder, f"{name}_{count}_{size}")
        for name in ("raw", "jpeg", "leveldb", "windows")
    }
    for name, recipe, backend in (
        ("raw", Recipe(), "lmdb"),
        ("jpeg", Recipe(encode=None), "lmdb"),
        ("leveldb", Recipe(), "leveldb"),
    ):
        if not os.path.exists(paths[name]) and (backend == "lmdb" or find_spec("plyvel")):
            convert_imageset(root, names, paths[name], recipe=recipe, backend=backend)
    hdf5 = os.path.join(folder, f"hdf5_{count}_{size}.txt")
    if not os.path.exists(hdf5):
        make_hdf5(root, names, hdf5)
    with open(names) as lines, open(paths["windows"], "w") as file:
        for i, line in enumerate(lines):
            name, edge = line.rsplit(" ", 1)[0], size // 2
            file.write(
                f"# {i}\n{name}\n3\n{size}\n{size}\n2\n1 0.9 9 9 {edge + 9} {edge + 9}\n0 0.1 0 0 {edge} {edge}\n"
            )
    image = f'source: "{names}" root_folder: "{root}"'
    return {
        "LMDB, raw": f'type: "Data" data_param {{ source: "{paths["raw"]}" backend: LMDB batch_size: %d }}',
        "LMDB, JPEG": f'type: "Data" data_param {{ source: "{paths["jpeg"]}" backend: LMDB batch_size: %d }}',
        "LevelDB, raw": f'type: "Data" data_param {{ source: "{paths["leveldb"]}" batch_size: %d }}',
        "ImageData, JPEG": f'type: "ImageData" image_data_param {{ {image} shuffle: true batch_size: %d }}',
        "WindowData, JPEG": 'type: "WindowData" window_data_param '
        f'{{ source: "{paths["windows"]}" root_folder: "{root}" batch_size: %d }}',
        "HDF5, float32": hdf5,
        "HDF5, shuffled": hdf5,
    }


def make_hdf5(root: str, names: str, out: str) -> None:
    """The images, cut to 227 x 227, as float32."""
    with open(names) as lines:
        entries = [line.rsplit(" ", 1) for line in lines]
    files = []
    for lo in range(0, len(entries), ROWS):
        part = entries[lo : lo + ROWS]
        files.append(f"{out.removesuffix('.txt')}_{lo}.h5")
        with h5py.File(files[-1], "w") as file:
            data = file.create_dataset("data", (len(part), 3, CROP, CROP), np.float32)
            for i, (name, _) in enumerate(part):
                data[i] = cv2.imread(root + name)[:CROP, :CROP].transpose(2, 0, 1)
            file["label"] = np.array([int(label) for _, label in part], np.float32)
    with open(out, "w") as file:
        file.write("\n".join(files))


def rate(step: Callable[[], object], batch: int) -> float:
    """Records a second of a function that reads a batch."""
    for _ in range(4):
        step()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        step()
        count += 1
    return count * batch / (time.perf_counter() - begin)


def measure(name: str, text: str, batch: int, rounds: int, decode: str) -> float:
    """Records a second of one source, the median of several windows."""
    with ExitStack() as stack:
        if name.startswith("HDF5"):
            rows = HDF5Rows(text, ("data", "label"), np.float32, 1 if "shuffled" in name else None)
            outs: list[Array] = [np.empty((batch, *shape), np.float32) for shape in rows.row_shapes]
            return median(rate(lambda: rows.read(outs), batch) for _ in range(rounds))
        stack.enter_context(decoding(decode))
        text = f"{text % batch} transform_param {{ crop_size: {CROP} mirror: true }}"
        layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, Device(seed=1))
        assert isinstance(layer, Prefetching)
        reader = Reader(layer.open(), layer.param.data_param.prefetch, np.float32, cpu.Staging)
        stack.callback(reader.close)
        return median(rate(lambda: reader.give_back(reader.take()), batch) for _ in range(rounds))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--decode", default="threads")
    parser.add_argument("--only", default="", help="sources whose names have this in them")
    args = parser.parse_args()
    for name, text in make(args.folder, args.count, args.size).items():
        if args.only not in name or (name.startswith("LevelDB") and not find_spec("plyvel")):
            continue
        for decode in args.decode.split(",") if "JPEG" in name else ["threads"]:
            rates = []
            for threads in map(int, args.threads.split(",")):
                cpu.set_num_threads(threads)
                found = measure(name, text, args.batch, args.rounds, decode)
                rates.append(f"{found:.0f} with {threads}")
            sys.stdout.write(f"{name}: {', '.join(rates)} {decode}, records/s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
