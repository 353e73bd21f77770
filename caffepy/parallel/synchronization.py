"""Synchronization: the synchronizers of solvers that train as one, and the flat parameters and
gradients of a solver as they take them.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from caffepy.collectives import factors, interfaces
from caffepy.collectives.buckets import Bucket, buckets
from caffepy.collectives.rank_group import DEADLINES, RankGroup
from caffepy.collectives.sync import Choice, choose, crossing_bytes
from caffepy.collectives.synchronizer import BF16, FLOAT32, FlatParams, Synchronizer
from caffepy.collectives.topology import Topology, device_pairs, show
from caffepy.collectives.world import World
from caffepy.core.errors import UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.net.gradients import adders, large_products
from caffepy.parallel import batch_norm
from caffepy.solver import Solver
from caffepy.solver.step import SyncCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncOptions:
    """Settings of solvers that train together.

    sync: the way to synchronize, see `collectives.sync`.
    bn_stats: "average", "root" or "sync", see `parallel.batch_norm`.
    deadlines: seconds by phase after which a rank that makes no progress counts as hung.
    wire: type of gradients between nodes, "float32" or "bf16".
    """

    sync: str = "auto"
    bn_stats: str = "average"
    deadlines: Mapping[str, float] = field(default_factory=lambda: DEADLINES)
    wire: str = FLOAT32


class Synchronization:
    """The synchronizers that keep the solvers of all ranks in step, each from `join` to `leave`."""

    def __init__(
        self,
        root: Solver,
        devices: Sequence[Device],
        topology: Topology,
        group: RankGroup,
        options: SyncOptions,
    ) -> None:
        wire = options.wire
        self._group, self._shares_batches = group, options.bn_stats == "sync"
        self._members: dict[int, tuple[Solver, Synchronizer]] = {}
        on_gpus = devices[0].kind == "cuda"
        log.info("%s pairs %s", "GPUs" if on_gpus else "Solvers", show(device_pairs(topology)))
        self._way = choose(options.sync, topology, on_gpus, group.world.nodes)._replace(wire=wire)
        for rank in range(topology.size):
            log.debug("Starting sync %d (of total %d)", rank, topology.size)
        over_nccl = self._way.name == "nccl"
        self._factored = choose_factored(root, devices, group.world, wire) if over_nccl else ()
        if wire != FLOAT32:
            log_wire(root, self._way, group.world, self._factored)
        if self._shares_batches and on_gpus and batch_norm.normalizing(root.net):
            if root.saves_memory:
                raise UsageError("--bn-stats sync needs nets whose blobs share no memory")
            root.run_eagerly("statistics of batches go through the host")

    def join(self, solver: Solver, rank: int) -> None:
        """Keep a solver in step with the others from now on; all ranks meet in here."""
        with solver.device.scope():
            params = flat_params(solver, self._factored)
            synchronizer = self._way.join(self._group, rank, params)
            self._members[rank] = solver, synchronizer
            solver.synchronize(synchronizer)
            if self._shares_batches:
                batch_norm.share_batches(solver.net, partial(self._group.all_gather, rank))

    def surround(self, rank: int, outer: Callable[[Synchronizer], SyncCallback]) -> None:
        """Replace the synchronizer of the rank's solver by what `outer` makes of it."""
        solver, synchronizer = self._members[rank]
        with solver.device.scope():
            solver.synchronize(outer(synchronizer))

    def bring_params(self) -> None:
        """Give the root's parameters, in its thread, to the ranks that do not update theirs."""
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


def choose_factored(
    root: Solver, devices: Sequence[Device], world: World, wire: str = FLOAT32
) -> Collection[int]:
    """Return the parameters of whose gradients the ranks exchange factors through NCCL; log them.

    Each rank computes the gradient itself, so all GPUs must be of one kind to get the same result,
    and nothing may change or show gradients before that. All nodes decide by the same figures, and
    exchange no factors if they come to different ends all the same.
    """
    own = {device.name for device in devices if isinstance(device, CudaDevice)}
    of_nodes = world.gather((own, interfaces.bandwidth(), interfaces.host(world.hosts[world.node])))
    names, hosts = set[str](), len({host for *_, host in of_nodes})
    names.update(*(of_node for of_node, _, _ in of_nodes))
    ranks = factors.Ranks(world.size, width=2 if wire == BF16 else 4)
    if hosts > 1:
        bandwidth = min(bandwidth for _, bandwidth, _ in of_nodes) * hosts / world.size
        ranks = ranks._replace(hosts=hosts, bandwidth=bandwidth)
        log.info("Between hosts each GPU is taken to have %.3g GB/s", bandwidth / 1e9)
    plain = root.param.iter_size == 1 and not root.param.debug_info
    found = {}
    if len(names) == 1 and plain and root.iterations.step.gradients_untouched:
        found = factors.factored(root.net, ranks, root.device.math_mode.precision)
    chosen = [(number, layer.rows) for number, layer in found.items()]
    if any(other != chosen for other in world.gather(chosen)):
        return ()
    if found:
        log.info(
            "Solvers give each other the factors of the weight gradients of %s, not the gradients",
            ", ".join(layer.param.name for layer in found.values()),
        )
    return found.keys()


def log_wire(root: Solver, way: Choice, world: World, factored: Collection[int]) -> None:
    """Log the bytes of gradients that go between nodes in an iteration."""
    params = root.params
    count = params.diff.size - sum(params.segments[i][1] for i in factored)
    before, now = (
        crossing_bytes(way._replace(wire=wire), world, count, params.metrics.size) / 1e6
        for wire in (FLOAT32, way.wire)
    )
    log.info(
        "Gradients go between nodes as %s: %.6g MB an iteration from each in the mean, not %.6g MB",
        *(way.wire, now, before),
    )


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
        solver.device,
        params.data_with_scale,
        params.reduced_diff,
        parts,
        list(layers.values()),
        params.metrics.size,
    )
