import os
import signal
import threading
from collections.abc import Iterator

import pytest

from caffepy.core.errors import UsageError
from caffepy.solver import Action, Signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def listening(*effects: str) -> Signals:
    signals = Signals(*effects)
    signals.listen()
    return signals


def test_effects_are_noted_once() -> None:
    with listening() as signals:
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.poll() == Action.STOP


def test_sigterm_asks_for_snapshot_and_stop() -> None:
    with listening() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP


def test_effects_can_be_chosen() -> None:
    with listening("snapshot", "none") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT


def test_second_sigint_gives_up_at_the_next_check() -> None:
    with listening() as signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            signals.check(0)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.check(0)
        with pytest.raises(KeyboardInterrupt):
            signals.poll()


def test_third_sigint_does_not_wait() -> None:
    with listening() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.aborting
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_sigterm_never_gives_up(first: signal.Signals) -> None:
    with listening() as signals:
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP
        assert signals.poll() is Action.NONE


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)]
    with Signals() as signals:
        assert signal.getsignal(signal.SIGINT) in before
        signals.listen()
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == before


def test_a_process_that_ends_does_not_hear_sigterm_again() -> None:
    with listening():
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_leave_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with listening() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.poll()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, Action.NONE)]


def test_unknown_effect_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r'invalid signal effect "stopp", did you mean "stop"\? '
        r"\(known: stop, snapshot, none\)",
    ):
        Signals("stopp")
