"""One layer on blobs of a GPU, of any element type and with the channels last, held to the same
layer on the CPU.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DataError
from caffepy.device.blob import PLAIN, Array, Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, random

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "uint16": 3e-2}
__all__ = ["TOLERANCE", "check_on_gpu", "check_plain_on_gpu", "check_problem_on_gpu"]


def check_on_gpu(text: str, *bottoms: Array, tops: int = 1) -> None:
    """Tops and gradients agree with the CPU's for each type and order; what is given must be exact
    in bfloat16.
    """
    single = Single(text, *bottoms, tops=tops, dtype=np.float32)
    want = single.forward()
    gradients = [
        np.round(random(*y.shape, seed=k), 1).astype(np.float32) for k, y in enumerate(want)
    ]
    for blob, dy in zip(single.top, gradients, strict=True):
        blob.diff[...] = dy
    single.layer.backward(single.top, [True] * len(bottoms), single.bottom)
    device = CudaDevice(seed=single.seed)
    for kind, last in product(TOLERANCE, (False, True)):
        preferred, allowed = Layout(np.dtype(kind), last), TOLERANCE[kind]
        with device.scope():
            bottom = [Blob(b.shape, device=device) for b in bottoms]
            top = [Blob(device=device) for _ in range(tops)]
            for blob in (*bottom, *top):
                blob.set_layout(preferred)
            layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
            layer.setup(bottom, top)
            layer.reshape(bottom, top)
            layer.param_propagate_down = [True] * len(layer.blobs)
            assert not layer.on_host
            assert layer.layout_for(preferred) == preferred
            for blob, values in zip(bottom, bottoms, strict=True):
                blob.host_data[...] = values
            layer.forward(bottom, top)
            for blob, y in zip(top, want, strict=True):
                np.testing.assert_allclose(
                    blob.host_data, y, allowed, allowed, err_msg=f"{kind} {last}"
                )
            for blob, dy in zip(top, gradients, strict=True):
                blob.host_diff[...] = dy
            layer.backward(top, [True] * len(bottom), bottom)
            for blob, reference in zip(bottom, single.bottom, strict=True):
                np.testing.assert_allclose(
                    blob.host_diff, reference.diff, allowed, allowed, err_msg=f"{kind} {last}"
                )


def check_plain_on_gpu(
    text: str,
    *bottoms: Array,
    propagate_down: Sequence[bool],
    tops: int = 1,
    phase: int = TRAIN,
    captured: bool = True,
) -> None:
    """Tops and gradients of a layer that takes float32 agree with the CPU's, when it runs and when
    it is replayed; when it runs twice, if it says that a step with it is not `captured`.
    """
    single = Single(text, *bottoms, tops=tops, dtype=np.float32, phase=phase)
    device = CudaDevice(seed=single.seed)
    device.math_mode.precision = "fp32"
    with device.scope():
        bottom = [Blob(b.shape, device=device) for b in bottoms]
        top = [Blob(device=device) for _ in range(tops)]
        layer = create_layer(text_format.Parse(text, LayerParameter()), phase, device)
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
    assert not layer.on_host
    assert captured or layer.always_reshape
    assert layer.plain_tops or layer.layout_for(Layout(np.dtype(np.float16), True)) == PLAIN
    layer.param_propagate_down = [True] * len(layer.blobs)

    differentiable = any(propagate_down) or bool(layer.blobs)

    def passes() -> None:
        layer.forward(bottom, top)
        if differentiable:
            layer.backward(top, propagate_down, bottom)

    recording = None
    for order in (1, -1):
        single.inputs = [b[::order].astype(np.float32) for b in bottoms]
        want = single.forward()
        given = [w or random(*y.shape) for w, y in zip(single.weights, want, strict=True)]
        gradients, params = single.backward(given, propagate_down) if differentiable else ([], [])
        for blob, values in zip(bottom, single.inputs, strict=True):
            blob.host_data[...] = values
        for blob, dy in zip(top, given, strict=True):
            blob.host_diff[...] = dy
        for param, values in zip(layer.blobs, single.params, strict=True):
            param.host_data[...], param.host_diff[...] = values, 1
        device.flush()
        if recording:
            recording.replay()
        else:
            with device.scope():
                passes()
            if captured:
                recording = device.capture(passes)
        device.check_errors()
        pairs = [*zip([t.host_data for t in top], want, strict=True)]
        pairs += [
            (b.host_diff, dx) for b, dx in zip(bottom, gradients, strict=False) if dx is not None
        ]
        pairs += [(b.host_diff - 1, dw) for b, dw in zip(layer.blobs, params, strict=True)]
        for mine, theirs in pairs:  # an element may be the difference of two large sums
            allowed = 1e-6 * max(1, np.abs(theirs).max(initial=0))
            np.testing.assert_allclose(mine, theirs, 1e-5, allowed, err_msg=f"{layer.type} {order}")


def check_problem_on_gpu(text: str, *bottoms: Array) -> None:
    """The device tells of wrong data with the error of the CPU, and both passes go on in spite of
    them.
    """
    single = Single(text, *bottoms, dtype=np.float32)
    with pytest.raises(DataError) as told:
        single.forward()
    device = CudaDevice(seed=single.seed)
    with device.scope():
        bottom = [Blob(b.shape, device=device) for b in bottoms]
        top = [Blob(device=device)]
        layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
        layer.param_propagate_down = [True] * len(layer.blobs)
        for blob, values in zip(bottom, bottoms, strict=True):
            blob.host_data[...] = values
        layer.forward(bottom, top)
        layer.backward(top, [i == 0 and not layer.blobs for i in range(len(bottom))], bottom)
    with pytest.raises(DataError) as noted:
        device.check_errors()
    assert str(noted.value) == str(told.value)
    device.check_errors()
