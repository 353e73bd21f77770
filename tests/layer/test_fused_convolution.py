"""A Convolution with its ReLU, and with what knows the mask behind it, against the layers one by
one.
"""

import numpy as np
import pytest
from google.protobuf import text_format

import caffepy.layer
from caffepy.device.blob import PLAIN, Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.layer.convolution_groups import (
    ConvolutionLRN,
    ConvolutionLRNPooling,
    ConvolutionMeans,
    ConvolutionPooling,
    ConvolutionReLU,
    PooledConvolution,
)
from caffepy.layer.group import Member
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter
from tests.layer.harness import random

assert caffepy.layer  # imported so that every type is registered

CASES = {
    "basic": ((2, 3, 6, 5), "num_output: 4 kernel_size: 3"),
    "no bias": ((2, 3, 6, 5), "num_output: 4 kernel_size: 3 bias_term: false"),
    "group": ((2, 4, 6, 5), "num_output: 6 kernel_size: 3 group: 2 pad: 1"),
    "larger than its input": ((2, 3, 6, 11), "num_output: 4 kernel_size: 4 dilation: 2 stride: 2"),
    "1 axis": ((2, 3, 9), "num_output: 4 kernel_size: 3"),
    "no spatial axis": ((4, 3), "num_output: 2 kernel_size: 1"),
    "axis 2": ((2, 2, 3, 5, 4), "num_output: 4 kernel_size: 3 axis: 2 pad: 1"),
}


def quarters(values):
    """Numbers that every layout has, so that no rounding changes the sign of a sum."""
    return np.round(4 * values) / 4


class Pair:
    """A Convolution and a ReLU with their blobs; two with the same seed have the same weights."""

    def __init__(self, case, in_place, wanted, device=None, layout=None):
        self.device = device or Device(seed=1)
        shape, param = CASES[case]
        fillers = 'weight_filler { type: "gaussian" std: 1 }'
        if "bias_term" not in param:
            fillers += ' bias_filler { type: "gaussian" std: 1 }'
        texts = [f'type: "Convolution" convolution_param {{ {param} {fillers} }}', 'type: "ReLU"']
        with self.device.scope():
            self.conv, self.relu = (
                create_layer(text_format.Parse(text, LayerParameter()), TRAIN, self.device)
                for text in texts
            )
            self.x, self.middle, y = (Blob(device=self.device) for _ in range(3))
            for blob in (self.x, self.middle, y) if layout else ():
                blob.set_layout(layout)
            self.y = self.middle if in_place else y
            self.x.reshape(shape)
            self.conv.setup([self.x], [self.middle])
            self.conv.reshape([self.x], [self.middle])
            self.relu.setup([self.middle], [self.y])
            self.relu.reshape([self.middle], [self.y])
            if layout:
                assert self.conv.layout_for(layout) == layout
        self.conv.param_propagate_down = wanted[: len(self.conv.blobs)]
        self.x.host_data[...] = quarters(random(*shape))
        self.x.host_diff.fill(7)
        for blob in self.conv.blobs:
            blob.host_data[...] = quarters(blob.host_data)
            blob.host_diff.fill(1)

    def one_by_one(self, down):
        with self.device.scope():
            self.conv.forward([self.x], [self.middle])
            self.relu.forward([self.middle], [self.y])
            self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
            self.relu.backward([self.y], [True], [self.middle])
            self.conv.backward([self.middle], [down], [self.x])
        return self.results()

    def together(self, down):
        group = ConvolutionReLU(
            [
                Member(self.conv, [self.x], [self.middle], [down]),
                Member(self.relu, [self.middle], [self.y], [True]),
            ]
        )
        with self.device.scope():
            group.forward()
            self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
            group.backward()
        return self.results()

    def results(self):
        arrays = [self.y.host_data, self.x.host_diff, *(blob.host_diff for blob in self.conv.blobs)]
        return [a.copy() for a in arrays]


def agree(have, want, tolerance):
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(initial=1), rtol=0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_as_the_layers_one_by_one(case, in_place):
    for down, *wanted in (
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    ):
        apart = Pair(case, in_place, wanted).one_by_one(down)
        together = Pair(case, in_place, wanted).together(down)
        agree(together, apart, 1e-6)


