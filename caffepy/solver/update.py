"""Update rules, by the `type` of a solver: each turns the gradient in a flat diff array into an
update of the data.

A rule writes w and its history in place and leaves in g what it subtracted from w; the formulas are
in `Ops.update_params` of `caffepy.ops`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from caffepy.core.registry import Registry
from caffepy.device.blob import Array
from caffepy.ops.update_state import Number, Segments
from caffepy.proto.caffe_pb2 import SolverParameter

if TYPE_CHECKING:
    from caffepy.ops.protocol.contract import Ops


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


@dataclass(frozen=True)
class Rule:
    """An update rule: its name in `caffepy.ops`, the number of its history arrays, and the numbers
    that it takes.

    `problems` returns wrong settings (field, reason), `never_negative` lists the histories that sum
    or average squares. With `corrected` the rule takes Adam's bias correction, too.
    """

    name: str
    histories: int
    numbers: Callable[[SolverParameter], tuple[float, ...]]
    problems: Callable[[SolverParameter], Iterator[tuple[str, str]]] = _no_problems
    never_negative: tuple[int, ...] = ()
    corrected: bool = False

    def apply(self, ops: "Ops", u: Update) -> None:
        """Update w and history in place."""
        numbers = self.all_numbers(u.param, u.correction)
        ops.update_params(self.name, (u.w, u.g, *u.history), u.segments, numbers)

    def all_numbers(self, param: SolverParameter, correction: Number) -> list[Number]:
        """Return the numbers of a setting, and the bias correction if the rule takes it."""
        return [*self.numbers(param), *([correction] if self.corrected else [])]

    def correction(self, param: SolverParameter, iteration: int) -> float:
        """Return the bias correction, sqrt(1 - b2^t) / (1 - b1^t), t = iteration + 1, or 1."""
        t = iteration + 1
        if not self.corrected:
            return 1.0
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


def _mean_of_squares(param: SolverParameter) -> tuple[float, ...]:
    return param.rms_decay, 1 - param.rms_decay, param.delta


def _means(param: SolverParameter) -> tuple[float, ...]:
    return param.momentum, param.momentum2, param.delta


rules: Registry[Rule] = Registry("solver type")
rules("SGD")(Rule("sgd", 1, lambda p: (p.momentum,)))
rules("Nesterov")(Rule("nesterov", 1, lambda p: (p.momentum,)))
rules("AdaGrad")(Rule("rms", 1, lambda p: (1, 1, p.delta), _without_momentum, (0,)))
rules("RMSProp")(Rule("rms", 1, _mean_of_squares, _without_momentum, (0,)))
rules("AdaDelta")(Rule("adadelta", 2, lambda p: (p.momentum, p.delta), never_negative=(0, 1)))
rules("Adam")(Rule("adam", 2, _means, _means_below_one, never_negative=(1,), corrected=True))
