"""Files of one array, written row by row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from caffepy.core.errors import DataError
from caffepy.device.blob import Array, shape_string


@contextmanager
def new_npy(path: str) -> Iterator[Callable[[Array], None]]:
    """A new .npy file of float32: call what the block gets with rows (N, ...); it is whole when the
    block ends.

    DataError for rows of another shape than the first. Memory holds no rows.
    """
    count, shape = 0, None
    with open(path, "w+b") as file:

        def head() -> None:
            file.seek(0)
            describes = {"descr": "<f4", "fortran_order": False, "shape": (count, *(shape or ()))}
            np.lib.format.write_array_header_1_0(
                file, describes
            )  # leaves room for any number of rows

        def add(rows: Array) -> None:
            nonlocal count, shape
            if shape is None:
                shape = rows.shape[1:]
                head()
            if rows.shape[1:] != shape:
                raise DataError(
                    f"rows of {shape_string(rows.shape[1:])} follow rows of {shape_string(shape)}"
                )
            file.write(np.ascontiguousarray(rows, "<f4").data)
            count += len(rows)

        yield add
        head()
