"""ServedWorkers: what a solver that trains by a parameter server does between its iterations.

With changes, every `every` iterations, at a clock:

    change = parameters - those that were pulled last
    push the change       the servers add the mean of the workers' changes
    pull                  and go on from the values of the servers

Momentum and history stay the worker's own. With gradients, with slack 0, each iteration pushes its
gradient before the update and pulls the mean, and each worker updates its parameters itself: as
training in step does, to the bit.

A worker is a node: a solver, or several that train in step (`P2PManager`) and push once. Their
parameters are equal, so the root's change is pushed, and all get what was pulled. Of gradients
their mean is pushed, of running statistics the mean of what each has.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any

from caffepy.collectives.synchronizer import Synchronizer
from caffepy.core.errors import SyncError, UsageError
from caffepy.device.blob import Array
from caffepy.layer import Layer
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.parameter_server.beside import Beside
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.detached import Entrusted
from caffepy.parallel.parameter_server.filters import Filters
from caffepy.parallel.parameter_server.kept import Held, Kept, model_of
from caffepy.parallel.parameter_server.leases import Leases
from caffepy.parallel.parameter_server.messages import Rule
from caffepy.parallel.parameter_server.server_reports import ServerReports
from caffepy.parallel.parameter_server.worker_begin import begin_state, follow
from caffepy.parallel.parameter_server.worker_params import PulledStatistics, WorkerParams
from caffepy.parallel.parameter_server.worker_state import WorkerState
from caffepy.solver import Action, Solver
from caffepy.solver.iteration import due
from caffepy.solver.snapshot import State
from caffepy.solver.statistics import mean
from caffepy.solver.worker_group import OuterGroup

log = logging.getLogger(__name__)

_State = dict[str, Any]
"""A part of what a snapshot keeps."""


class ServedWorkers(OuterGroup):
    """A context in which a solver, with those that train in step with it, is one of the workers of
    a parameter server. All workers have the same number of solvers.

    every: iterations between two pushes; 1 for a rule with gradients.
    workers: number of workers that begin together.
    filters: of what this worker pushes.
    trainer: who trains with servers that outlive this run; "" if they end with it.
    held: what such servers hold, which the solver has restored; None if nothing yet.
    Worker 0 starts the servers with its parameters, and the others begin as it does. They run to
    max_iter, unless it ends before that. It alone writes files.
    """

    def __init__(
        self,
        solver: Solver,
        client: Client,
        rule: Rule,
        every: int,
        workers: int = 1,
        filters: Filters | None = None,
        trainer: str = "",
        held: Held | None = None,
    ) -> None:
        super().__init__(solver.workers, writes_files=client.worker == 0)
        if rule.gradients and every != 1:
            raise UsageError("gradients are pushed in each iteration: give --every 1")
        self.solver, self.client = solver, client
        self._node = solver.workers if isinstance(solver.workers, P2PManager) else None
        self.solvers: list[Solver] = [solver, *(self._node.workers if self._node else ())]
        self.filters = filters = filters or Filters()
        self.params = WorkerParams(self.solvers, self.each, self.inner, filters, rule.gradients)
        self.statistics: PulledStatistics = self.params.statistics
        self._rule, self._every, self._workers = rule, every, workers
        self._trainer, self._held = trainer, held
        self._before_last_pass: _State = {}  # of a sidecar before the pass of the last loss
        self._since = 0  # iterations since the last push
        self._dealt = 0  # batches that the last cut has
        self._ahead = 0  # batches that a restored snapshot is ahead of the data
        self._update_states: _State = {}  # what the servers' update keeps of ranges, by name
        self._own_state = WorkerState(
            self.solvers, filters, has_history=client.worker > 0 and not rule.gradients
        )
        self.reports = ServerReports(
            client, filters, int(rule.slack > 0), lambda report: solver.reporter.served(report)
        )
        self.waited = 0.0  # seconds for pushes and pulls in which the solver did not train
        self._beside: Beside | None = None
        self._own: list[Array] = []  # parameters while the solver has those of a cut

    # begin and end

    def __enter__(self) -> "ServedWorkers":
        solver, client, gradients = self.solver, self.client, self._rule.gradients
        states = self._restored()
        if client.worker == 0:
            client.hand_out(dict(enumerate(states)))
            self._start()
        share = solver.param.iter_size * self._every
        begun = client.join(share)
        own = None if client.clock_of_run else client.take_state()
        client.await_members(self._workers)
        if client.worker:
            follow(self.solvers, self.each, begun, client.clock_of_run * self._every, own)
        if own:
            self.filters.rests = own["rests"]
            for each, values in zip(self.solvers, own["statistics"], strict=False):
                each.iterations.statistics.write(values)
        solvers = len(self.solvers)
        self._leases = Leases(client.lease, share, client.clock, -begun["ahead"], solvers)
        self._begun_at = solver.iter
        if self._node:
            self._node.lease(self._leases.turns)
            poll, check = client.poll, self.inner.check
            client.poll = lambda: (poll(), check())
        else:
            for layer in solver.net.shared_layers:
                layer.lease(self._leases.turns)
            solver.net.set_forward_mutex(_in_turn)
        if gradients:
            self._synchronize()
        else:
            self.params.take(client.pull())
            if self._rule.slack:
                self._beside = Beside(self.solvers, self.each, self.params, client)
        self.keep()
        client.heartbeat.state = self._own_state.at
        solver.join(self, solver.reporter)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and not self._rule.gradients:
            self._end_with_newest()
        if error is None and self.client.worker == 0:
            self.reports.end(self.solver.iter, self.waited)
            if self._trainer:
                state, sidecar = self.solver.resume_state.take()
                self._leave_behind(state, {**sidecar, **self._before_last_pass}, ends=True)
        self._detach(failed=error is not None)
        try:
            if self.client.worker == 0:
                self.client.end()
            elif error is None:
                self.client.await_end()
        finally:
            self.client.leave()

    def _start(self) -> None:
        """Start the servers with this worker's parameters, or go on with those that hold some."""
        client, gradients = self.client, self._rule.gradients
        parameters = self.params.pulled if gradients else None
        state: object = begin_state(self.solver, self._ahead, parameters)
        if self._trainer:
            of_snapshot = self.solver.resume_state.take()
            clock = self._held.clock if self._held else 0
            kept = self._kept_by_servers(of_snapshot, -self._ahead, clock)
            state = Entrusted(state, kept, self._trainer)
        if self._held:
            client.resume(state)
            return
        params, updates = self.params, self._update_states if self._rule.update else {}
        client.start(params.ranges, params.parts(params.pulled), self._rule, state, updates)

    def _kept_by_servers(
        self, of_snapshot: tuple[State, dict[str, Any]], position: int, clock: int
    ) -> Kept:
        param = self.solver.param.SerializeToString()
        solvers = len(self.solvers)
        model, places = model_of(self.solver)
        return Kept(param, *of_snapshot, model, places, self._every, solvers, position, clock)

    def saved(self, state: State, sidecar: dict[str, Any]) -> None:
        """Give what was saved to servers that outlive this run."""
        if self._trainer and self.client.worker == 0:
            self._leave_behind(state, sidecar, ends=False)

    def iterate(self, count: int = 1) -> None:
        """Implement `WorkerGroup.iterate`."""
        self._before_last_pass = {}
        self.inner.iterate(count)

    def forward(self) -> None:
        """Implement `WorkerGroup.forward`: the batch of this pass is not trained on."""
        iterations = self.solver.iterations
        positions = {**iterations.positions(), "workers": self.inner.positions()}
        shown = iterations.display.state(self.solver.iter)
        self._before_last_pass = copy.deepcopy({"positions": positions, **shown})
        self.inner.forward()

    def _leave_behind(self, state: State, sidecar: dict[str, Any], ends: bool) -> None:
        position = self._leases.after(self._taken)
        kept = self._kept_by_servers((state, sidecar), position, self.client.clock)
        try:
            self.client.leave_behind(kept, ends)
        except SyncError as error:
            log.warning("The servers do not have what this run would leave behind: %s", error)

    def _synchronize(self) -> None:
        """Average gradients with the other workers, after the solvers of this one."""
        log.info("Steps are not captured: gradients go through the host")

        def do_not_capture(solver: Solver, rank: int) -> None:
            solver.capture = False

        self.each(do_not_capture)
        if self._node is None:
            self.solver.synchronize(GradientPush(self))
            return
        self._node.surround(lambda own, rank: GradientPush(self, rank, own))

    def _detach(self, failed: bool) -> None:
        """Free the solvers of this worker to train without the others."""
        solver = self.solver
        if failed and self._node:
            solver.leave(failed)  # the node's manager ends the others
            return
        if self._node:
            if self._rule.gradients:
                self._node.surround(lambda own, rank: own)
            self._node.lease(None)
            solver.join(self._node, solver.reporter)
            return
        solver.leave(failed)
        for layer in solver.net.shared_layers if not failed else ():
            layer.serve([solver.device])
        if self._rule.gradients:
            solver.synchronize(None)
        solver.net.set_forward_mutex(None)

    def each(self, work: Callable[[Solver, int], object]) -> None:
        """Call this with each solver of this worker and its rank, in its thread."""
        if self._node:
            self._node.each(work)
        else:
            work(self.solver, 0)

    def _away(self) -> AbstractContextManager[object]:
        """Return a block in which the root waits for servers."""
        return self._node.away() if self._node else nullcontext()

    def _end_with_newest(self) -> None:
        """Push what the last iterations changed; worker 0 has the servers' values then."""
        last = self.client.worker == 0 and not self.solver.stopped
        if last and self._since:
            self._exchange(last)
        elif self._beside:
            self._beside.await_pull()
            if last and self.solver.iter < self.solver.param.max_iter:
                self.params.take(self.client.pull(inf))

    def _restored(self) -> list[dict[str, Any]]:
        """Return the states of the workers in the snapshot that worker 0 has restored, if there
        are as many now. They are used once.
        """
        group, self.solver.resume_state.group = self.solver.resume_state.group, {}
        self._ahead = int(group.get("ahead", 0))
        self._update_states = dict(group.get("servers", {}))
        states = list(group.get("workers", ()))
        if states and len(states) != self._workers:
            message = (
                "The snapshot is of %d workers, not %d: all begin with the momentum of worker 0"
            )
            log.warning(message, len(states), self._workers)
            return []
        return states

    # between iterations

    def iterated(self) -> None:
        """Push and pull, if a clock is over; worker 0 logs how far all are when it displays."""
        self._since += 1
        self.client.poll()
        if self.client.worker == 0:
            displays = due(self.solver.iter, self.solver.param.display)
            self.reports.iterated(self.solver.iter, self.waited, displays)
        last = self.solver.iter == self.solver.param.max_iter
        if not self._rule.gradients and (self._since == self._every or last):
            self.solver.iterations.collect(wait=True)
            self.inner.raise_worker_error()
            with self._away():
                self._exchange(last)
        if self._rule.gradients:
            self.inner.raise_worker_error()
            self.keep()

    def vote(self, action: Action) -> Action:
        """Return the action; stop when worker 0 has ended the run, or the servers end."""
        return Action.STOP if self.client.heartbeat.ended.is_set() else self.inner.vote(action)

    def _exchange(self, last: bool) -> None:
        """Push the change since the last push, and go on from what was pulled: now with slack 0,
        else at the next clock, since it comes beside the iterations until then. After the `last`
        iteration go on from the values of all workers.
        """
        begun = time.perf_counter()
        if self._beside is None:
            flat = self.params.flat()
            self.client.push(self.params.payloads(flat - self.params.pulled, flat))
            self.params.take(self.client.pull())
            self.keep()
        else:
            self._beside.exchange(self.keep)
            if last:
                self._beside.await_pull()
                waits = self._rule.slack < inf and self.client.worker == 0
                self.params.take(self.client.pull(slack=0 if waits else None))
        self.waited += time.perf_counter() - begun
        self._since = 0

    # tests and snapshots

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Give the first worker the values of a cut in tests and snapshots; in a snapshot its own,
        if there is none.
        """
        with self.inner.during(phase):
            if phase not in ("test", "snapshot") or self.client.worker or self._own:
                yield
                return
            try:
                cut = self.client.cut()
                self._dealt = cut.batches * len(self.solvers)
                of_ranges = zip(self.params.ranges, cut.update_states, strict=True)
                self._update_states = {r.name: own for r, own in of_ranges if own}
            except SyncError as error:
                if phase == "test":
                    raise
                log.warning("The snapshot has the first worker's own parameters: %s", error)
                self._dealt = self._leases.after(self._taken)
                yield
                return
            if self._rule.gradients:
                yield
                return
            params, device = self.solver.params, self.solver.device
            with device.scope():
                self._own = [device.on_host(params.data).copy()]
                self.params.upload(self.params.filled(cut.values))
                try:
                    yield
                finally:
                    self.params.upload(self._own.pop())

    def state(self) -> dict[str, Any]:
        """Return how many batches the pushes of the last cut are ahead of this worker's data, which
        do not go back to those that are behind, in the hands of slower workers; what the servers'
        update keeps; and what `keep` keeps of each worker, in the order of their numbers, if all
        hand it in.
        """
        ahead = max(0, self._dealt - self._leases.after(self._taken))
        of_all = {"ahead": ahead, "servers": self._update_states}
        if self.client.worker:
            return of_all
        try:
            states, missing = self.client.collect()
            why = f"worker(s) {', '.join(map(str, missing))} do not answer" if missing else ""
        except SyncError as error:
            states, why = {}, str(error)
        if why:
            log.warning("The snapshot has no momentum of other workers: %s", why)
            return of_all
        own = self._own_state.at(0)  # without the momentum, which Caffe's files have
        return {**of_all, "workers": [own, *(states[number] for number in sorted(states))]}

    def keep(self) -> None:
        """Keep what a snapshot needs of this worker now, where all its solvers are idle."""
        self._own_state.keep(self.client.clock)

    @property
    def _taken(self) -> int:
        iterations = self.solver.iter - self._begun_at
        return iterations * self.solver.param.iter_size * len(self.solvers)

    def exchange_gradients(self, rank: int, updates: bool) -> None:
        """Push the gradient, and put the mean of all workers' in its place. All solvers of this
        worker call it together, in their threads; those that update get the mean.
        """
        solver, means = self.solvers[rank], None
        statistics = self._gathered(rank, solver.iterations.statistics.present)
        diff = solver.params.reduced_diff
        if rank == 0:
            flat = self.params.with_statistics(solver.device.on_host(diff), mean(statistics))
            begun = time.perf_counter()
            with self._away():
                self.client.push(self.params.payloads(flat, flat))
                means = self.params.filled(self.client.pull())
            self.waited += time.perf_counter() - begun
        (means, *_) = self._gathered(rank, means)
        if updates:
            solver.device.upload(means[: diff.size], diff)

    def _gathered(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all solvers of this worker, each of which calls it with its own."""
        return self._node.group.local_gather(rank, value) if self._node else [value]


