"""Runs around a BatchNorm against their layers one by one."""

from itertools import product

import numpy as np
import pytest
from google.protobuf import text_format

import caffepy.layer
from caffepy.device import math_mode
from caffepy.device.blob import Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.layer.convolution import Convolution
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.fused import make_group
from caffepy.layer.group import Member
from caffepy.layer.norm_groups import NormGroup
from caffepy.layer.pooling import Pooling
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter
from tests.layer.harness import random

assert caffepy.layer  # imported so that every type is registered

TEXTS = {
    "Convolution": (
        "convolution_param { num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: 'xavier' } }"
    ),
    # its weights are such that no ReLU decides otherwise for their rounding
    "Pointwise": (
        "convolution_param { num_output: 8 kernel_size: 1 weight_filler { type: 'msra' } }"
    ),
    "Depthwise": (
        "convolution_param { kernel_size: 3 pad: 1 bias_term: false weight_filler { type: 'msra' } }"
    ),
    "BatchNorm": "batch_norm_param { moving_average_fraction: 0.9 }",
    "Scale": (
        "scale_param { bias_term: true filler { type: 'gaussian' } "
        "bias_filler { type: 'gaussian' } }"
    ),
    "Eltwise": "eltwise_param { operation: SUM }",
    "LRN": "lrn_param { local_size: 3 alpha: 0.5 }",
    "Pooling": "pooling_param { kernel_size: 3 stride: 2 pad: 1 }",
    "ReLU": "",
    "ReLU6": "",
    "Split": "",
}
TYPES = {"Pointwise": "Convolution", "Depthwise": "ConvolutionDepthwise"}
GROUPS = {
    "all": "Convolution BatchNorm Scale Eltwise ReLU Split",
    "block": "Convolution BatchNorm Scale Eltwise ReLU",
    "usual": "Convolution BatchNorm Scale ReLU",
    "linear": "Convolution BatchNorm Scale",
    "pointwise": "Pointwise BatchNorm Scale ReLU",
    "each channel": "Depthwise BatchNorm Scale ReLU6",
    "each channel, linear": "Depthwise BatchNorm",
    "each channel, split": "Depthwise BatchNorm Scale ReLU Split",
    "each channel, sum": "Depthwise BatchNorm Scale Eltwise",
    "each channel, sum and ReLU": "Depthwise BatchNorm Scale Eltwise ReLU",
    "each channel, sum and split": "Depthwise BatchNorm Scale Eltwise Split",
    "maxima": "Convolution BatchNorm Scale ReLU Pooling",
    "maxima, no convolution": "BatchNorm Scale ReLU Pooling",
    "pointwise sum": "Pointwise BatchNorm Scale Eltwise ReLU Split",
    "sum": "Convolution BatchNorm Scale Eltwise",
    "unscaled": "Convolution BatchNorm ReLU",
    "no convolution": "BatchNorm Scale ReLU",
    "no convolution, split": "BatchNorm Scale ReLU Split",
    "no convolution, sum": "BatchNorm Scale Eltwise ReLU",
    "BatchNorm and ReLU": "BatchNorm ReLU",
    "ReLU6": "Convolution BatchNorm Scale ReLU6",
    "ReLU6 of a sum": "BatchNorm Scale Eltwise ReLU6 Split",
}
MEMBERS = {name: types.split() for name, types in GROUPS.items()}
SHAPE = (3, 8, 5, 4)
PLAIN = Layout(np.dtype(np.float32), False)


def coarse(seed):
    """Numbers that every element type holds."""
    return np.round(16 * random(*SHAPE, seed=seed)) / 16


