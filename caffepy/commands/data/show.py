"""`caffepy data show`: the content of a source of data or of a mean file."""

import os
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import check_writable
from caffepy.data.prefetch import mapped
from caffepy.data.sources import find, open_source
from caffepy.data.sources.base import SHOWN_NAMES, AnySource, Items, Source, Summary
from caffepy.data.sources.image_list import ImageList
from caffepy.data.transformer import load_mean
from caffepy.data.write import unfinished
from caffepy.device.blob import Array, shape_string
from caffepy.proto.sniff import sniff
from caffepy.report import counting, grid
from caffepy.report.contact_sheet import sheet, thumbnail
from caffepy.report.text import as_json, columns, extension_of, number
from caffepy.report.text import printable as on_one_line

CHUNK = 32  # items that a thread looks at at a time
PICTURES = 100  # of a contact sheet
SHOWN_SHAPES = 5
LABELS = 30  # labels that a table shows


class DataInfo(Summary):
    """A Summary that can be printed."""

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
        lines += [f"{shape}: {count:,}" for shape, count in self.shapes.most_common(SHOWN_SHAPES)]
        if len(self.shapes) > SHOWN_SHAPES:
            lines.append(f"and {len(self.shapes) - SHOWN_SHAPES:,} other shapes")
        lines += [f"stored as {how}: {count:,}" for how, count in self.stored.most_common()]
        if self.first:
            lines.append(f"first: {', '.join(self.first)}")
        if self.bad_records:
            lines += [f"cannot be read: {self.bad_records:,}", *(f"  {text}" for text in self.bad)]
        if self.bad_records == self.seen > 0 and self.kind == ImageList.kind:
            lines.append("their names may be relative to another folder: name it with --root")
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
    """One record; `picture` if the contact sheet shows it."""

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
        extension_of(sheet_path, grid.FORMATS)
        check_writable(sheet_path)
    viewer = Viewer(path, first, bool(sheet_path), threads, progress)
    kind = sniff(path)
    if kind == "a binaryproto":
        viewer.mean()
    else:
        with closing(_open(path, root, kind)) as source:
            viewer.info.kind = source.kind
            viewer.items(source) if isinstance(source, Source) else viewer.summary(source)
    if sheet_path:
        if not viewer.pictures:
            because = f": {viewer.info.bad[0]}" if viewer.info.bad else ""
            raise DataError(f"{path} has no images for a contact sheet{because}")
        grid.save(sheet(viewer.pictures), sheet_path)
    return viewer.info


def _open(path: str, root: str, kind: str) -> AnySource:
    """The source at `path`; DataError says what it is instead."""
    if cls := find(path):
        return cls.open(path, root)
    if os.path.isdir(path) or kind == "missing":
        return open_source(path)
    advice = (
        "; caffepy weights show is for weights"
        if kind in ("a caffemodel", "a solver state")
        else ""
    )
    raise DataError(f"{path} is {kind}, not a source of data{advice}")


class Viewer:
    """Fills a DataInfo and collects pictures."""

    def __init__(
        self,
        path: str,
        first: int | None,
        wants_pictures: bool,
        threads: int | None,
        progress: bool | None,
    ) -> None:
        self._first, self._wants_pictures = first, wants_pictures
        self._threads, self._progress = threads, progress
        self.pictures: list[tuple[Array, str]] = []
        self.info = DataInfo("", path, _size(path))

    def summary(self, source: AnySource) -> None:
        """Show a source without items."""
        images = source.summarize(self.info, self._first, PICTURES * self._wants_pictures)
        self.pictures = [(thumbnail(image), caption) for image, caption in images]

    def mean(self) -> None:
        """Show a mean file."""
        image = load_mean(self.info.path)
        self.info.kind, self.info.records = "mean file", 1
        self.info.facts = {
            "mean_value": image.mean((1, 2), np.float64).tolist(),
            "values": f"{number(image.min())} to {number(image.max())}",
        }
        self._count(Look("mean", image.shape, "float", picture=thumbnail(image)))
        self.info.labels.clear()
        self.info.first.clear()

    def items(self, source: Source) -> None:
        """Look at the first items, or all; PICTURES of them, evenly spread, go to the sheet."""
        count = self.info.records = len(source)
        if note := unfinished(source.path):
            self.info.facts["unfinished"] = note
        if self._first is not None:
            count = min(count, self._first)
        step = -(-count // PICTURES) if self._wants_pictures and count else count + 1

        def look(chunk: tuple[int, Items]) -> list[Look]:
            start, items = chunk
            return [
                _look(source, item, (start + i) % step == 0)
                for i, item in enumerate(items[: count - start])
            ]

        starts = range(0, count, CHUNK)
        looks = mapped(look, zip(starts, source.once(CHUNK), strict=False), self._threads)
        with closing(looks), counting(count, "records", self._progress) as advance:
            for found in looks:
                for one in found:
                    self._count(one)
                advance(len(found))

    def _count(self, look: Look) -> None:
        info = self.info
        info.seen += 1
        if len(info.first) < SHOWN_NAMES:
            info.first.append(look.name)
        if look.error:
            info.bad_records += 1
            if len(info.bad) < SHOWN_NAMES:
                info.bad.append(look.error)
            return
        info.shapes[shape_string(look.shape)] += 1
        info.stored[look.stored] += 1
        info.labels[look.label] += 1
        if look.picture is not None and self._wants_pictures:
            self.pictures.append((look.picture, str(look.label)))


def _look(source: Source, item: Any, wants_picture: bool) -> Look:
    name = source.key(item)
    try:
        image, label = source.decode(item)
        stored = source.stored(item, image)
    except DataError as error:
        return Look(name, error=error.message.removeprefix(f"{source.path}: "))
    return Look(
        name, image.shape, stored, label, picture=thumbnail(image) if wants_picture else None
    )


def _size(path: str) -> int:
    """Bytes of a file, or of the files in a folder."""
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.exists(path) else 0
