"""Decoders of images: threads of this process, processes beside it, or a GPU (`--decode`).

Threads decode most JPEGs by kernels (`jpeg_kernels`). Else Python lets one of them run at a time
but while OpenCV decodes, so they wait for each other before and after each image. Processes do not:
each gets some images of a batch at a time over a socket, and leaves them decoded in memory that it
shares with this one.

    filling thread   run: a job for some images of the batch -> queue; waits for all of them
    one thread of    job -> sendmsg: paths or image files     =>  the process makes images in the
    each process     recv: places and shapes of the images    <=  shared memory
                     take: copies them to the batch

The memory has no name and the socket no address, so nothing is left behind however either ends: a
process ends when its socket is closed, or its parent gone. What a process cannot make, this one
makes itself, and raises what is wrong with it.

A GPU decodes JPEG files of a batch, to where the batch lies there if all have its size, or resizes
them to there; others come back to the host, and threads warp them as they do what they decode
themselves. So all is as with threads, but the values of decoded pixels differ by 1 at most.

    filling thread   run_there: files -> JpegDecoder (-> Staging.resize) -> the batch on its device
                     run: files that are left -> JpegDecoder -> images on the host
    pool             make what else is to be done of each, take: copy it to the batch
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from math import ceil, prod
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import read_regular
from caffepy.data.decoder_process import Made, Make, Part, message, receive_answer
from caffepy.device.blob import Array
from caffepy.device.nvjpeg import JpegDecoder
from caffepy.device.threads import num_threads, parallel
from caffepy.ops.objects import Staging

log = logging.getLogger(__name__)

THREADS, PROCESSES, GPU = "threads", "processes", "gpu"
WAYS = (THREADS, PROCESSES, GPU)
"""The values of `--decode`."""

MEMORY = 256 << 20  # bytes of a process for its images; pages that none needs take no room
IMAGES = 16  # most images of a job: they lie in that memory together
PARTS = 512  # buffers that one call sends
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that this process alone answers; it ends the others by closing their sockets."""
ENDING = 5.0  # seconds in which a process ends after its socket was closed
CLOSING = 0.5  # the same at the end of a run, which is not to wait for one that hangs
GPU_THREADS = 6  # most that make images of what a GPU decoded: they need Python's lock for each
FIRST, SLOW = 8, 1e-3
"""Files of a batch that one thread reads first. If it needs more than SLOW seconds for each, it
waits for a disk, and several threads read the others; else they would wait for Python's lock.
"""
ENDED = "the processes that decode images were ended"

File = str | Part | memoryview | bytes
"""The path of an image file, where it lies in another file (for processes), or its content."""
READ_THERE = str, Part
Take = Callable[[int, Array | None], None]
"""Function of a place in the batch and the images (k, C, H, W) from there on, which are gone
afterwards, or None if the image of this place could not be made.
"""

_numbers = count()


class Task:
    """A function that all processes call: each is sent it once."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.number = next(_numbers)


class _Job:
    """Some images of a batch: `files` with `arguments`, at `places` in it."""

    def __init__(
        self, task: Task, places: list[int], files: list[File], arguments: list[Any], take: Take
    ) -> None:
        self.task, self.places, self.files, self.arguments = task, places, files, arguments
        self.take = take
        self.error: BaseException | None = None
        self.finished = threading.Lock()
        self.finished.acquire()


class _Process:
    """A process that decodes, its socket and the memory that it shares."""

    def __init__(self) -> None:
        memory = _memory()
        self._end, end = socket.socketpair()
        try:
            os.ftruncate(memory, MEMORY)
            self._memory = np.frombuffer(mmap.mmap(memory, MEMORY), np.uint8)
            # its modules are this process's, whatever lies in the working directory
            serve = f"serve({end.fileno()}, {memory}, {os.getpid()})"
            program = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from caffepy.data.decoder_process import serve; {serve}"
            )
            # in a session of its own, Ctrl-C in a terminal does not reach it; nor do signals that
            # this thread blocks, since a process inherits that
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", program],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(end.fileno(), memory),
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        finally:
            end.close()
            os.close(memory)
        self._known = -1  # the task that it has

    def make(self, job: _Job) -> None:
        """Send a job, whose images the process makes and hands over; EOFError if it has ended."""
        task = job.task
        heads = [file if isinstance(file, READ_THERE) else len(file) for file in job.files]
        make = task.make if task.number != self._known else None
        parts: list[File] = [*message((task.number, make, heads, job.arguments))]
        parts += [file for file in job.files if not isinstance(file, READ_THERE)]
        self._send(parts)
        self._known = task.number
        made: list[Made] = receive_answer(self._end)
        lo = 0
        while lo < len(made):
            hi = lo + 1
            while hi < len(made) and _follows(job.places, made, hi):
                hi += 1
            one = made[lo]
            job.take(job.places[lo], None if one is None else self._images_of(hi - lo, *one))
            lo = hi

    def _send(self, parts: list[Any]) -> None:
        """Send these buffers, without copying them in Python."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        first = 0
        while first < len(views):
            try:
                sent = self._end.sendmsg(views[first : first + PARTS])
            except OSError:
                raise EOFError from None
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def _images_of(self, n: int, start: int, shape: tuple[int, ...], kind: str) -> Array:
        dtype = np.dtype(kind)
        size = n * prod(shape) * dtype.itemsize
        return self._memory[start : start + size].view(dtype).reshape(n, *shape)

    def hang_up(self) -> None:
        """Close the socket, so that the process ends; whoever waits for it gets EOFError."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def end(self, seconds: float) -> int:
        """Wait so long for its end, then kill it; return its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._end.close()

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._process.pid


