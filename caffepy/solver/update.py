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
from caffepy.ops.update_state import Number, Segments
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


@dataclass(frozen=True)
class Rule:
    """An update rule: the function of `caffepy.ops`, the number of its history arrays, and the
    fields of the solver that it takes.

    `problems` returns wrong settings (field, reason), `never_negative` lists the histories that sum
    or average squares. With `corrected` the function takes Adam's bias correction, too.
    """

    function: str
    histories: int
    fields: tuple[str, ...]
    problems: Callable[[SolverParameter], Iterator[tuple[str, str]]] = _no_problems
    never_negative: tuple[int, ...] = ()
    corrected: bool = False

    def apply(self, ops: Ops, u: Update) -> None:
        """Update w and history in place."""
        settings = [getattr(u.param, field) for field in self.fields]
        if self.corrected:
            settings.append(u.correction)
        getattr(ops, self.function)(u.w, u.g, *u.history, u.segments, *settings)

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


rules: Registry[Rule] = Registry("solver type")
rules("SGD")(Rule("sgd_update", 1, ("momentum",)))
rules("Nesterov")(Rule("nesterov_update", 1, ("momentum",)))
rules("AdaGrad")(Rule("adagrad_update", 1, ("delta",), _without_momentum, (0,)))
rules("RMSProp")(Rule("rmsprop_update", 1, ("rms_decay", "delta"), _without_momentum, (0,)))
rules("AdaDelta")(Rule("adadelta_update", 2, ("momentum", "delta"), never_negative=(0, 1)))
MEANS = ("momentum", "momentum2", "delta")
rules("Adam")(Rule("adam_update", 2, MEANS, _means_below_one, never_negative=(1,), corrected=True))
