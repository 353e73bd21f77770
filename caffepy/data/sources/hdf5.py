"""Rows of HDF5 files: several datasets of one length a file, a whole file in memory at a time."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import CaffeError, DataError, reason
from caffepy.core.files import locate
from caffepy.core.hdf5 import check_size
from caffepy.core.names import nearest
from caffepy.data.sources.base import (
    SHOWN_NAMES,
    AnySource,
    Array,
    State,
    Summary,
    first_words,
    lines_of,
    visits,
)
from caffepy.device.blob import shape_string
from caffepy.device.threads import parallel
from caffepy.proto.sniff import sniff

if TYPE_CHECKING:
    import h5py

log = logging.getLogger(__name__)

GRAIN = 4 << 20  # bytes a piece of work for a thread
CHUNK = 1 << 20  # bytes of rows that are stored together
OVERHEAD = 1 << 20  # bytes of HDF5's own that an append may add
EXACT = 1 << 53  # float64 has all whole numbers up to this one


class HDF5Files(AnySource):
    """An HDF5 file, or those that a list names, for `caffepy data show`."""

    layer = "HDF5Data"

    def __init__(self, path: str) -> None:
        is_list = sniff(path) != "HDF5"
        self.kind = "list of HDF5 files" if is_list else "HDF5 file"
        self._files = _read_files(path) if is_list else [path]

    @classmethod
    def holds(cls, path: str, kind: str) -> bool:
        """True for an HDF5 file, or a text that starts with the name of one."""
        if kind != "text":
            return kind == "HDF5"
        return any(sniff(locate(name, path)) == "HDF5" for name in first_words(path, 1))

    def summarize(self, info: Summary, first: int | None, images: int) -> list[tuple[Array, str]]:
        """Describe the datasets, count the labels, return images of datasets that hold any."""
        found: list[tuple[Array, str]] = []
        datasets: dict[str, str] = {}
        for path in self._files:
            try:
                with reading(path) as file:
                    rows = 0
                    for name, data in file.items():
                        if not hasattr(data, "shape") or not data.ndim:
                            continue  # a group, or a single number
                        rows = max(rows, len(data))
                        row = shape_string(data.shape[1:])
                        datasets[f'dataset "{name}"'] = f"rows of {row}, {data.dtype}"
                        if name == "label":
                            most = None if first is None else max(0, first - info.records)
                            info.labels.update(_labels(data, most))
                        if data.ndim == 4 and data.shape[1] in (1, 3) and data.dtype.kind in "fiub":
                            rows_of_images = enumerate(data[: images - len(found)])
                            found += [(x, str(i)) for i, x in rows_of_images if x.size]
                    info.records += rows
                    info.seen = info.records if first is None else min(first, info.records)
            except DataError as error:
                info.bad_records += 1
                info.bad.append(error.message)
        info.facts = datasets
        if len(self._files) > 1:
            info.facts = {"files": len(self._files), **datasets}
            info.first = self._files[:SHOWN_NAMES]
            info.size += sum(os.path.getsize(p) for p in self._files if os.path.exists(p))
        return found


def _labels(data: "h5py.Dataset", most: int | None) -> dict[int, int]:
    """Counts of labels in the first rows, if the dataset has one whole number a row."""
    if data.size != len(data) or data.dtype.kind not in "fiu":
        return {}
    values, counts = np.unique(data[:most], return_counts=True)
    if not ((values == np.round(values)).all() and (np.abs(values) < EXACT).all()):
        return {}
    return dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True))


class HDF5Rows:
    """Rows of the datasets `names`, endlessly, of the files that the text file `path` lists.

    With a seed each epoch shuffles the files, and each visit of a file shuffles its rows.
    """

    def __init__(
        self, path: str, names: Sequence[str], dtype: DTypeLike, seed: int | None = None
    ) -> None:
        self._path = path
        self._names = names
        self._dtype = dtype
        self._seed = seed
        self._files = _read_files(path)
        log.info("Number of HDF5 files: %d", len(self._files))
        self._file = ""
        self._arrays: list[Array] = []
        self._counts: dict[str, int] = {}  # rows, by file
        self._ready = False
        self._visit = self._row = 0
        self._go(0, 0)

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        """The shape of one row of each dataset."""
        return [a.shape[1:] for a in self._arrays]

    def extent(self) -> str:
        """Number of files, and the rows of the first and the last."""
        first, last = (
            f'"{os.path.basename(file)}" ({self._count(file):,} rows)'
            for file in (self._files[0], self._files[-1])
        )
        return f"{len(self._files):,} files, from {first} to {last}"

    def read(self, outs: Sequence[Array]) -> None:
        """Fill the arrays (N, ...), one a dataset, with the next N rows."""
        if not self._ready or self._loaded != self._visit:
            self._go(self._visit, self._row)  # after `skip`, or try again what failed before
        filled, wanted = 0, len(outs[0])
        while filled < wanted:
            rows = self._rows[self._row : self._row + wanted - filled]
            for array, out in zip(self._arrays, outs, strict=True):
                _gather(array, rows, out[filled : filled + len(rows)])
            filled += len(rows)
            self._row += len(rows)
            if self._row == len(self._rows):
                self._go(self._visit + 1, 0)

    @property
    def at_hand(self) -> int | None:
        """Number of rows that `read` has without another file; None if there is no other."""
        if not self._ready or self._loaded != self._visit:
            return 0
        return len(self._rows) - self._row - 1 if len(self._files) > 1 else None

    def state_after(self, state: State, count: int) -> State:
        """Return `state` after `count` rows that were `at_hand` in this one."""
        visits, row = divmod(state["row"] + count, len(self._rows))
        return {**state, "visit": state["visit"] + visits, "row": row}

    def skip(self, count: int) -> None:
        """Go past the next `count` rows; no file is loaded before `read` wants it."""
        visit, row = self._visit, self._row + count
        while row >= (rows := self._count(self._file_of(visit))):
            visit, row = visit + 1, row - rows
        self._visit, self._row = visit, row

    def _file_of(self, visit: int) -> str:
        epoch, position = divmod(visit, len(self._files))
        order = visits(len(self._files), self._seed, epoch)
        return self._files[int(order[position])]

    def _count(self, file: str) -> int:
        """Number of the file's rows."""
        if file not in self._counts:
            with self._opened(file) as h:
                self._counts[file] = len(self._datasets(h, file)[0])
        return self._counts[file]

    def _go(self, visit: int, row: int) -> None:
        """Go to a row of a visit's order; load the file of the visit unless it is in memory."""
        self._visit, self._row = visit, row
        file = self._file_of(visit)
        ready, self._ready = self._ready, False  # in between the memory may hold half a file
        if file != self._file or not ready:
            self._arrays = self._load(file)
            self._file = file
        seed = None if self._seed is None else self._seed + 1
        self._rows = visits(len(self._arrays[0]), seed, visit)
        self._row %= len(self._rows)
        self._counts[file], self._loaded = len(self._rows), visit
        self._ready = True

    @contextmanager
    def _opened(self, file: str) -> "Iterator[h5py.File]":
        if (kind := sniff(file)) != "HDF5":
            what = kind if kind == "missing" else f"{kind}, not an HDF5 file"
            raise DataError(f'"{file}", which {self._path} names, is {what}')
        with reading(file) as h:
            yield h

    def _datasets(self, h: Any, file: str) -> "list[h5py.Dataset]":
        """The datasets of a file, which have the same number of rows."""
        datasets = [self._dataset(h, name, file) for name in self._names]
        lengths = {name: len(data) for name, data in zip(self._names, datasets, strict=True)}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            rows = ", ".join(f'"{name}" {n}' for name, n in lengths.items())
            raise DataError(
                f"{file}: the datasets must have the same number of rows, at least 1: {rows}"
            )
        return datasets

    def _load(self, file: str) -> list[Array]:
        """The datasets, in the memory of the last file's where the shapes are equal."""
        with self._opened(file) as h:
            datasets = self._datasets(h, file)
            own = (data for data in datasets if not (data.is_virtual or data.external))
            check_size(h, sum(data.nbytes for data in own))
            for name, old, new in zip(self._names, self._arrays, datasets, strict=False):
                if old.shape[1:] != new.shape[1:]:
                    shape, known = shape_string(new.shape[1:]), shape_string(old.shape[1:])
                    shapes = f"{shape}, those of {self._file} {known}"
                    raise DataError(f'{file}: rows of "{name}" have shape {shapes}')
            last = self._arrays or [np.empty(0)] * len(datasets)
            return [self._array(data, old) for data, old in zip(datasets, last, strict=True)]

    def _dataset(self, h: Any, name: str, file: str) -> "h5py.Dataset":
        data = h.get(name)
        if data is None:
            hint = ", but a link that leads nowhere" if name in h else nearest(name, h)
            remedy = "a top is filled from the dataset of its name"
            raise DataError(f'{file} has no dataset "{name}"{hint}; {remedy}')
        if getattr(data, "ndim", 0) < 1 or data.dtype.kind not in "fiu":
            raise DataError(f'{file}: "{name}" is no dataset of numbers with at least one axis')
        return data

    def _array(self, data: "h5py.Dataset", old: Array) -> Array:
        """The dataset's values, in `old` if that has its shape."""
        if old.shape != data.shape or not old.size:
            return np.asarray(data, self._dtype)
        data.read_direct(old)
        return old

    def state(self) -> State:
        """Number of the visit to a file, row in its order, seed of the orders."""
        seed = {} if self._seed is None else {"seed": self._seed}
        return {"visit": self._visit, "row": self._row, **seed}

    def set_state(self, state: State) -> None:
        """Go to where `state` was taken; stay if it is of another kind of source."""
        if not {"visit", "row"} <= state.keys():
            lost = "the snapshot has no position in %s; starting at its first row"
            log.warning(lost, self._path)
            return
        if self._seed is not None and "seed" in state:
            self._seed = int(state["seed"])
        self._go(int(state["visit"]), int(state["row"]))


