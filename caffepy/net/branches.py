"""Branches: steps between a blob's split and the layer that joins its branches again, which may
run beside each other on a GPU.

    Split --+-- 1x1 ------------------+-- Concat     one region, whose four branches
            +-- 3x3_reduce --- 3x3 ---+              run on streams of their own
            +-- 5x5_reduce --- 5x5 ---+
            +-- pool --- pool_proj ---+

A region's steps follow each other in the net's order. Backward runs them the other way round, and
begins and ends in the same places.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

from caffepy.device.blob import Memory
from caffepy.net.fusion import Step
from caffepy.net.node import Node

MOST_STEPS = 24
"""Steps of a region at most: all their blobs are live at a time."""

STREAMS = 4
"""Branches that run at a time at most; the others follow them."""


class _Branch:
    """Steps that depend on each other, and the memory that they read and write in both passes."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.reads: set[Memory] = set()
        self.writes: set[Memory] = set()

    def add(self, index: int, nodes: Sequence[Node]) -> None:
        self.steps.append(index)
        for node in nodes:
            shown = {b.data_memory for b in node.bottoms} if _only_shows(node) else set()
            wanted = zip(node.bottoms, node.propagate_down, strict=True)
            self.reads.update(b.data_memory for b in node.bottoms)
            self.writes.update(t.data_memory for t in node.tops if t.data_memory not in shown)
            self.writes.update(t.diff_memory for t in node.tops)
            self.writes.update(b.diff_memory for b, down in wanted if down)

    def disturbs(self, other: "_Branch") -> bool:
        return bool(self.writes & (other.reads | other.writes))


def _only_shows(node: Node) -> bool:
    """True if the layer's tops have the data of its bottom, unchanged."""
    in_place = any(t is b for t in node.tops for b in node.bottoms)
    return not in_place and any(
        t.data_memory is b.data_memory for t in node.tops for b in node.bottoms
    )


def with_branches(nodes: Sequence[Node], steps: Sequence[Step]) -> list[Step]:
    """Return the steps with the numbers of their regions and streams; 0 for those that run alone.

    There are none if layers share parameters, to whose gradients two branches might add.
    """
    params = [param for node in nodes for param in node.params]
    found = list(steps)
    if any(param.owner is not None for param in params):
        return found
    begin, region = 0, 0
    while begin < len(steps):
        begin += 1
        if len(nodes[steps[begin - 1].last].tops) < 2:
            continue
        branches = _region(nodes, steps, begin)
        if len(branches) < 2:
            continue
        region += 1
        loads = [0] * min(STREAMS, len(branches))
        for branch in sorted(branches, key=lambda branch: -len(branch.steps)):
            stream = loads.index(min(loads))
            loads[stream] += len(branch.steps)
            for index in branch.steps:
                found[index] = steps[index]._replace(region=region, branch=stream + 1)
        begin += sum(len(branch.steps) for branch in branches)
    return found


def _region(nodes: Sequence[Node], steps: Sequence[Step], begin: int) -> list[_Branch]:
    """Return the branches of the steps from `begin` to the first that joins two of them, or that
    splits one.
    """
    branches: list[_Branch] = []
    owner: dict[Memory, _Branch] = {}
    for index in range(begin, min(begin + MOST_STEPS, len(steps))):
        step = steps[index]
        members = [nodes[i] for i in step.indices]
        alone = any(n.of_root or n.layer.is_data or n.layer.on_host for n in members)
        if alone or len(members[-1].tops) > 1:
            break
        before = {id(b): b for b in _owners(owner, members)}
        if len(before) > 1:
            break
        branch = next(iter(before.values()), None)
        if branch is None:
            branch = _Branch()
            branches.append(branch)
        branch.add(index, members)
        owner |= dict.fromkeys(branch.writes, branch)
    pairs = combinations(branches, 2)
    return [] if any(a.disturbs(b) or b.disturbs(a) for a, b in pairs) else branches


def _owners(owner: dict[Memory, _Branch], members: Iterable[Node]) -> list[_Branch]:
    """Return the branches that wrote what the layers of a step read."""
    read = (b.data_memory for node in members for b in node.bottoms)
    return [owner[memory] for memory in read if memory in owner]
