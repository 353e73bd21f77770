"""A Convolution with its ReLU against the two layers one after the other."""

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.blob import Blob
from caffepy.device import Device
from caffepy.layer.base import create_layer
from caffepy.layer.fused_convolution import ConvolutionReLU
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

from .harness import random

CASES = {
    "basic": ((2, 3, 6, 5), "num_output: 4 kernel_size: 3"),
    "no bias": ((2, 3, 6, 5), "num_output: 4 kernel_size: 3 bias_term: false"),
    "group": ((2, 4, 6, 5), "num_output: 6 kernel_size: 3 group: 2 pad: 1"),
    "1 axis": ((2, 3, 9), "num_output: 4 kernel_size: 3"),
    "no spatial axis": ((4, 3), "num_output: 2 kernel_size: 1"),
    "axis 2": ((2, 2, 3, 5, 4), "num_output: 4 kernel_size: 3 axis: 2 pad: 1"),
}


class Pair:
    """A Convolution and a ReLU with their blobs; the first net with a seed has the same weights as the next."""

    def __init__(self, case, in_place, wanted):
        shape, param = CASES[case]
        fillers = 'weight_filler { type: "gaussian" std: 1 }'
        if "bias_term" not in param:
            fillers += ' bias_filler { type: "gaussian" std: 1 }'
        texts = [f'type: "Convolution" convolution_param {{ {param} {fillers} }}', 'type: "ReLU"']
        device = Device(seed=1)
        self.conv, self.relu = (
            create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device, np.float64) for text in texts
        )
        self.x, self.middle = Blob(shape, np.float64), Blob(dtype=np.float64)
        self.y = self.middle if in_place else Blob(dtype=np.float64)
        self.conv.setup([self.x], [self.middle])
        self.conv.reshape([self.x], [self.middle])
        self.relu.setup([self.middle], [self.y])
        self.relu.reshape([self.middle], [self.y])
        self.conv.param_propagate_down = wanted[: len(self.conv.blobs)]
        self.x.data[...] = random(*shape)
        self.x.diff.fill(7)
        for blob in self.conv.blobs:
            blob.diff.fill(1)

    def one_by_one(self, down):
        self.conv.forward([self.x], [self.middle])
        self.relu.forward([self.middle], [self.y])
        self.y.diff[...] = random(*self.y.shape, seed=1)
        self.relu.backward([self.y], [True], [self.middle])
        self.conv.backward([self.middle], [down], [self.x])
        return self.results()

    def together(self, down):
        run = ConvolutionReLU(self.conv, self.relu, self.x, self.y, down)
        run.forward()
        self.y.diff[...] = random(*self.y.shape, seed=1)
        run.backward()
        return self.results()

    def results(self):
        return [self.y.data, self.x.diff, *(blob.diff for blob in self.conv.blobs)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_as_the_layers_one_by_one(case, in_place):
    for down, *wanted in ((True, True, True), (False, True, True), (True, False, True), (True, True, False)):
        apart = Pair(case, in_place, wanted).one_by_one(down)
        together = Pair(case, in_place, wanted).together(down)
        for have, want in zip(together, apart, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)
