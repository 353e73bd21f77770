"""Processes that decode images make the batches that threads make.

What is shown:

- the same images, labels, crops and errors in the same order, of each source and any number of
  processes;
- a process that dies is told in one message, of which nothing is left hanging;
- signals that end a run do not end the processes, but its end does, whatever it was.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DataError, DeviceError
from caffepy.data import decoders as decoders_module
from caffepy.data.datum import COLOR, decode_file
from caffepy.data.datum import resized as resized_by
from caffepy.data.decoder_process import ANSWER, HEAD, Part, message, receive_answer
from caffepy.data.decoders import Decoders, File, GpuDecoders, Task, current, decoding
from caffepy.data.loader import tolerating
from caffepy.data.reader import Reader
from caffepy.data.sources import open_database
from caffepy.data.sources.databases import Database, Records
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.layer import create_layer
from caffepy.layer.feed import Prefetching
from caffepy.ops import cpu
from caffepy.ops.objects import Specs
from caffepy.proto.caffe_pb2 import TRAIN, Datum, LayerParameter

COUNT, BATCH, WAIT = 14, 4, 20.0
JPEG = cv2.imencode(".jpg", np.full((9, 9, 3), 7, np.uint8))[1].tobytes()


ONE, SEVERAL, BY_KIND = range(3)


def files(sizes: int) -> list[bytes]:
    """Image files of three channels, as JPEG or PNG; one is cut short. All are of ONE size, or of
    SEVERAL, or PNGs are larger.
    """
    rng = np.random.default_rng(0)
    contents = []
    for i in range(COUNT):
        kind = ".png" if i % 5 == 2 else ".jpg"
        more = {ONE: 0, SEVERAL: i % 3, BY_KIND: kind == ".png"}[sizes]
        image = rng.integers(0, 256, (20 + more, 24, 3), np.uint8)
        contents.append(cv2.imencode(kind, image)[1].tobytes())
    contents[4] = contents[4][:-300]
    return contents


def write_list(folder: Path, contents: list[bytes]) -> str:
    for i, content in enumerate(contents):
        (folder / f"{i}.jpg").write_bytes(content)
    (folder / "list.txt").write_text("".join(f"{i}.jpg {i}\n" for i in range(len(contents))))
    return f'source: "{folder}/list.txt" root_folder: "{folder}/" batch_size: {BATCH}'


def database(folder: Path, contents: list[bytes]) -> str:
    """Encoded records, two raw ones among them, and one that is no Datum."""
    with write_database(str(folder / "db")) as writer:
        for i, content in enumerate(contents):
            record = Datum(data=content, label=i, encoded=True).SerializeToString()
            if i in (6, 7):
                shape = cv2.imdecode(np.frombuffer(content, np.uint8), 1).shape
                record = array_to_datum(np.full((3, *shape[:2]), i, np.uint8), i)
            writer.put(f"{i:04d}", b"\xff" if i == 9 else record)
    return (
        f'type: "Data" data_param {{ source: "{folder}/db" backend: LMDB batch_size: {BATCH} }} '
        "transform_param { crop_size: 17 mirror: true mean_value: 3 }"
    )


def image_list(folder: Path, contents: list[bytes]) -> str:
    """Shuffled images; one is no image."""
    contents[9] = b"no image"
    param = write_list(folder, contents)
    return f'type: "ImageData" image_data_param {{ {param} shuffle: true {{}} }}'


def resized(folder: Path, contents: list[bytes]) -> str:
    return image_list(folder, contents).replace("{}", "new_height: 11 new_width: 13")


def cropped(folder: Path, contents: list[bytes]) -> str:
    return image_list(folder, contents).replace("{}", "") + "transform_param { crop_size: 17 }"


def windows(folder: Path, contents: list[bytes]) -> str:
    """Two windows of each image; one image is missing."""
    write_list(folder, contents)
    os.remove(folder / "9.jpg")
    block = "# {0}\n{0}.jpg\n3\n20\n24\n2\n{1} 0.9 2 3 9 10\n0 0.1 0 0 7 7\n"
    text = "".join(block.format(i, i + 1) for i in range(COUNT))
    (folder / "windows.txt").write_text(text)
    return (
        f'type: "WindowData" window_data_param {{ source: "{folder}/windows.txt" batch_size: 8 '
        f'root_folder: "{folder}/" scale: 0.5 context_pad: 1 }} '
        "transform_param { crop_size: 12 mirror: true mean_value: 3 }"
    )


CASES: dict[str, tuple[Callable[[Path, list[bytes]], str], int]] = {
    "database": (database, ONE),
    "database of several sizes": (database, SEVERAL),
    "database of larger PNGs": (database, BY_KIND),
    "list": (resized, ONE),
    "list of one size": (cropped, ONE),
    "list of several sizes": (cropped, SEVERAL),
    "windows": (windows, ONE),
}


def batches(
    text: str, count: int, staging: type[cpu.Staging] = cpu.Staging
) -> list[list[np.ndarray]]:
    """All that batches bring to the device."""
    with tolerating(1):
        layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, Device(seed=1))
        assert isinstance(layer, Prefetching)
        loader = layer.open()
    made = []
    with closing(Reader(loader, 3, np.float32, staging)) as reader:
        for _ in range(count):
            batch = reader.take()
            made.append([np.array(part) for part in batch.staging.take()])
            batch.staging.done()
            reader.give_back(batch)
    return made


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_threads(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, sizes = CASES[case]
    text, count = write(tmp_path, files(sizes)), 8
    expected = batches(text, count)
    monkeypatch.setattr(decoders_module, "num_threads", lambda: 2)
    with decoding("processes"):
        processes = current()
        assert processes
        made = batches(text, count)
        assert len(processes.pids()) == 2
    for ours, theirs in zip(made, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert "Traceback" not in capfd.readouterr().err


class Engine:
    """A decoder such as a GPU's, by OpenCV: whole JPEGs of three channels only."""

    device = 0
    stream = SimpleNamespace(synchronize=lambda: None)
    memory: ClassVar[dict[int, np.ndarray]] = {}

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def decode_apart(self, files: Sequence[bytes]) -> tuple[list[tuple[int, int, int] | None], int]:
        found = self.decode(files)
        self.memory.update((id(image), image) for image in found if image is not None)
        return [None if i is None else (id(i), *i.shape[1:]) for i in found], len(files)

    def decode(self, files: Sequence[bytes | memoryview]) -> list[np.ndarray | None]:
        return [self._decoded(bytes(file)) for file in files]

    def decode_to(
        self, files: Sequence[bytes], places: Sequence[int], room: Callable[[Any], np.ndarray]
    ) -> list[int]:
        images = room(None)
        found = self.decode(files)
        if {image.shape for image in found if image is not None} - {images.shape[1:]}:
            return []
        done = {
            place: image for place, image in zip(places, found, strict=True) if image is not None
        }
        for place, image in done.items():
            images[place] = image
        return list(done)

    def _decoded(self, file: bytes) -> np.ndarray | None:
        if not file.startswith(JPEG[:3]) or not file.endswith(JPEG[-2:]):
            return None
        image = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
        return None if image.ndim == 2 else image.transpose(2, 0, 1)


