"""Entry points: several files in one call, each from its markers to the pixels of a batch."""

import logging
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from caffepy.data.datum import COLOR, GRAY, NATIVE, opened, planes, resized
from caffepy.data.jpeg_kernels.headers import parse
from caffepy.data.jpeg_kernels.resize import fill_image
from caffepy.data.jpeg_kernels.room import (
    COMPONENTS,
    HEIGHT,
    TURNED,
    WIDEST,
    WIDTH,
    Room,
    room_of_thread,
)
from caffepy.data.jpeg_kernels.scan import scan
from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, external, kernel

log = logging.getLogger(__name__)

NONE = np.zeros((0, 2), np.int64)
PIECE = 4  # images of a call: it needs Python's lock for some 20 us, each image 300 us without
FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

_open = external("open", "int32", "uintp", "int32")
_read_at = external("pread", "intp", "int32", "uintp", "uintp", "int64")
_close = external("close", "int32", "int32")


_resizes = True  # as OpenCV does


def load() -> None:
    """Compile the kernels, or load what was compiled; RuntimeError if OpenCV decodes otherwise, as
    with another library than libjpeg-turbo. If it resizes otherwise, as with another processor's
    library, images that are resized are left to it.
    """
    global _resizes
    import cv2

    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    content = cv2.imencode(".jpg", image)[1].ravel()
    span, place = np.array([[0, len(content)]]), np.zeros(1, np.int64)
    read(fixed(content), place, np.zeros(0, np.uint8), span.copy(), 0, 0)
    theirs = opened(content, NATIVE)

    def is_alike(height: int, width: int) -> bool:
        images = np.zeros((1, 3, height, width), np.uint8)
        done = decode_files(content, span, place, NATIVE, images, resizes=True)
        if theirs is None or not done.all():
            return False
        return bool((images[0] == planes(resized(theirs, width, height))).all())

    if not is_alike(48, 64):
        raise RuntimeError("its JPEG library computes other pixels than libjpeg-turbo")
    _resizes = all(is_alike(*size) for size in ((24, 32), (31, 90), (77, 13)))
    if not _resizes:
        log.warning("OpenCV here resizes to other pixels than the kernels; it decodes such JPEGs")


def decode_files(
    content: Array, spans: Array, places: Array, mode: int, images: Array, *, resizes: bool = False
) -> Array:
    """Decode JPEG files to these places of `images` (N, C, H, W), uint8, as OpenCV does in this
    `mode`; return a mask (n,) of those that were: usual files (`parse`) of that size, or of any if
    it `resizes` them, bilinearly, as OpenCV does.

    `spans` (n, 2) are start and size of each file in `content`; a size of 0 is no file.
    """
    done, content = np.zeros(len(spans), np.bool_), fixed(content)

    def decode_some(lo: int, hi: int) -> None:
        room = room_of_thread()
        decode(content, spans, places, mode, resizes, NONE, NONE, room, images, done, lo, hi)

    if takes(images, resizes):
        parallel(decode_some, len(spans), PIECE)
    return done


def decode_named(
    paths: Sequence[str], places: Array, mode: int, images: Array, *, resizes: bool = False
) -> Array:
    """Do `decode_files` of the files at these paths, which are read without Python's lock, too."""
    joined, starts = joined_names(paths)
    done = np.zeros(len(paths), np.bool_)

    def decode_some(lo: int, hi: int) -> None:
        room = room_of_thread()
        content, spans = fixed(room.files), np.zeros((len(paths), 2), np.int64)
        for first in range(lo, hi, PIECE):
            last = min(first + PIECE, hi)
            read(joined, starts, room.files, spans, first, last)
            decode(
                content, spans, places, mode, resizes, NONE, NONE, room, images, done, first, last
            )

    if takes(images, resizes):
        parallel(decode_some, len(paths), PIECE)
    return done


def joined_names(paths: Sequence[str]) -> tuple[Array, Array]:
    """Return these paths as `read` takes them: one behind the other, and where each begins."""
    names = [os.fsencode(path) + b"\0" for path in paths]
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([0, *map(len, names)])[:-1]


def takes(images: Array, resizes: bool) -> bool:
    """True if files can be decoded to such images here."""
    return images.shape[3] <= WIDEST and (_resizes or not resizes)


def fixed(content: Array) -> Array:
    """A view that cannot be written: kernels are compiled for such."""
    content = content.view()
    content.flags.writeable = False
    return content


@kernel
def read(paths: Array, starts: Array, files: Array, spans: Array, lo: int, hi: int) -> None:
    """Read files one behind the other; the size is 0 of one that cannot be read, or has no room."""
    at = 0
    for i in range(lo, hi):
        descriptor = _open(paths[starts[i] :].ctypes.data, FLAGS)
        if descriptor < 0:
            continue
        # a pipe has no places to read at, so that this takes nothing out of it; a device has no end
        size = _read_at(descriptor, files[at:].ctypes.data, len(files) - at, 0)
        if 0 < size < len(files) - at and not _read_at(
            descriptor, files[at:].ctypes.data + size, 1, size
        ):
            spans[i, 0], spans[i, 1] = at, size
            at += size
        _close(descriptor)


@partial(kernel, fastmath=EXACT)
def decode(
    content: Array,
    spans: Array,
    places: Array,
    mode: int,
    resizes: bool,
    windows: Array,
    sizes: Array,
    room: Room,
    images: Array,
    done: Array,
    lo: int,
    hi: int,
) -> None:
    """Decode files lo to hi; with `windows` (n, at least 6) only these of images, to the first rows
    and columns of their places: see `fill_image`. With `sizes` (n, 2) only write height and width.
    """
    head = room.head
    for i in range(lo, hi):
        start, size = spans[i]
        image, end = images[places[i]], start + size
        height, width = image.shape[1], image.shape[2]
        at = parse(content, start, end, 0 if resizes else height, width, room)
        if at < 0 or (head[TURNED] and mode != NATIVE):
            continue
        is_grey = mode == GRAY or (mode != COLOR and head[COMPONENTS] == 1)
        if image.shape[0] != (1 if is_grey else 3):
            continue
        if len(sizes):
            sizes[i, 0], sizes[i, 1] = head[HEIGHT], head[WIDTH]
        elif scan(content, at, end, room):
            window, to = (0, 0, head[HEIGHT], head[WIDTH]), (height, width)
            if len(windows):
                one = windows[i]
                window, to = (one[0], one[1], one[2], one[3]), (one[4], one[5])
            fill_image(image, window, to, room)
            done[i] = True
