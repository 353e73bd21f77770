"""CRF-as-RNN's and DeepLab's CRF: labels of pixels that agree with their neighbours and with pixels
of like colours.
"""

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

TINIEST = float(np.finfo(np.float32).tiny)
"""The least probability of which DenseCRF takes the logarithm."""

FARTHEST = 1 << 17
"""Distance at which float32 still places a point in its simplex, to some percent of it; images lie
near 100. From 2^25 on it takes another one.
"""


class MeanField(Layer):
    """Base: Gaussian filters on permutohedral lattices, which are made on the host."""

    on_gpu = always_reshape = True

    def lattice(self, features: Array) -> tuple[Lattice, Array]:
        """Return the lattice of points (P, d), and what it is divided by: its sums of ones."""
        lattice = self.ops.Lattice(features, self.device)
        ones, sums = (self.buffer((1, len(features))) for _ in range(2))
        ones.data.fill(1)
        lattice.filter(ones.data, sums.data)
        return lattice, 1 / (sums.data + TINY)


def check_places(message: str, name: str, theta: float, h: int, w: int) -> None:
    """ConfigError if places of a plane h x w lie too far apart, divided by `theta`, which has this
    name in this message.
    """
    farthest = (max(h, w, 1) - 1) / theta
    if farthest > FARTHEST:
        raise ConfigError(
            f"{message}: {name} {theta:g} is too small for planes of {h} x {w}: places / {name} "
            f"reach {farthest:g}, the lattice takes {FARTHEST} at most; raise {name}"
        )


def check_colours(name: str, theta: float, image: Array) -> None:
    """DataError if colours of an image are not finite, or too far apart, divided by `theta`."""
    most = float(np.abs(image).max(initial=0))
    if not np.isfinite(most):
        raise DataError("the image has values that are not finite")
    if most / theta > FARTHEST:
        raise DataError(
            f"the image has values up to +-{most:g}: divided by "
            f"{name} {theta:g} they reach {most / theta:g}, the "
            f"lattice takes {FARTHEST} at most; scale the image or raise {name}"
        )


def places_of(h: int, w: int) -> Array:
    """Return x and y of the places of a plane (h * w, 2)."""
    return np.indices((h, w), np.float32)[::-1].reshape(2, -1).T


@layer("MultiStageMeanfield")
class MultiStageMeanfield(MeanField):
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
            theta = getattr(self.settings, name)
            check_places("multi_stage_meanfield_param", name, theta, *unary[2:])
        top[0].reshape(unary)
        count = self.settings.num_iterations
        # of each iteration P, and it blurred by both filters
        self.kept = [[self.buffer(unary) for _ in range(3)] for _ in range(count)]
        self.parts = [self.buffer(unary) for _ in range(3)]

    def lattices(self, image: Array) -> None:
        """Make the lattices for images (N, 3, H, W) on the host.

        DataError for values that are not finite or too far apart for theta_beta.
        """
        param, (h, w) = self.settings, image.shape[2:]
        check_colours("theta_beta", param.theta_beta, image)
        places = places_of(h, w)
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