def _follows(places: list[int], made: list[Made], i: int) -> bool:
    """True if image i lies behind the one before it, in memory and in the batch."""
    one, before = made[i], made[i - 1]
    return (
        one is not None
        and before is not None
        and one[1:] == before[1:]
        and (places[i] == places[i - 1] + 1)
    )


def _memory() -> int:
    """A file descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):  # not bound by the size of /dev/shm, 64 MiB in many containers
        return os.memfd_create("caffepy-decoder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Decoders:
    """Processes that decode, one for each thread of the pool; they start with the first batch."""

    on_gpus = False

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._threads: list[threading.Thread] = []
        self._batches = 0  # that are being made
        self._lost: str | None = None  # what became of a process
        self._closed = False

    def begin(self) -> None:
        """Do nothing: processes start with the first batch."""

    def pids(self) -> list[int]:
        """The processes that run."""
        return [process.pid for process in self._processes]

    def run(
        self, task: Task, places: Sequence[int], files: Sequence[File], arguments: Any, take: Take
    ) -> None:
        """Make images of `files` and `arguments`, those of `places` in the batch, and hand each to
        `take`, on many threads; return when all are done.

        DataError if a process ends meanwhile, or has.
        """
        self._start()
        with self._lock:
            self._batches += 1
            share = len(self._processes) / self._batches  # of the processes, for this batch
        chunk = max(1, min(IMAGES, ceil(len(files) / share)))
        jobs = [
            _Job(
                task,
                list(places[lo : lo + chunk]),
                list(files[lo : lo + chunk]),
                list(arguments[lo : lo + chunk]),
                take,
            )
            for lo in range(0, len(files), chunk)
        ]
        try:
            with self._lock:
                self._check_open()
                for job in jobs:
                    self._jobs.put(job)
            for job in jobs:
                job.finished.acquire()
        finally:
            with self._lock:
                self._batches -= 1
        for job in jobs:
            if job.error is not None:
                raise job.error

    def run_there(
        self, places: Sequence[int], files: Sequence[File], staging: Staging, resized: bool
    ) -> Sequence[int]:
        """Return the places that are decoded where the batch will be used: none."""
        return ()

    def _check_open(self) -> None:
        if self._closed:
            raise DataError(ENDED)

    def _start(self) -> None:
        with self._lock:
            self._check_open()
            if self._processes:
                return
            log.info("%d processes decode images", num_threads())
            for i in range(num_threads()):
                process = _Process()
                self._processes.append(process)
                args, name = (process,), f"caffepy-decode-{i}"
                thread = threading.Thread(target=self._serve, args=args, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, process: _Process) -> None:
        """Give jobs to a process. After its end, answer that it is gone."""
        while (job := self._jobs.get()) is not None:
            try:
                if self._lost is None:
                    process.make(job)
                else:
                    job.error = DataError(self._lost)
            except EOFError:
                if not self._closed:
                    self._lost = f"process {process.pid}, which decodes images, {_how(process)}"
                job.error = DataError(self._lost or ENDED)
            except BaseException as error:  # raised again by `run`
                job.error = error
            job.finished.release()

    def close(self) -> None:
        """End the processes; whoever waits for them gets a DataError."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.hang_up()
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(ENDING)
        for process in self._processes:
            process.end(CLOSING)


def _how(process: _Process) -> str:
    """Describe how a process ended."""
    process.hang_up()
    code = process.end(ENDING)
    if code >= 0:
        return f"ended with exit code {code}; what it said stands above"
    hint = "; memory may have run out" if -code == signal.SIGKILL else ""
    return f"was ended by signal {-code} ({signal.Signals(-code).name}){hint}"


