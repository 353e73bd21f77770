"""CRF-as-RNN: labels of pixels that agree with their neighbours and with pixels of like colours."""

import os
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError, DataError, reason
from caffepy.core.files import locate
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.ops.objects import Lattice

FILES = "spatial.par", "bilateral.par"
"""Files from which CRF-as-RNN reads the weights of the two filters, a number for each class."""

TINY = 1e-20

FARTHEST = 1 << 17
"""Distance at which float32 still places a point in its simplex, to some percent of it; images lie
near 100. From 2^25 on it takes another one.
"""


@layer("MultiStageMeanfield")
class MultiStageMeanfield(Layer):
    """Unary (N, C, H, W), the first Q (N, C, H, W), image (N, 3, H, W) -> (N, C, H, W)
    (Zheng et al. 2015); weights of the spatial and of the bilateral filter and compatibility
    (1, 1, C, C).

    In each of num_iterations P = softmax(Q), Q = unary - compatibility @ (spatial @ S P +
    bilateral @ B P). S and B blur the planes of P by Gaussians, normalized, on permutohedral
    lattices: S of places / theta_gamma, B of places / theta_alpha and colours / theta_beta. The
    image's gradient is 0. Its lattice is made on the host, so a step is not captured.

    Weights of the filters begin as those of FILES, if they are there, on the diagonal, else as
    spatial_filter_weight and bilateral_filter_weight; the compatibility as -1 there.
    """

    on_gpu = always_reshape = True
    bottoms = 3

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.multi_stage_meanfield_param
        if param.num_iterations < 2:
            raise ConfigError(
                "multi_stage_meanfield_param: num_iterations must be 2 or more, not "
                f"{param.num_iterations}"
            )
        thetas = param.theta_alpha, param.theta_beta, param.theta_gamma
        if not all(theta > 0 for theta in thetas):
            raise ConfigError(
                "multi_stage_meanfield_param: theta_alpha, theta_beta and theta_gamma must be "
                f"above 0, not {', '.join(f'{theta:g}' for theta in thetas)}"
            )
        self.size: tuple[int, ...] = ()
        channels = bottom[0].shape[1] if len(bottom[0].shape) == 4 else 0
        shape = (1, 1, channels, channels)
        if not self.blobs:
            weights = param.spatial_filter_weight, param.bilateral_filter_weight
            diagonals = [
                _numbers(locate(name, self.path), weight, channels)
                for name, weight in zip(FILES, weights, strict=True)
            ]
            for diagonal in (*diagonals, np.full(channels, -1.0)):
                self.add_blob(shape).host_data[0, 0] = np.diag(diagonal)
        names = "spatial", "bilateral", "compatibility"
        self.make_params(dict.fromkeys(names, shape), ())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        unary, first, image = (blob.shape for blob in bottom)
        if len(unary) != 4 or first != unary or image != (unary[0], 3, *unary[2:]):
            raise ConfigError(
                "MultiStageMeanfield needs (N, C, H, W) twice and (N, 3, H, W), not "
                f"{list(unary)}, {list(first)} and {list(image)}"
            )
        if self.blobs[0].shape[2] != unary[1]:
            raise ConfigError(f"{unary[1]} classes do not fit {self.blobs[0].shape[2]} weights")
        for name in ("theta_alpha", "theta_gamma"):
            theta, last = getattr(self.settings, name), max(*unary[2:], 1) - 1
            if last / theta > FARTHEST:
                raise ConfigError(
                    f"multi_stage_meanfield_param: {name} {theta:g} is too small for planes of "
                    f"{unary[2]} x {unary[3]}: places / {name} reach {last / theta:g}, the lattice "
                    f"takes {FARTHEST} at most; raise {name}"
                )
        top[0].reshape(unary)
        count = self.settings.num_iterations
        # of each iteration P, and it blurred by both filters
        self.kept = [[self.buffer(unary) for _ in range(3)] for _ in range(count)]
        self.parts = [self.buffer(unary) for _ in range(3)]

    def lattice(self, features: Array) -> tuple[Lattice, Array]:
        """Return the lattice of points (P, d), and what it is divided by: its sums of ones."""
        lattice = self.ops.Lattice(features, self.device)
        ones, sums = (self.buffer((1, len(features))) for _ in range(2))
        ones.data.fill(1)
        lattice.filter(ones.data, sums.data)
        return lattice, 1 / (sums.data + TINY)

    def lattices(self, image: Array) -> None:
        """Make the lattices for images (N, 3, H, W) on the host.

        DataError for values that are not finite or too far apart for theta_beta.
        """
        param, (h, w) = self.settings, image.shape[2:]
        most = float(np.abs(image).max(initial=0))
        if not np.isfinite(most):
            raise DataError("the image has values that are not finite")
        if most / param.theta_beta > FARTHEST:
            raise DataError(
                f"the image has values up to +-{most:g}: divided by "
                f"theta_beta {param.theta_beta:g} they reach {most / param.theta_beta:g}, the "
                f"lattice takes {FARTHEST} at most; scale the image or raise theta_beta"
            )
        places = np.indices((h, w), np.float32)[::-1].reshape(2, -1).T  # x, y
        if self.size != (h, w):
            self.spatial = self.lattice(places / np.float32(param.theta_gamma))
            self.size = h, w
        self.bilateral = []
        for colours in image.reshape(len(image), 3, h * w):
            of_places = places / np.float32(param.theta_alpha)
            of_colours = colours.T / np.float32(param.theta_beta)
            self.bilateral.append(self.lattice(np.hstack([of_places, of_colours])))

    def filters(self, n: int) -> list[tuple[Lattice, Array]]:
        """Return the lattices of image n and their norms."""
        return [self.spatial, self.bilateral[n]]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.lattices(bottom[2].host_data)
        unary, q = bottom[0].data, bottom[1].data
        n, c, h, w = unary.shape
        flat = n, c, h * w
        spatial, bilateral, compatibility = (blob.data[0, 0] for blob in self.blobs)
        for p, *blurred in self.kept:
            self.ops.softmax_forward(q.reshape(flat), p.data.reshape(flat))
            q = top[0].data
            for i in range(n):
                planes = [blob.data[i].reshape(flat[1:]) for blob in (p, *blurred)]
                for (lattice, norm), plane in zip(self.filters(i), planes[1:], strict=True):
                    lattice.filter(planes[0], plane)
                    plane *= norm
                message = spatial @ planes[1] + bilateral @ planes[2]
                own, result = unary[i].reshape(flat[1:]), q[i].reshape(flat[1:])
                np.subtract(own, compatibility @ message, out=result)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        n, c, h, w = bottom[0].shape
        flat = n, c, h * w
        spatial, bilateral, compatibility = (blob.data[0, 0] for blob in self.blobs)
        dspatial, dbilateral, dcompatibility = (blob.diff[0, 0] for blob in self.blobs)
        dq, dp, dunary = (blob.data for blob in self.parts)
        dq[...] = top[0].diff
        dunary.fill(0)
        for p, *blurred in reversed(self.kept):
            dunary += dq
            dp.fill(0)
            for i in range(n):
                by_place, by_colour = (blob.data[i].reshape(flat[1:]) for blob in blurred)
                dpairs = -dq[i].reshape(flat[1:])
                message = spatial @ by_place + bilateral @ by_colour
                dmessage = compatibility.T @ dpairs
                for k, (gradient, left, right) in enumerate(
                    (
                        (dspatial, dmessage, by_place),
                        (dbilateral, dmessage, by_colour),
                        (dcompatibility, dpairs, message),
                    )
                ):
                    if self.param_propagate_down[k]:
                        gradient += left @ right.T
                for weights, (lattice, norm) in zip(
                    (spatial, bilateral), self.filters(i), strict=True
                ):
                    lattice.filter(
                        (weights.T @ dmessage) * norm, dp[i].reshape(flat[1:]), transposed=True
                    )
            self.ops.softmax_backward(p.data.reshape(flat), dp.reshape(flat), dq.reshape(flat))
        for wanted, blob, gradient in zip(propagate_down, bottom, (dunary, dq, 0), strict=True):
            if wanted:
                blob.diff[...] = gradient


def _numbers(path: str, default: float, count: int) -> Array:
    """Return the first `count` numbers of a file, or `default` as often if there is no file."""
    if not os.path.exists(path):
        return np.full(count, default)
    try:
        with open(path, encoding="utf-8") as file:
            numbers = [float(word) for word in file.read().split()[:count]]
    except OSError as error:
        raise ConfigError(f"cannot be read: {reason(error)}", path) from None
    except ValueError as error:
        raise ConfigError(f"needs a number for each class: {error}", path) from None
    if len(numbers) < count:
        raise ConfigError(f"has {len(numbers)} numbers; {count} classes need one each", path)
    return np.array(numbers)
