"""`caffepy train --cluster`: workers that train by a parameter server, on a cluster of Ray.

Worker 0 is the process of the command: it alone tests, writes files and hears signals. The others
are processes that Ray starts, and starts anew, under the next number, when they die.
"""

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from caffepy import ops
from caffepy.core.errors import CaffeError, ConfigError, SyncError, UsageError, UserCodeError
from caffepy.core.events import asked_to_end
from caffepy.core.files import working_directory
from caffepy.data.decoders import THREADS, decoding
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_numbers
from caffepy.device.threads import num_threads
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.parameter_server.attachment import Attachment
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.filters import parse as parse_filters
from caffepy.parallel.parameter_server.messages import (
    COORDINATOR,
    DeadPeerError,
    Engine,
    LeftOutError,
    Nesterov,
    Rule,
    ServerUpdate,
    View,
    slack_of,
)
from caffepy.parallel.parameter_server.ray_cluster import LOCAL, check_address, connect
from caffepy.parallel.parameter_server.ray_engine import RayEngine
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver

log = logging.getLogger(__name__)

GPU = TypeVar("GPU")

SILENT = 5.0
"""Seconds without a sign of life after which a worker is left out."""

PAUSE = 0.5
"""Seconds after the death of a worker until another is started: its start is work for some cores,
and the others go on first.
"""

FEW = 20
"""Pushes of a run up to which late changes, and momentum of the servers, cost accuracy: of digits,
with ten, one to four points.
"""

LEAST_WAIT = 0.05
"""Seconds of waiting for another worker that are worth a word."""

WAIT, AGAIN = 10.0, 60.0
"""Seconds until a run says which workers it waits for to begin, and until it says so again."""

MOST_PROCESSES, MOST_EACH = 64, 4
"""Workers and servers that one machine may have, and for each thread of its CPU if that is more."""

