"""Passes of a net that the CPU replays give what passes layer by layer give, to the last bit."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.device.device import Device
from caffepy.device.threads import num_threads, set_num_threads
from caffepy.layer.base import registry
from caffepy.net import Net
from caffepy.net.replay import MAX_RECORDINGS, Passes, Replay
from caffepy.ops.cpu.winograd import PIECES, Winograd
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import NetParameter
from tests.layer.cases import CASES, IMAGE, NEURONS
from tests.nets import library

RUNS = 5  # one allocates memory, one is recorded

LABELLED = {"SoftmaxWithLoss", "Accuracy"}
LAYERS = {
    **{
        f"{name}{' in place' * in_place}": (name.split()[0], [IMAGE], 1, settings, in_place)
        for name, (settings, _) in NEURONS.items()
        for in_place in (False, True)
        if "TEST" not in name
    },
    **{
        f"{kind} {k}": (kind, shapes, tops, settings, False)
        for kind, cases in CASES.items()
        for k, (shapes, tops, settings) in enumerate(cases)
    },
}
REPLAYED = {
    "Accuracy",
    "BatchNorm",
    "Bias",
    "Concat",
    "Convolution",
    "Convolution3D",
    "ConvolutionDepthwise",
    "DepthwiseConv",
    "DepthwiseConvolution",
    "Dropout",
    "Eltwise",
    "EltwiseAffine",
    "Flatten",
    "Squeeze",
    "InnerProduct",
    "LRN",
    "Pooling",
    "ReLU",
    "Reshape",
    "Scale",
    "Softmax",
    "SoftmaxWithLoss",
    "Split",
}
"""The types of which a case is replayed; all others run layer by layer always."""
DERIVED = {"CuDNNBatchNorm", "FocalLoss", "InfogainLoss", "SoftmaxWithLossOHEM"}
"""Types that inherit what decides; it excludes all but the first."""


def net_of(definition: str) -> Net:
    return Net(text.parse(definition, NetParameter()), device=Device(seed=1))


def blobs(net: Net) -> list[Any]:
    return [*net.blobs.values(), *(blob for layer in net.layers for blob in layer.blobs)]


def fill(nets: tuple[Net, Net], rng: np.random.Generator) -> None:
    for name in nets[0].inputs:
        shape = nets[0].blobs[name].shape
        values = rng.standard_normal(shape).astype(np.float32)
        if name == "label":
            values = rng.integers(0, 2, shape).astype(np.float32)
        for net in nets:
            net.blobs[name].host_data[...] = values
    gradients = [rng.standard_normal(blob.shape).astype(np.float32) for blob in blobs(nets[0])]
    for net in nets:
        for blob, gradient in zip(blobs(net), gradients, strict=True):
            blob.host_diff[...] = gradient
        for node in net.nodes:
            node.write_loss_weights()


def equal(nets: tuple[Net, Net]) -> None:
    for name in nets[0].blobs:
        mine, theirs = (net.blobs[name] for net in nets)
        np.testing.assert_array_equal(mine.host_data, theirs.host_data, name)
        np.testing.assert_array_equal(mine.host_diff, theirs.host_diff, name)
    for mine, theirs in zip(*map(blobs, nets), strict=True):
        np.testing.assert_array_equal(mine.host_data, theirs.host_data)
        np.testing.assert_array_equal(mine.host_diff, theirs.host_diff)


def both(definition: str) -> tuple[Net, Net]:
    """The same net twice, with the same parameters."""
    nets = net_of(definition), net_of(definition)
    for mine, theirs in zip(*map(blobs, nets), strict=True):
        mine.host_data[...] = theirs.host_data
    return nets


class Replaying:
    """Runs all layers of a net by replay."""

    def __init__(self, net: Net) -> None:
        self.net, self.passes, self.last = net, Passes(net), len(net.layers) - 1

    def forward(self) -> None:
        self.passes.forward(0, self.last)

    def backward(self) -> None:
        self.passes.backward(self.last, 0)

    @property
    def way_forward(self) -> Replay:
        return self.passes._replays[0, self.last, False]

    @property
    def way_back(self) -> Replay:
        return self.passes._replays[self.last, 0, True]


def compare(
    definition: str, before: Callable[[int, tuple[Net, Net]], object] = lambda run, nets: None
) -> Replaying:
    """Run a net layer by layer and its twin by replay on several inputs."""
    nets, rng = both(definition), np.random.default_rng(2)
    runner = Replaying(nets[1])
    for run in range(RUNS):
        before(run, nets)
        fill(nets, rng)
        for way in (nets[0], runner):
            way.forward()
            way.backward()
        equal(nets)
    return runner


@pytest.fixture(autouse=True)
def any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay long passes, too: a first one may compile, and others share the machine."""
    monkeypatch.setattr("caffepy.net.replay.LONGEST", math.inf)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


