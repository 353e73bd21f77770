"""Filters of points in many dimensions."""

from typing import Any, Protocol

from caffepy.device.blob import Array
from caffepy.ops import objects


class PermutohedralOps(Protocol):
    def Lattice(self, features: Array, device: Any) -> objects.Lattice:
        """Make the permutohedral lattice of points (P, d), which lie on the host."""