class Chain:
    """The layers of a group, wired; `in_place` or each with a top of its own."""

    def __init__(
        self,
        types,
        in_place,
        phase=TRAIN,
        device=None,
        layout=PLAIN,
        dtype=np.float64,
        swap=False,
        frozen=False,
    ):
        self.device = device or Device(seed=1)
        self.device.seed(1)
        self.layout, self.dtype = layout, dtype
        with self.device.scope():
            self.x, self.other = self._blob(SHAPE), self._blob(SHAPE)
            self.members = []
            blob = self.x
            for kind in types:
                of = TYPES.get(kind, kind)
                param = text_format.Parse(f'type: "{of}" {TEXTS[kind]}', LayerParameter())
                if kind == "BatchNorm" and frozen:
                    param.batch_norm_param.use_global_stats = True
                layer = create_layer(param, phase, self.device, dtype)
                bottoms = (
                    [blob]
                    if kind != "Eltwise"
                    else [self.other, blob]
                    if swap
                    else [blob, self.other]
                )
                own = isinstance(layer, Convolution | Eltwise | Pooling) or not in_place
                tops = (
                    [self._blob() for _ in range(2)]
                    if kind == "Split"
                    else [self._blob() if own else blob]
                )
                layer.setup(bottoms, tops)
                layer.reshape(bottoms, tops)
                layer.param_propagate_down = [True] * len(layer.blobs)
                self.members.append(Member(layer, bottoms, tops, [True] * len(bottoms)))
                blob = tops[0]
            self.tops = self.members[-1].tops
            self.put(self.x, "data", coarse(0))
            self.put(self.other, "data", coarse(1))
            for m in self.members:
                for seed, blob in enumerate(m.layer.blobs):
                    self.put(blob, "diff", np.ones(blob.shape))
                    if m.layer.type == "BatchNorm":
                        self.put(blob, "data", 1 + np.abs(random(*blob.shape, seed=seed)))

    def _blob(self, shape=(0,)):
        blob = Blob(shape, self.dtype, self.device)
        if self.layout != PLAIN:
            blob.set_layout(self.layout)
        return blob

    @staticmethod
    def put(blob, what, values):
        getattr(blob, f"host_{what}")[...] = values

    def run(self, group=None):
        """Run both passes, of the group or of each layer, and forward twice because of the
        statistics.
        """
        layers = self.members
        with self.device.scope():
            for _ in range(2):
                self.put(self.x, "data", coarse(0))
                if group:
                    group.forward()
                else:
                    for m in layers:
                        m.layer.forward(m.bottoms, m.tops)
            y = np.array(self.tops[0].host_data)
            for i, top in enumerate(self.tops):
                self.put(top, "diff", random(*top.shape, seed=2 + i))
            if group:
                group.backward()
            else:
                for m in reversed(layers):
                    m.layer.backward(m.tops, m.propagate_down, m.bottoms)
            answers = {"y": y}
            if layers[0].propagate_down[0]:
                answers["dx"] = np.array(self.x.host_diff)
            eltwise = [m for m in layers if m.layer.type == "Eltwise"]
            if eltwise and eltwise[0].propagate_down[m_index(eltwise[0], self.other)]:
                answers["dother"] = np.array(self.other.host_diff)
            for m in layers:
                for i, blob in enumerate(m.layer.blobs):
                    answers[f"{m.layer.type} {i}"] = np.array(blob.host_data)
                    answers[f"{m.layer.type} d{i}"] = np.array(blob.host_diff)
        return answers


def grouped(chain):
    return make_group(chain.members, True, (True, True))


def m_index(member, blob):
    return next(i for i, b in enumerate(member.bottoms) if b is blob)


def agree(answers, truths, near, flips=0):
    """`flips`: the part of all elements in which a ReLU may have decided otherwise."""
    assert answers.keys() == truths.keys()
    for name, truth in truths.items():
        errors = np.sort(np.abs(answers[name] - truth), axis=None)
        error, size = (
            np.linalg.norm(errors[: errors.size - int(flips * errors.size)]),
            np.linalg.norm(truth),
        )
        assert error <= near * (1e-3 + size), f"{name}: {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("phase", "frozen"), [(TRAIN, False), (TEST, False), (TRAIN, True)])
@pytest.mark.parametrize("name", GROUPS)
def test_as_its_layers(name, phase, frozen, in_place):
    chain, alone = (Chain(MEMBERS[name], in_place, phase, frozen=frozen) for _ in range(2))
    agree(chain.run(grouped(chain)), alone.run(), 1e-9)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", [name for name in GROUPS if name.startswith("each channel")])
def test_without_the_gradient_between(name, frozen, monkeypatch):
    monkeypatch.setattr(cpu.Convolution, "skips_gradient", lambda *_: True)
    chain, alone = (Chain(MEMBERS[name], True, frozen=frozen) for _ in range(2))
    group = grouped(chain)
    assert group.skips_gradient != frozen
    agree(chain.run(group), alone.run(), 1e-9)


@pytest.mark.parametrize("name", ["each channel, sum", "each channel, sum and ReLU"])
def test_without_the_gradient_behind_a_sum(name, monkeypatch):
    """Where the first half is computed by another group."""
    chain, alone = (Chain(MEMBERS[name], True) for _ in range(2))
    wanted = alone.run()
    monkeypatch.setattr(cpu.Convolution, "skips_gradient", lambda *_: True)
    group = grouped(chain)
    backward = group.backward

    def in_halves():
        half = group.sums_of(chain.tops[0])
        half.masked[...] = chain.tops[0].diff
        cpu.norm_sums(half)
        backward()

    monkeypatch.setattr(group, "backward", in_halves)
    agree(chain.run(group), wanted, 1e-9)


def test_the_other_blob_may_come_first():
    chain, alone = (Chain(MEMBERS["all"], True, swap=True) for _ in range(2))
    agree(chain.run(grouped(chain)), alone.run(), 1e-9)


