import inspect
import logging
import re
from typing import Any

import numpy as np
import pytest

from caffepy.core.events import Reporter, Served
from caffepy.report import LogReporter, Metrics, Progress, Reporters, logging_to
from tests.report import golden, parsers

METHODS = [
    name
    for name, method in vars(Reporter).items()
    if inspect.isfunction(method) and not name.startswith("_")
]
EVENTS = [name for name in METHODS if name != "close"]


@pytest.mark.parametrize("kind", [LogReporter, Metrics, Progress, Reporters])
def test_reporters_take_what_the_solver_gives(kind: type[Reporter]) -> None:
    for name in METHODS:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(
            getattr(Reporter, name)
        ), name


def test_every_method_is_passed_on() -> None:
    assert set(METHODS) <= set(vars(Reporters))


def test_each_event_reaches_each_reporter_in_order() -> None:
    heard: list[tuple[int, str, tuple[Any, ...]]] = []

    class Listener(Reporter):
        def __init__(self, number: int) -> None:
            for name in [*EVENTS, "close"]:
                setattr(self, name, lambda *given, name=name: heard.append((number, name, given)))

    both = Reporters(Listener(0), Listener(1))
    expected = []
    for name in EVENTS:
        arguments = tuple(inspect.signature(getattr(both, name)).parameters)
        getattr(both, name)(*arguments)
        expected += [(0, name, arguments), (1, name, arguments)]
    assert heard == expected


def test_leaving_the_block_closes() -> None:
    closed = []

    class Listener(Reporter):
        def close(self, complete: bool = True) -> None:
            closed.append(complete)

    for ending in (None, ValueError(), KeyboardInterrupt()):
        try:
            with Reporters(Listener()):
                if ending:
                    raise ending
        except BaseException:
            pass
    assert closed == [True, True, False]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_loop_reads_as_caffes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    golden.replay(LogReporter(), golden.messages())
    assert logged(caplog) == golden.messages()


def test_lines_that_the_digits_run_lacks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    reporter = LogReporter()
    reporter.served(
        Served(20, {1: 3, 0: 4}, {0: 8, 1: 1, 5: 2, 9: 1}, 24_100_000, 9_800_000, 3.14, 2)
    )
    reporter.test_done(0, 0, [("p", np.array([0.25, 0.75]), 0.0)], 1.5)
    reporter.snapshotted("solver state to HDF5", "a_iter_3.solverstate.h5")
    reporter.finished(3, None)
    reporter.done(True)
    assert logged(caplog) == [
        "Pushes by worker: 0: 4, 1: 3",
        "Staleness: 0: 66.7 %, 1: 8.33 %, 4 or more: 25 %; sent 24.1 MB as 9.8 MB; waited 3.1 s; replicas 2 pushes behind",
        "Test loss: 1.5",
        "    Test net output #0: p = 0.25",
        "    Test net output #1: p = 0.75",
        "Snapshotting solver state to HDF5 file a_iter_3.solverstate.h5",
        "Optimization stopped early.",
    ]


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a run without a terminal writes to stderr for the digits run."""
    with logging_to():
        golden.replay(LogReporter(), golden.messages())
    return capsys.readouterr().err


def test_every_line_has_four_fields_before_its_message(text: str) -> None:
    for line, message in zip(text.splitlines(), golden.messages(), strict=True):
        assert re.match(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} {1,5}\d+ \S+:\d+\] ", line)
        assert line.split(maxsplit=4)[4] == message.lstrip()


def test_parse_log_py_reads_it(text: str) -> None:
    train, test = parsers.tables(text)
    assert [row["NumIters"] for row in train] == list(range(0, 500, 20))
    assert [row["NumIters"] for row in test] == list(range(0, 501, 100))
    assert train[0]["LearningRate"] == train[1]["LearningRate"] == 0.05
    assert (train[0]["loss"], train[-1]["loss"]) == (2.32759, 0.0326776)
    assert (test[0]["accuracy"], test[-1]["loss"]) == (0.0808081, 0.0564856)
    assert {len(row) for row in train} == {4}
    assert {len(row) for row in test} == {5}


def test_parse_log_sh_cuts_the_right_fields(text: str) -> None:
    cut = parsers.fields(text)
    assert len(cut["start"]) == 1
    assert cut["accuracy"] == [
        "0.0808081",
        "0.878788",
        "0.962963",
        "0.983165",
        "0.925926",
        "0.983165",
    ]
    assert cut["test loss"][0] == "2.31651"
    assert (cut["loss"][0], cut["loss"][-1]) == ("2.32759", "0.0404198")
    assert (cut["rate"][0], cut["rate"][-1]) == ("0.05", "0.0372626")


def test_extract_seconds_reads_it(text: str) -> None:
    elapsed = parsers.seconds(text)
    assert len(elapsed) == sum("Iteration" in message for message in golden.messages())
    assert elapsed == sorted(elapsed)
    assert elapsed[0] >= 0
