"""`caffepy convert-mnist`: the files of MNIST, handwritten digits, become an LMDB or LevelDB."""

import gzip
import logging
import os
import struct
import zlib

import numpy as np

from caffepy.core.errors import DataError
from caffepy.data.datum import head_of
from caffepy.data.write import write_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import Datum
from caffepy.proto.sniff import sniff

log = logging.getLogger(__name__)

IMAGES, LABELS = 2051, 2049  # the numbers that the files start with
EXAMPLE = "train-images-idx3-ubyte.gz"
SOURCES = "https://storage.googleapis.com/cvdf-datasets/mnist/ or https://ossci-datasets.s3.amazonaws.com/mnist/"


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
    """The bytes of the idx file `path` or `path`.gz with this magic number and number of axes."""
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
