"""Weight gradients from the factors of all ranks are the mean of the ranks' gradients, and are made
where that pays.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from caffepy.collectives.factors import Factors, Ranks, factored, pays
from caffepy.core.errors import SyncError
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import Net
from caffepy.net.gradients import large_products
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse

DATA = 'layer { name: "data" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 12 } %s } }'
RANDOM = 'data_filler { type: "gaussian" }'
PRODUCT = """
layer { name: "%s" type: "InnerProduct" bottom: "%s" top: "%s" %s inner_product_param
        { num_output: 12 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } %s } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "b" bottom: "x" top: "loss" }'


def net_of(*layers: str, seed: int = 0) -> Net:
    return Net(parse("\n".join(layers), NetParameter(), "net.prototxt"), device=Device(seed))


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
    ids=[
        "fc6",
        "fc6 in tf32",
        "vgg's fc6 in tf32",
        "fc6 in fp32",
        "fc8",
        "vgg's fc6",
        "many rows",
        "many ranks",
    ],
)
def test_factors_pay_where_much_less_is_sent(
    shape: tuple[int, int, int], itemsize: int, size: int, precision: str, expected: bool
) -> None:
    assert pays(*shape, itemsize, Ranks(size), precision) is expected


FC6, FC7, VGG_FC6 = (256, 4096, 9216), (256, 4096, 4096), (64, 4096, 25088)
RAIL = {"8x400": 45e9, "1x400": 45e9 / 8, "100 GbE": 10e9 / 8}  # of 8 GPUs a host


@pytest.mark.parametrize(
    ("shape", "rail", "most"),
    [
        (FC6, "8x400", 1),  # the products for 16 ranks take longer than what is saved
        (VGG_FC6, "8x400", 4),
        (FC6, "1x400", 2),  # of 4 hosts: 5.1 ms to reduce, 3.7 to gather, 1.6 to multiply
        (FC7, "1x400", 2),
        (VGG_FC6, "1x400", 16),
        (FC6, "100 GbE", 4),
        (FC7, "100 GbE", 2),
        (VGG_FC6, "100 GbE", 16),
    ],
)
def test_factors_pay_between_few_hosts(shape: tuple[int, int, int], rail: str, most: int) -> None:
    """In hosts of 8 GPUs, in bf16."""
    hosts = (1, 2, 4, 8, 16, 32, 64)
    paid = [n for n in hosts if pays(*shape, 2, Ranks(8 * n, n, RAIL[rail]), "bf16")]
    assert paid == [n for n in hosts if n <= most]


def test_between_hosts_of_one_gpu_the_wire_decides() -> None:
    for bandwidth in (1e9, 10e9):
        assert pays(*FC6, 4, Ranks(16, 16, bandwidth), "tf32")
        assert not pays(*FC6, 4, Ranks(32, 32, bandwidth), "tf32")
    _, outputs, inputs = FC6
    even = (
        2 * 2 * outputs * inputs // (4 * (outputs + inputs)) // 4
    )  # 4 hosts, gradients of 2 bytes
    assert not pays(even + 200, outputs, inputs, 4, Ranks(4, 4, 1e6, width=2), "tf32")
    assert pays(even + 200, outputs, inputs, 4, Ranks(4, 4, 1e6), "tf32")


@pytest.mark.usefixtures("always_factors")
def test_layers_for_which_it_pays() -> None:
    layers = PRODUCT % ("first", "x", "a", "", ""), PRODUCT % ("second", "a", "b", "", ""), LOSS
    for rows, names in (
        (2, ["first", "second"]),
        (7, []),
    ):  # the factors of seven rows are larger than the gradient
        net = net_of(DATA.replace("dim: 2", f"dim: {rows}") % RANDOM, *layers)
        assert [layer.param.name for layer in factored(net, Ranks(2), "fp32").values()] == names
        net.close()


INPUT = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 12 } } }'
MEMORY = """
layer { name: "in" type: "MemoryData" top: "x" top: "y"
        memory_data_param { batch_size: 2 channels: 12 height: 1 width: 1 } }
"""
THREE = DATA.replace('"x"', '"y"').replace("dim: 2", "dim: 3") % RANDOM
FOLDED = (
    DATA.replace('"x"', '"y"').replace("dim: 12", "dim: 2 dim: 12") % RANDOM
    + """
layer { name: "fold" type: "Reshape" bottom: "y" top: "x" reshape_param { shape { dim: -1 dim: 12 } } }
"""
)


