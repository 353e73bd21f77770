"""Errors in the data of a layer: raised at once on the CPU, on a GPU when the host next checks."""

from collections.abc import Callable

from caffepy.core.errors import CaffeError
from caffepy.device.device import ErrorFlag
from caffepy.layer.base import Layer
from caffepy.proto.text import locate_layer


def error_flag(layer: Layer, error: Callable[[float], CaffeError]) -> ErrorFlag:
    """Return a flag for values that a layer cannot use; its error names the layer's definition."""

    def located(value: float) -> CaffeError:
        name = f'layer "{layer.param.name}" ({layer.type})'
        where = f"{locate_layer(layer.path, layer.param)}: {name}" if layer.path else name
        return error(value).at(where)

    return layer.device.error_flag(located)
