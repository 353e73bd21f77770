"""Memset nodes of captured CUDA graphs as kernels, by functions of the driver that CuPy lacks.

cuDNN sets a few bytes of its workspace to 0 before many of its kernels. Another engine of the GPU
does that for a memset node: between two kernels it takes some microseconds more than a kernel.
"""

import ctypes
import logging
from ctypes import c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from caffepy.device.gpus import import_cupy

log = logging.getLogger(__name__)

MOST = 1 << 16
"""Bytes up to which a kernel is faster than a memset node."""

KERNEL_NODE, MEMSET_NODE, PRIORITY = 0, 2, 8
"""CUgraphNodeType and CUlaunchAttributeID of the driver."""

THREADS, BLOCKS = 256, 16

SOURCE = r"""
extern "C" __global__ void clear(unsigned* words, int count) {
  for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) words[i] = 0;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: height lines of width elements."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v1."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
    )


class _DriverError(RuntimeError):
    """A call that failed."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _clear(gpu: int) -> Any:
    """The kernel, for the current GPU."""
    return import_cupy().RawKernel(SOURCE, "clear").kernel


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise _DriverError(f"{name} failed with status {status}")


def _nodes(name: str, of: c_void_p) -> Any:
    """Return an array of the nodes that a query gives."""
    count = c_size_t()
    _call(name, of, None, ctypes.byref(count))
    found = (c_void_p * count.value)()
    if count.value:
        _call(name, of, found, ctypes.byref(count))
    return found


def _is(node: c_void_p, kind: int) -> bool:
    found = ctypes.c_int()
    _call("cuGraphNodeGetType", node, ctypes.byref(found))
    return found.value == kind


def replace_memsets(graph: int, gpu: int) -> int:
    """Replace small memset nodes of a graph of this GPU by kernels; return their number.

    A node that the driver does not describe stays as it is.
    """
    replaced = 0
    try:
        nodes = map(c_void_p, _nodes("cuGraphGetNodes", c_void_p(graph)))
        for node in [node for node in nodes if _is(node, MEMSET_NODE)]:
            replaced += _replace(c_void_p(graph), node, _clear(gpu).ptr)
    except (OSError, AttributeError, _DriverError) as error:
        log.debug("memsets of a graph stay as they are: %s", error)
    return replaced


def _replace(graph: c_void_p, node: c_void_p, function: int) -> bool:
    """Put a kernel in place of a memset node, if it is small."""
    memset = _Memset()
    _call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    size = memset.element_size * memset.width
    if memset.height != 1 or memset.value or size % 4 or memset.address % 4 or size > MOST:
        return False
    before = _nodes("cuGraphNodeGetDependencies", node)
    after = _nodes("cuGraphNodeGetDependentNodes", node)
    given = ctypes.c_uint64(memset.address), ctypes.c_int(size // 4)
    arguments = (c_void_p * 2)(*(ctypes.addressof(value) for value in given))
    blocks = max(1, min(BLOCKS, size // 4 // THREADS))
    grid, block = ((c_uint * 3)(n, 1, 1) for n in (blocks, THREADS))
    kernel = _Kernel(function, grid, block, 0, ctypes.addressof(arguments), None)
    made = c_void_p()
    counted = before, c_size_t(len(before))
    _call("cuGraphAddKernelNode", ctypes.byref(made), graph, *counted, ctypes.byref(kernel))
    try:
        _take_place(graph, made, after)
    except _DriverError:
        _call("cuGraphDestroyNode", made)
        raise
    _call("cuGraphDestroyNode", node)
    return True


def _take_place(graph: c_void_p, made: c_void_p, after: Any) -> None:
    """Make nodes wait for a new one, which gets the priority of one of them."""
    many = (c_void_p * len(after))(*[made.value] * len(after))
    _call("cuGraphAddDependencies", graph, many, after, c_size_t(len(after)))
    for child in map(c_void_p, after):
        if _is(child, KERNEL_NODE):
            value = (ctypes.c_ubyte * 64)()
            _call("cuGraphKernelNodeGetAttribute", child, PRIORITY, value)
            _call("cuGraphKernelNodeSetAttribute", made, PRIORITY, value)
            break
