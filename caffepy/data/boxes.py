"""Boxes around the objects of an image, and how they follow it when it is cut and resized.

Objects are rows (n, 7) of float32: label, instance, xmin, ymin, xmax, ymax in units of the image,
difficult. A window (4,) is xmin, ymin, xmax, ymax in the same units.
"""

from functools import partial
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.data.augment import Rng, Size
from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import kernel
from caffepy.proto.caffe_pb2 import (
    BatchSampler,
    EmitConstraint,
    ResizeParameter,
    SampleConstraint,
)

LABEL, INSTANCE, DIFFICULT = 0, 1, 6
BOX = slice(2, 6)
COLUMNS = 7

WHOLE = np.array([0, 0, 1, 1], np.float32)
"""The window of the whole image."""

# what a sample must be to some object: its intersection over union, or its part of one of the two
OVERLAP, OF_SAMPLE, OF_OBJECT = range(3)
CONSTRAINTS = {
    OVERLAP: "jaccard_overlap",
    OF_SAMPLE: "sample_coverage",
    OF_OBJECT: "object_coverage",
}


def areas(boxes: Array) -> Array:
    """Areas of boxes (..., 4); 0 for those that are inverted."""
    sides: Array = (boxes[..., 2:] - boxes[..., :2]).clip(0)
    return np.asarray(sides[..., 0] * sides[..., 1])


def project(
    objects: Array, window: Array, emit: EmitConstraint | None, sizes: Array | None = None
) -> Array:
    """The objects as seen from the window, clipped to it: those of which something is left, and of
    which the window has as much as `emit` asks for, in parts of their areas or of other `sizes`.
    """
    boxes = objects[:, BOX]
    inside = np.concatenate(
        [np.maximum(boxes[:, :2], window[:2]), np.minimum(boxes[:, 2:], window[2:])], 1
    )
    sides = window[2:] - window[:2]
    seen = ((boxes - np.tile(window[:2], 2)) / np.tile(sides, 2)).clip(0, 1)
    keep: Array = (areas(inside) > 0) & (areas(seen) > 0)
    if emit is not None and emit.emit_type == EmitConstraint.CENTER:
        centre = (boxes[:, :2] + boxes[:, 2:]) / 2
        keep &= ((centre >= window[:2]) & (centre <= window[2:])).all(1)
    elif emit is not None:
        whole = areas(boxes) if sizes is None else sizes
        part = np.divide(areas(inside), whole, out=np.zeros_like(boxes[:, 0]), where=keep)
        keep &= part > np.float32(emit.emit_overlap)
    projected = objects[keep]
    projected[:, BOX] = seen[keep]
    return projected


def mirror(objects: Array) -> None:
    """Mirror the objects, in place."""
    objects[:, 2], objects[:, 4] = 1 - objects[:, 4], 1 - objects[:, 2].copy()


def follow_resize(objects: Array, size: Size, param: ResizeParameter) -> Array:
    """The objects of an image of this size after it was resized."""
    width, height = np.float32(param.width), np.float32(param.height)
    old = np.array([size[1], size[0]], np.float32)
    aspect, pad = old[0] / old[1], np.zeros(2, np.float32)
    wide = bool(aspect > width / height)
    if param.resize_mode == ResizeParameter.FIT_SMALL_SIZE:
        width, height = (aspect * height, height) if wide else (width, width / aspect)
    elif param.resize_mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
        free = (height - width / aspect) / 2 if wide else (width - aspect * height) / 2
        pad[int(wide)] = free
    new = np.array([width, height], np.float32)
    resized = objects.copy()
    pixels = objects[:, BOX].reshape(-1, 2, 2) * old * (new - 2 * pad) / old  # in this order
    pixels[:, 0] = np.maximum(pixels[:, 0], 0)
    pixels[:, 1] = np.minimum(pixels[:, 1], new)
    resized[:, BOX] = ((pixels + pad) / new).reshape(-1, 4)
    return resized


def rescale(objects: Array, size: Size, param: ResizeParameter, window: Array) -> None:
    """Give boxes in units of width_scale and height_scale, in place, if FIT_SMALL_SIZE has them.

    They come in units of the window that was cut from an image, of this size before its resizing.
    """
    if not (
        param.resize_mode == ResizeParameter.FIT_SMALL_SIZE
        and param.height_scale
        and param.width_scale
    ):
        return
    width, height = np.float32(param.width), np.float32(param.height)
    aspect = np.float32(size[1]) / np.float32(size[0])
    wide = bool(aspect >= width / height)
    width, height = (aspect * height, height) if wide else (width, width / aspect)
    sides = np.array([width, height], np.float32) * (window[2:] - window[:2])
    units = np.array([param.width_scale, param.height_scale], np.float32)
    objects[:, BOX] *= np.tile(sides / units, 2)


