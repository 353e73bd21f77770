"""Write databases as Caffe's tools do: whole or not at all, or in parts under the name .partial.
Write files of one array, row by row.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import replacing, temporary
from caffepy.data.sources.databases import printable, text_of
from caffepy.data.sources.leveldb import import_plyvel
from caffepy.device.blob import Array, shape_string
from caffepy.proto.caffe_pb2 import Datum

COMMIT_EVERY = 1000
COMMIT_BYTES = 1 << 25
FIRST_MAP_SIZE = 1 << 24
LONGEST_KEY = 511  # that LMDB takes
BLOCK_SIZE, OPEN_FILES = 1 << 16, 100  # of a LevelDB, as Caffe has them
# Caffe's is eight times as large, and all of it is read again when the database is opened
WRITE_BUFFER = 1 << 25
NOTE = "caffepy_partial.json"

Record = tuple[bytes, bytes]


@contextmanager
def _writing(name: str, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn these errors into a DataError: the database `name` cannot be written."""
    try:
        yield
    except errors as error:
        what = text_of(error)
        if isinstance(error, OSError):
            what = (error.strerror or what).lower()
        if not isinstance(error, OSError) or error.errno in (errno.EIO, errno.ENOSPC):
            with suppress(OSError):  # LMDB does not tell a full disk from a broken one
                free = shutil.disk_usage(os.path.dirname(os.path.abspath(name))).free
                if free < COMMIT_BYTES and "space" not in what:
                    what = f"the disk has {free:,} bytes left ({what})"
        raise DataError(f"{name} cannot be written: {what}") from error


class Writer:
    """Base of the writers: puts records into the database `name`, with a transaction for each 1000
    records or 32 MiB.
    """

    errors: tuple[type[Exception], ...]  # what the library raises if it cannot write
    _database: Any

    def __init__(self, name: str) -> None:
        self.name = name
        self._pending: list[Record] = []
        self._bytes = 0

    def put(self, key: str | bytes, value: Datum | bytes) -> None:
        """Add a record; readers see records in the byte order of their keys."""
        key = os.fsencode(key) if isinstance(key, str) else key
        value = value if isinstance(value, bytes) else value.SerializeToString()
        self._pending.append((key, value))
        self._bytes += len(value)
        if len(self._pending) >= COMMIT_EVERY or self._bytes >= COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        records, self._pending, self._bytes = self._pending, [], 0
        if records:
            self.write(records)

    def write(self, records: Sequence[Record]) -> None:
        """Write these keys and values, all or none; values of existing keys are replaced.

        DataError for a full disk, or for a key that LMDB does not take, of 0 or over 511 bytes.
        """
        with _writing(self.name, self.errors):
            self._write(records)

    def finish(self) -> None:
        """Commit the rest and bring everything to the disk."""
        self._commit()
        with _writing(self.name, self.errors):
            self._flush()

    def close(self) -> None:
        """Release the files."""
        self._database.close()

    def _write(self, records: Sequence[Record]) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        """Flush to the disk, if closing does not."""


class LMDBWriter(Writer):
    """Puts records into an LMDB folder, whose map grows as needed. Without `sync` a crash of the
    system may damage it.
    """

    errors = (lmdb.Error, OSError)

    def __init__(self, name: str, folder: str, sync: bool = False) -> None:
        super().__init__(name)
        data = os.path.join(folder, "data.mdb")
        size = max(FIRST_MAP_SIZE, os.path.getsize(data) if os.path.exists(data) else 0)
        folder_name = os.fsencode(folder)  # a text could have bytes that lmdb cannot encode
        self._database = lmdb.open(folder_name, map_size=size, mode=0o664, lock=False, sync=sync)

    def _write(self, records: Sequence[Record]) -> None:
        for key, _ in records:
            if not 0 < len(key) <= LONGEST_KEY:
                rule = f"an LMDB's keys have 1 to {LONGEST_KEY} bytes, but"
                sizes = f"{rule} {printable(key)} {len(key)}"
                raise DataError(f"{self.name} cannot be written: {sizes}")
        while True:
            try:
                with self._database.begin(write=True) as transaction:
                    transaction.cursor().putmulti(records)
                # map anew, or all touched pages would count as this process's memory
                self._map(1)
                return
            except lmdb.MapFullError:
                self._map(2)

    def _map(self, growth: int) -> None:
        self._database.set_mapsize(growth * self._database.info()["map_size"])

    def _flush(self) -> None:
        self._database.sync(True)


