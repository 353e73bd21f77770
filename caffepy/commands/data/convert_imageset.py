"""`caffepy convert-imageset`: image files become an LMDB or LevelDB, with the keys and bytes of
Caffe's tool.

Images are read and decoded by several threads and written in the order of the list, a transaction
at a time, while the next ones are decoded. What is not whole yet lies in a folder beside the
target, from which a later run goes on.
"""

import ctypes
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import cv2
import numpy as np
from google.protobuf.message import DecodeError

from caffepy.core.errors import DataError, UsageError
from caffepy.data.datum import COLOR, GRAY, head_of, read_image, resized
from caffepy.data.prefetch import mapped
from caffepy.data.sources import open_database
from caffepy.data.sources.databases import printable
from caffepy.data.sources.image_list import Entry, read_list
from caffepy.data.write import COMMIT_BYTES, COMMIT_EVERY, Partial, Writer
from caffepy.proto.caffe_pb2 import Datum
from caffepy.report import counting

log = logging.getLogger(__name__)

CHUNK = 8  # images that a thread decodes at a time
SHOWN = 10  # differences that are named
# the other extension of files that need not be encoded anew; not the other way around
SPELT = {"jpg": "jpeg"}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 1 << 25  # bytes, the most that glibc takes for M_MMAP_THRESHOLD

Image = tuple[bytes, bytes | None, int]
"""Key, record if the image can be read, and number of its values."""


@dataclass(frozen=True)
class Recipe:
    """The conversion of an image file to a record.

    `width` and `height` are 0 for images of their own size. `encode` is the type of image file to
    store ("jpg", "png"), None for that of each file's name, "" for raw pixels.
    """

    gray: bool = False
    width: int = 0
    height: int = 0
    encode: str | None = ""

    def record(self, path: str, label: int) -> "Made":
        """The serialized Datum of the file; none if the file cannot be read or is no image."""
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError:
            return Made(None, 0)
        image = read_image(content, GRAY if self.gray else COLOR)
        if image is None:
            return Made(None, 0)
        if self.width:
            image = resized(image, self.width, self.height)
        if self.encode == "":
            return raw(image, label)
        extension = os.path.splitext(path)[1][1:].lower()
        kind = extension if self.encode is None else self.encode.lower()
        if self.width or extension not in (kind, SPELT.get(kind)):
            content = encoded(image, kind, path)
        return Made(Datum(data=content, label=label, encoded=True).SerializeToString(), 0)


class Made(NamedTuple):
    """A serialized Datum and, of a raw one, the number of values of its image."""

    record: bytes | None
    size: int


def raw(image: Any, label: int) -> Made:
    """The Datum of an image (H, W) or (H, W, C), whose bytes are copied once."""
    planes = cv2.split(image)
    head = head_of((len(planes), *image.shape[:2]))
    return Made(
        b"".join((head, *planes, Datum(label=label, encoded=False).SerializeToString())), image.size
    )


def encoded(image: Any, kind: str, path: str) -> bytes:
    """The image as a file of this kind; DataError if OpenCV does not write such files."""
    try:
        good, content = cv2.imencode(f".{kind}", image)
    except cv2.error:
        good = False
    if not good:
        raise DataError(
            f'{path} cannot be stored as an image of type "{kind}"; name another with -encode_type'
        )
    return bytes(content)


@dataclass(frozen=True)
class Converted:
    """Number of records, and of images that could not be read."""

    records: int
    skipped: int


