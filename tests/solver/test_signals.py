import os
import signal
import threading

import pytest

from caffepy.errors import UsageError
from caffepy.solver import Action, Signals


def test_effects_are_noted_once() -> None:
    with Signals() as signals:
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.poll() == Action.STOP


def test_sigterm_asks_for_snapshot_and_stop() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP


def test_effects_can_be_chosen() -> None:
    with Signals("snapshot", "none") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT


def test_second_sigint_quits_at_once() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        signals.poll()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)]
    with Signals():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == before


def test_other_threads_leave_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.poll()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, Action.NONE)]


def test_unknown_effect_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r'invalid signal effect "stopp", did you mean "stop"\? \(known: stop, snapshot, none\)'
    ):
        Signals("stopp")
