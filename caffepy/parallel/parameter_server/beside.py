"""Beside: pushes and pulls beside a worker's iterations. At a clock, on each solver's device:

    change     = parameters - begun     what it has learned since the last push
    parameters = pulled + change        pulled after the last push, which it contains
    begun      = parameters
    then, in a thread: push the change, pull

So what a worker trains on is a clock older than with a pull that it waits for; it pulls with a
slack smaller by one for that.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.worker_params import WorkerParams
from caffepy.solver import Solver


class _Arrays(NamedTuple):
    """Arrays of one of the worker's solvers on its device, see the head of this file."""

    begun: Array
    change: Array
    pulled: Array


class Beside:
    """See the head of this file. `each` calls a function with each of the solvers and its rank, in
    its thread.
    """

    def __init__(
        self,
        solvers: Sequence[Solver],
        each: Callable[[Callable[[Solver, int], object]], None],
        params: WorkerParams,
        client: Client,
    ) -> None:
        self._solvers, self._each, self._params, self._client = solvers, each, params, client
        self._arrays: dict[int, _Arrays] = {}  # by the rank of the solver
        each(self._begin)
        self._host = solvers[0].device.host_array(params.pulled.size, np.dtype(np.float32))
        self._slack = client.view.rule.slack - 1
        self._pull: Future[None] | None = None
        self._landed = True  # nothing was pulled yet that the parameters do not have

    def _begin(self, solver: Solver, rank: int) -> None:
        data = solver.params.data
        with solver.device.scope():
            self._arrays[rank] = _Arrays(data.copy(), data.copy(), data.copy())

    def exchange(self, keep: Callable[[], object]) -> None:
        """Continue from the pulled values plus what was learned since; push the latter concurrently
        with what follows. `keep` is called between the two.
        """
        self.await_pull()
        self._each(self._go_on)
        keep()
        self._landed = False
        own = self._params.own_means()
        means = np.concatenate([np.empty(0, np.float32), *map(np.ravel, own)])
        pull = self._pull = Future()

        def push_and_pull() -> None:
            try:
                self._push_and_pull(means)
                pull.set_result(None)
            except BaseException as error:
                pull.set_exception(error)

        threading.Thread(target=push_and_pull, name="caffepy-push", daemon=True).start()

    def _go_on(self, solver: Solver, rank: int) -> None:
        data, device = solver.params.data, solver.device
        begun, change, pulled = self._arrays[rank]
        with device.scope():
            change[...] = data
            change -= begun
            if not self._landed:
                with solver.iterations.statistics.kept():
                    data[...] = pulled
                    data += change
            begun[...] = data
            device.synchronize()

    def await_pull(self) -> None:
        """Wait for the pull that is on its way, if any."""
        pull, self._pull = self._pull, None
        if pull:
            pull.result()

    def _push_and_pull(self, means: Array) -> None:
        params, client, host = self._params, self._client, self._host
        change = self._arrays[0].change
        self._solvers[0].device.copy_beside(change, host[: change.size])
        host[host.size - means.size :] = means
        client.push(params.payloads(host, host))
        params.fill_to_train(host, client.pull(self._slack))
        for rank, solver in enumerate(self._solvers):
            solver.device.copy_beside(host[: change.size], self._arrays[rank].pulled)
