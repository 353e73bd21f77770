"""JPEG files decoded by kernels: OpenCV's pixels to the last bit, or none.

What is shown:

- images of each sampling of colours, quality, size and mode of reading are those of OpenCV;
- so are images that are resized, to any size from any other;
- files that are damaged, or otherwise than most, are left alone, and what is said of them is the same;
- loaders make the same batches with kernels and without.
"""

import logging
import os
import struct
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.core.errors import DataError
from caffepy.data import jpeg_kernels, jpegs
from caffepy.data.datum import COLOR, EITHER, GRAY, NATIVE
from caffepy.data.jpeg_kernels import decode, room
from caffepy.data.loader import Batch, SequentialLoader, tolerating
from caffepy.data.sources import open_database
from caffepy.data.sources.image_list import ImageList
from caffepy.data.transformer import Transformer
from caffepy.data.window_loader import WindowLoader
from caffepy.data.write import write_database
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.device.threads import alone
from caffepy.ops import cpu
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import TRAIN, Datum, LayerParameter, TransformationParameter

SAMPLINGS = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}
PICTURES = "noise", "smooth", "both"
SIZES = (48, 64), (16, 16), (17, 31), (33, 50), (97, 18)
START = b"\xff\xd8"


def picture(kind: str, height: int, width: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.integers(0, 256, (height, width, 3), np.uint8)
    rough = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    smooth = cv2.resize(rough, (width, height), interpolation=cv2.INTER_CUBIC)
    noise = rng.integers(-9, 10, smooth.shape) if kind == "both" else 0
    return np.clip(smooth.astype(int) + noise, 0, 255).astype(np.uint8)


def jpeg(image: Array, quality: int = 90, sampling: str = "4:2:0", **more: int) -> bytes:
    settings = [cv2.IMWRITE_JPEG_QUALITY, quality]
    settings += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    for name, value in more.items():
        settings += [getattr(cv2, f"IMWRITE_JPEG_{name.upper()}"), value]
    return cv2.imencode(".jpg", image, settings)[1].tobytes()


def marked(content: bytes, marker: int, inside: bytes) -> bytes:
    """With another marker before all others."""
    size = (len(inside) + 2).to_bytes(2, "big")
    return START + bytes([0xFF, marker]) + size + inside + content[2:]


def with_exif(content: bytes, orientation: int | None, order: str = "<") -> bytes:
    """With a camera's notes, which may say that the image is to be turned: 6 is by 90 degrees."""
    entries = [struct.pack(order + "HHII", 0x100, 4, 1, 48)]
    if orientation is not None:
        entries.append(struct.pack(order + "HHIHH", 0x112, 3, 1, orientation, 0))
    head = struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(entries))
    exif = b"Exif\0\0" + head + b"".join(entries) + bytes(4)
    return marked(content, 0xE1, exif)


