"""What is told while kernels are compiled."""

import logging

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