@contextmanager
def _in_turn(layer: Layer) -> Iterator[None]:
    """The forward mutex of a layer whose batches are leased to a single solver."""
    with layer.forward_lock:
        layer.begin_turn()
        yield
        layer.end_turn()


class GradientPush:
    """The synchronizer of a worker's solver that pushes gradients, see `ServedWorkers`; `node` is
    that of the solvers of this worker, if there are several.
    """

    capturable = adds_nothing = has_factors = False  # gradients are pushed
    size = 1

    def __init__(
        self, workers: ServedWorkers, rank: int = 0, node: Synchronizer | None = None
    ) -> None:
        self._workers, self._rank, self._node = workers, rank, node
        self.updates = node is None or node.updates
        self.root_updates = node is not None and node.root_updates
        self.abort_flag = node.abort_flag if node else 0
        self.reduces_early = node is not None and node.reduces_early

    def on_start(self) -> None:
        """Bring the parameters of this worker's solvers in step: all workers have the same."""
        if self._node:
            self._node.on_start()

    def after_backward(self, layer: int) -> None:
        """Average over this worker's solvers; the whole gradient is pushed at once."""
        if self._node:
            self._node.after_backward(layer)

    def update_by_factors(self) -> None:
        """Do nothing: see `has_factors`."""

    def on_gradients_ready(self) -> None:
        """Make the gradient the mean of all workers'."""
        if self._node:
            self._node.on_gradients_ready()
        self._workers.exchange_gradients(self._rank, self.updates)
