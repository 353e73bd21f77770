import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from caffepy.report import Progress, open_report

RUN = """
import sys
from caffepy.core.events import Displayed
from caffepy.report import logging_to, open_report
progress = {"yes": True, "no": False, "auto": None}[sys.argv[1]]
with logging_to(), open_report(None, 3, progress) as reporter:
    reporter.solving("digits", "inv")
    for i in range(3):
        reporter.displayed(Displayed(i, 0.5, [], 1, 1, 1))
        reporter.iterated(i, 0.5, 0.01, 50)
    reporter.finished(3, None)
    reporter.done(False)
"""


COUNT = """
from caffepy.report import counting
with counting(250, "images") as done:
    for _ in range(5):
        done(50)
"""


def on_terminal(
    progress: str, environment: Mapping[str, str], code: str = RUN, columns: int = 0
) -> str:
    """Return what the code writes to a pseudo-terminal; 0 columns mean an unknown width."""
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    ours, its = pty.openpty()
    if columns:
        import termios

        termios.tcsetwinsize(its, (24, columns))
    env = {**os.environ, "TERM": "xterm", **environment}
    child = subprocess.Popen(
        [sys.executable, "-c", code, progress], stdin=its, stdout=its, stderr=its, env=env
    )
    os.close(its)
    written = b""
    try:
        while chunk := os.read(ours, 4096):
            written += chunk
    except OSError:  # how Linux tells that the other side is closed
        pass
    os.close(ours)
    assert child.wait() == 0, written
    return written.decode()


def test_a_terminal_gets_one_line_below_the_log() -> None:
    written = on_terminal("auto", {"NO_COLOR": "1"}, columns=120)
    assert "\x1b[3" not in written  # no colours
    last = written.rstrip("\r\n").rpartition("\r")[2]
    assert last.startswith("Iteration 3/3 |")
    assert "| 100%, loss 0.5, lr 0.01, " in last
    assert " images/s, 00:00 left" in last
    assert "Optimization Done.\r\n" in written


@pytest.mark.parametrize("columns", [0, 80])
def test_the_line_fits_into_a_narrow_terminal(columns: int) -> None:
    long = RUN.replace("None, 3,", "None, 450000,").replace(
        "iterated(i, 0.5, 0.01, 50)", "iterated(i, 6.45182e-05, 0.019, 50)"
    )
    written = on_terminal("auto", {}, long, columns)
    drawn = [
        part
        for part in written.replace("\r\n", "\r").split("\r")
        if part.startswith("Iteration 2/450000 |")
    ]
    assert drawn
    assert all(len(line) <= 80 for line in drawn)
    assert all(line.rstrip().endswith(" left") and "| 0%, loss 6.452e-05" in line for line in drawn)


@pytest.mark.parametrize(("progress", "term"), [("no", "xterm"), ("auto", "dumb")])
def test_a_terminal_that_wants_none_gets_none(progress: str, term: str) -> None:
    written = on_terminal(progress, {"TERM": term})
    assert "\r" not in written.replace("\r\n", "")
    assert "\x1b" not in written
    assert "images/s" not in written


def test_no_terminal_no_bar() -> None:
    report = open_report(None, 3, progress=True)
    assert not any(isinstance(reporter, Progress) for reporter in report.reporters)


def test_things_are_counted() -> None:
    last = on_terminal("auto", {}, COUNT).rstrip("\r\n").rpartition("\r")[2]
    assert last.startswith("100%|")
    assert "250/250" in last
    assert " images/s]" in last
    assert on_terminal("auto", {"TERM": "dumb"}, COUNT) == ""
