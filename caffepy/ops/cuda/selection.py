"""Gather and scatter-add of rows, and the largest values."""

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import THREADS, Array, c_type, launch, launch_reduce, launch_rows

EACH = 4
"""Elements of a thread."""


def take_rows(x: Array, index: Array, cut: bool, y: Array, wrong: Array) -> None:
    arguments = (x, index, y, index.size, *x.shape, int(cut), wrong)
    launch_reduce("selection", "take_rows", x, -(-y.size // (EACH * THREADS)), *arguments)


def add_rows(dy: Array, index: Array, dx: Array) -> None:
    if dy.size and dx.size:
        stripes = min(-(-dx.shape[1] // (EACH * THREADS)), 65535)
        arguments = (dy, index, dx, index.size, *dx.shape)
        kernel("selection", f"add_rows<{c_type(dx)}>")((index.size, stripes), (THREADS,), arguments)


def top_values(x: Array, top_k: int, places: bool, values: bool, y: Array) -> None:
    outer, _, inner = x.shape
    arguments = (x, y, *x.shape, int(top_k), int(places), int(values))
    if inner > 1:
        launch("selection", "top_planes", x, outer * inner, *arguments)
    else:
        launch_rows("selection", "top_rows", x, *arguments)
