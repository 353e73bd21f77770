"""Windows of the images in JPEG files: cut out, resized, and put into a batch of floats."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from caffepy.data.datum import COLOR
from caffepy.data.jpeg_kernels.decode import NONE, decode, fixed, joined_names, read, takes
from caffepy.data.jpeg_kernels.room import room_of_thread
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import EXACT, kernel

SIDES = 9  # numbers of a window


def decode_windows(
    paths: Sequence[str],
    contents: Sequence[bytes] | None,
    window_of: Callable[[int, int, int], Sequence[int] | None],
    mean: Array,
    scale: float,
    images: Array,
    places: Sequence[int],
) -> Array:
    """Decode windows of the images in the files at these paths, or of these contents, to these
    places of `images` (N, 3, H, W), float32, in this thread; return a mask (n,) of those that were.

    `window_of` gives the window of file i, whose image has this height and width, or None:

        first row, first column, height, width: where it is cut out
        height, width, first row, first column: to which it is resized, where it is put
        1 if it is mirrored

    A pixel p becomes (p - `mean`) * `scale`, the mean (3, H, W) where it is put.
    """
    room, count = room_of_thread(), len(paths)
    done = np.zeros(count, np.bool_)
    if not takes(images, True):
        return done
    spans, sizes = np.zeros((count, 2), np.int64), np.zeros((count, 2), np.int64)
    if contents is None:
        read(*joined_names(paths), room.files, spans, 0, count)
        content = fixed(room.files)
    else:
        content = np.frombuffer(b"".join(contents), np.uint8)
        spans[:, 1] = list(map(len, contents))
        spans[:, 0] = np.cumsum(spans[:, 1]) - spans[:, 1]
    windows = np.zeros((count, SIDES), np.int64)
    resized = np.empty((count, *images.shape[1:]), np.uint8)
    given = content, spans, np.arange(count), COLOR, True
    decode(*given, NONE, sizes, room, resized, done, 0, count)
    for i, (height, width) in enumerate(sizes.tolist()):
        if height and (window := window_of(i, height, width)):
            windows[i] = window
        else:
            spans[i] = 0
    decode(*given, windows, NONE, room, resized, done, 0, count)
    _put(resized, windows, done, mean, np.float32(scale), images, np.asarray(places, np.int64))
    return done


@partial(kernel, fastmath=EXACT)
def _put(
    resized: Array,
    windows: Array,
    done: Array,
    mean: Array,
    scale: float,
    images: Array,
    places: Array,
) -> None:
    for i in range(len(windows)):
        if not done[i]:
            continue
        height, width, top, left = windows[i, 4], windows[i, 5], windows[i, 6], windows[i, 7]
        is_mirrored = windows[i, 8]
        for c in range(3):
            for y in range(height):
                pixels, less = resized[i, c, y], mean[c, top + y]
                to = images[places[i], c, top + y]
                for x in range(width):
                    pixel = np.float32(pixels[width - 1 - x] if is_mirrored else pixels[x])
                    to[left + x] = (pixel - less[left + x]) * scale
