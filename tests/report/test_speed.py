from pathlib import Path

import pytest

from caffepy.report import speed


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def run(name: str, iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration a second of 8 images, the first ones slower, with a test that takes a minute."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    reporter = speed.BaselineRecorder(name)
    for iteration in range(iterations):
        now += 1.0 if iteration >= speed.FIRST else 50.0
        reporter.iterated(iteration, 1.0, 0.1, 8)
    reporter.test_started(iterations, 0)
    now += 60.0
    reporter.test_done(iterations, 0, [], None)
    reporter.finished(iterations, None)
    now += 60.0
    reporter.done(False)


def test_the_speed_of_one_solver_is_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        speed.baseline_key({"net": "a", "batch": 8}),
        speed.baseline_key({"net": "b", "batch": 8}),
    )
    assert speed.baseline_key({"batch": 8, "net": "a"}) == one != other
    assert speed.known_baseline(one) is None
    run(one, speed.FIRST + 10, monkeypatch)
    assert speed.known_baseline(one) == pytest.approx(8)
    assert speed.known_baseline(other) is None
    run(other, speed.FIRST + 5, monkeypatch)
    assert speed.known_baseline(one) == speed.known_baseline(other)


def test_a_run_that_was_too_short_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for iterations in (1, speed.FIRST, speed.FIRST + 1):
        run("short", iterations, monkeypatch)
        assert speed.known_baseline("short") is None


def test_what_cannot_be_read_or_written_does_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "caffepy").mkdir()
    (folder / "caffepy" / speed.FILE).write_text('{"x": "fast"}')
    assert speed.known_baseline("x") is None
    (folder / "caffepy" / speed.FILE).write_text("[")
    assert speed.known_baseline("x") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "caffepy" / speed.FILE))
    run("x", speed.FIRST + 10, monkeypatch)
    assert speed.known_baseline("x") is None
