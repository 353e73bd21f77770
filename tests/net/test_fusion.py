"""Runs of layers computed together, on the CPU, against the same layers one by one."""

from types import SimpleNamespace

import numpy as np
import pytest

from caffepy import models
from caffepy.device.blob import Blob, Layout, Memory
from caffepy.device.device import Device
from caffepy.layer.convolution_groups import ConcatReLUs
from caffepy.layer.fused import JoinedMaps, ShuffledConcat
from caffepy.layer.group import Member
from caffepy.layer.shape import Concat, Permute, ShuffleChannel, Slice
from caffepy.net import Net
from caffepy.net.fusion import find_groups, joined_maps, shuffled_concats
from caffepy.ops import cpu
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import TRAIN, NetParameter
from tests.nets import library

HEAD = library.dummies(
    "data", 'type: "gaussian" std: 1', 'type: "constant" value: 1', data=(4, 3, 9, 9), label=(4,)
)
LOSS = library.inner_product("fc", "last", 3) + library.softmax_loss("fc")
CONV = 'convolution_param { num_output: 5 kernel_size: 3 pad: 1 weight_filler { type: "msra" } }'

POOL = "pooling_param { kernel_size: 3 stride: 2 }"
LRN = "lrn_param { local_size: 3 alpha: 0.7 }"


def conv(name: str, bottom: str) -> str:
    return library.layer("Convolution", name, bottom, CONV)


def each_channel(kind: str, name: str, bottom: str) -> str:
    return library.layer(
        kind, name, bottom, CONV.replace("num_output: 5", "num_output: 3 group: 3")
    )


def on(kind: str, name: str, blob: str, more: str = "", top: str = "") -> str:
    return library.layer(kind, name, blob, more, top=top or blob)


def norm(blob: str, in_place: bool = True) -> str:
    top = blob if in_place else f"{blob}_n"
    return on("BatchNorm", f"bn_{blob}", blob, top=top) + on(
        "Scale", f"scale_{blob}", top, "scale_param { bias_term: true }"
    )


def normed(behind: str) -> str:
    """A normalized convolution with a ReLU, all in place, and what else comes before the last
    layer.
    """
    return (
        conv("c", "data")
        + norm("c")
        + on("ReLU", "r", "c")
        + behind
        + on("Power", "p", "c", top="last")
    )