def convert_imageset(
    root: str,
    list_file: str,
    database: str,
    *,
    backend: str = "lmdb",
    shuffle: bool = False,
    seed: int | None = None,
    check_size: bool = False,
    recipe: Recipe = Recipe(),
    resume: bool = False,
    check: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Converted:
    """Write the images that `list_file` names, each name behind `root`, into the new `database`.

    A line is a path, a blank and a label. Keys are the line's number in eight digits, "_" and the
    path; a blank line counts as an image that cannot be read. `shuffle` takes the lines in a random
    order, that of `seed` if it is given. `check_size` wants equally many values in each image.
    Images that cannot be read are left out, each with a message. An interrupted run leaves
    `database`.partial, which `resume` completes. `check` then compares all records with the images;
    of a database that is there already that is all that is done. `progress`: False draws no bar.
    UsageError or DataError say what does not fit.
    """
    if check_size and recipe.encode != "":
        raise UsageError("-check_size compares raw images; encoded ones differ in size by nature")
    if os.path.isdir(root) and not root.endswith(os.sep):
        root += os.sep
    entries = read_list(list_file, every_line=True)
    log.info("A total of %d images.", len(entries))
    job = Job(root, entries, recipe, check_size, threads, progress)
    if check and os.path.lexists(database):
        if shuffle and seed is None:
            raise UsageError("to compare a shuffled database, give the --seed that its log shows")
        job.order(shuffle, seed)
        return job.compare(database)
    made_of = {
        "list": _digest(entries),
        "root folder": os.path.abspath(root) if root.endswith(os.sep) else root,
        "backend": backend,
        "check_size": check_size,
        "shuffle": shuffle,
        **asdict(recipe),
        **({} if seed is None else {"seed": seed}),
    }
    drawn = int(np.random.SeedSequence().generate_state(1)[0])
    partial = Partial(database, backend, made_of, {"seed": drawn}, resume)
    job.order(shuffle, int(partial.recipe["seed"]))
    result = job.write(partial)
    if check:
        job.compare(database)
    return result


def _digest(entries: list[Entry]) -> str:
    lines = (b"%b %d\n" % (os.fsencode(name), label) for name, label in entries)
    return hashlib.sha256(b"".join(lines)).hexdigest()


class Job:
    """The conversion of a list's images, or their comparison with a database."""

    def __init__(
        self,
        root: str,
        entries: list[Entry],
        recipe: Recipe,
        check_size: bool,
        threads: int | None,
        progress: bool | None,
    ) -> None:
        self._root, self._entries, self._recipe = root, entries, recipe
        self._check_size, self._threads, self._progress = check_size, threads, progress

    def order(self, shuffle: bool, seed: int | None) -> None:
        """Take the images in the order of this seed, if they are to be shuffled."""
        if shuffle:
            log.info("Shuffling data (seed %d)", seed)
            self._entries = [
                self._entries[i]
                for i in np.random.default_rng(seed).permutation(len(self._entries))
            ]

    def _nothing_read(self, count: int) -> DataError:
        hint = "" if os.path.isdir(self._root or ".") else f'; there is no folder "{self._root}"'
        return DataError(
            f"none of the {count} images could be read, such as "
            f"{self._root}{self._entries[0][0]}{hint}"
        )

    def write(self, partial: Partial) -> Converted:
        """Convert what is still missing in `partial`, which then is whole."""
        _keep_freed_memory()
        try:
            with partial.open() as writer:
                log.info("Opened %s %s", partial.backend, partial.path)
                self._write(partial, writer)
                done = Done(**partial.progress)
                if not done.records:
                    raise self._nothing_read(done.lines)
        except BaseException:
            done = Done(**partial.progress)
            if done.records:
                log.warning(
                    "%s holds the records of the first %d lines; --resume goes on",
                    partial.folder,
                    done.lines,
                )
            else:
                partial.abandon()
            raise
        if done.skipped:
            log.warning(
                "%d of %d images could not be read and were left out", done.skipped, done.lines
            )
        return Converted(done.records, done.skipped)

    def _write(self, partial: Partial, writer: Writer) -> None:
        done = Done(**partial.progress)
        if done.lines:
            log.info("Going on after %d of %d lines", done.lines, len(self._entries))
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        with (
            ThreadPoolExecutor(1, "caffepy-write") as writing,
            counting(len(self._entries), "images", self._progress, done.lines) as advance,
        ):
            saved: Future[None] = writing.submit(lambda: None)
            for key, record, values in self._made(done.lines):
                done = self._count(done, key, record, values)
                if record is not None:
                    batch.append((key, record))
                    size += len(record)
                last = done.lines == len(self._entries)
                if last or len(batch) >= COMMIT_EVERY or size >= COMMIT_BYTES:
                    saved.result()
                    saved = writing.submit(_save, partial, writer, batch, done)
                    batch, size = [], 0
                if record is not None and (last or done.records % COMMIT_EVERY == 0):
                    log.info("Processed %d files.", done.records)
                advance(1)
            saved.result()

    def _count(self, done: "Done", key: bytes, record: bytes | None, values: int) -> "Done":
        """The progress after one more line; DataError if the size of its image differs."""
        if record is None:
            log.error("Could not open or find file %s", self._path(done.lines))
            return Done(done.lines + 1, done.records, done.skipped + 1, done.size)
        if self._check_size and done.size not in (0, values):
            raise DataError(
                f"{self._path(done.lines)} has {values} values, the first image {done.size}"
            )
        return Done(done.lines + 1, done.records + 1, done.skipped, values)

    def _made(self, start: int = 0) -> Iterator[Image]:
        """Yield the record of each image from line `start` on, in order."""
        chunks = mapped(self._some, range(start, len(self._entries), CHUNK), self._threads)
        with closing(chunks):
            yield from chain.from_iterable(chunks)

    def _some(self, lo: int) -> list[Image]:
        lines = range(lo, min(lo + CHUNK, len(self._entries)))
        return [
            (self._key(i), *self._recipe.record(self._path(i), self._entries[i][1])) for i in lines
        ]

    def _path(self, line: int) -> str:
        return self._root + self._entries[line][0]

    def _key(self, line: int) -> bytes:
        return b"%08d_%b" % (line, os.fsencode(self._entries[line][0]))

    def compare(self, database: str) -> Converted:
        """Compare the records of a database with the images; DataError if some differ, which are
        logged.
        """
        log.info("Comparing %s with the images", database)
        problems = records = skipped = 0
        with (
            closing(open_database(database)) as source,
            counting(len(self._entries), "images", self._progress) as advance,
        ):
            left = len(source)
            for key, record, _ in self._made():
                while left and bytes(source.peek()[0]) < key:
                    problems += _report(problems, "%s is not of the list", source.read()[0])
                    left -= 1
                there = left > 0 and bytes(source.peek()[0]) == key
                value = bytes(source.read()[1]) if there else None
                left -= there
                if value != record:
                    problems += _report(problems, _difference(value, record), key)
                skipped += record is None
                records += record is not None
                advance(1)
            for _ in range(left):
                problems += _report(problems, "%s is not of the list", source.read()[0])
        if problems:
            raise DataError(
                f"{database} differs from the list and its images in {problems} records"
            )
        log.info("%d records match their images", records)
        return Converted(records, skipped)


class Done(NamedTuple):
    """The progress of a job: lines of the list, records, images that could not be read; values of
    an image.
    """

    lines: int = 0
    records: int = 0
    skipped: int = 0
    size: int = 0


def _keep_freed_memory() -> None:
    """Make glibc reuse freed memory: it returns blocks as large as images to the system, whose
    pages are then zeroed anew.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT)
        library.mallopt(M_TRIM_THRESHOLD, 2 * KEPT)


def _save(
    partial: Partial, writer: Writer, batch: Sequence[tuple[bytes, bytes]], done: Done
) -> None:
    writer.write(batch)
    partial.note(done._asdict())


def _difference(stored: bytes | None, made: bytes | None) -> str:
    if stored is None:
        return "%s is missing"
    if made is None:
        return "%s is there, but its image cannot be read"
    try:
        old, new = Datum.FromString(stored), Datum.FromString(made)
    except DecodeError:
        return "%s is no Datum"
    if old.label != new.label:
        return f"%s has label {old.label}, not {new.label}"
    return "%s does not match its image"


def _report(before: int, message: str, key: bytes | memoryview) -> int:
    if before < SHOWN:
        log.error(message, printable(key))
    return 1
