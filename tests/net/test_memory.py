"""Nets whose blobs share an arena give the numbers of nets whose blobs have memory of their own, to
the last bit.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy import models
from caffepy.device.blob import Array, Layout, Memory
from caffepy.device.device import Device
from caffepy.models.synthetic import image_shape, synthetic
from caffepy.net import Net, gradients
from caffepy.net.fusion import Step
from caffepy.net.memory import ALIGNMENT, Interval, Usage, lifetimes, plan, save_memory
from caffepy.proto.caffe_pb2 import TRAIN
from caffepy.proto.text import read_net

from ..nets import (
    library,
    test_autoencoder,
    test_depthwise_separable,
    test_siamese,
    test_squeezenet,
    test_tagger,
)
from ..nets.training import Batch
from .nets import definition, net_of

BATCH = 4
Source = Callable[[np.random.Generator], Batch]


def conv(name: str, bottom: str, relu: bool = True) -> str:
    text = library.convolution(name, bottom, 6, 3, "pad: 1")
    return text + library.relu(f"{name}_relu", name) if relu else text


def loss(name: str, bottom: str, weight: float = 1) -> str:
    return (
        library.inner_product(name, bottom, 5)
        + library.in_place("Dropout", f"{name}_drop", name, "dropout_param { dropout_ratio: 0.2 }")
        + library.layer(
            "SoftmaxWithLoss", f"{name}_loss", f"{name} label", f"loss_weight: {weight}"
        )
        + library.layer("Accuracy", f"{name}_accuracy", f"{name} label")
    )


DATA = library.inputs(data=(BATCH, 3, 8, 8), label=(BATCH,))
INCEPTION = (
    DATA
    + conv("stem", "data")
    + library.layer("LRN", "norm", "stem", "lrn_param { local_size: 3 alpha: 0.1 }")
    + conv("a", "norm")
    + conv("b1", "norm")
    + conv("b2", "b1")
    + library.pooling("pool", "norm", "kernel_size: 3 stride: 1 pad: 1")
    + conv("c", "pool")
    + library.layer("Concat", "cat", "a b2 c")
    + loss("aux", "cat", 0.3)
    + conv("d", "cat")
    + loss("fc", "d")
)
RESIDUAL = (
    DATA
    + conv("stem", "data")
    + conv("a", "stem", relu=False)
    + library.normalization("a", "a", "a_normal")
    + conv("b", "stem")
    + conv("c", "b", relu=False)
    + library.normalization("c", "c", "c")
    + library.layer("Eltwise", "sum", "a_normal c")
    + library.relu("sum_relu", "sum")
    + conv("d", "sum")
    + library.layer("Eltwise", "out", "sum d", "eltwise_param { operation: MAX }")
    + library.layer("Flatten", "flat", "out")
    + loss("fc", "flat")
)
POOLED = (
    DATA
    + conv("stem", "data")
    + library.pooling("max", "stem", "kernel_size: 3 stride: 1")
    + library.relu("max_relu", "max")
    + conv("a", "max", relu=False)
    + library.pooling("mean", "a", "pool: AVE kernel_size: 2")
    + library.layer("ReLU", "mean_relu", "mean", top="positive")
    + library.pooling("again", "positive", "pool: AVE kernel_size: 2")
    + loss("fc", "again")
)
NORMALIZED_MAXIMA = (
    DATA
    + conv("a", "data")
    + conv("b", "a", relu=False)
    + library.in_place("BatchNorm", "b_norm", "b")
    + library.layer("Scale", "b_scale", "b", "scale_param { bias_term: true }", top="b")
    + library.relu("b_relu", "b")
    + library.pooling("max", "b", "kernel_size: 3 stride: 2 pad: 1")
    + conv("c", "max")
    + loss("fc", "c")
)
FORCED = (
    "force_backward: true "
    + DATA
    + conv("stem", "data", relu=False)
    + library.layer("Slice", "cut", "stem", top="a b")
    + library.layer("Flatten", "a_flat", "a")
    + library.layer("Flatten", "b_flat", "b")
    + library.relu("b_relu", "b_flat")
    + library.layer("Accuracy", "accuracy", "b_flat label")
    + loss("fc", "a_flat")
)
OTHERS = (
    DATA
    + conv("stem", "data", relu=False)
    + library.layer("ReLU", "relu", "stem")
    + conv("a", "relu", relu=False)
    + library.layer("Scale", "a_scale", "a", "scale_param { bias_term: true }")
    + conv("b", "relu", relu=False)
    + library.pooling("mean", "b", "pool: AVE kernel_size: 2 stride: 2")
    + library.layer(
        "Deconvolution",
        "up",
        "mean",
        'convolution_param { num_output: 6 kernel_size: 2 stride: 2 weight_filler { type: "xavier" } }',
    )
    + library.layer("Eltwise", "by", "a_scale up", "eltwise_param { operation: PROD }")
    + library.layer("Dropout", "drop", "by")
    + library.layer("Slice", "cut", "drop", top="c d")
    + library.layer("Eltwise", "scaled", "c d", "eltwise_param { coeff: 2 coeff: 3 }")
    + library.layer("Concat", "joined", "scaled relu")
    + library.layer("Reshape", "rows", "joined", "reshape_param { shape { dim: 0 dim: -1 } }")
    + library.layer("TanH", "tanh", "rows")
    + loss("fc", "tanh")
)


def images(rng: np.random.Generator) -> Batch:
    return {"data": rng.standard_normal((BATCH, 3, 8, 8)), "label": rng.integers(0, 5, BATCH)}


NETS: dict[str, tuple[str, Source]] = {
    "inception": (INCEPTION, images),
    "residual": (RESIDUAL, images),
    "forced": (FORCED, images),
    "pooled": (POOLED, images),
    "normalized maxima": (NORMALIZED_MAXIMA, images),
    "others": (OTHERS, images),
    "siamese": (test_siamese.NET, test_siamese.pairs),
    "recurrent": (test_tagger.NET, test_tagger.sentences),
    "autoencoder": (test_autoencoder.NET, test_autoencoder.bars),
    "depthwise": (test_depthwise_separable.NET, test_squeezenet.images),
    "squeezenet": (test_squeezenet.NET, test_squeezenet.images),
}


def poison(memory: Memory) -> None:
    """Overwrite values that nobody should need."""
    memory.array.fill(np.nan if memory.dtype.kind == "f" else 1)


class Driven:
    """A net run step by step; what nobody should need any more is overwritten with NaN as soon as
    that is so.
    """

    def __init__(
        self, net: Net, source: Source, steps: Sequence[Step], learns: bool = True
    ) -> None:
        self.net, self.source, self.steps, self.learns = net, source, steps, learns
        self.rng = np.random.default_rng(3)
        self.shared: dict[Memory, Interval] = {}
        self.moment = 0
        again = net._forward_again

        def forward_again(step: Step) -> None:
            again(step)
            self.passed()

        net._forward_again = forward_again  # type: ignore[method-assign]

    @property
    def usage(self) -> Usage:
        return Usage(self.net, self.steps, self.learns)

    def passed(self) -> None:
        """A moment is over."""
        for memory, interval in self.shared.items():
            if any(last == self.moment for _, last in interval.spans):
                poison(memory)
        self.moment += 1

    def run(self) -> list[Array]:
        """The outputs of a pass and the gradients of the parameters, by which these then change."""
        for name, array in self.source(self.rng).items():
            self.net.blobs[name].data[...] = array
        self.moment = 0
        for step in self.steps:
            self.net.forward(steps=[step])
            self.passed()
        for step in reversed(self.steps) if self.learns else ():
            self.net.backward(steps=[step])
            self.passed()
        found = [self.net.blobs[name].data.copy() for name in self.net.outputs]
        for blob in self.net.learnable_params if self.learns else ():
            found.append(blob.diff.copy())
            blob.data[...] -= np.float32(0.05) * blob.diff
            blob.diff.fill(0)
        return found


def plain(net: Net) -> list[Step]:
    return [Step(i) for i in range(len(net.layers))]


def assert_same(a: Sequence[Array], b: Sequence[Array]) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


intervals = st.builds(
    lambda size, first, length: Interval(size, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


@given(st.lists(intervals, max_size=40))
def test_what_is_needed_at_one_moment_lies_apart(needs: list[Interval]) -> None:
    offsets, total = plan(needs)
    places = list(zip(needs, offsets, strict=True))
    for i, (a, start) in enumerate(places):
        assert start % ALIGNMENT == 0
        assert start + a.size <= total
        for b, other in places[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert start + a.size <= other or other + b.size <= start
    assert total <= sum(-(-need.size // ALIGNMENT) * ALIGNMENT for need in needs)


def test_memory_is_used_again_as_soon_as_it_is_free() -> None:
    assert plan([Interval(1024, i, i + 1) for i in range(10)]) == ([0, 1024] * 5, 2048)
    assert plan([]) == ([], 0)


def test_the_smallest_gap_is_taken() -> None:
    below, above = Interval(4096, 0, 0), Interval(4095, 0, 9)  # at 0 and 4096
    wide, narrow = Interval(2048, 5, 5), Interval(1000, 5, 5)
    assert plan([below, above, Interval(3000, 1, 5), narrow]) == ([0, 4096, 0, 3072], 8191)
    assert plan([below, above, wide, narrow]) == ([0, 4096, 0, 2048], 8191)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_numbers_are_the_same_to_the_last_bit(name: str, fuse: bool) -> None:
    text, source = NETS[name]
    nets = [
        Driven(net := net_of(text), source, net.steps if fuse else plain(net)) for _ in range(2)
    ]
    nets[1].shared = lifetimes(nets[1].usage)
    size = save_memory([nets[1].usage])
    assert 0 < size < sum(interval.size for interval in nets[1].shared.values())
    for memory in nets[1].shared:
        poison(memory)
    for _ in range(3):
        assert_same(nets[0].run(), nets[1].run())


def test_every_net_of_a_solver_may_lie_in_one_arena() -> None:
    text, source = NETS["depthwise"]
    found = []
    for shared in (False, True):
        train, test = net_of(text), net_of("state { phase: TEST }" + text)
        runs = [
            Driven(train, source, plain(train)),
            Driven(test, source, plain(test), learns=False),
        ]
        if shared:
            sizes = [save_memory([run.usage]) for run in runs]
            assert save_memory([run.usage for run in runs]) == max(sizes)
        found.append([])
        for _ in range(3):
            test.share_trained_layers_with(train)
            found[-1] += [*runs[1].run(), *runs[0].run()]
    assert_same(*found)


def test_the_digits_learn_as_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "caffepy.net.memory")
    path = models.path("digits", "train_val")
    assert path is not None
    param = read_net(path)
    param.state.phase = TRAIN
    nets = [Net(param, device=Device(seed=1), path=path) for _ in range(2)]
    save_memory([Usage(nets[1], plain(nets[1]), True)])
    assert "share" in caplog.messages[-1]
    runs = [Driven(net, lambda rng: {}, plain(net)) for net in nets]
    for _ in range(4):
        assert_same(*(run.run() for run in runs))
    for net in nets:
        net.close()


@pytest.mark.parametrize("name", ["googlenet", "resnet50"])
def test_large_nets_take_little_more_than_the_data_alone(name: str) -> None:
    path = models.path(name, "train_val")
    assert path is not None
    param = synthetic(read_net(path), 2, image_shape(name))
    param.state.phase = TRAIN
    net = Net(param, device=Device(seed=1))
    kept = [blob for node in net.nodes for blob in (*node.tops, *node.layer.buffers)]
    data = {blob.data_memory: blob.count * blob.dtype.itemsize for blob in kept}
    _, total = plan(list(lifetimes(Usage(net, plain(net), True)).values()))
    assert total < 1.1 * sum(data.values())


def test_what_lives_longer_than_a_pass_is_left_alone() -> None:
    net = net_of(
        DATA
        + library.layer("Parameter", "p", "", "parameter_param { shape { dim: 6 } }")
        + conv("a", "data")
        + library.layer("Bias", "plus", "a p", "bias_param { axis: 1 }")
        + library.layer("Filter", "keep", "plus label", top="kept")
        + library.layer("Pooling", "mask", "kept", "pooling_param { kernel_size: 2 }", top="max at")
        + library.layer("Silence", "hush", "at", top="")
        + loss("fc", "max")
    )
    shared = lifetimes(Usage(net, plain(net), True))
    blobs = net.blobs
    names = {name for name, blob in blobs.items() if blob.data_memory in shared}
    assert names == {
        "a",
        "max",
        "at",
        "fc",
        *(name for name in blobs if name.startswith("fc_fc_drop_0_split")),
    }
    names = {name for name, blob in blobs.items() if blob.diff_memory in shared}
    assert names == {"p", "a", "max", "fc", "fc_fc_drop_0_split_0"}


def test_what_a_large_weight_is_updated_with_lives_up_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update may run beside all that follows it in backward."""
    text = (
        conv("first", "data") + library.inner_product("large", "first", 7) + loss("last", "large")
    )
    net = net_of(DATA + text)
    read = net.blobs["first"].data_memory, net.blobs["large"].diff_memory
    usage = Usage(net, plain(net), True)
    ends = [lifetimes(usage)[memory].last for memory in read]
    monkeypatch.setattr(gradients, "LARGE", 4 * net.learnable_params[2].count)
    later = [lifetimes(usage)[memory].last for memory in read]
    assert max(ends) < later[0] == later[1] == 2 * len(net.layers) - 1


