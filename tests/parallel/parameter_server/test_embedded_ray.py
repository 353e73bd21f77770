"""The processes of an embedded Ray end with the one that started them, and leave no files."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caffepy.core.errors import SyncError
from caffepy.core.events import asked_to_end
from caffepy.parallel.parameter_server import embedded_ray
from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay

pytest.importorskip("ray", reason="Ray is not installed")

OWNER = """
from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay
embedded = EmbeddedRay(1, 80 << 20)
print(embedded._keeper.pid, embedded._errors, flush=True)
input()
"""


LATE = """
import pathlib, sys, time
from caffepy.parallel.parameter_server import embedded_ray

def keep():
    tries = pathlib.Path(__file__).with_name("tries")
    with tries.open("a") as file:
        file.write("one ")
    if len(tries.read_text().split()) <= LATE:
        time.sleep(0.3)
        sys.exit("The current node timed out during startup.")
    embedded_ray.keep()
"""


def of_session(keeper: int) -> set[int]:
    found = set[int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[3]) == keeper:
                found.add(int(status.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_it_ends_with_its_owner_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        keeper, errors = owner.stdout.readline().split()
        assert len(of_session(int(keeper))) > 5
        assert owner.pid not in of_session(int(keeper))  # so that signals to its group do not reach
        owner.kill()
    until = time.monotonic() + 60
    while of_session(int(keeper)) or os.path.exists(os.path.dirname(errors)):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_why_it_does_not_start_is_told() -> None:
    with pytest.raises(SyncError, match=r"did not start on this machine: .*[Oo]bject.store"):
        EmbeddedRay(1, 1)  # a byte of memory for objects


def late(tries: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many starts fail as Ray's do on a slow disk."""
    (folder / "late_ray.py").write_text(LATE.replace("LATE", str(tries)))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(embedded_ray, "__name__", "late_ray")
    monkeypatch.setattr(embedded_ray, "SLOW", 0.1)


def test_a_start_that_was_too_slow_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    late(1, tmp_path, monkeypatch)
    ray = EmbeddedRay(1, 80 << 20)
    ray.close()
    assert ray.address.startswith("127.0.0.1:")
    assert "Ray is still starting on this machine, for 0 s" in caplog.text
    assert caplog.text.count("timed out during startup, after") == 1


def test_starts_that_are_all_too_slow_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late(9, tmp_path, monkeypatch)
    with pytest.raises(SyncError, match=r"did not start on this machine: .*timed out"):
        EmbeddedRay(1, 80 << 20)
    assert caplog.text.count("it starts again") == embedded_ray.TRIES - 1


def test_a_signal_ends_the_wait_for_it() -> None:
    asked_to_end.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            EmbeddedRay(1, 80 << 20)
    finally:
        asked_to_end.clear()
