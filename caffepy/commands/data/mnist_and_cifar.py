"""`caffepy convert-mnist` and `convert-cifar`: the files of MNIST, handwritten digits, and of
CIFAR-10 become LMDBs or LevelDBs.
"""

import gzip
import logging
import os
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import DataError, reason
from caffepy.data.datum import head_of
from caffepy.data.write import refuse_existing, write_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import Datum
from caffepy.proto.sniff import sniff

log = logging.getLogger(__name__)

IMAGES, LABELS = 2051, 2049  # the numbers that the files start with
EXAMPLE = "train-images-idx3-ubyte.gz"
SOURCES = "https://storage.googleapis.com/cvdf-datasets/mnist/ or https://ossci-datasets.s3.amazonaws.com/mnist/"

# of CIFAR-10
SHAPE = 3, 32, 32
ROW = 1 + 3 * 32 * 32  # a label and an image, plane by plane
CLASSES = 10
TRAIN, TEST = [f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]
FOLDER = "cifar-10-batches-bin"
CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def convert_mnist(images: str, labels: str, database: str, backend: str = "lmdb") -> int:
    """Write the images of two idx files to the new `database` and return their number.

    Keys are numbers of eight digits. DataError if a file is missing, damaged or no idx file.
    """
    pixels, classes = read_idx(images, IMAGES, 3), read_idx(labels, LABELS, 1)
    if len(pixels) != len(classes):
        raise DataError(f"{images} has {len(pixels)} images, but {labels} {len(classes)} labels")
    count, rows, columns = map(int, pixels.shape)
    log.info("A total of %d items.", count)
    log.info("Rows: %d Cols: %d", rows, columns)
    head = head_of((1, rows, columns))
    tails = [Datum(label=label).SerializeToString() for label in range(256)]
    with write_database(database, backend) as writer:
        for i, (image, label) in enumerate(zip(pixels, classes, strict=True)):
            writer.put(f"{i:08d}", b"".join((head, image.tobytes(), tails[label])))
    log.info("Processed %d files.", count)
    return count


def read_idx(path: str, magic: int, axes: int) -> Array:
    """The bytes of the idx file `path` or `path`.gz, uint8 in the shape that it states.

    DataError if it is missing, damaged, or of another magic number.
    """
    if not os.path.exists(path) and os.path.exists(f"{path}.gz"):
        path = f"{path}.gz"
    if not os.path.exists(path):
        raise DataError(
            f'"{path}" does not exist; the four files of MNIST, such as {EXAMPLE}, are at {SOURCES}'
        )
    try:
        with gzip.open(path) if sniff(path) == "a gzip file" else open(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", "") or str(error)
        raise DataError(f"{path} cannot be read: {why.lower()}") from None
    length = 4 * (1 + axes)
    found, *shape = struct.unpack_from(f">{1 + axes}I", content.ljust(length, b"\0"))
    if found != magic:
        kind = {IMAGES: "images", LABELS: "labels"}
        other = f"a file of {kind[found]}" if found in kind else sniff(path)
        raise DataError(
            f"{path} is no file of MNIST's {kind[magic]}, but {other}; it should start with {magic}"
        )
    values = np.frombuffer(content, np.uint8)[length:]
    stated = " x ".join(map(str, shape))
    if values.size != np.prod(shape, dtype=object):
        raise DataError(f"{path} is damaged: it has {values.size} values, not {stated}")
    if not values.size:
        raise DataError(f"{path} is empty: it has {stated} values")
    return values.reshape(shape)


def convert_cifar(folder: str, out: str, backend: str = "lmdb") -> dict[str, int]:
    """Write the images of CIFAR-10's files in `folder` to cifar10_train_BACKEND and
    cifar10_test_BACKEND in `out`.

    Planes stay in the files' order, red first. Returns the number of records of each. DataError if
    a file is missing or damaged.
    """
    if os.path.isdir(inner := os.path.join(folder, FOLDER)):
        folder = inner
    parts = {"train": _read_rows(folder, TRAIN), "test": _read_rows(folder, TEST)}
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


def _read_rows(folder: str, names: Sequence[str]) -> Array:
    """The rows (N, 3073) of these files, label first."""
    rows = []
    for name in names:
        path = os.path.join(folder, name)
        try:
            content = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            raise DataError(
                f'"{path}" does not exist; the binary version of CIFAR-10 is at {CIFAR_SOURCE}, '
                "unpack it with tar xzf"
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
