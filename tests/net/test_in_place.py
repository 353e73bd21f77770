"""Gradients through layers in place that overwrite what earlier layers need, against differences
of the loss in float64.
"""

from pathlib import Path

import numpy as np
import pytest

from caffepy import models
from caffepy.device.blob import Layout
from caffepy.device.device import Device
from caffepy.models.synthetic import image_shape, synthetic
from caffepy.net import Net
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import TRAIN, NetParameter
from tests.nets import library

GAUSSIAN = 'filler { type: "gaussian" std: 1 }'
SHAPE = "shape { dim: 2 dim: 3 dim: 4 dim: 3 }"
STEP = 1e-6
SETTINGS = {
    "BatchNorm": "batch_norm_param { use_global_stats: false }",
    "Bias": f"bias_param {{ {GAUSSIAN} }}",
    "Clip": "clip_param { min: -1 max: 1 }",
    "Convolution": f"convolution_param {{ num_output: 3 kernel_size: 1 weight_{GAUSSIAN} }}",
    "Eltwise": "eltwise_param { operation: PROD }",
    "Exp": "exp_param { base: 2 scale: 0.5 }",
    "Flatten": "flatten_param { axis: 0 end_axis: 0 }",
    "LRN": "lrn_param { local_size: 3 alpha: 0.5 k: 1.5 }",
    "Power": "power_param { power: 2 scale: 0.5 shift: 3 }",
    "ReLU": "relu_param { negative_slope: 0.2 }",
    "Scale": f"scale_param {{ {GAUSSIAN} bias_term: true }}",
}
BELOW = ["Convolution", "Eltwise", "ELU", "Exp", "Flatten", "LRN", "PReLU", "ReLU", "Scale"]
BELOW += ["Sigmoid", "Softmax", "Swish", "TanH"]
ABOVE = ["BatchNorm", "Bias", "Clip", "Dropout", "Eltwise", "ELU", "Exp", "LRN", "Power", "PReLU"]
ABOVE += ["ReLU", "Scale", "Sigmoid", "Softmax", "TanH"]
CHAINS = {
    " ".join(chain): chain
    for chain in (
        ("Convolution", "ReLU", "BatchNorm", "Scale"),
        ("Convolution", "BatchNorm", "Scale", "Sigmoid", "Dropout"),
        ("Convolution", "BatchNorm", "Scale", "TanH", "BatchNorm", "Scale", "ReLU"),
        ("Sigmoid", "Flatten", "Bias", "Flatten", "TanH", "Scale"),
        ("ELU", "Dropout", "Scale", "Dropout", "ELU", "Eltwise"),
        ("LRN", "Softmax", "Exp", "Power", "Sigmoid", "PReLU"),
    )
}


def parameter(name: str) -> str:
    """A blob of learnable values."""
    below = library.layer("Parameter", f"{name}0", "", f"parameter_param {{ {SHAPE} }}")
    return below + library.layer("Power", name, f"{name}0", "power_param { shift: 0.01 }")


def chain_of(kinds: tuple[str, ...]) -> str:
    """These layers, all but the first and Flatten in place, and their loss."""
    given, layers, blob = parameter("x"), "", "x"
    for i, kind in enumerate(kinds):
        top = f"y{i}" if i == 0 or kind == "Flatten" else blob
        second = ""
        if kind == "Eltwise":
            given, second = given + parameter(f"z{i}"), f" z{i}"
        layers += library.layer(kind, f"l{i}", blob + second, SETTINGS.get(kind, ""), top=top)
        blob = top
    return given + layers + loss_of(blob)


def loss_of(blob: str) -> str:
    return library.layer("Power", "squares", blob, "power_param { power: 3 shift: 0.3 }") + (
        library.layer("Reduction", "sum", "squares", "loss_weight: 1")
    )


def net_of(body: str) -> Net:
    param = text.parse(body, NetParameter(), "net.prototxt")
    param.state.phase = TRAIN
    return Net(param, device=Device(seed=1), dtype=np.float64)


def check(body: str, together: bool = False) -> Net:
    """Hold the gradient along random directions to differences of the loss."""
    net, rng = net_of(body), np.random.default_rng(3)
    steps = net.steps if together else None
    learned = [
        p.blob for p in net.learnable if net.nodes[p.layer].layer.type not in ("BatchNorm", "PReLU")
    ]
    for blob in learned:
        blob.data[...] = rng.normal(size=blob.shape)

    def loss(step: float = 0) -> float:
        before = [blob.data.copy() for blob in learned]
        for blob, d in zip(learned, directions, strict=True):
            blob.data[...] += step * d
        net.device.seed(1)
        net.forward(steps=steps)
        for blob, values in zip(learned, before, strict=True):
            blob.data[...] = values
        return net.loss()

    directions = [np.zeros(blob.shape) for blob in learned]
    loss()
    net.clear_param_diffs()
    net.backward(steps=steps)
    for _ in range(2):
        directions = [rng.normal(size=blob.shape) for blob in learned]
        numeric = (loss(STEP) - loss(-STEP)) / (2 * STEP)
        pairs = zip(learned, directions, strict=True)
        assert sum((b.diff * d).sum() for b, d in pairs) == pytest.approx(numeric, 1e-5, 1e-6)
    return net


@pytest.mark.parametrize("below", BELOW)
def test_a_pair(below: str) -> None:
    for above in ABOVE:
        try:
            check(chain_of((below, above)))
        except AssertionError as error:
            raise AssertionError(f"{above} in place on {below}") from error


