"""A function of ops.cuda against the one of ops.cpu: called, and captured and replayed."""

from typing import Any

import numpy as np

Tolerance = tuple[float, float]  # relative, absolute

EXACT: Tolerance = (0, 0)
CLOSE: Tolerance = (1e-5, 1e-6)


def copied(value: Any, take: Any, seen: dict[int, Any]) -> Any:
    """The value with every numpy array in it replaced by take(array), each of them once."""
    if isinstance(value, np.ndarray):
        return seen.setdefault(id(value), take(value))
    if hasattr(value, "_replace"):
        return type(value)(*(copied(v, take, seen) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v, take, seen) for v in value)
    return value


def arrays(value: Any) -> list[np.ndarray]:
    """The arrays in a value, on the host."""
    if hasattr(value, "get"):
        return [value.get()]
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in arrays(v)]
    return [np.asarray(value)] if isinstance(value, (np.ndarray, np.generic, int, float)) else []


def compare(expected: Any, actual: Any, tolerance: Tolerance, what: str) -> None:
    rtol, atol = tolerance
    left, right = arrays(expected), arrays(actual)
    assert len(left) == len(right)
    for i, (e, a) in enumerate(zip(left, right, strict=True)):
        if e.dtype.kind == "f":
            np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=f"{what}, array {i}")
        else:
            np.testing.assert_array_equal(a, e, err_msg=f"{what}, array {i}")


def agree(name: str, *arguments: Any, tolerance: Tolerance = CLOSE) -> None:
    """Call both functions on copies of the arguments; all arrays and results must agree, after a
    replay too.
    """
    import cupy

    from caffepy.ops import cpu, cuda

    on_cpu = copied(arguments, np.copy, {})
    expected = (on_cpu, getattr(cpu, name)(*on_cpu))
    function = getattr(cuda, name)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        on_gpu = copied(arguments, cupy.asarray, {})
        result = function(*on_gpu)
        stream.synchronize()
        compare(expected, (on_gpu, result), tolerance, f"{name}, called")
        on_gpu = copied(arguments, cupy.asarray, {})
        stream.begin_capture()
        result = function(*on_gpu)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        compare(expected, (on_gpu, result), tolerance, f"{name}, replayed")


def data(shape: Any, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
