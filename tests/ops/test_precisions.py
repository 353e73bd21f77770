import logging

import numpy as np
import pytest

from caffepy import ops
from caffepy.core.errors import ConfigError
from caffepy.device.blob import PLAIN, Layout
from caffepy.device.device import Device
from caffepy.ops.precisions import PRECISIONS, checked, default, preferred_layout


def test_the_default_is_tf32_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAFFEPY_PRECISION", raising=False)
    assert default() == "tf32"
    monkeypatch.setenv("CAFFEPY_PRECISION", "bf16")
    assert default() == "bf16"
    monkeypatch.setenv("CAFFEPY_PRECISION", "fp8")
    with pytest.raises(
        ConfigError, match='unknown precision "fp8"; choose from fp32, tf32, bf16, fp16'
    ):
        default()


def test_activations_lie_as_caffe_has_them_in_fp32_only() -> None:
    assert preferred_layout("fp32") == PLAIN
    formats = {precision: preferred_layout(precision) for precision in PRECISIONS[1:]}
    assert formats == {
        "tf32": Layout(np.dtype(np.float32), True),
        "bf16": Layout(np.dtype(np.uint16), True),
        "fp16": Layout(np.dtype(np.float16), True),
    }
    assert [checked(precision) for precision in PRECISIONS] == list(PRECISIONS)


@pytest.mark.parametrize(("precision", "warns"), [("bf16", True), ("fp32", False), (None, False)])
def test_the_cpu_says_what_it_does_not_compute_in(
    precision: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "caffepy"):
        ops.set_precision(Device(), precision)
    assert caplog.messages == ["The CPU computes in float32: bf16 is for GPUs"] * warns
