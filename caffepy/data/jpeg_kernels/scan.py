"""The codes of a JPEG file: to coefficients of blocks, and these to planes of samples."""

from typing import Any

import numpy as np

from caffepy.data.jpeg_kernels.headers import EOI, RST, byte_at, word_at
from caffepy.data.jpeg_kernels.idct import transform
from caffepy.data.jpeg_kernels.room import (
    AC,
    ACROSS,
    AT,
    COLUMNS,
    COMPONENTS,
    DC,
    DOWN,
    EXTRA,
    INTERVAL,
    LANES,
    LAST,
    LENGTHS,
    LONGEST,
    LOOK,
    ROWS,
    STEPS,
    Room,
)
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import inlined

LARGEST = 5700
"""The most to which the magnitudes of a block's coefficients may add up. With more, sums of 16 bits
could overflow in libjpeg's vector code.
"""

DAMAGED = 64  # zeros before a coefficient, more than a block has

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


@inlined
def scan(content: Array, at: int, end: int, room: Room) -> bool:
    """Decode all blocks to the planes of samples; False if the file is damaged.

    The next `count` bits of the codes are the upper ones of `bits`. numba counts references to
    arrays where a function takes them out of `room`: so all that a block needs is in this one.
    """
    head, looked, longer, symbols = room.head, room.looked, room.longer, room.symbols
    steps, blocks, places = room.steps, room.blocks, room.places
    components, across, down = head[COMPONENTS], head[ACROSS], head[DOWN]
    rows, columns = head[ROWS], head[COLUMNS]
    bits = count = lane = restarts = 0
    left = rows * columns * (across * down + components - 1)  # blocks
    until = head[INTERVAL]
    length: Any = 0
    value: Any = 0
    zeros: Any = 0
    k: Any = 0
    head[AT], head[EXTRA] = at, 0
    for k in range(64 * LANES):
        blocks[k] = 0
    for row in range(rows):
        for column in range(columns):
            if head[INTERVAL]:
                if until == 0:
                    if not _restart(content, end, count, restarts, head):
                        return False
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
                            length, value, zeros = _long_code(entry, bits, number, longer, symbols)
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
                        transform(room, lane)
                        lane = 0
    return bool(_behind(content, end, count, EOI, head) >= 0)


@inlined
def _restart(content: Array, end: int, count: int, restarts: int, head: Array) -> bool:
    """Go behind the marker of a restart; False unless it is next."""
    at = _behind(content, end, count, RST + (restarts & 7), head)
    head[AT], head[EXTRA] = at, 0
    head[LAST] = head[LAST + 1] = head[LAST + 2] = 0
    return bool(at >= 0)


@inlined
def _long_code(entry: Any, bits: Any, number: Any, longer: Array, symbols: Array) -> Any:
    """Decode a code that is not looked up together with its value, whose entry there this is;
    return the bits of both, the value, and the zeros before it: DAMAGED if there is no such code.
    """
    length, symbol = entry >> 4 & 15, entry >> 8
    if not entry:
        table = 2 * LENGTHS * number
        length = LOOK + 1
        ahead = bits >> 48 & 0xFFFF
        while length <= LONGEST and ahead >> (LONGEST - length) > longer[table + length]:
            length += 1
        symbol = DAMAGED << 4
        if length <= LONGEST:
            place = longer[table + LENGTHS + length] + (ahead >> (LONGEST - length))
            symbol = np.int64(symbols[256 * number + place])
    zeros, n = symbol >> 4, symbol & 15
    value: Any = 0
    if n:
        value = bits >> (64 - length - n) & ((1 << n) - 1)
        if value < 1 << (n - 1):
            value -= (1 << n) - 1
    return length + n, value, zeros


@inlined
def _four(content: Array, end: int, head: Array) -> Any:
    """The next 32 bits of the codes, and zeros behind them."""
    at = head[AT]
    if at + 4 <= end:
        word = (
            byte_at(content, at) << 24
            | byte_at(content, at + 1) << 16
            | byte_at(content, at + 2) << 8
            | byte_at(content, at + 3)
        )
        others = word ^ 0xFFFFFFFF  # has a byte 0 where this has 0xFF
        if not (others - 0x01010101) & word & 0x80808080:
            head[AT] = at + 4
            return word
    word = 0
    for _ in range(4):
        byte = 0
        if at + 1 < end and (content[at] != 0xFF or not content[at + 1]):
            byte = byte_at(content, at)
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
    is_next = 0 <= rest < 8 and at + 1 < end and word_at(content, at) == 0xFF00 + marker
    return at + 2 if is_next else -1
