"""SpatialTransformer: an image sampled at places that a net predicts."""

from collections.abc import Sequence
from math import prod

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer

THETA = ("theta_1_1", "theta_1_2", "theta_1_3", "theta_2_1", "theta_2_2", "theta_2_3")


@layer("SpatialTransformer")
class SpatialTransformer(Layer):
    """x (N, C, H, W), theta (N, 6) -> (N, C, output_H, output_W), x's size unless given
    (Jaderberg et al. 2015; daerduoCarey's SpatialTransformerLayer).

    Output (s, t) of Ho x Wo reads x, bilinear and 0 outside, at row (u + 1) / 2 * H and column
    (v + 1) / 2 * W, where (u, v) = theta (2, 3) @ (2 s / Ho - 1, 2 t / Wo - 1, 1). Numbers of
    theta that st_param gives are not in the bottom. At a whole pixel the gradient of the place
    counts that pixel alone, as the fork's does on the CPU.
    """

    on_gpu = True
    bottoms = 2
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.st_param
        if param.transform_type != "affine" or param.sampler_type != "bilinear":
            raise ConfigError(
                'st_param: transform_type must be "affine" and sampler_type "bilinear", not '
                f'"{param.transform_type}" and "{param.sampler_type}"'
            )
        self.free = [i for i, name in enumerate(THETA) if not param.HasField(name)]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.st_param, bottom[0].shape
        if len(shape) != 4:
            raise ConfigError(f"SpatialTransformer needs (N, C, H, W), not {list(shape)}")
        n, c, *size = shape
        if bottom[1].shape[:1] != (n,) or bottom[1].count != n * len(self.free):
            raise ConfigError(
                f"theta must have shape [{n}, {len(self.free)}], not {list(bottom[1].shape)}"
            )
        given = ("output_H", "output_W")
        out = [
            getattr(param, name) if param.HasField(name) else old
            for name, old in zip(given, size, strict=True)
        ]
        if min(out) < 1:
            raise ConfigError("st_param: output_H and output_W must be 1 or more")
        top[0].reshape((n, c, *out))
        self.theta = self.buffer((n, 6))
        for i, name in enumerate(THETA):
            self.theta.host_data[:, i] = getattr(param, name)

    def matrices(self, bottom: Blobs) -> Array:
        """Return theta (N, 6) with what st_param gives."""
        theta = self.theta.data
        if self.free:
            given = bottom[1].data.reshape(len(theta), prod(bottom[1].shape[1:]))
            for k, i in enumerate(self.free):
                theta[:, i] = given[:, k]
        return theta

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.affine_sample_forward(bottom[0].data, self.matrices(bottom), top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the transpose of forward, 0 without to_compute_dU; dtheta as the class says."""
        dy, theta = top[0].diff, self.theta.data
        if propagate_down[0] and self.param.st_param.to_compute_dU:
            self.ops.affine_sample_backward(dy, theta, bottom[0].diff)
        elif propagate_down[0]:
            bottom[0].diff.fill(0)
        if propagate_down[1] and self.free:
            dtheta = self.theta.diff
            self.ops.affine_theta_gradient(dy, bottom[0].data, theta, dtheta)
            wanted = bottom[1].diff.reshape(len(theta), prod(bottom[1].shape[1:]))
            for k, i in enumerate(self.free):
                wanted[:, k] = dtheta[:, i]
