"""A layer's definition in words: its type, its windows, its number of outputs."""

from caffepy.proto.caffe_pb2 import ConvolutionParameter, LayerParameter, PoolingParameter

DEFAULTS = {"kernel_size": 0, "stride": 1, "pad": 0, "dilation": 1, "group": 1}


def window_size(layer: LayerParameter, name: str) -> str:
    """Return kernel_size, stride, pad, dilation or group of a convolution or pooling: `3`, or `3x5`
    if it differs between the axes.
    """
    param: ConvolutionParameter | PoolingParameter = layer.pooling_param
    if is_convolution(layer):
        param = layer.convolution_param
    axes = [getattr(param, f"{name.partition('_')[0]}_{axis}", 0) for axis in "hw"]
    given = getattr(param, name)
    if not any(axes):
        axes = [given] if isinstance(given, int) else list(given) or [DEFAULTS[name]]
    return "x".join(map(str, axes if len(set(axes)) > 1 else axes[:1]))


def is_convolution(layer: LayerParameter) -> bool:
    """True if the layer computes a convolution or its transpose."""
    return layer.convolution_param.HasField("num_output")


def has_windows(layer: LayerParameter) -> bool:
    """True if the layer slides a window over its bottom."""
    return is_convolution(layer) or (
        layer.HasField("pooling_param") and not layer.pooling_param.global_pooling
    )


def number(layer: LayerParameter, name: str) -> int | None:
    """The field `name` of the `..._param` message of the definition that sets it, else None."""
    for field, param in layer.ListFields():
        has_name = field.name.endswith("_param") and name in param.DESCRIPTOR.fields_by_name
        if has_name and param.HasField(name):
            value: int = getattr(param, name)
            return value
    return None


def arguments(layer: LayerParameter) -> str:
    """Return `kernel/stride+pad*dilation outputs/group`, without defaults: Caffe's short form."""
    words = []
    if has_windows(layer):
        words.append(window_size(layer, "kernel_size"))
        for name, mark in (("stride", "/"), ("pad", "+"), ("dilation", "*")):
            size = window_size(layer, name) if name != "dilation" or is_convolution(layer) else "1"
            words[0] += f"{mark}{size}" if size != str(DEFAULTS[name]) else ""
    elif layer.HasField("pooling_param"):
        words.append("global")
    outputs = number(layer, "num_output")
    if outputs is not None:
        group = window_size(layer, "group") if is_convolution(layer) else "1"
        words.append(f"{outputs}/{group}" if group != "1" else f"{outputs}")
    return " ".join(words)
