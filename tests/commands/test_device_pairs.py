from collections.abc import Callable
from typing import Any

from caffepy.commands.device_pairs import NodePairing, of_nodes


def test_each_two_of_the_nodes(as_nodes: Callable[[int, Callable[[int], Any]], list[Any]]) -> None:
    first, *others = as_nodes(3, lambda number: of_nodes(None, 2))
    assert isinstance(first, NodePairing), first
    assert others == [first, first]
    assert [speed.nodes for speed in first.speeds] == [(0, 1), (0, 2), (1, 2)]
    assert (list(first.solvers), first.auto) == ([2, 2, 2], "tree")
    assert "NCCL is for GPUs" in first.why
    assert first.text().startswith("node  host")
    assert "--sync auto takes tree" in first.text()
