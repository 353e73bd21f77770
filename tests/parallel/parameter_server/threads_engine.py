"""Actors in the threads of one process: an Engine whose actors die, stop and go on on demand."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np

from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError, Rule
from caffepy.parallel.parameter_server.ranges import KeyRange
from caffepy.parallel.parameter_server.server import Server

_Message = tuple[bytes, list[bytes]]


def _sent(value: object) -> _Message:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer.raw()) for buffer in buffers]


def _received(message: _Message) -> Any:
    """What was sent; its arrays are read-only, as Ray's are."""
    data, buffers = message
    return pickle.loads(data, buffers=buffers)


class _Actor:
    """An object and the thread with its event loop."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self.name, self.object = name, cast(Any, make())
        self.started = threading.Event()
        self.pending: set[Future[Any]] = set()
        self.lock = threading.Lock()
        self.dead = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()
        self.started.wait()

    def _run(self) -> None:
        async def until_killed() -> None:
            self.loop, self.killed = asyncio.get_running_loop(), asyncio.Event()
            self.started.set()
            await self.killed.wait()

        asyncio.run(until_killed())

    def recover(self) -> None:
        """Do what comes before the first call of an actor that is started again."""
        asyncio.run_coroutine_threadsafe(self.object.recover(), self.loop).result(20)

    def call(self, method: str, arguments: "_Message") -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it

        async def run() -> None:
            try:
                result = await getattr(self.object, method)(*_received(arguments))
                self.end(future, _sent(result), None)
            except BaseException as error:
                self.end(future, None, error)

        with self.lock:
            if self.dead:
                future.set_exception(DeadPeerError(self.name))
                return future
            self.pending.add(future)
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(run()))
        return future

    def end(
        self, future: "Future[Any]", result: "_Message | None", error: BaseException | None
    ) -> None:
        with self.lock:
            if future not in self.pending:
                return
            self.pending.remove(future)
        if error is not None:
            future.set_exception(error)
        else:
            assert result
            future.set_result(_received(result))

    def kill(self) -> None:
        with self.lock:
            if self.dead:
                return
            self.dead = True
            pending, self.pending = self.pending, set()
            self.loop.call_soon_threadsafe(self.killed.set)
        for future in pending:
            future.set_exception(DeadPeerError(self.name))
        self.goes_on.set()


class ThreadsEngine:
    """The Engine of all actors and workers of a test. `before(name, method)` is called before each
    call, and may kill.
    """

    def __init__(self) -> None:
        self.actors: dict[str, _Actor] = {}
        self._makes: dict[str, Callable[[], object]] = {}
        self.kill_takes_effect = True
        self.before: Callable[[str, str], object] = lambda name, method: None

    def spawn(self, name: str, make: Callable[[], object]) -> None:
        self.actors[name], self._makes[name] = _Actor(name, make), make

    def respawn(self, name: str, make: Callable[[], object]) -> None:
        """Start an actor that died again."""
        actor = _Actor(name, make)
        actor.recover()
        self.actors[name] = actor

    def spawn_server(self, name: str) -> None:
        self.spawn(name, lambda: Server(name, self))

    def call(self, actor: str, method: str, *arguments: object) -> "Future[Any]":
        self.before(actor, method)
        if actor not in self.actors:
            future: Future[Any] = Future()
            future.set_exception(DeadPeerError(actor))
            return future
        return self.actors[actor].call(method, _sent(arguments))

    def kill(self, actor: str, starts_again: bool = False) -> None:
        if self.kill_takes_effect:
            self.actors[actor].kill()
            if starts_again:
                self.respawn(actor, self._makes[actor])

    def names(self) -> list[str]:
        return [name for name, actor in self.actors.items() if not actor.dead]

    def stop(self, actor: str) -> None:
        """Let the actor answer nothing until `resume`, as SIGSTOP does."""
        stopped = self.actors[actor]
        stopped.goes_on.clear()
        stopped.loop.call_soon_threadsafe(stopped.goes_on.wait)

    def resume(self, actor: str) -> None:
        self.actors[actor].goes_on.set()

    def close(self) -> None:
        for actor in self.actors.values():
            if not actor.dead:
                actor.kill()
        for actor in self.actors.values():
            actor.thread.join(10)


Serving = TypeVar("Serving", bound=ThreadsEngine)


@contextmanager
def serving(
    engine: Serving,
    ranges: Sequence[KeyRange],
    rule: Rule,
    *,
    deadline: float,
    count: int = 3,
    replicas: int = 2,
    watch: bool = True,
) -> Iterator[Serving]:
    """A block in which an engine has a coordinator and servers, whose values are 0 at first."""
    engine.spawn(COORDINATOR, lambda: Coordinator(engine, count, replicas, deadline=deadline))
    zeros = [np.zeros(r.stop - r.start, np.float32) for r in ranges]
    engine.call(COORDINATOR, "start", ranges, zeros, rule).result(10)
    if watch:
        engine.call(COORDINATOR, "watch")
    try:
        yield engine
    finally:
        engine.call(COORDINATOR, "end").result(10)
        engine.close()
