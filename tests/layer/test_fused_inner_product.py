"""InnerProduct and what follows it, computed together and one after the other."""

import numpy as np
import pytest
from google.protobuf import text_format

import caffepy.layer
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.layer.fused import InnerProductGroup
from caffepy.layer.group import Member
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter
from tests.layer.harness import random

assert caffepy.layer  # imported so that every type is registered

PRODUCT = (
    'type: "InnerProduct" inner_product_param { num_output: 10 '
    'weight_filler { type: "gaussian" } %s }'
)
RELU, DROPOUT = 'type: "ReLU"', 'type: "Dropout" dropout_param { dropout_ratio: 0.25 }'
RUNS = {
    "relu": ("bias_filler { value: 0.3 }", [RELU], TRAIN),
    "dropout": ("bias_filler { value: 0.3 }", [DROPOUT], TRAIN),
    "both": ("bias_filler { value: 0.3 }", [RELU, DROPOUT], TRAIN),
    "both in test": ("bias_filler { value: 0.3 }", [RELU, DROPOUT], TEST),
    "dropout in test": ("bias_filler { value: 0.3 }", [DROPOUT], TEST),
    "no bias": ("bias_term: false", [RELU, DROPOUT], TRAIN),
    "no bias, dropout in test": ("bias_term: false", [DROPOUT], TEST),
    "transposed": ("transpose: true", [RELU], TRAIN),
}
TOLERANCE = {"float32": 1e-3, "float16": 3e-3, "uint16": 3e-2}
"""Of products in tf32 and of one more rounding after each layer, as part of the largest number."""


class Chain:
    """An InnerProduct and layers in place on its top, with everything filled from one seed."""

    def __init__(self, device, case, kind="float32", top_kind=None):
        param, after, phase = RUNS[case]
        self.device = device
        with device.scope():
            self.bottom, self.top = self.blob(kind), self.blob(top_kind or kind)
            self.bottom.reshape((6, 4, 5))
            self.layers = []
            for text in [PRODUCT % param, *after]:
                layer = create_layer(text_format.Parse(text, LayerParameter()), phase, device)
                layer.setup([self.top if self.layers else self.bottom], [self.top])
                layer.reshape([self.top if self.layers else self.bottom], [self.top])
                layer.param_propagate_down = [True] * len(layer.blobs)
                self.layers.append(layer)
            self.bottom.host_data[...] = random(6, 4, 5)

    def blob(self, kind):
        blob = Blob(device=self.device)
        if kind != "float32":
            blob.set_layout(Layout(np.dtype(kind), False))
        return blob

    def run(self, fused, propagate_down=True):
        """Top, its gradient in the product, the bottom's and the parameters' gradients."""
        product, *after = self.layers
        for blob in product.blobs:
            blob.host_diff.fill(1)
        with self.device.scope():
            if fused:
                top = [self.top]
                group = InnerProductGroup(
                    [
                        Member(product, [self.bottom], top, [propagate_down]),
                        *(Member(layer, top, top, [True]) for layer in after),
                    ]
                )
                group.forward()
                self.top.host_diff[...] = random(6, 10, seed=1)
                group.backward()
            else:
                product.forward([self.bottom], [self.top])
                for layer in after:
                    layer.forward([self.top], [self.top])
                self.top.host_diff[...] = random(6, 10, seed=1)
                for layer in reversed(after):
                    layer.backward([self.top], [True], [self.top])
                product.backward([self.top], [propagate_down], [self.bottom])
        arrays = [
            self.top.host_data,
            self.top.host_diff,
            self.bottom.host_diff,
            *(b.host_diff for b in product.blobs),
        ]
        return [a.copy() for a in arrays]


def agree(have, want, tolerance):
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(initial=1), rtol=0)


@pytest.mark.parametrize("case", RUNS)
def test_the_same_numbers(case):
    want, have = (Chain(Device(seed=1), case).run(fused) for fused in (False, True))
    assert np.abs(want[2]).max() > 0.1
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_gradient_that_is_not_wanted():
    chain = Chain(Device(seed=1), "both")
    chain.layers[0].param_propagate_down = [True, False]
    _, _, dx, dw, db = chain.run(True, propagate_down=False)
    assert not dx.any()
    assert (dw != 1).any()
    assert (db == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", RUNS)
def test_the_same_numbers_on_a_gpu(case, kind):
    want, have = (Chain(CudaDevice(seed=1), case, kind).run(fused) for fused in (False, True))
    agree(have, want, TOLERANCE[kind])
    if case in ("relu", "transposed", "dropout in test"):
        agree(have[:1], Chain(Device(seed=1), case).run(True)[:1], 2 * TOLERANCE[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float16", "uint16"])
def test_a_float32_top_of_a_narrow_bottom(kind):
    want, have = (
        Chain(CudaDevice(seed=1), "relu", kind, "float32").run(fused) for fused in (False, True)
    )
    agree(have, want, TOLERANCE[kind])
    agree(have[:1], Chain(Device(seed=1), "relu").run(True)[:1], 2 * TOLERANCE[kind])
