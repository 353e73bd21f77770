"""Learning-rate policies: functions (param, iteration, step) -> rate. `iteration` counts the
updates done so far.

`step` is the solver's current_step, which `advance` moves and snapshots keep; only "step" and
"multistep" use it.
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

FIELDS = {
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power", "max_iter"),
    "sigmoid": ("gamma", "stepsize"),
}
"""Fields that each policy reads besides base_lr."""


@policies("fixed")
def fixed(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr."""
    return param.base_lr


@policies("step")
@policies("multistep")
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
    """base_lr * (1 - iteration / max_iter)^power, and 0 beyond max_iter."""
    return float(param.base_lr * max(1 - iteration / param.max_iter, 0.0) ** param.power)


@policies("sigmoid")
def sigmoid(param: SolverParameter, iteration: int, step: int) -> float:
    """base_lr / (1 + exp(-gamma * (iteration - stepsize)))."""
    return param.base_lr * (1 + tanh(param.gamma * (iteration - param.stepsize) / 2)) / 2


def next_step(param: SolverParameter, iteration: int, step: int) -> int:
    """Return the step counter of this iteration; "multistep" moves by at most one, as in Caffe."""
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


def rate(param: SolverParameter, iteration: int, step: int, factor: float = 1.0) -> float:
    """Return the learning rate times `factor`, a float32 number as in Caffe; infinity if the
    formula overflows.
    """
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(factor * policies[param.lr_policy](param, iteration, step)))
    except (OverflowError, ZeroDivisionError):  # the latter: 0 to a negative power
        return float("inf")
