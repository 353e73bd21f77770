"""RayEngine: actors in processes, on this machine or many, carried by Ray (extra `ray`).

Each training has a namespace of Ray by its name, in which its actors have their names. The token
that Ray asks of every caller is on; its usage statistics and its dashboard are off.

Ray begins the calls of one caller to an asynchronous actor in any order, so calls are numbered
here, and an actor begins number n when n - 1 has begun or is known to have failed.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from caffepy.core.abandoned import abandon
from caffepy.core.errors import CaffeError, SyncError, UsageError, install, reason
from caffepy.device.threads import num_threads
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.detached import DetachedCoordinator
from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError
from caffepy.parallel.parameter_server.server import Server

log = logging.getLogger(__name__)

NAMESPACE = "caffepy-"
"""What the namespaces of Ray that are ours begin with."""

LOCAL = "local"
"""The cluster that is started on this machine, and ends with this process."""

STORE = 256 << 20
"""Least bytes of the object store of a local cluster."""

AWAY = 40.0
"""Seconds for which a run goes on while Ray's store does not answer: one on Redis is started again.
Ray's processes end after 60 s, and the last snapshot comes from them.
"""

STORE_ANSWERS = 2.0
"""Seconds that Ray's store may take to answer, and between looks whether it does."""

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
"""What the names of servers that outlive trainers begin with."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_health_check_period_ms": "1000",  # these hear of a host that is cut off within 4 s
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "1000",
    "RAY_grpc_client_keepalive_timeout_ms": "2000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # of this process, which Ray ends after 60
    "RAY_worker_niceness": "0",  # 15 by default: less CPU time for them than for the first worker
}
"""What Ray reads from the environment; `ray start` needs the same on each host."""


def connect(cluster: str, name: str, size: int = 0, shared: bool = False) -> "RayEngine":
    """Return the engine of the training `name` on a cluster: "local", "HOST:PORT" or "auto".

    A local cluster has one node that listens on 127.0.0.1 only, and an object store for parameters
    of `size` bytes; if it is `shared`, processes that have the token may train on it. UsageError if
    Ray is not installed, or the cluster wants a token that this process does not have; SyncError if
    nobody answers.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    ray, embedded = _ray(f"--cluster {cluster}"), None
    # Ray's switch for systems on which it serves one host only: if off, it is on 127.0.0.1
    loopback = cluster == LOCAL or cluster.startswith("127.")
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = not loopback
    if cluster == LOCAL:
        if shared:
            _use_token(cluster)
        elif not _has_token():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        _set_token_mode()
        embedded = EmbeddedRay(num_threads() if shared else 1, max(STORE, 8 * size))
        address = embedded.address
    else:
        _use_token(cluster)
        address = _reach(cluster)
    try:
        with _own_signals():
            ray.init(
                address,
                namespace=f"{NAMESPACE}{name}",
                configure_logging=False,
                log_to_driver=False,
            )
    except BaseException as error:
        if embedded:
            embedded.close()
        if isinstance(error, OSError | RuntimeError | ValueError | ray.exceptions.RayError):
            raise _refusal(cluster, error) from error
        raise
    return RayEngine(embedded)


def _reach(cluster: str) -> str:
    """Return the address of a cluster that answers, and takes this process's token: Ray itself
    tries for minutes.
    """
    ray = _ray()
    host, _, port = cluster.rpartition(":")
    if cluster != "auto" and not (host and port.isdigit()):
        raise UsageError(f"--cluster {cluster} is none of local, auto and HOST:PORT")
    address = _found() if cluster == "auto" else cluster
    try:
        address = str(ray._private.services.canonicalize_bootstrap_address(address))
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWERS) as connection:
            host = connection.getpeername()[0]  # Ray asks a name server first of all
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    except socket.gaierror as error:
        raise SyncError(f"--cluster {cluster}: no host has the name {host}") from error
    except OSError as error:
        raise SyncError(
            f"--cluster {cluster}: nobody answers at {address} ({reason(error)}): is it where "
            "`ray start --head` runs, with this --port, and open to this host?"
        ) from error

    answered: Future[None] = Future()

    def ask() -> None:
        try:
            ray._raylet.GcsClient(address=address)
            answered.set_result(None)
        except BaseException as error:
            answered.set_exception(error)

    threading.Thread(target=ask, name="caffepy-reach", daemon=True).start()
    with _quiet():
        try:
            answered.result(ANSWERS)
        except Exception as error:
            raise _refusal(cluster, error) from error
    return address