def _gather(array: Array, rows: Array, out: Array) -> None:
    """out = array[rows], by all threads, without the copy that indexing would make."""
    if out.nbytes < GRAIN:
        array.take(rows, 0, out, "clip")
        return

    def gather(lo: int, hi: int) -> None:
        np.take(array, rows[lo:hi], axis=0, out=out[lo:hi], mode="clip")

    parallel(gather, len(rows), max(1, GRAIN // (out[0].nbytes + 1)))


@contextmanager
def reading(path: str) -> "Iterator[h5py.File]":
    """Open an HDF5 file for reading; turn the errors of a damaged one into DataError."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except (CaffeError, MemoryError):
        raise
    except Exception as error:  # h5py fails in many ways on damaged files
        raise DataError(f"{path} cannot be read: {error}") from None


def _read_files(path: str) -> list[str]:
    """The files that a list names, where they exist."""
    if os.path.isfile(path) and sniff(path) == "HDF5":
        remedy = "give a text file that lists such files, one on each line"
        raise DataError(f'source "{path}" is an HDF5 file; {remedy}')
    names = [name for line in lines_of(path) for name in line.split()]
    if not names:
        raise DataError(f"{path} names no HDF5 files")
    return [locate(name, path) for name in names]


def new_file(path: str, name: str = "") -> None:
    """Write an HDF5 file without datasets; it replaces `path`.

    DataError if it cannot be written; it names the file `name`, by default `path`.
    """
    import h5py

    if "\0" in path:
        raise DataError(f"{name or path} cannot be written: no path holds a NUL")
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{name or path} cannot be written: it is a pipe or a device, not a file")
    with _writing(name or path):
        h5py.File(path, "w", locking=False).close()  # a temporary file is locked already


def append_rows(path: str, arrays: Mapping[str, Array], name: str = "") -> None:
    """Append arrays (N, ...) to the datasets of these names in an HDF5 file; create missing ones.

    DataError if the disk is full, which leaves the file as it was, or if the rows have another
    shape; it names the file `name`, by default `path`.
    """
    import h5py

    with _writing(name or path):
        # twice: the last chunk may be used in part
        chunks = sum(2 * a.nbytes + CHUNK for a in arrays.values())
        _reserve(path, chunks + OVERHEAD)
        with h5py.File(path, "a", locking=False) as file:
            for key, array in arrays.items():
                row = array.shape[1:]
                if key not in file:
                    rows = min(CHUNK // (prod(row) * array.itemsize or 1), len(array))
                    chunk = tuple(max(1, size) for size in (rows, *row))
                    file.create_dataset(key, data=array, maxshape=(None, *row), chunks=chunk)
                    continue
                dataset = file[key]
                if dataset.shape[1:] != row:
                    shapes = shape_string(dataset.shape[1:]), shape_string(row)
                    message = "%s: rows of %s have shape %s, those to be added %s"
                    raise DataError(message % (name or path, dataset.name, *shapes))
                start = len(dataset)
                dataset.resize(start + len(array), axis=0)
                dataset[start:] = array


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # h5py's own text names addresses of memory, and the file by its path
        raise DataError(f"{path} cannot be written: {reason(error)}") from None


def _reserve(path: str, count: int) -> None:
    """Lengthen the file if the disk has room, since HDF5 crashes the process on a full disk.

    HDF5 truncates what it does not use when it closes the file.
    """
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        try:
            os.posix_fallocate(file.fileno(), size, count)
        except OSError:
            file.truncate(size)
            raise