@pytest.mark.usefixtures("always_factors")
@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (INPUT, ""),
        (MEMORY, ""),
        (DATA % RANDOM + THREE, ""),
        (FOLDED, ""),
        (DATA.replace("dim: 12", "dim: 1 dim: 12") % RANDOM, "axis: 2"),
    ],
    ids=["Input", "MemoryData", "two batches", "Reshape", "another axis"],
)
def test_no_layers_where_rows_may_become_more_or_fewer(data: str, settings: str) -> None:
    loss = 'layer { name: "loss" type: "Reduction" bottom: "b" top: "l" loss_weight: 1 }'
    net = net_of(data, PRODUCT % ("ip", "x", "b", "", settings), loss)
    assert len(large_products(net)) == 1
    assert factored(net, Ranks(2), "fp32") == {}
    net.close()


BRANCHES = (
    PRODUCT % ("first", "x", "a", "", "%s"),
    PRODUCT % ("second", "x", "c", "", ""),
    'layer { name: "second relu" type: "ReLU" bottom: "c" top: "c" }',
    'layer { name: "first relu" type: "ReLU" bottom: "a" top: "a" }',
    'layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "c" top: "b" }',
)


@pytest.mark.parametrize("transposed", ["", "transpose: true"], ids=["plain", "transposed"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_the_gradients_are_the_means_of_the_ranks(size: int, fused: bool, transposed: str) -> None:
    """Again and again, whichever layer comes first: in runs it is the second one here."""
    text = "\n".join([DATA % RANDOM, *BRANCHES, LOSS]) % transposed
    alone, together = ([net_of(text, seed=rank) for rank in range(size)] for _ in range(2))
    layers = [products(net) for net in together]
    given: list[list[Array]] = []

    def gather(wholes: Sequence[Array]) -> None:
        for rank, parts in enumerate(given):
            for whole, part in zip(wholes, parts, strict=True):
                whole[rank] = part

    made = [Factors(layers[rank], rank, size, gather, lambda: None) for rank in range(size)]
    for _ in range(3):
        for net in (*alone, *together):
            net.clear_param_diffs()
            net.forward(steps=net.steps if fused else None)
            net.backward(steps=net.steps if fused else None)
        given[:] = [
            [blob.data[rank].copy() for layer in layers[rank] for blob in made[rank]._all[layer]]
            for rank in range(size)
        ]
        for rank in range(size):
            assert made[rank].shapes == made[0].shapes
            assert not any(layer.blobs[0].diff.any() for layer in layers[rank])
            layers[rank][0].blobs[0].diff[...] = 7.0  # what others add there is no solver's own
            made[rank].exchange()
            for place, layer in enumerate(layers[rank]):
                mean = np.mean([products(net)[place].blobs[0].diff for net in alone], axis=0)
                np.testing.assert_allclose(layer.blobs[0].diff, mean, rtol=1e-5, atol=1e-6)
    for rank in range(size):
        made[rank].close()
        together[rank].clear_param_diffs()
        together[rank].backward()
        assert all(layer.blobs[0].diff.any() for layer in layers[rank])
    for net in (*alone, *together):
        net.close()


def products(net: Net) -> list[InnerProduct]:
    return [layer for layer in net.layers if isinstance(layer, InnerProduct)]


def test_batches_of_another_size_are_refused() -> None:
    net = net_of(DATA % RANDOM, PRODUCT % ("ip", "x", "b", "", ""), LOSS)
    (layer,) = products(net)
    made = Factors([layer], 0, 2, lambda wholes: None, lambda: None)
    net.forward()
    net.backward()
    with pytest.raises(
        SyncError, match=r'layer "ip": a batch of 1 follows one of 2, but solvers .* one size'
    ):
        layer.factors(np.ones((1, 12), np.float32), np.ones((1, 12), np.float32))  # type: ignore[misc]
    made.close()
    net.close()
