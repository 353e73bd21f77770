"""What precedes the codes of a JPEG file: its markers, read into a `Room`."""

from typing import Any

import numpy as np

from caffepy.data.jpeg_kernels.room import (
    AC,
    ACROSS,
    COLUMNS,
    COMPONENTS,
    DC,
    DOWN,
    HEAD,
    HEIGHT,
    IDS,
    INTERVAL,
    LENGTHS,
    LONGEST,
    LOOK,
    ROWS,
    STEPS,
    TURNED,
    WIDTH,
    Room,
)
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import inlined

LEAST = 16  # pixels of a side: libjpeg does not interpolate the colours of tiny images
LONGEST_SIDE = 65500  # pixels; libjpeg takes no more

SOI, EOI, SOS, DQT, DRI, DHT, RST = 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xC4, 0xD0
BASELINE, EXTENDED = 0xC0, 0xC1
JFIF, EXIF_OR_XMP, ADOBE, LAST_APP, COMMENT = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
JFIF_NAME, ADOBE_NAME, XMP_NAME = (
    np.frombuffer(name, np.uint8) for name in (b"JFIF\0", b"Adobe", b"http://ns.")
)


@inlined
def byte_at(content: Array, at: int) -> np.int64:
    """The byte at this place."""
    return np.int64(content[np.uint64(at)])


@inlined
def word_at(content: Array, at: int) -> Any:
    """The number in the two bytes at this place."""
    return byte_at(content, at) << 8 | byte_at(content, at + 1)


@inlined
def _begins(content: Array, at: int, name: Array) -> bool:
    same = True
    for k in range(len(name)):
        same &= content[at + k] == name[k]
    return same


@inlined
def parse(content: Array, start: int, end: int, height: int, width: int, room: Room) -> Any:
    """Read markers; return where the codes begin, -1 for a file of another size (a height of 0: all
    sizes are taken) or kind: not baseline with 8 bits, grey or YCbCr, sampled 4:4:4, 4:2:2 or
    4:2:0, in one scan.
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
        at, size = at + 4, word_at(content, at + 2) - 2
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
                adobe = byte_at(content, at + 11)
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
            if head[COMPONENTS] or not _read_frame(content, at, size, height, width, room):
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
            head[INTERVAL] = word_at(content, at)
        elif (marker < JFIF or marker > LAST_APP) and marker != COMMENT:
            return -1
        at = behind
    return -1


@inlined
def _read_steps(content: Array, at: int, end: int, room: Room) -> Any:
    """Read quantization tables; return bits of their numbers, -1 if one has steps of 16 bits."""
    read = 0
    while at < end:
        number = byte_at(content, at)
        if number > 3 or end - at < 65:
            return -1
        for k in range(64):
            room.steps[64 * number + k] = content[at + 1 + k]
        at, read = at + 65, read | 1 << number
    return read


@inlined
def _read_codes(content: Array, at: int, end: int, room: Room) -> Any:
    """Read tables of codes; return bits of their numbers, from the fifth on, -1 for damage."""
    read = 0
    while at < end:
        kind = byte_at(content, at)
        number = kind & 3 | kind >> 2
        used = -1 if kind & 0xEC else _look_up(content, at, end, number, room)
        if used < 0:
            return -1
        at, read = at + used, read | 16 << number
    return read


@inlined
def _read_frame(content: Array, at: int, size: int, height: int, width: int, room: Room) -> bool:
    """Read size, components and sampling; False for an image of another size or kind."""
    head = room.head
    if size < 9 or content[at] != 8:
        return False
    head[HEIGHT], head[WIDTH] = word_at(content, at + 1), word_at(content, at + 3)
    if height and (head[HEIGHT] != height or head[WIDTH] != width):
        return False
    if min(head[HEIGHT], head[WIDTH]) < LEAST or max(head[HEIGHT], head[WIDTH]) > LONGEST_SIDE:
        return False
    components = byte_at(content, at + 5)
    if (components != 1 and components != 3) or size != 6 + 3 * components:
        return False
    for c in range(components):
        place = at + 6 + 3 * c
        sampling, number = byte_at(content, place + 1), byte_at(content, place + 2)
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
    head[ROWS] = -(-head[HEIGHT] // (8 * head[DOWN]))
    head[COLUMNS] = -(-head[WIDTH] // (8 * head[ACROSS]))
    blocks = head[ROWS] * head[COLUMNS] * (head[ACROSS] * head[DOWN] + components - 1)
    return bool(64 * blocks <= len(room.samples))


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
        tables = byte_at(content, place + 1)
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
    if end - first < 14 or word_at(content, first) not in (0x4949, 0x4D4D):
        return False
    low = 1 if word_at(content, first) == 0x4D4D else 0  # which byte of two is the lower one
    place = 0
    for k in range(4):
        place |= byte_at(content, first + 4 + k) << 8 * (3 - k if low else k)
    place += first
    if place + 2 > end:
        return False
    count = byte_at(content, place + low) | byte_at(content, place + 1 - low) << 8
    if place + 2 + 12 * count > end:
        return False
    for k in range(count):
        entry = place + 2 + 12 * k
        tag = byte_at(content, entry + low) | byte_at(content, entry + 1 - low) << 8
        value = byte_at(content, entry + 8 + low) | byte_at(content, entry + 9 - low) << 8
        if tag == 0x112 and value != 1:
            return False
    return True


@inlined
def _look_up(content: Array, at: int, end: int, number: int, room: Room) -> Any:
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
        count = byte_at(content, at + length)
        if k + count > 256 or first + k + count > end:
            return -1
        if code + count >= 1 << length:  # none may be all ones
            return -1
        longer[LENGTHS + length] = k - code
        for _ in range(count):
            symbol = byte_at(content, first + k)
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
