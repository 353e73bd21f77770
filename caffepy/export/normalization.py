"""Layers that normalize, and the scale and bias that go with them."""

from collections.abc import Sequence

import numpy as np

from caffepy.export.graph import InexpressibleError, Site, writers


@writers("LRN")
def lrn(site: Site) -> None:
    """LRN across channels, with Caffe's formula; within a channel several operators."""
    layer, (x,) = site.layer, site.bottoms
    if layer.across:
        size, alpha, beta, k = layer.terms
        site.finish("LRN", x, size=size, alpha=alpha, beta=beta, bias=k)
        return
    kernel, stride, pad = layer.pooling
    window = {"kernel_shape": list(kernel), "strides": list(stride), "pads": list(pad * 2)}
    mean = site.node("AveragePool", site.node("Mul", x, x), count_include_pad=1, **window)
    scale = site.affine(mean, layer.alpha, 1)
    site.finish("Mul", x, site.node("Pow", scale, site.constant(-layer.beta)))


@writers("BatchNorm", "CuDNNBatchNorm")
def batch_norm(site: Site) -> None:
    """BatchNormalization with the stored sums divided by their weight.

    With statistics of the batch it takes several operators.
    """
    layer, (x,) = site.layer, site.bottoms
    channels = layer.blobs[0].count
    if not layer.is_global:
        if any(layer.lacks):
            raise InexpressibleError("half a BatchNorm needs stored statistics: use_global_stats")
        rank = len(site.bottom_shapes[0])
        site.note("normalizes by the statistics of the batch that it is given")
        y = _normalized(site, x, [0, *range(2, rank)], layer.eps)
        if layer.scales:
            shape = (channels,) + (1,) * (rank - 2)
            y = site.node("Mul", y, site.param(3, shape))
            site.node("Add", y, site.param(4, shape))
        site.name_last()
        return
    weight = float(layer.blobs[2].host_data[0])
    factor = np.float32(1 / weight if weight else 0)
    mean, variance = (
        site.constant(np.full(channels, without), what="statistics")
        if lacks
        else site.param(i, value=layer.blobs[i].host_data * factor)
        for i, (lacks, without) in enumerate(zip(layer.lacks, (0, 1 - layer.eps), strict=True))
    )
    if layer.scales:
        scale, bias = site.param(3), site.param(4)
    else:
        scale = site.constant(np.ones(channels), what="ones")
        bias = site.constant(np.zeros(channels), what="zeros")
    site.finish("BatchNormalization", x, scale, bias, mean, variance, epsilon=layer.eps)


@writers("BN")
def bn(site: Site) -> None:
    """BatchNormalization where statistics are stored, Mul and Add where there are none; with those
    of the batch several operators, and as further tops what they give.
    """
    layer, (x,) = site.layer, site.bottoms
    channels = layer.blobs[0].count
    if layer.runs and not layer.learns:
        params = [site.param(i, (channels,)) for i in range(4)]
        site.finish("BatchNormalization", x, *params, epsilon=layer.eps)
        return
    rank = len(site.bottom_shapes[0])
    shape = (channels,) + (1,) * (rank - 2)
    if layer.learns:
        site.note("normalizes by the statistics of the batch that it is given")
        names = [*site.tops[1:], None, None][:2]
        x = _normalized(site, x, [0, *range(2, rank)], layer.eps, outs=names)
    else:
        for top, value in zip(site.tops[1:], (0, 1 - layer.eps), strict=False):
            site.node("Identity", site.constant(np.full((1, channels, 1, 1), value)), out=top)
    site.finish("Add", site.node("Mul", x, site.param(0, shape)), site.param(1, shape))


def _normalized(
    site: Site,
    x: str,
    axes: list[int],
    eps: float,
    inside: bool = True,
    outs: Sequence[str | None] = (None, None),
) -> str:
    """(x - mean) / deviation; eps is added to the variance if `inside`, else to the deviation;
    `outs` are the names of mean and variance.
    """
    mean = site.reduce("ReduceMean", x, axes, out=outs[0])
    centred = site.node("Sub", x, mean)
    variance = site.reduce("ReduceMean", site.node("Mul", centred, centred), axes, out=outs[1])
    if inside:
        return site.node("Div", centred, site.node("Sqrt", site.affine(variance, 1, eps)))
    return site.node("Div", centred, site.affine(site.node("Sqrt", variance), 1, eps))


