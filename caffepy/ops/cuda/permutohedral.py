"""Gaussian filters of many dimensions, by a lattice that the host makes."""

import cupy
import numpy as np

from caffepy.device.cuda import CudaDevice
from caffepy.ops.cuda.launch import Array, launch


class Lattice:
    def __init__(self, features: Array, device: CudaDevice) -> None:
        from caffepy.ops.cpu.permutohedral import lattice_of  # with the CPU's kernels

        corners, weights, neighbours = lattice_of(features)
        self._count = neighbours.shape[1]
        # Each corner adds up what its points give, in their order: sums do not depend on chance.
        order = np.argsort(corners, axis=None, kind="stable")
        starts = np.searchsorted(corners.reshape(-1)[order], np.arange(self._count + 1))
        arrays = corners, weights, neighbours, order.astype(np.int32), starts.astype(np.int32)
        with device.scope():
            self._arrays = [cupy.asarray(array) for array in arrays]

    def filter(self, x: Array, y: Array, transposed: bool = False) -> None:
        corners, weights, neighbours, order, starts = self._arrays
        channels, points = x.shape
        ends, count = weights.shape[1], self._count
        old, new = cupy.empty((channels, count), x.dtype), cupy.empty((channels, count), x.dtype)
        sizes = channels, points, count, ends
        launch("permutohedral", "splat", x, old.size, x, order, starts, weights, old, *sizes)
        for k in range(ends):
            axis = ends - 1 - k if transposed else k
            launch("permutohedral", "blur", x, old.size, old, neighbours[axis], new, *sizes)
            old, new = new, old
        arguments = old, corners, weights, y, *sizes, int(transposed)
        launch("permutohedral", "slice", x, x.size, *arguments)
