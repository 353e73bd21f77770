"""What layers find wrong with their data: told at once on the CPU, when the host next looks on a
GPU.
"""

from collections.abc import Callable

from caffepy.core.errors import CaffeError
from caffepy.device.device import ErrorFlag
from caffepy.layer.base import Layer
from caffepy.proto.text import locate_layer


def error_flag(layer: Layer, error: Callable[[float], CaffeError]) -> ErrorFlag:
    """Room to note a value that a layer cannot use; the error made of it says where the layer is
    defined.
    """

    def located(value: float) -> CaffeError:
        name = f'layer "{layer.param.name}" ({layer.type})'
        where = f"{locate_layer(layer.path, layer.param)}: {name}" if layer.path else name
        return error(value).at(where)

    return layer.device.error_flag(located)
