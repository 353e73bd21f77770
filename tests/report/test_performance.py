import logging
import re

import pytest

from caffepy.core.events import Displayed
from caffepy.report import Performance
from caffepy.report.performance import bottleneck

PARTS = ("data", "forward", "backward", "synchronization", "update", "host")


def spent(*seconds: float) -> dict[str, float]:
    return dict(zip(PARTS, seconds, strict=False))


CASES = {
    "data": (
        [spent(30, 30, 30, 5, 5)] * 2,
        "Data is the bottleneck: solvers wait for it 30% of the time.",
    ),
    "synchronization": (
        [spent(0, 30, 30, 30, 10)] * 3,
        "Synchronization is the bottleneck: it takes 30% of the time.",
    ),
    "a slow solver": (
        [spent(0, 20, 20, 50, 10), spent(0, 45, 40, 5, 10)],
        "Solver 1 is the bottleneck: it is the slowest, and synchronization takes 28% of the time.",
    ),
    "the host": (
        [spent(5, 20, 20, 25, 5, 25), spent(5, 20, 20, 20, 5, 30)],
        "The host is the bottleneck: GPUs wait for work 28% of the time.",
    ),
    "computing": (
        [spent(1, 40, 49, 5, 5)],
        "Computation is the bottleneck: forward and backward take 89% of the time.",
    ),
}


@pytest.mark.parametrize(("solvers", "sentence"), CASES.values(), ids=CASES.keys())
def test_the_bottleneck_in_one_sentence(solvers: list[dict[str, float]], sentence: str) -> None:
    assert bottleneck(solvers) == sentence


def test_each_display_has_a_line_and_the_end_a_table(caplog: pytest.LogCaptureFixture) -> None:
    solvers = [spent(1, 1, 1, 1, 1), spent(0, 0, 0, 0, 0)]
    with caplog.at_level(logging.INFO, "caffepy"):
        reporter = Performance(lambda: solvers, alone=4.0)
        reporter.iterated(0, 1.0, 0.1, 64)
        solvers = [spent(2, 4, 4, 1, 1), spent(0, 5, 5, 0, 0)]
        reporter.displayed(Displayed(1, 1.0, [], 1.0, 1.0, 1))
        reporter.test_started(2, 0)
        reporter.test_done(2, 0, [], None)
        reporter.iterated(1, 1.0, 0.1, 64)
        reporter.done(False)
    rates = r"([\d.]+) images/s, ([\d.]+) per solver, ([\d.]+) times a single device"
    slow = r"solver 1 computes 25% longer than the mean"
    first, whole, *table = caplog.messages
    shown = "data 6%, forward 47%, backward 47%, synchronization 0%, update 0%"
    for line, form in (
        (first, rf"    {rates}; {shown}; {slow}"),
        (whole, rf"Performance of 2 solvers: {rates}"),
    ):
        found = re.fullmatch(form, line)
        assert found, line
        rate, each, times = map(float, found.groups())
        assert each == pytest.approx(rate / 2, rel=0.01)
        assert times == pytest.approx(rate / 4, rel=0.01)
    assert table == [
        "    solver   data  forward  backward  synchronization  update",
        "    0       14.3%    42.9%     42.9%             0.0%    0.0%",
        "    1        0.0%    50.0%     50.0%             0.0%    0.0%",
        "    mean     5.9%    47.1%     47.1%             0.0%    0.0%",
        "Computation is the bottleneck: forward and backward take 94% of the time.",
        "The slowest: solver 1 computes 25% longer than the mean",
    ]


def test_what_is_not_known_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        reporter = Performance(lambda: [spent(0, 0, 0, 0, 0)] * 2)
        reporter.displayed(Displayed(0, 1.0, [], 1.0, 1.0, 1))
        reporter.done(False)
        assert not caplog.messages
        reporter.iterated(0, 1.0, 0.1, 8)
        reporter.displayed(Displayed(1, 1.0, [], 1.0, 1.0, 1))
        reporter.iterated(0, 1.0, 0.1, 8)
        reporter.done(False)
    assert [";" in message for message in caplog.messages] == [False, False]


@pytest.mark.parametrize(("threads", "is_crowded"), [(1, True), (2, False), (None, False)])
def test_solvers_with_fewer_threads_than_they_are(
    threads: int | None, is_crowded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    solvers = [spent(0, 0, 0, 0, 0)] * 2
    with caplog.at_level(logging.INFO, "caffepy"):
        reporter = Performance(lambda: solvers, threads=threads)
        reporter.iterated(0, 1.0, 0.1, 8)
        solvers = [spent(1, 4, 4, 1, 0)] * 2
        reporter.displayed(Displayed(1, 1.0, [], 1.0, 1.0, 1))
        reporter.iterated(1, 1.0, 0.1, 8)
        reporter.done(False)
    crowded = "The CPU is the bottleneck: 2 solvers share 1 threads."
    assert (caplog.messages[-1] == crowded) == is_crowded
