"""Runs of layers computed together, on the CPU, against the same layers one by one."""

import numpy as np
import pytest

from caffepy import models
from caffepy.device.device import Device
from caffepy.layer.fused import ConcatReLUs
from caffepy.net import Net
from caffepy.net.fusion import find_groups
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
    ("model", "groups"), [("caffenet", 7), ("googlenet", 57), ("vgg16", 15), ("resnet50", 53)]
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
