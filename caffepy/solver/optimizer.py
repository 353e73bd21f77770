"""Optimizer: an update rule on the flat parameters of a net, and the history that it keeps."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from caffepy import ops
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.net.node import Param
from caffepy.ops.objects import UpdateState
from caffepy.ops.update_state import Segments
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.params import Params
from caffepy.solver.update import Update, rules


class Optimizer:
    """Updates `params`, whose records are `learnable`, by the rule that `type` names; the numbers
    of an update are those of `state`.

    Numbers in `updated` are those of parameters that layers update themselves in this iteration,
    with the product that is their gradient: `apply` leaves them out.
    """

    def __init__(
        self,
        param: SolverParameter,
        params: Params,
        learnable: Sequence[Param],
        state: UpdateState,
        device: Device,
    ) -> None:
        self.rule = rules[param.type]
        self.updated: list[int] = []
        self._param, self._params, self._state, self._device = param, params, state, device
        with device.scope():
            like = params.data
            self._mean: Any = np.zeros_like(state.scale)  # the scale of a sum over solvers
            self.history: list[Array] = [np.zeros_like(like) for _ in range(self.rule.histories)]
        specs = [each.spec for each in learnable]
        still = [0.0]  # of the one element that `params` has if the net learns nothing
        self._segments = Segments(
            device.on_device(params.ends),
            device.on_device(np.array([s.lr_mult for s in specs] or still, np.float32)),
            device.on_device(np.array([s.decay_mult for s in specs] or still, np.float32)),
            scale=1.0,
            l1=param.regularization_type == "L1",
        )
        self._parts: dict[tuple[int, int], tuple[slice, Segments]] = {}

    def apply(self) -> None:
        """Run the rule on all parameters but the `updated`; `go` of the state may forbid it."""
        flat = [self._params.data, self._params.diff, *self.history]
        for arrays, segments in self._left(flat) if self.updated else [(flat, self._segments)]:
            w, g, *history = arrays
            numbered, correction = self._with_numbers(segments), self._state.correction
            update = Update(self._param, w, g, history, numbered, correction)
            self.rule.apply(ops.backend(self._device), update)

    def divide_sums(self, solvers: int) -> None:
        """Set the scale of gradients that are sums over `solvers`, for `apply_with_product`."""
        scale: Any = self._state.scale
        np.multiply(scale, 1 / solvers, out=self._mean)

    def apply_with_product(self, number: int, a: Array, b: Array, summed: bool = False) -> None:
        """Update the parameter of this number, (R, C), with the gradient a.T @ b; `summed`: it is
        the sum over the solvers of `divide_sums`.
        """
        flat = self._params.data, *self.history
        arrays = [self._params.split(each)[number] for each in flat]
        numbers = self.rule.all_numbers(self._param, self._state.correction)
        segments = self._with_numbers(self._part(number, number + 1)[1])
        if summed:
            segments = segments._replace(scale=self._mean)
        ops.backend(self._device).product_update(self.rule.name, a, b, arrays, segments, numbers)

    def _left(self, flat: Sequence[Array]) -> Iterator[tuple[list[Array], Segments]]:
        """Yield parts of the flat arrays that layers have not updated."""
        first = 0
        for end in (*self.updated, len(self._params.blobs)):
            if first < end:
                place, segments = self._part(first, end)
                yield [array[place] for array in flat], segments
            first = end + 1

    def _part(self, first: int, end: int) -> tuple[slice, Segments]:
        """Return where consecutive parameters lie in the flat arrays, and their segments."""
        if (first, end) not in self._parts:
            start, ends = self._params.segments[first][0], self._params.ends[first:end]
            every, part = self._segments, slice(first, end)
            segments = every._replace(
                ends=self._device.on_device(ends - start),
                rates=every.rates[part],
                decays=every.decays[part],
            )
            self._parts[first, end] = slice(start, int(ends[-1])), segments
        return self._parts[first, end]

    def _with_numbers(self, segments: Segments) -> Segments:
        """Return segments with the numbers of this update."""
        state = self._state
        return segments._replace(scale=state.scale, rate=state.rate, decay=state.decay, go=state.go)
