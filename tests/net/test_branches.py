"""Branches of a net that may run beside each other: which they are, and that their order does not
matter, also where blobs share memory.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.branches import MOST_STEPS, STREAMS, with_branches
from caffepy.net.fusion import Step
from caffepy.net.memory import Usage, lifetimes, save_memory
from tests.nets import library

from .nets import definition, net_of


def conv(name: str, bottom: str, more: str = "") -> str:
    text = library.convolution(name, bottom, 6, 3, "pad: 1", more=more)
    return text + library.relu(f"{name}_relu", name)


DATA = library.inputs(data=(4, 3, 8, 8), label=(4,))
BRANCHES = (
    conv("a", "stem")
    + conv("b1", "stem")
    + conv("b2", "b1")
    + library.pooling("pool", "stem", "kernel_size: 3 stride: 1 pad: 1")
    + conv("c", "pool")
)
JOIN = library.layer("Concat", "cat", "a b2 c")
LOSS = library.inner_product("fc", "cat", 5) + library.softmax_loss("fc")
STEM = DATA + conv("stem", "data")
INCEPTION = STEM + BRANCHES + JOIN
HEAD = (
    library.layer("LRN", "norm", "cat")
    + library.inner_product("head", "norm", 5)
    + library.layer("SoftmaxWithLoss", "head_loss", "head label", "loss_weight: 0.3")
)
TWO = HEAD + conv("d", "cat") + conv("e", "cat") + library.layer("Concat", "both", "d e")
NETS = {
    "a module": INCEPTION + LOSS,
    "two modules and a head": INCEPTION + TWO + LOSS.replace("cat", "both"),
    "a module at the end": INCEPTION + HEAD + LOSS,
}


def branches(net: Net) -> list[list[list[str]]]:
    """Names of the last layers of the steps of each branch of each region."""
    found: dict[int, dict[int, list[str]]] = {}
    for step in with_branches(net.nodes, net.steps):
        if step.region:
            of_region = found.setdefault(step.region, {})
            of_region.setdefault(step.branch, []).append(net.layer_names[step.last])
    return [sorted(each.values()) for each in found.values()]


MODULE = [["a_relu"], ["b1_relu", "b2_relu"], ["pool", "c_relu"]]


def test_what_may_run_beside_each_other() -> None:
    assert branches(net_of(NETS["a module"])) == [MODULE]
    head = ["norm", "head", "head_loss"]
    two = branches(net_of(NETS["two modules and a head"]))
    assert two == [MODULE, [["d_relu"], ["e_relu"], head]]
    assert branches(net_of(NETS["a module at the end"])) == [MODULE, [["fc", "loss"], head]]


def test_longer_branches_share_no_stream() -> None:
    names = [f"x{i}" for i in range(STREAMS + 1)]
    text = INCEPTION + "".join(conv(name, "cat") for name in names) + conv("y", "x0")
    text += library.layer("Concat", "both", " ".join(["y", *names[1:]]))
    found = branches(net_of(text + LOSS.replace("cat", "both")))[1]
    assert ["x0_relu", "y_relu"] in found
    assert len(found) == STREAMS


SHARED = 'param { name: "w" } param { name: "b" }'
NONE = {
    "parameters of two branches": STEM
    + conv("a", "stem", SHARED)
    + conv("b2", "stem", SHARED)
    + conv("c", "stem")
    + JOIN,
    "one branch": STEM + conv("a", "stem") + library.layer("Eltwise", "cat", "a stem"),
    "what another one reads": STEM
    + library.layer("Flatten", "flat", "stem")
    + library.in_place("TanH", "flat_tanh", "flat")
    + library.inner_product("a", "flat", 6)
    + library.inner_product("b", "stem", 6)
    + library.layer("Concat", "cat", "a b"),
}


@pytest.mark.parametrize("name", NONE)
def test_what_runs_alone(name: str) -> None:
    assert branches(net_of(NONE[name] + LOSS)) == []


def test_a_region_ends_after_its_most_steps() -> None:
    chain = "".join(
        library.layer("Power", f"p{i + 1}", f"p{i}" if i else "stem") for i in range(MOST_STEPS)
    )
    text = STEM + conv("a", "stem") + chain
    text += library.layer("Concat", "cat", f"a p{MOST_STEPS}") + LOSS
    ((first, second),) = branches(net_of(text))
    assert first == ["a_relu"]
    assert second == [f"p{i + 1}" for i in range(MOST_STEPS - 1)]


def shuffled(steps: list[Step], rng: np.random.Generator) -> Iterator[Step]:
    """The steps, those of each region dealt by chance, each branch in its order."""
    for region in dict.fromkeys((s.region, s.last if not s.region else 0) for s in steps):
        here = [s for s in steps if (s.region, s.last if not s.region else 0) == region]
        queues = [[s for s in here if s.branch == b] for b in {s.branch for s in here}]
        while queues := [queue for queue in queues if queue]:
            yield queues[rng.integers(len(queues))].pop(0)


def trained(text: str, saves: bool, seed: int | None) -> list[np.ndarray]:
    """Outputs and gradients of passes, the branches' steps dealt by chance if there is a seed."""
    net, rng, order = net_of(text), np.random.default_rng(3), np.random.default_rng(seed or 0)
    steps = with_branches(net.nodes, net.steps)
    if saves:
        usage = Usage(net, steps, True)
        save_memory([usage])
        for memory in lifetimes(usage):
            memory.array.fill(np.nan if memory.dtype.kind == "f" else 1)
    found = []
    for _ in range(3):
        net.blobs["data"].data[...] = rng.standard_normal((4, 3, 8, 8))
        net.blobs["label"].data[...] = rng.integers(0, 5, 4)
        net.clear_param_diffs()
        forward, backward = (steps if seed is None else list(shuffled(steps, order)) for _ in "ab")
        net.forward(steps=forward)
        net.backward(steps=backward)
        found += [net.blobs[name].data.copy() for name in net.outputs]
        found += [param.diff.copy() for param in net.params]
    return found


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_the_order_of_branches_does_not_matter(name: str, saves: bool) -> None:
    want = trained(NETS[name], False, None)
    for seed in (None, 1, 2, 3):
        for mine, theirs in zip(trained(NETS[name], saves, seed), want, strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_array_equal(mine, theirs)


class Noting(Device):
    """A device that notes which of its streams are used, and when they are waited for."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.noted: list[str] = []

    def side_stream(
        self, name: str = "layer", after: str | None = None
    ) -> AbstractContextManager[object]:
        self.noted.append(name)
        return nullcontext()

    def wait_stream(self, name: str = "layer") -> None:
        self.noted.append(f"wait for {name}")


def test_streams_are_waited_for_before_what_follows() -> None:
    device = Noting()
    net = Net(definition(NETS["a module"]), device=device)
    steps = with_branches(net.nodes, net.steps)
    of = {net.layer_names[s.last]: f"branch {s.branch}" for s in steps if s.region}
    net.after_backward.append(lambda index: device.noted.append(net.layer_names[index]))
    net.forward(steps=steps)
    waits = {f"wait for branch {i}" for i in (1, 2, 3)}
    *used, one, two, three = device.noted
    assert used == [of[name] for name in ("a_relu", "b1_relu", "b2_relu", "pool", "c_relu")]
    assert {one, two, three} == waits
    device.noted.clear()
    net.backward(steps=steps)
    noted = [what for what in device.noted if "layer" not in what]
    begin, end = noted.index("cat"), noted.index("stem_stem_relu_0_split")
    within = noted[begin + 1 : end]
    names = ["c_relu", "pool", "b2_relu", "b1_relu", "a_relu"]
    assert within[:5] == [of[name] for name in names]
    assert set(within[5:8]) == waits
    assert within[8:] == ["c_relu", "c", "pool", "b2_relu", "b2", "b1_relu", "b1", "a_relu", "a"]


def test_nothing_runs_beside_what_is_recomputed() -> None:
    device = Noting()
    net = Net(definition(NETS["a module"]), device=device)
    steps = with_branches(net.nodes, net.steps)
    net.recompute = {steps[-1].last: [steps[-2]]}
    net.forward(steps=steps)
    net.backward(steps=steps)
    assert not any("branch" in what for what in device.noted)