RELU = on("ReLU", "r", "last")
NETS = {
    "conv relu": conv("c", "data") + on("ReLU", "r", "c", top="last"),
    "conv relu in place": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("Power", "p", "c", top="last"),
    "conv relu, overwritten": (
        conv("c", "data")
        + on("ReLU", "r", "c", top="x")
        + on("Sigmoid", "s", "x")
        + on("Power", "p", "x", top="last")
    ),
    "conv relu in place, overwritten": (
        conv("c", "data")
        + on("ReLU", "r", "c")
        + on("Sigmoid", "s", "c")
        + on("Power", "p", "c", top="last")
    ),
    "norm": conv("c", "data")
    + norm("c")
    + on("ReLU", "r", "c")
    + on("Power", "p", "c", top="last"),
    "norm of each channel": each_channel("ConvolutionDepthwise", "c", "data")
    + norm("c")
    + on("ReLU", "r", "c")
    + each_channel("DepthwiseConvolution", "d", "c")
    + norm("d")
    + on("Power", "p", "d", top="last"),
    "norm, overwritten": normed(on("Sigmoid", "s", "c")),
    "norm and dropout": normed(on("Dropout", "d", "c")),
    "norm not in place": conv("c", "data") + norm("c", False) + on("ReLU", "r", "c_n", top="last"),
    "norm alone": on("Power", "p", "data", top="x")
    + norm("x", False)
    + on("ReLU", "r", "x_n", top="last"),
    "norm in place, scale not": (
        conv("c", "data")
        + on("ReLU", "r", "c")
        + on("BatchNorm", "bn", "c")
        + on("Scale", "s", "c", "scale_param { bias_term: true }", "last")
    ),
    "residual": (
        conv("a", "data")
        + norm("a")
        + on("ReLU", "ra", "a")
        + conv("b", "a")
        + norm("b")
        + library.layer("Eltwise", "sum", "a b", top="s")
        + on("ReLU", "rs", "s")
        + conv("d", "s")
        + norm("d")
        + library.layer("Eltwise", "sum2", "s d", top="last")
    ),
    "projection": (
        conv("a", "data")
        + norm("a")
        + conv("b", "data")
        + norm("b")
        + library.layer("Eltwise", "sum", "a b", top="last")
        + on("ReLU", "rs", "last")
    ),
    "split without gradient": (
        conv("a", "data")
        + norm("a")
        + on("ReLU", "ra", "a")
        + on("Power", "seen", "a", "propagate_down: false", top="seen")
        + on("Power", "p", "a", top="last")
    ),
    "conv relu, max pooling": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL, "last"),
    "conv relu not in place, max pooling": conv("c", "data")
    + on("ReLU", "r", "c", top="x")
    + on("Pooling", "m", "x", POOL, "last"),
    "conv relu, max pooling, overwritten": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL, "x")
    + on("BatchNorm", "bn", "x")
    + on("Power", "p", "x", top="last"),
    "conv relu, mean": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL.replace("{", "{ pool: AVE"), "last"),
    "conv, max pooling": conv("c", "data") + on("Pooling", "m", "c", POOL, "last"),
    "conv relu, norm, max pooling": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("LRN", "n", "c", LRN, "x")
    + on("Pooling", "m", "x", POOL, "last"),
    "conv relu not in place, norm": conv("c", "data")
    + on("ReLU", "r", "c", top="x")
    + on("LRN", "n", "x", LRN, "last"),
    "conv relu, norm, overwritten": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("LRN", "n", "c", LRN, "x")
    + on("BatchNorm", "bn", "x")
    + on("Power", "p", "x", top="last"),
    "conv relu, norm in place": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("LRN", "n", "c", LRN)
    + on("Power", "p", "c", top="last"),
    "conv relu, norm within channels": conv("c", "data")
    + on("ReLU", "r", "c")
    + on("LRN", "n", "c", LRN.replace("alpha", "norm_region: WITHIN_CHANNEL alpha"), "last"),
    "conv, norm": conv("c", "data") + on("LRN", "n", "c", LRN, "last"),
    "conv, max pooling, relu": conv("c", "data")
    + on("Pooling", "m", "c", POOL, "last")
    + on("ReLU", "r", "last"),
    "max pooling": conv("c", "data")
    + on("Sigmoid", "s", "c")
    + on("Pooling", "m", "c", POOL, "last")
    + on("ReLU", "r", "last"),
    "conv, max pooling, relu, overwritten": (
        conv("c", "data")
        + on("Pooling", "m", "c", POOL, "x")
        + on("ReLU", "r", "x")
        + on("BatchNorm", "bn", "x")
        + on("Power", "p", "x", top="last")
    ),
    "norm and max pooling": conv("c", "data")
    + norm("c")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL, "last"),
    "norm and maxima that are overwritten": conv("c", "data")
    + norm("c")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL, "last")
    + on("Sigmoid", "s", "last"),
    "norm and mean": conv("c", "data")
    + norm("c")
    + on("ReLU", "r", "c")
    + on("Pooling", "m", "c", POOL.replace("{", "{ pool: AVE"), "last"),
    "mean not in place": conv("c", "data")
    + on("Pooling", "m", "c", POOL.replace("{", "{ pool: AVE"), "m")
    + on("ReLU", "r", "m", top="last"),
    "concat": conv("a", "data")
    + on("ReLU", "ra", "a")
    + conv("b", "data")
    + on("ReLU", "rb", "b", top="y")
    + library.layer("Concat", "last", "a y"),
    "concat and split": conv("a", "data")
    + on("ReLU", "ra", "a")
    + conv("b", "data")
    + on("ReLU", "rb", "b")
    + library.layer("Concat", "both", "a b")
    + conv("c", "both")
    + on("Power", "p", "both", top="x")
    + library.layer("Concat", "last", "c x"),
    "concat of others": conv("a", "data")
    + on("ReLU", "ra", "a")
    + conv("b", "data")
    + on("ReLU", "rb", "b")
    + on("Dropout", "d", "b")
    + library.layer("Concat", "last", "a b"),
    "concat of images": conv("a", "data")
    + on("ReLU", "ra", "a")
    + conv("b", "data")
    + on("ReLU", "rb", "b")
    + library.layer("Concat", "last", "a b", "concat_param { axis: 2 }"),
    "concat without a gradient": conv("a", "data")
    + on("ReLU", "ra", "a")
    + conv("b", "data")
    + on("ReLU", "rb", "b")
    + library.layer("Concat", "last", "a b", "propagate_down: true propagate_down: false"),
    "product": (
        on(
            "InnerProduct",
            "ip",
            "data",
            'inner_product_param { num_output: 7 weight_filler { type: "xavier" } }',
            "last",
        )
        + on("ReLU", "r", "last")
        + on("Dropout", "d", "last")
    ),
}
GROUPS = {
    "conv relu": [["c", "r"]],
    "conv relu in place": [["c", "r"]],
    "conv relu, overwritten": [],
    "conv relu in place, overwritten": [["c", "r"]],
    "norm": [["c", "bn_c", "scale_c", "r"]],
    "norm of each channel": [["c", "bn_c", "scale_c", "r"], ["d", "bn_d", "scale_d"]],
    "norm, overwritten": [["c", "bn_c", "scale_c", "r"]],
    "norm and dropout": [["c", "bn_c", "scale_c", "r"]],
    "norm not in place": [["c", "bn_c", "scale_c", "r"]],
    "norm alone": [["bn_x", "scale_x", "r"]],
    "norm in place, scale not": [["c", "r"], ["bn", "s"]],
    "residual": [
        ["a", "bn_a", "scale_a", "ra", "a_ra_0_split"],
        ["b", "bn_b", "scale_b", "sum", "rs", "s_rs_0_split"],
        ["d", "bn_d", "scale_d", "sum2"],
    ],
    "projection": [["a", "bn_a", "scale_a", "sum", "rs"], ["b", "bn_b", "scale_b"]],
    "split without gradient": [["a", "bn_a", "scale_a", "ra", "a_ra_0_split"]],
    "conv relu, max pooling": [["c", "r", "m"]],
    "conv relu not in place, max pooling": [["c", "r", "m"]],
    "conv relu, max pooling, overwritten": [["c", "r"]],
    "conv relu, mean": [["c", "r", "m"]],
    "conv, max pooling": [["c", "m"]],
    "conv relu, norm, max pooling": [["c", "r", "n"]],
    "conv relu not in place, norm": [["c", "r", "n"]],
    "conv relu, norm, overwritten": [["c", "r", "n"]],
    "conv relu, norm in place": [["c", "r"]],
    "conv relu, norm within channels": [["c", "r"]],
    "conv, norm": [],
    "conv, max pooling, relu": [["c", "m", "r"]],
    "conv, max pooling, relu, overwritten": [["c", "m", "r"]],
    "max pooling": [["m", "r"]],
    "norm and max pooling": [["c", "bn_c", "scale_c", "r", "m"]],
    "norm and maxima that are overwritten": [["c", "bn_c", "scale_c", "r", "m"]],
    "norm and mean": [["c", "bn_c", "scale_c", "r"]],
    "mean not in place": [["m", "r"]],
    "concat": [["a", "ra"], ["b", "rb"]],
    "concat and split": [["a", "ra"], ["b", "rb"]],
    "concat of others": [["a", "ra"], ["b", "rb"]],
    "concat of images": [["a", "ra"], ["b", "rb"]],
    "concat without a gradient": [["a", "ra"], ["b", "rb"]],
    "product": [["ip", "r", "d"]],
}
CONCATS = {
    "concat": [["last"]],
    "concat and split": [["both", "both_both_0_split"]],
}
"""With what makes their bottoms."""


