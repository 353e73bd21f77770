"""Pooling of regions of interest."""

from typing import Any

import numpy as np

from caffepy.ops.boxes import Rois
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, divisor, launch_blocks

WIDE, FORWARD, PARTS = 1024, 512, 256
"""Threads of a block: at most, of ROIPooling and ROIAlign in forward, and where a block takes the
channel of a part.
"""

DEVICE = 132
"""Multiprocessors of a large device."""

POOLS, ALIGNS = 4, 3
"""Blocks of ROIPooling and ROIAlign in forward that a multiprocessor holds at a time."""

FEW = 16
"""Boxes of an image for which its planes are not read into shared memory."""

ROOM = 160 << 10
"""Most bytes of planes in shared memory, of which a multiprocessor has 227 KiB."""

STAGE = 8 << 10
"""Bytes of the cells of boxes in shared memory."""

GIVEN, SUMS = 56 << 10, 80 << 10
"""Most bytes of dy and of weights, and of sums, that a block of ROIAlign has in shared memory in
backward.
"""

COLUMNS = 1024
"""Most columns of such a block."""

WARPS = 4
"""Warps of a block in ROIPooling's backward, as in roi.cu, each with a plane, or a band of one, in
shared memory.
"""

OUTPUTS = 3
"""Outputs of which a block of PSROIPooling's backward takes a bin."""

SHARED = 44 << 10
"""Most bytes of shared memory of a block of ROIPooling's backward, and of the tables of a box."""

Blocks = tuple[int, ...]


def _launch(
    expression: str, grid: Blocks, threads: int, arguments: tuple[Any, ...], shared: int = 0
) -> None:
    if min(grid) > 0:
        found: Any = kernel("roi", expression)
        if shared > 40 << 10:  # more than a kernel may have without asking
            found.max_dynamic_shared_size_bytes = shared
        found(grid, (threads,), arguments, shared_mem=shared)


def _width(array: Array) -> int:
    """Return the bytes of an element in which sums are taken."""
    return 8 if array.itemsize == 8 else 4


def _staged(x: Array, boxes: int, channels: int) -> int:
    """Return the bytes of `channels` planes of x, 0 where they are read where they lie."""
    size = _width(x) * channels * int(x.shape[2] * x.shape[3])
    return size if size <= ROOM and boxes >= FEW * len(x) else 0