class GpuDecoders:
    """Decoders on the GPU that is the current one at the first `begin`; several threads may run."""

    on_gpus = True  # each decodes its own batches

    def __init__(self, make: Callable[[int | None], JpegDecoder] = JpegDecoder) -> None:
        self._make = make
        self._free: defaultdict[int, SimpleQueue[JpegDecoder]] = defaultdict(SimpleQueue)
        self._device: int | None = None
        self._closed = False

    def begin(self) -> None:
        """Make the first decoder; DeviceError says what is missing."""
        if self._device is None:
            decoder = self._make(None)
            self._device = decoder.device
            self._free[decoder.device].put(decoder)

    def run(
        self, task: Task, places: Sequence[int], files: Sequence[File], arguments: Any, take: Take
    ) -> None:
        """Make images of `files` and `arguments`, those of `places` in the batch, and hand each to
        `take`, on many threads; return when all are done.
        """
        assert self._device is not None
        with self._lent(self._device) as decoder:
            decoded = decoder.decode(_contents(files))

            def make_some(lo: int, hi: int) -> None:
                for i in range(lo, hi):
                    take(places[i], _made(task, decoded[i], arguments[i]))

            parallel(make_some, len(files), most=GPU_THREADS)

    def run_there(
        self, places: Sequence[int], files: Sequence[File], staging: Staging, resized: bool
    ) -> Sequence[int]:
        """Decode `files` to `places` of a batch where it will be used, `resized` to its images'
        size; return the places that are done, see `JpegDecoder.decode_to`.
        """
        if staging.gpu is None:
            return ()
        with self._lent(staging.gpu) as decoder:
            contents = _contents(files)
            if not resized:
                return decoder.decode_to(contents, places, staging.target)
            images, _ = decoder.decode_apart(contents)
            done = [place for place, image in zip(places, images, strict=True) if image]
            if done:
                staging.resize(decoder.stream, [image for image in images if image], done)
                decoder.stream.synchronize()
            return done

    @contextmanager
    def _lent(self, device: int) -> Iterator[JpegDecoder]:
        """Block with a decoder of a device for this thread alone."""
        try:
            decoder = self._free[device].get_nowait()
        except Empty:
            decoder = self._make(device)
        try:
            yield decoder
        finally:
            self._free[device].put(decoder)
            if self._closed:  # by another thread meanwhile
                self.close()

    def close(self) -> None:
        """Free the decoders."""
        self._closed = True
        for free in list(self._free.values()):
            with suppress(Empty):
                while True:
                    free.get_nowait().close()


def _contents(files: Sequence[File]) -> list[memoryview | bytes]:
    """The contents of files; empty if one cannot be read."""
    contents: list[memoryview | bytes] = [b""] * len(files)

    def read_some(lo: int, hi: int) -> None:
        for i in range(lo, hi):
            contents[i] = _content(files[i])

    if any(isinstance(file, str) for file in files):
        first, begun = min(FIRST, len(files)), perf_counter()
        read_some(0, first)
        threads = GPU_THREADS if perf_counter() - begun > first * SLOW else 1
        parallel(lambda lo, hi: read_some(first + lo, first + hi), len(files) - first, threads)
        return contents
    return list(map(_content, files))


def _content(file: File) -> memoryview | bytes:
    """The content of a file, empty if it cannot be read."""
    assert not isinstance(file, Part)
    if not isinstance(file, str):
        return file
    try:
        return read_regular(file)
    except OSError:
        return b""


def _made(task: Task, decoded: Array | None, argument: Any) -> Array | None:
    """The task's result for an image (3, H, W), as a batch of one; None if it has none."""
    if decoded is None:
        return None
    try:
        return task.make(decoded.transpose(1, 2, 0), argument)[None]
    except Exception:  # made again from the file, by whom tells what is wrong with it
        return None


AnyDecoders = Decoders | GpuDecoders

_decoders: ContextVar[AnyDecoders | None] = ContextVar("decoders", default=None)


@contextmanager
def decoding(way: str) -> Iterator[None]:
    """Set the way, one of WAYS, in which loaders that this thread makes in the block decode images.
    They must be closed before the block ends.
    """
    assert way in WAYS
    made: AnyDecoders | None = None
    if way != THREADS:
        made = Decoders() if way == PROCESSES else GpuDecoders()
    token = _decoders.set(made)
    try:
        yield
    finally:
        _decoders.reset(token)
        if made:
            made.close()


def current() -> AnyDecoders | None:
    """The decoders of loaders made here; None: threads. DeviceError says what a GPU lacks."""
    made = _decoders.get()
    if made:
        made.begin()
    return made