class LevelDBWriter(Writer):
    """Puts records into a LevelDB folder."""

    def __init__(self, name: str, folder: str, sync: bool = False) -> None:
        super().__init__(name)
        plyvel = import_plyvel(f"{name} is to be a LevelDB; writing one")
        self.errors = (plyvel.Error, OSError)
        self._sync = sync
        self._database = plyvel.DB(
            folder,
            create_if_missing=True,
            write_buffer_size=WRITE_BUFFER,
            block_size=BLOCK_SIZE,
            max_open_files=OPEN_FILES,
        )

    def _write(self, records: Sequence[Record]) -> None:
        with self._database.write_batch(sync=self._sync, transaction=True) as batch:
            for key, value in records:
                batch.put(key, value)


@contextmanager
def open_writer(name: str, folder: str, backend: str, sync: bool = False) -> Iterator[Writer]:
    """Open a writer of the database in `folder`, which is created if missing; messages name it
    `name`. If the block does not raise, the writer is finished at its end.
    """
    kinds = {"lmdb": LMDBWriter, "leveldb": LevelDBWriter}
    with _writing(name, (OSError, lmdb.Error)):
        os.makedirs(folder, exist_ok=True)
        writer = kinds[backend](name, folder, sync)
    with closing(writer):
        yield writer
        writer.finish()


def refuse_existing(path: str) -> None:
    """Raise DataError if `path` exists or is empty."""
    if not path:
        raise DataError("the new database has no name")
    if os.path.lexists(path):
        raise DataError(f"{path} exists already; remove it or choose another name")


@contextmanager
def write_database(path: str, backend: str = "lmdb") -> Iterator[Writer]:
    """Open a writer of the new database `path`, which appears when the block ends; not at all if it
    raises.

    `backend` is "lmdb" or "leveldb". DataError if `path` exists or cannot be written.
    """
    refuse_existing(path)
    path = os.path.abspath(path)
    with ExitStack() as stack:
        with _writing(path):
            if not os.path.exists(os.path.dirname(path)):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            folder = stack.enter_context(temporary(path, is_folder=True))
        with open_writer(path, folder, backend) as writer:
            yield writer
        refuse_existing(path)
        os.rename(folder, path)


