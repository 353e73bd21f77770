"""Writing databases as Caffe's tools do, whole or not at all."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import lmdb
import numpy as np

from caffepy.data.datum import Array
from caffepy.errors import DataError
from caffepy.proto.caffe_pb2 import Datum

COMMIT_EVERY = 1000
FIRST_MAP_SIZE = 1 << 24


class LMDBWriter:
    """Puts records into an LMDB folder, a transaction each 1000; the map grows as needed."""

    def __init__(self, folder: str) -> None:
        self._environment = lmdb.open(folder, map_size=FIRST_MAP_SIZE, mode=0o664, lock=False, sync=False)
        self._pending: list[tuple[bytes, bytes]] = []

    def put(self, key: str | bytes, value: Datum | bytes) -> None:
        """Add a record; readers see records in the byte order of their keys."""
        key = key.encode() if isinstance(key, str) else key
        self._pending.append((key, value if isinstance(value, bytes) else value.SerializeToString()))
        if len(self._pending) >= COMMIT_EVERY:
            self._commit()

    def finish(self) -> None:
        """Commit the rest and bring everything to the disk."""
        self._commit()
        self._environment.sync(True)

    def close(self) -> None:
        """Release the files."""
        self._environment.close()

    def _commit(self) -> None:
        while self._pending:
            try:
                with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                    cursor.putmulti(self._pending)
                self._pending.clear()
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])


@contextmanager
def write_lmdb(path: str) -> Iterator[LMDBWriter]:
    """A writer of the new LMDB folder `path`, which appears when the block is done and not at all if it raises.

    DataError if something of that name exists, or if LMDB cannot write (full disk, a key of 0 or over 511 bytes).
    """
    path = os.path.abspath(path)
    if os.path.lexists(path):
        raise DataError(f"{path} exists already; remove it or choose another name")
    parent, name = os.path.split(path)
    folder = os.path.join(parent, f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        os.mkdir(folder, 0o744)
        with closing(LMDBWriter(folder)) as writer:
            yield writer
            writer.finish()
        os.rename(folder, path)
    except (lmdb.Error, PermissionError) as error:
        raise DataError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def array_to_datum(image: Array, label: int = 0) -> Datum:
    """A raw Datum of an image (C, H, W): uint8 as bytes, other types as float_data."""
    channels, height, width = image.shape
    datum = Datum(channels=channels, height=height, width=width, label=label, encoded=False)
    if image.dtype == np.uint8:
        datum.data = image.tobytes()
    else:
        datum.float_data.extend(image.astype(np.float32).ravel())
    return datum
