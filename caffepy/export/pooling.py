"""Pooling with Caffe's rules: the last windows may reach beyond the padding; the divisor of means
counts padding, but no elements beyond it.

All paddings are explicit: the meaning of ceil_mode together with count_include_pad differs between
opsets and runtimes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.export.graph import InexpressibleError, Shape, Site, writers
from caffepy.proto.caffe_pb2 import PoolingParameter


@writers("Pooling")
def pooling(site: Site) -> None:
    pool(site, site.layer, site.top_shapes[0], site.tops)


@writers("Pooling3D", "PoolingND")
def volumes(site: Site) -> None:
    """MaxPool; or AveragePool over zeros, times how many more elements it counts."""
    layer, (x,) = site.layer, site.bottoms
    size, out = site.bottom_shapes[0][2:], site.top_shapes[0][2:]
    kernel, stride, pad = layer.window
    axes = list(zip(size, out, kernel, stride, pad, strict=True))
    end = [max(0, (o - 1) * s + k - n - p) for n, o, k, s, p in axes]
    if any((o - 1) * s - p >= n for n, o, k, s, p in axes):
        raise InexpressibleError(
            "its strides are so large that its last windows lie outside the image"
        )
    window = {"kernel_shape": list(kernel), "strides": list(stride)}
    if not layer.mean:
        site.finish("MaxPool", x, **window, pads=[*pad, *end])
        return
    padded = site.node("Pad", x, site.integers([0, 0, *pad, 0, 0, *end], "pads"))
    means = site.node("AveragePool", padded, **window)
    counts = [[k / min(k, n + 2 * p - i * s) for i in range(o)] for n, o, k, s, p in axes]
    factors = np.einsum("i,j,k->ijk", *counts).astype(np.float32)
    site.finish("Mul", means, site.constant(factors))


@writers("ROIPooling")
def roi_pooling(site: Site) -> None:
    x, rois = site.bottoms
    if site.layer.param.roi_pooling_param.pad_ratio:
        raise InexpressibleError("no operator makes boxes larger by a pad_ratio")
    rois = site.reshape(rois, (site.bottom_shapes[1][0], 5))
    scale, size = site.layer.scale, list(site.layer.size)
    site.finish("MaxRoiPool", x, rois, pooled_shape=size, spatial_scale=scale)


@writers("ROIAlign")
def roi_align(site: Site) -> None:
    """RoiAlign; its boxes and their images come apart."""
    layer, (x, rois) = site.layer, site.bottoms
    if layer.of_corners:
        raise InexpressibleError("no operator has the values at the corners of parts")
    if layer.beyond:
        raise InexpressibleError("no operator has its roi_end_mode 1")
    rois = site.reshape(rois, (site.bottom_shapes[1][0], 5))
    image, box = site.between("image"), site.between("box")
    site.node("Split", rois, site.integers([1, 4], "parts"), out=[image, box], axis=1)
    image = site.node("Cast", site.reshape(image, (-1,)), to=np.dtype(np.int64))
    old = {"coordinate_transformation_mode": "output_half_pixel"}
    site.finish(
        "RoiAlign",
        x,
        box,
        image,
        output_height=layer.size[0],
        output_width=layer.size[1],
        sampling_ratio=max(layer.samples, 0),
        spatial_scale=layer.scale,
        **(old if site.graph.opset >= 16 else {}),
    )


def pool(site: Site, layer: Any, out_shape: Shape, outs: Sequence[str | None]) -> str:
    """Pool the bottom with the settings of a Pooling layer; `outs` are its tops."""
    size, out = site.bottom_shapes[0][2:], out_shape[2:]
    beyond = [
        (o - 1) * s + k - n - p  # elements of the last window beyond the end of the image
        for n, o, k, s, p in zip(size, out, layer.kernel, layer.stride, layer.pad, strict=True)
    ]
    if any(b >= k for b, k in zip(beyond, layer.kernel, strict=True)):
        raise InexpressibleError(
            "its strides are so large that its last windows lie outside the image"
        )
    end = [max(0, b) for b in beyond]
    (x,) = site.bottoms
    if layer.method == PoolingParameter.MAX:
        return _max(site, layer, end, outs)
    if layer.mean:
        return _mean(site, layer, x, end, outs[0])
    if layer.draws:
        raise InexpressibleError("STOCHASTIC pooling draws random numbers in the TRAIN phase")
    # sum of squares / sum, 0 if the sum is not above 0; both as means with one divisor
    squares = _mean(site, layer, site.node("Mul", x, x), end, None)
    total, zero = _mean(site, layer, x, end, None), site.constant(0)
    above = site.node("Greater", total, zero)
    return site.node("Where", above, site.node("Div", squares, total), zero, out=outs[0])


def _window(layer: Any, begin: Sequence[int], end: Sequence[int]) -> dict[str, list[int]]:
    kernel, strides = list(layer.kernel), list(layer.stride)
    return {"kernel_shape": kernel, "strides": strides, "pads": [*begin, *end]}


def _max(site: Site, layer: Any, end: Sequence[int], outs: Sequence[str | None]) -> str:
    (x,) = site.bottoms
    if len(outs) == 1 and layer.whole:
        return site.node("GlobalMaxPool", x, out=outs[0])
    window = _window(layer, layer.pad, end)
    if len(outs) == 1:
        return site.node("MaxPool", x, out=outs[0], **window)
    assert outs[0] is not None
    places = site.between("places")
    y = site.node("MaxPool", x, out=[outs[0], places], **window)
    h, w = site.bottom_shapes[0][2:]
    within = site.node("Mod", places, site.constant(h * w, np.int64))
    site.node("Cast", within, out=outs[1], to=np.dtype(np.float32))
    return y


def _mean(site: Site, layer: Any, x: str, end: Sequence[int], out: str | None) -> str:
    """Means; the divisor counts padding, unless the layer excludes it, but nothing beyond it. Or
    sums: means times their divisors.
    """
    if layer.sums:
        means = _window_means(site, layer, x, end, None)
        factors = site.constant(np.array(layer.share.host_data, np.float32))
        return site.node("Mul", means, factors, out=out)
    return _window_means(site, layer, x, end, out)


def _window_means(site: Site, layer: Any, x: str, end: Sequence[int], out: str | None) -> str:
    if layer.whole:
        return site.node("GlobalAveragePool", x, out=out)
    pad, behind = layer.pad, [side[1] for side in layer.sides]
    count = 0
    if layer.excludes:
        pass
    elif all(e <= b for e, b in zip(end, behind, strict=True)):
        count = int(any((*pad, *end)))
    elif any((*pad, *behind)):  # it becomes part of the image, elements beyond it are padding
        x = site.node("Pad", x, site.integers([0, 0, *pad, 0, 0, *behind], "pads"))
        pad, end = (0, 0), [max(0, e - b) for e, b in zip(end, behind, strict=True)]
    window = _window(layer, pad, end)
    return site.node("AveragePool", x, out=out, count_include_pad=count, **window)


@writers("SPP")
def pyramid(site: Site) -> None:
    """Each level pooled, flattened and put side by side."""
    layer = site.layer
    if layer.height == 1:
        pool(site, layer.levels[0][0], site.top_shapes[0], site.tops)
        return
    levels = [pool(site, pooling, out.shape, [None]) for pooling, out in layer.levels]
    site.finish("Concat", *(site.node("Flatten", level, axis=1) for level in levels), axis=1)
