import json
import logging
import re
from pathlib import Path

import pytest

from caffepy import models
from caffepy.commands.time import time
from caffepy.core.errors import ConfigError
from caffepy.models.synthetic import image_shape

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


def test_no_iterations_give_no_times() -> None:
    result = time(lenet("train_val"), iterations=0, synthetic=True, image=image_shape("lenet"))
    told = json.loads(result.json())
    assert (told["iterations"], told["total"]) == (0, 0)
    assert (told["forward"], told["images_per_s"]) == (None, None)
    assert result.table().splitlines()[-1] == "nan images/s"


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
