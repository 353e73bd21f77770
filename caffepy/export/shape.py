"""Layers that join, cut, select, repeat and reduce; Parameter and constant DummyData."""

from collections.abc import Sequence

import numpy as np

from caffepy.export.graph import InexpressibleError, Site, writers
from caffepy.proto.caffe_pb2 import (
    EltwiseParameter,
    FillerParameter,
    ReductionParameter,
    UnpoolingParameter,
)

ELTWISE = {EltwiseParameter.PROD: "Mul", EltwiseParameter.SUM: "Sum", EltwiseParameter.MAX: "Max"}


@writers("Eltwise")
def eltwise(site: Site) -> None:
    """Sum, Max, or products in turn."""
    layer, xs = site.layer, list(site.bottoms)
    if layer.operation == EltwiseParameter.PROD:
        x, *others = xs
        for other in others:
            x = site.node("Mul", x, other)
        site.name_last()
        return
    if layer.operation == EltwiseParameter.SUM:
        xs = [site.affine(x, c, 0) for x, c in zip(xs, layer.coefficients, strict=True)]
    two_summands = len(xs) == 2 and layer.operation == EltwiseParameter.SUM
    site.finish("Add" if two_summands else ELTWISE[layer.operation], *xs)


@writers("Axpy")
def axpy(site: Site) -> None:
    """a * x + y, with a size of 1 for each axis behind the channels."""
    (a, x, y), shape = site.bottoms, site.bottom_shapes[1]
    a = site.reshape(a, (*shape[:2], *[1] * (len(shape) - 2)))
    site.finish("Add", site.node("Mul", a, x), y)


@writers("ChannelScale")
def channel_scale(site: Site) -> None:
    """x * scale, a number for each place, or with global_scale the stored one."""
    (x, scale), shape = site.bottoms, site.bottom_shapes[0]
    param = site.layer.param.channel_scale_param
    if not param.do_forward:
        site.finish("Identity", x)
        return
    if param.global_scale:
        scale = site.param(0, (1,))
    else:
        scale = site.reshape(scale, (shape[0], 1, *shape[2:]))
    site.finish("Mul", x, scale)


