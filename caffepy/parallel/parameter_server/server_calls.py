"""ServerCalls: what the coordinator asks of servers, some or all at once."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.messages import DeadPeerError, Engine, View

ANSWER, LONGEST = 2.0, 8.0
"""Seconds that a server may take to answer a ping, else it counts as dead: three times as long as
the slowest answer of late, but no less than the first and no more than the second.
"""

LATE = 20
"""Rounds of pings that are of late."""

TRANSFER = 30.0
"""Seconds that servers may take to copy ranges to each other."""

STOPPED = 0.5
"""Seconds by which this process may be late; if it is later, it was stopped."""

ByRange = Mapping[int, tuple[int, Mapping[int, int]]]
"""Of the ranges that a server holds, by number: the version, and the clocks of the workers."""


class ServerCalls:
    """Calls of servers. One that does not answer in time counts as dead."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._took = deque[float](maxlen=LATE)  # seconds for the answers to pings

    async def one(self, name: str, method: str, *arguments: object, seconds: float = 60) -> Any:
        """Call a method of one; return its answer, or raise what it did, or TimeoutError."""
        future: Future[Any] = self._engine.call(name, method, *arguments)
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)

    async def each(
        self, names: Sequence[str], method: str, *arguments: object, seconds: float = 60
    ) -> dict[str, Any]:
        """Call a method of all at once; return the answers, or DeadPeerError or TimeoutError. A
        process that was stopped meanwhile blames nobody, and calls again.
        """
        begun, answers = time.monotonic(), dict[str, Any]()
        calls = [self.one(name, method, *arguments, seconds=seconds) for name in names]
        for name, answer in zip(
            names, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, BaseException) and not isinstance(
                answer, (DeadPeerError, TimeoutError)
            ):
                raise answer
            answers[name] = answer
        silent = [name for name, answer in answers.items() if isinstance(answer, TimeoutError)]
        if silent and time.monotonic() - begun > seconds + STOPPED:
            answers |= await self.each(silent, method, *arguments, seconds=seconds)
        return answers

    async def ping(self, servers: Sequence[str]) -> list[str]:
        """Return those that do not answer."""
        begun, patience = time.monotonic(), self._patience
        answers = await self.each(servers, "ping", seconds=patience)
        dead = [name for name, answer in answers.items() if isinstance(answer, Exception)]
        took = time.monotonic() - begun
        if not dead and took <= patience:  # else this process was stopped
            self._took.append(took)
        return dead

    async def freeze(self, servers: Sequence[str]) -> tuple[dict[str, ByRange], list[str]]:
        """Freeze servers; return what those that answer hold, and the others."""
        answers = await self.each(servers, "freeze", seconds=self._patience)
        dead = [name for name, answer in answers.items() if isinstance(answer, Exception)]
        held = {name: answer for name, answer in answers.items() if name not in dead}
        return held, dead

    async def cut(
        self, view: View, marks: Mapping[int, int], seconds: float
    ) -> tuple[list[Array], list[dict[str, Any]]]:
        """Return the values of all ranges after the pushes of workers up to these clocks, and what
        the servers' update keeps of them; DeadPeerError or TimeoutError of a server.
        """
        held = dict[int, tuple[Array, dict[str, Any]]]()
        parts = {server: view.of_primary(server) for server in view.servers}
        calls = [
            self.one(server, "cut", marks, ranges, seconds=seconds)
            for server, ranges in parts.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for server, answer in zip(parts, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            held.update(zip(parts[server], answer, strict=True))
        both = [held[i] for i in range(len(view.ranges))]
        return [values for values, _ in both], [kept for _, kept in both]

    async def give(self, view: View, held: Mapping[str, ByRange]) -> None:
        """Bring all owners of the new view to the latest version of each range."""
        gifts: dict[tuple[str, str], list[int]] = {}
        for i, owners in enumerate(view.owners):
            versions = {server: states[i][0] for server, states in held.items() if i in states}
            latest = max(versions.values())
            source = next(server for server, version in versions.items() if version == latest)
            for owner in owners:
                if versions.get(owner, -1) < latest:
                    gifts.setdefault((source, owner), []).append(i)
        for (source, owner), ranges in gifts.items():
            await self.one(source, "give", owner, ranges, seconds=TRANSFER)

    @property
    def _patience(self) -> float:
        """Seconds that servers may take to answer: those of a loaded machine all answer late."""
        return min(max(ANSWER, 3 * max(self._took, default=0.0)), LONGEST)
