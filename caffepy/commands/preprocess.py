"""Images prepared for a net, as Caffe's Python tools do it."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from caffepy import ops
from caffepy.commands.devices import choose_device
from caffepy.commands.inference import checked, load_all
from caffepy.core.errors import CaffeError, ConfigError, DataError, reason
from caffepy.device import math_mode
from caffepy.device.blob import Array, shape_string
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import LayerParameter, TransformationParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.sniff import mismatch, sniff
from caffepy.proto.text import locate_layer, read_net
from caffepy.pycaffe import mode
from caffepy.pycaffe.classifier import ImageNet
from caffepy.pycaffe.io import Transformer, load_image
from caffepy.report.glog import quiet

log = logging.getLogger(__name__)

BGR = 2, 1, 0
RAW_SCALE = 255.0  # transform_param's pixels are 0 to 255
TRAINING_NETS = "train_val.prototxt", "train.prototxt"  # usual names, beside the deploy net
ARRAY = "a numpy array"
EXTENSIONS = ("jpg", "jpeg", "png", "bmp", "ppm", "pgm", "tif", "tiff", "webp")
READERS = 4  # threads that read image files
N = TypeVar("N", bound=ImageNet)


@dataclass(frozen=True)
class Preparation:
    """The steps from an image, (H, W, K) in 0 to 1 and RGB, to a net's input, in this order.

    `channel_swap` is the new order of the channels; None turns three to BGR and leaves others.
    Values are multiplied by `raw_scale`; the mean, an image in `mean_file` or `mean_values` by
    channel, is subtracted; the rest is multiplied by `input_scale`.
    """

    mean_file: str = ""
    mean_values: Sequence[float] = ()
    input_scale: float | None = None
    raw_scale: float | None = RAW_SCALE
    channel_swap: Sequence[int] | None = None

    def transformer(self, name: str, shape: Sequence[int], by_channel: bool = False) -> Transformer:
        """Return the transformer for the input `name` of this shape (N, C, H, W).

        With `by_channel` a mean image is reduced to the mean of each channel. ConfigError if the
        settings do not fit the shape.
        """
        transformer, swap = Transformer({name: shape}), self.channel_swap
        values = self.mean_values
        if len(values) == 1:  # as transform_param's: for each channel
            values = [*values] * shape[1]
        mean = np.array(values, np.float32) if values else None
        if self.mean_file and mean is None:
            mean = read_mean(self.mean_file)
        if swap is None and shape[1] == len(BGR):
            swap = BGR
        try:
            transformer.set_transpose(name, (2, 0, 1))
            if swap is not None:
                if sorted(swap) != list(range(len(swap))):
                    raise ValueError(
                        f"Channel swap {','.join(map(str, swap))} does not name each channel once."
                    )
                transformer.set_channel_swap(name, swap)
            if self.raw_scale is not None:
                transformer.set_raw_scale(name, self.raw_scale)
            if mean is not None:
                if mean.ndim == 3 and (len(mean) != shape[1] or by_channel):
                    mean = mean.mean((1, 2))
                transformer.set_mean(name, mean)
            if self.input_scale is not None:
                transformer.set_input_scale(name, self.input_scale)
        except ValueError as error:
            raise ConfigError(
                f'images do not fit input "{name}" of {shape_string(tuple(shape))}: {error}'
            ) from None
        return transformer

    def warn_of_missing(self, model: str) -> None:
        """Log the flags that are missing for what the training net beside the deploy net `model`
        does to its images, if it is found.
        """
        for path in (os.path.join(os.path.dirname(model), name) for name in TRAINING_NETS):
            layers: Sequence[LayerParameter] = ()
            if os.path.exists(path):
                with suppress(CaffeError), quiet():  # this net is not what is to be run
                    layers = read_net(path).layer
            for layer in layers:
                if missing := self._missing(layer.transform_param):
                    log.warning(
                        "%s: the net was trained on images with this mean or scale: give %s",
                        locate_layer(path, layer),
                        " ".join(missing),
                    )
                    return

    def _missing(self, param: TransformationParameter) -> list[str]:
        """Return the flags for the mean and scale in `param` that these settings lack."""
        missing = []
        if not (self.mean_values or self.mean_file):
            if param.mean_value:
                values = ",".join(f"{value:.7g}" for value in param.mean_value)
                missing.append(f"--mean-values {values}")
            elif param.mean_file:
                missing.append(f"--mean-file {param.mean_file}")
        if self.input_scale is None and self.raw_scale == RAW_SCALE and param.scale != 1:
            missing.append(f"--input-scale {param.scale:.7g}")
        return missing


PREPARATION = Preparation()
"""The usual steps."""


def read_mean(path: str) -> Array:
    """Return the mean in a .npy file or a .binaryproto of any name: (C, H, W) or (C,).

    DataError for anything else.
    """
    if not path.lower().endswith(".npy") or sniff(path) == "a binaryproto":
        mean = binary.read_array(path)
        mean = mean[0] if mean.ndim == 4 and len(mean) == 1 else mean
    else:
        mean = read_array(path)
    if mean.ndim not in (1, 3):
        raise DataError(f"{path}: a mean is (C, H, W) or (C,), not {shape_string(mean.shape)}")
    return mean


def read_array(path: str) -> Array:
    """Map the numbers of a .npy file into memory; DataError for anything else."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None
    except Exception as error:  # the head is read as Python code, which fails in many ways
        if sniff(path) != ARRAY:
            raise mismatch(path, ARRAY, DataError) from None
        raise DataError(f"{path}: not an array that can be read: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise DataError(f"{path}: not an array of numbers")
    return array


def load(path: str, channels: int) -> Array:
    """Read an image file for a net of 1 or 3 channels, (H, W, K) in 0 to 1, or raise DataError."""
    if channels not in (1, 3):
        raise DataError(
            f"{path}: an image file has no {channels} channels, which the net takes; give a .npy "
            "file"
        )
    return load_image(path, color=channels == 3)


def names_in(folder: str, extensions: Sequence[str]) -> list[str]:
    """Return the files of a folder with these extensions, sorted; DataError if there are none."""
    endings = tuple(f".{extension.lower().removeprefix('.')}" for extension in extensions)
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(endings))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {reason(error)}") from None
    if not names:
        raise DataError(f"{folder}: no files *{', *'.join(endings)} are in this folder")
    return [os.path.join(folder, name) for name in names]


