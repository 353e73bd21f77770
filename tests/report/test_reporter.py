import inspect
from typing import Any

import pytest

from caffepy.core.events import Reporter
from caffepy.report import LogReporter, Metrics, Progress, Reporters

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