def _shares(blocks: int, boxes: int, resident: int) -> tuple[int, int]:
    """Return in how many shares the boxes are split, and the boxes of one: for whole waves of
    blocks, `resident` to a multiprocessor, each of which reads its planes anew.
    """
    most = range(1, max(1, min(8, boxes // 32)) + 1)
    shares = min(most, key=lambda n: -(-blocks * n // (DEVICE * resident)) / n * (1 + 0.15 * n))
    each = -(-boxes // shares)
    return (-(-boxes // each) if boxes else 0), each


def take_rois(boxes: Rois, images: int) -> None:
    given, taken, pad, bad_image = boxes
    arguments = given, taken, bad_image, len(taken), images, pad
    launch_blocks("roi", "take_rois", taken, min(1, len(taken)), *arguments, threads=WIDE)


def _forward(
    name: str, x: Array, boxes: int, resident: int, arguments: tuple[Any, ...], room: int = 0
) -> None:
    """Launch blocks for 16 bytes of the channels of each image and a share of the boxes, `resident`
    to a multiprocessor, with `room` more bytes of shared memory. Arguments end with a list of those
    that follow the shares; None in it stands for the bytes of the planes in shared memory.
    """
    *given, last = arguments
    each = 16 // _width(x)
    planes = _staged(x, boxes, each)
    groups = -(-x.shape[1] // each)
    shares, share = _shares(groups * len(x), boxes, resident)
    sizes = boxes, share, *(planes if a is None else a for a in last)
    expression = f"{name}<{c_type(x)}, {each}, {int(planes > 0)}>"
    _launch(expression, (groups, len(x), shares), FORWARD, (*given, *sizes), planes + room)


def roi_pool_forward(x: Array, boxes: Rois, y: Array, index: Array, scale: float) -> None:
    count, channels, rows, columns = y.shape
    axes = rows + columns
    most = max(1, STAGE // (8 * axes))
    given = x, *boxes, y, index, channels, rows, columns, *x.shape[2:], float(scale)
    last = [most, None, divisor(axes), divisor(rows * columns), divisor(columns)]
    _forward("roi_pool_forward", x, count, POOLS, (*given, last), room=8 * axes * min(most, WIDE))


def roi_pool_backward(dy: Array, rois: Array, index: Array, dx: Array, scale: float) -> None:
    (images, channels, h, w), (boxes, _, rows, columns) = dx.shape, dy.shape
    plane, width = h * w, _width(dx)
    bands = max(1, -(-plane * width * WARPS // SHARED))
    band = -(-plane // bands)
    sizes = channels, plane, rows, columns, boxes, float(scale), band, bands, divisor(columns)
    expression, shared = f"roi_pool_backward<{c_type(dx)}>", band * width * WARPS
    _launch(
        expression, (channels * bands, images), 32 * WARPS, (dy, rois, index, dx, *sizes), shared
    )


def _parts_forward(
    name: str, each: int, threads: int, x: Array, boxes: int, *arguments: Any
) -> None:
    """Launch a block of `threads` threads for `each` channels of each image."""
    planes = _staged(x, boxes, each)
    room = planes and planes + 16  # they may begin behind 16 bytes
    if boxes:
        grid = -(-x.shape[1] // each), len(x)
        _launch(f"{name}, {int(planes > 0)}>", grid, threads, (x, *arguments, boxes), room)


def psroi_pool_forward(x: Array, boxes: Rois, y: Array, scale: float) -> None:
    each = 2 if _staged(x, len(y), 8) else 1  # a multiprocessor holds four of such blocks
    sizes = x.shape[1], y.shape[2], *x.shape[2:], float(scale)
    name = f"psroi_pool_forward<{c_type(x)}, {each}"
    _parts_forward(name, each, PARTS * each, x, len(y), *boxes, y, *sizes)


def psroi_pool_backward(dy: Array, rois: Array, dx: Array, scale: float) -> None:
    (images, channels, h, w), bins = dx.shape, dy.shape[2]
    outputs = channels // bins**2
    grid = bins**2, images, -(-outputs // OUTPUTS)
    arguments = dy, rois, dx, outputs, h, w, bins, len(dy), float(scale)
    _launch(f"psroi_pool_backward<{c_type(dx)}, {OUTPUTS}>", grid, FORWARD, arguments)


def _tables(
    like: Array, rois: Array, bins: tuple[int, int], of: tuple[int, int], learns: bool, *rule: Any
) -> tuple[Array, int, int]:
    """Write what each box weighs in planes `of` h x w, as Table and Readers in roi.cu; return the
    tables, the bytes of each, and where its Readers begin.
    """
    pixels, parts, threads = sum(of), sum(bins), 128
    weights = _width(like) * (pixels + 3 * parts)
    readers = -(-(16 * parts + weights) // 16) * 16
    slot = -(-(32 + 8 * pixels + weights) // 16) * 16
    tables = context().array("weights of regions", (len(rois), readers + slot), np.uint8)
    sensitive = rule[-1]
    more = readers if learns and not sensitive else 0
    arguments = rois, tables, readers + slot, more, *bins, *of, *rule
    staged = readers + slot if readers + slot <= SHARED else 0
    expression = f"roi_align_tables<{c_type(like)}, {int(learns)}, {int(staged > 0)}>"
    _launch(expression, (len(rois),), threads, arguments, staged)
    return tables, readers + slot, readers


def roi_align_forward(
    x: Array, boxes: Rois, y: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    (count, _, rows, columns), (channels, h, w) = y.shape, x.shape[1:]
    if sensitive:
        sizes = channels, rows, h, w, float(scale), samples, beyond
        # It needs more registers, and all blocks should fit on the device at a time.
        name = f"psroi_align_forward<{c_type(x)}"
        _parts_forward(name, 1, PARTS // 2, x, count, *boxes, y, *sizes)
        return
    take_rois(boxes, len(x))
    rois = boxes.taken
    rule = float(scale), samples, beyond, 0
    tables, size, _ = _tables(x, rois, (rows, columns), (h, w), False, *rule)
    given = x, rois, tables, y, size, rows, columns, channels, h, w
    last = [divisor(rows * columns), divisor(columns)]
    _forward("roi_align_forward", x, count, ALIGNS, (*given, last))


def roi_align_backward(
    dy: Array, rois: Array, dx: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    (boxes, _, rows, columns), (images, channels, h, w) = dy.shape, dx.shape
    rule = float(scale), samples, beyond, int(sensitive)
    tables, size, readers = _tables(dx, rois, (rows, columns), (h, w), True, *rule)
    if sensitive:
        arguments = dy, rois, tables, dx, size, channels, h, w, rows, boxes
        _launch(f"psroi_align_backward<{c_type(dx)}>", (channels, images), PARTS, arguments)
        return
    if not dx.size:
        return
    bins, each, slot = rows * columns, 16 // _width(dx), size - readers
    groups = -(-channels // each)
    across = min(w, COLUMNS)
    lines = min(h, SUMS // (16 * across))
    areas = -(-h // lines) * -(-w // across)
    own = 2 * -(-lines // 64)
    warps = max(8, -(-lines // own))
    room = GIVEN * 2 if groups * images * areas <= DEVICE else GIVEN  # a block has the rest
    fits = room // (16 * bins + slot)  # 0 for very large maps, or very many bins
    most, staged = min(boxes, fits), int(fits > 0)
    given = dy, rois, tables[:, readers:], dx
    sizes = (
        size,
        slot,
        columns,
        bins,
        channels,
        h,
        w,
        boxes,
        most or boxes,
        lines,
        across,
        own,
        divisor(bins),
    )
    shared = 16 * (lines * across + bins * most) + slot * most
    grid, expression = (groups, images, areas), f"{c_type(dx)}, {each}, {staged}"
    _launch(f"roi_align_backward<{expression}>", grid, 32 * warps, (*given, *sizes), shared)
