"""transform_param: crop, mirror, mean and scale of images, with a random stream of its own."""

import logging
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caffepy import ops
from caffepy.core.errors import ConfigError, DataError
from caffepy.core.paths import locate
from caffepy.data import datum
from caffepy.data.random_stream import Twister, new_twister
from caffepy.device.blob import shape_string
from caffepy.device.device import Device
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import TRAIN, TransformationParameter

log = logging.getLogger(__name__)

Array = NDArray[Any]
Shape = tuple[int, ...]

KNOWN = {
    *(
        "scale",
        "mirror",
        "crop_size",
        "mean_file",
        "mean_value",
        "force_color",
        "force_gray",
        "random_seed",
    ),
    *("use_gpu_transform", "forward_packing", "display"),  # change no values
}


class Transformer:
    """y[c, h, w'] = (x[c, h_off + h, w_off + w] - mean) * scale, w' = w or mirrored.

    Each image draws mirror, then in TRAIN h_off and w_off of the crop; what is off draws nothing.
    TEST crops the centre. The stream is a Mersenne twister, and a draw below n is its output modulo
    n, as in Caffe.
    """

    def __init__(
        self, param: TransformationParameter, phase: int, device: Device, path: str | None = None
    ) -> None:
        self.param = param
        self.crop = param.crop_size
        self.random_crop = phase == TRAIN and self.crop > 0
        self._host = device.host
        self._draws = int(param.mirror) + 2 * self.random_crop  # numbers that one image takes
        self._twister = new_twister(param, device) if self._draws else Twister(0)
        self.decode_mode = self._decode_mode()
        without_effect = [f.name for f, _ in param.ListFields() if f.name not in KNOWN]
        if without_effect:
            log.warning(
                "transform_param's %s, known to forks of Caffe, have no effect",
                ", ".join(without_effect),
            )
        self.mean = read_mean(param, path)

    def _decode_mode(self) -> int:
        if self.param.force_color and self.param.force_gray:
            raise ConfigError("force_color and force_gray cannot both be set")
        return (
            datum.COLOR
            if self.param.force_color
            else datum.GRAY
            if self.param.force_gray
            else datum.NATIVE
        )

    def output_shape(self, shape: Shape) -> Shape:
        """The transformed shape of an image (C, H, W); ConfigError or DataError if the sizes do not
        fit.
        """
        channels, height, width = shape
        param, mean, crop = self.param, self.mean, self.crop
        if param.mean_value and len(param.mean_value) not in (1, channels):
            raise ConfigError(
                f"{len(param.mean_value)} mean_value for {channels} channels; give 1 or {channels}"
            )
        if param.mean_file and mean is not None and mean.shape != shape:
            raise DataError(
                f"the mean in {param.mean_file} has shape {shape_string(mean.shape)}, the image "
                f"{shape_string(shape)};"
                " it must be of the size of the whole image, before any crop"
            )
        if crop > min(height, width):
            raise ConfigError(f"crop_size {crop} is larger than the image, {height} x {width}")
        return (channels, crop, crop) if crop else shape

    def draw(self, count: int) -> Array:
        """The random numbers of `count` images, a row each, for `place`."""
        return self._twister.draw(count * self._draws).reshape(count, self._draws)

    def place(self, draws: Array, sizes: ArrayLike) -> tuple[Array, Array, Array]:
        """Start rows and columns of the crops of images of these sizes, (n, 2) or (H, W), and a
        mask of the mirrored ones.
        """
        n = len(draws)
        mirror = draws[:, 0] % 2 == 1 if self.param.mirror else np.zeros(n, np.bool_)
        room = np.broadcast_to(
            np.asarray(sizes, np.uint64) - np.uint64(self.crop) if self.crop else 0, (n, 2)
        )
        starts = (
            draws[:, -2:] % (room + np.uint64(1)) if self.random_crop else room // 2
        )  # of 0 to room
        h_off, w_off = starts.astype(np.int64).T
        return h_off, w_off, mirror

    def apply(self, images: Array, out: Array, draws: Array) -> None:
        """Write out (N, C, h, w) from images (N, C, H, W) of sizes that `output_shape` accepted, on
        the host.
        """
        ops.backend(self._host).transform_batch(
            images, out, *self.place(draws, images.shape[2:]), self.mean, self.param.scale
        )

    def state(self) -> dict[str, Any]:
        """Position of the random stream; empty if nothing is drawn."""
        return self._twister.state() if self._draws else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the random stream; a state without one changes nothing."""
        if self._draws:
            self._twister.set_state(state)


def read_mean(param: TransformationParameter, path: str | None = None) -> Array | None:
    """The mean to subtract: an image (C, H, W), a value a channel (1 or C, 1, 1) or None."""
    if param.mean_file and param.mean_value:
        raise ConfigError("mean_file and mean_value cannot both be given")
    if param.mean_value:
        return np.array(param.mean_value, np.float32)[:, None, None]
    return load_mean(locate(param.mean_file, path)) if param.mean_file else None


def load_mean(path: str) -> Array:
    """The mean image (C, H, W), float32, of a .binaryproto file."""
    log.info("Loading mean file from: %s", path)
    mean = binary.read_array(path)
    if mean.ndim == 4 and mean.shape[0] == 1:
        mean = mean[0]
    if mean.ndim != 3:
        raise DataError(
            f"{path} is no mean image: its shape is {shape_string(mean.shape)}, not 1 C H W"
        )
    return mean
