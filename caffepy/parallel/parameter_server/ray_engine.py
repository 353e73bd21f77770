"""RayEngine: actors in processes, on this machine or many, carried by Ray (extra `ray`).

Each training has a namespace of Ray by its name, in which its actors have their names. The token
that Ray asks of every caller is on; its usage statistics and its dashboard are off.
"""

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from caffepy.core.abandoned import abandon
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.detached import DetachedCoordinator
from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError
from caffepy.parallel.parameter_server.ray_calls import ActorCalls, import_ray, translated
from caffepy.parallel.parameter_server.ray_store import StoreWatch
from caffepy.parallel.parameter_server.server import Server

log = logging.getLogger(__name__)

NAMESPACE = "caffepy-"
"""Beginning of the names of our namespaces in Ray."""

ENDING = 5.0
"""Seconds that Ray may take to end in a process if its store does not answer."""

ANSWERS = 5.0
"""Seconds that a cluster may take to answer."""

ORPHANED = 120.0
"""Seconds without a call after which a server, which outlives its creator, ends itself."""

UNATTENDED = 3600.0
"""The same of a coordinator whose servers outlive trainers: as long as `caffepy server` may take to
attend to them again, where it was killed.
"""

DETACHED = "server-"
"""Beginning of the names of servers that outlive trainers."""


