"""WorkerParams: what a worker pushes and pulls, as an array on the host.

flat   parameters | metrics, of gradients | running statistics
ranges the parts of it that servers hold, by blob
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.selection import Embed
from caffepy.parallel.parameter_server.filters import Filters, Payload
from caffepy.parallel.parameter_server.ranges import Blob, KeyRange, key_ranges
from caffepy.solver import Solver
from caffepy.solver.statistics import mean
from caffepy.solver.worker_group import GroupStatistics, WorkerGroup


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
        row = shape[1] if isinstance(node.layer, InnerProduct | Embed) and len(shape) == 2 else 0
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

    def __init__(self, solvers: Sequence[Solver], inner: WorkerGroup) -> None:
        self.means: list[Array] = []
        self._solvers, self._inner = solvers, inner

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a block in which the solvers of this worker have the means, to test with."""
        if not self.means:
            with self._inner.statistics.averaged():
                yield
            return
        self._inner.raise_worker_error()
        with ExitStack() as stack:
            for solver in self._solvers:
                statistics = solver.iterations.statistics
                statistics.hold()
                stack.enter_context(statistics.replaced(self.means))
            yield
            self._inner.raise_worker_error()

    def each(self, own: list[Array]) -> list[list[Array]]:
        """Return the means, which a snapshot has, if there are some."""
        return [self.means] if self.means else self._inner.statistics.each(own)


class WorkerParams:
    """The parameters and running statistics of a worker's solvers, which train in step.

    each: calls a function with each of the solvers and its rank, in its thread.
    inner: the group of the solvers.
    pulled: parameters and statistics as they were pulled last, or as they are at first; it is
        replaced, never written to.
    """

    def __init__(
        self,
        solvers: Sequence[Solver],
        each: Callable[[Callable[[Solver, int], object]], None],
        inner: WorkerGroup,
        filters: Filters,
        gradients: bool,
    ) -> None:
        self._solvers, self._each, self._filters = solvers, each, filters
        solver, *_ = solvers
        self.statistics = PulledStatistics(solvers, inner)
        self.ranges = ranges_of(solver, gradients)
        self._shapes = [array.shape for array in solver.iterations.statistics.present]
        self.pulled = self.flat()

    def flat(self) -> Array:
        """Return a copy of the parameters and statistics."""
        solver, *_ = self._solvers
        flat = solver.device.on_host(solver.params.data_with_scale)
        return self.with_statistics(flat, self.own_means())

    def own_means(self) -> list[Array]:
        """Return the mean of the running statistics of the solvers, which are idle."""
        return mean([solver.iterations.statistics.present for solver in self._solvers])

    def with_statistics(self, array: Array, statistics: Sequence[Array]) -> Array:
        """Return a flat array of parameters, or of gradients, and these statistics."""
        return np.concatenate([array, *(own.reshape(-1) for own in statistics)])

    def parts(self, flat: Array) -> list[Array]:
        """Return the ranges of a flat array, as views."""
        return [flat[r.start : r.stop] for r in self.ranges]

    def payloads(self, changes: Array, means: Array) -> list[Payload]:
        """Return what is to be pushed of these flat arrays, as the filters leave it."""
        payloads: list[Payload] = [changes] * len(self.ranges)

        def encode(first: int, end: int) -> None:
            for i in range(first, end):
                r = self.ranges[i]
                flat = means if r.is_mean else changes
                payloads[i] = self._filters.encode(i, r, flat[r.start : r.stop])

        parallel(encode, len(self.ranges))
        return payloads

    def filled(self, values: Sequence[Array]) -> Array:
        """Return a flat array with these values of the ranges, which testing sees from now on."""
        flat = self.pulled.copy()
        self._fill(flat, values)
        return flat

    def fill_to_train(self, flat: Array, values: Sequence[Array]) -> None:
        """Fill a flat array with these values of the ranges, and what the filters kept back of this
        worker's changes. Any thread may call it.
        """
        self._fill(flat, values, self._filters.add_rest)

    def take(self, values: Sequence[Array]) -> None:
        """Continue from these values; the running statistics stay the worker's own."""
        pulled = self.pulled.copy()
        self.fill_to_train(pulled, values)
        self.pulled = pulled
        self.upload(pulled)

    def upload(self, flat: Array) -> None:
        """Give the solvers these parameters; each keeps its running statistics."""

        def upload(solver: Solver, rank: int) -> None:
            data = solver.params.data
            with solver.iterations.statistics.kept(), solver.device.scope():
                solver.device.upload(flat[: data.size], data)

        self._each(upload)

    def _fill(
        self,
        flat: Array,
        values: Sequence[Array],
        of_range: Callable[[int, Array], Array] = lambda i, array: array,
    ) -> None:
        parts = self.parts(flat)

        def fill(first: int, end: int) -> None:
            for i in range(first, end):
                parts[i][...] = of_range(i, values[i])

        parallel(fill, len(parts))
        means, start = list[Array](), self._solvers[0].params.reduced_diff.size
        for shape in self._shapes:
            means.append(flat[start : start + prod(shape)].reshape(shape).copy())
            start += prod(shape)
        self.statistics.means = means