def definition_of(case: str) -> str:
    kind, shapes, tops, settings, in_place = LAYERS[case]
    names = [f"x{i}" for i in range(len(shapes))]
    if kind in LABELLED:
        names[1] = "label"
    top = " ".join(names) if in_place else " ".join(f"y{i}" for i in range(tops))
    inputs = library.inputs("in", **dict(zip(names, shapes, strict=True)))
    down = "".join(f"propagate_down: {str(n != 'label').lower()} " for n in names)
    return f"force_backward: true {inputs}" + library.layer(
        kind, "layer", " ".join(names), down + settings, top=top
    )


@pytest.mark.parametrize("case", [case for case in LAYERS if LAYERS[case][0] in REPLAYED])
@pytest.mark.usefixtures("one_thread")
def test_layers(case: str) -> None:
    if "STOCHASTIC" in LAYERS[case][3]:
        assert not net_of(definition_of(case)).layers[-1].can_replay
        return
    runner = compare(definition_of(case))
    last = runner.net.nodes[-1]
    (forward, _), (backward, _) = runner.way_forward._parts[-1], runner.way_back._parts[0]
    assert (forward is not None) == last.layer.can_replay
    assert (backward is not None) == (last.layer.can_replay or not last.need_backward)


def test_all_types_that_can_be_replayed_are_compared() -> None:
    """Classes without a case, and those whose layers decide by their settings."""
    by_class = {
        name
        for name in registry
        if isinstance(registry[name], type) and registry[name].can_replay is not False
    }
    assert by_class == REPLAYED | DERIVED | {"Input"}


CHAIN = (
    library.inputs("in", data=(3, 2, 8, 8), label=(3,))
    + library.convolution("conv", "data", 5, 3)
    + library.relu("relu", "conv")
    + library.pooling("pool", "conv", "pool: MAX kernel_size: 2 stride: 2")
    + library.inner_product("ip", "pool", 4)
    + library.layer("Softmax", "prob", "ip")
    + library.layer("SoftmaxWithLoss", "loss", "ip label")
)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_net_with_any_number_of_threads(threads: int) -> None:
    before = num_threads()
    set_num_threads(threads)
    try:
        runner = compare(CHAIN)
    finally:
        set_num_threads(before)
    assert runner.way_forward._replayed == runner.way_back._replayed == RUNS - 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("images", [2, 40])
def test_winograd_convolutions(images: int, threads: int) -> None:
    """With few blocks of tiles, and with so many that threads divide them."""
    layers = library.inputs("in", data=(images, 32, 26, 18))
    for i in range(2):
        layers += library.convolution(f"conv{i}", f"conv{i - 1}" if i else "data", 32, 3, "pad: 1")
    before = num_threads()
    set_num_threads(threads)
    try:
        runner = compare(f"force_backward: true {layers}")
    finally:
        set_num_threads(before)
    plans = [layer.conv.plan for layer in runner.net.layers[1:]]  # type: ignore[attr-defined]
    assert {type(plan) for plan in plans} == {Winograd}
    assert (plans[0].plan.blocks >= PIECES) == (images > 2)
    for way in (runner.way_forward, runner.way_back):
        ((graph, _),) = way._parts
        assert graph is not None
        assert graph.is_one_call or threads > 1


def test_an_input_of_another_shape_begins_anew() -> None:
    def reshape(run: int, nets: tuple[Net, Net]) -> None:
        for net in nets if run == 3 else ():
            net.blobs["data"].reshape((2, 2, 8, 8))
            net.blobs["label"].reshape((2,))

    runner = compare(CHAIN, reshape)
    assert runner.way_forward._replayed == 1
    assert runner.way_forward.replays  # recorded again


def test_parameters_of_another_net_begin_anew() -> None:
    other = net_of(CHAIN)

    def share(run: int, nets: tuple[Net, Net]) -> None:
        for net in nets if run == 3 else ():
            net.share_trained_layers_with(other)

    assert compare(CHAIN, share).way_forward._replayed == 1