class Partial:
    """A database that is written in parts to `path`.partial, with a note of its progress, and
    renamed at the end.

    `recipe` describes how it is made; a later run goes on only with the same one. `choices` belong
    to it, too, but those of an earlier run stay. DataError if `path` exists, if there is an
    unfinished database and `resume` is false, or if that has another recipe.
    """

    def __init__(
        self,
        path: str,
        backend: str,
        recipe: Mapping[str, Any],
        choices: Mapping[str, Any],
        resume: bool,
    ) -> None:
        refuse_existing(path)
        self.path, self.folder = path, f"{path.rstrip(os.sep)}.partial"
        self.progress: dict[str, Any] = {}
        self.recipe = {**choices, **recipe}
        self.backend = backend
        self._owns = False
        self._is_new = not os.path.lexists(self.folder)
        if not self._is_new:
            if not resume:
                left = f"{self.folder} is left of an interrupted run"
                raise DataError(f"{left}; go on with --resume, or remove it")
            self._resume(recipe)

    def _resume(self, recipe: Mapping[str, Any]) -> None:
        try:
            if not [name for name in os.listdir(self.folder) if not name.startswith(".")]:
                return  # it was killed before it wrote anything
            note = json.loads(Path(self.folder, NOTE).read_text(encoding="utf-8"))
            known, self.progress = dict(note["recipe"]), dict(note["progress"])
        except (OSError, ValueError, KeyError, TypeError):
            unknown = f"does not say how far the run came (it has no readable {NOTE})"
            raise DataError(f"{self.folder} {unknown}; remove it") from None
        other = [name for name, value in recipe.items() if known.get(name) != value]
        if other:
            made = f"{self.folder} was made with another {', '.join(other)}"
            raise DataError(f"{made}; give the same as before, or remove it")
        self.recipe.update(known)

    @contextmanager
    def open(self) -> Iterator[Writer]:
        """Open a writer for the missing records; at the end of the block rename the database."""
        with self._locked():
            if not self._is_new:
                self._resume(self.recipe)  # another process may have gone on meanwhile
            if not self.progress:
                self.note({})
            with open_writer(self.path, self.folder, self.backend, sync=True) as writer:
                yield writer
            self.note(self.progress, whole=True)
            with _writing(self.path):
                os.rename(self.folder, self.path)
                os.unlink(os.path.join(self.path, NOTE))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Create the folder if it is new, and lock it against other processes."""
        in_use = DataError(f"{self.folder} is being written by another process")
        with _writing(self.path):
            try:
                if self._is_new:
                    os.makedirs(os.path.dirname(os.path.abspath(self.folder)), exist_ok=True)
                    os.mkdir(self.folder)
            except FileExistsError:
                raise in_use from None
            try:
                descriptor = os.open(self.folder, os.O_RDONLY)
            except FileNotFoundError:
                raise in_use from None
        try:
            with suppress(OSError):  # file systems without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise in_use from None
            here = os.fstat(descriptor)
            if not os.path.exists(self.folder) or not os.path.samestat(here, os.stat(self.folder)):
                raise in_use
            self._owns = True
            yield
        finally:
            os.close(descriptor)

    def note(self, progress: Mapping[str, Any], whole: bool = False) -> None:
        """Save the progress, and `whole` at the end."""
        self.progress = dict(progress)
        note = {"recipe": self.recipe, "progress": self.progress, "whole": whole}
        with _writing(self.path), replacing(os.path.join(self.folder, NOTE)) as name:
            Path(name).write_text(json.dumps(note), encoding="utf-8")

    def abandon(self) -> None:
        """Remove the folder, unless another process writes to it."""
        if self._owns:
            shutil.rmtree(self.folder, ignore_errors=True)


def unfinished(folder: str) -> str:
    """The progress of a `Partial` in this folder, in words; "" for a complete database."""
    path = Path(folder, NOTE)
    if not path.exists():
        return ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(path.read_text(encoding="utf-8"))
        progress = () if note.get("whole") else note["progress"].items()
        return ", ".join(f"{name} {value}" for name, value in progress)
    return "it does not say how far"


def array_to_datum(image: Array, label: int = 0) -> Datum:
    """A raw Datum of an image (C, H, W): uint8 as bytes, other types as float_data."""
    channels, height, width = image.shape
    datum = Datum(channels=channels, height=height, width=width, label=label, encoded=False)
    if image.dtype == np.uint8:
        datum.data = image.tobytes()
    else:
        datum.float_data.extend(image.astype(np.float32).ravel())
    return datum


@contextmanager
def new_npy(path: str) -> Iterator[Callable[[Array], None]]:
    """Write a .npy file of float32. The block receives a function that appends rows (N, ...); the
    file is complete when the block ends.

    DataError for rows of another shape than the first. No rows are kept in memory.
    """
    count, shape = 0, None
    with open(path, "w+b") as file:

        def head() -> None:
            file.seek(0)
            describes = {"descr": "<f4", "fortran_order": False, "shape": (count, *(shape or ()))}
            # numpy pads the header, so that it has room for any number of rows
            np.lib.format.write_array_header_1_0(file, describes)

        def add(rows: Array) -> None:
            nonlocal count, shape
            if shape is None:
                shape = rows.shape[1:]
                head()
            if rows.shape[1:] != shape:
                raise DataError(
                    f"rows of {shape_string(rows.shape[1:])} follow rows of {shape_string(shape)}"
                )
            file.write(np.ascontiguousarray(rows, "<f4").data)
            count += len(rows)

        yield add
        head()
