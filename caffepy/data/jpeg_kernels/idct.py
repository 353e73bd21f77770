"""The inverse DCT of LANES blocks at once: libjpeg's slow one in whole numbers."""

from typing import Any

import numpy as np

from caffepy.data.jpeg_kernels.room import LANES, Room
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import inlined


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
def transform(room: Room, lanes: int) -> None:
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
