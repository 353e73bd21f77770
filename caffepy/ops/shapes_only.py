"""The back end of nets that are built to be looked at and never run: it loads no numba.

Layers ask it for the few things that decide shapes. Whatever else they ask for is the CPU's.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.device.blob import Layout
from caffepy.device.device import Device
from caffepy.ops.masks import mask_size
from caffepy.ops.objects import Windows

Sizes = Sequence[int]


class ShapesOnlyDevice(Device):
    """The CPU, for nets that are not run."""

    kind = "shapes only"
    runs = False
    writes_files = False


class Convolution:
    """The shapes of a convolution."""

    def __init__(self, x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], *_: Any) -> None:
        axes = zip(x_shape[2:], w_shape[2:], *window, strict=True)
        out = [(x + 2 * p - (d * (k - 1) + 1)) // s + 1 for x, k, s, p, d in axes]
        self.y_shape = (x_shape[0], w_shape[0], *out)

    def skips_gradient(self, layout: Layout) -> bool:
        """False: no room is planned for what only a backward pass skips."""
        return False

    def skips_output(self, layout: Layout) -> bool:
        """False: some GPUs skip outputs, all have room for them in the plan."""
        return False

    def pools(self, layout: Layout, window: Windows) -> bool:
        """False: some GPUs pool so, all have room for the output in the plan."""
        return False


class Unused:
    """An object that only a run would use."""

    def __init__(self, *_: Any) -> None:
        pass


class ShapesOnly:
    """Functions as in `protocol.Ops`; `is_cuda`: they give the sizes that a GPU needs."""

    Convolution = Convolution
    LSTM = RNN = Staging = Unused

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def pool_index_type(self, kernel: Sizes) -> "np.dtype[Any]":
        """A GPU stores places in small kernels in bytes."""
        return np.dtype(np.uint8 if self._is_cuda and prod(kernel) < 256 else np.int32)

    def mask_size(self, shape: Sizes, layout: Layout) -> int:
        """Only a GPU stores bits."""
        return mask_size(shape, layout) if self._is_cuda else 0

    def __getattr__(self, name: str) -> Any:
        from caffepy.ops import cpu

        return getattr(cpu, name)
