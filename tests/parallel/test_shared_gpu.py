"""Solvers that share one GPU train like one with all their batches. Gradients go through the host, so
that steps are not captured; the rest is as on several GPUs.

Kernels that wait for each other's memory want a GPU each. NCCL does not take a GPU twice in a
process; tests/commands/test_four_processes.py has it in several.
"""

from collections.abc import Callable

import numpy as np
import pytest

from caffepy.collectives.topology import Topology
from caffepy.device.cuda import CudaDevice
from caffepy.parallel.synchronization import SyncOptions
from tests.parallel.cases import SETTINGS, net
from tests.parallel.test_golden import together as golden
from tests.parallel.test_gpu import (
    CASES,
    NORMALIZED,
    ONCE,
    Ran,
    agree,
    alone,
    bundled,
    deterministic,
    follow,
    follow_the_cpu,
    images,
    on,
    untimed,
)

__all__ = ["deterministic", "images", "untimed"]

pytestmark = pytest.mark.gpu

SYNCS = ["tree", "flat"]
DEADLINES = {"step": 20.0, "set-up": 60.0, "test": 20.0}


def shared(size: int, sync: str, bn_stats: str = "average", **how: object) -> Ran:
    """Train so many solvers on GPU 0; `how` is that of `on`."""
    devices, options = [CudaDevice(0) for _ in range(size)], SyncOptions(sync, bn_stats, DEADLINES)
    return on(devices, apart(size), options, **how)  # type: ignore[arg-type]


def apart(size: int) -> Topology:
    """So many solvers that do not reach each other's memory."""
    return Topology(tuple(range(size)), (None,) * size, ((False,) * size,) * size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("how", ["one pass", "two passes", "layer by layer"])
def test_solvers_follow_one_on_the_cpu(how: str, sync: str, size: int) -> None:
    settings = SETTINGS if how == "two passes" else ONCE
    ran = shared(size, sync, settings=settings, capture=how != "layer by layer")
    follow_the_cpu(ran, settings, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sync", SYNCS)
def test_solvers_follow_one(sync: str, size: int, images: Callable[[str], str]) -> None:
    case, source = CASES["lenet"], images("lenet")
    text = bundled("lenet", case.batch, source)
    ran = shared(size, sync, settings=case.settings, text=text, iterations=case.iterations)
    follow("lenet", size, ran, source)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("deterministic")
def test_runs_repeat_bit_for_bit(size: int, images: Callable[[str], str]) -> None:
    case = CASES["lenet"]
    text = bundled("lenet", case.batch, images("lenet"))
    first, again = (shared(size, "flat", settings=case.settings, text=text) for _ in range(2))
    assert first.losses == again.losses
    np.testing.assert_array_equal(first.data[0], again.data[0])


def test_solvers_normalize_their_batches_as_one() -> None:
    ran = shared(2, "flat", "sync", text=net(4, NORMALIZED))
    expected = alone(ONCE, net(8, NORMALIZED))
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(ran.data[0], expected.data[0], rtol=1e-3, atol=1e-4)
    agree(ran)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", ["adam", "sgd_poly"])
def test_halves_move_as_caffe_does(name: str, sync: str, size: int) -> None:
    devices = [CudaDevice(0) for _ in range(size)]
    golden(name, sync, devices, "solverstate", apart(size))
