"""Material of the tutorials: the digits that come with caffepy, files of nets and solvers,
processes of scripts.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

import caffepy
from caffepy import models
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2

ROOT = Path(caffepy.__file__).parents[1]
MODELS = Path(models.__file__).parent
GOLDEN = Path(__file__).parents[1] / "golden"


def written(path: Path, message: Any) -> str:
    """The file of a net or a solver."""
    path.write_text(str(message))
    return str(path)


def solver_file(folder: Path, train_net: str, test_net: str = "", **settings: Any) -> str:
    """The file of a solver, with a fixed rate and seed unless told otherwise; it tests once, at the
    start.
    """
    param = caffe_pb2.SolverParameter(
        train_net=train_net, lr_policy="fixed", random_seed=7, snapshot_prefix=str(folder / "run")
    )
    if test_net:
        param.test_net.append(test_net)
        param.test_iter.append(settings.pop("test_iter", 1))
        param.test_interval = 10**6
    for name, value in settings.items():
        setattr(param, name, value)
    return written(folder / "solver.prototxt", param)


def digits(part: str) -> tuple[Array, Array]:
    """Images (N, 8, 8), uint8, and their labels: 1,500 of "train", 297 of "test"."""
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # lmdb refuses what a net of this process may have open
        shutil.copy(MODELS / "digits" / f"digits_{part}_lmdb" / "data.mdb", folder)
        with lmdb.open(folder, readonly=True, lock=False) as database, database.begin() as records:
            datums = [caffe_pb2.Datum.FromString(value) for _, value in records.cursor()]
    images = np.stack([np.frombuffer(datum.data, np.uint8).reshape(8, 8) for datum in datums])
    return images, np.array([datum.label for datum in datums])


def as_mnist(images: Array) -> Array:
    """Images (N, 28, 28) of those of 8 x 8: each pixel thrice as wide and high, in a black frame."""
    return np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))


def write_database(path: Path, datums: list[caffe_pb2.Datum]) -> str:
    """A new LMDB, as scripts write it."""
    with lmdb.open(str(path), map_size=1 << 28) as database, database.begin(write=True) as records:
        for i, datum in enumerate(datums):
            records.put(f"{i:08d}".encode(), datum.SerializeToString())
    return str(path)


def run(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A Python process in `folder` that finds caffepy, and passes."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
