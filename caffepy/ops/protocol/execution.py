"""Threads of the host, compilation and time."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from caffepy.ops import objects


class ExecutionOps(Protocol):
    def PhaseTimer(self, device: Any) -> objects.PhaseTimer:
        """Make the phase timer of a solver."""

    def Stopwatch(self) -> objects.Stopwatch:
        """Make a stopwatch of operations."""

    def set_num_threads(self, n: int) -> None:
        """Compute with n host threads; nothing on a GPU."""

    def blas_scope(self) -> AbstractContextManager[None]:
        """Return a block in which BLAS keeps to the calling thread; nothing on a GPU."""

    def compile_ahead(self) -> AbstractContextManager[None]:
        """Return a block in which a GPU compiles the kernels of all calls, without launching them:
        for calls that do nothing but launch some. Nothing on the CPU.
        """
