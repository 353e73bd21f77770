"""Update rules, by the `type` of a solver: each turns the gradient in a flat diff array into an
update of the data.

A rule writes w and its history in place and leaves in g what it subtracted from w; the formulas are
in the functions of `caffepy.ops`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

from caffepy.core.registry import Registry
from caffepy.device.blob import Array
from caffepy.ops.protocol import Ops
from caffepy.ops.segments import Number, Segments
from caffepy.proto.caffe_pb2 import SolverParameter


@dataclass
class Update:
    """One update: the flat arrays, their segments with rate and decay, the bias correction."""

    param: SolverParameter
    w: Array
    g: Array
    history: list[Array]
    segments: Segments
    correction: Number = 1.0


def _no_problems(param: SolverParameter) -> Iterator[tuple[str, str]]:
    yield from ()


def _no_correction(param: SolverParameter, iteration: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Rule:
    """An update rule and the number of its history arrays.

    `problems` returns wrong settings (field, reason), `never_negative` lists the histories that sum
    or average squares, `correction` is the bias correction of an iteration.
    """

    histories: int
    apply: Callable[[Ops, Update], None]
    problems: Callable[[SolverParameter], Iterator[tuple[str, str]]] = _no_problems
    never_negative: tuple[int, ...] = ()
    correction: Callable[[SolverParameter, int], float] = _no_correction


def _sgd(ops: Ops, u: Update) -> None:
    ops.sgd_update(u.w, u.g, u.history[0], u.segments, u.param.momentum)


def _nesterov(ops: Ops, u: Update) -> None:
    ops.nesterov_update(u.w, u.g, u.history[0], u.segments, u.param.momentum)


def _adagrad(ops: Ops, u: Update) -> None:
    ops.adagrad_update(u.w, u.g, u.history[0], u.segments, u.param.delta)


def _rmsprop(ops: Ops, u: Update) -> None:
    ops.rmsprop_update(u.w, u.g, u.history[0], u.segments, u.param.rms_decay, u.param.delta)


def _adadelta(ops: Ops, u: Update) -> None:
    h, v = u.history
    ops.adadelta_update(u.w, u.g, h, v, u.segments, u.param.momentum, u.param.delta)


def _adam(ops: Ops, u: Update) -> None:
    m, v = u.history
    p = u.param
    ops.adam_update(u.w, u.g, m, v, u.segments, p.momentum, p.momentum2, p.delta, u.correction)


def _adam_correction(param: SolverParameter, iteration: int) -> float:
    """Return Adam's bias correction, sqrt(1 - b2^t) / (1 - b1^t), t = iteration + 1."""
    t = iteration + 1
    return float(sqrt(1 - param.momentum2**t) / (1 - param.momentum**t))


def _without_momentum(param: SolverParameter) -> Iterator[tuple[str, str]]:
    if param.momentum:
        yield "momentum", f"momentum cannot be used with {param.type}; remove it or set it to 0"
    if param.type == "RMSProp" and not 0 <= param.rms_decay < 1:
        yield "rms_decay", f"rms_decay must lie in [0, 1), not at {param.rms_decay:g}"


def _means_below_one(param: SolverParameter) -> Iterator[tuple[str, str]]:
    for field in ("momentum", "momentum2"):
        value = getattr(param, field)
        if not 0 <= value < 1:
            yield field, f"{field} must lie in [0, 1) for Adam, not at {value:g}"


rules: Registry[Rule] = Registry("solver type")
rules("SGD")(Rule(1, _sgd))
rules("Nesterov")(Rule(1, _nesterov))
rules("AdaGrad")(Rule(1, _adagrad, _without_momentum, never_negative=(0,)))
rules("RMSProp")(Rule(1, _rmsprop, _without_momentum, never_negative=(0,)))
rules("AdaDelta")(Rule(2, _adadelta, never_negative=(0, 1)))
rules("Adam")(Rule(2, _adam, _means_below_one, never_negative=(1,), correction=_adam_correction))
