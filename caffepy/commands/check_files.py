"""`caffepy check` of several files and folders: a line a file, whatever is in it.

Each file is checked in a process beside this one, which is ended and begun anew if a net takes too
long or makes it crash.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from caffepy.commands.check import NetInfo, inspect, is_solver, outer_fields
from caffepy.core.errors import CaffeError, ConfigError
from caffepy.device.threads import cores
from caffepy.proto.caffe_pb2 import LabelMap, NetParameter
from caffepy.proto.sniff import sniff
from caffepy.proto.text import read_message, read_solver, read_text
from caffepy.solver.check import check_param

log = logging.getLogger(__name__)

ENDINGS = (".prototxt", ".pt", ".ptototxt", ".prototxt.txt")
"""Names of prototxts in a folder; some of PyTorch's files are called .pt, too."""

SECONDS = 10.0
"""The longest time that a net may take to be built: of the process's own, or in which it waits."""

BEAT = 0.5
"""Seconds from one word of a process that builds a net to the next."""

WAITING = 0.01
"""A process that has less of the time between two words for itself waits, if not for a core."""


@dataclass(frozen=True)
class FileInfo:
    """A file: "net", "solver", "label map" or "other"; what is wrong, if anything; layers and
    learnable parameters of its largest net, None if no net of it was built; warnings, each once.
    """

    file: str
    kind: str
    ok: bool
    error: str | None = None
    layers: int | None = None
    parameters: int | None = None
    warnings: tuple[str, ...] = ()

    def json(self) -> str:
        """Return an object in one line."""
        return json.dumps(asdict(self))

    def text(self) -> str:
        """Return a line for a person, and one more for each warning."""
        result = "ok" if self.error is None else f"error: {self.error}"
        if self.error is None and self.layers is not None:
            result += f", {self.layers:,} layers, {self.parameters:,} parameters"
        texts = [result, *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(f"{self.file}: {self.kind}: {what}" for what in texts)


def files_in(paths: Iterable[str]) -> Iterator[str]:
    """Yield the files given, and the prototxts below the folders given, each once."""
    seen = set()
    for path in paths:
        for file in _below(path) if os.path.isdir(path) else [path]:
            if (real := os.path.realpath(file)) not in seen:
                seen.add(real)
                yield file


def _below(folder: str) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(where, name)
            if not name.lower().endswith(ENDINGS) or not os.path.isfile(file):
                continue  # another name, or a pipe, which nobody may ever write
            if not name.endswith(".pt") or sniff(file) == "text":
                yield file


def check_files(
    files: Sequence[str], *, images: Mapping[str, Sequence[int]] | None = None, **options: Any
) -> Iterator[FileInfo]:
    """Check each file, with the options of `inspect`, in as many processes as there are cores;
    yield the results in the order of the files. `images` has the shapes of images of single
    files.
    """
    known = images or {}
    count = min(cores(), len(files)) or 1
    local = threading.local()
    started: list[_Beside] = []

    def check(file: str) -> FileInfo:
        if not hasattr(local, "beside"):
            local.beside = _Beside()
            started.append(local.beside)
        own = {"image": known[file]} if file in known else {}
        return local.beside.check(file, options | own)  # type: ignore[no-any-return] # a thread's own

    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(check, files)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for beside in started:
            beside.end()


class Beat(NamedTuple):
    """The time that a process has had for a file."""

    file: str
    seconds: float


def counted(own: float, wall: float) -> float:
    """Return what of the seconds between two words counts: those that the process computed, so that
    a machine with much else to do makes no net fail, or all if it computed nothing.
    """
    return wall if own < WAITING * wall else min(own, wall)


class _Beside:
    """A process that checks files one after another."""

    def __init__(self) -> None:
        self._context = get_context("spawn")
        self._process: Any = None

    def _begin(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it has imported all that it needs

    def check(self, file: str, options: dict[str, Any]) -> FileInfo:
        """Return what `check_file` does; a net that ends the process is an error of the file."""
        if self._process is None:
            self._begin()
        kind, spent, last = "net", 0.0, Beat(file, 0.0)
        try:
            self._pipe.send((file, options))
            since = time.monotonic()
            while spent < SECONDS and self._pipe.poll(SECONDS):
                if isinstance(found := self._pipe.recv(), FileInfo):
                    return found
                if not isinstance(found, Beat):
                    kind = found
                elif found.file == file:
                    now = time.monotonic()
                    spent += counted(found.seconds - last.seconds, now - since)
                    last, since = found, now
            what = f"a net of this file takes more than {SECONDS:g} seconds to build"
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            what = f"to build a net of this file ends the process (exit code {code})"
        self.end()
        return FileInfo(file, kind, False, f"{file}: {what}")

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Connection) -> None:
    """Check the files that come through the pipe, in a process of its own."""
    logging.disable(logging.INFO)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())  # what Python layers print is no line of ours
    lock = threading.Lock()
    begun = list[Beat]()

    def send(what: object) -> None:
        with lock:
            pipe.send(what)

    def beat() -> None:
        with suppress(OSError):
            while True:
                time.sleep(BEAT)
                for file, start in begun:
                    send(Beat(file, time.process_time() - start))

    with suppress(EOFError, OSError, KeyboardInterrupt):
        send("ready")
        threading.Thread(target=beat, daemon=True).start()
        while True:
            file, options = pipe.recv()
            begun[:] = [Beat(file, time.process_time())]
            found = check_file(file, send, **options)
            begun.clear()
            send(found)


class _Warnings(logging.Handler):
    """Texts that are logged as a warning or worse, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[record.getMessage()] = None


def check_file(file: str, send: Callable[[str], object], **options: Any) -> FileInfo:
    """Check a file, sending its kind before each of its nets and at the end.

    Of a solver its own fields are checked, and nets inside it; those in files of their own are not
    its mistakes.
    """
    kind, infos = "net", list[NetInfo]()
    error = None
    warnings = _Warnings()
    logging.getLogger("caffepy").addHandler(warnings)
    try:
        text = read_text(file)
        names = set(outer_fields(text))
        kind = "solver" if is_solver(text) else "net"
        build = bool(names & (set(NetParameter.DESCRIPTOR.fields_by_name) - {"name"}))
        if kind == "solver":
            solver = read_solver(file, text, options.get("synthetic", False))
            check_param(solver, file)
            build = not any((solver.net, solver.train_net, *solver.test_net))
        elif not build and names & set(LabelMap.DESCRIPTOR.fields_by_name):
            kind = "label map"
            read_message(file, LabelMap(), text)
        elif not build:
            kind = "other"
            raise ConfigError(f'"{file}" is neither a net nor a solver')
        send(kind)
        for info in inspect(file, **options) if build else ():
            infos.append(info)
            send(kind)
    except CaffeError as wrong:
        error = str(wrong)
    except MemoryError:
        error = f"{file}: there is not enough memory to build this net"
    except (Exception, SystemExit) as bug:  # the other files are checked nonetheless
        error = f"{file}: a bug of caffepy: {type(bug).__name__}: {bug}"
    finally:
        logging.getLogger("caffepy").removeHandler(warnings)
    largest = max(infos, key=lambda info: len(info.layers), default=None)
    layers = len(largest.layers) if largest else None
    parameters = largest.parameters if largest else None
    return FileInfo(file, kind, error is None, error, layers, parameters, tuple(warnings.texts))
