"""Batches of windows of images (R-CNN): foreground and background boxes of a window file, cut out
and warped to squares.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import locate, read_regular
from caffepy.data import jpegs
from caffepy.data.datum import COLOR, decode_image
from caffepy.data.decoders import AnyDecoders, File, Task, current
from caffepy.data.loader import DECODERS, Batch, Loader, Shape
from caffepy.data.sources.base import State
from caffepy.data.sources.image_list import find_root, unreadable
from caffepy.data.sources.windows import read_windows
from caffepy.data.transformer import new_twister, read_mean
from caffepy.device.blob import MAX_COUNT, Array, shape_string
from caffepy.device.device import Device
from caffepy.device.threads import parallel
from caffepy.proto.caffe_pb2 import LayerParameter

log = logging.getLogger(__name__)

CHANNELS = 3
Drawn = tuple[list[Array], list[bool]]  # windows, and which are mirrored
Number = np.float32  # Caffe finds regions in float32; some halves round differently in float64


@dataclass(frozen=True)
class Span:
    """One axis of a window: pixels `start` to `stop` of the image, warped to `length`, with margins
    of `before` and `after` pixels.
    """

    start: int
    stop: int
    length: int
    before: int = 0
    after: int = 0


def expand(first: int, last: int, half: Number, stretch: Number, size: int, crop: int) -> Span:
    """The span of `stretch` * `half` around the middle of the pixels `first` to `last`, clipped to
    0..size - 1.

    The parts outside the image become the margins. The scale is that of the whole span to `crop`.
    """
    centre = Number(first) + Number(last - first + 1) / 2
    first, last = _round(centre - half * stretch), _round(centre + half * stretch)
    before, after = max(0, -first), max(0, last - size + 1)
    scale = Number(crop) / Number(last - first + 1)
    start, stop = first + before, last - after + 1
    length, before, after = (_round(Number(n) * scale) for n in (stop - start, before, after))
    return Span(start, stop, length, before, after)


def _round(x: Number) -> int:
    """Round to the nearest integer, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


@dataclass(frozen=True)
class Warp:
    """Cuts windows out of images and warps them to (3, crop, crop)."""

    crop: int
    context_pad: int
    is_square: bool
    mean: Array  # (3, crop, crop)
    scale: float

    def write(self, content: bytes | Array, corners: list[int], mirrored: bool, out: Array) -> None:
        """Write the window of an image file into `out`, which holds zeros."""
        import cv2

        image = decode_image(content, COLOR)
        y, x, h, w, height, width, top, left, _ = self.window(corners, mirrored, *image.shape[1:])
        if height < 1 or width < 1:
            return
        pixels = np.moveaxis(image[:, y : y + h, x : x + w], 0, 2)
        pixels = np.moveaxis(cv2.resize(np.ascontiguousarray(pixels), (width, height)), 2, 0)
        here = slice(None), slice(top, top + height), slice(left, left + width)
        out[here] = (pixels[:, :, ::-1] if mirrored else pixels) - self.mean[here]
        out[here] *= self.scale

    def window(self, corners: list[int], mirrored: bool, h: int, w: int) -> tuple[int, ...]:
        """Return the numbers of the window in an image of this size, in the order that
        `decode_windows` takes; DataError if it lies outside.
        """
        x, y = self._spans(corners, h, w)
        if not (0 <= x.start < x.stop <= w and 0 <= y.start < y.stop <= h):
            box, size = " ".join(map(str, corners)), shape_string((CHANNELS, h, w))
            raise DataError(f"window {box} lies outside the image, {size}")
        left, top = x.after if mirrored else x.before, y.before
        height, width = min(y.length, self.crop - top), min(x.length, self.crop - left)
        here = y.start, x.start, y.stop - y.start, x.stop - x.start
        return *here, height, width, top, left, int(mirrored)

    def _spans(self, corners: list[int], height: int, width: int) -> tuple[Span, Span]:
        x1, y1, x2, y2 = corners
        if not (self.context_pad or self.is_square):
            return Span(x1, x2 + 1, self.crop), Span(y1, y2 + 1, self.crop)
        halves = [Number(x2 - x1 + 1) / 2, Number(y2 - y1 + 1) / 2]
        if self.is_square:
            halves = [max(halves)] * 2
        stretch = Number(self.crop) / Number(self.crop - 2 * self.context_pad)
        x = expand(x1, x2, halves[0], stretch, width, self.crop)
        return x, expand(y1, y2, halves[1], stretch, height, self.crop)


def warp(
    warping: Warp, dtype: np.dtype[Any], content: bytes | Array, window: tuple[list[int], bool]
) -> Array:
    """A window (3, crop, crop) of an image file, for another process; True if it is mirrored."""
    out = np.zeros(warping.mean.shape, dtype)
    warping.write(content, *window, out)
    return out


