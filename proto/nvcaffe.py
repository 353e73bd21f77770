"""What the number formats that NVCaffe's prototxts name mean here.

NVCaffe gives a net, and each of its layers, formats for values and for arithmetic, forwards and
backwards. Here a net has one precision, in which FLOAT16 is fp16, both ways; a layer may keep to
float32 in it; sums are always float32.
"""

import logging
from collections.abc import Iterator

from caffepy.proto.caffe_pb2 import FLOAT, FLOAT16, LayerParameter, NetParameter

log = logging.getLogger(__name__)

_MATH = ("forward_math", "backward_math")


def choose_precision(net: NetParameter, asked: str | None = None) -> str | None:
    """The precision that is asked for, else "fp16" for a net whose default_forward_type is FLOAT16,
    else None.

    Logs what the net says of number formats to no effect.
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
    """Whether a layer says that its values are float32, whatever those of its net are."""
    return layer.HasField("forward_type") and layer.forward_type == FLOAT


def _ignored(net: NetParameter, is_half: bool) -> Iterator[str]:
    """The fields that ask for something else than what is done, in a net with 16-bit values or
    without.
    """
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