def test_the_number_of_threads_may_change() -> None:
    before = num_threads()

    def change(run: int, nets: tuple[Net, Net]) -> None:
        set_num_threads(1 + run // 3)

    try:
        assert compare(CHAIN, change).way_forward._replayed == 1
    finally:
        set_num_threads(before)


def test_shapes_that_change_all_the_time_end_recording() -> None:
    net = net_of(CHAIN)
    runner = Replaying(net)
    for run in range(3 * MAX_RECORDINGS):
        if not run % 2:
            net.blobs["data"].reshape((2 + run // 2 % 2, 2, 8, 8))
            net.blobs["label"].reshape((2 + run // 2 % 2,))
        runner.forward()
    assert runner.way_forward._recorded == MAX_RECORDINGS + 1
    assert runner.way_forward._replayed == 0


def test_a_layer_in_between_runs_each_time() -> None:
    """One that draws random numbers, between two stretches that are replayed."""
    net = CHAIN + library.layer("RReLU", "drop", "ip") + library.inner_product("ip2", "drop", 3)
    nets = both("state { phase: TRAIN } " + net)
    runner, rng = Replaying(nets[1]), np.random.default_rng(4)
    for _ in range(RUNS):
        fill(nets, rng)
        for way in (nets[0], runner):
            way.forward()
            way.backward()
        equal(nets)
    drawn = nets[1].blobs["drop"].host_data.copy()
    runner.forward()
    assert not np.array_equal(nets[1].blobs["drop"].host_data, drawn)
    assert [graph is None for graph, _ in runner.way_forward._parts] == [False, True, False]


def test_a_wrong_label_is_told_where_it_is_told_layer_by_layer() -> None:
    nets, rng = both(CHAIN), np.random.default_rng(2)
    ways = nets[0], Replaying(nets[1])
    messages = []
    for run in range(RUNS):
        fill(nets, rng)
        for net, way in zip(nets, ways, strict=True):
            if run == RUNS - 1:
                net.blobs["label"].host_data[1] = 7
                with pytest.raises(DataError) as error:
                    way.forward()
                messages.append(str(error.value))
            else:
                way.forward()
        equal(nets)
    assert messages[0] == messages[1]
    assert "label 7 is not one of the 4 classes" in messages[0]
    for net, way in zip(nets, ways, strict=True):
        net.blobs["label"].host_data[1] = 2
        way.forward()
    equal(nets)


def test_a_callback_that_looks_at_layers_sees_each() -> None:
    net, seen = net_of(CHAIN), list[int]()
    runner = Replaying(net)
    for _ in range(3):
        runner.forward()
    net.after_forward.append(seen.append)
    runner.forward()
    assert seen == list(range(len(net.layers)))
    net.after_forward.clear()
    runner.forward()
    assert runner.way_forward._replayed == 2


@pytest.mark.usefixtures("one_thread")
def test_recordings_of_a_net_share_temporary_arrays() -> None:
    """Each gradient of a weight has one: they need the room of the largest, whatever is recorded."""
    layers = library.inputs("in", data=(3, 64))
    for i in range(6):
        layers += library.inner_product(f"ip{i}", f"ip{i - 1}" if i else "data", 64)
    nets, rng = both(f"force_backward: true {layers}"), np.random.default_rng(3)
    runners = [Replaying(net) for net in nets]
    for _ in range(RUNS):
        fill(nets, rng)
        nets[0].forward()
        runners[1].forward()
        for start, end in ((6, 0), (4, 2), (6, 1)):
            nets[0].backward(start, end)
            runners[1].passes.backward(start, end)
        equal(nets)
    assert runners[1].way_back.replays
    assert 0 < nets[1].temporaries.size <= 64 * 64 * 4
    assert not nets[0].temporaries.size


def test_passes_of_two_threads_may_overlap() -> None:
    """The first to begin is the first to end; its next pass enters what each has to enter."""
    net, seen = net_of(CHAIN), list[dict[str, str]]()
    mine, theirs = net.running(), net.running()
    with ThreadPoolExecutor(1) as pool:
        mine.__enter__()
        pool.submit(theirs.__enter__).result()
        mine.__exit__(None, None, None)
        pool.submit(theirs.__exit__, None, None, None).result()
    net.before_forward.append(lambda layer: seen.append(np.geterr()))
    net.forward()
    assert len(seen) == len(net.layers)
    assert {way for ways in seen for way in ways.values()} == {"ignore"}
