"""Layers that multiply with weights: convolutions, inner products, tables."""

from collections.abc import Sequence
from math import prod
from operator import add

import numpy as np

from caffepy.export.graph import Site, writers


@writers(
    "Convolution",
    "Convolution3D",
    "ConvolutionDepthwise",
    "DepthwiseConvolution",
    "DepthwiseConv",
    "Deconvolution",
    "Deconvolution3D",
)
def convolution(site: Site) -> None:
    """Conv, or ConvTranspose, which has Caffe's weight and output size, for each bottom.

    Axes before the channels become one axis; without spatial axes one of size 1 is added.
    """
    layer = site.layer
    op = "ConvTranspose" if layer.type.startswith("Deconvolution") else "Conv"
    kernel, stride, pad, dilation = layer.window
    size = site.bottom_shapes[0][layer.axis + 1 :]
    point = () if kernel else (1,)
    weight = site.param(0, (*layer.blobs[0].shape, *point))
    bias = [site.param(1, (layer.outputs,))] if len(layer.blobs) > 1 else []
    attributes = {
        "kernel_shape": list(kernel or point),
        "strides": list(stride or (1,)),
        "pads": _pads(layer.window.pad, layer.borders(size))
        if op == "Conv" and kernel
        else list((pad or (0,)) * 2),
        "dilations": list(dilation or (1,)),
        "group": layer.group,
    }
    for x, shape, y, top_shape in zip(
        site.bottoms, site.bottom_shapes, site.tops, site.top_shapes, strict=True
    ):
        if layer.axis == 1 and kernel:
            site.node(op, x, weight, *bias, out=y, **attributes)
            continue
        images = site.reshape(x, (prod(shape[: layer.axis]), *shape[layer.axis :], *point))
        site.reshape(site.node(op, images, weight, *bias, **attributes), top_shape, out=y)


def _pads(pad: Sequence[int], borders: Sequence[tuple[int, int]]) -> list[int]:
    """Return the zeros before and behind each axis of a convolution."""
    before, behind = zip(*borders, strict=True)
    return [*map(add, pad, before), *map(add, pad, behind)]


@writers("Im2col")
def im2col(site: Site) -> None:
    """Conv with a kernel for each channel and place in the window: 1 there, 0 elsewhere."""
    layer, shape = site.layer, site.bottom_shapes[0]
    kernel, stride, _, dilation = layer.window
    channels, places = shape[layer.axis], prod(kernel)
    one = np.tile(np.eye(places).reshape(places, 1, *kernel), (channels, 1) + (1,) * len(kernel))
    size = shape[layer.axis + 1 :]
    borders = [(0, g - n) for g, n in zip(layer.window.grown(size), size, strict=True)]
    pads = _pads(layer.window.pad, borders)
    steps = {"strides": list(stride), "pads": pads, "dilations": list(dilation)}
    weight = site.constant(one, what="places")
    (x,), (y,) = site.bottoms, site.tops
    if layer.axis == 1:
        site.finish("Conv", x, weight, **steps, group=channels)
    else:
        images = site.reshape(x, (prod(shape[: layer.axis]), *shape[layer.axis :]))
        taken = site.node("Conv", images, weight, **steps, group=channels)
        site.reshape(taken, site.top_shapes[0], out=y)


@writers("InnerProduct")
def inner_product(site: Site) -> None:
    """Gemm; further axes are flattened before and restored afterwards."""
    layer, (x,), (y,) = site.layer, site.bottoms, site.tops
    if len(site.bottom_shapes[0]) != 2 or layer.axis != 1:
        x = site.node("Flatten", x, axis=layer.axis)
    params = [site.param(i) for i in range(len(layer.blobs))]
    transposed = int(not layer.transposed)
    if layer.axis == 1:
        site.finish("Gemm", x, *params, transB=transposed)
    else:
        site.reshape(site.node("Gemm", x, *params, transB=transposed), site.top_shapes[0], out=y)


@writers("MatMul")
def matmul(site: Site) -> None:
    """MatMul of the factors, each turned if its layer says so."""
    layer = site.layer
    factors = list(site.bottoms) if len(site.bottoms) > 1 else [site.bottoms[0], site.param(0)]
    for i, turned in enumerate(layer.turned):
        if layer.by_dims:
            factors[i] = site.reshape(factors[i], layer.views[i][1:])
        if turned:
            shape = site.bottom_shapes[i] if i < len(site.bottoms) else layer.blobs[0].shape
            axes = 2 if layer.by_dims else len(shape)
            order = [*range(axes - 2), axes - 1, axes - 2]
            factors[i] = site.node("Transpose", factors[i], perm=order)
    site.finish("MatMul", *factors)


@writers("Embed")
def embed(site: Site) -> None:
    """Gather, then the bias."""
    x = site.node("Cast", site.bottoms[0], to=np.dtype(np.int64))
    if len(site.layer.blobs) > 1:
        site.finish("Add", site.node("Gather", site.param(0), x), site.param(1))
    else:
        site.finish("Gather", site.param(0), x)
