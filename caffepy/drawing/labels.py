"""What a person reads of a layer's definition: its type, its windows, how many outputs it has."""

from caffepy.proto.caffe_pb2 import ConvolutionParameter, LayerParameter, PoolingParameter

CONVOLUTIONS = ("Convolution", "Deconvolution")
OUTPUTS = {
    "Convolution": "convolution_param",
    "Deconvolution": "convolution_param",
    "InnerProduct": "inner_product_param",
    "Embed": "embed_param",
    "LSTM": "recurrent_param",
    "RNN": "recurrent_param",
}
"""The parameter with num_output of the types that have one."""

DEFAULTS = {"kernel_size": 0, "stride": 1, "pad": 0, "dilation": 1, "group": 1}


def window_size(layer: LayerParameter, name: str) -> str:
    """A size of the windows of a convolution or pooling: kernel_size, stride, pad, dilation or
    group.

    As `3`, or as `3x5` where it differs between the axes.
    """
    param: ConvolutionParameter | PoolingParameter = layer.convolution_param
    if layer.type == "Pooling":
        param = layer.pooling_param
    axes = [getattr(param, f"{name.partition('_')[0]}_{axis}", 0) for axis in "hw"]
    given = getattr(param, name)
    if not any(axes):
        axes = [given] if isinstance(given, int) else list(given) or [DEFAULTS[name]]
    return "x".join(map(str, axes if len(set(axes)) > 1 else axes[:1]))


def has_windows(layer: LayerParameter) -> bool:
    """Whether the layer slides a window over its bottom."""
    return layer.type in CONVOLUTIONS or (
        layer.type == "Pooling" and not layer.pooling_param.global_pooling
    )


def num_output(layer: LayerParameter) -> int | None:
    """How many outputs the layer has, if its definition says that."""
    if layer.type not in OUTPUTS:
        return None
    count: int = getattr(layer, OUTPUTS[layer.type]).num_output
    return count


def arguments(layer: LayerParameter) -> str:
    """The sizes in Caffe's short form, `kernel/stride+pad outputs/group`, with `*dilation`; usual
    ones are left out.
    """
    words = []
    if has_windows(layer):
        words.append(window_size(layer, "kernel_size"))
        for name, mark in (("stride", "/"), ("pad", "+"), ("dilation", "*")):
            size = (
                window_size(layer, name)
                if name != "dilation" or layer.type in CONVOLUTIONS
                else "1"
            )
            words[0] += f"{mark}{size}" if size != str(DEFAULTS[name]) else ""
    elif layer.type == "Pooling":
        words.append("global")
    outputs = num_output(layer)
    if outputs is not None:
        group = window_size(layer, "group") if layer.type in CONVOLUTIONS else "1"
        words.append(f"{outputs}/{group}" if group != "1" else f"{outputs}")
    return " ".join(words)
