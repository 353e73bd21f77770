import inspect
from typing import Any

from caffepy.report import Reporter, Reporters, text
from caffepy.solver import reporter as solver_side
from caffepy.solver.reporter import Reporter as Wanted

EVENTS = [name for name, method in vars(Wanted).items() if inspect.isfunction(method) and not name.startswith("_")]


def test_both_sides_know_the_same_events() -> None:
    assert solver_side.Output == text.Output
    for name in EVENTS:
        assert inspect.signature(getattr(Reporter, name)) == inspect.signature(getattr(Wanted, name)), name


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
