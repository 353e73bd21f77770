import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import Single, check_golden, check_gradient, random

CASES = {
    "basic": ((3, 2, 2, 2), "num_output: 4"),
    "no bias": ((3, 5), "num_output: 4 bias_term: false"),
    "transposed": ((3, 5), "num_output: 4 transpose: true"),
    "axis 2": ((2, 3, 2, 2), "num_output: 3 axis: 2"),
    "axis -1": ((2, 3, 4), "num_output: 3 axis: -1"),
    "axis 0": ((2, 3), "num_output: 3 axis: 0"),
}


def text(param):
    return (
        f'name: "ip" type: "InnerProduct" inner_product_param {{ '
        f'{param} weight_filler {{ type: "gaussian" }} }}'
    )


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    shape, param = CASES[case]
    check_gradient(text(param), random(*shape))


@pytest.mark.parametrize("case", ["ip_basic", "ip_axis2", "ip_transpose"])
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("transpose", ["false", "true"])
def test_formula(transpose):
    single = Single(text(f"num_output: 4 axis: 2 transpose: {transpose}"), random(2, 3, 4, 5))
    w, b = single.params
    b[...] = random(4)
    w = w.T if transpose == "true" else w
    (y,) = single.forward()
    np.testing.assert_allclose(y, single.inputs[0].reshape(2, 3, 20) @ w.T + b)


def test_only_what_is_wanted_is_computed():
    single = Single(text("num_output: 2"), random(2, 5))
    single.forward()
    single.layer.param_propagate_down = [True, False]
    (dx,), (dw, db) = single.backward([random(2, 2)], [False])
    assert dx is None
    assert dw.all()
    assert not db.any()


def test_num_output_is_needed():
    with pytest.raises(ConfigError, match="num_output must be 1 or more"):
        Single(text(""), random(2, 3))


def test_the_inner_size_must_stay():
    single = Single(text("num_output: 2"), random(2, 3, 4, 4))
    single.bottom[0].reshape((5, 3, 4, 4))
    single.layer.reshape(single.bottom, single.top)
    assert single.top[0].shape == (5, 2)
    single.bottom[0].reshape((2, 3, 4, 5))
    with pytest.raises(
        ConfigError,
        match=r"Input size incompatible with inner product parameters. .* 48 inputs, not 60",
    ):
        single.layer.reshape(single.bottom, single.top)


TOLERANCE = {"float32": 2e-3, "float16": 3e-3, "uint16": 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transpose", ["false", "true"])
@pytest.mark.parametrize(
    ("kind", "top_kind"),
    [
        ("float32",) * 2,
        ("float16",) * 2,
        ("uint16",) * 2,
        ("float16", "float32"),
        ("uint16", "float32"),
    ],
)
def test_on_a_gpu_in_any_type(kind, top_kind, transpose, bias):
    device = CudaDevice(seed=1)
    param = f"num_output: 6 transpose: {transpose} bias_term: {str(bias).lower()}"
    layer = create_layer(text_format.Parse(text(param), LayerParameter()), TRAIN, device)
    x, top_diff = random(5, 4, 2), random(5, 6, seed=1)
    with device.scope():
        bottom, top = Blob((5, 4, 2), device=device), Blob(device=device)
        layer.setup([bottom], [top])
        for blob, stored in ((bottom, kind), (top, top_kind)):
            blob.set_layout(Layout(np.dtype(stored), False))
        layer.reshape([bottom], [top])
        layer.param_propagate_down = [True] * (1 + bias)
        for blob in layer.blobs:
            blob.host_data[...] = random(*blob.shape)
            blob.host_diff.fill(1)
        bottom.host_data[...] = x
        layer.forward([bottom], [top])
        top.host_diff[...] = top_diff
        layer.backward([top], [True], [bottom])
    w, x = layer.blobs[0].host_data, x.reshape(5, 8)
    w, dw = (
        (w.T, layer.blobs[0].host_diff.T) if transpose == "true" else (w, layer.blobs[0].host_diff)
    )
    pairs = [
        (top.host_data, x @ w.T + (layer.blobs[1].host_data if bias else 0)),
        (bottom.host_diff.reshape(5, 8), top_diff @ w),
        (dw, 1 + top_diff.T @ x),
    ]
    if bias:
        pairs.append((layer.blobs[1].host_diff, 1 + top_diff.sum(0)))
    for have, want in pairs:
        np.testing.assert_allclose(have, want, atol=TOLERANCE[kind] * np.abs(want).max(), rtol=0)
