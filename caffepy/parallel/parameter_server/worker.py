"""ServedWorkers: what a solver that trains by a parameter server does between its iterations.

With changes, every `every` iterations, at a clock:

    change = parameters - those that were pulled last
    push the change       the servers add the mean of the workers' changes
    pull                  and go on from the values of the servers

Momentum and history stay the worker's own. With gradients, with slack 0, each iteration pushes its
gradient before the update and pulls the mean, and each worker updates its parameters itself: as
training in step does, to the bit.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf, prod
from typing import Any

import numpy as np

from caffepy.core.errors import SyncError, UsageError
from caffepy.device.blob import Array
from caffepy.layer import Layer
from caffepy.layer.inner_product import InnerProduct
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.filters import Filters
from caffepy.parallel.parameter_server.leases import Leases
from caffepy.parallel.parameter_server.messages import Rule
from caffepy.parallel.parameter_server.ranges import Blob, KeyRange, key_ranges
from caffepy.solver import Action, Solver
from caffepy.solver.iteration import due
from caffepy.solver.policy import next_step
from caffepy.solver.positions import data_layers, take_positions
from caffepy.solver.worker_group import GroupStatistics, WorkerGroup

log = logging.getLogger(__name__)


def ranges_of(solver: Solver, gradients: bool) -> list[KeyRange]:
    """Return the key ranges of a solver's parameters, or of its gradients with the loss, and then
    of its running statistics.
    """
    params, blobs = solver.params, list[Blob]()
    statistics = solver.iterations.statistics
    for learnable, (offset, count) in zip(solver.net.learnable, params.segments, strict=True):
        if learnable.blob in statistics:
            continue
        node, shape = solver.net.nodes[learnable.layer], learnable.blob.shape
        row = shape[1] if isinstance(node.layer, InnerProduct) and len(shape) == 2 else 0
        blobs.append(Blob(f"{node.name}:{offset}", offset, count, row=row))
    size = params.reduced_diff.size
    if gradients:
        blobs.append(Blob("metrics", params.data.size, size - params.data.size))
    for k, array in enumerate(statistics.present):
        blobs.append(Blob(f"statistics:{k}", size, array.size, is_mean=True))
        size += array.size
    return key_ranges(blobs)


class PulledStatistics(GroupStatistics):
    """The running statistics of all workers, as their means were pulled last."""

    def __init__(self, solver: Solver) -> None:
        self.means: list[Array] = []
        self._solver = solver

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A block in which the worker has the means, to test with."""
        statistics = self._solver.iterations.statistics
        if not self.means:
            yield
            return
        statistics.hold()
        with statistics.replaced(self.means):
            yield

    def each(self, own: list[Array]) -> list[list[Array]]:
        """Return the means, which a snapshot has, if there are some."""
        return [self.means or own]


