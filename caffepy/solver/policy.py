"""Learning-rate policies: functions (param, iteration, step) -> rate. `iteration` counts the
updates done so far.

`step` is the solver's current_step, which `advance` (for "plateau" the module of that name) moves
and snapshots keep; only "step", "multistep" and "plateau" use it. Before the policy, in the first
iterations, comes Intel Caffe's warm-up or NVCaffe's ramp-up; NVCaffe's min_lr is the least rate.
"""

import logging
from collections.abc import Callable
from math import tanh

import numpy as np

from caffepy.core.registry import Registry
from caffepy.proto.caffe_pb2 import SolverParameter

log = logging.getLogger(__name__)

Policy = Callable[[SolverParameter, int, int], float]
policies: Registry[Policy] = Registry("lr_policy")

LARGEST = float(np.finfo(np.float32).max)

FIELDS = {
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power", "max_iter"),
    "sigmoid": ("gamma", "stepsize"),
    "stepdecr": ("gamma", "stepsize"),
    "smoothstep": ("gamma", "stepsize"),
    "plateau": ("gamma", "plateau_winsize"),
    "multifixed": ("stagelr", "stageiter"),
}
"""Fields that each policy reads besides base_lr."""


@policies("fixed")
def fixed(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr."""
    return param.base_lr


@policies("step")
@policies("multistep")
@policies("plateau")
def stepped(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr * gamma^step."""
    return float(param.base_lr * param.gamma**step)


@policies("exp")
def exp(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr * gamma^iteration."""
    return float(param.base_lr * param.gamma**iteration)


@policies("inv")
def inv(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr * (1 + gamma * iteration)^-power."""
    return float(param.base_lr * (1 + param.gamma * iteration) ** -param.power)


@policies("poly")
def poly(param: SolverParameter, iteration: int, step: int) -> float:
    """(base_lr - min_lr) * (1 - iteration / max_iter)^power + min_lr, and min_lr beyond max_iter;
    min_lr, of NVCaffe, is 0 in Caffe.
    """
    left = max(1 - iteration / param.max_iter, 0.0)
    return float((param.base_lr - param.min_lr) * left**param.power + param.min_lr)


@policies("sigmoid")
def sigmoid(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr / (1 + exp(-gamma * (iteration - stepsize)))."""
    return param.base_lr * (1 + tanh(param.gamma * (iteration - param.stepsize) / 2)) / 2


@policies("stepdecr")
def stepdecr(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr * (1 - gamma * floor(iteration / stepsize)), 0 at the least (Cysu's, of Domain guided
    dropout).
    """
    return max(param.base_lr * (1 - param.gamma * (iteration // param.stepsize)), 0.0)


@policies("smoothstep")
def smoothstep(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr * gamma^(iteration / stepsize) (Cysu's)."""
    return float(param.base_lr * param.gamma ** (iteration / param.stepsize))


@policies("multifixed")
def multifixed(param: SolverParameter, iteration: int, step: int) -> float:
    """stagelr[k] of the first k with iteration <= stageiter[k], else the last one (Intel Caffe)."""
    stage = sum(iteration > end for end in param.stageiter)
    return param.stagelr[min(stage, len(param.stagelr) - 1)]


def _beginning(param: SolverParameter, iteration: int) -> float | None:
    """Return the rate while it is led up to base_lr, None after that.

    Intel Caffe: linear from warmup_start_lr, in warmup_iter iterations. NVCaffe: rampup_lr +
    (base_lr - rampup_lr) (iteration / rampup_interval)^2.
    """
    if iteration < param.warmup_iter:
        done, start = iteration / param.warmup_iter, param.warmup_start_lr
        return float(param.base_lr * done + start * (1 - done))
    if iteration < param.rampup_interval:
        done, start = iteration / param.rampup_interval, param.rampup_lr
        return float(start + (param.base_lr - start) * done**2)
    return None


def next_step(param: SolverParameter, iteration: int, step: int) -> int:
    """Return the step counter of this iteration; "multistep" moves by at most one, as in Caffe."""
    if _beginning(param, iteration) is not None:
        return step
    if param.lr_policy == "step":
        return iteration // param.stepsize
    if param.lr_policy == "multistep" and step < len(param.stepvalue):
        return step + (iteration >= param.stepvalue[step])
    return step


def advance(param: SolverParameter, iteration: int, step: int) -> int:
    """Return `next_step`, and log that "multistep" moves."""
    moved = next_step(param, iteration, step)
    if param.lr_policy == "multistep" and moved != step:
        log.info("MultiStep Status: Iteration %d, step = %d", iteration, moved)
    return moved


def _as_float32(value: float) -> float:
    """Round to float32; infinity beyond its range."""
    if abs(value) < LARGEST:
        return float(np.float32(value))
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def rate(param: SolverParameter, iteration: int, step: int, factor: float = 1.0) -> float:
    """Return the learning rate times `factor`, a float32 number as in Caffe; infinity if the
    formula overflows.
    """
    try:
        value = _beginning(param, iteration)
        if value is None:
            value = policies[param.lr_policy](param, iteration, step)
        if param.HasField("min_lr"):
            value = max(value, param.min_lr)
        return _as_float32(factor * value)
    except (OverflowError, ZeroDivisionError):  # the latter: 0 to a negative power
        return float("inf")
