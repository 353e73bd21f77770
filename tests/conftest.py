"""Fixtures of all tests; GPU tests are skipped, with the reason, where there is no GPU."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from caffepy.core import abandoned
from caffepy.core.errors import DeviceError
from caffepy.device import math_mode
from caffepy.device.gpus import count_gpus

gc.disable()  # while modules are imported and tests collected, which make no garbage


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores, since tests of what hangs sleep until a deadline."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure() -> None:
    """Keep processes that a test starts from ignoring SIGHUP because pytest runs under nohup, which
    this process goes on to outlive.
    """
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish() -> None:
    """Collect garbage from now on."""
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen_objects() -> None:
    """Hide what exists already from the garbage collector: a collection, as at the start of solvers
    that train together, would otherwise look at 8,000 tests and at all that ran before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Forget after a test what it has abandoned, for which later ones would end otherwise, and the
    level of the log that it has set.
    """
    log = logging.getLogger("caffepy")
    level = log.level
    yield
    log.setLevel(level)
    abandoned._things.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, in which it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cache
def gpus() -> tuple[int, str]:
    """Return the number of GPUs, and why there are no more."""
    try:
        count = count_gpus()
    except DeviceError as error:
        return 0, str(error)
    return count, f"this machine has {count} GPU(s)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu or gpus(n) that this machine cannot run."""
    needed = max([marker.args[0] for marker in item.iter_markers("gpus")], default=0)
    needed = needed or int(item.get_closest_marker("gpu") is not None)
    if needed:
        count, reason = gpus()
        if count < needed:
            pytest.skip(f"needs {needed} GPU(s): {reason}")


@pytest.fixture(params=[False, True], ids=["one at a time", "several"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill one batch at a time, then several, as is done where there are many threads."""
    monkeypatch.setattr("caffepy.data.reader.MIN_THREADS", 1 if request.param else 1 << 20)


@pytest.fixture
def always_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange factors for all layers of which they are smaller than the gradient."""
    from caffepy.collectives import factors
    from caffepy.net import gradients

    monkeypatch.setattr(gradients, "LARGE", 0)
    monkeypatch.setitem(factors.WORTH, "fp32", 10**9)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs compute in float32, whatever the size of a batch, and no time goes into the choice of
    plans.
    """
    from caffepy.ops.cuda import autotune

    monkeypatch.setattr(autotune, "_autotune", False)
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")
