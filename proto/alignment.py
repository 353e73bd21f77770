"""Offsets of the crops of old FCN nets, whose layer of type CROP finds them by itself (Long et al.
2015): so that the place that two blobs have in common with an earlier one is the same.

A map (a, b), for rows and for columns, says that position x of a blob lies at a * x + b in another.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import LayerParameter

Map = tuple[tuple[Fraction, Fraction], tuple[Fraction, Fraction]]

_IDENTITY: Map = ((Fraction(1), Fraction(0)),) * 2
_PLACELESS = frozenset({"Embed", "Flatten", "InnerProduct", "Reshape", "SPP", "Tile"})
"""Types whose tops have no positions of their bottom; those of others are the same."""


def align_crop(layers: Sequence[LayerParameter], number: int) -> None:
    """Write the offset of the Crop layer of this number among the layers of a net.

    ConfigError if its bottoms have no earlier blob in common, other scales, or lie so that there is
    no whole offset of 0 or more; or if a stride on the way is 0.
    """
    crop = layers[number]
    if len(crop.bottom) != 2:
        raise ConfigError(f'layer "{crop.name}" (Crop): it takes 2 bottoms, not {len(crop.bottom)}')
    first, second = (dict(_ancestors(layers[:number], name)) for name in crop.bottom)
    common = next((name for name in second if name in first), None)
    if common is None:
        raise ConfigError(
            f'layer "{crop.name}" (Crop): its bottoms "{crop.bottom[0]}" and "{crop.bottom[1]}" '
            "have no earlier blob in common, which its offset is found by"
        )
    crop.crop_param.axis = 2
    for (a, b), (c, d) in zip(first[common], second[common], strict=True):
        offset = b * c / a - d
        if a != c or offset.denominator != 1 or offset < 0:
            raise ConfigError(
                f'layer "{crop.name}" (Crop): "{crop.bottom[0]}" lies at {float(a):g} x '
                f'{float(b):+g} of "{common}", "{crop.bottom[1]}" at {float(c):g} x '
                f"{float(d):+g}, so no whole offset aligns them"
            )
        crop.crop_param.offset.append(int(offset))


def _ancestors(layers: Sequence[LayerParameter], name: str) -> Iterator[tuple[str, Map]]:
    """Yield a blob and those it is made of, by first bottoms, each with the map of its positions
    to those of the blob, until it has none.
    """
    found = _IDENTITY
    yield name, found
    for layer in reversed(layers):
        if name not in layer.top or name in layer.bottom:
            continue
        if not layer.bottom or layer.type in _PLACELESS or layer.pooling_param.global_pooling:
            return
        name = layer.bottom[0]
        steps = _map(layer)
        found = tuple((a * c, a * d + b) for (a, b), (c, d) in zip(found, steps, strict=True))  # type: ignore[assignment]
        yield name, found


def _map(layer: LayerParameter) -> Map:
    """The map of positions of a layer's bottom to those of its top."""
    if layer.type == "Crop":
        offset = [*layer.crop_param.offset, 0, 0]
        return (Fraction(1), Fraction(-offset[0])), (Fraction(1), Fraction(-offset[1]))
    if layer.type not in ("Convolution", "Deconvolution", "Pooling"):
        return _IDENTITY
    rows, columns = (_window_map(layer, side) for side in (0, 1))
    return rows, columns


def _window_map(layer: LayerParameter, side: int) -> tuple[Fraction, Fraction]:
    param = layer.pooling_param if layer.type == "Pooling" else layer.convolution_param
    kernel, stride, pad = (
        _setting(param, name, short, side, default)
        for name, short, default in (
            ("kernel_size", "kernel", 0),
            ("stride", "stride", 1),
            ("pad", "pad", 0),
        )
    )
    if stride < 1:
        raise ConfigError(f'layer "{layer.name}" ({layer.type}): its stride is {stride}')
    dilation = _setting(param, "dilation", "dilation", side, 1)
    shift = Fraction((kernel - 1) * dilation, 2) - pad
    if layer.type == "Deconvolution":
        return Fraction(stride), shift
    return Fraction(1, stride), -shift / stride


def _setting(param: Any, name: str, short: str, side: int, default: int) -> int:
    """A size of rows (0) or columns (1), as Convolution and Pooling say it."""
    by_side = f"{short}_{'hw'[side]}"
    if by_side in param.DESCRIPTOR.fields_by_name and param.HasField(by_side):
        return int(getattr(param, by_side))
    if name not in param.DESCRIPTOR.fields_by_name:
        return default
    value = getattr(param, name)
    if isinstance(value, int):
        return value if param.HasField(name) else default
    return int(value[min(side, len(value) - 1)]) if value else default
