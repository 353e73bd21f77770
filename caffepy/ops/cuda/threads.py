"""What the CPU's back end does to host threads does nothing here: a GPU has threads of its own."""

from contextlib import AbstractContextManager, nullcontext


def set_num_threads(n: int) -> None:
    assert n > 0


def blas_scope() -> AbstractContextManager[None]:
    return nullcontext()
