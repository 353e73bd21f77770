"""Which layers add to the gradients of which parameters."""

import pytest

from caffepy.net import Net, gradients
from caffepy.net.gradients import adders, large_products
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse


def test_layers_that_share_a_parameter_all_add_to_it() -> None:
    text = """
    layer { name: "data" type: "DummyData" top: "a" dummy_data_param { shape { dim: 2 dim: 3 } } }
    layer { name: "one" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" } inner_product_param
            { num_output: 3 weight_filler { type: "xavier" } } }
    layer { name: "two" type: "InnerProduct" bottom: "b" top: "c" param { name: "w" } inner_product_param
            { num_output: 3 weight_filler { type: "xavier" } } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "a" top: "loss" }
    """
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
    product = """
    layer { name: "%s" type: "InnerProduct" bottom: "%s" top: "%s" %s inner_product_param
            { num_output: %d weight_filler { type: "xavier" } } }
    """
    layers = [
        'layer { name: "data" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 '
        "dim: 12 } } }",
        product % ("first", "x", "a", "", 12),
        product % ("small", "a", "b", "", 2),
        product % ("still", "b", "c", "param { lr_mult: 0 }", 12),
        product % ("one", "c", "d", 'param { name: "w" }', 12),
        product % ("two", "d", "e", 'param { name: "w" }', 12),
        product % ("last", "e", "f", "", 12),
        product % ("unused", "e", "g", "", 12),
        'layer { name: "loss" type: "EuclideanLoss" bottom: "f" bottom: "x" top: "loss" }',
        'layer { name: "silence" type: "Silence" bottom: "g" }',
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
    text = """
    layer { name: "data" type: "DummyData" top: "x" top: "y" dummy_data_param
            { shape { dim: 2 dim: 1 } shape { dim: 2 dim: 6 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 6 }
            param { name: "w" } param { name: "w" share_mode: PERMISSIVE } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "a" bottom: "y" top: "loss" }
    """
    net = Net(parse(text, NetParameter(), "net.prototxt"))
    assert len(net.learnable_params) == 1
    assert large_products(net) == {}
    net.close()
