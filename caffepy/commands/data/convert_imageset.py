"""`caffepy convert-imageset`: images become an LMDB or LevelDB with Caffe's keys and bytes.

Images are read and decoded by several threads and written in the order of the list, a transaction
at a time, while the next ones are decoded. What is not whole yet lies in a folder beside the
target, from which a later run goes on.
"""

import ctypes
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
from google.protobuf.message import DecodeError

from caffepy.core.errors import DataError, UsageError
from caffepy.core.files import read_regular
from caffepy.data.datum import COLOR, GRAY, head_of, read_image, resized
from caffepy.data.prefetch import mapped
from caffepy.data.sources import open_database
from caffepy.data.sources.databases import printable
from caffepy.data.sources.image_list import read_list
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

Made = tuple[bytes | None, int]
"""A serialized Datum, None if its image cannot be read, and the number of values of a raw one."""


class Maker(Protocol):
    """Makes a record of an image file and its label, or of whatever stands behind it."""

    @property
    def encode(self) -> str | None:
        """Encoding, see `Recipe`."""

    def record(self, path: str, label: Any, /) -> Made:
        """The serialized record of the file; none if the file cannot be read or is no image."""


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

    def record(self, path: str, label: int) -> Made:
        """The serialized Datum of the file; none if the file cannot be read or is no image."""
        try:
            content = read_regular(path)
            image: Any = read_image(content, GRAY if self.gray else COLOR)
        except (OSError, DataError):
            return None, 0
        if image is None:
            return None, 0
        if self.width:
            image = resized(image, self.width, self.height)
        if self.encode == "":  # the bytes of the planes are copied once
            planes = cv2.split(image)
            head = head_of((len(planes), *image.shape[:2]))
            tail = Datum(label=label, encoded=False).SerializeToString()
            return b"".join((head, *planes, tail)), image.size
        extension = os.path.splitext(path)[1][1:].lower()
        kind = extension if self.encode is None else self.encode.lower()
        if self.width or extension not in (kind, SPELT.get(kind)):
            content = encoded(image, kind, path)
        return Datum(data=content, label=label, encoded=True).SerializeToString(), 0


