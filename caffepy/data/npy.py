"""Files of one array, written row by row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from caffepy.core.errors import DataError
from caffepy.device.blob import Array, shape_string


@contextmanager
def new_npy(path: str) -> Iterator[Callable[[Array], None]]:
    """Write a .npy file of float32. The block receives a function that appends rows (N, ...); the
    file is complete when the block ends.

    DataError for rows of another shape than the first. No rows are kept in memory.
    """
    count, shape = 0, None
    with open(path, "w+b") as file:

        def head() -> None:
            file.seek(0)
            describes = {"descr": "<f4", "fortran_order": False, "shape": (count, *(shape or ()))}
            # numpy pads the header, so that it has room for any number of rows
            np.lib.format.write_array_header_1_0(file, describes)

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
