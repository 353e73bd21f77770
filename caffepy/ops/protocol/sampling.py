"""Resizing and sampling of maps."""

from typing import Protocol

from caffepy.device.blob import Array


class SamplingOps(Protocol):
    # Resizing of planes: x, dx (P, H, W), y, dy (P, Ho, Wo)

    def interp_forward(self, x: Array, y: Array) -> None:
        """Write y, bilinear, corners on corners: y[i] reads x at i * (H - 1) / (Ho - 1)."""

    def interp_backward(self, dy: Array, dx: Array) -> None:
        """Write dx, the transpose of `interp_forward`."""

    def affine_sample_forward(self, x: Array, theta: Array, y: Array) -> None:
        """Write y[s, t], bilinear, 0 outside: it reads x at ((u + 1) / 2 H, (v + 1) / 2 W), where
        (u, v) = theta (2, 3) @ (2 s / Ho - 1, 2 t / Wo - 1, 1).
        """

    def affine_sample_backward(self, dy: Array, theta: Array, dx: Array) -> None:
        """Write dx, the transpose of `affine_sample_forward`."""

    def affine_theta_gradient(self, dy: Array, x: Array, theta: Array, dtheta: Array) -> None:
        """Write dtheta (N, 6); at a whole pixel that pixel alone counts, with the slope 1."""
