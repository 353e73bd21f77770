import threading
from collections.abc import Iterator

import numpy as np
import pytest

from caffepy import ops
from caffepy.cli import options
from caffepy.core.errors import ConfigError
from caffepy.device import math_mode
from caffepy.device.cuda import CudaDevice
from caffepy.device.math_mode import MathMode, current, default, new, using
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse
from tests.nets import library


@pytest.fixture(autouse=True)
def fresh_default() -> Iterator[None]:
    """A default that is read from the environment in the test, and afterwards the one before."""
    before = default()
    default.cache_clear()
    yield
    default.cache_clear()
    default().__dict__.update(before.__dict__)


def test_the_default_is_tf32_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAFFEPY_PRECISION", raising=False)
    monkeypatch.delenv("CAFFEPY_DETERMINISTIC", raising=False)
    assert default() == MathMode("tf32", False)
    default.cache_clear()
    monkeypatch.setenv("CAFFEPY_PRECISION", "bf16")
    monkeypatch.setenv("CAFFEPY_DETERMINISTIC", "1")
    assert default() == MathMode("bf16", True)
    default.cache_clear()
    monkeypatch.setenv("CAFFEPY_PRECISION", "fp8")
    with pytest.raises(
        ConfigError, match='unknown precision "fp8"; choose from fp32, tf32, bf16, fp16'
    ):
        default()


def test_the_command_line_offers_the_precisions_that_there_are() -> None:
    assert options.PRECISIONS == math_mode.PRECISIONS


def test_a_mode_holds_in_its_block_and_its_thread() -> None:
    mode, elsewhere = MathMode("fp16", True), []
    with using(mode):
        with using(MathMode("fp32", False)):
            assert current().precision == "fp32"
        assert current() is mode
        thread = threading.Thread(target=lambda: elsewhere.append(current()))
        thread.start()
        thread.join()
    assert current() is default()
    assert elsewhere == [default()]


def test_a_new_mode_is_the_default_of_its_time() -> None:
    default().precision = "bf16"
    mode = new()
    default().precision = "fp16"
    assert mode.precision == "bf16"


@pytest.mark.gpu
def test_nets_of_one_gpu_compute_each_in_its_precision() -> None:
    """Their passes alternate, so that each finds plans of the other."""
    shape = (8, 16, 12, 12)
    body = library.inputs(x=shape) + library.convolution(
        "y", "x", 24, 3, filler='type: "gaussian" std: 1'
    )
    definition = parse(body, NetParameter())
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def built(precision: str) -> Net:
        device = CudaDevice(0, seed=1)
        ops.set_precision(device, precision)
        net = Net(definition, device=device)
        net.blobs["x"].host_data[...] = x
        return net

    def forward(net: Net) -> np.ndarray:
        net.forward()
        return net.blobs["y"].host_data.copy()

    alone = {}
    for precision in math_mode.PRECISIONS:
        net = built(precision)
        alone[precision] = forward(net)
        net.close()
    nets = {precision: built(precision) for precision in math_mode.PRECISIONS}
    for _ in range(2):
        for precision, net in nets.items():
            np.testing.assert_array_equal(forward(net), alone[precision], precision)
    for rounded in ("tf32", "bf16", "fp16"):
        assert np.abs(alone[rounded] - alone["fp32"]).max() > 1e-4
    for net in nets.values():
        net.close()
