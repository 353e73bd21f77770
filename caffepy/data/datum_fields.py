"""Serialized Datums, looked through without parsing them whole.

The functions that walk over a record's fields serve Python, here, and numba (`datum_kernels`),
whose code for them a process has only where it computes on the CPU.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel

# tags of Datum's fields
CHANNELS, HEIGHT, WIDTH, DATA, LABEL, ENCODED = 0x08, 0x10, 0x18, 0x22, 0x28, 0x38
SIZE = 5  # the most bytes of a varint that holds a field's size
# bytes a piece of work: handing it to a thread takes 20 us or more, copying it 0.7 ms
GRAIN = 4 << 20
TAIL = 64  # the most bytes behind a raw image that are looked through, and kept


def find_encoded(content: Array, rows: Array) -> tuple[Array, Array]:
    """Find the image files in records: start and size (n, 2), and the labels (n,).

    The size is 0 for a record to be parsed: one that is no Datum of an encoded image alone.
    `content` and `rows` are those of Records.
    """
    images, labels = np.zeros((len(rows), 2), np.int64), np.zeros(len(rows), np.int64)
    view = content.data
    for i, (start, length) in enumerate(rows[:, 2:4].tolist()):
        *images[i], labels[i] = walk(view, start, start + length)
    return images, labels


def walk(content: Any, at: int, end: int) -> tuple[int, int, int]:
    """Start and size of the image file in a record, 0 if it is not one of an image file alone; the
    label.
    """
    image = size = label = 0
    encoded = False
    while 0 <= at < end:
        tag, start = content[at], at + 1
        value, at = varint(content, start, end)
        if at < 0:
            break
        if tag == DATA:
            image, size = at, value
            at = at + value if at - start <= SIZE and value <= end - at else -1
        elif tag == LABEL:
            label = int32(value)
        elif tag == ENCODED:
            encoded = value != 0
        elif tag not in (CHANNELS, HEIGHT, WIDTH):
            at = -1
    if at != end or not encoded:
        image = size = 0
    return image, size, label


def label_behind(content: Any, at: int, end: int) -> tuple[int, bool]:
    """The label in what is behind a raw image, and whether at most encoded = false is beside it."""
    label = 0
    while at < end:
        tag = content[at]
        value, at = varint(content, at + 1, end)
        if at >= 0 and tag == LABEL:
            label = int32(value)
        elif at < 0 or tag != ENCODED or value != 0:
            return 0, False
    return label, True


def varint(content: Any, at: int, end: int) -> tuple[int, int]:
    """The varint at this place, its 64 bits, which are signed in numba; and the place after it, -1
    if the varint does not end.
    """
    value = shift = 0
    while at < end and shift <= 63:
        byte = content[at]
        value |= (byte & (0x7F if shift < 63 else 1)) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            return value, at
    return value, -1


def int32(value: int) -> int:
    """An int32, whose sign is extended to 64 bits."""
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def copy_images(content: Array, rows: Array, head: bytes, images: Array, labels: Array) -> Array:
    """Copy the images (n, ...), uint8, and labels of records that start with `head`.

    Returns a mask of these records, but those with much behind the image. `content` and `rows` are
    those of Records.
    """
    n, size = len(rows), images[0].size
    flat, done, view = images.reshape(n, -1), np.zeros(n, np.bool_), content.data
    places: list[tuple[int, int]] = rows[:, 2:4].tolist()

    def copy_some(lo: int, hi: int) -> None:
        for i in range(lo, hi):
            start, length = places[i]
            image, end = start + len(head), start + length
            if not 0 <= end - image - size <= TAIL or view[start:image] != head:
                continue
            label, is_alone = _label_behind(bytes(view[image + size : end]))
            if is_alone:
                labels[i], done[i] = label, True
                flat[i] = content[image : image + size]

    parallel(copy_some, n, max(1, GRAIN // size))
    return done


@lru_cache(1 << 12)
def _label_behind(tail: bytes) -> tuple[int, bool]:
    return label_behind(tail, 0, len(tail))
