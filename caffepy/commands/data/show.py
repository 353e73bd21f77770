"""`caffepy data show`: the content of a source of data or of a mean file."""

import os
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import check_writable
from caffepy.data.datum import decode_annotated
from caffepy.data.prefetch import mapped
from caffepy.data.sources import find, open_source
from caffepy.data.sources.base import SHOWN_NAMES, AnySource, Items, Source, Summary
from caffepy.data.sources.databases import Database
from caffepy.data.sources.image_list import ImageList
from caffepy.data.transformer import load_mean
from caffepy.data.write import unfinished
from caffepy.device.blob import Array, shape_string
from caffepy.proto.sniff import sniff
from caffepy.report import counting, grid
from caffepy.report.text import as_json, columns, extension_of, number
from caffepy.report.text import printable as on_one_line

CHUNK = 32  # items that a thread looks at at a time
PICTURES = 100  # of a contact sheet
SHOWN_SHAPES = 5
LABELS = 30  # labels that a table shows


Picture = tuple[Array, str]
"""A thumbnail and its caption."""


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
        for name, fact in self.facts.items():
            value = ", ".join(map(number, fact)) if isinstance(fact, list) else fact
            lines.append(f"{name}: {value}")
        lines += [f"{shape}: {count:,}" for shape, count in self.shapes.most_common(SHOWN_SHAPES)]
        if len(self.shapes) > SHOWN_SHAPES:
            lines.append(f"and {len(self.shapes) - SHOWN_SHAPES:,} other shapes")
        lines += [f"stored as {how}: {count:,}" for how, count in self.stored.most_common()]
        if self.first:
            lines.append(f"first: {', '.join(self.first)}")
        if self.bad_records:
            lines += [f"cannot be read: {self.bad_records:,}", *(f"  {text}" for text in self.bad)]
        if self.bad_records == self.seen > 0 and self.kind == ImageList.kind:
            if self.path.endswith(".csv"):
                lines.append("a list of images has a file, a blank and a label in each line")
            lines.append("their names may be relative to another folder: name it with --root")
        if self.labels:
            rows = [["label", "boxes" if "labels" in self.facts else "records", "share"]]
            total = self.labels.total()
            for label, count in sorted(self.labels.items())[:LABELS]:
                rows.append([str(label), f"{count:,}", f"{count / total:.2%}"])
            lines += ["", _many(len(self.labels), "different label"), *columns(rows, left=0)]
            if (more := len(self.labels) - LABELS) > 0:
                lines.append(f"... and {more:,} more, up to {max(self.labels)}")
        return "\n".join(map(on_one_line, lines))


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Look(NamedTuple):
    """One record; `picture` if the sheet shows it, labels of its boxes if it `has_boxes`."""

    name: str
    shape: tuple[int, ...] = ()
    stored: str = ""
    labels: tuple[int, ...] = ()
    error: str = ""
    picture: Array | None = None
    has_boxes: bool = False


def show(
    path: str,
    *,
    root: str = "",
    first: int | None = None,
    sheet_path: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> DataInfo:
    """Describe an LMDB, LevelDB, HDF5 file, list of such or of images, window file or mean.

    Which one it is shows from its content. All records are looked at, or the `first` ones. Names in
    a list of images stand behind `root`. `sheet_path` gets a contact sheet of up to 100 images.
    DataError for other files.
    """
    if sheet_path:
        extension_of(sheet_path, grid.FORMATS)
        check_writable(sheet_path)
    info, kind = DataInfo("", path, _size(path)), sniff(path)
    wanted = PICTURES if sheet_path else 0
    if kind == "a binaryproto":
        pictures = _show_mean(info)
    else:
        with closing(_open(path, root, kind)) as source:
            info.kind = source.kind
            if isinstance(source, Source):
                pictures = _show_items(info, source, first, wanted, threads, progress)
            else:
                images = source.summarize(info, first, wanted)
                pictures = [(grid.thumbnail(image), caption) for image, caption in images]
    if sheet_path:
        if not pictures:
            because = f": {info.bad[0]}" if info.bad else ""
            raise DataError(f"{path} has no images for a contact sheet{because}")
        grid.save(grid.sheet(pictures), sheet_path)
    return info


def _open(path: str, root: str, kind: str) -> AnySource:
    if cls := find(path):
        return cls.open(path, root)
    if os.path.isdir(path) or kind == "missing":
        return open_source(path)
    is_net = kind in ("a caffemodel", "a solver state")
    advice = "; caffepy weights show is for weights" if is_net else ""
    raise DataError(f"{path} is {kind}, not a source of data{advice}")


def _show_mean(info: DataInfo) -> list[Picture]:
    image = load_mean(info.path)
    info.kind, info.records, info.seen = "mean file", 1, 1
    info.facts = {
        "mean_value": image.mean((1, 2), np.float64).tolist(),
        "values": f"{number(image.min())} to {number(image.max())}",
    }
    info.shapes[shape_string(image.shape)] = info.stored["float"] = 1
    return [(grid.thumbnail(image), "0")]


def _show_items(
    info: DataInfo,
    source: Source,
    first: int | None,
    wanted: int,
    threads: int | None,
    progress: bool | None,
) -> list[Picture]:
    """Read the first items, or all; return `wanted` pictures of them, evenly spread."""
    count = info.records = len(source)
    if note := unfinished(source.path):
        info.facts["unfinished"] = note
    if first is not None:
        count = min(count, first)
    shown = {i * count // wanted for i in range(wanted)} if wanted < count else range(count)

    def look(chunk: tuple[int, Items]) -> list[Look]:
        start, items = chunk
        asked_for = enumerate(items[: count - start], start)
        return [_look(source, item, i in shown) for i, item in asked_for]

    chunks = zip(range(0, count, CHUNK), source.once(CHUNK), strict=False)
    looks, pictures = mapped(look, chunks, threads), []
    with closing(looks), counting(count, "records", progress) as advance:
        for found in looks:
            info.seen += len(found)
            for one in found:
                if len(info.first) < SHOWN_NAMES:
                    info.first.append(one.name)
                if one.error:
                    info.bad_records += 1
                    if len(info.bad) < SHOWN_NAMES:
                        info.bad.append(one.error)
                    continue
                info.shapes[shape_string(one.shape)] += 1
                info.stored[one.stored] += 1
                info.labels.update(one.labels)
                if one.has_boxes:
                    info.facts["labels"] = "of boxes"
                if one.picture is not None:
                    pictures.append((one.picture, " ".join(map(str, one.labels))))
            advance(len(found))
    return pictures


def _look(source: Source, item: Any, wants_picture: bool) -> Look:
    name = source.key(item)
    try:
        image, labels, has_boxes = _decode(source, item)
        stored = source.stored(item, image)
    except DataError as error:
        return Look(name, error=error.message.removeprefix(f"{source.path}: "))
    picture = grid.thumbnail(image) if wants_picture else None
    return Look(name, image.shape, stored, labels, "", picture, has_boxes)


def _decode(source: Source, item: Any) -> tuple[Array, tuple[int, ...], bool]:
    """The image and its label, or those of its boxes; whether it is a record with boxes."""
    try:
        image, label = source.decode(item)
        return image, (label,), False
    except DataError:
        if isinstance(source, Database):
            with suppress(DataError):
                found = decode_annotated(item[1])
                if found.type is None:
                    return found.image, () if found.label is None else (found.label,), False
                return found.image, tuple(found.objects[:, 0].astype(int).tolist()), True
        raise


def _size(path: str) -> int:
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.exists(path) else 0
