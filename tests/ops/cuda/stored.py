"""A function of ops.cuda on arrays of any element type and order against that of ops.cpu on the
same numbers.
"""

from typing import Any

import numpy as np

from caffepy.device.blob import Layout, from_bfloat16

Tolerance = tuple[float, float]  # relative, absolute

TOLERANCE: dict[str, Tolerance] = {
    "float32": (1e-5, 1e-6),
    "float64": (1e-12, 1e-13),
    "float16": (6e-4, 1e-6),  # half of its last bit is 2^-11
    "uint16": (5e-3, 1e-6),  # bfloat16: 2^-8
}


class Activation:
    """Values that a GPU stores in the type and order of the case; what is no Activation stays as it
    is.
    """

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float32)


def stored(values: Any, kind: str, channels_last: bool = False) -> Any:
    """A CuPy array of these values, rounded."""
    import cupy

    layout = Layout(np.dtype(kind), channels_last)
    flat = np.empty(np.size(values), kind)
    layout.write(np.asarray(values, np.float32), flat)
    return layout.view(cupy.asarray(flat), np.shape(values))


def loaded(array: Any) -> np.ndarray:
    """The values of a CuPy array."""
    host = array.get()
    return from_bfloat16(host) if host.dtype == np.uint16 else host


def rounded(values: Any, kind: str) -> np.ndarray:
    """The values as stored, in a type that the CPU computes in."""
    flat = np.empty(np.size(values), kind)
    Layout(np.dtype(kind), False).write(np.asarray(values, np.float32), flat)
    back = (
        from_bfloat16(flat)
        if kind == "uint16"
        else flat.astype(np.float64 if kind == "float64" else np.float32)
    )
    return back.reshape(np.shape(values))


def leaves(values: list[Any]) -> list[Any]:
    """Return the items of a list and of the lists in it."""
    return [leaf for v in values for leaf in (leaves(v) if isinstance(v, list) else [v])]


def agree(
    name: str, kind: str, *arguments: Any, last: bool = False, tolerance: Tolerance | None = None
) -> None:
    """Call both functions, the GPU's once more in a capture that is replayed; all arrays must
    agree.

    Arrays that are no Activation are parameters or sums, which are double for doubles. An argument
    that is given twice is one array.
    """
    import cupy

    from caffepy.ops import cpu, cuda

    sums = np.float64 if kind == "float64" else np.float32

    def on_cpu(value: Any) -> Any:
        if isinstance(value, Activation):
            return rounded(value.values, kind)
        return (
            value.astype(sums if value.dtype.kind == "f" else value.dtype)
            if isinstance(value, np.ndarray)
            else value
        )

    def on_gpu(value: Any) -> Any:
        if isinstance(value, Activation):
            return stored(value.values, kind, last)
        return cupy.asarray(on_cpu(value)) if isinstance(value, np.ndarray) else value

    def taken(take: Any) -> list[Any]:
        made: dict[int, Any] = {}

        def of(value: Any) -> Any:
            if isinstance(value, list):
                return [of(v) for v in value]
            return made.setdefault(id(value), take(value))

        return [of(a) for a in arguments]

    def compare(what: str) -> None:
        for i, (want, have) in enumerate(zip(leaves(expected), leaves(actual), strict=True)):
            if isinstance(want, np.ndarray):
                relative, absolute = tolerance or TOLERANCE[kind]
                if want.dtype.kind != "f":
                    relative = absolute = 0
                text = f"{name}, {kind}, {what}, argument {i}"
                np.testing.assert_allclose(loaded(have), want, relative, absolute, err_msg=text)

    expected = taken(on_cpu)
    getattr(cpu, name)(*expected)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        actual = taken(on_gpu)
        getattr(cuda, name)(*actual)
        stream.synchronize()
        compare("called")
        actual = taken(on_gpu)
        stream.synchronize()
        stream.begin_capture()
        getattr(cuda, name)(*actual)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        compare("replayed")
