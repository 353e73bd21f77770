"""Weight gradients from the factors of all ranks are the mean of the ranks' gradients, and are made where that pays."""

from collections.abc import Sequence

import numpy as np
import pytest

from caffepy.blob import Array
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import Net, gradients
from caffepy.parallel import factors
from caffepy.parallel.factors import Factors, factored, pays
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse

DATA = 'layer { name: "data" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 12 } %s } }'
RANDOM = 'data_filler { type: "gaussian" }'
PRODUCT = """
layer { name: "%s" type: "InnerProduct" bottom: "%s" top: "%s" %s inner_product_param
        { num_output: 12 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } %s } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "b" bottom: "x" top: "loss" }'


def net_of(*layers: str) -> Net:
    return Net(parse("\n".join(layers), NetParameter(), "net.prototxt"))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it paid for the smallest layers."""
    monkeypatch.setattr(gradients, "LARGE", 0)
    monkeypatch.setitem(factors.WORTH, "fp32", 10**9)


@pytest.mark.parametrize(
    ("shape", "itemsize", "size", "precision", "expected"),
    [
        ((256, 4096, 9216), 2, 4, "bf16", True),
        ((256, 4096, 9216), 4, 4, "tf32", False),
        ((64, 4096, 25088), 4, 4, "tf32", True),
        ((256, 4096, 9216), 4, 4, "fp32", False),
        ((256, 1000, 4096), 2, 4, "bf16", True),
        ((64, 4096, 25088), 2, 8, "fp16", True),
        ((4096, 4096, 4096), 2, 4, "bf16", False),
        ((256, 4096, 9216), 2, 64, "bf16", False),
    ],
    ids=["fc6", "fc6 in tf32", "vgg's fc6 in tf32", "fc6 in fp32", "fc8", "vgg's fc6", "many rows", "many ranks"],
)
def test_factors_pay_where_much_less_is_sent(
    shape: tuple[int, int, int], itemsize: int, size: int, precision: str, expected: bool
) -> None:
    assert pays(*shape, itemsize, size, precision) is expected


@pytest.mark.usefixtures("always")
def test_layers_for_which_it_pays() -> None:
    layers = PRODUCT % ("first", "x", "a", "", ""), PRODUCT % ("second", "a", "b", "", ""), LOSS
    for rows, names in ((2, ["first", "second"]), (7, [])):  # the factors of seven rows are larger than the gradient
        net = net_of(DATA.replace("dim: 2", f"dim: {rows}") % RANDOM, *layers)
        assert [layer.param.name for layer in factored(net, 2, "fp32").values()] == names
        net.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "given",
    [
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }',
        'layer { name: "in" type: "MemoryData" top: "x" top: "y" memory_data_param '
        "{ batch_size: 4 channels: 6 height: 1 width: 1 } }",
    ],
    ids=["Input", "MemoryData"],
)
def test_no_layers_where_the_batch_may_change(given: str) -> None:
    net = net_of(given, PRODUCT % ("ip", "x", "b", "", ""), 'layer { name: "s" type: "Silence" bottom: "b" }')
    assert factored(net, 2, "fp32") == {}
    net.close()


@pytest.mark.parametrize("transposed", ["", "transpose: true"], ids=["plain", "transposed"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_gradients_are_the_means_of_the_ranks(size: int, transposed: str) -> None:
    text = DATA % RANDOM, PRODUCT % ("first", "x", "a", "", transposed), PRODUCT % ("second", "a", "b", "", ""), LOSS
    nets = [net_of(*text) for _ in range(size)]
    kept = [weights(net) for net in nets]
    expected = []
    for net, layers in zip(nets, kept, strict=True):
        net.forward()
        net.backward()
        expected.append([layer.blobs[0].diff.copy() for layer in layers])
        net.clear_param_diffs()

    gathered: list[list[Array]] = [[], []]  # of the ranks in turn: what they have, then what they get
    for again in range(2):
        for rank, (net, layers) in enumerate(zip(nets, kept, strict=True)):

            def gather(wholes: Sequence[Array], rank: int = rank, again: int = again) -> None:
                gathered[again].append([whole[rank].copy() for whole in wholes])
                for other, parts in enumerate(gathered[0]):
                    for whole, part in zip(wholes, parts, strict=True):
                        whole[other] = part

            made = Factors(layers, rank, size, gather)
            net.clear_param_diffs()
            net.backward()
            made.close()
            if again:
                for place, layer in enumerate(layers):
                    mean = np.mean([of_rank[place] for of_rank in expected], axis=0)
                    np.testing.assert_allclose(layer.blobs[0].diff, mean, rtol=1e-5, atol=1e-6)
                    layer.blobs[0].diff[...] = 0
                net.backward()  # by itself again
                for layer, own in zip(layers, expected[rank], strict=True):
                    np.testing.assert_array_equal(layer.blobs[0].diff, own)
    assert len(gathered[1]) == size
    for net in nets:
        net.close()


def weights(net: Net) -> list[InnerProduct]:
    return [layer for layer in net.layers if isinstance(layer, InnerProduct)]