def test_a_blob_that_grows_leaves_the_arena_and_the_others_stay() -> None:
    text, source = NETS["inception"]
    nets = [net_of(text) for _ in range(2)]
    save_memory([Usage(nets[1], plain(nets[1]), True)])
    runs = [Driven(net, source, plain(net)) for net in nets]
    assert_same(*(run.run() for run in runs))
    larger = {name: np.concatenate([a, a]) for name, a in source(np.random.default_rng(5)).items()}
    for run in runs:
        run.source = lambda rng: larger
        for name, array in larger.items():
            run.net.blobs[name].reshape(array.shape)
    for _ in range(2):
        assert_same(*(run.run() for run in runs))


class Gpu(Device):
    """A device that computes as the CPU does, but whose blobs can lie in another layout."""

    is_cuda = True


def test_copies_in_another_layout_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Layout(np.dtype(np.float16), True)
    monkeypatch.setattr("caffepy.ops.preferred_layout", lambda device: half)
    monkeypatch.setattr(
        "caffepy.layer.convolution.Convolution.layout_for", lambda self, preferred: preferred
    )
    absolute = 'layer { name: "abs" type: "AbsVal" bottom: "a" top: "abs" }\n'
    text = (
        DATA
        + conv("a", "data", relu=False)
        + absolute
        + conv("b", "abs", relu=False)
        + loss("fc", "b")
    )
    net = Net(definition(text), device=Gpu(seed=1))
    run = Usage(net, plain(net), True)
    shared = lifetimes(run)
    a = net.blobs["a"]
    at = net.layer_names.index("abs")
    back = 2 * len(net.layers) - 1 - at
    (twin,) = net.nodes[at].casts
    count = BATCH * 6 * 8 * 8
    assert a.layout == half
    assert shared[a.data_memory] == Interval(2 * count, at - 1, back)
    assert shared[twin.data_memory] == Interval(4 * count, at, back)
    assert shared[a.diff_memory] == Interval(2 * count, back, back + 1)
    assert shared[twin.diff_memory] == Interval(4 * count, back, back)
    save_memory([run])
    assert a.data.dtype == np.float16
    assert a.data.strides == (8 * 8 * 6 * 2, 2, 8 * 6 * 2, 6 * 2)
    assert twin.diff.dtype == np.float32
    for m, mine in shared.items():
        for n, others in shared.items():
            if m is not n and mine.first <= others.last and others.first <= mine.last:
                assert not np.may_share_memory(m.array, n.array)
