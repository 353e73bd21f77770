"""Synchronization: the synchronizers of solvers that train as one, and the flat parameters and
gradients of a solver as they take them.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic

from caffepy.collectives import factors
from caffepy.collectives.buckets import Bucket, buckets
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import choose
from caffepy.collectives.synchronizer import FlatParams, Synchronizer
from caffepy.collectives.topology import Topology, device_pairs, show
from caffepy.collectives.world import World
from caffepy.core.errors import UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.net.gradients import adders, large_products
from caffepy.parallel import batch_norm
from caffepy.solver import Solver

log = logging.getLogger(__name__)


class Synchronization:
    """Keeps the solvers of all ranks in step: each has a synchronizer from `join` to `leave`.

    `sync` is the way to do so, see `collectives.sync`. With `shares_batches` BatchNorm normalizes
    with the statistics of the batches of all ranks.
    """

    def __init__(
        self,
        root: Solver,
        devices: Sequence[Device],
        topology: Topology,
        group: RankGroup,
        sync: str,
        shares_batches: bool,
    ) -> None:
        self._group, self._shares_batches = group, shares_batches
        self._members: dict[int, tuple[Solver, Synchronizer]] = {}
        on_gpus = devices[0].kind == "cuda"
        log.info("%s pairs %s", "GPUs" if on_gpus else "Solvers", show(device_pairs(topology)))
        self._way = choose(sync, topology, on_gpus, group.world.nodes)
        for rank in range(topology.size):
            log.debug("Starting sync %d (of total %d)", rank, topology.size)
        over_nccl = self._way.name == "nccl"
        self._factored = choose_factored(root, devices, group.world) if over_nccl else ()
        if shares_batches and on_gpus and batch_norm.normalizing(root.net):
            if root.saves_memory:
                raise UsageError("--bn-stats sync needs nets whose blobs share no memory")
            root.run_eagerly("statistics of batches go through the host")

    def join(self, solver: Solver, rank: int) -> None:
        """Keep a solver in step with the others from now on; all ranks meet in here."""
        with solver.device.scope():
            params = flat_params(solver, self._factored)
            synchronizer = self._way.join(self._group, rank, params)
            self._members[rank] = solver, synchronizer
            solver.synchronize(synchronizer, self._way.root_updates)
            if self._shares_batches:
                batch_norm.share_batches(solver.net, partial(self._group.all_gather, rank))

    def bring_params(self) -> None:
        """In the root's thread: give its parameters to the ranks that do not update theirs."""
        self._members[0][1].on_start()

    def leave(self, rank: int) -> None:
        """Make a rank's solver train alone again; all ranks must call this."""
        solver, synchronizer = self._members[rank]
        _make_alone(solver)
        synchronizer.close()

    def release(self, until: float) -> None:
        """After an error: close all synchronizers, after freeing the graphs that use them."""
        for solver, _ in self._members.values():
            with suppress(Exception):  # the error that counts is an earlier one
                _make_alone(solver)
        for _, synchronizer in self._members.values():
            with suppress(Exception):
                synchronizer.close(max(0.0, until - monotonic()))


def _make_alone(solver: Solver) -> None:
    solver.synchronize(None)
    batch_norm.share_batches(solver.net, None)


def choose_factored(root: Solver, devices: Sequence[Device], world: World) -> Collection[int]:
    """Return the parameters of whose gradients the ranks exchange factors through NCCL; log them.

    Each rank computes the gradient itself, so all GPUs must be of one kind to get the same result,
    and nothing may change or show gradients before that. Between hosts factors are more than the
    wires carry.
    """
    if len(set(world.hosts)) > 1:
        return ()
    names = {device.name for device in devices if isinstance(device, CudaDevice)}
    plain = root.param.iter_size == 1 and not root.param.debug_info
    if len(names) != 1 or not plain or not root.iterations.step.gradients_untouched:
        return ()
    found = factors.factored(root.net, world.size, root.device.math_mode.precision)
    if found:
        log.info(
            "Solvers give each other the factors of the weight gradients of %s, not the gradients",
            ", ".join(layer.param.name for layer in found.values()),
        )
    return found.keys()


def flat_params(solver: Solver, factored: Collection[int] = ()) -> FlatParams:
    """Return what of a solver is synchronized; the learnable parameters `factored` by factors."""
    params, parts = solver.params, []
    layers = {i: layer for i, layer in large_products(solver.net).items() if i in factored}
    if solver.param.iter_size == 1 and solver.net.learnable_params:
        adding = adders(solver.net)
        if layers:
            parts.append(Bucket((), frozenset().union(*(adding[i] for i in layers))))
        # The last segment, the metrics, is complete before the backward pass begins.
        ends = [*map(int, params.ends), params.reduced_diff.size]
        parts += buckets(ends, [*adding, frozenset()], without=layers)
    return FlatParams(
        solver.device, params.data_with_scale, params.reduced_diff, parts, list(layers.values())
    )
