"""`caffepy convert-cifar`: the binary files of CIFAR-10 become two databases."""

import logging
import os
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import DataError, reason
from caffepy.data.datum import head_of
from caffepy.data.write import refuse_existing, write_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import Datum

log = logging.getLogger(__name__)

SHAPE = 3, 32, 32
ROW = 1 + 3 * 32 * 32  # a label and an image, plane by plane
CLASSES = 10
TRAIN, TEST = [f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]
FOLDER = "cifar-10-batches-bin"
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def convert_cifar(folder: str, out: str, backend: str = "lmdb") -> dict[str, int]:
    """Write the images of CIFAR-10's files in `folder` to cifar10_train_BACKEND and
    cifar10_test_BACKEND in `out`.

    Planes stay in the files' order, red first. Returns the number of records of each. DataError if
    a file is missing or damaged.
    """
    if os.path.isdir(inner := os.path.join(folder, FOLDER)):
        folder = inner
    parts = {"train": _read(folder, TRAIN), "test": _read(folder, TEST)}
    paths = {name: os.path.join(out, f"cifar10_{name}_{backend}") for name in parts}
    for path in paths.values():
        refuse_existing(path)
    head = head_of(SHAPE)
    tails = [Datum(label=label).SerializeToString() for label in range(CLASSES)]
    for name, rows in parts.items():
        log.info("Writing %s data", "Training" if name == "train" else "Testing")
        with write_database(paths[name], backend) as writer:
            for i, row in enumerate(rows):
                writer.put(f"{i:05d}", b"".join((head, row[1:].tobytes(), tails[row[0]])))
    return {paths[name]: len(rows) for name, rows in parts.items()}


def _read(folder: str, names: Sequence[str]) -> Array:
    """The rows (N, 3073) of these files, label first."""
    rows = []
    for name in names:
        path = os.path.join(folder, name)
        try:
            content = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            raise DataError(
                f'"{path}" does not exist; the binary version of CIFAR-10 is at {SOURCE}, unpack '
                "it with tar xzf"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from None
        if not content.size or content.size % ROW or (content[::ROW] >= CLASSES).any():
            raise DataError(
                f"{path} is damaged or not of CIFAR-10's binary version: {content.size} bytes"
            )
        log.info("%s: %d images", path, content.size // ROW)
        rows.append(content.reshape(-1, ROW))
    return np.concatenate(rows)
