"""Launches of kernels over arrays, with numbers that may lie in device memory."""

from math import prod
from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context

Array = Any  # cupy.ndarray

TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "uint16": "bf16_t"}
"""The C type of each element type, those of 16 bits as in pack.cuh; uint16 holds bfloat16."""

THREADS = 256
BLOCKS = 132 * 8
"""About as many blocks of 256 threads as a large device holds at a time."""

MOST = 1 << 13
"""Most blocks of a launch; kernels use grid-stride loops."""

MOST_SUMS = 512
"""Most blocks of a launch with one result."""

_KINDS = {"float32": 1, "float64": 2, "int32": 3, "uint32": 3, "int64": 4, "uint64": 4}
"""As in pack.cuh."""

_arrivals: dict[tuple[int, int], list[Array]] = {}


def c_type(array: Array) -> str:
    """Return the C name of an array's element type, for name expressions; DeviceError if it has
    none.
    """
    found = TYPES.get(array.dtype.name)
    if found is None:
        raise DeviceError(f"no GPU arithmetic for elements of type {array.dtype.name}")
    return found


def channels_last(*arrays: Array) -> bool:
    """Return True if all of these (N, C, ...) arrays have their channels last, False if all are
    C-contiguous (or both).

    DeviceError if their layouts differ. Arrays with one channel or one position have both layouts.
    """
    if all(a.flags.c_contiguous for a in arrays):
        return False
    if all(lies_channels_last(a) for a in arrays):
        return True
    raise DeviceError(
        f"arrays lie in different orders: {', '.join(f'{a.shape} by {a.strides}' for a in arrays)}"
    )


def lies_channels_last(a: Array) -> bool:
    """Return True if an (N, C, ...) array fills its memory in the order (N, ..., C)."""
    shape = a.shape[:1] + a.shape[2:] + a.shape[1:2]
    strides = a.strides[:1] + a.strides[2:] + a.strides[1:2]
    return all(
        size == 1 or stride == a.itemsize * prod(shape[axis + 1 :])
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )


def planes(x: Array) -> tuple[int, int, int]:
    """Return (outer, C, inner) of an (N, C, ...) array in its memory: (N * P, C, 1) where the
    channels lie last.
    """
    images, channels = x.shape[:2]
    positions = prod(x.shape[2:])
    if positions == 1 or channels_last(x):
        return images * positions, channels, 1
    return images, channels, positions


def launch(file: str, name: str, like: Array, threads: int, *arguments: Any) -> None:
    """Launch the template `name` for the element type of `like` with about this many threads;
    nothing for none.
    """
    launch_expression(file, f"{name}<{c_type(like)}>", threads, *arguments)


def launch_expression(file: str, expression: str, threads: int, *arguments: Any) -> None:
    """Launch a template with all its arguments, such as `foo<float, 4>`."""
    if threads > 0:
        kernel(file, expression)((min(-(-threads // THREADS), MOST),), (THREADS,), arguments)


def launch_each(file: str, name: str, arrays: tuple[Array, ...], *arguments: Any) -> None:
    """Launch the template `name` over the elements of arrays of one type, size and layout."""
    x = alike(*arrays)
    launch(file, name, x, packs(x), *arrays, x.size, *arguments)


def alike(x: Array, *others: Array) -> Array:
    """Return x after checking type, size and layout of the others."""
    assert all(a.dtype == x.dtype and a.size == x.size for a in others)
    channels_last(x, *others)  # raises if their layouts differ
    return x


def launch_blocks(
    file: str,
    name: str,
    like: Array,
    blocks: int,
    *arguments: Any,
    threads: int = THREADS,
    variant: str = "",
) -> None:
    """Launch the template `name` for the element type of `like`, with further arguments of the
    template such as ", 1, 0", with exactly this many blocks.
    """
    if blocks > 0:
        kernel(file, f"{name}<{c_type(like)}{variant}>")((blocks,), (threads,), arguments)


def launch_rows(file: str, name: str, x: Array, *arguments: Any) -> None:
    """Launch a block for each row of x (outer, C, 1)."""
    if x.size:
        threads = min(THREADS, -(-x.shape[1] // 32) * 32)
        launch_blocks(file, name, x, len(x), *arguments, threads=threads)


def launch_reduce(file: str, name: str, like: Array, worth: int, *arguments: Any) -> None:
    """Launch the template `name` for the element type of `like` in about `worth` blocks, at least
    one: the last one to finish makes one result of all, in the order of blocks (block_reduce.cuh).
    """
    blocks = max(1, min(worth, MOST_SUMS))
    partial = scratch("loss", 3 * blocks)
    launch_blocks(file, name, like, blocks, *arguments, partial, arrivals())


def arrivals(count: int = 1) -> Array:
    """Return numbers of finished blocks, `count` or more, which are 0 before and after a launch on
    this stream.
    """
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    known = _arrivals.setdefault(key, [])  # a captured graph may know any of them
    if not known or known[-1].size < count:
        known.append(cupy.zeros(count, np.uint64))
    return known[-1]


def packs(x: Array) -> int:
    """Return the number of threads that take 16 bytes of x each."""
    return -(-int(x.nbytes) // 16)


def scratch(purpose: str, size: int) -> Array:
    """Return float64 memory, valid until the next call with this purpose on this stream."""
    return context().array(purpose, (size,), np.float64)


def number(value: Any) -> tuple[float, int, int]:
    """Return three arguments of a kernel for a Python number, or for an array without axes that is
    read when it runs.
    """
    if hasattr(value, "data") and hasattr(value.data, "ptr"):
        return 0.0, value.data.ptr, _KINDS[value.dtype.name]
    return float(value), 0, 0


def divisor(d: int) -> int:
    """Return an argument of a kernel that divides by d; see Divisor in pack.cuh.

    n // d = n * m >> 31 + p for n < 2^31; 2^p is the smallest power of two >= d, m = 2^(31 + p) / d
    rounded up.
    """
    p = (d - 1).bit_length()
    return (p - 1) << 32 | -(-(1 << 31 + p) // d) if d > 1 else 0
