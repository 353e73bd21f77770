"""The arrays in which a thread decodes one JPEG file after the other."""

import threading
from typing import NamedTuple

import numpy as np

from caffepy.device.blob import Array

LANES = 16  # blocks that are transformed at once, each in a lane of vectors
LOOK = 10  # bits of a code that are looked up at once
LONGEST = 16  # bits of a code
LENGTHS = LONGEST + 1
MOST = 1 << 21  # pixels of an image, in whole blocks, for which a thread keeps 6 MiB
WIDEST = 1 << 16  # pixels of a row, in whole blocks
FILES = 4 << 20  # bytes for the files that a thread reads at a time

# places in `Room.head`
COMPONENTS, ACROSS, DOWN = range(3)
IDS, STEPS, DC, AC = 3, 6, 9, 12  # of each component, the latter three numbers of tables
LAST = 15  # of each component, what its last block began with
AT, EXTRA = 18, 19  # where the next bits are; those behind the codes
TURNED = 20  # 1 if the file may say that the image is to be turned
INTERVAL = 21  # groups of blocks between restarts, or 0
HEIGHT, WIDTH = 22, 23  # of the image
ROWS, COLUMNS = 24, 25  # of groups of blocks
HEAD = 26


class Room(NamedTuple):
    """Flat arrays of a thread. Tables of codes are numbered: four of DC, four of AC."""

    head: Array  # (HEAD,) int64: what a file's markers say
    steps: Array  # (4 * 64,) int32: quantization tables, in the order of a file
    looked: Array  # (8 << LOOK,) int32: what begins with these bits, see `_look_up` in headers.py
    longer: Array  # (8 * 2 * LENGTHS,) int64: largest code of each length; where its symbols are
    symbols: Array  # (8 * 256,) uint8: symbols of codes, in their order
    blocks: Array  # (64 * LANES,) int32: coefficients
    turned: Array  # (64 * LANES,) int32: the blocks after the IDCT of their columns
    packed: Array  # (8 * LANES,) int64: eight samples of a row, of each block
    places: Array  # (2 * LANES,) int64: where a block goes in `words`, and the width of that plane
    rows: Array  # (3 * WIDEST,) int32: a row of a colour, and its samples at twice the width
    wide: Array  # (2 * WIDEST,) uint8: rows of two colours
    line: Array  # (3, 1, WIDEST) uint8: a row of the image
    pixels: Array  # (WIDEST + 1,) int64: the same, the colours of a pixel in one number
    taps: Array  # (3, WIDEST) int64: where each resized pixel of a row reads, and two weights
    sums: Array  # (2, WIDEST) int64: two rows that are resized along them, colours as in `pixels`
    samples: Array  # (3 * MOST,) uint8: planes
    words: Array  # the same, int64
    files: Array  # (FILES,) uint8


_rooms = threading.local()


def room_of_thread() -> Room:
    """Return the arrays of this thread. What no image needs of them takes no memory."""
    if not hasattr(_rooms, "room"):
        samples = np.empty(3 * MOST, np.uint8)
        _rooms.room = Room(
            np.zeros(HEAD, np.int64),
            np.zeros(4 * 64, np.int32),
            np.zeros(8 << LOOK, np.int32),
            np.zeros(8 * 2 * LENGTHS, np.int64),
            np.zeros(8 * 256, np.uint8),
            np.zeros(64 * LANES, np.int32),
            np.zeros(64 * LANES, np.int32),
            np.zeros(8 * LANES, np.int64),
            np.zeros(2 * LANES, np.int64),
            np.empty(3 * WIDEST, np.int32),
            np.empty(2 * WIDEST, np.uint8),
            np.empty((3, 1, WIDEST), np.uint8),
            np.empty(WIDEST + 1, np.int64),
            np.empty((3, WIDEST), np.int64),
            np.empty((2, WIDEST), np.int64),
            samples,
            samples.view(np.int64),
            np.empty(FILES, np.uint8),
        )
    room: Room = _rooms.room
    return room