@pytest.mark.parametrize("together", [False, True], ids=["alone", "fused"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain(chain: str, together: bool) -> None:
    check(chain_of(CHAINS[chain]), together)


def seen_twice(later: bool) -> str:
    """A product of a blob, and ReLU in place on a view of it, before the product or after."""
    product = library.inner_product("ip", "x", 2, filler=library.NARROW)
    changed = library.layer("Flatten", "f", "x", SETTINGS["Flatten"])
    changed += library.in_place("ReLU", "r", "f")
    both = changed + product if later else product + changed
    end = library.layer("Reduction", "end", "ip", "loss_weight: 1")
    return parameter("x") + both + loss_of("f") + end


def test_a_view_that_is_changed_later() -> None:
    check(seen_twice(later=False))


def test_what_reads_later_gets_what_caffe_gives_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "caffepy"):
        net = net_of(seen_twice(later=True))
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "ip reads under another name what r wrote in place, as in Caffe, but its gradient does not "
        "go through r; give its top another name"
    ]
    net.params[0].data[...] = -1
    net.forward()
    (ip,) = (node for node in net.nodes if node.name == "ip")
    assert not ip.bottoms[0].data.any()


def test_a_parameter_is_not_overwritten() -> None:
    only = library.layer("Parameter", "x", "", f"parameter_param {{ {SHAPE} }}")
    net = check(only + library.in_place("ReLU", "r", "x") + loss_of("x"))
    net.params[0].data[...] = -1
    net.forward()
    assert (net.params[0].data == -1).all()
    assert not net.blobs["x"].data.any()


PART = """
class First:
    def setup(self, bottom, top):
        pass

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        top[0].data[:, 0] *= 2

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[:, 0] *= 2
"""


def written_in_part(folder: Path) -> str:
    """A Sigmoid on whose top a Python layer, of a module in the folder, works in place."""
    (folder / "part_of_it.py").write_text(PART)
    python = 'python_param { module: "part_of_it" layer: "First" }'
    body = library.convolution("c", "x", 4, 3) + library.layer("Sigmoid", "s", "c")
    return parameter("x") + body + library.in_place("Python", "p", "s", python) + loss_of("s")


def test_a_python_layer_that_writes_a_part(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        check(written_in_part(tmp_path))


def separated(net: Net) -> set[str]:
    """Names of blobs that stand for several."""
    tops = {
        (name, id(top))
        for node in net.nodes
        for name, top in zip(node.top_names, node.tops, strict=True)
    }
    names = [name for name, _ in tops]
    return {name for name in names if names.count(name) > 1}


RIGHT = {  # chains that lose nothing that backward needs
    "usual": ("Convolution", "BatchNorm", "Scale", "ReLU", "Dropout"),
    "signs of ReLU": ("Convolution", "ReLU", "Dropout", "ELU"),
    "tanh and relu": ("TanH", "Clip"),
    "sums": ("Convolution", "Bias", "LRN"),
    "copies": ("PReLU", "Power", "Scale", "BatchNorm"),
    "view": ("Convolution", "ReLU", "Flatten", "Dropout"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_separated_where_nothing_is_lost(case: str) -> None:
    assert not separated(check(chain_of(RIGHT[case])))


def test_a_dropout_that_drops_nothing_changes_nothing() -> None:
    body = chain_of(("Sigmoid", "Dropout"))
    assert separated(net_of(body)) == {"y0"}
    assert not separated(net_of(body.replace('"Dropout"', '"Dropout" phase: TEST')))


def test_a_net_that_does_not_learn_stays_as_it_is() -> None:
    chain = chain_of(CHAINS["Convolution ReLU BatchNorm Scale"])
    assert separated(net_of(chain)) == {"y0"}
    assert not separated(net_of(chain.replace("loss_weight: 1", "")))
    shapes_only = Net(net_of(chain).param, device=ShapesOnlyDevice(seed=1))
    assert separated(shapes_only) == {"y0"}


@pytest.mark.parametrize("name", models.names())
def test_bundled_nets_stay_as_they_are(name: str) -> None:
    path = models.path(name, "train_val")
    assert path
    param = text.read_net(path)
    param.state.phase = TRAIN
    device = ShapesOnlyDevice(seed=1)
    assert not separated(Net(synthetic(param, 1, image_shape(name)), device=device))


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", ["Python", *(name for name in CHAINS if "Dropout" not in name)])
def test_on_a_gpu(case: str, channels_last: bool, tmp_path: Path) -> None:
    from caffepy.device.cuda import CudaDevice

    layout = Layout(np.dtype(np.float32), channels_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        body = written_in_part(tmp_path) if case == "Python" else chain_of(CHAINS[case])
        param = text.parse(body, NetParameter(), "net.prototxt")
        nets = (
            Net(param, device=Device(seed=1)),
            Net(param, device=CudaDevice(seed=1), layout=layout),
        )
    rng = np.random.default_rng(3)
    for mine, theirs in zip(*(net.params for net in nets), strict=True):
        mine.data[...] = rng.normal(size=mine.shape) if mine.count > 1 else mine.data
        theirs.host_data[...] = mine.data
    for net in nets:
        net.clear_param_diffs()
        net.forward(steps=net.steps)
        net.backward(steps=net.steps)
    for mine, theirs in zip(*(net.learnable_params for net in nets), strict=True):
        np.testing.assert_allclose(theirs.host_diff, mine.diff, 1e-3, 1e-3)