NO_FORMAT = ("no spatial axis", "axis 2", "larger than its input")
LAYOUTS = {
    "plain": (Layout(np.dtype(np.float32), False), 5e-3),
    "tf32": (Layout(np.dtype(np.float32), True), 5e-3),
    "bf16": (Layout(np.dtype(np.uint16), True), 4e-2),
    "fp16": (Layout(np.dtype(np.float16), True), 5e-3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case, layout):
    layout, tolerance = LAYOUTS[layout]
    if case in NO_FORMAT:
        layout = PLAIN
    want = Pair(case, True, [True, True]).one_by_one(True)
    agree(
        Pair(case, False, [True, True], CudaDevice(seed=1), layout).one_by_one(True),
        want,
        tolerance,
    )
    agree(
        Pair(case, True, [True, True], CudaDevice(seed=1), layout).together(True), want, tolerance
    )


class Behind(Pair):
    """A Pair with layers behind it that know ReLU's mask, and their group."""

    def __init__(self, case, behind, wanted, device=None, layout=None):
        super().__init__(case, True, wanted, device, layout)
        self.group, *texts = BEHIND[behind]
        self.behind, self.y = [], self.middle
        with self.device.scope():
            for text in texts:
                last = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, self.device)
                x, self.y = self.y, Blob(device=self.device)
                if layout:
                    self.y.set_layout(layout)
                last.setup([x], [self.y])
                last.reshape([x], [self.y])
                self.behind.append((last, x, self.y))

    def one_by_one(self, down):
        with self.device.scope():
            self.conv.forward([self.x], [self.middle])
            self.relu.forward([self.middle], [self.middle])
            for layer, x, y in self.behind:
                layer.forward([x], [y])
            self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
            for layer, x, y in reversed(self.behind):
                layer.backward([y], [True], [x])
            self.relu.backward([self.middle], [True], [self.middle])
            self.conv.backward([self.middle], [down], [self.x])
        return self.results()

    def together(self, down):
        group = self.group(
            [
                Member(self.conv, [self.x], [self.middle], [down]),
                Member(self.relu, [self.middle], [self.middle], [True]),
                *(Member(layer, [x], [y], [True]) for layer, x, y in self.behind),
            ]
        )
        with self.device.scope():
            for _ in range(2):  # nothing is left of the pass before
                for blob in self.conv.blobs:
                    blob.host_diff.fill(1)
                group.forward()
                self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
                group.backward()
        return self.results()


POOLING = 'type: "Pooling" pooling_param { %s }'
LRN = 'type: "LRN" lrn_param { %s alpha: 0.3 k: 2 }'
BEHIND = {
    "overlapping maxima": (ConvolutionPooling, POOLING % "kernel_size: 3 stride: 2 pad: 1"),
    "touching maxima": (ConvolutionPooling, POOLING % "kernel_size: 2 stride: 2"),
    "maxima apart": (ConvolutionPooling, POOLING % "kernel_size: 2 stride: 3"),
    "LRN": (ConvolutionLRN, LRN % "local_size: 3 beta: 0.75"),
    "means": (ConvolutionMeans, POOLING % "pool: AVE kernel_size: 3 stride: 2 pad: 1"),
    "wide LRN": (ConvolutionLRN, LRN % "local_size: 11 beta: 0.6"),
    "maxima of LRN": (
        ConvolutionLRNPooling,
        LRN % "local_size: 3 beta: 0.75",
        POOLING % "kernel_size: 3 stride: 2 pad: 1",
    ),
}
IMAGES = [case for case, (shape, _) in CASES.items() if len(shape) == 4]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("case", IMAGES)
def test_what_knows_the_mask_as_the_layers_one_by_one(case, behind):
    for down, *wanted in ((True, True, True), (False, True, False), (True, False, True)):
        apart = Behind(case, behind, wanted).one_by_one(down)
        together = Behind(case, behind, wanted).together(down)
        assert any(np.count_nonzero(a) for a in apart)
        agree(together, apart, 1e-6)


