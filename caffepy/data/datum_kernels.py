"""numba loops over serialized Datums: find the image files in them, copy raw images.

`datum_fields` has the same functions for whoever does without numba.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.datum_fields import (
    CHANNELS,
    DATA,
    ENCODED,
    GRAIN,
    HEIGHT,
    LABEL,
    SIZE,
    WIDTH,
)
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import external, kernel

Array = NDArray[Any]

_memcpy = external("memcpy", "uintp", "uintp", "uintp", "uintp")
"""C's: three times as fast as a loop of numba's."""


@kernel
def _copy(content: Array, rows: Array, head: Array, outs: Any, lo: int, hi: int) -> None:
    images, labels, done = outs
    size = images.shape[1]
    for i in range(lo, hi):
        start, length = rows[i, 2], rows[i, 3]
        done[i] = length >= len(head) + size
        if done[i]:
            for k in range(len(head)):
                if content[start + k] != head[k]:
                    done[i] = False
        image = start + len(head)
        at, end, label = image + size, start + length, np.int64(0)
        # behind the image there may be the label and encoded = false, and nothing else
        while done[i] and at < end:
            tag = content[at]
            value, at = _varint(content, at + 1, end)
            if at >= 0 and tag == LABEL:
                label = _int32(value)
            elif at < 0 or tag != ENCODED or value:
                done[i] = False
        if done[i]:
            labels[i] = label
            _memcpy(images[i].ctypes.data, content[image:].ctypes.data, size)


@kernel
def _varint(content: Array, at: int, end: int) -> tuple[Any, int]:
    """The varint at this place and the place after it, -1 if the varint does not end."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < end and shift <= np.uint64(63):
        byte = np.uint64(content[at])
        value |= (byte & np.uint64(0x7F)) << shift
        shift += np.uint64(7)
        at += 1
        if not byte & np.uint64(0x80):
            return value, at
    return value, -1


@kernel
def _int32(value: Any) -> Any:
    """An int32, whose sign is extended to 64 bits."""
    return (np.int64(value) & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


@kernel
def _find(content: Array, rows: Array, images: Array, labels: Array) -> None:
    for i in range(len(rows)):
        at, end, encoded = rows[i, 2], rows[i, 2] + rows[i, 3], False
        images[i], labels[i] = 0, 0
        while 0 <= at < end:
            tag, start = content[at], at + 1
            value, at = _varint(content, start, end)
            if at < 0:
                break
            if tag == DATA:
                size = np.int64(value)
                images[i] = at, size
                at = at + size if at - start <= SIZE and size <= end - at else -1
            elif tag == LABEL:
                labels[i] = _int32(value)
            elif tag == ENCODED:
                encoded = value != 0
            elif tag not in (CHANNELS, HEIGHT, WIDTH):
                at = -1
        if at != end or not encoded:
            images[i] = 0


def find_encoded(content: Array, rows: Array) -> tuple[Array, Array]:
    """Find the image files in records: start and size (n, 2), and the labels (n,).

    The size is 0 for a record to be parsed: one that is no Datum of an encoded image alone.
    `content` and `rows` are those of Records.
    """
    images, labels = np.empty((len(rows), 2), np.int64), np.empty(len(rows), np.int64)
    _find(content, rows, images, labels)
    return images, labels


def copy_images(content: Array, rows: Array, head: bytes, images: Array, labels: Array) -> Array:
    """Copy the images (n, ...), uint8, and labels of records that start with `head`.

    Returns a mask of these records. `content` and `rows` are those of Records.
    """
    n, start = len(rows), np.frombuffer(head, np.uint8)
    flat, done = images.reshape(n, -1), np.empty(n, np.bool_)
    outs, grain = (flat, labels, done), max(1, GRAIN // flat.shape[1])
    parallel(lambda lo, hi: _copy(content, rows, start, outs, lo, hi), n, grain)
    return done