def read_lines(path: str) -> list[str]:
    """Return the lines of a text file that a flag names; ConfigError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from None


class ImageResult(Protocol):
    """Result for an image, or the error of one that cannot be read."""

    @property
    def error(self) -> str | None:
        """Why the image cannot be read; None if it was."""


@dataclass(frozen=True)
class ImageResults:
    """Results for images."""

    images: Sequence[ImageResult]

    @property
    def has_read(self) -> bool:
        """True if an image could be read, so that there is more to show than `check` raises."""
        return not all(image.error for image in self.images)

    def check(self) -> None:
        """Raise a DataError that names the images that could not be read, if there are any."""
        unread = [image.error for image in self.images if image.error]
        others = f" (and {len(unread) - 1} more of {len(self.images)} images)"
        if unread:
            raise DataError(f"{unread[0]}{others if len(unread) > 1 else ''}")


def image_net(
    cls: type[N],
    model: str,
    weights: Sequence[str],
    batch: int | None,
    gpu: str | None,
    precision: str | None,
    threads: int | None,
) -> N:
    """Return pycaffe's net of this class with these weights, on the first of the GPUs or the CPU.

    It takes `batch` images at once, by default those of its definition.
    """
    device = choose_device(gpu, threads)
    weights = checked(weights)
    ops.set_precision(device, choose_precision(read_net(model), precision))
    default = math_mode.default()
    before = default.precision
    if device.kind == "cuda":
        mode.set_device(device.index)
        mode.set_mode_gpu()
        default.precision = device.math_mode.precision
    try:
        net = cls(model, None)
        load_all(net._net, weights)
        if batch:
            images = net.blobs[net.inputs[0]]
            images.reshape(batch, *images.shape[1:])
            net.reshape()
        return net
    finally:
        mode.set_mode_cpu()
        default.precision = before
