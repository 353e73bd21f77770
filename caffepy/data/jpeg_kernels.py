"""JPEG files decoded by kernels: several images in one call without Python's lock, straight to the
planes of a batch.

Pixels are those of libjpeg-turbo, by which OpenCV decodes, to the last bit: its slow integer IDCT,
its "fancy" upsampling of colours, its conversion from YCbCr. Files that are damaged, progressive,
or unusual in another way are left to OpenCV.

    file -> _parse: size, sampling, tables, where the codes begin
         -> _scan: codes -> coefficients of 16 blocks -> _transform -> planes of samples
         -> _color: planes of colours to the image's size, then B, G and R

What a thread needs for that lies in a `_Room` of its own.
"""

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from caffepy.data.datum import COLOR, GRAY, NATIVE, opened, planes
from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, external, inlined, kernel

PIECE = 4  # images of a call: it needs Python's lock for some 20 us, each image 300 us without
LANES = 16  # blocks that are transformed at once, each in a lane of vectors
LOOK = 10  # bits of a code that are looked up at once
LONGEST = 16  # bits of a code
LENGTHS = LONGEST + 1
LARGEST = 5700
"""The most to which the magnitudes of a block's coefficients may add up. With more, sums of 16 bits
could overflow in libjpeg's vector code.
"""
LEAST = 16  # pixels of a side: libjpeg does not interpolate the colours of tiny images
LONGEST_SIDE = 65500  # pixels; libjpeg takes no more
MOST = 1 << 21  # pixels of an image, for which a thread keeps 6 MiB
FILES = 4 << 20  # bytes for the files that a thread reads at a time
FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

_open = external("open", "int32", "uintp", "int32")
_read_at = external("pread", "intp", "int32", "uintp", "uintp", "int64")
_close = external("close", "int32", "int32")

ZIGZAG = np.array(
    [
        *(0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48),
        *(41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15),
        *(23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63),
    ],
    np.int32,
)
"""The place in a block, by rows, of the coefficient that comes k-th in a file."""
PLACES = ZIGZAG * LANES

# places in `_Room.head`
COMPONENTS, ACROSS, DOWN = range(3)
IDS, STEPS, DC, AC = 3, 6, 9, 12  # of each component, the latter three numbers of tables
LAST = 15  # of each component, what its last block began with
AT, EXTRA = 18, 19  # where the next bits are; those behind the codes
TURNED = 20  # 1 if the file may say that the image is to be turned
INTERVAL = 21  # groups of blocks between restarts, or 0
HEAD = 22

# markers
SOI, EOI, SOS, DQT, DRI, DHT, RST = 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xC4, 0xD0
BASELINE, EXTENDED = 0xC0, 0xC1
JFIF, EXIF_OR_XMP, ADOBE, LAST_APP, COMMENT = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
JFIF_NAME, ADOBE_NAME, XMP_NAME = (
    np.frombuffer(name, np.uint8) for name in (b"JFIF\0", b"Adobe", b"http://ns.")
)


class _Room(NamedTuple):
    """Flat arrays of a thread. Tables of codes are numbered: four of DC, four of AC."""

    head: Array  # (HEAD,) int64: what a file's markers say
    steps: Array  # (4 * 64,) int32: quantization tables, in the order of a file
    looked: Array  # (8 << LOOK,) int32: what begins with these bits, see `_look_up`
    longer: Array  # (8 * 2 * LENGTHS,) int64: largest code of each length; where its symbols are
    symbols: Array  # (8 * 256,) uint8: symbols of codes, in their order
    blocks: Array  # (64 * LANES,) int32: coefficients
    turned: Array  # (64 * LANES,) int32: the blocks after the IDCT of their columns
    packed: Array  # (8 * LANES,) int64: eight samples of a row, of each block
    places: Array  # (2 * LANES,) int64: where a block goes in `words`, and the width of that plane
    rows: Array  # (3 * width,) int32: a row of a colour, and its samples at twice the width
    wide: Array  # (2 * width,) uint8: rows of two colours
    samples: Array  # planes, uint8
    words: Array  # the same, int64
    files: Array  # (FILES,) uint8