def encoded(image: Any, kind: str, path: str) -> bytes:
    """The image as a file of this kind; DataError if OpenCV does not write such files."""
    with suppress(cv2.error):
        good, content = cv2.imencode(f".{kind}", image)
        if good:
            return bytes(content)
    raise DataError(
        f'{path} cannot be stored as an image of type "{kind}"; name another with -encode_type'
    )


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
    path; a blank line counts as an image that cannot be read. Such images are left out, each with a
    message. An interrupted run leaves `database`.partial, which `resume` completes. `check` then
    compares all records with the images; of a database that is there already that is all that is
    done. UsageError or DataError say what does not fit.
    """
    entries = read_list(list_file, every_line=True)
    log.info("A total of %d images.", len(entries))
    lines = (b"%b %d\n" % (os.fsencode(name), label) for name, label in entries)
    made_of = {"list": hashlib.sha256(b"".join(lines)).hexdigest(), **asdict(recipe)}
    job = Job(with_slash(root), list(entries), recipe, check_size, threads, progress)
    return job.run(database, made_of, backend, shuffle, seed, resume, check)


def with_slash(root: str) -> str:
    """A prefix of names of files: with the slash that the name of a folder may lack."""
    return root + os.sep if os.path.isdir(root) and not root.endswith(os.sep) else root


def _may_begin_a_path(prefix: str) -> bool:
    """False if nothing has a path that begins so: then each image would be an error of its own."""
    folder, start = os.path.split(prefix)
    if not start or not os.path.isdir(folder or "."):
        return os.path.isdir(folder or ".")
    try:
        return any(name.startswith(start) for name in os.listdir(folder or "."))
    except OSError:  # a folder whose names cannot be read, though its files may be
        return True


@dataclass
class Job:
    """The conversion of a list's images, each a path and a label, or their comparison with a
    database.
    """

    root: str
    entries: list[tuple[str, Any]]
    recipe: Maker
    check_size: bool
    threads: int | None
    progress: bool | None

    def run(
        self,
        database: str,
        made_of: Mapping[str, Any],
        backend: str,
        shuffle: bool,
        seed: int | None,
        resume: bool,
        check: bool,
    ) -> Converted:
        """Write the database, or compare it if it is there already and `check` is true.

        `made_of` describes the images and what is made of them: a later run goes on only with the
        same. UsageError or DataError say what does not fit.
        """
        if self.check_size and self.recipe.encode != "":
            rule = "-check_size compares raw images; encoded ones differ in size by nature"
            raise UsageError(rule)
        if check and os.path.lexists(database):
            if shuffle and seed is None:
                raise UsageError(
                    "to compare a shuffled database, give the --seed that its log shows"
                )
            self.order(shuffle, seed)
            return self.compare(database)
        root = self.root
        if not _may_begin_a_path(root):
            raise self._none_readable(len(self.entries))
        made_of = {
            "root folder": os.path.abspath(root) if root.endswith(os.sep) else root,
            "backend": backend,
            "check_size": self.check_size,
            "shuffle": shuffle,
            **made_of,
            **({} if seed is None else {"seed": seed}),
        }
        drawn = int(np.random.SeedSequence().generate_state(1)[0])
        partial = Partial(database, backend, made_of, {"seed": drawn}, resume)
        self.order(shuffle, int(partial.recipe["seed"]))
        result = self.write(partial)
        if check:
            self.compare(database)
        return result

    def order(self, shuffle: bool, seed: int | None) -> None:
        """Take the images in the order of this seed, if they are to be shuffled."""
        if shuffle:
            log.info("Shuffling data (seed %d)", seed)
            order = np.random.default_rng(seed).permutation(len(self.entries))
            self.entries = [self.entries[i] for i in order]

    def write(self, partial: Partial) -> Converted:
        """Convert what is still missing in `partial`, which then is whole.

        DataError if not one of the images can be read.
        """
        _keep_freed_memory()
        try:
            with partial.open() as writer:
                log.info("Opened %s %s", partial.backend, partial.path)
                self._write(partial, writer)
                done = Done(**partial.progress)
                if not done.records:
                    raise self._none_readable(done.lines)
        except BaseException:
            done = Done(**partial.progress)
            if done.records:
                message = "%s holds the records of the first %d lines; --resume goes on"
                log.warning(message, partial.folder, done.lines)
            else:
                partial.abandon()
            raise
        if done.skipped:
            message = "%d of %d images could not be read and were left out"
            log.warning(message, done.skipped, done.lines)
        return Converted(done.records, done.skipped)

    def _write(self, partial: Partial, writer: Writer) -> None:
        done = Done(**partial.progress)
        if done.lines:
            log.info("Going on after %d of %d lines", done.lines, len(self.entries))
        batch: list[tuple[bytes, bytes]] = []
        size = 0

        def save(batch: Sequence[tuple[bytes, bytes]], done: Done) -> None:
            writer.write(batch)
            partial.note(done._asdict())

        with (
            ThreadPoolExecutor(1, "caffepy-write") as writing,
            counting(len(self.entries), "images", self.progress, done.lines) as advance,
        ):
            saved: Future[None] = writing.submit(lambda: None)
            for key, record, values in self._made(done.lines):
                done = self._count(done, key, record, values)
                if record is not None:
                    batch.append((key, record))
                    size += len(record)
                last = done.lines == len(self.entries)
                if last or len(batch) >= COMMIT_EVERY or size >= COMMIT_BYTES:
                    saved.result()
                    saved = writing.submit(save, batch, done)
                    batch, size = [], 0
                if record is not None and done.records % COMMIT_EVERY == 0:
                    log.info("Processed %d files.", done.records)
                advance(1)
            saved.result()
            if done.records % COMMIT_EVERY:
                log.info("Processed %d files.", done.records)

    def _count(self, done: "Done", key: bytes, record: bytes | None, values: int) -> "Done":
        """The progress after one more line; DataError if the size of its image differs."""
        if record is None:
            log.error("Could not open or find file %s", self._path(done.lines))
            return Done(done.lines + 1, done.records, done.skipped + 1, done.size)
        if self.check_size and done.size not in (0, values):
            raise DataError(
                f"{self._path(done.lines)} has {values} values, the first image {done.size}"
            )
        return Done(done.lines + 1, done.records + 1, done.skipped, values)

    def _made(self, start: int = 0) -> Iterator[tuple[bytes, bytes | None, int]]:
        """Yield key, record and number of values of each image from line `start` on, in order."""

        def some(lo: int) -> list[tuple[bytes, bytes | None, int]]:
            made = []
            for i, (name, label) in enumerate(self.entries[lo : lo + CHUNK], lo):
                record, values = self.recipe.record(self._path(i), label)
                made.append((b"%08d_%b" % (i, os.fsencode(name)), record, values))
            return made

        chunks = mapped(some, range(start, len(self.entries), CHUNK), self.threads)
        with closing(chunks):
            yield from chain.from_iterable(chunks)

    def _none_readable(self, lines: int) -> DataError:
        first, hint = self._path(0), ""
        if not os.path.isdir(self.root or "."):
            hint = f'; there is no folder "{self.root}"'
        elif not os.path.exists(first):
            hint = ", which does not exist: ROOTFOLDER/ stands before the names of the list"
        return DataError(f"none of the {lines} images could be read, such as {first}{hint}")

    def _path(self, line: int) -> str:
        return self.root + self.entries[line][0]

    def compare(self, database: str) -> Converted:
        """Compare a database with the images; DataError if records differ, which are logged."""
        log.info("Comparing %s with the images", database)
        problems = records = skipped = 0

        def report(message: str, key: bytes | memoryview) -> None:
            nonlocal problems
            if problems < SHOWN:
                log.error(message, printable(key))
            problems += 1

        with (
            closing(open_database(database)) as source,
            counting(len(self.entries), "images", self.progress) as advance,
        ):
            left = len(source)
            for key, record, _ in self._made():
                while left and bytes(source.peek()[0]) < key:
                    report("%s is not of the list", source.read()[0])
                    left -= 1
                there = left > 0 and bytes(source.peek()[0]) == key
                value = bytes(source.read()[1]) if there else None
                left -= there
                if value != record:
                    report(_difference(value, record), key)
                skipped += record is None
                records += record is not None
                advance(1)
            for _ in range(left):
                report("%s is not of the list", source.read()[0])
        if problems:
            raise DataError(
                f"{database} differs from the list and its images in {problems} records"
            )
        log.info("%d records match their images", records)
        return Converted(records, skipped)


class Done(NamedTuple):
    """The progress of a job: lines of the list, records, unreadable images; values of an image."""

    lines: int = 0
    records: int = 0
    skipped: int = 0
    size: int = 0


def _keep_freed_memory() -> None:
    """Make glibc keep freed blocks as large as images; the system would zero their pages anew."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, KEPT)
        library.mallopt(M_TRIM_THRESHOLD, 2 * KEPT)


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