@layer("DenseCRF")
class DenseCRF(MeanField):
    """Scores (N, C, H, W), sizes (N, 1, 1, 2) -> (N, C, H, W); a third bottom is the image
    (N, 3, H, W) (DeepLab; Kraehenbuehl and Koltun 2011).

    P = softmax(scores); max_iter times P = softmax(scores + sum of w * filter(P)). Filters are
    Gaussians, normalized, on permutohedral lattices: pos_w of places / pos_xy_std, bi_w of
    places / bi_xy_std and colours / bi_rgb_std. The top is P, or its logarithm without
    output_probability; beyond the size of an image, height and width, it is 0. No gradient. The
    lattices are made on the host, so a step is not captured.
    """

    bottoms = (2, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.dense_crf_param
        given = {
            "pos_w": ("pos_w", "pos_xy_std"),
            "bi_w": ("bi_w", "bi_xy_std", "bi_rgb_std"),
        }
        for names in given.values():
            counts = {name: len(getattr(param, name)) for name in names}
            if len(set(counts.values())) > 1:
                each = ", ".join(f"{count} {name}" for name, count in counts.items())
                raise ConfigError(f"dense_crf_param needs as many of each of a filter, not {each}")
            for name in names[1:]:
                for value in getattr(param, name):
                    if not value > 0:
                        raise ConfigError(f"dense_crf_param: {name} must be above 0, not {value:g}")
        if len(bottom) == 3 and not param.bi_w:
            raise ConfigError(
                "dense_crf_param has no bi_w, bi_xy_std and bi_rgb_std for the image, the third "
                "bottom; give them, or leave the image out"
            )
        if param.max_iter < 0:
            raise ConfigError(f"dense_crf_param: max_iter must be 0 or more, not {param.max_iter}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        scores, sizes, *images = (blob.shape for blob in bottom)
        fit = len(scores) == 4 and sizes == (scores[0], 1, 1, 2)
        if not fit or (images and images[0] != (scores[0], 3, *scores[2:])):
            shapes = " and ".join(str(list(shape)) for shape in (scores, sizes, *images))
            raise ConfigError(
                "DenseCRF needs scores (N, C, H, W), sizes (N, 1, 1, 2) and the image "
                f"(N, 3, H, W), if any, not {shapes}"
            )
        for name in ("pos_xy_std", *(["bi_xy_std"] if images else [])):
            for theta in getattr(self.settings, name):
                check_places("dense_crf_param", name, theta, *scores[2:])
        top[0].reshape(scores)
        self.planes = [self.buffer((scores[1], scores[2] * scores[3])) for _ in range(4)]

    def filters(self, image: Array | None, h: int, w: int) -> list[tuple[float, Lattice, Array]]:
        """Return the weight, lattice and norm of each filter of an image of this size."""
        param, places = self.settings, places_of(h, w)
        features = [
            (weight, places / np.float32(std))
            for weight, std in zip(param.pos_w, param.pos_xy_std, strict=True)
        ]
        if image is not None:
            colours = image[:, :h, :w].reshape(3, -1).T
            for weight, near, alike in zip(
                param.bi_w, param.bi_xy_std, param.bi_rgb_std, strict=True
            ):
                check_colours("bi_rgb_std", alike, colours)
                parts = [places / np.float32(near), colours / np.float32(alike)]
                features.append((weight, np.hstack(parts)))
        return [(weight, *self.lattice(points)) for weight, points in features]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scores, sizes, result = bottom[0].data, bottom[1].host_data, top[0].data
        images = bottom[2].host_data if len(bottom) == 3 else [None] * len(scores)
        result.fill(0)
        c = scores.shape[1]
        for n, image in enumerate(images):
            height, width = sizes[n, 0, 0]
            if not (1 <= height < np.inf and 1 <= width < np.inf):
                raise DataError(
                    f"image {n} of the batch has {height:g} x {width:g} pixels by the second "
                    "bottom, which needs a height and a width of 1 or more for each image"
                )
            h, w = min(int(height), scores.shape[2]), min(int(width), scores.shape[3])
            own, p, q, message = (
                blob.data.reshape(-1)[: c * h * w].reshape(c, h * w) for blob in self.planes
            )
            own[...] = scores[n, :, :h, :w].reshape(c, h * w)
            filters = self.filters(image, h, w)
            self.ops.softmax_forward(own[None], p[None])
            for _ in range(self.settings.max_iter):
                q[...] = own
                for weight, lattice, norm in filters:
                    lattice.filter(p, message)
                    message *= norm * weight
                    q += message
                self.ops.softmax_forward(q[None], p[None])
            if not self.settings.output_probability:
                np.log(np.maximum(p, TINIEST, out=p), out=p)
            result[n, :, :h, :w] = p.reshape(c, h, w)


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
