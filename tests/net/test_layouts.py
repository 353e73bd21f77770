"""In which layout the blobs of a net lie on a GPU."""

import numpy as np
import pytest

from caffepy.device.blob import PLAIN, Layout
from caffepy.net import Net
from caffepy.net.layouts import plan

from ..nets import library
from .nets import definition, net_of

HALF = Layout(np.dtype(np.float16), True)
WIDE = Layout(np.dtype(np.float32), True)
DATA = library.inputs(data=(2, 3, 4, 4))


def conv(name: str, bottom: str, more: str = "", filler: str = "") -> str:
    return library.convolution(name, bottom, 2, 1, filler=filler, more=more)


def test_a_layer_of_forward_type_float_keeps_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "caffepy.layer.convolution.Convolution.layout_for", lambda self, preferred: preferred
    )
    net = net_of(DATA + conv("a", "data") + conv("b", "a", "forward_type: FLOAT") + conv("c", "b"))
    layouts = plan(net.nodes, HALF)
    assert layouts.bottoms == [[], [HALF], [WIDE], [HALF]]
    assert layouts.tops == [[PLAIN], [HALF], [WIDE], [HALF]]
    in_float32 = plan(net.nodes, WIDE)
    assert in_float32.tops == [[PLAIN], [WIDE], [WIDE], [WIDE]]


HEAD = library.inputs("y", y=(2,))
NARROW = HALF._replace(channels_last=False)


def test_another_shape_keeps_the_type() -> None:
    net = net_of(
        DATA
        + HEAD
        + conv("a", "data")
        + library.layer("Flatten", "f", "a")
        + library.inner_product("ip", "f", 4)
        + library.softmax_loss("ip", "y")
    )
    layouts = plan(net.nodes, HALF)
    assert layouts.bottoms == [[], [], [HALF], [NARROW], [NARROW], [PLAIN, PLAIN]]
    assert layouts.tops == [[PLAIN], [PLAIN], [HALF], [NARROW], [PLAIN], [PLAIN]]


def test_another_shape_is_plain_before_a_loss_and_so_is_the_product_that_it_shows() -> None:
    net = net_of(
        DATA
        + HEAD
        + library.inner_product("ip", "data", 4)
        + library.layer("Flatten", "f", "ip")
        + library.softmax_loss("f", "y")
    )
    layouts = plan(net.nodes, HALF)
    assert layouts.bottoms == [[], [], [NARROW], [PLAIN], [PLAIN, PLAIN]]
    assert layouts.tops == [[PLAIN]] * 5
    net = net_of(
        DATA
        + HEAD
        + conv("a", "data")
        + library.layer("Flatten", "f", "a")
        + library.softmax_loss("f", "y")
    )
    layouts = plan(net.nodes, HALF)
    assert layouts.bottoms == [[], [], [HALF], [PLAIN], [PLAIN, PLAIN]]
    assert layouts.tops == [[PLAIN], [PLAIN], [HALF], [PLAIN], [PLAIN]]


