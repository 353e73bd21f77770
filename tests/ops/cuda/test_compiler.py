"""What is told while kernels are compiled, and what is kept of them."""

import logging
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy")

from caffepy.ops.cuda import compiler  # noqa: E402


def test_progress_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiler, "_logged", float("-inf"))
    for done in (3, 4):
        compiler.log_progress("%d of %d kernels compiled", done, 7)
    assert [record.getMessage() for record in caplog.records] == ["3 of 7 kernels compiled"]


def test_kernels_of_one_architecture_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import cupy

    (capability, architecture) = compiler.ACCELERATED["pointwise"]
    if cupy.cuda.Device().compute_capability != capability:
        pytest.skip(f"compiled for compute capability {capability} alone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = compiler.source("pointwise"), "pointwise_spread<bf16_t, 64, 0>", architecture
    compiler._accelerated(*given)
    (kept,) = (tmp_path / "caffepy" / "kernels").iterdir()
    monkeypatch.setattr(cupy.cuda.nvrtc, "createProgram", None)  # nothing is compiled again
    assert compiler._accelerated(*given).num_regs > 32
    kept.write_text("{}")
    with pytest.raises(TypeError):
        compiler._accelerated(*given)
