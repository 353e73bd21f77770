"""Matrix products by cuBLAS, or by cuDNN where nvmath is not installed; biases by kernels of our own."""

from functools import cache
from typing import Any

import numpy as np

from caffepy.errors import DeviceError
from caffepy.ops.cuda import plans, precision
from caffepy.ops.cuda.compiler import kernel

Array = Any  # cupy.ndarray

TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "uint16": "bf16_t"}
"""The C type of each element type, those of 16 bits as in pack.cuh; uint16 holds bfloat16."""

THREADS = 256
BLOCKS = 132 * 8
"""About as many blocks of 256 threads as a large device holds at a time."""

_R_32F, _R_64F = 0, 1  # cudaDataType
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70  # cublasComputeType_t
_FACTORS = {np.dtype(t): np.array([0, 1], t) for t in ("float32", "float64")}  # what cuBLAS reads alpha and beta from
_ZERO = {dtype: factors.ctypes.data for dtype, factors in _FACTORS.items()}


def c_type(array: Array) -> str:
    """The C name of an array's element type, for name expressions."""
    found = TYPES.get(array.dtype.name)
    if found is None:
        raise DeviceError(f"no GPU arithmetic for elements of type {array.dtype.name}")
    return found


@cache
def _import_cublas() -> Any:
    """nvmath's bindings, or None."""
    try:
        from nvmath.bindings import cublas
    except ImportError:
        return None
    return cublas


def matmul(a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
    """out = a @ b, or out += a @ b; (M, K) @ (K, N) -> (M, N), transposed views allowed."""
    assert a.shape[1] == b.shape[0]
    assert out.shape == (a.shape[0], b.shape[1])
    assert a.dtype == b.dtype == out.dtype
    if not out.size:
        return
    if not a.size:
        if not accumulate:
            out.fill(0)
        return
    cublas = _import_cublas()
    if cublas is None:
        _multiply_by_cudnn(a, b, out, accumulate)
    else:
        _multiply(cublas, a, b, out, accumulate)


def _layout(x: Array) -> tuple[bool, int]:
    """Whether rows of x lie across its columns in memory (a transposed view), and how far apart its lines are."""
    rows, columns = x.shape
    down, across = (stride // x.itemsize for stride in x.strides)
    if (across == 1 or columns == 1) and (rows == 1 or down >= columns):
        return False, columns if rows == 1 else down
    assert down == 1 or rows == 1, f"strides {x.strides} of {x.shape}"
    assert columns == 1 or across >= rows, f"strides {x.strides} of {x.shape}"
    return True, rows if columns == 1 else across


def _multiply(cublas: Any, a: Array, b: Array, out: Array, accumulate: bool) -> None:
    turned, ldc = _layout(out)
    if turned:
        a, b, out = b.T, a.T, out.T
    (ta, lda), (tb, ldb) = _layout(a), _layout(b)
    (m, n), k = out.shape, a.shape[1]
    if out.dtype == np.float32:
        kind = _R_32F
        compute = _COMPUTE_32F if precision.get() == "fp32" else _COMPUTE_32F_FAST_TF32
    else:
        kind, compute = _R_64F, _COMPUTE_64F
    zero = _ZERO[out.dtype]
    one = zero + out.itemsize
    # cuBLAS counts columns first: it sees each array transposed and computes out.T (N, M) = b.T @ a.T
    cublas.gemm_ex(
        plans.context().cublas(cublas),
        int(tb),
        int(ta),
        n,
        m,
        k,
        one,
        b.data.ptr,
        kind,
        ldb,
        a.data.ptr,
        kind,
        lda,
        one if accumulate else zero,
        out.data.ptr,
        kind,
        ldc,
        compute,
        -1,
    )


def _multiply_by_cudnn(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    target = plans.context().array("product", out.shape, out.dtype) if accumulate else out

    def build(cudnn: Any, graph: Any) -> Any:
        x, y = (graph.tensor(dim=[1, *t.shape], stride=[t.size, *(s // t.itemsize for s in t.strides)]) for t in (a, b))
        z = graph.matmul(x, y)
        z.set_output(True).set_data_type(graph.context.io_data_type).set_dim([1, *out.shape])
        z.set_stride([out.size, *(s // out.itemsize for s in target.strides)])
        return x, y, z

    name = f"matmul {a.shape} {a.strides} {b.shape} {b.strides} {target.strides}"
    plan = plans.find(name, out.dtype, build, (a, b, target))
    if plan is None:
        raise DeviceError(f"cuDNN has no plan for a product of {a.shape} and {b.shape}: pip install nvmath-python")
    plan.run(a, b, target)
    if accumulate:
        assert out.flags.c_contiguous
        add_into(target, out)


def _grid(size: int) -> tuple[int]:
    return (max(1, min(4 * BLOCKS, -(-size // (4 * THREADS)))),)


def add_into(x: Array, out: Array) -> None:
    """out += x; both contiguous."""
    kernel("blas", f"accumulate<{c_type(out)}>")(_grid(out.size), (THREADS,), (x, out, np.int64(out.size)))


def add_bias(y: Array, b: Array) -> None:
    """y[n, o, ...] += b[o]; y (M, O) or (N, O, P)."""
    if not y.size:
        return
    outputs = y.shape[1]
    arguments = (y, b, np.int64(y.size), np.int32(outputs), np.int32(y.size // (y.shape[0] * outputs)))
    kernel("blas", f"add_bias<{c_type(y)}>")(_grid(y.size), (THREADS,), arguments)


LINE = 1024
"""Elements of a plane that a warp adds up at a time."""


def bias_gradient(dy: Array, db: Array) -> None:
    """db[o] += sum of dy[n, o, ...]; dy (M, O) or (N, O, P). Shares of the sum first, then their sum."""
    if not dy.size:
        return
    images, outputs = dy.shape[:2]
    positions = dy.size // (images * outputs)
    kind = c_type(dy)
    if positions == 1:
        columns = -(-outputs // 32)
        shares = max(1, min(-(-images // 32), BLOCKS // columns))
        part = plans.context().array("sums", (outputs, shares), dy.dtype)
        sizes = (np.int32(n) for n in (images, outputs, shares))
        kernel("blas", f"bias_gradient_rows<{kind}>")((columns, shares), (THREADS,), (dy, part, *sizes))
    else:
        lines = images * -(-positions // LINE)
        shares = max(1, min(-(-lines // 8), BLOCKS // outputs))
        part = plans.context().array("sums", (outputs, shares), dy.dtype)
        sizes = (np.int32(n) for n in (images, outputs, positions, LINE, shares))
        kernel("blas", f"bias_gradient_planes<{kind}>")((outputs, shares), (THREADS,), (dy, part, *sizes))
    finish = kernel("blas", f"bias_gradient_finish<{kind}>")
    finish((-(-outputs // 8),), (THREADS,), (part, db, np.int32(outputs), np.int32(shares)))