@pytest.mark.parametrize("case", IMAGES)
def test_maxima_without_what_they_are_of(case, monkeypatch):
    for *wanted, behind in ((True, True, "touching maxima"), (True, False, "overlapping maxima")):
        apart = Behind(case, behind, wanted).one_by_one(False)
        with monkeypatch.context() as patch:
            patch.setattr(cpu.Convolution, "pools", lambda *_: True)
            agree(Behind(case, behind, wanted).together(False), apart, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "behind", ["overlapping maxima", "means", "LRN", "wide LRN", "maxima of LRN"]
)
@pytest.mark.parametrize("case", IMAGES)
def test_what_knows_the_mask_on_a_gpu(case, behind, layout):
    layout, tolerance = LAYOUTS[layout]
    if case in NO_FORMAT:
        layout = PLAIN
    wanted = [True, True]
    want = Behind(case, behind, wanted).one_by_one(True)
    on_gpu = Behind(case, behind, wanted, CudaDevice(seed=1), layout).together(True)
    agree(on_gpu, want, tolerance)


class Pooled(Pair):
    """A Convolution, MAX Pooling and perhaps a ReLU, and their group."""

    def __init__(self, case, window, relu, wanted, device=None, layout=None):
        super().__init__(case, True, wanted, device, layout)
        text = POOLING % WINDOWS[window]
        with self.device.scope():
            self.pool = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, self.device)
            self.y = Blob(device=self.device)
            if layout:
                self.y.set_layout(layout)
            self.pool.setup([self.middle], [self.y])
            self.pool.reshape([self.middle], [self.y])
            self.relu.reshape([self.y], [self.y])
        self.rectifies = relu

    def one_by_one(self, down):
        with self.device.scope():
            self.conv.forward([self.x], [self.middle])
            self.pool.forward([self.middle], [self.y])
            if self.rectifies:
                self.relu.forward([self.y], [self.y])
            self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
            if self.rectifies:
                self.relu.backward([self.y], [True], [self.y])
            self.pool.backward([self.y], [True], [self.middle])
            self.conv.backward([self.middle], [down], [self.x])
        return self.results()

    def together(self, down):
        members = [
            Member(self.conv, [self.x], [self.middle], [down]),
            Member(self.pool, [self.middle], [self.y], [True]),
            Member(self.relu, [self.y], [self.y], [True]),
        ]
        group = PooledConvolution(members if self.rectifies else members[:2])
        with self.device.scope():
            for _ in range(2):  # nothing is left of the pass before
                for blob in self.conv.blobs:
                    blob.host_diff.fill(1)
                group.forward()
                self.y.host_diff[...] = quarters(random(*self.y.shape, seed=1))
                group.backward()
        return self.results()


WINDOWS = {
    "overlapping": "kernel_size: 3 stride: 2 pad: 1",
    "touching": "kernel_size: 2 stride: 2",
    "apart": "kernel_size: 2 stride: 3",
}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", IMAGES)
def test_maxima_as_the_layers_one_by_one(case, window, relu):
    for down, *wanted in (
        (True, True, True),
        (False, True, True),
        (False, True, False),
        (False, False, True),
        (True, False, True),
    ):
        apart = Pooled(case, window, relu, wanted).one_by_one(down)
        together = Pooled(case, window, relu, wanted).together(down)
        assert any(np.count_nonzero(a) for a in apart)
        agree(together, apart, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", IMAGES)
def test_maxima_on_a_gpu(case, window, down, layout):
    layout, tolerance = LAYOUTS[layout]
    if case in NO_FORMAT:
        layout = PLAIN
    wanted = [True, True]
    want = Pooled(case, window, True, wanted).one_by_one(down)
    on_gpu = Pooled(case, window, True, wanted, CudaDevice(seed=1), layout).together(down)
    agree(on_gpu, want, tolerance)


def test_formats_that_are_not_taken():
    preferred = LAYOUTS["bf16"][0]
    assert Pair("basic", True, [True, True]).conv.layout_for(preferred) == preferred
    for case in NO_FORMAT:
        assert Pair(case, True, [True, True]).conv.layout_for(preferred) == PLAIN