HOPELESS = 3
"""Workers that may die one after the other before they have joined."""


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a training by a parameter server: the flags of `caffepy train`.

    cluster: "local", "auto" or "HOST:PORT", of Ray.
    workers: fewest and most workers; the run begins with the fewest.
    name: of servers that outlive the run; "" for `servers` servers that end with it.
    """

    cluster: str
    workers: tuple[int, int]
    consistency: str = "sync"
    every: int = 1
    servers: int = 2
    replicas: int = 2
    filters: str = ""
    server_update: str | ServerUpdate = "add"
    name: str = ""

    @property
    def label(self) -> str:
        """Name of the servers for the log."""
        if self.name:
            return f'the servers "{self.name}"'
        return f"{self.servers} servers, replicas {self.replicas}"

    def rule(self) -> Rule:
        """Return how the workers train; UsageError if the options do not go together."""
        slack = slack_of(self.consistency)
        check_address(self.cluster)
        check_copies(self.servers, self.replicas)
        if self.cluster == LOCAL:
            check_room(self.workers[1] + self.servers)
        if self.name and self.cluster == LOCAL:
            raise UsageError(
                f"--name {self.name} is for a cluster that runs already, and local starts another: "
                "give the address that caffepy server shows, or auto"
            )
        parse_filters(self.filters)
        update = _update(self.server_update)
        if update and (slack or self.every == 1):
            raise UsageError(
                "--server-update nesterov, or another update of the servers, is for --consistency "
                "sync with --every 2 or more: with momentum at the server late changes do not "
                "train, and --every 1 pushes gradients; workers keep their own momentum always"
            )
        gradients = slack == 0 and self.every == 1 and not self.name  # whose servers hold values
        return Rule(slack, gradients, update)

    def threads(self) -> int:
        """Return the CPU threads of a worker: its share of this process's, if all are here."""
        _, most = self.workers
        return max(1, num_threads() // most) if self.cluster == LOCAL else num_threads()

    def dealt(self, gpus: Sequence[GPU], place: int = 0) -> Sequence[GPU]:
        """Return the GPUs of a worker. Those of one machine are dealt to the workers of a local
        cluster, or taken in turn if there are fewer; else each worker has as many of its own.
        """
        _, most = self.workers
        if self.cluster != LOCAL or not gpus:
            return gpus
        if len(gpus) > most and len(gpus) % most:
            raise UsageError(
                f"{len(gpus)} GPUs cannot be dealt to {most} workers: give as many to each"
            )
        each = max(1, len(gpus) // most)
        first = place * each % len(gpus)
        return gpus[first : first + each]


def check_copies(servers: int, replicas: int) -> None:
    """Raise UsageError if there are more replicas than servers."""
    if replicas > servers:
        raise UsageError(
            f"--replicas {replicas}: {servers} server(s) can hold {servers} copies: give "
            f"--servers {replicas} or more"
        )


def check_room(processes: int) -> None:
    """Raise UsageError if these are far more than this machine can run."""
    most = max(MOST_PROCESSES, MOST_EACH * num_threads())
    if processes > most:
        raise UsageError(
            f"--cluster local: workers and servers would be {processes} processes of this machine, "
            f"which has {num_threads()} threads of the CPU: give --nodes and --servers that are "
            f"{most} together, or fewer"
        )


def _update(given: str | ServerUpdate) -> ServerUpdate | None:
    """Return the update that "add" or "nesterov:MOMENTUM[:RATE]" names."""
    if not isinstance(given, str):
        return given
    if given == "add":
        return None
    name, *numbers = given.split(":")
    try:
        momentum, rate = (*map(float, numbers), 0.7)[:2]
        if name != "nesterov" or not (0 < momentum < 1 and 0 < rate <= 1) or len(numbers) > 2:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--server-update {given!r} is neither add nor nesterov:MOMENTUM[:RATE], such as "
            "nesterov:0.9:0.7"
        ) from None
    return Nesterov(momentum, rate)


@dataclass(frozen=True)
class WorkerOptions:
    """The solvers of a worker, and how they compute: on its GPUs, or `cpu` of them on the CPU."""

    param: bytes  # a SolverParameter
    path: str
    folder: str
    gpu: str | None
    precision: str | None
    capture: bool
    fuse: bool
    threads: int
    every: int
    filters: str
    rule: Rule
    begin_together: int
    cpu: int = 1
    deterministic: bool = False
    decode: str = THREADS


def run_worker(engine: Engine, number: int, options: WorkerOptions) -> tuple[int, float]:
    """Train as a worker until the run is at its end; return the number of its pushes, and the
    seconds it waited. Errors name it and its host.
    """
    try:
        return _train_as_worker(engine, number, options)
    except CaffeError as error:
        if isinstance(error, UserCodeError):  # its original may be one that cannot be unpickled
            error = ConfigError(error.message, error.where)
        place = f"worker {number} (host {platform.node()})"
        error.where = f"{place}: {error.where}" if error.where else place
        raise error from None


def _train_as_worker(engine: Engine, number: int, options: WorkerOptions) -> tuple[int, float]:
    if options.folder and os.path.isdir(options.folder):
        os.chdir(options.folder)
    param = SolverParameter.FromString(options.param)
    devices: list[Device] = [Device() for _ in range(options.cpu)]
    if options.gpu:
        devices = [CudaDevice(index) for index in gpu_numbers(options.gpu)]
    device = devices[0]
    device.follows, device.writes_files = True, False
    device.math_mode.deterministic = options.deterministic
    ops.backend(device).set_num_threads(options.threads)
    filters = parse_filters(options.filters)
    if param.random_seed >= 0:
        param.random_seed += number * len(devices)
    with (
        decoding(options.decode),
        closing(
            Solver(param, device=device, path=options.path, precision=options.precision)
        ) as solver,
    ):
        solver.capture, solver.fuse = options.capture, options.fuse
        client = Client(engine, number, bf16=filters.bf16)
        with p2p_manager(solver, devices, SyncOptions(), last_resort=_end_process):
            workers = ServedWorkers(
                solver, client, options.rule, options.every, options.begin_together, filters
            )
            with workers:
                solver.step(param.max_iter - solver.iter)
        return client.clock_of_run, workers.waited


def _end_process(error: BaseException) -> None:
    """End a worker one of whose solvers hangs, where nothing else does: others go on without it."""
    log.error("This worker ends: %s", error)
    os._exit(1)


class _Processes:
    """The worker processes but the first: started, replaced when they die or were left out."""

    def __init__(
        self, engine: RayEngine, options: WorkerOptions, most: int, devices: Callable[[int], Any]
    ) -> None:
        self._engine, self._options, self._devices = engine, options, devices
        self._most = most
        self._running: dict[int, Future[Any]] = {}
        self._next, self._deaths, self._ended = 1, 0, False
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self._joined = set[int]()
        self._warned_at = time.monotonic() + WAIT - AGAIN  # whom the run waits for to begin
        for place in range(1, most):
            self._start(place, options)

    def _start(self, place: int, options: WorkerOptions) -> None:
        with self._lock:
            number, self._next = self._next, self._next + 1
            gpu, resources = self._devices(place)
            log.info("Starting worker %d", number)
            own = replace(options, gpu=gpu)
            future = self._engine.spawn_worker(number, run_worker, number, own, resources=resources)
            self._running[number] = future
        future.add_done_callback(lambda done: self._over(number, place, done))

    def _over(self, number: int, place: int, done: "Future[Any]") -> None:
        with self._lock:
            del self._running[number]
            ended = self._ended
        error = done.exception()
        if ended or error is None:
            return
        if not isinstance(error, DeadPeerError | LeftOutError):
            self.error = error if isinstance(error, CaffeError) else SyncError(str(error))
            return
        log.warning("Worker %d has died", number)
        if self._options.rule.gradients:
            log.warning("No worker takes its place: those that push gradients begin together")
            return
        self._deaths = 1 if number in self._joined else self._deaths + 1
        if self._deaths > HOPELESS:
            log.warning("No worker takes its place: %d have died in a row", self._deaths)
            if not self._begun:
                self.error = SyncError(
                    f"{self._deaths} workers have died one after the other before they joined: "
                    "Ray's logs of them are in session_latest/logs of its folder on their hosts"
                )
            return
        begun = replace(self._options, begin_together=1)
        start = threading.Timer(PAUSE, self._start, (place, begun))
        start.daemon = True
        start.start()

    def follow(self, view: View) -> None:
        """End the processes of workers that have joined and are no members any more."""
        self._joined |= set(view.members)
        with self._lock:
            out = (self._running.keys() & self._joined) - view.members.keys()
        for number in out:
            self._engine.kill(f"worker-{number}")

    def check(self) -> None:
        """Raise the error that ended a worker, if one did, or of the cluster. While workers are
        missing that the run begins with, log why; a signal ends that.
        """
        if self.error:
            raise self.error
        self._engine.store.check()
        if not self._begun:
            self._await_begin()

    @property
    def _begun(self) -> bool:
        return len(self._joined) >= self._options.begin_together

    def _await_begin(self) -> None:
        if asked_to_end.is_set():
            raise KeyboardInterrupt
        if time.monotonic() < self._warned_at + AGAIN:
            return
        self._warned_at = time.monotonic()
        if not self._joined:  # not even this process, which waits for nobody else
            log.warning("The servers are still starting")
            self._warned_at += WAIT - AGAIN
            return
        _, needs = self._devices(1)
        log.warning(
            "The run begins with %d workers, of which %d have joined. %s",
            *(self._options.begin_together, len(self._joined)),
            self._missing(needs, *self._engine.room(needs)),
        )

    def _missing(self, needs: Mapping[str, float], hosts: int, room: float, free: float) -> str:
        """Return why workers are missing: Ray's `hosts` hosts have room for `room`, `free` now."""
        what = ", ".join(f"{name}: {count:g}" for name, count in needs.items())
        if room < self._options.begin_together:
            return (
                f"Ray's {hosts} host(s) have room for {room:g}, as each needs {what}: start it on "
                "more hosts (ray start --address=HOST:PORT), or give a smaller --nodes, such as "
                f"{max(1, room):g}:{self._most}"
            )
        if free < 1 and needs:
            return f"The others start, or wait for what other programs have of Ray's {what}"
        return "The others are starting"

    def end(self) -> Mapping[int, Any]:
        """Wait for the ends of the workers that have joined; return their results by number."""
        with self._lock:
            self._ended = True
            running = {n: future for n, future in self._running.items() if n in self._joined}
        results, until = {}, time.monotonic() + SILENT
        for number, future in running.items():
            try:
                results[number] = future.result(max(0.0, until - time.monotonic()))
            except (CaffeError, TimeoutError):
                continue
        return results


@contextmanager
def _started(options: ClusterOptions, size: int) -> Iterator[RayEngine]:
    """Return a block with servers for parameters of `size` bytes, which end with it."""
    name = f"{os.path.basename(options.cluster)}-{os.getpid()}"
    engine = connect(options.cluster, name, size)
    try:
        engine.store.start()
        engine.spawn_coordinator(options.servers, options.replicas, SILENT)
        engine.call(COORDINATOR, "watch")
        yield engine
    finally:
        engine.close()


@contextmanager
def served(
    solver: Solver,
    options: ClusterOptions,
    worker: WorkerOptions,
    attachment: Attachment | None = None,
) -> Iterator[None]:
    """Return a block in which a solver, with those that train in step with it, is worker 0 of a
    parameter server, which starts and ends with it unless this process is attached to one that does
    not.

    `worker` are the options of the others. UsageError and SyncError say why there is no cluster.
    """
    fewest, most = options.workers
    filters = parse_filters(options.filters)
    size = 4 * solver.params.data.size
    with nullcontext(attachment.engine) if attachment else _started(options, size) as engine:
        gpus = gpu_numbers(worker.gpu) if worker.gpu else []

        def device_of(place: int) -> tuple[str | None, dict[str, float]]:
            own = options.dealt(gpus, place)
            if options.cluster == LOCAL:
                return ",".join(map(str, own)) or None, {}
            if not own:
                return None, {"CPU": 1}
            return ",".join(map(str, range(len(own)))), {"GPU": len(own)}

        engine.reserve(device_of(0)[1])
        processes = _Processes(engine, worker, most, device_of)
        client = Client(engine, 0, poll=processes.check, watch=processes.follow, bf16=filters.bf16)
        trainer, held = (attachment.trainer, attachment.held) if attachment else ("", None)
        workers = ServedWorkers(
            solver, client, worker.rule, worker.every, fewest, filters, trainer, held
        )
        log.info(
            "%d workers of %d solver(s), %s, %s, a push every %d iterations",
            *(most, solver.workers.size, options.label, worker.rule.name, worker.every),
        )
        _warn_of_few_pushes(solver, worker.rule, worker.every)
        begun = time.monotonic()
        with workers:
            log.info("All %d workers have joined", len(client.view.members))
            yield
        seconds = time.monotonic() - begun
        waits = workers.reports.last.waits if workers.reports.last else {}
        for number, (clock, waited) in sorted(
            {0: (client.clock_of_run, workers.waited), **processes.end()}.items()
        ):
            log.info(
                "Worker %d: %d pushes, %.1f %% of the time waiting%s",
                *(number, clock, 100 * waited / seconds, _waits_of(number, waits)),
            )
        before = filters.bytes_before + client.pulled.bytes_before
        after = filters.bytes_after + client.pulled.bytes_after
        log.info(
            "Worker 0 pushed and pulled %.1f MB, as %.1f MB; %d calls went out again",
            *(before / 1e6, after / 1e6, client.again),
        )


def _warn_of_few_pushes(solver: Solver, rule: Rule, every: int) -> None:
    """Warn where what comes late, or momentum of the servers, is a large part of the run."""
    iterations = solver.param.max_iter - solver.iter
    pushes = iterations // every
    if not 0 < pushes <= FEW or not (rule.slack or rule.update) or every == 1:
        return
    log.warning(
        "%d pushes in all are few for %s, which then costs accuracy: give --every %d or less",
        *(pushes, "an update of the servers" if rule.update else f"--consistency {rule.name}"),
        max(1, iterations // (2 * FEW)),
    )


def _waits_of(worker: int, waits: Mapping[tuple[int, int], float]) -> str:
    """Return for whom the pulls of a worker waited longest, the first three."""
    own = [(-s, other) for (w, other), s in waits.items() if w == worker and s >= LEAST_WAIT]
    longest = ", ".join(f"worker {other} {-seconds:.1f} s" for seconds, other in sorted(own)[:3])
    return f"; its pulls waited for {longest}" if longest else ""


def options_of_worker(
    solver: Solver,
    options: ClusterOptions,
    *,
    gpu: str | None,
    precision: str | None,
    threads: int,
    cpu: int = 1,
    decode: str = THREADS,
) -> WorkerOptions:
    """Return the options of the workers beside this one."""
    param = SolverParameter()
    param.CopyFrom(solver.param)
    param.snapshot = param.display = param.test_interval = 0
    param.snapshot_after_train = param.debug_info = False
    for name in ("weights", "test_net", "test_net_param", "test_iter", "test_state"):
        param.ClearField(name)
    return WorkerOptions(
        param.SerializeToString(),
        solver.path or "",
        working_directory(),
        gpu,
        precision,
        solver.capture,
        solver.fuse,
        threads,
        options.every,
        options.filters,
        options.rule(),
        begin_together=options.workers[0],
        cpu=cpu,
        deterministic=solver.device.math_mode.deterministic,
        decode=decode,
    )
