import logging

import numpy as np
import pytest

from caffepy import ops
from caffepy.device.blob import PLAIN, Layout
from caffepy.device.device import Device
from caffepy.device.math_mode import PRECISIONS, MathMode, checked


def preferred_layout(precision: str) -> Layout:
    device = Device()
    device.math_mode = MathMode(precision, False)
    return ops.preferred_layout(device)


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
