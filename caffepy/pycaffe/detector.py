"""pycaffe's Detector: class scores of windows of images (R-CNN, Girshick et al. 2014)."""

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.core.files import AnyPath
from caffepy.pycaffe import io
from caffepy.pycaffe.classifier import ImageNet
from caffepy.pycaffe.io import Array

Window = Sequence[float] | Array
SELECTIVE_SEARCH = "selective_search_ijcv_with_python"


class Detector(ImageNet):
    """Scores windows of images by a deploy net and its weights.

    `context_pad` is the width, in pixels of the net's input, of the surroundings around each
    window. For the other arguments see ImageNet.
    """

    def __init__(
        self,
        model_file: AnyPath,
        pretrained_file: AnyPath | None,
        mean: Array | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, pretrained_file, mean, input_scale, raw_scale, channel_swap)
        self.configure_crop(context_pad)

    def configure_crop(self, context_pad: int | None) -> None:
        """Show this many pixels of the net's input around each window; beyond the image, the mean.

        ValueError for half of the input's height or width, or more.
        """
        in_ = self.inputs[0]
        channels, height, width = self.blobs[in_].shape[1:]
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        if not context_pad:
            return
        if 2 * context_pad >= min(height, width):
            raise ValueError(
                f"context_pad must be less than half of the net's input of {height}x{width}, "
                f"not {context_pad}"
            )
        self.crop_mean = np.zeros((height, width, channels), np.float32)
        mean = self.transformer.mean.get(in_)
        if mean is not None:  # as an image lies before it is prepared
            swap = self.transformer.channel_swap.get(in_)
            unswapped = mean if swap is None else mean[np.argsort(swap)]
            scale = self.transformer.raw_scale.get(in_) or 1
            self.crop_mean += unswapped.transpose(1, 2, 0) / scale

    def detect_windows(
        self, images_windows: Iterable[tuple[str, Sequence[Window]]]
    ) -> list[dict[str, Any]]:
        """Return a dict with `window`, `filename` and `prediction`, the first output, for each
        window (ymin, xmin, ymax, xmax) of each image file.
        """
        found: list[dict[str, Any]] = []
        crops = []
        for filename, windows in images_windows:
            image = io.load_image(filename)
            for window in windows:
                crops.append(self.crop(image, window))
                found.append({"window": window, "filename": filename})
        for what, score in zip(found, self._scores(crops) if crops else (), strict=True):
            what["prediction"] = score
        return found

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """Run `detect_windows` on the proposals of selective search.

        ConfigError without its package, selective_search_ijcv_with_python, which runs MATLAB.
        """
        try:
            search = import_module(SELECTIVE_SEARCH)
        except ImportError:
            raise ConfigError(
                f"selective search needs the package {SELECTIVE_SEARCH} (and MATLAB), which cannot "
                "be imported; find windows by other means and give them to detect_windows"
            ) from None
        names = [os.path.abspath(name) for name in image_fnames]
        windows = search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(zip(names, windows, strict=True))

    def crop(self, im: Array, window: Window) -> Array:
        """Return the window (ymin, xmin, ymax, xmax) of an image (H, W, K).

        With a `context_pad` it has the net's size, and includes the surroundings. ValueError for an
        empty window, or one outside of the image.
        """
        y0, x0, y1, x1 = (int(side) for side in window)
        if not self.context_pad:
            part = im[y0:y1, x0:x1]
            if not part.size:
                raise ValueError(
                    f"window {y0, x0, y1, x1} is empty in an image of {im.shape[0]}x{im.shape[1]}"
                )
            return part
        (net_height, net_width, _), pad = map(int, self.crop_dims), self.context_pad
        rows, (above, height) = _with_context(y0, y1, im.shape[0], net_height, pad)
        columns, (left, width) = _with_context(x0, x1, im.shape[1], net_width, pad)
        shown = self.crop_mean.copy()
        part = im[rows, columns]
        if not part.size or min(height, width) <= 0:
            raise ValueError(
                f"window {y0, x0, y1, x1} lies outside of an image of {im.shape[0]}x{im.shape[1]}"
            )
        shown[above : above + height, left : left + width] = io.resize_image(part, (height, width))
        return shown


def _with_context(
    low: int, high: int, length: int, size: int, pad: int
) -> tuple[slice, tuple[int, int]]:
    """Return, along one axis, the part of an image of `length` that is shown, and its place
    (first pixel, number) in `size` pixels.
    """
    half = (high - low + 1) / 2
    reach = size / (size - 2 * pad) * half
    first, last = (round(low + half + sign * reach) for sign in (-1, 1))
    scale = size / (last - first + 1)
    begin, end = (min(max(side, 0), length) for side in (first, last))
    start = round(max(0, -first) * scale)
    return slice(begin, end), (start, min(round((end - begin + 1) * scale), size - start))