def _found() -> str:
    """Return the address of the cluster that "auto" is: that of RAY_ADDRESS, or of this host."""
    try:
        found: str = _ray()._private.services.canonicalize_bootstrap_address("auto")
    except ConnectionError as error:
        raise SyncError(
            "--cluster auto: no Ray runs on this host: start it with `ray start --head`, or with "
            "`ray start --address=HOST:PORT` where it runs on another; or give --cluster HOST:PORT"
        ) from error
    return found


def _refusal(cluster: str, error: BaseException) -> CaffeError:
    """Return what to tell of an error of Ray's while a process connects."""
    ray = _ray()
    if isinstance(error, ray.exceptions.AuthenticationError):
        return UsageError(f"--cluster {cluster}: Ray refuses this process's token: {TOKEN}")
    told = " ".join(str(error.__cause__ or error).split())
    if isinstance(error, TimeoutError):
        told = f"no answer for {ANSWERS:g} s"
    return SyncError(f"--cluster {cluster}: no cluster of Ray takes this process ({told})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block in which what Ray writes to the descriptor of stderr goes to the log, as debug."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                log.debug("Ray: %s", line)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """A block in which, and after which, SIGTERM does what it did before: Ray's handler, which it
    sets as it starts, ends the process at once.
    """
    utils, before = _ray()._private.utils, signal.getsignal(signal.SIGTERM)
    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token, which `ray get-auth-token "
    "--generate` writes), to the same on all hosts before `ray start`, and here"
)


def _use_token(cluster: str) -> None:
    """Ask for a token, unless the environment says on purpose that there is none."""
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        raise UsageError(
            f"--cluster {cluster} needs a token, else anybody who reaches it may run code on it: "
            f"{TOKEN}; RAY_AUTH_MODE=disabled goes on without"
        )
    _set_token_mode()


