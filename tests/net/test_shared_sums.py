"""Convolutions that compute half the gradient of the normalization before them, with their own,
those whose output, or its gradient, is skipped, and tops that their readers compute by themselves: on the CPU, where they can but usually do not, against nets in which
each computes its own.
"""

import numpy as np
import pytest

from caffepy.layer.norm_groups import NormGroup
from caffepy.net import Net, fusion
from caffepy.net.memory import lifetimes, save_memory
from caffepy.net.recompute import in_segments
from caffepy.ops import cpu

from ..nets import library
from .nets import net_of
from .test_memory import DATA, Driven, assert_same, images, loss, plain, poison


def conv(name: str, bottom: str, outputs: int, kernel: int = 1, stride: int = 1) -> str:
    settings = (
        f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {kernel // 2} "
        'bias_term: false weight_filler { type: "msra" }'
    )
    convolution = f"convolution_param {{ {settings} }}"
    scale = "scale_param { bias_term: true }"
    return (
        library.layer("Convolution", name, bottom, convolution)
        + library.in_place("BatchNorm", f"{name}_norm", name)
        + library.layer("Scale", f"{name}_scale", name, scale, top=name)
    )


def block(name: str, bottom: str, shortcut: str = "", stride: int = 1) -> str:
    """A bottleneck of ResNet, whose top is `name`."""
    a, b, c = (f"{name}_{i}" for i in "abc")
    return (
        (conv(f"{name}_s", bottom, 8, 1, stride) if shortcut else "")
        + conv(a, bottom, 4, 1, stride)
        + library.in_place("ReLU", f"{a}_relu", a)
        + conv(b, a, 4, 3)
        + library.in_place("ReLU6", f"{b}_relu", b)
        + conv(c, b, 8)
        + library.layer("Eltwise", name, f"{shortcut or bottom} {c}")
        + library.in_place("ReLU", f"{name}_relu", name)
    )


NET = (
    DATA
    + conv("stem", "data", 6, 3)
    + library.in_place("ReLU", "stem_relu", "stem")
    + block("one", "stem", "one_s")
    + block("two", "one")
    + conv("linear", "two", 6)
    + block("three", "linear", "three_s")
    + block("four", "three")
    + block("five", "four", "five_s", 2)
    + loss("fc", "five")
)
SHARED = {
    "stem": "one_a",
    "one_b": "one_c",
    "one": "two_a",
    "two_b": "two_c",
    "two": "linear",
    "linear": "three_a",
    "three_b": "three_c",
    "three": "four_a",
    "four_b": "four_c",
    "four": "five_a",
    "five_b": "five_c",
    "one_a": "one_b",  # 3x3, of which a GPU computes none
    "two_a": "two_b",
    "three_a": "three_b",
    "four_a": "four_b",
    "five_a": "five_b",
}
"""By the blob that a group makes: the convolution that computes half of its backward."""


@pytest.fixture(
    params=["", "output", "gradient", "gradient and top"],
    ids=["kept", "skipped", "gradient skipped", "top hidden"],
)
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let convolutions compute these sums on the CPU too, and skip outputs or their gradients;
    the list grows with each time.
    """
    calls: list[int] = []
    run = cpu.Convolution.backward_data_norm

    def counted(self: cpu.Convolution, *arguments: object) -> None:
        calls.append(1)
        run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu.Convolution, "sums_gradients", lambda *_: True)
    hides = request.param.endswith("top")
    monkeypatch.setattr(cpu.Convolution, "takes_normalized", lambda *_: hides)
    for what in ("output", "gradient"):
        skips = request.param.startswith(what)
        monkeypatch.setattr(cpu.Convolution, f"skips_{what}", lambda *_, skips=skips: skips)
    monkeypatch.setattr(cpu.Convolution, "backward_data_norm", counted)
    return calls


def test_whose_output_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of those before a normalization."""
    monkeypatch.setattr(cpu.Convolution, "skips_output", lambda *_: True)
    net = net_of(NET)
    groups = [step for step in net.steps if isinstance(step.group, NormGroup)]
    skipped = {net.nodes[s.layers[0]].name for s in groups if s.group.skips_output}
    inner = {f"{block}_{i}" for block in ("one", "two", "three", "four", "five") for i in "abc"}
    assert skipped == {"stem", "linear", "one_s", "three_s", "five_s", *inner}
    for step in groups:
        blobs = [] if step.group.skips_output else [step.group.x]
        assert [b for b in step.group.buffers if b.count] == blobs


def test_whose_top_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of those that one convolution reads, and nothing else."""
    for what in ("skips_gradient", "takes_normalized"):
        monkeypatch.setattr(cpu.Convolution, what, lambda *_: True)
    net = net_of(NET)
    for name, array in images(np.random.default_rng(5)).items():
        net.blobs[name].data[...] = array
    net.forward(steps=net.steps)
    groups = [step for step in net.steps if isinstance(step.group, NormGroup)]
    hidden = {net.nodes[s.layers[0]].name for s in groups if s.group.hidden}
    inner = {f"{block}_{i}" for block in ("one", "two", "three", "four", "five") for i in "ab"}
    assert hidden == inner


def branch(name: str, bottom: str) -> str:
    return conv(name, bottom, 6) + library.in_place("ReLU", f"{name}_relu", name)


IN_TURN = (
    DATA
    + branch("stem", "data")
    + branch("a", "stem")
    + branch("b", "stem")
    + library.layer("Concat", "join", "a b")
    + library.layer("ShuffleChannel", "deal", "join", "shuffle_channel_param { group: 2 }")
    + library.layer("Slice", "cut", "deal", top="one two")
    + branch("c", "one")
    + library.layer("Concat", "again", "c two")
    + library.layer("ShuffleChannel", "dealt", "again", "shuffle_channel_param { group: 2 }")
    + loss("fc", "dealt")
)


def test_channels_of_normalizations_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """ShuffleNet's branches, as a GPU computes them in 16 bits."""
    monkeypatch.setattr(fusion, "_runs_with", lambda *_: True)
    nets: list[Net] = [net_of(IN_TURN, np.float64) for _ in range(2)]
    runs = [Driven(nets[0], images, plain(nets[0])), Driven(nets[1], images, nets[1].steps)]
    for want, have in zip(*(run.run() for run in runs), strict=True):
        assert np.linalg.norm(have - want) <= 1e-9 * (1e-3 + np.linalg.norm(want))
    groups = [step for step in nets[1].steps if isinstance(step.group, NormGroup)]
    hidden = {nets[1].nodes[s.layers[0]].name for s in groups if s.group.hidden}
    assert hidden == set("abc")


def test_who_computes_whose() -> None:
    net, found = net_of(NET), {}
    groups = {id(step.group): step for step in net.steps if step.group}
    for step in net.steps:
        if step.group and step.group.sums_for:
            made_by = groups[id(step.group.sums_for)]
            first = next(i for i in step.layers)
            tops = [t for i in made_by.layers for t in net.nodes[i].tops]
            names = [name for name, blob in net.blobs.items() if any(blob is t for t in tops)]
            found[net.nodes[first].name] = names
    assert set(found) == set(SHARED.values())
    for made, reader in SHARED.items():
        assert made in found[reader]


def test_whether_gradients_are_0_at_the_same_places() -> None:
    net = net_of(NET)
    alike = {
        net.nodes[step.layers[0]].name: step.group.sums_alike
        for step in net.steps
        if step.group and step.group.sums_for
    }
    assert {name for name in alike if not alike[name]} == {"two_a", "four_a"}  # beside an Eltwise


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_are_those_of_layers_one_by_one(shared: list[int], dtype: type) -> None:
    nets: list[Net] = [net_of(NET, dtype) for _ in range(2)]
    runs = [Driven(nets[0], images, plain(nets[0])), Driven(nets[1], images, nets[1].steps)]
    near = 1e-9 if dtype is np.float64 else 2e-3
    for want, have in zip(*(run.run() for run in runs), strict=True):
        assert np.linalg.norm(have - want) <= near * (1e-3 + np.linalg.norm(want))
    assert len(shared) == len(SHARED)


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_memory_is_shared_with_the_same_numbers(shared: list[int], segments: int) -> None:
    runs = [Driven(net := net_of(NET), images, net.steps) for _ in range(2)]
    usage = in_segments(runs[1].usage, segments)
    runs[1].shared = lifetimes(usage)
    save_memory([usage])
    for memory in runs[1].shared:
        poison(memory)
    for _ in range(3):
        assert_same(runs[0].run(), runs[1].run())
    assert len(shared) == 6 * len(SHARED)


def test_a_backward_pass_may_begin_anywhere(shared: list[int]) -> None:
    """What one pass left half done does not reach the next."""
    net, other = net_of(NET), net_of(NET)
    run, truth = Driven(net, images, net.steps), Driven(other, images, other.steps)
    for name, array in images(np.random.default_rng(5)).items():
        net.blobs[name].data[...] = array
    net.forward(steps=net.steps)
    of_two = next(i for i, s in enumerate(net.steps) if net.nodes[s.last].name == "two_a_relu")
    net.backward(steps=net.steps[of_two:])
    net.clear_param_diffs()
    net.device.seed(1)  # of the Dropout
    other.device.seed(1)
    for _ in range(2):
        assert_same(run.run(), truth.run())