@pytest.mark.parametrize("name", ["block", "all", "usual", "no convolution, sum", "maxima"])
def test_only_what_is_wanted_is_computed(name):
    truths = Chain(MEMBERS[name], True).run()
    for first, other, params in product((False, True), repeat=3):
        chain = Chain(MEMBERS[name], True)
        for i, m in enumerate(chain.members):
            down = [b is not chain.other or other for b in m.bottoms]
            if i == 0:
                down = [first]
            chain.members[i] = Member(m.layer, m.bottoms, m.tops, down)
            m.layer.param_propagate_down = [params] * len(m.layer.blobs)
        answers = chain.run(grouped(chain))
        for key, answer in answers.items():
            truth = truths[key]
            if key.split()[-1].startswith("d") and key not in ("dx", "dother") and not params:
                truth = np.ones_like(truth)
            np.testing.assert_allclose(answer, truth, 1e-7, 1e-9, err_msg=key)


@pytest.mark.parametrize("name", ["block", "usual", "no convolution"])
def test_a_group_that_never_learns_writes_over_what_it_reads(name):
    truth = Chain(MEMBERS[name], True, TEST).run()["y"]
    chain = Chain(MEMBERS[name], True, TEST)
    group = NormGroup(chain.members, learns=False)
    assert group.x is (chain.x if name == "no convolution" else chain.tops[0])
    group.forward()
    np.testing.assert_allclose(chain.tops[0].data, truth, 1e-9, 1e-9)


def test_a_top_without_a_gradient_adds_nothing():
    truth = Chain(MEMBERS["block"], True)
    answers, chain = truth.run(), Chain(MEMBERS["all"], True)
    group = grouped(chain)
    for _ in range(2):
        group.forward()
    chain.tops[0].diff[...] = random(*chain.tops[0].shape, seed=2)
    group.backward()
    np.testing.assert_allclose(chain.x.diff, answers["dx"], 1e-9, 1e-9)


def test_shapes_may_change():
    chain = Chain(MEMBERS["usual"], True)
    group = grouped(chain)
    group.forward()
    larger = random(4, 8, 6, 5)
    chain.x.reshape(larger.shape)
    for m in chain.members:
        m.layer.reshape(m.bottoms, m.tops)
    chain.x.data[...] = larger
    group.forward()
    for top in chain.tops:
        top.diff[...] = 1
    group.backward()
    np.testing.assert_allclose(chain.tops[0].data.shape, (4, 8, 6, 5))
    assert chain.x.diff.shape == larger.shape


@pytest.fixture
def exact_products(monkeypatch):
    """Convolutions whose factors are not rounded."""
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")


GPU_LAYOUTS = {
    "float32 planes": (PLAIN, 1e-4, 0),
    "float32": (Layout(np.dtype(np.float32), True), 1e-4, 0),
    "float16": (Layout(np.dtype(np.float16), True), 1e-2, 0.01),
    "bfloat16": (Layout(np.dtype(np.uint16), True), 5e-2, 0.02),
}  # layout, tolerance, part of the elements with another sign


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", GPU_LAYOUTS)
@pytest.mark.parametrize("name", GROUPS)
def test_on_a_gpu(name, layout, in_place, exact_products):
    lying, near, flips = GPU_LAYOUTS[layout]
    for frozen in (False, True):
        truths = Chain(MEMBERS[name], in_place, dtype=np.float32, frozen=frozen).run()
        chain = Chain(
            MEMBERS[name], in_place, TRAIN, CudaDevice(seed=1), lying, np.float32, frozen=frozen
        )
        agree(chain.run(grouped(chain)), truths, near, flips)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", GPU_LAYOUTS)
@pytest.mark.parametrize("types", ["BatchNorm", "BatchNorm Scale", "LRN"])
def test_layers_on_a_gpu(types, layout):
    lying, near, flips = GPU_LAYOUTS[layout]
    for in_place, frozen in product((False, True), repeat=2):
        truths = Chain(types.split(), in_place, dtype=np.float32, frozen=frozen).run()
        chain = Chain(
            types.split(), in_place, TRAIN, CudaDevice(seed=1), lying, np.float32, frozen=frozen
        )
        agree(chain.run(), truths, near, flips)


@pytest.mark.gpu
def test_a_recording_gives_the_same():
    lying, *_ = GPU_LAYOUTS["bfloat16"]
    chain = Chain(MEMBERS["all"], True, TRAIN, CudaDevice(seed=1), lying, np.float32)
    group = grouped(chain)
    answers = chain.run(group)

    def both():
        group.forward()
        group.backward()

    for blob, what in ((chain.x, "diff"), (chain.tops[0], "data"), (chain.other, "diff")):
        chain.put(blob, what, 0)
    for i, top in enumerate(chain.tops):
        chain.put(top, "diff", random(*top.shape, seed=2 + i))
    chain.device.flush()  # what was written on the host goes to the device
    chain.device.capture(both).replay()
    np.testing.assert_array_equal(chain.tops[0].host_data, answers["y"])
    np.testing.assert_array_equal(chain.other.host_diff, answers["dother"])
    np.testing.assert_allclose(
        chain.x.host_diff, answers["dx"], 0.02, 0.02
    )  # cuDNN may add up in another order