def _set_token_mode() -> None:
    """Use the token, unless the environment says something else: Ray has read both already."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    raylet = _ray()._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    named = any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").exists()


def _ray(what: str = "a parameter server") -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"{what} needs Ray ({error}): {install('ray')}") from error
    return ray


class _Line:
    """The calls of this process to one actor."""

    def __init__(self) -> None:
        self.order = threading.RLock()  # held while a call is sent
        self.handle: Any = None
        self.waiting: list[tuple[Future[Any], str, tuple[object, ...]]] = []  # for the handle
        self._lock = threading.Lock()  # never held while Ray works
        self._next = 0
        self._open = set[int]()

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


class RayEngine:
    """The Engine over the named actors of the namespace that this process is connected to.

    What needs Ray's store of names runs in a thread, so that no event loop waits for it while the
    store is away; calls between actors that know each other do not need it.
    """

    def __init__(self, embedded: EmbeddedRay | None = None, namespace: str | None = None) -> None:
        self._ray, self._embedded, self._namespace = _ray(), embedded, namespace
        self._caller = secrets.token_hex(8)
        self._lines: dict[str, _Line] = {}
        self._names = ThreadPoolExecutor(1, "caffepy-ray")
        self._closed = False
        self._is_owner = False  # of the coordinator, and so of all servers
        self._places: dict[str, str] = {}  # the nodes of the servers that this process started
        self._away = 0.0  # seconds since the store answered

    # the Engine

    def call(self, actor: str, method: str, *arguments: object) -> "Future[Any]":
        """As `messages.Engine.call`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it
        if self._closed:  # Ray would start another cluster for the call
            future.set_exception(DeadPeerError(actor))
            return future
        line = self._lines.setdefault(actor, _Line())
        with line.order:
            if line.handle is None:
                line.waiting.append((future, method, arguments))
                if len(line.waiting) == 1:
                    self._later(self._find, actor)
            else:
                self._send(actor, line, future, method, arguments)
        return future

    def spawn_server(self, name: str) -> None:
        """Start a `Server` under this name, on the node that has the fewest."""
        self._later(self._start_server, name)

    def kill(self, actor: str) -> None:
        """End an actor's process at once, if it lives; Ray does not start it again."""
        self._later(self._kill, actor)

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
        """As `messages.Engine.names`."""
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
            told = "Ray has not all of %s free on this host: other workers here may use the same"
            log.warning(told, dict(resources))

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

    def watch_store(self) -> None:
        """Look from now on whether Ray's store answers, see `check`."""
        threading.Thread(target=self._look, name="caffepy-store", daemon=True).start()

    def check(self) -> None:
        """Raise SyncError if Ray's store has not answered for so long that all will end."""
        if self._away > AWAY:
            raise SyncError(
                f"Ray's head has not answered for {AWAY:g} s: start it again, and resume from the "
                "last snapshot; with its store on Redis (RAY_REDIS_ADDRESS) it may be away for less"
            )

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
        DeadPeerError if it dies, of which the coordinator is told. It dies with this process, and
        this process can `kill` it.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._later(self._start_worker, number, future, function, arguments, resources or {})
        return future

    def close(self) -> None:
        """End the actors of this training, and a local cluster."""
        self._closed = True
        ending = threading.Thread(target=self._shut_down, name="caffepy-end", daemon=True)
        ending.start()
        ending.join(ENDING if self._away else None)  # without its store Ray waits for minutes
        if ending.is_alive():
            abandon(self)  # so does the process at its end, for the threads
        if self._embedded:
            self._embedded.close()

    def _shut_down(self) -> None:
        if self._is_owner:
            self.end_actors()
        self._names.shutdown(cancel_futures=True)
        self._ray.shutdown()

    def _look(self) -> None:
        store = self._ray._private.worker.global_worker.gcs_client
        while not self._closed:
            begun = time.monotonic()
            try:
                store.internal_kv_get(b"caffepy", namespace=b"caffepy", timeout=STORE_ANSWERS)
            except self._ray.exceptions.RayError:
                if not self._away:
                    told = "Ray's head does not answer; the run goes on without it for %g s"
                    log.warning(told, AWAY)
                self._away += min(time.monotonic() - begun, 3 * STORE_ANSWERS)
                continue
            if self._away:
                log.info("Ray's head answers again")
            self._away = 0.0
            time.sleep(STORE_ANSWERS)

    def end_actors(self) -> None:
        """End all actors that have names."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            for name in self.names():
                self._kill(name)

    def _later(self, work: Callable[..., object], *arguments: object) -> None:
        """Do this in the thread for what needs Ray's store of names, unless all is at its end."""
        with contextlib.suppress(RuntimeError):
            self._names.submit(work, *arguments)

    # calls

    def _send(
        self,
        actor: str,
        line: _Line,
        future: "Future[Any]",
        method: str,
        arguments: tuple[object, ...],
    ) -> None:
        number, settled = line.begin()

        def done(answered: "Future[Any]") -> None:
            error = answered.exception()
            settled, others = line.end(number)
            if isinstance(error, self._ray.exceptions.ActorDiedError):
                self._lines[actor] = _Line()  # another may get the name
            if error is None:
                future.set_result(answered.result())
                return
            if others and not isinstance(error, self._ray.exceptions.RayTaskError):
                line.handle.settle.remote(self._caller, settled)
            future.set_exception(self._translate(actor, error))

        try:
            ref = line.handle.call.remote(self._caller, number, settled, method, *arguments)
        except Exception as error:  # such as an object store that is full
            line.end(number)
            future.set_exception(self._translate(actor, error))
            return
        ref.future().add_done_callback(done)

    def _translate(self, actor: str, error: BaseException) -> BaseException:
        """Return our own exceptions as they were raised, deaths as DeadPeerError."""
        kinds = self._ray.exceptions
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

    # in the thread

    def _find(self, actor: str) -> None:
        line = self._lines[actor]
        if line.handle is not None:
            return
        try:
            self._open(actor, line, self._ray.get_actor(actor, self._namespace))
        except (ValueError, self._ray.exceptions.RayError):
            with line.order:
                waiting, line.waiting = line.waiting, []
            for future, _, _ in waiting:
                future.set_exception(DeadPeerError(actor))

    def _open(self, actor: str, line: _Line, handle: Any) -> None:
        """Send the calls that wait for the handle."""
        with line.order:
            line.handle = handle
            for waiting in line.waiting:
                self._send(actor, line, *waiting)
            line.waiting.clear()

    def _start(
        self,
        name: str,
        make: Callable[["RayEngine"], object],
        orphaned: float,
        options: Mapping[str, object],
    ) -> None:
        try:
            remote = self._ray.remote(_Actor).options(name=name, num_cpus=0, **options)
            handle = remote.remote(name, make, orphaned)
            self._open(name, self._lines.setdefault(name, _Line()), handle)
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
            error = self._translate(name, error)
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
            future.set_exception(self._translate(name, error))
            return
        line = self._lines[name] = _Line()
        line.handle = handle  # for `kill`, and because a process ends when its last handle goes

    def _kill(self, actor: str) -> None:
        self._places.pop(actor, None)
        line = self._lines.get(actor)
        with contextlib.suppress(ValueError, self._ray.exceptions.RayError):
            handle = line.handle if line and line.handle else self._ray.get_actor(actor)
            self._ray.kill(handle, no_restart=True)


class _Actor:
    """An object with asynchronous methods in a process of Ray."""

    def __init__(self, name: str, make: Callable[[RayEngine], object], orphaned: float) -> None:
        engine = RayEngine()
        self._object: Any = make(engine)
        self._is_back = _ray().get_runtime_context().was_current_actor_reconstructed
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
        """Let the calls of a caller begin that wait for none but those below `settled`."""
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