class ServedWorkers(WorkerGroup):
    """A context in which a solver is one of the workers of a parameter server.

    every: iterations between two pushes; 1 for a rule with gradients.
    workers: number of workers that begin together.
    filters: of what this worker pushes.
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
    ) -> None:
        super().__init__(writes_files=client.worker == 0)
        if rule.gradients and every != 1:
            raise UsageError("gradients are pushed in each iteration: give --every 1")
        self.solver, self.client = solver, client
        self.statistics: PulledStatistics = PulledStatistics(solver)
        self.filters = filters or Filters()
        self._rule, self._every, self._workers = rule, every, workers
        self._ranges = ranges_of(solver, rule.gradients)
        self._shapes = [array.shape for array in solver.iterations.statistics.present]
        self._pulled = self._flat()
        self._since = 0  # iterations since the last push
        self._dealt = 0  # batches that the last cut has
        self.waited = 0.0  # seconds for pushes and pulls in which the solver did not train
        self._beside: _Beside | None = None
        self._own: list[Array] = []  # parameters while the solver has those of a cut

    # begin and end

    def __enter__(self) -> "ServedWorkers":
        solver, client, gradients = self.solver, self.client, self._rule.gradients
        if client.worker == 0:
            values = [self._pulled[r.start : r.stop] for r in self._ranges]
            client.start(self._ranges, values, self._rule, self._begin_state())
        share = solver.param.iter_size * self._every
        begun = client.join(share)
        client.await_members(self._workers)
        self._follow(begun)
        self._leases = Leases(client.lease, share, client.clock, -begun["ahead"])
        self._begun_at = solver.iter
        skipped = {
            id(layer): self._leases.turns(0)
            for layer in solver.net.layers
            if layer.is_data and not layer.lease(self._leases.turns)
        }

        @contextmanager
        def skipping(layer: Layer) -> Iterator[None]:
            with layer.forward_lock:
                if id(layer) in skipped:
                    layer.skip(next(skipped[id(layer)]).before)
                yield

        solver.net.set_forward_mutex(skipping)
        if gradients:
            solver.run_eagerly("gradients go through the host")
            solver.synchronize(GradientPush(self))
        else:
            self._take(client.pull())
            if self._rule.slack:
                self._beside = _Beside(self)
        solver.join(self, solver.reporter)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and not self._rule.gradients:
            self._end_with_newest()
        self.solver.leave(failed=error is not None)
        if self._rule.gradients:
            self.solver.synchronize(None)
        self.solver.net.set_forward_mutex(None)
        try:
            if self.client.worker == 0:
                self.client.end()
            elif error is None:
                self.client.await_end()
        finally:
            self.client.leave()

    def _end_with_newest(self) -> None:
        """Push what the last iterations changed; worker 0 has the servers' values then."""
        last = self.client.worker == 0 and not self.solver.stopped
        if last and self._since:
            self._exchange(last)
        elif self._beside:
            self._beside.await_pull()
            if last and self.solver.iter < self.solver.param.max_iter:
                self._take(self.client.pull(inf))

    def _begin_state(self) -> dict[str, Any]:
        """Return what the other workers begin with, beside the values of the servers."""
        solver, device = self.solver, self.solver.device
        positions = take_positions(solver.iterations.nets, device)["net"]
        shared = data_layers(solver.net).keys() & positions.keys()
        return {
            "iteration": solver.iter,
            "rate_factor": solver.iterations.rate_factor,
            "data": {name: positions[name] for name in shared},
            "ahead": solver.resume_state.group.get("ahead", 0),
            "history": [device.on_host(flat).copy() for flat in solver.history],
            "parameters": self._pulled if self._rule.gradients else None,
        }

    def _follow(self, begun: Mapping[str, Any]) -> None:
        """Begin as the first worker did, or where the others are now."""
        solver, clock = self.solver, self.client.clock
        iterations, device = solver.iterations, solver.device
        if self.client.worker == 0:
            return
        if clock and self._rule.gradients:
            raise UsageError(
                "workers that push gradients begin together: with --every 2 or more others may join"
            )
        iteration, step = begun["iteration"] + clock * self._every, 0
        for number in range(iteration):
            step = next_step(solver.param, number, step)
        iterations.move_to(iteration, step)
        iterations.rate_factor = begun["rate_factor"]
        solver.net.set_state({**solver.net.state(), **begun["data"]})
        with device.scope():
            if clock == 0:
                for mine, theirs in zip(solver.history, begun["history"], strict=True):
                    device.upload(theirs, mine)
            if self._rule.gradients:
                device.upload(begun["parameters"][: solver.params.data.size], solver.params.data)

    # between iterations

    def iterated(self) -> None:
        """Push and pull, if a clock is over; worker 0 logs how far all are when it displays."""
        self._since += 1
        if self.client.worker == 0 and due(self.solver.iter, self.solver.param.display):
            self.client.report()
        last = self.solver.iter == self.solver.param.max_iter
        if not self._rule.gradients and (self._since == self._every or last):
            self.solver.iterations.collect(wait=True)
            self._exchange(last)

    def vote(self, action: Action) -> Action:
        """Return the action; stop when worker 0 has ended the run."""
        ended = self.client.worker > 0 and self.client.ended.is_set()
        return Action.STOP if ended else action

    def _exchange(self, last: bool) -> None:
        """Push the change since the last push, and go on from what was pulled: now with slack 0,
        else at the next clock, since it comes beside the iterations until then. After the `last`
        iteration go on from the values of all workers.
        """
        begun = time.perf_counter()
        if self._beside is None:
            flat = self._flat()
            self.push(flat - self._pulled, flat)
            self._take(self.client.pull())
        else:
            self._beside.exchange()
            if last:
                self._beside.await_pull()
                waits = self._rule.slack < inf and self.client.worker == 0
                self._take(self.client.pull(slack=0 if waits else None))
        self.waited += time.perf_counter() - begun
        self._since = 0

    def push(self, changes: Array, means: Array) -> None:
        """Push the ranges of these flat arrays, as the filters leave them."""
        self.client.push(
            [
                self.filters.encode(i, r, (means if r.is_mean else changes)[r.start : r.stop])
                for i, r in enumerate(self._ranges)
            ]
        )

    # tests and snapshots

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """In tests and snapshots the first worker has the values of a cut; in a snapshot its own,
        if there is none.
        """
        with super()._during(phase):
            if phase not in ("test", "snapshot") or self.client.worker or self._own:
                yield
                return
            try:
                values, self._dealt = self.client.cut()
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
                filled = self._filled(values)
                self.statistics.means = self._means(filled)
                self._upload(filled)
                try:
                    yield
                finally:
                    device.upload(self._own.pop(), params.data)

    def state(self) -> dict[str, Any]:
        """Return how many batches the pushes of the last cut are ahead of this worker's data; data
        do not go back to those that are behind, in the hands of slower workers.
        """
        return {"ahead": max(0, self._dealt - self._leases.after(self._taken))}

    @property
    def _taken(self) -> int:
        return (self.solver.iter - self._begun_at) * self.solver.param.iter_size

    def exchange_gradients(self) -> None:
        """Push the gradient, and put the mean of all workers' in its place."""
        device, diff = self.solver.device, self.solver.params.reduced_diff
        flat = self._with_statistics(device.on_host(diff))
        self.push(flat, flat)
        means = self._filled(self.client.pull())
        device.upload(means[: diff.size], diff)
        self.statistics.means = self._means(means)

    # arrays

    def _flat(self) -> Array:
        """Return a copy of the parameters and statistics, on the host."""
        solver = self.solver
        return self._with_statistics(solver.device.on_host(solver.params.data_with_scale))

    @property
    def size_of_flat(self) -> int:
        """Elements of the flat array that the ranges are parts of."""
        return self._pulled.size

    def means_of_worker(self) -> Array:
        """Return the worker's own running statistics, as they stand in the flat array."""
        return self._with_statistics(np.empty(0, np.float32))

    def _with_statistics(self, array: Array) -> Array:
        statistics = self.solver.iterations.statistics.present
        return np.concatenate([array, *(own.reshape(-1) for own in statistics)])

    def _filled(self, values: Sequence[Array]) -> Array:
        """Return a flat array with these values of the ranges."""
        flat = self._pulled.copy()
        self._fill(flat, values)
        return flat

    def _fill(self, flat: Array, values: Sequence[Array]) -> None:
        for key_range, array in zip(self._ranges, values, strict=True):
            flat[key_range.start : key_range.stop] = array

    def fill_to_train(self, flat: Array, values: Sequence[Array]) -> None:
        """Fill a flat array with these values of the ranges, and what the filters kept back of this
        worker's changes. Any thread may call it.
        """
        self._fill(flat, [self.filters.add_rest(i, array) for i, array in enumerate(values)])
        self.statistics.means = self._means(flat)

    def _take(self, values: Sequence[Array]) -> None:
        """Go on from these values; the running statistics stay the worker's own."""
        self._pulled = self._pulled.copy()
        self.fill_to_train(self._pulled, values)
        self._upload(self._pulled)

    def _upload(self, flat: Array) -> None:
        solver, data = self.solver, self.solver.params.data
        with solver.iterations.statistics.kept(), solver.device.scope():
            solver.device.upload(flat[: data.size], data)

    def _means(self, flat: Array) -> list[Array]:
        means, start = list[Array](), self.solver.params.reduced_diff.size
        for shape in self._shapes:
            means.append(flat[start : start + prod(shape)].reshape(shape).copy())
            start += prod(shape)
        return means


