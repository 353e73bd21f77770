"""Random changes of images for detection and segmentation: distortion, expansion, resizing, noise.
Images are (H, W, C) or (H, W), uint8, as OpenCV has them; numbers come from a Generator a image.

What each does is that of SSD's fork (Liu et al. 2016), in 8 bits with rounding at each step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np

from caffepy.core.errors import ConfigError, DataError, one_or_each
from caffepy.data.datum import COLOR, GRAY, opened
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import (
    DistortionParameter,
    ExpansionParameter,
    NoiseParameter,
    ResizeParameter,
)

Rng = np.random.Generator
Size = tuple[int, int]  # height and width

QUALITY = 95  # of the JPEG that the fork makes between its steps
LEVELS = 4  # brightnesses of a posterized channel
SPACE = 32  # what fills the canvas around raw pixels

INTERPOLATIONS = {
    ResizeParameter.LINEAR: cv2.INTER_LINEAR,
    ResizeParameter.AREA: cv2.INTER_AREA,
    ResizeParameter.NEAREST: cv2.INTER_NEAREST,
    ResizeParameter.CUBIC: cv2.INTER_CUBIC,
    ResizeParameter.LANCZOS4: cv2.INTER_LANCZOS4,
}
BORDERS = {
    ResizeParameter.CONSTANT: cv2.BORDER_CONSTANT,
    ResizeParameter.MIRRORED: cv2.BORDER_REFLECT101,
    ResizeParameter.REPEAT_NEAREST: cv2.BORDER_REPLICATE,
}


def channels_of(image: Array) -> int:
    """Number of channels."""
    return 1 if image.ndim == 2 else image.shape[2]


def through_jpeg(image: Array, mode: int) -> Array:
    """The image after it was a JPEG of quality 95, as the fork keeps it between two steps."""
    return _through_jpeg(image, QUALITY, mode)


def _through_jpeg(image: Array, quality: int, mode: int) -> Array:
    back = opened(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], mode)
    assert back is not None
    return back


def linear(image: Array, factor: float, offset: float) -> Array:
    """factor * image + offset, rounded and kept within 0 to 255."""
    values = np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(offset)
    return cv2.LUT(image, np.rint(values).clip(0, 255).astype(np.uint8))


def check_distortion(param: DistortionParameter) -> None:
    """ConfigError for bounds that are no bounds."""
    for name in ("brightness_delta", "hue_delta", "contrast_lower", "saturation_lower"):
        if getattr(param, name) < 0:
            raise ConfigError(f"distort_param: {name} must be 0 or more")
    for name in ("contrast", "saturation"):
        if getattr(param, f"{name}_upper") < getattr(param, f"{name}_lower"):
            raise ConfigError(f"distort_param: {name}_upper is less than {name}_lower")


def distort(image: Array, param: DistortionParameter, rng: Rng) -> Array:
    """Change brightness, contrast, saturation, hue and the order of channels, each with its
    probability; contrast comes second or fourth. Grey images have no saturation, hue or order.

    With deepdetect's `prob` that is the probability of all that are on.
    """

    def chance(name: str) -> float:
        if not param.HasField("prob"):
            return float(getattr(param, f"{name}_prob"))
        return param.prob if getattr(param, name) or param.all_effects else 0.0

    def brightness(x: Array) -> Array:
        delta = param.brightness_delta
        return linear(x, 1, rng.uniform(-delta, delta))

    def contrast(x: Array) -> Array:
        factor = rng.uniform(param.contrast_lower, param.contrast_upper)
        return linear(x, factor, 0) if abs(factor - 1) > 1e-3 else x

    def saturation(x: Array) -> Array:
        factor = rng.uniform(param.saturation_lower, param.saturation_upper)
        return _in_hsv(x, 1, factor, 0)

    def hue(x: Array) -> Array:
        return _in_hsv(x, 0, 1, rng.uniform(-param.hue_delta, param.hue_delta))

    def order(x: Array) -> Array:
        return np.ascontiguousarray(x[..., rng.permutation(3)])

    Step = tuple[float, Callable[[Array], Array], bool]
    second: Step = (chance("contrast"), contrast, False)
    colours: list[Step] = [
        (chance("saturation"), saturation, True),
        (chance("hue"), hue, True),
    ]
    middle = [second, *colours] if rng.random() > 0.5 else [*colours, second]
    first: Step = (chance("brightness"), brightness, False)
    for probability, step, needs_colour in (first, *middle, (chance("random_order"), order, True)):
        if rng.random() < probability and (channels_of(image) == 3 or not needs_colour):
            image = step(image)
    return image


def _in_hsv(image: Array, channel: int, factor: float, offset: float) -> Array:
    """Change one channel of hue (0 to 180), saturation and value."""
    planes = list(cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV)))
    planes[channel] = linear(planes[channel], factor, offset)
    return cv2.cvtColor(cv2.merge(planes), cv2.COLOR_HSV2BGR)


def expand(
    image: Array, param: ExpansionParameter, fill: Any, rng: Rng
) -> tuple[Array, Array] | None:
    """Put the image at a random place of a canvas up to max_expand_ratio times as wide and high.

    Returns the canvas, and its xmin, ymin, xmax, ymax (4,) in units of the image; None where the
    image stays. `fill` is the canvas' colour.
    """
    if rng.random() > param.prob or abs(param.max_expand_ratio - 1) < 1e-2:
        return None
    ratio = rng.uniform(1, param.max_expand_ratio)
    size = np.array(image.shape[:2])
    new = (size * ratio).astype(np.int64)
    top, left = (int(rng.uniform(0, room)) for room in new - size)
    canvas = np.empty((*new, *image.shape[2:]), image.dtype)
    canvas[...] = fill
    canvas[top : top + size[0], left : left + size[1]] = image
    (height, width), start = size, np.array([left, top])
    window = np.concatenate([-start, new[::-1] - start])
    return canvas, (window / np.array([width, height, width, height])).astype(np.float32)


def cut(image: Array, window: Array) -> Array:
    """The part of the image in a window (4,), in units of the image, of one pixel at least."""
    height, width = image.shape[:2]
    scaled = window.astype(np.float32) * np.array([width, height, width, height], np.float32)
    x, y = (min(int(v), n - 1) for v, n in zip(scaled[:2], (width, height), strict=True))
    w, h = (max(1, int(v)) for v in scaled[2:] - scaled[:2])
    return np.ascontiguousarray(image[y : y + h, x : x + w])


def check_resize(param: ResizeParameter) -> None:
    """ConfigError without a size."""
    if not (param.height and param.width):
        raise ConfigError("resize_param needs a height and a width")
    if param.is_pyramid_test or param.HasField("out_height_scale"):
        raise ConfigError("resize_param: sizes of happynear's fork are not supported")


def resized_to(size: Size, param: ResizeParameter) -> Size:
    """The size to which an image of this size is resized, before any padding."""
    height, width = param.height, param.width
    if param.resize_mode == ResizeParameter.WARP:
        return height, width
    aspect = np.float32(size[1]) / np.float32(size[0])
    wide = bool(aspect > np.float32(width) / np.float32(height))
    if wide == (param.resize_mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD):
        height = int(np.float32(width) / aspect)
    else:
        width = int(aspect * np.float32(height))
    return height, width


def output_size(size: Size, param: ResizeParameter) -> Size:
    """The size that `resize` gives an image of this size."""
    padded = param.resize_mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD
    return (param.height, param.width) if padded else resized_to(size, param)


def resize(image: Array, param: ResizeParameter, rng: Rng) -> Array:
    """The image resized by its resize_mode, by one of its interp_modes; DataError if nothing would
    be left of it.
    """
    method = cv2.INTER_LINEAR
    if param.interp_mode:
        method = INTERPOLATIONS[param.interp_mode[int(rng.integers(len(param.interp_mode)))]]
    height, width = resized_to(_size(image), param)
    if not (height and width):
        raise DataError(f"resize_param leaves {height} x {width} pixels of {_size_text(image)}")
    image = resample(image, width, height, method)
    rest = param.height - height, param.width - width
    if param.resize_mode != ResizeParameter.FIT_LARGE_SIZE_AND_PAD or not any(rest):
        return image
    before = [n // 2 for n in rest]
    sides = before[0], rest[0] - before[0], before[1], rest[1] - before[1]
    value = _each_channel(param.pad_value, image, "pad_value")
    return cv2.copyMakeBorder(image, *sides, BORDERS[param.pad_mode], value=value)


def resample(image: Array, width: int, height: int, method: int) -> Array:
    """The image with this size; cubics by OpenCV itself, as in its builds for distributions and
    other processors, since the library of Intel's that its wheels have rounds otherwise.
    """
    is_used = cv2.ipp.useIPP()  # of this thread
    cv2.ipp.setUseIPP(is_used and method != cv2.INTER_CUBIC)
    try:
        return cv2.resize(image, (width, height), interpolation=method)
    finally:
        cv2.ipp.setUseIPP(is_used)


def _size(image: Array) -> Size:
    return image.shape[0], image.shape[1]


def _size_text(image: Array) -> str:
    return f"{image.shape[0]} x {image.shape[1]}"


def _each_channel(values: Sequence[float], image: Array, name: str) -> list[float]:
    """A value for each channel, from one for all of them or one each; 0 if there are none."""
    count = channels_of(image)
    if len(values) not in (0, 1, count):
        raise ConfigError(f"{len(values)} {name} for {one_or_each(count)}")
    return list(values) if len(values) == count else [values[0] if values else 0.0] * count


_EFFECTS = (
    *("decolorize", "gauss_blur", "hist_eq", "clahe", "erode", "posterize", "inverse"),
    *("saltpepper", "convert_to_hsv"),
)
"""The fields of noise_param that are on or off."""


def check_noise(param: NoiseParameter) -> None:
    """ConfigError for noise that cannot be made."""
    if param.convert_to_lab:
        raise ConfigError(
            "noise_param: convert_to_lab makes floats, which the fork reads as bytes; leave it out"
        )
    if param.saltpepper and not param.saltpepper_param.value:
        raise ConfigError("noise_param: saltpepper needs a saltpepper_param with a value")
    for name in ("gaussian_std", "uniform_range", "bias"):
        if param.HasField(name):
            raise ConfigError(f"noise_param: {name} of happynear's fork is not supported")


def noisy(image: Array, param: NoiseParameter, rng: Rng) -> Array:
    """The image after those steps of noise_param that are on, always (its prob has no effect, as in
    the fork); with `all_effects` after each that can be made with the probability `prob`.
    """
    if param.all_effects:
        param = _drawn(param, rng)
    colour = channels_of(image) == 3
    if param.decolorize and colour:
        image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    if param.gauss_blur:
        image = cv2.GaussianBlur(image, (7, 7), 1.5)
    if param.hist_eq:
        image = _in_luma(image, cv2.equalizeHist)
    if param.clahe:
        image = _in_luma(image, cv2.createCLAHE(clipLimit=4).apply)
    if param.jpeg > 0:
        image = _through_jpeg(image, int(param.jpeg), COLOR if colour else GRAY)
    if param.erode:
        image = cv2.erode(image, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3), (1, 1)))
    if param.posterize:
        step = 256 // LEVELS
        levels = np.arange(256) // step * step + step // 2
        image = cv2.LUT(image, levels.astype(np.uint8))
    if param.inverse:
        image = cv2.bitwise_not(image)
    if param.saltpepper:
        values = _each_channel(param.saltpepper_param.value, image, "value of saltpepper_param")
        height, width = _size(image)
        count = int(np.float32(param.saltpepper_param.fraction) * np.float32(width * height))
        x, y = rng.integers(width, size=count), rng.integers(height, size=count)
        image = image.copy()
        image[y, x] = np.array(values).astype(np.uint8) if colour else int(values[0])
    if param.convert_to_hsv and colour:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
    return image


def _drawn(param: NoiseParameter, rng: Rng) -> NoiseParameter:
    """The noise with each effect on or off by its `prob`, as deepdetect's; salt and pepper need a
    value, and Lab is none (see `check_noise`).
    """
    drawn = NoiseParameter()
    drawn.CopyFrom(param)
    for name in _EFFECTS:
        chosen = rng.random() < param.prob
        setattr(
            drawn, name, chosen and (name != "saltpepper" or bool(param.saltpepper_param.value))
        )
    return drawn


def _in_luma(image: Array, change: Callable[[Array], Array]) -> Array:
    """Change the brightness of an image, whose only channel it may be."""
    if channels_of(image) == 1:
        return change(image)
    planes = list(cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2YCrCb)))
    planes[0] = change(planes[0])
    return cv2.cvtColor(cv2.merge(planes), cv2.COLOR_YCrCb2BGR)