class DeviceStaging(cpu.Staging):
    """A Staging of a GPU, whose arrays are others than the host's."""

    gpu = Engine.device
    there: ClassVar[list[int]] = []  # number of images that each batch had there

    def room(self, layout: Specs) -> list[np.ndarray]:
        if layout != self._layout:
            self._on_device = [np.zeros(shape, dtype) for shape, dtype in layout]
        host = super().room(layout)
        host[0][...] = 0
        return host

    def target(self, stream: object) -> np.ndarray:
        return self._on_device[0]

    def resize(
        self, stream: object, images: Sequence[tuple[int, int, int]], to: Sequence[int]
    ) -> None:
        y = self.target(stream)
        for (address, *size), place in zip(images, to, strict=True):
            image = Engine.memory[address]
            assert image.shape[1:] == tuple(size)
            y[place] = resized_by(image.transpose(1, 2, 0), *y.shape[:1:-1]).transpose(2, 0, 1)

    def send(self, there: Sequence[int] = ()) -> None:
        self.there.append(len(there))
        for i, (host, array) in enumerate(zip(self._arrays, self._on_device, strict=True)):
            rows = [row for row in range(len(host)) if i or row not in there]
            array[rows] = host[rows]

    def take(self) -> list[np.ndarray]:
        return self._on_device


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("staging", [cpu.Staging, DeviceStaging])
@pytest.mark.parametrize("case", CASES)
def test_batches_of_a_gpu_s_images_are_those_of_threads(
    case: str, staging: type[cpu.Staging], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sizes = CASES[case]
    text, count = write(tmp_path, files(sizes)), 8
    expected = batches(text, count)
    asked: list[int | None] = []

    def engine(device: int | None) -> Any:
        asked.append(device)
        return Engine()

    monkeypatch.setattr(decoders_module, "GpuDecoders", partial(GpuDecoders, engine))
    monkeypatch.setattr(DeviceStaging, "there", [])
    monkeypatch.setattr(Engine, "memory", {})
    with decoding("gpu"):
        made = batches(text, count, staging)
    for ours, theirs in zip(made, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert asked[0] is None
    assert set(asked[1:]) <= {Engine.device}
    some = case in ("database", "list", "list of one size")  # a PNG of another size brings all back
    assert (sum(DeviceStaging.there) > 0) == (some and staging is DeviceStaging)


def test_a_gpu_s_decoder_outlives_an_error_and_is_closed_once() -> None:
    made: list[Engine] = []

    def engine(_: int | None) -> Any:
        made.append(Engine())
        return made[-1]

    def fail(place: int, images: np.ndarray | None) -> None:
        raise RuntimeError(f"place {place}")

    class Full(DeviceStaging):
        def target(self, stream: object) -> np.ndarray:
            raise MemoryError

    task, files = Task(partial(decode_file, COLOR, None)), [JPEG]
    decoders = GpuDecoders(engine)
    decoders.begin()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="place 3"):
            decoders.run(task, [3], files, [None], fail)
        for resized in (False, True):
            with pytest.raises(MemoryError):
                decoders.run_there([0], files, Full(), resized)
    assert len(made) == 1
    with pytest.raises(RuntimeError, match="place 0"):
        decoders.run(task, [0], files, [None], lambda *given: (decoders.close(), fail(*given)))
    decoders.close()
    assert [engine.closed for engine in made] == [1]


@pytest.mark.gpu
@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("case", CASES)
def test_a_layer_on_a_gpu_has_the_images_of_threads_to_within_1(case: str, tmp_path: Path) -> None:
    from caffepy.device.cuda import CudaDevice
    from caffepy.device.nvjpeg import library

    try:
        library()
    except DeviceError as error:
        pytest.skip(str(error))
    write, sizes = CASES[case]
    text = write(tmp_path, files(sizes))
    made: dict[str, list[np.ndarray]] = {}
    for way in ("threads", "gpu"):
        device = CudaDevice(0, seed=1)
        with device.scope(), decoding(way), tolerating(1):
            layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
            tops = [Blob(device=device) for _ in range(2)]
            layer.setup([], tops)
            made[way] = []
            for _ in range(8):
                layer.forward([], tops)
                made[way] += [top.host_data.copy() for top in tops]
            layer.close()
    for ours, theirs in zip(made["gpu"], made["threads"], strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 1


def decode(decoders: Decoders, contents: Sequence[File]) -> dict[int, bool]:
    """Decode image files; return by place which were decoded."""
    made: dict[int, bool] = {}

    def take(place: int, images: np.ndarray | None) -> None:
        count = 1 if images is None else len(images)
        made.update(dict.fromkeys(range(place, place + count), images is not None))

    task = Task(partial(decode_file, COLOR, None))
    decoders.run(task, range(len(contents)), contents, [None] * len(contents), take)
    return made


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders]:
    """Two processes that decode."""
    monkeypatch.setattr(decoders_module, "num_threads", lambda: 2)
    with decoding("processes"):
        decoders = current()
        assert decoders
        yield decoders


def test_what_is_no_image_is_left_to_this_process(two: Decoders) -> None:
    contents = [JPEG, JPEG, b"no image", b"", JPEG]
    assert decode(two, contents) == {0: True, 1: True, 2: False, 3: False, 4: True}


def test_processes_read_parts_of_a_file_while_it_is_the_same(two: Decoders, tmp_path: Path) -> None:
    (tmp_path / "all").write_bytes(b"before" + JPEG + JPEG)
    status, size = os.stat(tmp_path / "all"), len(JPEG)
    where = str(tmp_path / "all"), status.st_dev
    parts = [
        Part(*where, status.st_ino, 6, size),
        Part(*where, status.st_ino, 6 + size, size),
        Part(*where, status.st_ino, 6 + 2 * size, size),  # behind the end
        Part(*where, status.st_ino, 6 + size, size + 1),  # cut off within it
        Part(*where, status.st_ino + 1, 6, size),
    ]
    assert decode(two, parts) == {0: True, 1: True, 2: False, 3: False, 4: False}


def test_image_files_of_an_lmdb_are_parts_of_its_file(tmp_path: Path) -> None:
    contents = files(SEVERAL)
    with write_database(str(tmp_path / "db")) as writer:
        for i, content in enumerate(contents):
            record = Datum(data=content, encoded=True, label=i).SerializeToString()
            writer.put(f"{i:04d}", record)
    source = open_database(str(tmp_path / "db"))
    assert isinstance(source, Database)
    found = source.image_files(source.take(COUNT), np.arange(COUNT))
    assert (
        [part.read() for part in found.parts] == [bytes(file) for file in found.files] == contents
    )
    several = source.join([source.take(2), Records.copied([(b"0", b"no Datum")], [0])])
    assert not source.image_files(several, np.arange(2)).parts
    source.close()


@pytest.mark.parametrize("length", [1, 100, ANSWER - HEAD.size, ANSWER, 3 * ANSWER])
@pytest.mark.parametrize("first", [1, HEAD.size - 1, HEAD.size, HEAD.size + 1, 1 << 20])
def test_answers_are_read_however_they_arrive(length: int, first: int) -> None:
    here, there = socket.socketpair()
    content = b"".join(message(bytes(length)))
    with here, there:

        def send() -> None:
            there.sendall(content[:first])
            time.sleep(0.01)
            there.sendall(content[first:])

        sending = threading.Thread(target=send)
        sending.start()
        assert receive_answer(here) == bytes(length)
        sending.join()
        there.close()
        with pytest.raises(EOFError):
            receive_answer(here)


def test_half_an_answer_is_none() -> None:
    content = b"".join(message([1, 2, 3]))
    for size in (0, 1, HEAD.size, len(content) - 1):
        here, there = socket.socketpair()
        with here:
            there.sendall(content[:size])
            there.close()
            with pytest.raises(EOFError):
                receive_answer(here)


def test_jobs_are_larger_where_several_batches_are_made(
    two: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Job(decoders_module._Job):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            sizes.append(len(self.files))

    monkeypatch.setattr(decoders_module, "_Job", Job)
    once = threading.Lock()

    def run(take: Callable[..., None]) -> None:
        task = Task(partial(decode_file, COLOR, None))
        two.run(task, range(8), [JPEG] * 8, [None] * 8, take)

    def run_another(*_: object) -> None:
        if once.acquire(blocking=False):
            run(lambda *_: None)

    for _ in range(2):
        run(run_another)
    assert sizes == [4, 4, 8, 4, 4]


def test_signals_are_the_other_process_s(two: Decoders) -> None:
    assert all(decode(two, [JPEG] * 4).values())
    for pid in two.pids():
        assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal does not reach it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    assert all(decode(two, [JPEG] * 40).values())


def test_a_dead_process_is_told_and_nothing_hangs(two: Decoders) -> None:
    decode(two, [JPEG] * 4)
    os.kill(two.pids()[0], signal.SIGKILL)
    told = rf"process {two.pids()[0]}, which decodes images, was ended by signal 9 \(SIGKILL\)"
    with pytest.raises(DataError, match=told):
        deque((decode(two, [JPEG] * 40) for _ in range(100)), 0)
    with pytest.raises(DataError, match=told):
        decode(two, [JPEG])


def test_closed_processes_decode_no_more(two: Decoders) -> None:
    decode(two, [JPEG] * 4)
    pids = two.pids()
    two.close()
    assert not any(map(alive, pids))
    with pytest.raises(DataError, match="were ended"):
        decode(two, [JPEG])


def test_a_process_that_hangs_does_not_hold_up_the_end(
    two: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run's own patience ends first, and leaves the process behind."""
    monkeypatch.setattr(decoders_module, "ENDING", 1e6)
    decode(two, [JPEG] * 4)
    pids = two.pids()
    os.kill(pids[0], signal.SIGSTOP)
    closing = threading.Thread(target=two.close, daemon=True)
    closing.start()
    closing.join(WAIT)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PARENT = """
import os, time
from functools import partial
from caffepy.data.datum import decode_file
from caffepy.data.decoders import Decoders, Task
if __name__ == "__main__":
    decoders = Decoders()
    task = Task(partial(decode_file, 1, None))
    decoders.run(task, range(4), [b"no image"] * 4, [None] * 4, lambda *_: None)
    print(*decoders.pids(), flush=True)
    time.sleep(60)
"""


def test_processes_end_with_a_parent_that_is_killed() -> None:
    env = {**os.environ, "CAFFEPY_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    end = time.monotonic() + WAIT
    while any(map(alive, pids)):
        assert time.monotonic() < end, "a process outlives the one that it decodes for"
        time.sleep(0.02)
