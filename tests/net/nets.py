"""Building nets from text in tests."""

import numpy as np
from google.protobuf import text_format

from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TRAIN, NetParameter
from tests.nets import library


def definition(text: str) -> NetParameter:
    """The NetParameter of this text, in phase TRAIN unless it says otherwise."""
    param = text_format.Parse(text, NetParameter())
    if not param.state.HasField("phase"):
        param.state.phase = TRAIN
    return param


def net_of(text: str, dtype: type = np.float32, **kwargs: object) -> Net:
    """The net of this text, seeded."""
    return Net(definition(text), device=Device(seed=1), dtype=dtype, **kwargs)  # type: ignore[arg-type]


INPUT = library.inputs("in", x=(4, 3), y=(4,)).rstrip() + " "  # what follows begins a line or not


def ip(name: str, bottom: str, top: str, extra: str = "") -> str:
    """An InnerProduct layer with 5 outputs."""
    return library.inner_product(name, bottom, 5, filler='type: "gaussian"', more=extra, top=top)


LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "%s" bottom: "y" top: "loss" } '