def build(body: str) -> Net:
    param = text.parse(HEAD + body + LOSS, NetParameter(), "net.prototxt")
    param.force_backward = False
    param.state.phase = TRAIN
    return Net(param, device=Device(seed=7))


def groups_of(net: Net) -> list[list[str]]:
    found = find_groups(net.nodes)
    return [[net.nodes[i].name for i in group] for group in found]


@pytest.mark.parametrize("name", NETS)
def test_what_is_computed_together(name: str) -> None:
    assert groups_of(build(NETS[name])) == GROUPS[name]


def test_maxima_behind_a_norm_where_channels_lie_last(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build(NETS["conv relu, norm, max pooling"])
    monkeypatch.setattr(Blob, "layout", Layout(np.dtype(np.float32), True))
    assert groups_of(net) == [["c", "r", "n", "m"]]


@pytest.mark.parametrize("name", [name for name in NETS if "concat" in name])
def test_which_concats_begin_the_backward_of_their_bottoms(name: str) -> None:
    net = build(NETS[name])
    found = [step.layers for step in net.steps if isinstance(step.group, ConcatReLUs)]
    assert [[net.nodes[i].name for i in layers] for layers in found] == CONCATS.get(name, [])


@pytest.mark.parametrize("name", NETS)
def test_the_same_numbers_as_one_by_one(name: str) -> None:
    alone, together = build(NETS[name]), build(NETS[name])
    for mine, theirs in zip(together.params, alone.params, strict=True):
        mine.data[...] = theirs.data
    for _ in range(3):
        for net in (alone, together):
            net.device.seed(7)
            net.clear_param_diffs()
        alone.forward()
        alone.backward()
        together.forward(steps=together.steps)
        together.backward(steps=together.steps)
        assert together.loss() == pytest.approx(alone.loss(), rel=1e-5)
        for mine, theirs in zip(together.params, alone.params, strict=True):
            np.testing.assert_allclose(mine.data, theirs.data, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(mine.diff, theirs.diff, rtol=2e-4, atol=2e-5)
        for name_, blob in alone.blobs.items():
            if name_ in ("last", "fc"):
                np.testing.assert_allclose(
                    together.blobs[name_].data, blob.data, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize(
    ("what", "body"),
    [
        (
            "leaky",
            conv("c", "data")
            + on("ReLU", "r", "c", "relu_param { negative_slope: 0.1 }", top="last"),
        ),
        (
            "shared",
            conv("c", "data")
            + on("ReLU", "r", "c", top="last")
            + on("Silence", "s", "c").replace('top: "c"', ""),
        ),
        (
            "stochastic",
            on("Pooling", "m", "data", "pooling_param { pool: STOCHASTIC kernel_size: 3 }", "last")
            + RELU,
        ),
        (
            "two tops",
            on("Pooling", "m", "data", POOL, "last").replace('top: "last"', 'top: "last" top: "at"')
            + RELU
            + 'layer { name: "s" type: "Silence" bottom: "at" }\n',
        ),
        (
            "coefficients",
            conv("a", "data")
            + norm("a")
            + conv("b", "data")
            + 'layer { name: "s" type: "Eltwise" bottom: "a" bottom: "b" top: "last" '
            + "eltwise_param { coeff: 1 coeff: -1 } }",
        ),
    ],
)
def test_what_is_not(what: str, body: str) -> None:
    groups = groups_of(build(body))
    assert groups == ([["a", "bn_a", "scale_a"]] if what == "coefficients" else [])


@pytest.mark.parametrize(
    ("model", "groups"),
    [("caffenet", 7), ("googlenet", 57), ("vgg16", 15), ("resnet50", 53), ("shufflenet_v2", 56)],
)
def test_bundled_nets(model: str, groups: int) -> None:
    path = models.path(model, "deploy")
    assert path
    param = text.read_net(path)
    for layer in param.layer:
        for shape in layer.input_param.shape:
            shape.dim[0] = 1
    param.state.phase = TRAIN
    net = Net(param)
    for node in net.nodes:
        node.need_backward = True
    assert len(find_groups(net.nodes)) == groups


ORDER = "permute_param { order: 0 order: 2 order: 3 order: 1 }"
OTHER = "permute_param { order: 0 order: 3 order: 2 order: 1 }"


def head(name: str, bottom: str, order: str = ORDER) -> str:
    """A convolution whose map becomes a row of each image, SSD's way."""
    return (
        conv(name, bottom)
        + on("Permute", f"{name}_perm", name, order, f"{name}_perm")
        + on("Flatten", f"{name}_flat", f"{name}_perm", top=f"{name}_flat")
    )


def joined(bottoms: str = "a_flat b_flat") -> str:
    return library.layer("Concat", "join", bottoms, top="last")


SMALLER = on("Pooling", "m", "data", POOL, "small")
HEADS = SMALLER + head("a", "data") + head("b", "small") + joined()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (HEADS, [["a_perm", "a_flat", "b_perm", "b_flat", "join"]]),
        (HEADS + on("Power", "p", "b_flat", top="seen"), []),
        (SMALLER + head("a", "data") + head("b", "small", OTHER) + joined(), []),
        (head("a", "data") + joined("a_flat"), []),
        (SMALLER + head("a", "data") + head("b", "small") + joined("a_flat a_flat b_flat"), []),
        (head("a", "data") + on("Flatten", "b_flat", "data", top="b_flat") + joined(), []),
    ],
)
def test_maps_whose_channels_lie_last_are_joined_as_they_lie(
    body: str, found: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build(body)
    assert list(joined_maps(net.nodes)) == []
    monkeypatch.setattr(Memory, "layout", Layout(np.dtype(np.float32), True))
    assert [[net.nodes[i].name for i in group] for group in joined_maps(net.nodes)] == found


def test_joined_maps_are_those_of_the_layers() -> None:
    rng = np.random.default_rng(0)
    maps, offset = [], 0
    for c, h, w in ((6, 4, 5), (3, 2, 2)):
        lying = rng.standard_normal((2, 2, h, w, c))  # of data and diff
        data, diff = lying.transpose(0, 1, 4, 2, 3)
        maps.append(SimpleNamespace(data=data, diff=diff, shape=data.shape))
    top = SimpleNamespace(data=np.zeros((2, 132)), diff=rng.standard_normal((2, 132)))
    permute, concat = (object.__new__(kind) for kind in (Permute, Concat))
    concat.ops = cpu
    heads = [Member(permute, [x], [], [down]) for x, down in zip(maps, (True, False), strict=True)]
    group = JoinedMaps([*heads, Member(concat, [], [top], [True, True])])
    unwanted = maps[1].diff.copy()
    group.forward()
    group.backward()
    for x in maps:
        columns = slice(offset, offset + x.data[0].size)
        rows = x.data.transpose(0, 2, 3, 1).reshape(2, -1)
        np.testing.assert_array_equal(top.data[:, columns], rows)
        offset += x.data[0].size
    first = top.diff[:, :120].reshape(2, 4, 5, 6).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(maps[0].diff, first)
    np.testing.assert_array_equal(maps[1].diff, unwanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uint16", "float16", "float32"])
def test_joined_maps_on_gpu(kind: str) -> None:
    """The same numbers to the last bit as those of the layers one by one."""
    from caffepy.device.cuda import CudaDevice

    nets = []
    for _ in range(2):
        param = text.parse(HEAD + HEADS + LOSS, NetParameter(), "net.prototxt")
        param.state.phase = TRAIN
        device = CudaDevice(0, seed=7)
        nets.append(Net(param, device=device, layout=Layout(np.dtype(kind), True)))
    alone, together = nets
    assert any(isinstance(step.group, JoinedMaps) for step in together.steps)
    for mine, theirs in zip(together.params, alone.params, strict=True):
        mine.host_data[...] = theirs.host_data
    for net, steps in ((alone, None), (together, together.steps)):
        net.device.seed(7)
        net.clear_param_diffs()
        net.forward(steps=steps)
        net.backward(steps=steps)
    np.testing.assert_array_equal(together.blobs["last"].host_data, alone.blobs["last"].host_data)
    assert together.loss() == alone.loss()
    for mine, theirs in zip(together.params, alone.params, strict=True):
        np.testing.assert_array_equal(mine.host_diff, theirs.host_diff)


SHUFFLE = on("ShuffleChannel", "deal", "join", "shuffle_channel_param { group: 2 }", "dealt")
BRANCHES = (conv("a", "data") + conv("b", "data")).replace("num_output: 5", "num_output: 6")
JOIN = library.layer("Concat", "join", "a b", top="join")
CUT = library.layer("Slice", "cut", "dealt", top="one two")
BOTH = library.layer("Eltwise", "sum", "one two", top="last")
ALL = BRANCHES + JOIN + SHUFFLE + CUT + BOTH
IN_HALVES = Layout(np.dtype(np.uint16), True)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (ALL, [["join", "deal", "cut"]]),
        (BRANCHES + JOIN + SHUFFLE + on("Power", "p", "dealt", top="last"), [["join", "deal"]]),
        (ALL + on("Power", "p", "join", top="seen"), []),
        (ALL + on("Power", "p", "dealt", top="seen"), [["join", "deal"]]),
        (ALL.replace("group: 2", "group: 4"), []),
    ],
)
def test_channels_of_a_concat_in_turn(
    body: str, found: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build(body)
    assert list(shuffled_concats(net.nodes)) == []
    monkeypatch.setattr(Memory, "layout", IN_HALVES)
    assert [[net.nodes[i].name for i in group] for group in shuffled_concats(net.nodes)] == found


@pytest.mark.parametrize("cuts", [False, True])
def test_channels_in_turn_are_those_of_the_layers(cuts: bool) -> None:
    rng = np.random.default_rng(0)

    def blob(channels: int) -> SimpleNamespace:
        data, diff = rng.standard_normal((2, 3, channels, 2, 2))
        return SimpleNamespace(data=data, diff=diff, shape=data.shape)

    bottoms, tops = [blob(6), blob(6)], [blob(6), blob(6)] if cuts else [blob(12)]
    joined, dealt = blob(12), blob(12)
    concat, shuffle, cut = (object.__new__(kind) for kind in (Concat, ShuffleChannel, Slice))
    concat.ops = shuffle.ops = cut.ops = cpu
    concat.axis = cut.axis = 1
    concat.sizes = cut.sizes = [6, 6]
    shuffle.group = 2
    layers = [(concat, bottoms, [joined]), (shuffle, [joined], [dealt] if cuts else tops)]
    layers += [(cut, [dealt], tops)] if cuts else []
    group = ShuffledConcat([Member(of, x, y, [True] * len(x)) for of, x, y in layers])
    answers = []
    for alone in (True, False):
        for of, x, y in layers if alone else ():
            of.forward(x, y)
        for of, x, y in reversed(layers) if alone else ():
            of.backward(y, [True] * len(x), x)
        if not alone:
            for zeroed in (*(y.data for y in tops), *(x.diff for x in bottoms)):
                zeroed[...] = 0
            group.forward()
            group.backward()
        answers.append([*(y.data.copy() for y in tops), *(x.diff.copy() for x in bottoms)])
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, other)
