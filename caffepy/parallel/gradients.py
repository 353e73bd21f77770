"""The flat parameters and gradients of a solver as synchronizers take them."""

import logging
from collections.abc import Collection, Sequence

from caffepy.collectives import factors
from caffepy.collectives.buckets import Bucket, buckets
from caffepy.collectives.synchronizer import FlatParams
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.net.gradients import adders, large_products
from caffepy.solver import Solver

log = logging.getLogger(__name__)


def choose_factored(root: Solver, devices: Sequence[Device]) -> Collection[int]:
    """Return the parameters of whose gradients the ranks exchange factors through NCCL; log them.

    Each rank computes the gradient itself, so all GPUs must be of one kind to get the same result,
    and nothing may change or show gradients before that.
    """
    names = {device.name for device in devices if isinstance(device, CudaDevice)}
    plain = root.param.iter_size == 1 and not root.param.debug_info
    if len(names) != 1 or not plain or not root.iterations.step.gradients_untouched:
        return ()
    found = factors.factored(root.net, len(devices), root.device.math_mode.precision)
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