class WindowLoader(Loader):
    """Batches of windows drawn with replacement: background, then int(batch_size * fg_fraction) of
    foreground.

    A window is warped to crop_size x crop_size and becomes (x - mean) * window_data_param's scale,
    mirrored at random. context_pad is the number of pixels of context on each side, crop_mode
    "square" takes the smallest square around the window; pixels outside the image are 0.
    """

    state_keys = frozenset({"twister", "twister_position"})

    def __init__(self, layer: LayerParameter, device: Device, beside: str | None = None) -> None:
        self._param = param = layer.window_data_param
        super().__init__(param.batch_size)
        self._path = locate(param.source, beside)
        self._crop, self._mirror = layer.transform_param.crop_size, layer.transform_param.mirror
        if self._crop <= 2 * param.context_pad:
            least = f"more than 2 * context_pad = {2 * param.context_pad}"
            raise ConfigError(f"transform_param needs a crop_size of {least}, not {self._crop}")
        if self.batch_size * math.prod(self.shape()) > MAX_COUNT:
            windows = f"{self.batch_size} windows of shape {shape_string(self.shape())}"
            raise ConfigError(f"{windows} have more than 2^31 elements")
        self._read()
        self._root = find_root(param.root_folder, self._images[0], self._path, beside)
        mean = self._expand_mean(read_mean(layer.transform_param, beside))
        square = param.crop_mode == "square"
        self._warping = Warp(self._crop, param.context_pad, square, mean, param.scale)
        self._decoders = current()
        self._task: Task | None = None
        self._twister = new_twister(layer.transform_param, device)
        self._cache: dict[str, bytes] = {}
        for name in self._images if param.cache_images else ():
            try:
                self._cache[name] = self._content(name)
            except DataError as error:
                self.bad.add(self._name(name), error)

    def _read(self) -> None:
        """Read the windows; DataError unless there are some of each kind that a batch wants."""
        param = self._param
        file = read_windows(self._path, param.fg_threshold, param.bg_threshold)
        log.info("Number of images: %d", len(file.images))
        classes = np.concatenate([file.background[:, 1], file.foreground[:, 1]])
        for label, count in zip(*np.unique(classes, return_counts=True), strict=True):
            log.info("class %d has %d samples", label, count)
        log.info("Amount of context padding: %d", param.context_pad)
        log.info("Crop mode: %s", param.crop_mode)
        if not 0 <= param.fg_fraction <= 1:
            rule = "window_data_param's fg_fraction must be 0 to 1"
            raise ConfigError(f"{rule}, not {param.fg_fraction:g}")
        foreground = int(Number(self.batch_size) * Number(param.fg_fraction))
        wanted = ((file.background, self.batch_size - foreground), (file.foreground, foreground))
        for name, (windows, count) in zip(("background", "foreground"), wanted, strict=True):
            if count > 0 and not len(windows):
                wish = f"of which each batch wants {count}"
                raise DataError(f"{self._path} has no {name} windows, {wish}")
        self._images = file.images
        # by place in a batch
        self._kinds = [windows for windows, count in wanted for _ in range(count)]

    def _expand_mean(self, mean: Array | None) -> Array:
        """The mean (3, crop, crop): of an image, its crop at the middle's x offset along y, too."""
        if mean is None:
            mean = np.zeros((1, 1, 1), np.float32)
        crop = self._crop
        offset = max(0, (mean.shape[2] - crop) // 2)
        if mean.shape[1:] != (1, 1):
            mean = mean[:, offset : offset + crop, offset : offset + crop]
        if len(mean) not in (1, CHANNELS) or mean.shape[1:] not in ((1, 1), (crop, crop)):
            shape, window = shape_string(mean.shape), shape_string(self.shape())
            raise ConfigError(f"a mean of shape {shape} does not fit windows of {window}")
        return np.ascontiguousarray(np.broadcast_to(mean, self.shape()))

    def shape(self) -> Shape:
        return CHANNELS, self._crop, self._crop

    def extent(self) -> str:
        return f'{len(self._images):,} images, from "{self._images[0]}" to "{self._images[-1]}"'

    def load(self, batch: Batch) -> None:
        """Fill the batch with windows; each draws its number, then its mirroring.

        Windows in bad images are drawn anew, with numbers that the next batch draws again: machines
        that skip this one need not know.
        """
        images, labels = self._room(batch)
        missing = list(range(self.batch_size))
        drawn, after = self._draw(missing), self._twister.state()
        while True:
            bad = self._fill(missing, drawn, images, labels)
            for k, error in sorted(bad.items()):
                self.bad.add(self._name(self._images[drawn[0][k][0]]), error)
                others = np.unique(self._kinds[missing[k]][:, 0])
                if all(self._name(self._images[i]) in self.bad for i in others):
                    raise DataError(
                        f"{error.message}; all other images with windows of its kind are bad, too"
                    )
            if not bad:
                break
            missing = [missing[k] for k in sorted(bad)]
            drawn = self._draw(missing)
        self._twister.set_state(after)
        batch.finish(self.shape(), self.state(), 0, 0, False, labels)

    @property
    def can_reserve(self) -> bool:  # type: ignore[override]
        return not self.bad  # the next bad one is probably among the next windows

    def reserve(self, batch: Batch) -> Callable[[], bool]:
        """Draw windows; the callable returns false if one of them lies in a bad image."""
        places = list(range(self.batch_size))
        drawn, state = self._draw(places), self.state()

        def fill() -> bool:
            images, labels = self._room(batch)
            if self._fill(places, drawn, images, labels):
                return False
            batch.finish(self.shape(), state, 0, 0, False, labels)
            return True

        return fill

    def skip(self, batches: int) -> None:
        self._twister.skip(batches * self.batch_size * (1 + self._mirror))

    def _room(self, batch: Batch) -> tuple[Array, Array]:
        images = batch.room(self.shape(), batch.dtype)
        images.fill(0)
        return images, np.zeros(self.batch_size)

    def _draw(self, places: list[int]) -> Drawn:
        draws = self._twister.draw(len(places) * (1 + self._mirror)).reshape(len(places), -1)
        kinds = [self._kinds[i] for i in places]
        windows = [kind[draw[0] % len(kind)] for kind, draw in zip(kinds, draws, strict=True)]
        return windows, [self._mirror and bool(draw[1] % 2) for draw in draws]

    def _fill(
        self, places: list[int], drawn: Drawn, images: Array, labels: Array
    ) -> dict[int, DataError]:
        """Warp windows into these places of a batch; return the errors of bad images by number."""
        windows, mirrored = drawn
        bad: dict[int, DataError] = {}
        todo = list(range(len(places)))
        if self._decoders:
            todo = self._fill_elsewhere(self._decoders, places, drawn, images, labels)
        elif kernels := jpegs.kernels(len(places)) if images.dtype == np.float32 else None:
            todo = self._fill_by(kernels, places, drawn, images, labels)

        def warp_some(lo: int, hi: int) -> None:
            for k in todo[lo:hi]:
                image, label, *corners = map(int, windows[k])
                labels[places[k]] = label
                try:
                    self._warp(self._images[image], corners, mirrored[k], images[places[k]])
                except DataError as error:
                    bad[k] = error

        parallel(warp_some, len(todo), most=DECODERS)
        return bad

    def _fill_elsewhere(
        self, decoders: AnyDecoders, places: list[int], drawn: Drawn, images: Array, labels: Array
    ) -> list[int]:
        """Have other processes warp windows, or a GPU decode their images; return the numbers of
        those that they could not.
        """
        if self._task is None:
            self._task = Task(partial(warp, self._warping, images.dtype))
        files, arguments, left = list[File](), list[tuple[list[int], bool]](), list[int]()
        for window, is_mirrored, place in zip(*drawn, places, strict=True):
            image, labels[place], *corners = map(int, window)
            name = self._images[image]
            files.append(self._cache.get(name) or os.path.abspath(self._root + name))
            arguments.append((corners, is_mirrored))

        def take(k: int, some: Array | None) -> None:
            if some is None:
                left.append(k)
                return
            for i, image in enumerate(some, k):
                images[places[i]] = image

        decoders.run(self._task, range(len(places)), files, arguments, take)
        return sorted(left)

    def _fill_by(
        self, kernels: Any, places: list[int], drawn: Drawn, images: Array, labels: Array
    ) -> list[int]:
        """Have kernels warp windows of JPEG files; return the numbers of those that are left."""
        windows, mirrored = drawn
        done = np.zeros(len(places), np.bool_)
        mean, scale = self._warping.mean, self._warping.scale

        def warp_some(lo: int, hi: int) -> None:
            for k in range(lo, hi, kernels.PIECE):
                piece = slice(k, min(k + kernels.PIECE, hi))
                rows = [list(map(int, window)) for window in windows[piece]]
                labels[places[piece]] = [row[1] for row in rows]
                names = [self._images[row[0]] for row in rows]
                paths = [self._root + name for name in names]
                contents = [self._cache.get(name, b"") for name in names] if self._cache else None
                window_of = partial(self._window_of, rows, mirrored[piece])
                done[piece] = kernels.decode_windows(
                    paths, contents, window_of, mean, scale, images, places[piece]
                )

        parallel(warp_some, len(places), kernels.PIECE)
        return np.flatnonzero(~done).tolist()

    def _window_of(
        self, rows: list[list[int]], mirrored: list[bool], i: int, h: int, w: int
    ) -> tuple[int, ...] | None:
        """Return window i for `decode_windows`; None if it is empty, or outside of its image."""
        with suppress(DataError):  # raised again by `_warp`
            window = self._warping.window(rows[i][2:], mirrored[i], h, w)
            return window if min(window[4:6]) > 0 else None
        return None

    def _warp(self, name: str, corners: list[int], mirrored: bool, out: Array) -> None:
        """Write the window of the image into out (3, crop, crop), which holds zeros."""
        content = self._cache[name] if name in self._cache else self._content(name)
        try:
            self._warping.write(content, corners, mirrored, out)
        except DataError as error:
            raise DataError(f"{self._name(name)}: {error.message}") from None

    def _content(self, name: str) -> bytes:
        try:
            return read_regular(self._root + name)
        except OSError as error:
            raise unreadable(self._name(name), error, self._root) from None

    def _name(self, name: str) -> str:
        return f"{self._path}: {self._root}{name}"

    def state(self) -> State:
        return {**self._twister.state(), **self.bad.state()}

    def seek(self, state: State) -> None:
        self._twister.set_state(state)
