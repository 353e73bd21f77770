"""transform_param: crop, mirror, mean and scale of images, with a random stream of its own."""

import logging
from ctypes import c_uint32
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from caffepy import ops
from caffepy.core.errors import ConfigError, DataError, one_or_each
from caffepy.core.files import locate
from caffepy.data.datum import COLOR, GRAY, NATIVE
from caffepy.device.blob import Array, shape_string
from caffepy.device.device import Device
from caffepy.device.random_numbers import set_twister
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import TRAIN, TransformationParameter

log = logging.getLogger(__name__)

Shape = tuple[int, ...]

FIELDS = (
    "scale mirror crop_size crop_h crop_w mean_file mean_value force_color force_gray random_seed"
)
OF_NO_VALUE = "use_gpu_transform forward_packing display"
"""Fields that have their effect, and those that change no values."""

# words of the generator's state; in numpy's memory the position follows. Reading them there is 100
# times as fast as numpy's own way
WORDS = 624


class Twister:
    """A Mersenne twister: random 32-bit numbers as Caffe's layers draw them."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.MT19937()
        seeded: Any = np.random.RandomState(seed % 2**32)  # seeds a twister as Caffe does
        self._generator.state = seeded.get_state(legacy=False)
        address = self._generator.ctypes.state_address
        self._words: Array = np.ctypeslib.as_array((c_uint32 * (WORDS + 1)).from_address(address))

    def draw(self, count: int) -> Array:
        """The next `count` numbers."""
        return np.asarray(self._generator.random_raw(count))

    def skip(self, count: int) -> None:
        """Go past the next `count` numbers."""
        self._generator.random_raw(count, output=False)

    def state(self) -> dict[str, Any]:
        """The position of the stream."""
        return {"twister": self._words[:WORDS].copy(), "twister_position": int(self._words[WORDS])}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`; one without a stream changes nothing."""
        if "twister" in state:
            key = np.asarray(state["twister"], np.uint32)
            words: Any = {"key": key, "pos": int(state["twister_position"])}
            set_twister(self._generator, {"bit_generator": "MT19937", "state": words})


def new_twister(param: TransformationParameter, device: Device) -> Twister:
    """A stream seeded by transform_param's random_seed or, without one, by the device's."""
    return Twister(param.random_seed if param.random_seed >= 0 else device.draw_seed())


class Transformer:
    """y[c, h, w'] = (x[c, h_off + h, w_off + w] - mean) * scale, w' = w or mirrored.

    Each image draws mirror, then in TRAIN h_off and w_off of the crop; what is off draws nothing.
    TEST crops the centre. The stream is a Mersenne twister, and a draw below n is its output modulo
    n, as in Caffe. Each image draws `more` further numbers, which `place` leaves alone. The caller
    heeds the fields of forks that `heeds` names.
    """

    def __init__(
        self,
        param: TransformationParameter,
        phase: int,
        device: Device,
        path: str | None = None,
        *,
        more: int = 0,
        heeds: str = "",
    ) -> None:
        self.param = param
        self.crop = _crop_of(param)
        self.random_crop = phase == TRAIN and self.crop is not None
        self._host = device.host
        # numbers that one image takes
        self._draws = int(param.mirror) + 2 * self.random_crop + more
        self._twister = new_twister(param, device) if self._draws else Twister(0)
        if param.force_color and param.force_gray:
            raise ConfigError("force_color and force_gray cannot both be set")
        self.decode_mode = COLOR if param.force_color else NATIVE
        if param.force_gray:
            self.decode_mode = GRAY
        known = f"{FIELDS} {OF_NO_VALUE} {heeds}".split()
        if others := [field.name for field, _ in param.ListFields() if field.name not in known]:
            without_effect = "transform_param's %s, known to forks of Caffe, have no effect"
            log.warning(without_effect, ", ".join(others))
        self.mean = read_mean(param, path)

    def output_shape(self, shape: Shape) -> Shape:
        """The transformed shape of an image (C, H, W); ConfigError or DataError if unfit."""
        channels, height, width = shape
        param, mean, crop = self.param, self.mean, self.crop
        if param.mean_value and len(param.mean_value) not in (1, channels):
            count = len(param.mean_value)
            raise ConfigError(f"{count} mean_value for {one_or_each(channels)}")
        if param.mean_file and mean is not None and mean.shape != shape:
            shapes = f"{shape_string(mean.shape)}, the image {shape_string(shape)}"
            rule = "it must be of the size of the whole image, before any crop; a mean_value for "
            rule += "each channel fits every size"
            raise DataError(f"the mean in {param.mean_file} has shape {shapes}; {rule}")
        if crop is None:
            return shape
        if crop[0] > height or crop[1] > width:
            size = f"crop_size {crop[0]}" if param.crop_size else f"a crop of {crop[0]} x {crop[1]}"
            raise ConfigError(f"{size} is larger than the image, {height} x {width}")
        return (channels, *crop)

    def draw(self, count: int) -> Array:
        """The random numbers of `count` images, a row each, for `place`."""
        return self._twister.draw(count * self._draws).reshape(count, self._draws)

    def skip(self, count: int) -> None:
        """Go past the random numbers of `count` images."""
        self._twister.skip(count * self._draws)

    def place(self, draws: Array, sizes: ArrayLike) -> tuple[Array, Array, Array]:
        """Start rows and columns of the crops of images of these sizes, (n, 2) or (H, W), and a
        mask of the mirrored ones.
        """
        n = len(draws)
        mirror = draws[:, 0] % 2 == 1 if self.param.mirror else np.zeros(n, np.bool_)
        if not self.crop:
            return np.zeros(n, np.int64), np.zeros(n, np.int64), mirror
        room = np.asarray(sizes, np.uint64) - np.asarray(self.crop, np.uint64)
        room = np.broadcast_to(room, (n, 2))
        first = int(self.param.mirror)
        numbers = draws[:, first : first + 2]
        # of 0 to room
        starts = numbers % (room + np.uint64(1)) if self.random_crop else room // 2
        h_off, w_off = starts.astype(np.int64).T
        return h_off, w_off, mirror

    def apply(self, images: Array, out: Array, draws: Array) -> None:
        """Write out (N, C, h, w) from images (N, C, H, W), which must fit, on the host."""
        crops = self.place(draws, images.shape[2:])
        ops.backend(self._host).transform_batch(images, out, crops, self.mean, self.param.scale)

    def state(self) -> dict[str, Any]:
        """Position of the random stream; empty if nothing is drawn."""
        return self._twister.state() if self._draws else {}

    def state_after(self, state: dict[str, Any], count: int) -> dict[str, Any]:
        """Return `state` after `count` images from this one on. Any thread may call it."""
        if not self._draws:
            return {}
        twister = Twister(0)
        twister.set_state(state)
        twister.skip(count * self._draws)
        return twister.state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the random stream; a state without one changes nothing."""
        if self._draws:
            self._twister.set_state(state)


def _crop_of(param: TransformationParameter) -> tuple[int, int] | None:
    """Height and width of the crop, by crop_size or by crop_h and crop_w; None without one."""
    if param.crop_size and (param.crop_h or param.crop_w):
        raise ConfigError("transform_param has a crop_size and crop_h or crop_w; give one of them")
    if bool(param.crop_h) != bool(param.crop_w):
        raise ConfigError("crop_h and crop_w must both be given or neither")
    size = param.crop_size
    return (size or param.crop_h, size or param.crop_w) if size or param.crop_h else None


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
        shape = shape_string(mean.shape)
        raise DataError(f"{path} is no mean image: its shape is {shape}, not 1 C H W")
    return mean
