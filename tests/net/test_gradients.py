"""Which layers add to the gradients of which parameters."""

import pytest

from caffepy.net import Net, gradients
from caffepy.net.gradients import adders, large_products
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse
from tests.nets import library


def test_layers_that_share_a_parameter_all_add_to_it() -> None:
    text = (
        library.dummies(a=(2, 3))
        + library.inner_product("one", "a", 3, more='param { name: "w" }', top="b")
        + library.inner_product("two", "b", 3, more='param { name: "w" }', top="c")
        + library.euclidean_loss("c", "a")
    )
    net = Net(parse(text, NetParameter(), "net.prototxt"))
    try:
        index = {name: i for i, name in enumerate(net.layer_names)}
        one, two = index["one"], index["two"]
        assert adders(net) == [{one, two}, {one}, {two}]
    finally:
        net.close()


def test_large_products_are_those_that_add_to_a_weight_of_their_own_which_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    still, shared = "param { lr_mult: 0 }", 'param { name: "w" }'
    layers = [
        library.dummies(x=(2, 12)),
        library.inner_product("first", "x", 12, top="a"),
        library.inner_product("small", "a", 2, top="b"),
        library.inner_product("still", "b", 12, more=still, top="c"),
        library.inner_product("one", "c", 12, more=shared, top="d"),
        library.inner_product("two", "d", 12, more=shared, top="e"),
        library.inner_product("last", "e", 12, top="f"),
        library.inner_product("unused", "e", 12, top="g"),
        library.euclidean_loss("f", "x"),
        library.layer("Silence", "silence", "g", top=""),
    ]
    net = Net(parse("\n".join(layers), NetParameter(), "net.prototxt"))
    assert large_products(net) == {}
    monkeypatch.setattr(gradients, "LARGE", 4 * 12 * 12)
    found = large_products(net)
    assert [layer.param.name for layer in found.values()] == ["first", "last"]
    for number, layer in found.items():
        assert net.learnable_params[number] is layer.blobs[0]
    net.close()


def test_a_weight_that_is_the_bias_as_well_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGE", 0)
    shared = 'param { name: "w" } param { name: "w" share_mode: PERMISSIVE }'
    text = (
        library.dummies(x=(2, 1), y=(2, 6))
        + library.inner_product("ip", "x", 6, filler="", more=shared, top="a")
        + library.euclidean_loss("a", "y")
    )
    net = Net(parse(text, NetParameter(), "net.prototxt"))
    assert len(net.learnable_params) == 1
    assert large_products(net) == {}
    net.close()
