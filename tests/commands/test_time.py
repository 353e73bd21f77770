import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caffepy import models
from caffepy.commands.time import Timing, time
from caffepy.core.errors import ConfigError, UsageError
from caffepy.models.synthetic import image_shape

Nodes = Callable[[int, Callable[[int], Any]], list[Any]]
MS = r"[\d.e+-]+ ms\."
HEAD = [
    "Use CPU.",
    "Performing Forward",
    r"Initial loss: [\d.]+",
    "Performing Backward",
    r"\*\*\* Benchmark begins \*\*\*",
    r"Testing for 2 iterations\.",
    rf"Iteration: 1 forward-backward time: {MS}",
    rf"Iteration: 2 forward-backward time: {MS}",
    "Average time per layer: ",
]
TAIL = [
    rf"Average Forward pass: {MS}",
    rf"Average Backward pass: {MS}",
    rf"Average Forward-Backward: {MS}",
    rf"Total Time: {MS}",
    r"\*\*\* Benchmark ends \*\*\*",
]


def lenet(kind: str) -> str:
    path = models.path("lenet", kind)
    assert path
    return path


def test_the_lines_are_caffes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    caplog.set_level(logging.INFO, "caffepy.commands.time")
    result = time(lenet("train_val"), iterations=2, synthetic=True, image=image_shape("lenet"))
    layers = []
    for layer in result.layers:
        name = re.escape(f"{layer.name:>10}")
        layers += [rf"{name}\tforward: {MS}", rf"{name}\tbackward: {MS}"]
    logged = [record.getMessage() for record in caplog.records]
    for line, pattern in zip(logged, HEAD + layers + TAIL, strict=True):
        assert re.fullmatch(pattern, line)


def test_the_parts_add_up() -> None:
    result = time(lenet("train_val"), iterations=2, synthetic=True, image=image_shape("lenet"))
    assert sum(layer.forward for layer in result.layers) == pytest.approx(result.forward)
    assert sum(layer.backward for layer in result.layers) == pytest.approx(result.backward)
    assert result.total == pytest.approx(2 * (result.forward + result.backward))
    assert result.batch == 64
    told = json.loads(result.json())
    assert told["images_per_s"] == pytest.approx(128000 / result.total)
    assert [layer["name"] for layer in told["layers"]] == [layer.name for layer in result.layers]
    table = result.table().splitlines()
    assert len(table) == 1 + len(result.layers) + 2
    assert len({len(line) for line in table[: 1 + len(result.layers)]}) == 1


def test_no_iterations_are_refused() -> None:
    with pytest.raises(UsageError, match="iterations must be 1 or more, not 0"):
        time(lenet("train_val"), iterations=0, synthetic=True, image=image_shape("lenet"))


def test_a_net_without_layers_in_the_phase_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "x" type: "Input" top: "x" include { phase: TEST } }'
    )
    with pytest.raises(ConfigError, match="no layers in the TRAIN phase"):
        time(f"{tmp_path}/net.prototxt")


def test_layers_that_need_no_gradient_are_timed_too() -> None:
    result = time(lenet("deploy"), iterations=1, phase="TEST")
    assert all(
        layer.backward > 0
        for layer in result.layers
        if layer.type in ("Convolution", "InnerProduct")
    )


def test_each_node_times_itself_and_the_slowest_is_named(as_nodes: Nodes) -> None:
    def node(number: int) -> Timing:
        net = lenet("train_val")
        shape = image_shape("lenet")
        return time(net, iterations=2, synthetic=True, image=shape, threads=1)

    first, second = as_nodes(2, node)
    assert first.nodes == second.nodes
    assert [(n.host, n.total) for n in first.nodes] == [
        ("host0", first.total),
        ("host1", second.total),
    ]
    slow = int(second.total > first.total)
    more = max(first.total, second.total) / min(first.total, second.total) - 1
    assert first.table().splitlines()[-1] == (
        f"the slowest of 2 nodes is node {slow} (host{slow}): "
        f"{first.nodes[slow].total / 2:.3f} ms an iteration, {more:.1%} more than "
        f"node {1 - slow} (host{1 - slow})"
    )
    assert json.loads(first.json())["nodes"][1] == {"host": "host1", "total": second.total}


def test_nodes_time_the_same(as_nodes: Nodes) -> None:
    shape = image_shape("lenet")
    results = as_nodes(
        2,
        lambda number: time(
            lenet("train_val"), iterations=1 + number, synthetic=True, image=shape, threads=1
        ),
    )
    assert "the number of iterations of node 1 (host host1) is not that of node 0" in str(
        results[0]
    )
