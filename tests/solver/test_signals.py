import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from caffepy.core.errors import UsageError
from caffepy.solver import Action, Monitor, Signals, StopError, monitor
from caffepy.solver import signals as signals_module


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in Signals().effects}
    monkeypatch.setattr(signals_module, "SAME", 0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def listening(*effects: str) -> Iterator[Signals]:
    with Signals(*effects) as signals:
        signals.listen()
        yield signals


def test_effects_are_noted_once() -> None:
    with listening() as signals:
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT
        assert signals.poll() is Action.NONE
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.poll() == Action.STOP


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2", "XCPU", "QUIT"])
def test_what_job_systems_send_asks_for_snapshot_and_stop(name: str) -> None:
    with listening() as signals:
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        assert signals.poll() == Action.SNAPSHOT | Action.STOP


@pytest.mark.parametrize("asked", ["stop", "snapshot", "none"])
def test_sigusr1_does_what_its_effect_says(asked: str) -> None:
    with listening("stop", "snapshot", asked) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop = Action.STOP if asked == "stop" else Action.NONE
        assert signals.poll() == (Action.SNAPSHOT | stop if asked != "none" else Action.NONE)


def test_effects_can_be_chosen() -> None:
    with listening("snapshot", "none") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.poll() == Action.SNAPSHOT


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_request_does_not_wait(first: signal.Signals, second: signal.Signals) -> None:
    with listening() as signals:
        os.kill(os.getpid(), first)
        signals.check(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
        with pytest.raises(KeyboardInterrupt):
            signals.check(0)
        with pytest.raises(KeyboardInterrupt):
            signals.poll()


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` and launchers send each signal to the process and to its group."""
    monkeypatch.setattr(signals_module, "SAME", 60)
    with listening() as signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP
        assert signals.poll() is Action.NONE


def test_sigxcpu_comes_every_second_and_asks_once() -> None:
    with listening() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGXCPU)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP


def test_signals_do_not_spoil_an_exit_code() -> None:
    with listening() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.ended = True
        for number in signals.effects:
            os.kill(os.getpid(), number)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP  # of the first one alone
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.poll() is Action.NONE


def test_before_a_run_listens_a_signal_does_what_it_did_before() -> None:
    class OtherError(Exception):
        pass

    def other(number: int, frame: object) -> None:
        raise OtherError

    signal.signal(signal.SIGTERM, other)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(OtherError):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_stops_for_a_signal_that_met_a_destructor_before_it_listened() -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with Signals() as signals:
        dying = Dying()
        del dying  # KeyboardInterrupt is raised in there, which Python ignores
        signals.listen()
        assert Action.STOP in signals.poll()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in Signals().effects]
    with Signals():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in Signals().effects] == before


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


def test_a_run_that_does_not_stop_in_its_grace_is_interrupted() -> None:
    with Signals() as signals, Monitor(signals, grace=0.2):
        signals.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopError) as raised:
            threading.Event().wait(60)
    assert raised.value.saves
    assert str(raised.value) == "The run has not stopped 0.2 s after a signal asked it to"


def test_a_stop_that_is_under_way_is_not_interrupted() -> None:
    with Signals() as signals, Monitor(signals, grace=0.2):
        signals.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.poll() == Action.SNAPSHOT | Action.STOP
        time.sleep(0.6)
        assert signals.poll() is Action.NONE


@pytest.mark.parametrize(("sent", "code"), [(["TERM"], 130), (["TERM", "INT"], 130)])
def test_a_main_thread_that_does_not_answer_is_ended(
    sent: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a library's code, which no handler interrupts."""
    monkeypatch.setattr(monitor, "LAST_PATIENCE", 0.1)
    given: list[BaseException] = []
    called = threading.Event()

    def last_resort(error: BaseException) -> None:
        given.append(error)
        called.set()

    with Signals() as signals, Monitor(signals, 60 if "INT" in sent else 0.01, last_resort):
        signals.listen()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for name in sent:
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
            time.sleep(0.1)
        assert called.wait(60)
    assert getattr(given[0], "exit_code", None) == code
