"""`caffepy data show`: what a source of data holds, be it a database, HDF5 files, a list of images
or a mean.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import h5py
import numpy as np

from caffepy.core.errors import DataError, reason
from caffepy.core.files import check_writable
from caffepy.core.paths import locate
from caffepy.data.datum import EITHER, decode, decode_image, image_file
from caffepy.data.prefetch import mapped
from caffepy.data.sources.database import Records, open_source, printable
from caffepy.data.sources.hdf5 import reading
from caffepy.data.sources.image_list import find_root, read_list
from caffepy.data.sources.lists import lines_of
from caffepy.data.sources.windows import read_windows
from caffepy.data.transformer import load_mean
from caffepy.data.write import unfinished
from caffepy.device.blob import Array, shape_string
from caffepy.proto.sniff import sniff
from caffepy.report import counting, grid
from caffepy.report.contact_sheet import sheet, thumbnail
from caffepy.report.text import as_json, columns, number
from caffepy.report.text import printable as on_one_line

CHUNK = 32  # items that a thread looks at at a time
PICTURES = 100  # of a contact sheet
IMAGES = "list of images"
NAMED = 5  # names of records that are shown
LABELS = 30  # labels that a table shows
SIGNATURES = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"RIFF": "webp",
    b"II": "tiff",
}
LARGEST = 1 << 53  # up to which float64 has all whole numbers
THRESHOLD = 0.5  # WindowData's usual one of foreground and background


@dataclass
class DataInfo:
    """What a source holds.

    `records` are all of them; of the first `seen` ones `shapes`, `stored` and `labels` say how many
    have which. `first` are names, `bad` what is wrong with some of the `bad_records` that cannot be
    read, `facts` others.
    """

    kind: str
    path: str
    size: int
    records: int = 0
    seen: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    bad_records: int = 0
    bad: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """An object of all that; labels are a list of [label, count]."""
        return as_json({**vars(self), "labels": sorted(self.labels.items())})

    def table(self) -> str:
        """Lines for a person."""
        seen = f", of which {self.seen:,} were looked at" if self.seen < self.records else ""
        lines = [
            f"{self.kind} {self.path}: {_many(self.records, 'record')}{seen}; {self.size:,} bytes"
        ]
        lines += [f"{name}: {_told(value)}" for name, value in self.facts.items()]
        lines += [f"{shape}: {count:,}" for shape, count in self.shapes.most_common(NAMED)]
        if len(self.shapes) > NAMED:
            lines.append(f"and {len(self.shapes) - NAMED:,} other shapes")
        lines += [f"stored as {how}: {count:,}" for how, count in self.stored.most_common()]
        if self.first:
            lines.append(f"first: {', '.join(self.first)}")
        if self.bad_records:
            lines += [f"cannot be read: {self.bad_records:,}", *(f"  {text}" for text in self.bad)]
        if self.bad_records == self.seen > 0 and self.kind == IMAGES:
            lines.append("their names begin in another folder, perhaps: give it as --root")
        if self.labels:
            rows = [["label", "records", "share"]]
            total = self.labels.total()
            for label, count in sorted(self.labels.items())[:LABELS]:
                rows.append([str(label), f"{count:,}", f"{count / total:.2%}"])
            lines += ["", _many(len(self.labels), "different label"), *columns(rows, left=0)]
            if len(self.labels) > LABELS:
                lines.append(
                    f"... and {len(self.labels) - LABELS:,} more, up to {max(self.labels)}"
                )
        return "\n".join(map(on_one_line, lines))


def _told(fact: Any) -> str:
    return ", ".join(map(number, fact)) if isinstance(fact, list) else str(fact)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Look(NamedTuple):
    """What one record is; `picture` if the contact sheet shows it."""

    name: str
    shape: tuple[int, ...] = ()
    stored: str = ""
    label: int = 0
    error: str = ""
    picture: Array | None = None


def show(
    path: str,
    *,
    root: str = "",
    first: int | None = None,
    sheet_path: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> DataInfo:
    """Look at an LMDB, a LevelDB, an HDF5 file, a list of such or of images, a window file or a
    mean.

    Which one it is shows from its content. All records are looked at, or the `first` ones. Names in
    a list of images stand behind `root`. `sheet_path` gets a contact sheet of up to 100 images.
    DataError for other files.
    """
    if sheet_path:
        grid.check_format(sheet_path)
        check_writable(sheet_path)
    viewer = Viewer(path, root, first, bool(sheet_path), threads, progress)
    kind = sniff(path)
    if kind in ("LMDB", "LevelDB") or os.path.isdir(path) or kind == "missing":
        viewer.database()
    elif kind == "HDF5":
        viewer.hdf5([path])
    elif kind == "a binaryproto":
        viewer.mean()
    elif kind == "text":
        viewer.text()
    else:
        advice = (
            "; caffepy weights show is for weights"
            if kind in ("a caffemodel", "a solver state")
            else ""
        )
        raise DataError(f"{path} is {kind}, not a source of data{advice}")
    if sheet_path:
        if not viewer.pictures:
            because = f": {viewer.info.bad[0]}" if viewer.info.bad else ""
            raise DataError(f"{path} has no images for a contact sheet{because}")
        grid.save(sheet(viewer.pictures), sheet_path)
    return viewer.info


class Viewer:
    """Fills a DataInfo and collects pictures."""

    def __init__(
        self,
        path: str,
        root: str,
        first: int | None,
        pictures: bool,
        threads: int | None,
        progress: bool | None,
    ) -> None:
        self.path, self._root, self._first = path, root, first
        self._wants_pictures, self._threads, self._progress = pictures, threads, progress
        self._step = 1
        self.pictures: list[tuple[Array, str]] = []
        self.info = DataInfo("", path, _size(path))

    def database(self) -> None:
        """Look at the records of an LMDB or LevelDB."""
        with closing(open_source(self.path)) as source:
            self._begin(source.kind, len(source))
            if note := unfinished(self.path):
                self.info.facts["unfinished"] = note
            self._look(source.once(CHUNK), self._records)

    def text(self) -> None:
        """Look at what a text file lists."""
        head = list(islice(self._words(), 2))
        if head == ["#", "0"]:
            self._windows()
        elif head and sniff(locate(head[0], self.path)) == "HDF5":
            self.hdf5([locate(name, self.path) for name in self._words()], "list of HDF5 files")
        else:
            self._images()

    def _words(self) -> Iterator[str]:
        return (word for line in lines_of(self.path) for word in line.split())

    def _images(self) -> None:
        entries = read_list(self.path)
        root = self._root or find_root("", entries[0][0], self.path, None)
        self._begin(IMAGES, len(entries))

        def look(entry: tuple[str, int], wanted: bool) -> Look:
            name, label = entry
            try:
                with open(root + name, "rb") as file:
                    content = file.read()
                image = decode_image(content, EITHER)
            except OSError as error:
                return Look(name, label=label, error=f"{root}{name}: {reason(error)}")
            except DataError as error:
                return Look(name, label=label, error=f"{root}{name}: {error.message}")
            return Look(
                name,
                image.shape,
                _encoding(content),
                label,
                picture=thumbnail(image) if wanted else None,
            )

        starts = range(0, len(entries), CHUNK)
        self._look(
            (entries[lo : lo + CHUNK] for lo in starts),
            lambda part, wanted: list(map(look, part, wanted)),
        )

    def _windows(self) -> None:
        file = read_windows(self.path, THRESHOLD, THRESHOLD)
        self._begin("window file", len(file.images))
        self.info.seen = len(file.images)
        self.info.first = file.images[:NAMED]
        self.info.facts = {
            "windows": f"{len(file.foreground):,} of overlap {THRESHOLD} or more, {len(file.background):,} of less"
        }
        classes, counts = np.unique(
            [*file.foreground[:, 1], *file.background[:, 1]], return_counts=True
        )
        self.info.labels.update(dict(zip(classes.tolist(), counts.tolist(), strict=True)))

    def mean(self) -> None:
        """Look at a mean file."""
        image = load_mean(self.path)
        self._begin("mean file", 1)
        means = image.mean((1, 2), np.float64).tolist()
        self.info.facts = {
            "mean_value": means,
            "values": f"{number(image.min())} to {number(image.max())}",
        }
        self._count(Look("mean", image.shape, "float", picture=thumbnail(image)))
        self.info.labels.clear()
        self.info.first.clear()

    def hdf5(self, paths: Sequence[str], kind: str = "HDF5 file") -> None:
        """Look at the datasets of HDF5 files."""
        self._begin(kind, 0)
        sets: dict[str, str] = {}
        for path in paths:
            try:
                with reading(path) as file:
                    self._hdf5(file, sets)
            except DataError as error:
                self.info.bad_records += 1
                self.info.bad.append(error.message)
        self.info.facts = {**({"files": len(paths)} if len(paths) > 1 else {}), **sets}
        if len(paths) > 1:
            self.info.first = list(paths[:NAMED])
            self.info.size += sum(_size(path) for path in paths)

    def _hdf5(self, file: h5py.File, sets: dict[str, str]) -> None:
        rows = 0
        for name, data in file.items():
            if not isinstance(data, h5py.Dataset) or not data.ndim:
                continue
            rows = max(rows, len(data))
            sets[f'dataset "{name}"'] = f"rows of {shape_string(data.shape[1:])}, {data.dtype}"
            if name == "label" and data.size == len(data) and data.dtype.kind in "fiu":
                wanted = None if self._first is None else max(0, self._first - self.info.records)
                values, counts = np.unique(data[:wanted], return_counts=True)
                if (values == np.round(values)).all() and (np.abs(values) < LARGEST).all():
                    self.info.labels.update(
                        dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True))
                    )
            if (
                self._wants_pictures
                and data.ndim == 4
                and data.shape[1] in (1, 3)
                and data.dtype.kind in "fiub"
            ):
                room = PICTURES - len(self.pictures)
                self.pictures += [
                    (thumbnail(image), str(i)) for i, image in enumerate(data[:room]) if image.size
                ]
        self.info.records += rows
        self.info.seen = (
            self.info.records if self._first is None else min(self._first, self.info.records)
        )

    def _records(self, records: Records, wanted: Sequence[bool]) -> list[Look]:
        return [
            _record(key, value, picture)
            for (key, value), picture in zip(records, wanted, strict=True)
        ]

    def _begin(self, kind: str, records: int) -> None:
        self.info.kind, self.info.records = kind, records
        seen = records if self._first is None else min(records, self._first)
        self._step = -(-seen // PICTURES) if self._wants_pictures and seen else seen + 1
        self._seen = seen

    def _look(
        self, chunks: Iterable[Any], function: Callable[[Any, Sequence[bool]], list[Look]]
    ) -> None:
        """Count what the function finds in the chunks, up to the first so many."""
        chosen = islice(self._chosen(chunks), -(-self._seen // CHUNK))
        looks = mapped(lambda chunk: function(*chunk), chosen, self._threads)
        with closing(looks), counting(self._seen, "records", self._progress) as advance:
            for found in looks:
                for look in found:
                    self._count(look)
                advance(len(found))

    def _chosen(self, chunks: Iterable[Any]) -> Iterator[tuple[Any, list[bool]]]:
        """Each chunk, cut at the last record to look at, with which of its records are for the
        contact sheet.
        """
        lo = 0
        for chunk in chunks:
            part = chunk[: self._seen - lo]
            yield part, [i % self._step == 0 for i in range(lo, lo + len(part))]
            lo += len(part)

    def _count(self, look: Look) -> None:
        info = self.info
        info.seen += 1
        if len(info.first) < NAMED:
            info.first.append(look.name)
        if look.error:
            info.bad_records += 1
            if len(info.bad) < NAMED:
                info.bad.append(look.error)
            return
        info.shapes[shape_string(look.shape)] += 1
        info.stored[look.stored] += 1
        info.labels[look.label] += 1
        if look.picture is not None and self._wants_pictures:
            self.pictures.append((look.picture, str(look.label)))


def _record(key: memoryview | bytes, value: memoryview | bytes, wanted: bool) -> Look:
    name = printable(key)[1:-1]
    try:
        image, label, is_encoded = decode(value)
    except DataError as error:
        return Look(name, error=f"{name}: {error.message}")
    stored = (
        _encoding(image_file(value))
        if is_encoded
        else "bytes"
        if image.dtype == np.uint8
        else "floats"
    )
    return Look(name, image.shape, stored, label, picture=thumbnail(image) if wanted else None)


def _encoding(content: bytes) -> str:
    return next(
        (kind for head, kind in SIGNATURES.items() if content.startswith(head)),
        "another kind of image file",
    )


def _size(path: str) -> int:
    """Bytes of a file, or of the files in a folder."""
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.exists(path) else 0
