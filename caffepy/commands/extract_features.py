"""`caffepy extract-features`: a net's blobs over its data, in databases and array files."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil

import numpy as np

from caffepy.commands.inference import find_blob, trained_net
from caffepy.core.errors import DataError, UsageError, reason
from caffepy.core.files import replacing
from caffepy.core.names import nearest
from caffepy.data.sources.hdf5 import append_rows, new_file
from caffepy.data.write import new_npy, refuse_existing, write_database
from caffepy.device.blob import Array, shape_string
from caffepy.proto.caffe_pb2 import Datum
from caffepy.report import counting

log = logging.getLogger(__name__)

KINDS = ("lmdb", "leveldb", "hdf5", "npy")
EXTENSIONS = {".h5": "hdf5", ".hdf5": "hdf5", ".npy": "npy"}
FOREIGN = (".csv", ".json", ".mat", ".npz", ".pkl", ".txt")  # a mistake, not a database's name
TELL_EVERY = 1000
TOLD = "Extracted features of %d query images for feature blob %s"
FLOAT_TAG = 6 << 3 | 5  # of a Datum's field 6, float_data, as 32 bits

Add = Callable[[str, Array], object]
"""Takes rows (N, ...) of the blob of this name."""


@dataclass(frozen=True)
class Feature:
    """A blob, the path that its values go to, and the kind of that file, one of KINDS."""

    blob: str
    path: str
    kind: str


def features_of(
    blobs: Sequence[str], paths: Sequence[str], kind: str | None = None
) -> list[Feature]:
    """Return a feature for each blob, with a path each or one for all.

    Without a kind, extensions choose: .h5 and .hdf5 are HDF5 files, .npy arrays, others LMDBs.
    UsageError for an unknown kind, extensions of other formats, or a wrong number of paths.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(
            f'unknown kind of database "{kind}"{nearest(kind, KINDS)} (known: {", ".join(KINDS)})'
        )
    if len(paths) not in (1, len(blobs)):
        raise UsageError(
            f"the numbers of blobs and of outputs must be equal, not {len(blobs)} and {len(paths)}"
        )
    paths = list(paths) * (len(blobs) if len(paths) == 1 else 1)
    features: list[Feature] = []
    for blob, path in zip(blobs, paths, strict=True):
        extension = os.path.splitext(path)[1].lower()
        if not kind and extension in FOREIGN:
            known = "name a .h5 or .npy file, or a database"
            raise UsageError(f'"{path}": {extension} files are not written; {known}')
        own = kind or EXTENSIONS.get(extension, "lmdb")
        if any(path == other.path and (own != "hdf5" or blob == other.blob) for other in features):
            several = "only an HDF5 file holds several"
            raise UsageError(f'"{path}" cannot take blob "{blob}", too; {several}')
        features.append(Feature(blob, path, own))
    return features


def extract_features(
    model: str,
    weights: Sequence[str],
    features: Sequence[Feature],
    *,
    batches: int | None = None,
    gpu: str | None = None,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
    progress: bool | None = None,
) -> list[int]:
    """Run the net of `model` over its data, write the values of blobs, return the rows of each.

    `batches` None runs over all data once. A database has a record a row, with key `%010d` and a
    Datum of float_data, an HDF5 file a dataset (rows, ...) for each blob. All files appear when
    everything is done, or not at all. ConfigError for blobs that the net does not have, DataError
    for targets that exist or cannot be written.
    """
    for feature in features:
        refuse_existing(feature.path)
    log.error("Using %s", "CPU" if gpu is None else "GPU")  # errors in Caffe, which shows no others
    with (
        trained_net(model, weights, gpu, precision, level, stages, threads) as net,
        ExitStack() as stack,
    ):
        for feature in features:
            find_blob(net, feature.blob)
        size = left = 0
        if batches is None:
            fed = [(n.tops[0].shape[0], n.layer.length) for n in net.nodes if n.layer.length]
            if not fed:
                raise UsageError("the size of the net's data is unknown: give a number of batches")
            size, left = fed[0]
            batches = ceil(left / size)
        adds: dict[str, Add] = {}
        for feature in features:
            if feature.path not in adds:
                adds[feature.path] = stack.enter_context(WRITERS[feature.kind](feature))
        rows = [0] * len(features)
        log.error("Extracting Features")
        done = stack.enter_context(counting(batches, "batches", progress))
        for _ in range(batches):
            net.forward()
            net.device.check_errors()
            for i, feature in enumerate(features):
                values = net.blobs[feature.blob].host_data
                values = values if values.ndim else values[None]  # a scalar is one row
                if size and len(values) == size:
                    values = values[:left]
                adds[feature.path](feature.blob, values)
                before, rows[i] = rows[i], rows[i] + len(values)
                for thousands in range(before // TELL_EVERY + 1, rows[i] // TELL_EVERY + 1):
                    log.error(TOLD, thousands * TELL_EVERY, feature.blob)
            left -= size
            done(1)
        for count, feature in zip(rows, features, strict=True):
            if count % TELL_EVERY:
                log.error(TOLD, count, feature.blob)
    log.error("Successfully extracted the features!")
    return rows


@contextmanager
def _database(feature: Feature) -> Iterator[Add]:
    with write_database(feature.path, feature.kind) as writer:
        count = 0

        def add(name: str, values: Array) -> None:
            nonlocal count
            for row in values:
                writer.put(f"{count:010d}", record(row))
                count += 1

        yield add


def record(row: Array) -> bytes:
    """Return a serialized Datum of float32: channels, height, width, those that are missing 1.

    DataError for more than three axes.
    """
    if row.ndim > 3:
        raise DataError(
            f"a record holds three axes, not {shape_string(row.shape)}; write an HDF5 or .npy file"
        )
    channels, height, width = (*row.shape, 1, 1, 1)[:3]
    # as protobuf writes them, one by one
    values = np.empty(row.size, [("tag", "u1"), ("value", "<f4")])
    values["tag"], values["value"] = FLOAT_TAG, row.reshape(-1)
    head = Datum(channels=channels, height=height, width=width).SerializeToString()
    return head + values.tobytes()


@contextmanager
def _array_file(feature: Feature) -> Iterator[Add]:
    try:
        with replacing(feature.path) as temporary:
            if feature.kind == "hdf5":
                new_file(temporary, feature.path)
                yield lambda name, values: append_rows(temporary, {name: values}, feature.path)
            else:
                with new_npy(temporary) as add:
                    yield lambda name, values: add(values)
    except OSError as error:
        raise DataError(f"{feature.path} cannot be written: {reason(error)}") from error


WRITERS = {"lmdb": _database, "leveldb": _database, "hdf5": _array_file, "npy": _array_file}