class RayEngine:
    """The Engine over the named actors of the namespace that this process is connected to.

    What needs Ray's store of names, which `store` can watch, runs in a thread, so that no event
    loop waits for it while the store is away; calls between actors that know each other do not need
    it.
    """

    def __init__(self, embedded: EmbeddedRay | None = None, namespace: str | None = None) -> None:
        self._ray, self._embedded, self._namespace = import_ray(), embedded, namespace
        self._caller = secrets.token_hex(8)
        self._calls: dict[str, ActorCalls] = {}  # by actor
        self._names = ThreadPoolExecutor(1, "caffepy-ray")
        self._closed = False
        self._is_owner = False  # of the coordinator, and so of all servers
        self._places: dict[str, str] = {}  # the nodes of the servers that this process started
        self.store = StoreWatch()

    # the Engine

    def call(self, actor: str, method: str, *arguments: object) -> "Future[Any]":
        """Implement `messages.Engine.call`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it
        if self._closed:  # Ray would start another cluster for the call
            future.set_exception(DeadPeerError(actor))
            return future
        if self._to(actor).call(future, method, arguments):
            self._later(self._find, actor)
        return future

    def spawn_server(self, name: str) -> None:
        """Start a `Server` under this name, on the node that has the fewest."""
        self._later(self._start_server, name)

    def kill(self, actor: str, starts_again: bool = False) -> None:
        """End an actor's process at once, if it lives; only if it `starts_again`, Ray does so."""
        self._later(self._kill, actor, starts_again)

    # beyond the Engine

    def spawn(
        self,
        name: str,
        make: Callable[["RayEngine"], object],
        orphaned: float = ORPHANED,
        **options: object,
    ) -> None:
        """Start an actor that is what `make` returns for its own engine, with options of Ray. It
        ends when nobody has called it for `orphaned` seconds.
        """
        self._later(self._start, name, make, orphaned, options)

    def names(self) -> list[str]:
        """Implement `messages.Engine.names`."""
        found: list[str] = self._ray.util.list_named_actors()
        return found

    def reserve(self, resources: Mapping[str, float]) -> None:
        """Keep these resources of this process's node for it while it lives, if they are free."""
        if not resources:
            return
        node = self._ray.get_runtime_context().get_node_id()
        placement_group = self._ray.util.placement_group
        here = placement_group([resources], bundle_label_selector=[{"ray.io/node-id": node}])
        if not here.wait(ANSWERS):
            message = "Ray has not all of %s free on this host: other workers here may use the same"
            log.warning(message, dict(resources))

    def room(self, needs: Mapping[str, float]) -> tuple[int, float, float]:
        """Return the number of hosts of the cluster, how many workers with these needs they have
        room for, and how many of them nobody uses.
        """
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        free = self._ray._private.state.available_resources_per_node().values()

        def places(hosts: Iterable[Mapping[str, float]]) -> float:
            return sum(min(host.get(key, 0) // n for key, n in needs.items()) for host in hosts)

        if not needs:
            return len(nodes), math.inf, math.inf
        return len(nodes), places(nodes), places(free)

    def spawn_coordinator(self, servers: int, replicas: int, deadline: float = 10.0) -> None:
        """Start a `Coordinator` on this process's node: the death of another host does not end it.
        Ray starts it again when it dies.
        """
        self._is_owner = True
        make = functools.partial(Coordinator, servers=servers, replicas=replicas, deadline=deadline)
        node = self._ray.get_runtime_context().get_node_id()
        self.spawn(COORDINATOR, make, max_restarts=-1, scheduling_strategy=self._on(node))

    def spawn_detached(self, servers: int, replicas: int, deadline: float) -> None:
        """Start a `DetachedCoordinator`, which outlives this process."""
        make = functools.partial(
            DetachedCoordinator, servers=servers, replicas=replicas, deadline=deadline
        )
        self.spawn(COORDINATOR, make, UNATTENDED, max_restarts=-1, lifetime="detached")

    def detached(self) -> dict[str, "RayEngine"]:
        """Return the engines of the servers of this cluster that outlive trainers, by name."""
        own, found = f"{NAMESPACE}{DETACHED}", dict[str, RayEngine]()
        for actor in self._ray.util.list_named_actors(all_namespaces=True):
            namespace = actor["namespace"]
            if actor["name"] == COORDINATOR and namespace.startswith(own) and ":" not in namespace:
                found[namespace.removeprefix(own)] = RayEngine(namespace=namespace)
        return found

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster."""
        found: str = self._ray.get_runtime_context().gcs_address
        return found

    def spawn_worker(
        self,
        number: int,
        function: Callable[..., Any],
        *arguments: object,
        resources: Mapping[str, float] | None = None,
    ) -> "Future[Any]":
        """Run `function(engine, *arguments)` as the main thread of a process "worker-<number>" on a
        node that has these resources, such as {"GPU": 4, "CPU": 8}. Return a future of its result;
        DeadPeerError if it dies, which is reported to the coordinator. It dies with this process,
        and this process can `kill` it.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._later(self._start_worker, number, future, function, arguments, resources or {})
        return future

    def close(self) -> None:
        """End the actors of this training, and a local cluster."""
        self._closed = True
        self.store.stop()
        ending = threading.Thread(target=self._shut_down, name="caffepy-end", daemon=True)
        ending.start()
        ending.join(ENDING if self.store.away else None)  # without its store Ray waits for minutes
        if ending.is_alive():
            abandon(self)  # so does the process at its end, for the threads
        if self._embedded:
            self._embedded.close()

    def _shut_down(self) -> None:
        if self._is_owner:
            self.end_actors()
        self._names.shutdown(cancel_futures=True)
        self._ray.shutdown()

    def end_actors(self) -> None:
        """End all actors that have names."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            for name in self.names():
                self._kill(name)

    def _later(self, work: Callable[..., object], *arguments: object) -> None:
        """Do this in the thread for what needs Ray's store of names, unless all is at its end."""
        with contextlib.suppress(RuntimeError):
            self._names.submit(work, *arguments)

    def _to(self, actor: str) -> ActorCalls:
        """Return the calls to the actor that has this name now."""
        if actor not in self._calls:
            calls = ActorCalls(actor, self._caller, lambda: self._calls.pop(actor, None))
            return self._calls.setdefault(actor, calls)
        return self._calls[actor]

    # in the thread

    def _find(self, actor: str) -> None:
        calls = self._to(actor)
        if calls.handle is not None:
            return
        try:
            calls.found(self._ray.get_actor(actor, self._namespace))
        except (ValueError, self._ray.exceptions.RayError):
            calls.not_found()

    def _start(
        self,
        name: str,
        make: Callable[["RayEngine"], object],
        orphaned: float,
        options: Mapping[str, object],
    ) -> None:
        try:
            remote = self._ray.remote(_Actor).options(name=name, num_cpus=0, **options)
            self._to(name).found(remote.remote(name, make, orphaned))
        except (ValueError, self._ray.exceptions.RayError) as error:
            log.error("Ray did not start %s: %s", name, error)  # calls do not find it

    def _start_server(self, name: str) -> None:
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        servers = Counter(self._places.values())
        node = self._places[name] = min(nodes, key=lambda node: servers[node])
        make = functools.partial(Server, name)
        self._start(
            name, make, ORPHANED, {"lifetime": "detached", "scheduling_strategy": self._on(node)}
        )

    def _on(self, node: str) -> Any:
        """Return the strategy that starts an actor on this node: a soft one may take another."""
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _start_worker(
        self,
        number: int,
        future: "Future[Any]",
        function: Callable[..., Any],
        arguments: tuple[object, ...],
        resources: Mapping[str, float],
    ) -> None:
        name = f"worker-{number}"
        others = {key: n for key, n in resources.items() if key not in ("CPU", "GPU")}

        def done(answered: "Future[Any]") -> None:
            error = answered.exception()
            if error is None:
                future.set_result(answered.result())
                return
            error = translated(name, error)
            if isinstance(error, DeadPeerError) and error.peer == name:
                self.call(COORDINATOR, "leave", number)  # so that others do not wait for it
                self.kill(name)  # it may have been stopped, and cut off for that
            future.set_exception(error)

        try:
            handle = (
                self._ray.remote(_Worker)
                .options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    resources=others,
                    scheduling_strategy="SPREAD",
                )
                .remote()
            )
            handle.run.remote(function, *arguments).future().add_done_callback(done)
        except Exception as error:
            future.set_exception(translated(name, error))
            return
        # for `kill`, and because a process ends when its last handle goes
        self._to(name).handle = handle

    def _kill(self, actor: str, starts_again: bool = False) -> None:
        self._places.pop(actor, None)
        calls = self._calls.get(actor)
        with contextlib.suppress(ValueError, self._ray.exceptions.RayError):
            handle = calls.handle if calls and calls.handle else self._ray.get_actor(actor)
            self._ray.kill(handle, no_restart=not starts_again)


class _Actor:
    """An object with asynchronous methods in a process of Ray."""

    def __init__(self, name: str, make: Callable[[RayEngine], object], orphaned: float) -> None:
        engine = RayEngine()
        self._object: Any = make(engine)
        self._is_back = import_ray().get_runtime_context().was_current_actor_reconstructed
        self._recovery: asyncio.Task[None] | None = None
        self._next: dict[str, int] = {}  # number of the call that may begin, by caller
        self._turns = asyncio.Condition()
        self._heard, self._orphaned = time.monotonic(), orphaned
        threading.Thread(target=self._watch, args=(name, engine), daemon=True).start()

    async def call(
        self, caller: str, number: int, settled: int, method: str, *arguments: object
    ) -> Any:
        """Call a method when it is this number's turn; calls below `settled` have begun or never
        will.
        """
        self._heard = time.monotonic()
        if self._is_back:
            self._recovery = self._recovery or asyncio.ensure_future(self._object.recover())
            await self._recovery
        await self.settle(caller, settled)
        if self._next[caller] < number:
            async with self._turns:
                await self._turns.wait_for(lambda: self._next[caller] >= number)
        try:
            call = asyncio.ensure_future(getattr(self._object, method)(*arguments))
        finally:
            await self.settle(caller, number + 1)
        return await call

    async def settle(self, caller: str, settled: int) -> None:
        """Begin the calls of a caller that wait for none but those below `settled`."""
        if self._next.setdefault(caller, 0) < settled:
            self._next[caller] = settled
            async with self._turns:
                self._turns.notify_all()

    def _watch(self, name: str, engine: RayEngine) -> None:
        while time.monotonic() - self._heard < self._orphaned:
            time.sleep(self._orphaned / 10)
        engine.kill(name)


class _Worker:
    """A worker in a process of Ray."""

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return function(RayEngine(), *arguments)
