"""The number formats in NVCaffe's prototxts.

In NVCaffe a net, and each layer, has types of values and of arithmetic, forward and backward. Here
a net has one precision for both passes, fp16 for FLOAT16; a layer may stay in float32; sums are
always float32.
"""

import logging
from collections.abc import Iterator

from caffepy.proto.caffe_pb2 import FLOAT, FLOAT16, LayerParameter, NetParameter

log = logging.getLogger(__name__)

_MATH = ("forward_math", "backward_math")


def choose_precision(net: NetParameter, asked: str | None = None) -> str | None:
    """The precision `asked` for, else "fp16" for a default_forward_type of FLOAT16, else None.

    Logs the number formats of the net that have no effect.
    """
    wanted = "fp16" if net.default_forward_type == FLOAT16 else None
    if wanted and asked and asked != wanted:
        log.info("The precision %s goes before the net's default_forward_type: FLOAT16", asked)
    precision = asked or wanted
    if ignored := list(dict.fromkeys(_ignored(net, precision in ("fp16", "bf16")))):
        log.info(
            "%s: without effect; values have one format forwards and backwards, sums are float32",
            ", ".join(ignored),
        )
    return precision


def keeps_float32(layer: LayerParameter) -> bool:
    """True if the layer's own type is float32."""
    return layer.HasField("forward_type") and layer.forward_type == FLOAT


def _ignored(net: NetParameter, is_half: bool) -> Iterator[str]:
    """The fields that have no effect, in a net with 16-bit values or without."""
    done = (FLOAT, FLOAT16) if is_half else (FLOAT,)
    if net.default_forward_type not in (FLOAT, FLOAT16):
        yield "default_forward_type"
    if (
        net.HasField("default_backward_type")
        and net.default_backward_type != net.default_forward_type
    ):
        yield "default_backward_type"
    yield from (f"default_{math}" for math in _MATH if net.HasField(f"default_{math}"))
    for layer in net.layer:
        forward = layer.forward_type if layer.HasField("forward_type") else net.default_forward_type
        if layer.HasField("forward_type") and forward not in done:
            yield "forward_type"
        if layer.HasField("backward_type") and layer.backward_type != forward:
            yield "backward_type"
        yield from (math for math in _MATH if layer.HasField(math))
