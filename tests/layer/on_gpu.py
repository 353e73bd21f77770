"""One layer on blobs of a GPU, of any element type and with the channels last, held to the same layer on the CPU."""

from itertools import product

import numpy as np
from google.protobuf import text_format

from caffepy.blob import Array, Blob, Format
from caffepy.device import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, random

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "uint16": 3e-2}
__all__ = ["TOLERANCE", "check_on_gpu"]


def check_on_gpu(text: str, *bottoms: Array, tops: int = 1) -> None:
    """Tops and gradients agree with the CPU's for each type and order; what is given must be exact in bfloat16."""
    single = Single(text, *bottoms, tops=tops, dtype=np.float32)
    want = single.forward()
    gradients = [np.round(random(*y.shape, seed=k), 1).astype(np.float32) for k, y in enumerate(want)]
    for blob, dy in zip(single.top, gradients, strict=True):
        blob.diff[...] = dy
    single.layer.backward(single.top, [True] * len(bottoms), single.bottom)
    device = CudaDevice(seed=single.seed)
    for kind, last in product(TOLERANCE, (False, True)):
        native, allowed = Format(np.dtype(kind), last), TOLERANCE[kind]
        with device.scope():
            bottom = [Blob(b.shape, store=device.store) for b in bottoms]
            top = [Blob(store=device.store) for _ in range(tops)]
            for blob in (*bottom, *top):
                blob.take(native)
            layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
            layer.setup(bottom, top)
            layer.reshape(bottom, top)
            assert not layer.on_host
            assert layer.format_for(native) == native
            for blob, values in zip(bottom, bottoms, strict=True):
                blob.host_data[...] = values
            layer.forward(bottom, top)
            for blob, y in zip(top, want, strict=True):
                np.testing.assert_allclose(blob.host_data, y, allowed, allowed, err_msg=f"{kind} {last}")
            for blob, dy in zip(top, gradients, strict=True):
                blob.host_diff[...] = dy
            layer.backward(top, [True] * len(bottom), bottom)
            for blob, reference in zip(bottom, single.bottom, strict=True):
                np.testing.assert_allclose(blob.host_diff, reference.diff, allowed, allowed, err_msg=f"{kind} {last}")