def with_xmp(content: bytes) -> bytes:
    return marked(content, 0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")


def of_rgb(content: bytes) -> bytes:
    """With the names that say, where no JFIF and no Adobe says otherwise, that colours are RGB."""
    for old, new in (
        (b"\1\x22\0\2\x11\1\3\x11\1", b"R\x22\0G\x11\1B\x11\1"),
        (b"\1\0\2\x11\3\x11", b"R\0G\x11B\x11"),
    ):
        assert content.count(old) == 1
        content = content.replace(old, new)
    return content.replace(b"JFIF", b"none")


def with_code_of_ones(content: bytes) -> bytes:
    """With a symbol more of 16 bits, whose code is all ones: JPEG has none such."""
    at = content.index(b"\xff\xc4\x00\xb5\x10")
    counts, symbols = content[at + 5 : at + 21], content[at + 21 : at + 183]
    counts = counts[:15] + bytes([counts[15] + 1])
    return content[:at] + b"\xff\xc4\x00\xb6\x10" + counts + symbols + b"\0" + content[at + 183 :]


def opened(content: bytes, mode: int) -> Array | None:
    image = cv2.imdecode(np.frombuffer(content, np.uint8), mode)
    if image is None:
        return None
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def resized(content: bytes, mode: int, height: int, width: int) -> Array:
    image = opened(content, mode)
    assert image is not None
    pixels = cv2.resize(np.ascontiguousarray(image.transpose(1, 2, 0)), (width, height))
    return pixels.reshape(height, width, -1).transpose(2, 0, 1)


def decoded(
    contents: list[bytes], shape: tuple[int, ...], mode: int = NATIVE, *, resizes: bool = False
) -> tuple[Array, Array]:
    """Decode to every second place of 7s; the images, and which were decoded."""
    sizes = np.array(list(map(len, contents)))
    spans = np.stack([np.cumsum(sizes) - sizes, sizes], 1)
    images = np.full((2 * len(contents), *shape), 7, np.uint8)
    content = np.frombuffer(b"".join(contents), np.uint8)
    places = np.arange(1, len(images), 2)
    done = jpeg_kernels.decode_files(content, spans, places, mode, images, resizes=resizes)
    assert (images[::2] == 7).all()
    return images[1::2], done


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("mode", [NATIVE, COLOR, GRAY, EITHER])
def test_pixels_are_those_of_opencv(sampling, kind, mode):
    for height, width in SIZES:
        image = picture(kind, height, width)
        contents = [
            jpeg(image, quality, sampling, optimize=optimize)
            for quality in (1, 30, 75, 95, 100)
            for optimize in (0, 1)
        ]
        contents += [jpeg(image, sampling=sampling, rst_interval=n) for n in (1, 3)]
        images, done = decoded(contents, (1 if mode == GRAY else 3, height, width), mode)
        assert done.all()
        for content, found in zip(contents, images, strict=True):
            np.testing.assert_array_equal(found, opened(content, mode))


@pytest.mark.parametrize("mode", [NATIVE, COLOR, GRAY, EITHER])
def test_grey_files(mode):
    for height, width in SIZES:
        content = jpeg(picture("both", height, width)[:, :, 0])
        images, done = decoded([content], (3 if mode == COLOR else 1, height, width), mode)
        assert done.all()
        np.testing.assert_array_equal(images[0], opened(content, mode))


def test_codes_of_a_photograph_of_many_blocks():
    content = jpeg(picture("both", 375, 501))
    images, done = decoded([content] * 9, (3, 375, 501))
    assert done.all()
    for image in images:
        np.testing.assert_array_equal(image, opened(content, NATIVE))


@pytest.mark.parametrize("mode", [NATIVE, COLOR, GRAY, EITHER])
@pytest.mark.parametrize(
    "size",
    [(32, 32), (24, 31), (1, 1), (1, 90), (200, 7), (227, 227), (48, 62), (20, 300), (300, 20)],
)
def test_resized_pixels_are_those_of_opencv(mode, size):
    """From sizes that are larger, smaller, equal, and twice as large, together in one call."""
    height, width = size
    doubled = [(max(16, 2 * height), max(16, 2 * width))]
    contents = [
        jpeg(picture("noise", *original), sampling=sampling)
        for original in [*SIZES, *doubled, (48, 62), (375, 500)]
        for sampling in ("4:4:4", "4:2:2", "4:2:0")
    ]
    images, done = decoded(contents, (1 if mode == GRAY else 3, *size), mode, resizes=True)
    assert done.all()
    for content, found in zip(contents, images, strict=True):
        np.testing.assert_array_equal(found, resized(content, mode, height, width))


@pytest.mark.parametrize("mode", [NATIVE, COLOR, GRAY, EITHER])
def test_resized_grey_files(mode):
    contents = [jpeg(picture("noise", *size)[:, :, 0]) for size in SIZES]
    images, done = decoded(contents, (3 if mode == COLOR else 1, 20, 70), mode, resizes=True)
    assert done.all()
    for content, found in zip(contents, images, strict=True):
        np.testing.assert_array_equal(found, resized(content, mode, 20, 70))


@settings(deadline=None)
@given(*[st.integers(16, 70)] * 2, *[st.integers(1, 150)] * 2)
def test_any_size_is_resized_to_any_other(height, width, to_height, to_width):
    content = jpeg(picture("noise", height, width, height * width))
    (image,), done = decoded([content], (3, to_height, to_width), resizes=True)
    assert done.all()
    np.testing.assert_array_equal(image, resized(content, NATIVE, to_height, to_width))


IMAGE = picture("both", 40, 48)
PLAIN = jpeg(IMAGE)
LEFT = {
    "none": b"",
    "a PNG": cv2.imencode(".png", IMAGE)[1].tobytes(),
    "progressive": jpeg(IMAGE, progressive=1),
    "restarts that are missing": jpeg(IMAGE, rst_interval=2).replace(b"\xff\xd1", b"\0\0"),
    "restarts out of order": jpeg(IMAGE, rst_interval=2).replace(b"\xff\xd1", b"\xff\xd2"),
    "4:4:0": jpeg(IMAGE, sampling="4:4:0"),
    "4:1:1": jpeg(IMAGE, sampling="4:1:1"),
    "another size": jpeg(IMAGE[:39]),
    "grey": jpeg(IMAGE[:, :, 0]),
    "cut short": PLAIN[:-300],
    "without its end": PLAIN[:-2],
    "more behind its codes": PLAIN[:-2] + b"\0" + PLAIN[-2:],
    "a head alone": PLAIN[: PLAIN.index(b"\xff\xda") + 14],
    "a code of ones alone": with_code_of_ones(PLAIN),
    "RGB": of_rgb(PLAIN),
    "RGB, and almost an Adobe": marked(of_rgb(PLAIN), 0xEE, b"Adobf\0\x64\0\0\0\0\x01"),
    "tables missing": PLAIN.replace(b"\xff\xc4", b"\xff\xfe"),
    "coefficients of black and white noise": jpeg(
        np.repeat(np.random.default_rng(0).integers(0, 2, (40, 48, 1), np.uint8) * 255, 3, 2)
    ),
}


@pytest.mark.parametrize("content", LEFT.values(), ids=LEFT)
def test_files_that_are_left_alone(content):
    images, done = decoded([PLAIN, content, PLAIN], (3, 40, 48))
    assert done.tolist() == [True, False, True]
    assert (images[1] == 7).all()
    if content != LEFT["another size"]:
        images, done = decoded([PLAIN, content, PLAIN], (3, 20, 30), resizes=True)
        assert done.tolist() == [True, False, True]
        assert (images[1] == 7).all()


@pytest.mark.parametrize("order", ["<", ">"])
def test_images_that_are_to_be_turned_are_left_where_opencv_turns_them(order):
    for orientation in (None, 1, 2, 3, 6, 256):
        content = with_exif(PLAIN, orientation, order)
        for mode in (COLOR, EITHER, GRAY, NATIVE):
            images, done = decoded([content], (1 if mode == GRAY else 3, 40, 48), mode)
            assert done.all() == (mode == NATIVE or orientation in (None, 1))
            if done.all():
                np.testing.assert_array_equal(images[0], opened(content, mode))
    turned = opened(with_exif(PLAIN, 6, order), COLOR)
    assert turned is not None
    assert turned.shape == (3, 48, 40)


def test_images_with_damaged_notes_are_left_where_opencv_reads_them():
    whole = with_exif(PLAIN, 1)
    for place, value in ((12, 0x4A), (16, 0xFF), (20, 0xFF)):
        content = whole[:place] + bytes([value]) + whole[place + 1 :]
        assert [decoded([content], (3, 40, 48), mode)[1].all() for mode in (COLOR, NATIVE)] == [
            False,
            True,
        ]


MAY_BE_TURNED = {
    "xmp": (with_xmp(PLAIN), False),
    "exif, xmp": (with_exif(with_xmp(PLAIN), 6), True),
    "xmp, exif": (with_xmp(with_exif(PLAIN, 6)), True),  # OpenCV 4.10 reads the first alone
    "another name": (with_exif(PLAIN, 6).replace(b"Exif", b"Name"), True),  # it reads that, too
    "another order of bytes": (with_exif(PLAIN, 6).replace(b"II*", b"?I*"), True),
}


@pytest.mark.parametrize(("content", "is_left"), MAY_BE_TURNED.values(), ids=MAY_BE_TURNED)
def test_images_that_any_version_of_opencv_turns_are_left(content, is_left):
    _, done = decoded([content], (3, 40, 48), COLOR)
    assert done.tolist() == [not is_left]


def test_images_that_are_larger_than_opencv_takes_are_left_alone():
    width = 65501
    content = jpeg(np.full((16, 16), 128, np.uint8))
    head = content[: content.index(b"\xff\xda") + 10].replace(b"\0\x10\0\x10", b"\0\x10\xff\xdd")
    four = b"\x28\xa2\x8a"  # blocks without a coefficient
    content = head + four * (2 * -(-width // 8) // 4) + b"\xff\xd9"
    assert opened(content, NATIVE) is None
    _, done = decoded([content], (1, 16, width))
    assert not done.any()


@pytest.mark.parametrize("resizes", [False, True])
def test_small_and_large_images_are_left_alone(resizes, monkeypatch):
    """Large is what has no room in whole blocks: 48 x 48 pixels here."""
    monkeypatch.setattr(room, "_rooms", threading.local())
    monkeypatch.setattr(room, "MOST", 48 * 48 // 2)  # colours have a quarter of the samples each
    for height, is_done in ((15, False), (16, True), (48, True), (49, False)):
        content = jpeg(picture("both", height, 48))
        size = (3, 20, 20) if resizes else (3, height, 48)
        with alone():
            _, done = decoded([content], size, resizes=resizes)
        assert done.tolist() == [is_done]


def test_sizes_that_a_header_claims():
    """Heads that claim any size have no room, or no codes."""
    at = PLAIN.index(b"\xff\xc0") + 5
    for height in (0, 1, 15, 16, 17, 33, 1448, 4000, 65500, 65501, 65535):
        for width in (0, 1, 15, 16, 49, 1448, 4000, 65500, 65501, 65535):
            claimed = PLAIN[:at] + struct.pack(">HH", height, width) + PLAIN[at + 4 :]
            _, done = decoded([claimed, PLAIN], (3, 20, 30), resizes=True)
            assert done.tolist() == [False, True]


def test_images_wider_than_a_room_are_left_alone():
    width = room.WIDEST + 1
    _, done = decoded([PLAIN], (3, 1, width), resizes=True)
    assert not done.any()


@settings(deadline=None)  # the first example may compile
@given(st.integers(0, 1 << 32), st.sampled_from(list(SAMPLINGS)), st.booleans())
def test_damaged_files_are_as_opencv_has_them_or_left(seed, sampling, is_grey):
    rng = np.random.default_rng(seed)
    image = picture(PICTURES[seed % 3], 24, 40, seed)
    whole = jpeg(image[:, :, 0] if is_grey else image, int(rng.choice([10, 75, 100])), sampling)
    contents = []
    for _ in range(20):
        content = bytearray(whole)
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            content[place] = rng.integers(0, 256)
        if rng.integers(0, 3) == 0:
            del content[rng.integers(0, len(content)) :]
        contents.append(bytes(content))
    images, done = decoded(contents, (1 if is_grey else 3, 24, 40))
    for content, found, is_done in zip(contents, images, done, strict=True):
        if is_done:
            np.testing.assert_array_equal(found, opened(content, NATIVE))


def test_files_by_name(tmp_path):
    (tmp_path / "a.jpg").write_bytes(PLAIN)
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.jpg").write_bytes(PLAIN + bytes(room.FILES))
    names = [
        "a.jpg",
        "empty.jpg",
        "folder",
        "pipe",
        "/dev/zero",
        "missing.jpg",
        "large.jpg",
        "a.jpg",
    ]
    images = np.full((len(names), 3, 40, 48), 7, np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    paths, places = [str(tmp_path / name) for name in names], np.arange(len(names))
    done = jpeg_kernels.decode_named(paths, places, COLOR, images)
    assert done.tolist() == [True, *[False] * 6, True]
    for image in images[done]:
        np.testing.assert_array_equal(image, opened(PLAIN, COLOR))
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_in_a_pipe_stays_there(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(path, "wb") as pipe:
        pipe.write(PLAIN)
    images = np.zeros((1, 3, 40, 48), np.uint8)
    done = jpeg_kernels.decode_named([path], np.arange(1), COLOR, images)
    assert not done.any()
    assert os.read(end, len(PLAIN) + 1) == PLAIN
    os.close(end)


@pytest.fixture
def fresh(monkeypatch) -> None:
    """As in a process that has not decoded a file yet."""
    monkeypatch.setattr(jpegs, "_files", 0)
    monkeypatch.setattr(jpegs, "_kernels", None)
    monkeypatch.setattr(jpegs, "_loading", threading.Lock())


def wait_for_kernels() -> None:
    for thread in threading.enumerate():
        if thread.name == "caffepy-kernels":
            thread.join(120)


def test_kernels_are_loaded_after_many_files(fresh):
    assert jpegs.kernels(jpegs.MANY - 1) is None
    assert not jpegs._loading.locked()
    jpegs.kernels(1)
    wait_for_kernels()
    assert jpegs.kernels(1) is jpeg_kernels


def test_images_that_are_left_anyway_load_no_kernels(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(jpegs, "MANY", 1)
    places, labels = np.arange(3), np.zeros(3, np.int64)
    for source in ImageList(image_list(tmp_path)), open_database(database(tmp_path)):
        images = np.zeros((3, 3, 32, 32), np.float32)
        left = source.decode_jpegs(source.take(3), places, images, labels)
        assert left.tolist() == [0, 1, 2]
        source.close()
    assert not jpegs._loading.locked()


def test_without_kernels_opencv_decodes(fresh, monkeypatch, caplog):
    def fail() -> None:
        raise DataError("no compiler")

    monkeypatch.setattr(jpeg_kernels, "load", fail)
    with caplog.at_level(logging.WARNING, "caffepy"):
        for _ in range(3):
            assert jpegs.kernels(jpegs.MANY) is None
            wait_for_kernels()
    assert [record.getMessage() for record in caplog.records] == [
        "OpenCV decodes JPEG files, more slowly on many cores: no compiler"
    ]


def test_an_opencv_of_other_pixels_decodes_by_itself(monkeypatch):
    imdecode = cv2.imdecode
    monkeypatch.setattr(cv2, "imdecode", lambda content, mode: imdecode(content, mode) ^ 1)
    with pytest.raises(RuntimeError, match="computes other pixels than libjpeg-turbo"):
        jpeg_kernels.load()


def test_an_opencv_that_resizes_otherwise_decodes_such_files(monkeypatch, caplog):
    monkeypatch.setattr(decode, "_resizes", True)
    resize = cv2.resize
    monkeypatch.setattr(cv2, "resize", lambda *given: resize(*given) ^ (given[1] == (13, 77)))
    with caplog.at_level(logging.WARNING, "caffepy"):
        jpeg_kernels.load()
    assert [record.getMessage() for record in caplog.records] == [
        "OpenCV here resizes to other pixels than the kernels; it decodes such JPEGs"
    ]
    assert decoded([PLAIN], (3, 40, 48))[1].all()
    assert not decoded([PLAIN], (3, 20, 30), resizes=True)[1].any()


COUNT, BATCH = 30, 12


def contents() -> list[bytes]:
    """Mostly plain files, some of which are left to OpenCV, two damaged."""
    found = [jpeg(picture("both", 40, 48, i)) for i in range(COUNT)]
    found[3], found[5] = jpeg(IMAGE, progressive=1), cv2.imencode(".png", IMAGE)[1].tobytes()
    found[8] = found[8][:-200]  # OpenCV fills up what is missing
    found[20], found[21] = b"nothing", found[21][:30]
    return found


def database(folder: Path) -> str:
    with write_database(str(folder / "db")) as writer:
        for i, content in enumerate(contents()):
            record = Datum(data=content, label=i, encoded=True)
            writer.put(f"{i:03d}", record.SerializeToString())
    return str(folder / "db")


def image_list(folder: Path) -> str:
    for i, content in enumerate(contents()):
        (folder / f"{i}.jpg").write_bytes(content)
    (folder / "list.txt").write_text("".join(f"{folder}/{i}.jpg {i}\n" for i in range(COUNT)))
    return str(folder / "list.txt")


class Counting:
    """The kernels, which count the files that they decode."""

    def __init__(self) -> None:
        self.count = 0

    def decode_files(self, *given: Any) -> Array:
        return self._counted(jpeg_kernels.decode_files(*given))

    def decode_named(self, *given: Any, resizes: bool) -> Array:
        return self._counted(jpeg_kernels.decode_named(*given, resizes=resizes))

    PIECE = jpeg_kernels.PIECE

    def decode_windows(self, *given: Any) -> Array:
        return self._counted(jpeg_kernels.decode_windows(*given))

    def _counted(self, done: Array) -> Array:
        self.count += done.sum()
        return done


@pytest.mark.parametrize(
    ("write", "size"), [(database, None), (image_list, None), (image_list, (61, 33))]
)
@pytest.mark.parametrize("most", [0, 5])
def test_batches_are_those_of_opencv(write, size, most, tmp_path, monkeypatch, caplog):
    path = write(tmp_path)

    def batches(kernels: object) -> tuple[list[list[Array]], str, list[str]]:
        monkeypatch.setattr(jpegs, "kernels", lambda files: kernels)
        caplog.clear()
        transformation = TransformationParameter(crop_size=30, mirror=True)
        transformer = Transformer(transformation, TRAIN, Device(seed=1), "")
        with tolerating(most):
            source = open_database(path) if write is database else ImageList(path, size=size)
            loader = SequentialLoader(source, transformer, BATCH)
        found, error = [], ""
        with closing(loader):
            try:
                for _ in range(7):
                    batch = Batch(BATCH, np.float32, cpu.Staging())
                    loader.load(batch)
                    found.append([np.array(part) for part in batch.staging.take()])
            except DataError as raised:
                error = raised.message
        return found, error, [record.getMessage() for record in caplog.records]

    counting = Counting()
    (by_opencv, *messages), (by_kernels, *messages_then) = batches(None), batches(counting)
    assert messages_then == messages
    assert counting.count >= BATCH / 2 * len(by_kernels)
    assert len(by_kernels) == len(by_opencv) == (7 if most else 1)
    for ours, theirs in zip(by_kernels, by_opencv, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


WINDOWS = {
    "warped": ("", "crop_size: 24"),
    "mirrored, scaled, less a mean": (
        "scale: 0.017",
        "crop_size: 24 mirror: true mean_value: 104 mean_value: 117 mean_value: 123",
    ),
    "with context": ("context_pad: 5", "crop_size: 24 mirror: true mean_file: 'mean'"),
    "squares": ("crop_mode: 'square' context_pad: 2", "crop_size: 33 mirror: true mean_value: 99"),
    "cached": ("cache_images: true context_pad: 5", "crop_size: 24"),
}


def window_file(folder: Path, foreign: int) -> str:
    """Windows at random places, of one pixel and of whole images, too; `foreign` damaged files."""
    rng = np.random.default_rng(1)
    lines = []
    files = contents()
    files[20:22] = files[:2]
    files[7] = jpeg(IMAGE[:, :, 0])
    for i, content in enumerate(files):
        (folder / f"{i}.jpg").write_bytes(content if i >= foreign else b"nothing")
        lines += [f"# {i}", f"{folder}/{i}.jpg", "3", "40", "48", "4"]
        x, y = (np.sort(rng.integers(0, n, (2, 2)), 1).tolist() for n in (48, 40))
        boxes = [[0, 0, 47, 39], [x[0][0], y[0][0]] * 2]
        boxes += [[x[k][0], y[k][0], x[k][1], y[k][1]] for k in range(2)]
        for k, box in enumerate(boxes):
            lines.append(f"{i + 1} {0.9 if k % 2 else 0.1} " + " ".join(map(str, box)))
    (folder / "windows.txt").write_text("\n".join(lines) + "\n")
    mean = rng.random((1, 3, 24, 24)).astype(np.float32) * 200
    (folder / "mean").write_bytes(binary.array_to_blob(mean).SerializeToString())
    return str(folder / "windows.txt")


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("foreign", [0, 2])
def test_windows_are_those_of_opencv(case, foreign, tmp_path, monkeypatch, caplog):
    path = window_file(tmp_path, foreign)
    params, transform = WINDOWS[case]
    text = f"source: '{path}' batch_size: 13 fg_fraction: 0.5 {params}"
    layer = text_format.Parse(
        f"window_data_param {{ {text} }} transform_param {{ {transform} }}", LayerParameter()
    )

    def batches(kernels: object) -> tuple[list[list[Array]], list[str]]:
        monkeypatch.setattr(jpegs, "kernels", lambda files: kernels)
        caplog.clear()
        with tolerating(foreign):
            loader = WindowLoader(layer, Device(seed=1), str(tmp_path / "net.prototxt"))
        found = []
        with closing(loader):
            for _ in range(12):
                batch = Batch(13, np.float32, cpu.Staging())
                loader.load(batch)
                found.append([np.array(part) for part in batch.staging.take()])
        return found, [record.getMessage() for record in caplog.records]

    counting = Counting()
    (by_opencv, messages), (by_kernels, messages_then) = batches(None), batches(counting)
    assert messages_then == messages
    assert counting.count >= 100
    for ours, theirs in zip(by_kernels, by_opencv, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_windows_outside_of_their_images_are_left():
    """And empty ones, and files that are to be turned; what is beside a window stays."""
    images = np.full((5, 3, 8, 9), 7, np.float32)
    files = [PLAIN, PLAIN, with_exif(PLAIN, 6), b"", PLAIN]
    asked = []

    def window_of(i: int, height: int, width: int) -> tuple[int, ...] | None:
        asked.append((i, height, width))
        return (1, 2, 30, 40, 4, 5, 3, 2, 0) if i != 1 else None

    mean = np.ones((3, 8, 9), np.float32)
    given = window_of, mean, 2.0, images
    assert not jpeg_kernels.decode_windows([""] * 2, [b""] * 2, *given, [0, 1]).any()
    places = [4, 3, 2, 1, 0]
    done = jpeg_kernels.decode_windows([""] * 5, files, *given, places)
    assert done.tolist() == [True, False, False, False, True]
    assert asked == [(0, 40, 48), (1, 40, 48), (4, 40, 48)]
    pixels = opened(PLAIN, COLOR)
    assert pixels is not None
    part = cv2.resize(np.ascontiguousarray(pixels[:, 1:31, 2:42].transpose(1, 2, 0)), (5, 4))
    want = np.full((3, 8, 9), 7, np.float32)
    want[:, 3:7, 2:7] = (part.transpose(2, 0, 1).astype(np.float32) - 1) * 2
    for image, is_done in zip(images[places], done, strict=True):
        np.testing.assert_array_equal(image, want if is_done else np.full_like(want, 7))