def test_what_has_a_loss_weight_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale goes into its diff, and float16 ends at 65504."""
    monkeypatch.setattr("caffepy.layer.neuron.ReLU.layout_for", lambda self, preferred: preferred)
    relu = 'layer { name: "r" type: "ReLU" bottom: "b" top: "b" loss_weight: 1 }\n'
    net = net_of(DATA + conv("a", "data") + conv("b", "a") + relu)
    layouts = plan(net.nodes, HALF)
    assert layouts.bottoms == [[], [HALF], [WIDE], [WIDE]]
    assert layouts.tops == [[PLAIN], [HALF], [WIDE], [WIDE]]


def ssd_head(order: str, filler: str = "") -> str:
    """A map, its boxes, and scores with their channels moved."""
    return (
        DATA
        + conv("a", "data", filler=filler)
        + library.layer("PriorBox", "p", "a data", "prior_box_param { min_size: 2 }")
        + conv("b", "a", filler=filler)
        + library.layer("Permute", "m", "b", f"permute_param {{ {order} }}")
        + library.layer("Flatten", "f", "m")
    )


@pytest.mark.parametrize(
    ("order", "taken"),
    [("order: 0 order: 2 order: 3 order: 1", HALF), ("order: 0 order: 2 order: 1", PLAIN)],
)
def test_maps_of_detectors_are_not_converted_for_what_reads_no_order(
    order: str, taken: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "caffepy.layer.convolution.Convolution.layout_for", lambda self, preferred: preferred
    )
    net = net_of(ssd_head(order))
    layouts = plan(net.nodes, HALF)
    names = [node.name for node in net.nodes]
    assert [layouts.bottoms[names.index(name)] for name in "pmf"] == [
        [HALF, PLAIN],
        [taken],
        [PLAIN],
    ]
    assert [layouts.tops[names.index(name)] for name in "pmf"] == [[PLAIN]] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_maps_of_detectors_on_gpu(kind: str) -> None:
    from caffepy.device.cuda import CudaDevice

    text = ssd_head("order: 0 order: 2 order: 3 order: 1", library.XAVIER)
    text += HEAD + library.inner_product("ip", "f", 4) + library.softmax_loss("ip", "y")
    device = CudaDevice(seed=1)
    nets = [
        net_of(text),
        Net(definition(text), device=device, layout=Layout(np.dtype(kind), True)),
    ]
    for net in nets:
        net.blobs["data"].host_data[...] = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
        net.blobs["y"].host_data[...] = 1, 3
    here, there = nets
    for mine, theirs in zip(there.params, here.params, strict=True):
        mine.host_data[...] = theirs.data
    for net in nets:
        net.forward()
        net.clear_param_diffs()
        net.backward()
    for name in ("a", "p", "m", "f"):
        got, want = there.blobs[name].host_data, here.blobs[name].data
        np.testing.assert_allclose(got, want, 3e-2, 3e-2, err_msg=name)
    for mine, theirs in zip(there.params, here.params, strict=True):
        np.testing.assert_allclose(mine.host_diff, theirs.diff, 5e-2, 5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uint16", "float16", "float32"])
@pytest.mark.parametrize(
    "view",
    [
        'type: "Flatten"',
        'type: "Reshape" reshape_param { shape { dim: 0 dim: -1 } }',
        'type: "Reshape" reshape_param { shape { dim: 0 dim: 4 dim: 1 dim: -1 } }',
    ],
)
def test_another_shape_on_gpu(view: str, kind: str) -> None:
    from caffepy.device.cuda import CudaDevice

    text = DATA + HEAD + conv("a", "data", filler=library.XAVIER)
    text += (
        f'layer {{ name: "f" {view} bottom: "a" top: "f" }}\n'
        + library.inner_product("ip", "f", 4)
        + library.softmax_loss("ip", "y")
    )
    nets = [
        net_of(text),
        Net(definition(text), device=CudaDevice(seed=1), layout=Layout(np.dtype(kind), True)),
    ]
    for net in nets:
        net.blobs["data"].host_data[...] = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
        net.blobs["y"].host_data[...] = 1, 3
        for _ in range(2):
            net.clear_param_diffs()
            net.forward()
            net.backward()
    here, there = nets
    assert [there.blobs[name].layout for name in "af"] == [
        Layout(np.dtype(kind), last) for last in (True, False)
    ]
    atol = 3e-2 if kind == "uint16" else 4e-3
    for name in ("a", "f", "ip", "loss"):
        np.testing.assert_allclose(
            there.blobs[name].host_data, here.blobs[name].data, 3e-2, atol, err_msg=name
        )
    for mine, theirs in zip(there.params, here.params, strict=True):
        np.testing.assert_allclose(mine.host_diff, theirs.diff, 3e-2, atol)


@pytest.mark.gpu
def test_a_copy_with_a_loss_weight_on_gpu() -> None:
    """The Split after "a" gets the weight and is of float32, its bottom is of float16."""
    from caffepy.device.cuda import CudaDevice

    text = DATA + conv("a", "data", "loss_weight: 0.5", library.XAVIER)
    text += conv("b", "a", "loss_weight: 2", library.XAVIER)
    nets = [net_of(text), Net(definition(text), device=CudaDevice(seed=1), layout=HALF)]
    for mine, theirs in zip(nets[1].params, nets[0].params, strict=True):
        mine.host_data[...] = theirs.data
    for net in nets:
        net.blobs["data"].host_data[...] = np.random.default_rng(0).standard_normal((2, 3, 4, 4))
        net.forward()
        net.backward()
    assert nets[1].blobs["a"].layout == HALF
    np.testing.assert_allclose(nets[1].loss(), nets[0].loss(), 1e-2, 1e-2)
    for mine, theirs in zip(nets[1].params, nets[0].params, strict=True):
        np.testing.assert_allclose(mine.host_diff, theirs.diff, 1e-2, 1e-2)