_rooms = threading.local()


def _room(height: int, width: int) -> _Room:
    """Return the arrays of this thread, for images of this size."""
    size = (-(-height // 16) * 16, -(-width // 16) * 16)
    if getattr(_rooms, "size", None) != size:
        samples = np.zeros(3 * size[0] * size[1], np.uint8)
        _rooms.room = _Room(
            np.zeros(HEAD, np.int64),
            np.zeros(4 * 64, np.int32),
            np.zeros(8 << LOOK, np.int32),
            np.zeros(8 * 2 * LENGTHS, np.int64),
            np.zeros(8 * 256, np.uint8),
            np.zeros(64 * LANES, np.int32),
            np.zeros(64 * LANES, np.int32),
            np.zeros(8 * LANES, np.int64),
            np.zeros(2 * LANES, np.int64),
            np.zeros(3 * size[1], np.int32),
            np.zeros(2 * size[1], np.uint8),
            samples,
            samples.view(np.int64),
            np.empty(FILES, np.uint8),
        )
        _rooms.size = size
    room: _Room = _rooms.room
    return room


def load() -> None:
    """Compile the kernels, or load what was compiled; RuntimeError if OpenCV decodes otherwise, as
    with another library than libjpeg-turbo.
    """
    import cv2

    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    content = cv2.imencode(".jpg", image)[1].ravel()
    images, place, span = (
        np.zeros((1, 3, 48, 64), np.uint8),
        np.zeros(1, np.int64),
        [[0, len(content)]],
    )
    _read(_fixed(content), place, np.zeros(0, np.uint8), np.array(span), 0, 0)
    done = decode_files(content, np.array(span), place, NATIVE, images)
    theirs = opened(content, NATIVE)
    if theirs is None or not done.all() or (images[0] != planes(theirs)).any():
        raise RuntimeError("its JPEG library computes other pixels than libjpeg-turbo")


def decode_files(content: Array, spans: Array, places: Array, mode: int, images: Array) -> Array:
    """Decode JPEG files to these places of `images` (N, C, H, W), uint8, as OpenCV does in this
    `mode`; return a mask (n,) of those that were: usual files (`_parse`) of that size.

    `spans` (n, 2) are start and size of each file in `content`; a size of 0 is no file.
    """
    done, content = np.zeros(len(spans), np.bool_), _fixed(content)

    def decode_some(lo: int, hi: int) -> None:
        room = _room(*images.shape[2:])
        _decode(content, spans, places, mode, room, images, done, lo, hi)

    if _takes(images):
        parallel(decode_some, len(spans), PIECE)
    return done


def decode_named(paths: Sequence[str], places: Array, mode: int, images: Array) -> Array:
    """Do `decode_files` of the files at these paths, which are read without Python's lock, too."""
    names = [os.fsencode(path) + b"\0" for path in paths]
    joined = np.frombuffer(b"".join(names), np.uint8)
    starts = np.cumsum([0, *map(len, names)])[:-1]
    done = np.zeros(len(paths), np.bool_)

    def decode_some(lo: int, hi: int) -> None:
        room = _room(*images.shape[2:])
        content, spans = _fixed(room.files), np.zeros((len(paths), 2), np.int64)
        for first in range(lo, hi, PIECE):
            last = min(first + PIECE, hi)
            _read(joined, starts, room.files, spans, first, last)
            _decode(content, spans, places, mode, room, images, done, first, last)

    if _takes(images):
        parallel(decode_some, len(paths), PIECE)
    return done


def _takes(images: Array) -> bool:
    """True if images of this size can be decoded here."""
    height, width = images.shape[2:]
    is_usual = min(height, width) >= LEAST and max(height, width) <= LONGEST_SIDE
    return bool(is_usual and height * width <= MOST)


def _fixed(content: Array) -> Array:
    """A view that cannot be written: kernels are compiled for such."""
    content = content.view()
    content.flags.writeable = False
    return content


@kernel
def _read(paths: Array, starts: Array, files: Array, spans: Array, lo: int, hi: int) -> None:
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
def _decode(
    content: Array,
    spans: Array,
    places: Array,
    mode: int,
    room: _Room,
    images: Array,
    done: Array,
    lo: int,
    hi: int,
) -> None:
    for i in range(lo, hi):
        start, size = spans[i]
        image, end = images[places[i]], start + size
        at = _parse(content, start, end, image.shape[1], image.shape[2], room)
        components = room.head[COMPONENTS]
        if at < 0 or (room.head[TURNED] and mode != NATIVE):
            continue
        is_grey = mode == GRAY or (mode != COLOR and components == 1)
        if image.shape[0] != (1 if is_grey else 3):
            continue
        if _scan(content, at, end, image.shape[1], image.shape[2], room):
            _color(image, room)
            done[i] = True


@inlined
def _byte(content: Array, at: int) -> np.int64:
    return np.int64(content[np.uint64(at)])


@inlined
def _word(content: Array, at: int) -> Any:
    return _byte(content, at) << 8 | _byte(content, at + 1)


@inlined
def _begins(content: Array, at: int, name: Array) -> bool:
    same = True
    for k in range(len(name)):
        same &= content[at + k] == name[k]
    return same


@inlined
def _parse(content: Array, start: int, end: int, height: int, width: int, room: _Room) -> Any:
    """Read markers; return where the codes begin, -1 for a file of another size or kind: not
    baseline with 8 bits, grey or YCbCr, sampled 4:4:4, 4:2:2 or 4:2:0, in one scan.
    """
    head = room.head
    for k in range(HEAD):
        head[k] = 0
    is_jfif, known = False, 0  # bits of the tables that were read
    adobe: Any = -1
    if end - start < 4 or content[start] != 0xFF or content[start + 1] != SOI:
        return -1
    at = start + 2
    while at + 4 <= end and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        at, size = at + 4, _word(content, at + 2) - 2
        if size < 0 or size > end - at:
            return -1
        behind = at + size
        if marker == JFIF:
            is_jfif |= size >= 14 and _begins(content, at, JFIF_NAME)
        elif marker == EXIF_OR_XMP:
            # whatever it is called: not all versions of OpenCV ask for EXIF's name
            is_xmp = size >= len(XMP_NAME) and _begins(content, at, XMP_NAME)
            if not is_xmp and not _is_upright(content, at, behind):
                head[TURNED] = 1
        elif marker == ADOBE:
            if size >= 12 and _begins(content, at, ADOBE_NAME):
                adobe = _byte(content, at + 11)
        elif marker == DQT:
            read = _read_steps(content, at, behind, room)
            if read < 0:
                return -1
            known |= read
        elif marker == DHT:
            read = _read_codes(content, at, behind, room)
            if read < 0:
                return -1
            known |= read
        elif marker in (BASELINE, EXTENDED):
            if head[COMPONENTS] or not _read_frame(content, at, size, height, width, head):
                return -1
        elif marker == SOS:
            if not _read_scan(content, at, size, known, head):
                return -1
            if head[COMPONENTS] == 3 and not is_jfif and adobe != 1:
                is_counted = head[IDS] == 1 and head[IDS + 1] == 2 and head[IDS + 2] == 3
                if adobe >= 0 or not is_counted:  # perhaps not YCbCr
                    return -1
            return behind
        elif marker == DRI:
            if size != 2:
                return -1
            head[INTERVAL] = _word(content, at)
        elif (marker < JFIF or marker > LAST_APP) and marker != COMMENT:
            return -1
        at = behind
    return -1


@inlined
def _read_steps(content: Array, at: int, end: int, room: _Room) -> Any:
    """Read quantization tables; return bits of their numbers, -1 if one has steps of 16 bits."""
    read = 0
    while at < end:
        number = _byte(content, at)
        if number > 3 or end - at < 65:
            return -1
        for k in range(64):
            room.steps[64 * number + k] = content[at + 1 + k]
        at, read = at + 65, read | 1 << number
    return read


@inlined
def _read_codes(content: Array, at: int, end: int, room: _Room) -> Any:
    """Read tables of codes; return bits of their numbers, from the fifth on, -1 for damage."""
    read = 0
    while at < end:
        kind = _byte(content, at)
        number = kind & 3 | kind >> 2
        used = -1 if kind & 0xEC else _look_up(content, at, end, number, room)
        if used < 0:
            return -1
        at, read = at + used, read | 16 << number
    return read


@inlined
def _read_frame(content: Array, at: int, size: int, height: int, width: int, head: Array) -> bool:
    """Read components and sampling; false for an image of another size or kind."""
    if size < 9 or content[at] != 8:
        return False
    if _word(content, at + 1) != height or _word(content, at + 3) != width:
        return False
    components = _byte(content, at + 5)
    if (components != 1 and components != 3) or size != 6 + 3 * components:
        return False
    for c in range(components):
        place = at + 6 + 3 * c
        sampling, number = _byte(content, place + 1), _byte(content, place + 2)
        head[IDS + c], head[STEPS + c] = content[place], number
        if number > 3 or (c and sampling != 0x11):
            return False
        if c == 0:
            head[ACROSS], head[DOWN] = sampling >> 4, sampling & 15
    head[COMPONENTS] = components
    if head[ACROSS] not in (1, 2) or head[DOWN] not in (1, head[ACROSS]):
        return False
    if components == 1:
        head[ACROSS] = head[DOWN] = 1
    return True


@inlined
def _read_scan(content: Array, at: int, size: int, known: int, head: Array) -> bool:
    """Read which tables the components have; false if these are not among those `known`, or not
    all of the image is in this scan.
    """
    components = head[COMPONENTS]
    if not components or size != 4 + 2 * components or content[at] != components:
        return False
    for c in range(components):
        place = at + 1 + 2 * c
        tables = _byte(content, place + 1)
        if content[place] != head[IDS + c] or tables & 0xCC:
            return False
        head[DC + c], head[AC + c] = tables >> 4, 4 + (tables & 15)
        needed = 1 << head[STEPS + c] | 16 << head[DC + c] | 16 << head[AC + c]
        if needed & ~known:
            return False
    at += 1 + 2 * components
    return bool(content[at] == 0 and content[at + 1] == 63 and content[at + 2] == 0)


@inlined
def _is_upright(content: Array, at: int, end: int) -> bool:
    """True if the notes of a camera are whole and say nothing of the image's orientation, or 1."""
    first = at + 6  # of the notes, in TIFF
    if end - first < 14 or _word(content, first) not in (0x4949, 0x4D4D):
        return False
    low = 1 if _word(content, first) == 0x4D4D else 0  # which byte of two is the lower one
    place = 0
    for k in range(4):
        place |= _byte(content, first + 4 + k) << 8 * (3 - k if low else k)
    place += first
    if place + 2 > end:
        return False
    count = _byte(content, place + low) | _byte(content, place + 1 - low) << 8
    if place + 2 + 12 * count > end:
        return False
    for k in range(count):
        entry = place + 2 + 12 * k
        tag = _byte(content, entry + low) | _byte(content, entry + 1 - low) << 8
        value = _byte(content, entry + 8 + low) | _byte(content, entry + 9 - low) << 8
        if tag == 0x112 and value != 1:
            return False
    return True


@inlined
def _look_up(content: Array, at: int, end: int, number: int, room: _Room) -> Any:
    """Make a table of codes; return the bytes of the file that hold it, -1 if it is damaged.

    Each entry has 0 if longer codes begin so. Else, if the bits hold a code with the bits behind it
    that are its value: value << 16 | zeros before it << 4 | bits in all. Else symbol << 8 |
    bits of the code << 4, so that its last four bits are 0.
    """
    if end - at < 17:
        return -1
    looked = room.looked[number << LOOK : (number + 1) << LOOK]
    longer = room.longer[2 * LENGTHS * number : 2 * LENGTHS * (number + 1)]
    symbols = room.symbols[256 * number : 256 * (number + 1)]
    for k in range(1 << LOOK):
        looked[k] = 0
    code, k, first = 0, 0, at + 17
    for length in range(1, LONGEST + 1):
        count = _byte(content, at + length)
        if k + count > 256 or first + k + count > end:
            return -1
        if code + count >= 1 << length:  # none may be all ones
            return -1
        longer[LENGTHS + length] = k - code
        for _ in range(count):
            symbol = _byte(content, first + k)
            symbols[k] = symbol
            if number < 4 and symbol > 11:
                return -1
            if length <= LOOK:
                bits = symbol & 15
                free = LOOK - length
                base = code << free
                for low in range(1 << free):
                    entry = symbol << 8 | length << 4
                    if bits <= free:
                        value = low >> (free - bits)
                        if bits and value < 1 << (bits - 1):
                            value -= (1 << bits) - 1
                        entry = value << 16 | (symbol >> 4) << 4 | (length + bits)
                    looked[base + low] = np.int32(entry)
            code += 1
            k += 1
        longer[length] = code - 1 if count else -1
        code <<= 1
    return 17 + k


@inlined
def _four(content: Array, end: int, head: Array) -> Any:
    """The next 32 bits of the codes, and zeros behind them."""
    at = head[AT]
    if at + 4 <= end:
        word = (
            _byte(content, at) << 24
            | _byte(content, at + 1) << 16
            | _byte(content, at + 2) << 8
            | _byte(content, at + 3)
        )
        others = word ^ 0xFFFFFFFF  # has a byte 0 where this has 0xFF
        if not (others - 0x01010101) & word & 0x80808080:
            head[AT] = at + 4
            return word
    word = 0
    for _ in range(4):
        byte = 0
        if at + 1 < end and (content[at] != 0xFF or not content[at + 1]):
            byte = _byte(content, at)
            at += 2 if byte == 0xFF else 1
        else:
            head[EXTRA] += 8
        word = word << 8 | byte
    head[AT] = at
    return word


@inlined
def _behind(content: Array, end: int, count: int, marker: int, head: Array) -> Any:
    """The place behind this marker; -1 unless it is next, after bits that fill up the last byte."""
    at, rest = head[AT], count - head[EXTRA]
    is_next = 0 <= rest < 8 and at + 1 < end and _word(content, at) == 0xFF00 + marker
    return at + 2 if is_next else -1


@inlined
def _scan(content: Array, at: int, end: int, height: int, width: int, room: _Room) -> bool:
    """Decode all blocks to the planes of samples; false if the file is damaged.

    The next `count` bits of the codes are the upper ones of `bits`.
    """
    head, looked, longer, symbols = room.head, room.looked, room.longer, room.symbols
    steps, blocks, places = room.steps, room.blocks, room.places
    components, across, down = head[COMPONENTS], head[ACROSS], head[DOWN]
    columns, rows = -(-width // (8 * across)), -(-height // (8 * down))
    bits = count = lane = 0
    left = rows * columns * (across * down + components - 1)  # blocks
    value: Any = 0
    length: Any = 0
    k: Any = 0
    head[AT], head[EXTRA] = at, 0
    for k in range(64 * LANES):
        blocks[k] = 0
    restarts, until = 0, head[INTERVAL]
    for row in range(rows):
        for column in range(columns):
            if head[INTERVAL]:
                if until == 0:
                    at = _behind(content, end, count, RST + (restarts & 7), head)
                    if at < 0:
                        return False
                    head[AT], head[EXTRA] = at, 0
                    head[LAST] = head[LAST + 1] = head[LAST + 2] = 0
                    bits = count = 0
                    restarts, until = restarts + 1, head[INTERVAL]
                until -= 1
            for c in range(components):
                h, v = (across, down) if c == 0 else (1, 1)
                stride = columns * h
                start = 0 if c == 0 else 8 * rows * columns * (across * down + c - 1)
                dc, ac, step = head[DC + c], head[AC + c], 64 * head[STEPS + c]
                for b in range(h * v):
                    y, x = row * v + b // h, column * h + b % h
                    places[2 * lane], places[2 * lane + 1] = start + y * 8 * stride + x, stride
                    total, number = 0, dc
                    k = 0
                    while k < 64:
                        if count < 32:
                            word = _four(content, end, head)
                            bits |= word << (32 - count)
                            count += 32
                        begin = bits >> (64 - LOOK) & ((1 << LOOK) - 1)
                        entry = np.int64(looked[np.uint64(number << LOOK | begin)])
                        if entry & 15:
                            length, value, zeros = entry & 15, entry >> 16, entry >> 4 & 15
                        else:
                            length, symbol = entry >> 4 & 15, entry >> 8
                            if not entry:
                                table = 2 * LENGTHS * number
                                length = LOOK + 1
                                ahead = bits >> 48 & 0xFFFF
                                while length <= LONGEST and (
                                    ahead >> (LONGEST - length) > longer[table + length]
                                ):
                                    length += 1
                                if length > LONGEST:
                                    return False
                                place = longer[table + LENGTHS + length]
                                place += ahead >> (LONGEST - length)
                                symbol = np.int64(symbols[256 * number + place])
                            zeros, n = symbol >> 4, symbol & 15
                            value = 0
                            if n:
                                value = bits >> (64 - length - n) & ((1 << n) - 1)
                                if value < 1 << (n - 1):
                                    value -= (1 << n) - 1
                            length += n
                        bits <<= length
                        count -= length
                        if k == 0:  # the difference from the block before
                            value += head[LAST + c]
                            head[LAST + c] = value
                            number = ac
                        elif value == 0 and zeros != 15:
                            if zeros:
                                return False
                            break
                        k += zeros
                        if k > 63:
                            return False
                        value *= steps[np.uint64(step + k)]
                        total += abs(value)
                        blocks[np.uint64(PLACES[np.uint64(k)] + lane)] = value
                        k += 1
                    if total > LARGEST:
                        return False
                    lane, left = lane + 1, left - 1
                    if lane == LANES or left == 0:
                        _transform(room, lane)
                        lane = 0
    return bool(_behind(content, end, count, EOI, head) >= 0)


@inlined
def _half(a: Array, to: Array, first: int, step: int, shift: int) -> None:
    """One of the two passes of libjpeg's jidctint.c, over 8 columns, or rows, of all lanes."""
    half = np.int32(1 << (shift - 1))
    for i in range(8):
        at = i * first
        for n in range(at, at + LANES):
            z2, z3 = a[n + 2 * step], a[n + 6 * step]
            z1 = np.int32((z2 + z3) * 4433)
            t2, t3 = np.int32(z1 - z3 * 15137), np.int32(z1 + z2 * 6270)
            z2, z3 = a[n], a[n + 4 * step]
            t0, t1 = np.int32((z2 + z3) << 13), np.int32((z2 - z3) << 13)
            t10, t13 = np.int32(t0 + t3), np.int32(t0 - t3)
            t11, t12 = np.int32(t1 + t2), np.int32(t1 - t2)
            t0, t1 = a[n + 7 * step], a[n + 5 * step]
            t2, t3 = a[n + 3 * step], a[n + step]
            z1, z2 = np.int32(t0 + t3), np.int32(t1 + t2)
            z3, z4 = np.int32(t0 + t2), np.int32(t1 + t3)
            z5 = np.int32((z3 + z4) * 9633)
            z1, z2 = np.int32(z1 * -7373), np.int32(z2 * -20995)
            z3, z4 = np.int32(z5 - z3 * 16069), np.int32(z5 - z4 * 3196)
            t0, t1 = np.int32(t0 * 2446 + z1 + z3), np.int32(t1 * 16819 + z2 + z4)
            t2, t3 = np.int32(t2 * 25172 + z2 + z3), np.int32(t3 * 12299 + z1 + z4)
            to[n] = np.int32(t10 + t3 + half) >> shift
            to[n + 7 * step] = np.int32(t10 - t3 + half) >> shift
            to[n + step] = np.int32(t11 + t2 + half) >> shift
            to[n + 6 * step] = np.int32(t11 - t2 + half) >> shift
            to[n + 2 * step] = np.int32(t12 + t1 + half) >> shift
            to[n + 5 * step] = np.int32(t12 - t1 + half) >> shift
            to[n + 3 * step] = np.int32(t13 + t0 + half) >> shift
            to[n + 4 * step] = np.int32(t13 - t0 + half) >> shift


@inlined
def _transform(room: _Room, lanes: int) -> None:
    """Inverse DCT of blocks to their places among the samples; then coefficients are 0."""
    blocks, places, words, packed = room.blocks, room.places, room.words, room.packed
    _half(blocks, room.turned, LANES, 8 * LANES, 11)
    _half(room.turned, blocks, 8 * LANES, LANES, 18)
    for y in range(8):
        for n in range(LANES):
            word: Any = 0
            for x in range(8):
                value = min(max(blocks[(8 * y + x) * LANES + n] + 128, 0), 255)
                word |= np.int64(value) << (8 * x)
            packed[y * LANES + n] = word
    for k in range(64 * LANES):
        blocks[k] = 0
    for n in range(lanes):
        at, stride = np.uint64(places[2 * n]), np.uint64(places[2 * n + 1])
        for y in range(8):
            words[at] = packed[y * LANES + n]
            at += stride


@inlined
def _color(image: Array, room: _Room) -> None:
    """The image (C, H, W), from the planes of samples."""
    head, samples = room.head, room.samples
    height, width = image.shape[1], image.shape[2]
    components, across, down = head[COMPONENTS], head[ACROSS], head[DOWN]
    columns, rows = -(-width // (8 * across)), -(-height // (8 * down))
    wide, narrow = columns * across * 8, columns * 8
    used, last = -(-width // across), -(-height // down) - 1  # samples of a row; the last row
    row, before, behind = (
        room.rows[:used],
        room.rows[used : 2 * used],
        room.rows[2 * used : 3 * used],
    )
    blue, red = room.wide[:wide], room.wide[wide : 2 * wide]
    for y in range(height):
        luma = samples[y * wide : y * wide + width]
        if image.shape[0] == 1 or components == 1:
            for c in range(image.shape[0]):
                for x in range(width):
                    image[c, y, x] = luma[x]
            continue
        for c in range(2):
            start = 64 * rows * columns * (across * down + c)
            near = samples[start + y // down * narrow :][:used]
            other = min(max(y // 2 + 2 * (y % 2) - 1, 0), last) if down == 2 else 0
            far = samples[start + other * narrow :][:used]
            to = blue if c == 0 else red
            if across == 1:
                for x in range(used):
                    to[x] = near[x]
            elif down == 1:
                for x in range(used):
                    row[x] = near[x]
                _between(row, before, behind, 1, 2, 2)
                before[0], behind[used - 1] = row[0], row[used - 1]
            else:
                for x in range(used):
                    row[x] = 3 * near[x] + far[x]
                _between(row, before, behind, 8, 7, 4)
                before[0], behind[used - 1] = (row[0] + 2) >> 2, (4 * row[used - 1] + 7) >> 4
            if across == 2:
                for x in range(used):
                    to[2 * x] = before[x]
                    to[2 * x + 1] = behind[x]
        first, second, third = image[0, y], image[1, y], image[2, y]
        for x in range(width):
            cb, cr = np.int32(blue[x]) - 128, np.int32(red[x]) - 128
            b = luma[x] + (np.int32(116130 * cb + 32768) >> 16)
            g = luma[x] + (np.int32(-22554 * cb - 46802 * cr + 32768) >> 16)
            r = luma[x] + (np.int32(91881 * cr + 32768) >> 16)
            first[x] = min(max(b, 0), 255)
            second[x] = min(max(g, 0), 255)
            third[x] = min(max(r, 0), 255)


@inlined
def _between(row: Array, before: Array, behind: Array, down: int, up: int, shift: int) -> None:
    """Three parts of each sample and one of the sample before it, and behind it, rounded."""
    for x in range(1, len(row)):
        before[x] = np.int32(3 * row[x] + row[x - 1] + down) >> shift
    for x in range(len(row) - 1):
        behind[x] = np.int32(3 * row[x] + row[x + 1] + up) >> shift