@writers("ShuffleChannel")
def shuffle_channel(site: Site) -> None:
    """Transpose of (N, group, C / group, ...)."""
    group, (n, c, *rest) = site.layer.group, site.bottom_shapes[0]
    parts = site.reshape(site.bottoms[0], (n, group, c // group, *rest))
    order = [0, 2, 1, *range(3, len(rest) + 3)]
    site.reshape(site.node("Transpose", parts, perm=order), (n, c, *rest), out=site.tops[0])


@writers("Reorg")
def reorg(site: Site) -> None:
    """Transpose of (N, C / s^2, H, s, W, s) to (N, s, s, C / s^2, H, W), or back."""
    layer, shape = site.layer, site.top_shapes[0]
    given, order = layer.blocks, [0, 3, 5, 1, 2, 4]
    if layer.param.reorg_param.reverse:
        given, order = layer.channels, [0, 3, 4, 1, 5, 2]
    parts = site.reshape(site.bottoms[0], given)
    site.reshape(site.node("Transpose", parts, perm=order), shape, out=site.tops[0])


@writers("ChannelNorm")
def channel_norm(site: Site) -> None:
    site.reduce("ReduceL2", site.bottoms[0], [1], out=site.tops[0])


@writers("Mean")
def add_mean(site: Site) -> None:
    """x * input_scale * output_scale + what is left of the mean."""
    tops = zip(site.bottoms, site.tops, site.layer.means, strict=True)
    for x, top, mean in tops:
        scaled = site.node("Mul", x, site.constant(site.layer.factor))
        site.node("Add", scaled, site.constant(mean.host_data), out=top)


@writers("Accum")
def accum(site: Site) -> None:
    """Concat of each bottom as large as the top."""
    size = site.top_shapes[0][2:]
    how = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    parts = [
        x if shape[2:] == size else site.node("Resize", x, "", "", _sizes(site, x, size), **how)
        for x, shape in zip(site.bottoms, site.bottom_shapes, strict=True)
    ][: site.layer.taken]
    site.finish("Concat", *parts, axis=1)


@writers("Interp")
def interp(site: Site) -> None:
    """Resize with corners on corners, of a Slice if pads crop."""
    layer, (x,) = site.layer, site.bottoms
    if layer.crops:
        _, h, w = layer.window
        x = site.node(
            "Slice",
            x,
            site.integers([h.start, w.start], "starts"),
            site.integers([h.stop, w.stop], "ends"),
            site.integers([2, 3], "axes"),
        )
    size = site.top_shapes[0][2:]
    if size == tuple(layer.cropped):
        site.finish("Identity", x)
        return
    how = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    site.finish("Resize", x, "", "", _sizes(site, x, size), **how)


@writers("MaskResize", "ResizeBilinear", "ResizeNearestNeighbor")
def converted_resize(site: Site) -> None:
    """Resize of the axes behind the channels, which come second."""
    layer, x = site.layer, site.bottoms[0]
    param, bilinear = layer.settings(), site.layer.type != "ResizeNearestNeighbor"
    half, nearest = "half_pixel", "floor"
    if param.align_corners:
        how, nearest = "align_corners", "round_prefer_ceil"
    elif param.half_pixel_centers:
        how, nearest = half, "round_prefer_ceil"
    elif param.half_pixel_onnx:
        how = half
    else:
        how = "pytorch_half_pixel" if param.pytorch_half_pixel else "asymmetric"
    given: dict[str, str] = {"coordinate_transformation_mode": how}
    given |= {"mode": "linear"} if bilinear else {"mode": "nearest", "nearest_mode": nearest}
    last = param.data_format == "NHWC"
    size = [site.top_shapes[0][axis] for axis in layer.axes]
    if last:
        x = site.node("Transpose", x, perm=[0, 3, 1, 2])
    y = site.node("Resize", x, "", "", _sizes(site, x, size), **given)
    site.finish("Transpose", y, perm=[0, 2, 3, 1]) if last else site.finish("Identity", y)


@writers("MaskPooling")
def mask_pooling(site: Site) -> None:
    """Mul."""
    site.finish("Mul", *site.bottoms)


@writers("Upsample", "UpsampleDarknet")
def upsample(site: Site) -> None:
    """Resize to blocks of equal values; by places, ScatterElements into zeros."""
    layer, x = site.layer, site.bottoms[0]
    if not layer.by_place:
        scales = site.constant([1, 1, *layer.scales], what="scales")
        how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        site.finish("Resize", x, "", scales, mode="nearest", **how)
        return
    _unpool(site)


def _unpool(site: Site) -> None:
    """ScatterElements of the first bottom to the places of the second one, or to constant ones."""
    x, (n, c, h, w), shape = site.bottoms[0], site.bottom_shapes[0], site.top_shapes[0]
    if len(site.bottoms) > 1:
        places = site.node("Cast", site.bottoms[1], to=np.dtype(np.int64))
    else:
        values = site.layer.places.host_data.reshape(1, 1, h, w)
        sizes = site.node("Shape", x)
        places = site.node("Expand", site.constant(values, np.int64, "places"), sizes)
    values, places = (site.reshape(y, (n, c, h * w)) for y in (x, places))
    zeros_shape = _sizes(site, x, [shape[2] * shape[3]])
    zeros = site.node("ConstantOfShape", zeros_shape, value=np.zeros(1, np.float32))
    spread = site.node("ScatterElements", zeros, places, values, axis=2)
    site.reshape(spread, shape, out=site.tops[0])


@writers("Unpooling")
def unpooling(site: Site) -> None:
    """ScatterElements; a ConvTranspose of each channel with equal weights where windows are filled,
    cut or filled up to the size of the top.
    """
    layer = site.layer
    if layer.moves:
        _unpool(site)
        return
    x, (_, c, h, w) = site.bottoms[0], site.bottom_shapes[0]
    if layer.method == UnpoolingParameter.AVE:
        x = site.node("Mul", x, site.constant(layer.share.host_data))
    ones = site.constant(np.ones((c, 1, *layer.kernel)), what="ones")
    y = site.node("ConvTranspose", x, ones, group=c, strides=list(layer.stride))
    whole = [(s - 1) * by + k for s, by, k in zip((h, w), layer.stride, layer.kernel, strict=True)]
    ends = [o - s for o, s in zip(site.top_shapes[0][2:], whole, strict=True)]
    site.finish("Pad", y, site.integers([0, 0, 0, 0, 0, 0, *ends], "pads"))


def _sizes(site: Site, x: str, size: Sequence[int]) -> str:
    """The sizes of a tensor with batch and channels of x, whatever the batch is."""
    window = site.integers([0], "start"), site.integers([2], "end")
    both = site.node("Slice", site.node("Shape", x), *window)
    return site.node("Concat", both, site.integers(size, "size"), axis=0)


@writers("SpatialTransformer")
def spatial_transformer(site: Site) -> None:
    """GridSample at theta @ (s, t, 1); its places are half a pixel further, its columns first."""
    if site.graph.opset < 16:
        raise InexpressibleError("GridSample needs opset 16")
    layer, (x, theta) = site.layer, site.bottoms
    (n, _, h, w), (rows, columns) = site.bottom_shapes[0], site.top_shapes[0][2:]
    order = [3, 4, 5, 0, 1, 2]  # the row of theta that gives columns comes first
    given = layer.theta.host_data[0] * [i not in layer.free for i in range(6)]
    chosen = np.eye(6)[layer.free][:, order]
    theta = site.node("MatMul", site.reshape(theta, (n, len(layer.free))), site.constant(chosen))
    theta = site.reshape(site.node("Add", theta, site.constant(given[order])), (n, 2, 3))
    s, t = np.arange(rows) * 2 / rows - 1, np.arange(columns) * 2 / columns - 1
    grid = np.stack(
        [*(g.reshape(-1) for g in np.meshgrid(s, t, indexing="ij")), np.ones(rows * columns)]
    )
    places = site.node("MatMul", theta, site.constant(grid))  # (N, 2, 3) @ (3, rows * columns)
    places = site.node("Add", places, site.constant([[1 / w], [1 / h]]))
    places = site.node("Transpose", places, perm=[0, 2, 1])
    places = site.reshape(places, (n, rows, columns, 2))
    mode = "linear" if site.graph.opset >= 20 else "bilinear"
    site.finish("GridSample", x, places, mode=mode, padding_mode="zeros", align_corners=0)


@writers("PassThrough")
def pass_through(site: Site) -> None:
    """Transpose of (N, C, H, bh, W, bw) to (N, C, bh, bw, H, W)."""
    parts = site.reshape(site.bottoms[0], site.layer.blocks)
    turned = site.node("Transpose", parts, perm=[0, 1, 3, 5, 2, 4])
    site.reshape(turned, site.top_shapes[0], out=site.tops[0])


@writers("Concat")
def concat(site: Site) -> None:
    site.finish("Concat", *site.bottoms, axis=site.layer.axis)


@writers("Permute", "Transpose")
def permute(site: Site) -> None:
    site.finish("Transpose", site.bottoms[0], perm=site.layer.order)


@writers("Flip", "Reverse")
def flip(site: Site) -> None:
    """Slice from the last element to the first, of the axes that turn."""
    (x,), axes = site.bottoms, site.layer.axes
    if axes:
        ends = ("starts", [-1]), ("ends", [-(2**31)]), ("axes", axes), ("steps", [-1])
        window = (site.integers(v if what == "axes" else v * len(axes), what) for what, v in ends)
        site.finish("Slice", x, *window)
    else:
        site.finish("Identity", x)


@writers("PriorBox", "PriorBoxClustered")
def prior_box(site: Site) -> None:
    """The boxes as constants: they depend on the sizes of the bottoms alone."""
    site.finish("Identity", site.constant(site.layer.priors.host_data, what="priors"))


@writers("Slice")
def cut(site: Site) -> None:
    """Split into the parts' sizes, or into equal parts."""
    layer, (x,) = site.layer, site.bottoms
    if len(site.tops) == 1:
        site.finish("Identity", x)
    elif layer.points:
        site.node("Split", x, site.integers(layer.sizes, "sizes"), out=site.tops, axis=layer.axis)
    else:
        number = {"num_outputs": len(site.tops)} if site.graph.opset >= 18 else {}
        site.node("Split", x, out=site.tops, axis=layer.axis, **number)


@writers("Flatten")
def flatten(site: Site) -> None:
    """Flatten of all axes but the first, else Reshape."""
    (x,), (shape,) = site.bottoms, site.top_shapes
    if len(shape) == 2 and shape[0] == site.bottom_shapes[0][0]:
        site.finish("Flatten", x, axis=1)
    else:
        site.reshape(x, shape, out=site.tops[0])


@writers("Squeeze")
def squeeze(site: Site) -> None:
    site.reshape(site.bottoms[0], site.top_shapes[0], out=site.tops[0])


@writers("Pad")
def pad(site: Site) -> None:
    """Pad; all zeros before the axes come first."""
    param = site.layer.param.pad_param
    sides = [*param.paddings[::2], *param.paddings[1::2]]
    value = site.constant(param.constant_values)
    site.finish("Pad", site.bottoms[0], site.integers(sides, "pads"), value)


@writers("Add")
def add(site: Site) -> None:
    site.finish("Add", *site.bottoms)


@writers("Mul")
def multiply(site: Site) -> None:
    """Mul with the second bottom, or with the parameter."""
    factor = site.bottoms[1] if len(site.bottoms) > 1 else site.param(0)
    site.finish("Mul", site.bottoms[0], factor)


@writers("SpaceToDepth", "DepthToSpace")
def blocks_over_channels(site: Site) -> None:
    """Transpose of the blocks, or back."""
    layer = site.layer
    deep = [layer.blocks[axis] for axis in layer.order]
    if layer.type == "SpaceToDepth":
        given, order = layer.blocks, list(layer.order)
    else:
        given, order = tuple(deep), [layer.order.index(axis) for axis in range(6)]
    moved = site.node("Transpose", site.reshape(site.bottoms[0], given), perm=order)
    site.reshape(moved, site.top_shapes[0], out=site.tops[0])


@writers("SpaceToBatchND", "BatchToSpaceND")
def blocks_over_batch(site: Site) -> None:
    """Transpose of the blocks of a Pad, or a Slice of the way back."""
    layer, x = site.layer, site.bottoms[0]
    axes = range(len(layer.order))
    sizes = layer.around[1:]
    over = [*range(1, len(sizes) + 1)]
    if layer.type == "BatchToSpaceND":
        given = [layer.blocks[axis] for axis in layer.order]
        order = [layer.order.index(axis) for axis in axes]
        moved = site.node("Transpose", site.reshape(x, given), perm=order)
        rest = layer.blocks[2 * len(sizes) + 1 :]
        cut = [n * b for n, b in zip(layer.blocks[1::2], layer.blocks[2::2], strict=False)]
        whole = site.reshape(moved, (layer.blocks[0], *cut[: len(sizes)], *rest))
        starts = site.integers([s.start for s in sizes], "starts")
        ends = site.integers([s.stop for s in sizes], "ends")
        site.finish("Slice", whole, starts, ends, site.integers(over, "axes"))
        return
    n = len(site.bottom_shapes[0])
    before, behind = [0] * n, [0] * n
    for axis, (s, blocks, b) in enumerate(
        zip(sizes, layer.blocks[1::2], layer.blocks[2::2], strict=False), 1
    ):
        before[axis], behind[axis] = s.start, blocks * b - s.stop
    padded = site.node("Pad", x, site.integers([*before, *behind], "pads"))
    moved = site.node("Transpose", site.reshape(padded, layer.blocks), perm=list(layer.order))
    site.reshape(moved, site.top_shapes[0], out=site.tops[0])


@writers("Reshape")
def reshape(site: Site) -> None:
    site.reshape(site.bottoms[0], site.top_shapes[0], out=site.tops[0])


@writers("Softmax")
def softmax(site: Site) -> None:
    axis = site.layer.param.softmax_param.axis % len(site.bottom_shapes[0])
    site.finish("Softmax", site.bottoms[0], axis=axis)


@writers("Tile")
def tile(site: Site) -> None:
    param, shape = site.layer.param.tile_param, site.bottom_shapes[0]
    repeats = [1] * len(shape)
    repeats[param.axis] = param.tiles
    site.finish("Tile", site.bottoms[0], site.integers(repeats, "repeats"))


@writers("Reduction")
def reduction(site: Site) -> None:
    """Reduce the axis and those after it, times the coefficient."""
    param, (x,), shape = site.layer.param.reduction_param, site.bottoms, site.bottom_shapes[0]
    if param.operation == ReductionParameter.ASUM:
        x = site.node("Abs", x)
    elif param.operation == ReductionParameter.SUMSQ:
        x = site.node("Mul", x, x)
    op = "ReduceMean" if param.operation == ReductionParameter.MEAN else "ReduceSum"
    axes = range(param.axis % len(shape), len(shape))
    site.affine(site.reduce(op, x, axes, keep=False), param.coeff, 0)
    site.name_last()


@writers("BatchReduction")
def batch_reduction(site: Site) -> None:
    """Reduce one axis; TOPK: the mean of what TopK gives."""
    layer, (x,) = site.layer, site.bottoms
    param = layer.param.batch_reduction_param
    if layer.levels or param.pos:
        raise InexpressibleError("no operator reduces at several levels, or along a diagonal")
    axis = param.reduction_param.axis % len(site.bottom_shapes[0])
    if layer.operation == ReductionParameter.TOPK:
        best = [site.between("best"), site.between("places")]
        count = site.integers([param.reduction_param.k], "k")
        x = site.node("TopK", x, count, out=best, axis=axis)
    op = "ReduceSum" if layer.operation == ReductionParameter.SUM else "ReduceMean"
    site.reduce(op, x, [axis], keep=False, out=site.tops[0])


@writers("OuterProduct")
def outer_product(site: Site) -> None:
    """a (N, 1, A, 1) times b (N, 1, 1, B)."""
    n, _, a, b = site.top_shapes[0]
    shapes = (n, 1, a, 1), (n, 1, 1, b)
    site.finish("Mul", *(site.reshape(x, s) for x, s in zip(site.bottoms, shapes, strict=True)))


@writers("ArgMax")
def argmax(site: Site) -> None:
    """TopK on the reversed axis: of equal values it takes the first, Caffe the last.

    For a single place ArgMax has an attribute for that.
    """
    layer, (x,), shape = site.layer, site.bottoms, site.bottom_shapes[0]
    param, size = layer.param.argmax_param, layer.view[1]
    whole_items = not param.HasField("axis")
    axis = 1 if whole_items else param.axis % len(shape)
    if whole_items:
        x = site.node("Flatten", x, axis=1)
    number = np.dtype(np.float32)
    parts = []  # places as floats, then values; those of them that are wanted
    if param.top_k == 1:
        if layer.places:
            place = site.node("ArgMax", x, axis=axis, keepdims=1, select_last_index=1)
            parts.append(site.node("Cast", place, to=number))
        if param.out_max_val:
            parts.append(site.reduce("ReduceMax", x, [axis]))
    else:
        ends = [site.integers([at], "turn") for at in (size - 1, -size - 1, axis, -1)]
        turned, count = site.node("Slice", x, *ends), site.integers([param.top_k], "count")
        values, at = site.between("values"), site.between("places")
        site.node("TopK", turned, count, out=[values, at], axis=axis)
        if layer.places:
            place = site.node("Sub", site.constant(size - 1, np.int64), at)
            parts.append(site.node("Cast", place, to=number))
        if param.out_max_val:
            parts.append(values if layer.places else site.node("Identity", values))
    if not whole_items:
        site.name_last()
        return
    if len(parts) > 1:
        parts = [site.node("Concat", *parts, axis=1)]
    site.reshape(parts[0], site.top_shapes[0], out=site.tops[0])


@writers("Crop")
def crop(site: Site) -> None:
    """Slice of the axes that get smaller."""
    (x, _), shape = site.bottoms, site.bottom_shapes[0]
    cuts = [
        (i, w)
        for i, w in enumerate(site.layer.window)
        if w.start is not None and w != slice(0, shape[i])
    ]
    if not cuts:
        site.finish("Identity", x)
        return
    starts, ends, axes = [w.start for _, w in cuts], [w.stop for _, w in cuts], [i for i, _ in cuts]
    site.finish("Slice", x, *map(site.integers, (starts, ends, axes), ("starts", "ends", "axes")))


@writers("BatchReindex")
def batch_reindex(site: Site) -> None:
    x, index = site.bottoms
    site.finish("Gather", x, site.node("Cast", index, to=np.dtype(np.int64)), axis=0)


@writers("Gather")
def gather(site: Site) -> None:
    """Gather, or Identity for each bottom."""
    layer = site.layer
    if not layer.gathers:
        for x, y in zip(site.bottoms, site.tops, strict=True):
            site.node("Identity", x, out=y)
        return
    indices = np.array(layer.indices, np.int64).reshape(layer.outer_shape)
    axis = layer.param.gather_param.axis
    site.finish("Gather", site.bottoms[0], site.constant(indices, np.int64), axis=axis)


@writers("Parameter")
def parameter(site: Site) -> None:
    site.finish("Identity", site.param(0))


@writers("DummyData")
def dummy_data(site: Site) -> None:
    """Constants; random numbers are inputs."""
    fillers = list(site.layer.param.dummy_data_param.data_filler) or [FillerParameter()]
    for i, (top, shape) in enumerate(zip(site.tops, site.top_shapes, strict=True)):
        value = np.asarray([fillers[i if len(fillers) > 1 else 0].value], np.float32)
        site.node("ConstantOfShape", site.integers(shape, "shape"), out=top, value=value)


@writers("Python")
def python(site: Site) -> None:
    raise InexpressibleError("what it computes is code in Python")


@writers("Filter")
def choose(site: Site) -> None:
    raise InexpressibleError("how many items it passes on depends on their values")
