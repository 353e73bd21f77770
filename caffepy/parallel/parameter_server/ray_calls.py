"""ActorCalls: the calls of this process to one actor of Ray (extra `ray`).

Ray begins the calls of one caller to an asynchronous actor in any order, so calls are numbered
here, and an actor begins number n when n - 1 has begun or is known to have failed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from caffepy.core.errors import CaffeError, SyncError, UsageError, install
from caffepy.parallel.parameter_server.messages import DeadPeerError


def import_ray(what: str = "a parameter server") -> Any:
    """Return the module of Ray; UsageError says how to install it for `what`."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"{what} needs Ray ({error}): {install('ray')}") from error
    return ray


def translated(actor: str, error: BaseException) -> BaseException:
    """Return our own exceptions as they were raised, deaths as DeadPeerError."""
    kinds = import_ray().exceptions
    if isinstance(error, kinds.RayTaskError):
        cause: BaseException = error.cause
        return cause if isinstance(cause, CaffeError) else error
    full = kinds.ObjectStoreFullError, kinds.OutOfDiskError, kinds.AuthenticationError
    if isinstance(error, full):
        return SyncError(f"{actor} cannot be called: {str(error).strip().splitlines()[0]}")
    if isinstance(error, kinds.RayError):
        dead = DeadPeerError(actor)
        dead.__cause__ = error
        return dead
    return error


class ActorCalls:
    """The calls of `caller` to an actor: they wait until it was found. `died` is called when it is
    dead for good.
    """

    def __init__(self, actor: str, caller: str, died: Callable[[], object]) -> None:
        self._actor, self._caller, self._died = actor, caller, died
        self._order = threading.RLock()  # held while a call is sent
        self.handle: Any = None
        self._waiting: list[tuple[Future[Any], str, tuple[object, ...]]] = []  # for the handle
        self._lock = threading.Lock()  # never held while Ray works
        self._next = 0
        self._open = set[int]()

    def call(self, future: "Future[Any]", method: str, arguments: tuple[object, ...]) -> bool:
        """Call a method, of which the future gets the answer; return true if somebody must look for
        the actor now, and then call `found` or `not_found`.
        """
        with self._order:
            if self.handle is not None:
                self._send(future, method, arguments)
                return False
            self._waiting.append((future, method, arguments))
            return len(self._waiting) == 1

    def found(self, handle: Any) -> None:
        """Send the calls that wait for the handle."""
        with self._order:
            self.handle = handle
            for waiting in self._waiting:
                self._send(*waiting)
            self._waiting.clear()

    def not_found(self) -> None:
        """Fail the calls that wait for the handle."""
        with self._order:
            waiting, self._waiting = self._waiting, []
        for future, _, _ in waiting:
            future.set_exception(DeadPeerError(self._actor))

    def begin(self) -> tuple[int, int]:
        """Return the number of the next call, and the number below which all calls have ended."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open.add(number)
            return number, min(self._open)

    def end(self, number: int) -> tuple[int, bool]:
        """Note that a call has ended; return the number as above, and true if others are open."""
        with self._lock:
            self._open.discard(number)
            return min(self._open, default=self._next), bool(self._open)

    def _send(self, future: "Future[Any]", method: str, arguments: tuple[object, ...]) -> None:
        number, settled = self.begin()
        kinds = import_ray().exceptions

        def done(answered: "Future[Any]") -> None:
            error = answered.exception()
            settled, others = self.end(number)
            if isinstance(error, kinds.ActorDiedError):
                self._died()
            if error is None:
                future.set_result(answered.result())
                return
            if others and not isinstance(error, kinds.RayTaskError):
                self.handle.settle.remote(self._caller, settled)
            future.set_exception(translated(self._actor, error))

        try:
            ref = self.handle.call.remote(self._caller, number, settled, method, *arguments)
        except Exception as error:  # such as an object store that is full
            self.end(number)
            future.set_exception(translated(self._actor, error))
            return
        ref.future().add_done_callback(done)
