"""Settings of host threads: they change nothing on a GPU."""

from contextlib import AbstractContextManager, nullcontext


def set_num_threads(n: int) -> None:
    assert n > 0


def blas_scope() -> AbstractContextManager[None]:
    return nullcontext()