@writers("MVN")
def mvn(site: Site) -> None:
    """Normalize the pixels of each channel or of all channels, with four axes."""
    layer, (x,), (shape,) = site.layer, site.bottoms, site.top_shapes
    if len(site.bottom_shapes[0]) < len(shape):
        x = site.reshape(x, shape)
    axes = list(range(1 if layer.param.mvn_param.across_channels else 2, len(shape)))
    if layer.normalizes:
        _normalized(site, x, axes, layer.eps, inside=False)
        site.name_last()
    else:
        site.finish("Sub", x, site.reduce("ReduceMean", x, axes))


@writers("Normalize")
def normalize(site: Site) -> None:
    """x divided by its norm, times the scale; the norm as the second top."""
    layer, (x,) = site.layer, site.bottoms
    axes = list(range(1, len(site.bottom_shapes[0]))) if layer.across else [1]
    if layer.absolute:
        norm = site.affine(site.reduce("ReduceL1", x, axes), 1, layer.eps)
    else:
        squares = site.reduce("ReduceSumSquare", x, axes)
        norm = site.node("Sqrt", site.affine(squares, 1, layer.eps))
    if layer.scaled:
        shape = layer.blobs[0].shape
        broadcast = shape + (1,) * (len(site.top_shapes[0]) - 2) if shape else shape
        site.finish("Mul", site.node("Div", x, norm), site.param(0, broadcast))
        return
    for i, value in enumerate([site.node("Div", x, norm), norm][: len(site.tops)]):
        site.reshape(value, site.top_shapes[i], out=site.tops[i])


@writers("GRN", "NormalizationL2", "L2Normalize")
def divided_by_norm(site: Site) -> None:
    """x / sqrt(sum of squares + a small number)."""
    layer, (x,) = site.layer, site.bottoms
    by_item = layer.type != "GRN"
    axes = list(range(1, len(site.bottom_shapes[0]))) if by_item else [1]
    squares = site.affine(site.reduce("ReduceSumSquare", x, axes), 1, layer.eps)
    norm = site.node("Sqrt", squares)
    if site.top_shapes[0] != site.bottom_shapes[0]:
        site.reshape(site.node("Div", x, norm), site.top_shapes[0], site.tops[0])
    else:
        site.finish("Div", x, norm)


@writers("Scale", "EltwiseAffine")
def scale(site: Site) -> None:
    """Mul and Add; directly after a BatchNormalization its scale and bias."""
    layer = site.layer
    last, values = site.graph.nodes[-1] if site.graph.nodes else None, site.graph.values
    if (
        last
        and layer.by_channels
        and last.op == "BatchNormalization"
        and last.outputs == [site.bottoms[0]]
        and site.bottoms[0] in site.graph.once  # nothing else reads it
        and ":" in last.inputs[1]
        and last.inputs[1] in values
        and (values[last.inputs[1]] == 1).all()
    ):
        last.inputs[1] = site.param(0)
        if layer.bias is not None:
            last.inputs[2] = site.param(1)
        last.outputs[0] = site.tops[0]
        return
    axis = layer.param.scale_param.axis
    product = [site.bottoms[0], _operand(site, axis, layer.scale.shape)]
    if layer.bias is None:
        site.finish("Mul", *product)
        return
    bias = site.param(len(layer.blobs) - 1, _broadcast(site, axis, layer.bias.shape))
    site.finish("Add", site.node("Mul", *product), bias)


@writers("Bias")
def bias(site: Site) -> None:
    operand = _operand(site, site.layer.param.bias_param.axis, site.layer.bias.shape)
    site.finish("Add", site.bottoms[0], operand)


def _broadcast(site: Site, axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with an axis of 1 for each axis of the bottom after it."""
    rank = len(site.bottom_shapes[0])
    return (*shape, *(1,) * (rank - axis % rank - len(shape))) if shape else ()


def _operand(site: Site, axis: int, shape: tuple[int, ...]) -> str:
    """Parameter 0 or bottom 1, in a shape that broadcasts over the axes after it."""
    wanted = _broadcast(site, axis, shape)
    if len(site.bottoms) == 1:
        return site.param(0, wanted)
    following = range(len(shape), len(wanted))
    x = site.bottoms[1]
    return site.node("Unsqueeze", x, site.integers(following, "axes")) if following else x
