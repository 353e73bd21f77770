"""Matrix products by cuBLAS; small ones by a kernel of product.cu if it is faster, and sums of few
outer products by those of outer_products.cu: a captured step may make the same sums there.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import gcd

import numpy as np

from caffepy.device import cublas, math_mode
from caffepy.ops.cuda import autotune, outer_products
from caffepy.ops.cuda.compiler import kernel, looks_ahead, prefetch
from caffepy.ops.cuda.context import capability, context
from caffepy.ops.cuda.copies import convert
from caffepy.ops.cuda.launch import BLOCKS, THREADS, Array, c_type, launch_blocks
from caffepy.ops.cuda.neuron import bias_act_forward

SMALL, TILE, EDGE = 1 << 25, 16, 32
"""Up to this many multiplications product.cu is tried; rows and columns of a product that a block
of its kernels makes, without and with tensor cores.
"""

NEAR = 1.2
"""Of products of two factors that are no transposed views, as of a gradient of data, our kernel is
taken up to this many times cuBLAS's time: one that takes 7 us alone takes 17 in a step, ours 8.
"""

LAUNCHES = 10
"""The host takes as long for a product with its conversion and bias as for this many kernels, while
others are compiled.
"""

_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "uint16": 14}  # cudaDataType_t
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70  # cublasComputeType_t


def matmul(a: Array, b: Array, out: Array, accumulate: bool = False, scale: float = 1.0) -> None:
    assert a.shape[1] == b.shape[0]
    assert out.shape == (a.shape[0], b.shape[1])
    assert a.dtype == b.dtype
    assert out.dtype in (a.dtype, np.float32)
    if not out.size:
        return
    if not a.size:
        if not accumulate:
            out.fill(0)
        return
    if outer_products.suits_product(a, b, out):
        outer_products.multiply(a, b, out, accumulate, scale)
        return
    own = _own_way(a, b, out, accumulate) if scale == 1 and _is_small(a, b, out) else None
    if own is not None:
        own(a, b, out, accumulate)
    elif not looks_ahead():
        _multiply(a, b, out, accumulate, scale)


def _layout(x: Array) -> tuple[bool, int]:
    """Return True if x is a transposed view, and its leading dimension."""
    rows, columns = x.shape
    down, across = (stride // x.itemsize for stride in x.strides)
    if (across == 1 or columns == 1) and (rows == 1 or down >= columns):
        return False, columns if rows == 1 else down
    assert down == 1 or rows == 1, f"strides {x.strides} of {x.shape}"
    assert columns == 1 or across >= rows, f"strides {x.strides} of {x.shape}"
    return True, rows if columns == 1 else across


def _multiply(a: Array, b: Array, out: Array, accumulate: bool, scale: float = 1.0) -> None:
    turned, ldc = _layout(out)
    if turned:
        a, b, out = b.T, a.T, out.T
    (ta, lda), (tb, ldb) = _layout(a), _layout(b)
    (m, n), k = out.shape, a.shape[1]
    kind = _DATA_TYPES[a.dtype.name]
    # cuBLAS reads alpha and beta from host memory, before the call returns.
    alpha = np.array([scale, accumulate], np.float64 if a.dtype == np.float64 else np.float32)
    beta = alpha.ctypes.data + alpha.itemsize
    # cuBLAS is column-major: it sees each array transposed and computes out.T (N, M) = b.T @ a.T.
    sizes = (int(tb), int(ta), n, m, k)
    factors = (b.data.ptr, kind, ldb, a.data.ptr, kind, lda)
    result = (out.data.ptr, _DATA_TYPES[out.dtype.name], ldc)
    handle, how = context().cublas, _compute_type(a)
    cublas.gemm(handle, *sizes, alpha.ctypes.data, *factors, beta, *result, how)


def _compute_type(a: Array) -> int:
    if a.dtype == np.float64:
        return _COMPUTE_64F
    exact = a.dtype != np.float32 or math_mode.current().precision == "fp32"
    return _COMPUTE_32F if exact else _COMPUTE_32F_FAST_TF32


def _is_small(a: Array, b: Array, out: Array) -> bool:
    """Return True if product.cu can compute the product and may be the faster one."""
    if a.dtype == np.float64 or out.size * a.shape[1] > SMALL or max(out.shape) >= 1 << 19:
        return False
    return all(
        n * s < 1 << 31 for x in (a, b, out) for n, s in zip(x.shape, x.strides, strict=True)
    )


def _own_way(a: Array, b: Array, out: Array, accumulate: bool) -> autotune.Run | None:
    """Return what runs a kernel of product.cu, if one is the fastest; in a block of `compile_ahead`
    None.
    """
    factors = f"{a.shape} {a.strides} {b.shape} {b.strides}"
    name = f"product {factors} {out.strides} {out.dtype.name} {accumulate}"
    there = context().array("product", out.shape, out.dtype) if autotune.may_time() else out
    kinds = [(_small_product(a, out), _multiply_small)]
    if a.itemsize == 2 and capability() >= 80:
        kinds.append((_square_product(a, b, out), _multiply_squares))

    def make(expression: str, run: autotune.Run) -> autotune.Run:
        prefetch("product", [expression])
        return run

    candidates: list[autotune.Make] = [lambda: _multiply, *(partial(make, *kind) for kind in kinds)]
    better = autotune.BETTER if _layout(a)[0] or _layout(b)[0] else NEAR
    given = a, b, there, accumulate
    found = autotune.fastest(name, a.dtype, candidates, given, 1, better)
    return None if found is None or found[0] == 0 else found[1]


def _small_product(a: Array, out: Array) -> str:
    return f"small_product<{c_type(a)}, {c_type(out)}>"


def _multiply_small(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    (m, n), k = out.shape, a.shape[1]
    strides = (stride // x.itemsize for x in (a, b, out) for stride in x.strides)
    numbers = (np.int32(number) for number in (m, n, k, accumulate, *strides))
    kernel("product", _small_product(a, out))(
        (-(-n // TILE), -(-m // TILE)), (THREADS,), (a, b, out, *numbers)
    )


def _square_product(a: Array, b: Array, out: Array) -> str:
    """Return the kernel for factors in numbers of 16 bits, b perhaps float32: it says whether their
    lines are along the depth, and how many numbers of a line are loaded at a time.
    """
    lines = []
    for x, across_if in ((a, True), (b, False)):
        turned, pitch = _layout(x)
        together = gcd(16 // x.itemsize, x.shape[not turned], pitch, x.data.ptr // x.itemsize)
        lines.append(f"{str(turned != across_if).lower()}, {together}")
    types = c_type(a), c_type(out), c_type(b)
    return f"square_product<{', '.join([*types, *lines])}>"


def _multiply_squares(
    a: Array,
    b: Array,
    out: Array,
    accumulate: bool,
    narrow: Array | None = None,
    bias: Array | None = None,
    relu: bool = False,
) -> None:
    (m, n), k = out.shape, a.shape[1]
    strides = (stride // out.itemsize for stride in out.strides)
    numbers = (m, n, k, accumulate, _layout(a)[1], _layout(b)[1], *strides, relu)
    arrays = a, b, out, narrow, bias
    kernel("product", _square_product(a, b, out))(
        (-(-n // EDGE), -(-m // EDGE)), (THREADS,), (*arrays, *map(np.int32, numbers))
    )


def inner_product(
    x: Array, w: Array, narrow: Array | None, b: Array | None, relu: bool, y: Array
) -> None:
    factor = w if narrow is None else narrow

    def apart(
        x: Array, w: Array, narrow: Array | None, b: Array | None, relu: bool, y: Array
    ) -> None:
        if narrow is not None:
            turned, _ = _layout(w)
            convert(*((w.T, narrow.T) if turned else (w, narrow)))
        matmul(x, factor, y)
        bias_act_forward(y, b, relu, 0.0, 0, None)

    arrays = x, w, narrow, b, relu, y
    if x.itemsize > 2 or capability() < 80 or not x.size or not _is_small(x, factor, y):
        apart(*arrays)
        return
    factors = f"{x.shape} {x.strides} {w.shape} {w.strides} {w.dtype.name}"
    name = f"inner product {factors} {y.dtype.name} {b is not None} {relu}"

    def together() -> autotune.Run:
        prefetch("product", [_square_product(x, w, y)])
        return lambda x, w, narrow, b, relu, y: _multiply_squares(x, w, y, False, narrow, b, relu)

    if looks_ahead():
        apart(*arrays)
    found = autotune.fastest(name, x.dtype, [lambda: apart, together], arrays, LAUNCHES)
    if found is not None:
        found[1](*arrays)


def add_into(x: Array, out: Array, scale: float = 1.0) -> None:
    """out += scale * x; both contiguous and of one type."""
    blocks = max(1, min(4 * BLOCKS, -(-out.size // (4 * THREADS))))
    launch_blocks("blas", "accumulate", out, blocks, x, out, out.size, float(scale))


def set_num_threads(n: int) -> None:
    assert n > 0


def blas_scope() -> AbstractContextManager[None]:
    return nullcontext()  # host threads change nothing on a GPU