class Samplers:
    """Draws windows by the batch_samplers of annotated_data_param."""

    def __init__(self, samplers: list[BatchSampler]) -> None:
        used = [s for s in samplers if s.use_original_image]
        for s in used:
            _check(s)
        self._settings = np.array([_settings(s) for s in used], np.float64).reshape(len(used), 9)
        self._trials = int(self._settings[:, 8].max(initial=0))

    def draw(self, objects: Array, rng: Rng) -> Array | None:
        """One of the windows (4,), within 0 to 1, that a sampler accepted, or None."""
        count, trials = len(self._settings), self._trials
        if not count * trials:
            return None
        windows = np.empty((count * trials, 4))
        boxes = np.ascontiguousarray(objects[:, BOX], np.float64)
        found = _sample(rng.random((count, trials, 4)), self._settings, boxes, windows)
        if not found:
            return None
        return np.asarray(windows[rng.integers(found)].clip(0, 1), np.float32)


def _check(sampler: BatchSampler) -> None:
    s = sampler.sampler
    if not 0 < s.min_scale <= s.max_scale <= 1:
        raise ConfigError(
            f"batch_sampler: scales must be above 0 and up to 1, not {s.min_scale:g} to "
            f"{s.max_scale:g}"
        )
    if not 0 < s.min_aspect_ratio <= s.max_aspect_ratio < np.inf:
        raise ConfigError(
            f"batch_sampler: aspect ratios must be above 0, not {s.min_aspect_ratio:g} to "
            f"{s.max_aspect_ratio:g}"
        )


def _settings(sampler: BatchSampler) -> list[float]:
    """Ranges of scale and aspect ratio, kind of constraint (-1: none) and its range, most samples,
    trials.

    Of several kinds of constraint only the first counts, as in the fork, where an object that has
    passed it is never unfound.
    """
    s, constraint = sampler.sampler, sampler.sample_constraint
    kind, least, most = -1, -np.inf, np.inf
    for known, name in CONSTRAINTS.items():
        bounds = [_bound(constraint, f"{side}_{name}") for side in ("min", "max")]
        if kind < 0 and bounds != [None, None]:
            kind = known
            least = -np.inf if bounds[0] is None else bounds[0]
            most = np.inf if bounds[1] is None else bounds[1]
    samples = sampler.max_sample if sampler.HasField("max_sample") else sampler.max_trials
    ranges = [s.min_scale, s.max_scale, s.min_aspect_ratio, s.max_aspect_ratio]
    return [*ranges, kind, least, most, samples, sampler.max_trials]


def _bound(constraint: SampleConstraint, name: str) -> float | None:
    return float(getattr(constraint, name)) if constraint.HasField(name) else None


@partial(kernel, fastmath=set())
def _sample(draws: Array, settings: Array, boxes: Array, windows: Array) -> Any:
    """Write the accepted windows; return how many there are.

    A window has width scale * sqrt(aspect) and height scale / sqrt(aspect), at most 1 each.
    """
    found = 0
    for s in range(len(settings)):
        least_scale, most_scale, least_aspect, most_aspect = settings[s, :4]
        kind, least, most, samples = settings[s, 4:8]
        own = 0
        for t in range(int(settings[s, 8])):
            if own >= samples:
                break
            scale = least_scale + draws[s, t, 0] * (most_scale - least_scale)
            aspect = least_aspect + draws[s, t, 1] * (most_aspect - least_aspect)
            aspect = min(max(aspect, scale * scale), 1 / (scale * scale))
            width, height = scale * np.sqrt(aspect), scale / np.sqrt(aspect)
            x, y = draws[s, t, 2] * max(1 - width, 0), draws[s, t, 3] * max(1 - height, 0)
            accepted = kind < 0
            for i in range(len(boxes)):
                if accepted:
                    break
                w = min(x + width, boxes[i, 2]) - max(x, boxes[i, 0])
                h = min(y + height, boxes[i, 3]) - max(y, boxes[i, 1])
                common = w * h if w > 0 and h > 0 else 0.0
                size = (boxes[i, 2] - boxes[i, 0]) * (boxes[i, 3] - boxes[i, 1])
                if kind == OVERLAP:
                    whole = width * height + size - common
                elif kind == OF_SAMPLE:
                    whole = width * height
                else:
                    whole = size
                part = common / whole if common > 0 else 0.0
                accepted = least <= part <= most
            if accepted:
                windows[found, 0], windows[found, 1] = x, y
                windows[found, 2], windows[found, 3] = x + width, y + height
                found += 1
                own += 1
    return found


def jitter(amount: float, rng: Rng) -> Array:
    """A window (4,) as MobileNet-YOLO draws it: the whole image in a fifth of all cases, else sides
    of 1 - `amount` to 1, or of half that amount in another fifth.
    """
    kind = rng.random()
    if kind < 0.2:
        return WHOLE
    amount = amount / 2 if kind < 0.4 else amount
    sides = rng.uniform(1 - amount, 1, 2)
    start = rng.uniform(0, 1, 2) * (1 - sides)
    return np.concatenate([start, start + sides]).astype(np.float32)
