"""Which records each of several processes of one run reads."""

import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest

from caffepy.data.write import array_to_datum, write_database
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, version

__all__ = ["version"]

COUNTING = """
import os, signal
from caffepy.data.loader import SequentialLoader
from caffepy.data.sources.hdf5 import HDF5Rows

NODE = os.environ["OMPI_COMM_WORLD_RANK"]
DECODED = {"Data": 0, "ImageData": 0, "HDF5Data": 0}

def counted(method, kind_and_count):
    def counting(self, first, second=None, *more):
        kind, count = kind_and_count(self, first, second)
        DECODED[kind] += count
        return method(self, first, second, *more) if second is not None else method(self, first)
    return counting

SequentialLoader._fill = counted(
    SequentialLoader._fill, lambda self, batch, items: (self.source.layer, len(items)))
HDF5Rows.read = counted(HDF5Rows.read, lambda self, outs, _: ("HDF5Data", len(outs[0])))

class Layer:
    def setup(self, bottom, top):
        self.passes = 0
    def reshape(self, bottom, top):
        pass
    def forward(self, bottom, top):
        if [NODE, str(self.passes)] == os.environ.get("KILLED", "").split(","):
            os.kill(os.getpid(), signal.SIGKILL)
        self.passes += 1
        labels = [blob.data.astype(int).tolist() for blob in bottom]
        with open(f"{os.environ['SEEN']}.{NODE}", "a") as file:
            print(repr((labels, list(DECODED.values()))), file=file)
"""
RECORDS, TOGETHER, EPOCHS = 30, 6, 3
COUNTED = """
layer { name: "db" type: "Data" top: "a" top: "a_label"
  data_param { source: "db" batch_size: 6 backend: LMDB } }
layer { name: "list" type: "ImageData" top: "b" top: "b_label"
  image_data_param { source: "list.txt" batch_size: 6 shuffle: true } }
layer { name: "rows" type: "HDF5Data" top: "c" top: "c_label"
  hdf5_data_param { source: "rows.txt" batch_size: 6 shuffle: true } }
layer { name: "seen" type: "Python" bottom: "a_label" bottom: "b_label" bottom: "c_label"
  python_param { module: "counting" layer: "Layer" } }
layer { name: "unused" type: "Silence" bottom: "a" bottom: "b" }
layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip" inner_product_param { num_output: 30 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "c_label" top: "loss" }
"""

pytestmark = pytest.mark.usefixtures("version")


def write_records(folder: Path) -> None:
    """An LMDB, images and rows of HDF5 whose labels are their numbers, and a net that reads them."""
    images = np.random.default_rng(0).integers(0, 256, (RECORDS, 3, 4, 4), np.uint8)
    with write_database(f"{folder}/db") as writer:
        for i, image in enumerate(images):
            writer.put(f"{i:05d}", array_to_datum(image, i))
            cv2.imwrite(f"{folder}/{i}.png", image.transpose(1, 2, 0))
    (folder / "list.txt").write_text("".join(f"{i}.png {i}\n" for i in range(RECORDS)))
    halves = np.split(np.arange(RECORDS), [RECORDS // 3])
    for k, numbers in enumerate(halves):
        with h5py.File(folder / f"{k}.h5", "w") as file:
            file["c"], file["c_label"] = images[numbers].astype(np.float32), numbers
    (folder / "rows.txt").write_text("0.h5\n1.h5\n")
    (folder / "counting.py").write_text(COUNTING)
    (folder / "matplotlib.py").write_text("raise ImportError")  # curves take seconds
    iterations = EPOCHS * RECORDS // TOGETHER
    settings = f'max_iter: {iterations} display: 0 snapshot: 4 snapshot_prefix: "s" base_lr: 1e-6'
    (folder / "solver.prototxt").write_text(
        f'{settings} lr_policy: "fixed" random_seed: 3 net_param {{ {COUNTED} }}'
    )


def train(folder: Path, nodes: int, seen: str, killed: str = "") -> list[list[Any]]:
    """Run so many processes; return by process what it saw and what it had decoded by then."""
    assert MPIRUN
    program = [MPIRUN, "--oversubscribe", "-n", str(nodes), sys.executable, "-m", "caffepy"]
    options = ["--solver", "solver.prototxt", "--cpu", "1", "--batch-mode", "global"]
    ended = subprocess.run(
        [*program, "train", *options, "--snapshot", "auto"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=ENVIRONMENT | {"SEEN": seen, "KILLED": killed},
        cwd=folder,
    )
    assert (ended.returncode == 0) == (not killed), ended.stderr
    files = (folder / f"{seen}.{node}" for node in range(nodes))
    return [list(map(literal_eval, file.read_text().splitlines())) for file in files]


def test_each_record_is_read_by_one_process_as_often_as_others_though_one_is_killed(
    tmp_path: Path,
) -> None:
    """Three processes, of which one is killed in iteration 6; two go on from iteration 4."""
    write_records(tmp_path)
    before = train(tmp_path, 3, "before", killed="1,6")
    after = train(tmp_path, 2, "after")
    assert [len(passes) for passes in after] == [11, 11]
    kept = [passes[:4] for passes in before] + after
    for kind in range(3):
        seen = [label for passes in kept for labels, _ in passes for label in labels[kind]]
        assert sorted(seen) == sorted(list(range(RECORDS)) * EPOCHS)
    for passes, nodes in ((before[0], 3), (after[0], 2)):
        own = TOGETHER // nodes
        _, (*ahead, rows) = passes[-1]
        assert rows == len(passes) * own
        for count in ahead:
            assert len(passes) * own <= count <= (len(passes) + 5) * own
