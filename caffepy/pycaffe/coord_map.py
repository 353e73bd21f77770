"""pycaffe's coordinate maps: where a position in one blob lies in another, and Crop layers that
align two blobs.

A map is (axis, a, b): position x in one blob is a*x + b in the other, along the axes after `axis`;
a and b have one number for each of them, or one for all. The axis is None for layers that keep all
positions.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.pycaffe.net_spec import Function, Top, layers

CoordMap = tuple[int | None, Any, Any]

PASS_THROUGH_LAYERS = [
    *("AbsVal", "BatchNorm", "Bias", "BNLL", "Dropout", "Eltwise", "ELU", "Log", "LRN", "Exp"),
    *("MVN", "Power", "ReLU", "PReLU", "Scale", "Sigmoid", "Split", "TanH", "Threshold"),
]
BY_AXIS = {f"{name}_{axis}" for name in ("kernel", "stride", "pad") for axis in "hw"}
IDENTITY: CoordMap = None, 1, 0


class UndefinedMapException(Exception):  # noqa: N818 # Caffe's name
    """A layer whose output has no positions of its input."""


class AxisMismatchException(Exception):  # noqa: N818 # Caffe's name
    """Two maps of different axes in a row."""


def conv_params(fn: Function) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return axis, stride, size of the dilated kernel, and padding of a layer with windows.

    AssertionError for sizes by axis (kernel_h, ...), UndefinedMapException without a kernel_size.
    """
    params = fn.params.get("convolution_param", fn.params.get("pooling_param", fn.params))
    by_axis = ", ".join(sorted(BY_AXIS & {*params}))
    assert not by_axis, (
        f"{fn.type_name}: {by_axis} cannot be mapped; give lists, as in kernel_size=[3, 5]"
    )
    if "kernel_size" not in params:
        raise UndefinedMapException(f"{fn.type_name} has no kernel_size")
    size, dilation, stride, pad = (
        np.array(params.get(name, default), ndmin=1)
        for name, default in (("kernel_size", 0), ("dilation", 1), ("stride", 1), ("pad", 0))
    )
    return params.get("axis", 1), stride, (size - 1) * dilation + 1, pad


def crop_params(fn: Function) -> tuple[int, NDArray[Any]]:
    """Return the first axis that a Crop cuts, and its offset."""
    params = fn.params.get("crop_param", fn.params)
    return params.get("axis", 2), np.array(params.get("offset", 0), ndmin=1)


def coord_map(fn: Function) -> CoordMap:
    """Return the map from positions in a layer's first input to those in its output.

    UndefinedMapException if there is none.
    """
    if fn.type_name in ("Convolution", "Pooling", "Im2col"):
        axis, stride, size, pad = conv_params(fn)
        return axis, 1 / stride, (pad - (size - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, size, pad = conv_params(fn)
        return axis, stride, (size - 1) / 2 - pad
    if fn.type_name == "Crop":
        axis, offset = crop_params(fn)
        # a map's axis is the last without positions, a Crop's the first with them
        return axis - 1, 1, -offset
    if fn.type_name in PASS_THROUGH_LAYERS:
        return IDENTITY
    raise UndefinedMapException(f"{fn.type_name} has no map of positions")


def compose(base_map: CoordMap, next_map: CoordMap) -> CoordMap:
    """Return a1*(a2*x + b2) + b1 of these two maps; AxisMismatchException if their axes differ."""
    axis1, a1, b1 = base_map
    axis2, a2, b2 = next_map
    if axis1 is not None and axis2 is not None and axis1 != axis2:
        raise AxisMismatchException(f"a map of axis {axis2} is followed by one of axis {axis1}")
    return axis2 if axis1 is None else axis1, a1 * a2, a1 * b2 + b1


def inverse(coord_map: CoordMap) -> CoordMap:
    """Return the inverse map."""
    axis, a, b = coord_map
    return axis, 1 / a, -b / a


def coord_map_from_to(top_from: Top, top_to: Top) -> CoordMap:
    """Return the map from positions in one top to those in another, through a common ancestor.

    RuntimeError if there is none, or if a layer between them has no map.
    """
    maps_from = dict(_maps_to(top_from))
    for source, map_to in _maps_to(top_to):
        if source in maps_from:
            return compose(map_to, inverse(maps_from[source]))
    raise RuntimeError(
        "no map between these tops: are they connected by layers that keep positions?"
    )


def _maps_to(top: Top) -> Iterator[tuple[Top, CoordMap]]:
    """Yield the top itself and all blobs that it is computed from, each with its map to the top."""
    waiting: list[tuple[Top, CoordMap]] = [(top, IDENTITY)]
    seen = set()
    while waiting:
        source, to_top = waiting.pop(0)
        if source in seen:
            continue
        seen.add(source)
        yield source, to_top
        fn = source.fn
        for bottom in fn.inputs[:1] if fn.type_name == "Crop" else fn.inputs:
            try:
                waiting.append((bottom, compose(to_top, coord_map(fn))))
            except UndefinedMapException:
                break


def crop(top_from: Top, top_to: Top) -> Top:
    """Return a Crop layer that cuts `top_from` to the extent of `top_to`; AssertionError if it
    cannot.

    Both need the same scale, and offsets that are whole and not negative.
    """
    axis, a, b = coord_map_from_to(top_from, top_to)
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    assert (a == 1).all(), f"scale mismatch on crop (a = {a})"
    assert (b <= 0).all(), f"cannot crop negative offset (b = {b})"
    assert (np.round(b) == b).all(), f"cannot crop noninteger offset (b = {b})"
    cropped: Top = layers.Crop(
        top_from,
        top_to,
        crop_param={"axis": (1 if axis is None else axis) + 1, "offset": [int(-x) for x in b]},
    )
    return cropped