class _Beside:
    """Pushes and pulls of a worker beside its iterations. At a clock, on the device:

        change     = parameters - begun     what it has learned since the last push
        parameters = pulled + change        pulled after the last push, which it contains
        begun      = parameters
        then, in a thread: push the change, pull

    So what a worker trains on is a clock older than with a pull that it waits for; it pulls with a
    slack smaller by one for that.
    """

    def __init__(self, workers: ServedWorkers) -> None:
        self._workers = workers
        device, params = workers.solver.device, workers.solver.params
        with device.scope():
            self._begun, self._change = params.data.copy(), params.data.copy()
            self._pulled = params.data.copy()
        self._host = device.host_array(workers.size_of_flat, np.dtype(np.float32))
        self._slack = workers.client.view.rule.slack - 1
        self._pull: Future[None] | None = None

    def exchange(self) -> None:
        """Go on from what was pulled and what was learned since; push that, beside what follows."""
        device, data = self._workers.solver.device, self._workers.solver.params.data
        with device.scope():
            self._change[...] = data
            self._change -= self._begun
            self.land()
            self._begun[...] = data
            device.synchronize()
        means = self._workers.means_of_worker()
        pull = self._pull = Future()

        def push_and_pull() -> None:
            try:
                self._push_and_pull(means)
                pull.set_result(None)
            except BaseException as error:
                pull.set_exception(error)

        threading.Thread(target=push_and_pull, name="caffepy-push", daemon=True).start()

    def land(self) -> None:
        """Wait for the pull that is on its way, if any, and go on from it and the change since."""
        if self._pull is None:
            return
        self.await_pull()
        solver = self._workers.solver
        data = solver.params.data
        with solver.iterations.statistics.kept(), solver.device.scope():
            data[...] = self._pulled
            data += self._change

    def await_pull(self) -> None:
        """Wait for the pull that is on its way, if any."""
        pull, self._pull = self._pull, None
        if pull:
            pull.result()

    def _push_and_pull(self, means: Array) -> None:
        workers, host, size = self._workers, self._host, self._change.size
        device = workers.solver.device
        device.copy_beside(self._change, host[:size])
        host[host.size - means.size :] = means
        workers.push(host, host)
        workers.fill_to_train(host, workers.client.pull(self._slack))
        device.copy_beside(host[:size], self._pulled)


class GradientPush:
    """The synchronizer of a worker that pushes gradients, see `ServedWorkers`."""

    capturable = adds_nothing = False
    updates = True
    abort_flag = 0

    def __init__(self, workers: ServedWorkers) -> None:
        self._workers = workers

    def on_start(self) -> None:
        """Nothing: all workers have the same parameters."""

    def after_backward(self, layer: int) -> None:
        """Nothing: the whole gradient is pushed at once."""

    def on_gradients_ready(self) -> None:
        """Make the gradient the mean of all workers'."""
        self._workers.exchange_gradients()
