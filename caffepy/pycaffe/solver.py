"""pycaffe's solvers: built from a solver file, stepped from Python."""

import os
from typing import Any, ClassVar

from caffepy.proto import text
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.pycaffe import mode
from caffepy.pycaffe.net import Net
from caffepy.report import LogReporter
from caffepy.solver import Solver as Inner


class Solver:
    """A solver of the type that its file names; `get_solver` makes one."""

    def __init__(self, solver_file: str | os.PathLike[str], type: str | None = None) -> None:
        path = os.fspath(solver_file)
        param = text.read_solver(path)
        if type is not None:
            param.type = type
        device = mode.new_device()
        self._solver = Inner(param, device=device, path=path, reporter=LogReporter())
        self._net = Net.of(self._solver.net)
        self._test_nets = [Net.of(net) for net in self._solver.test_nets]

    @property
    def net(self) -> Net:
        """The training net."""
        return self._net

    @property
    def test_nets(self) -> list[Net]:
        """The test nets."""
        return self._test_nets

    @property
    def iter(self) -> int:
        """Completed iterations."""
        return self._solver.iter

    @property
    def lr(self) -> float:
        """The learning rate of the next iteration."""
        return self._solver.rate()

    @property
    def param(self) -> SolverParameter:
        """The solver's parameters."""
        return self._solver.param

    @property
    def capture(self) -> bool:
        """Whether a GPU records the training step and replays it; a callback set by `add_callback` prevents it."""
        return self._solver.capture

    @capture.setter
    def capture(self, capture: bool) -> None:
        self._solver.capture = capture

    @property
    def fuse(self) -> bool:
        """Whether a GPU computes layers together where it can."""
        return self._solver.fuse

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        self._solver.fuse = fuse

    def step(self, iterations: int) -> None:
        """Train for this many iterations."""
        self._solver.step(iterations)

    def solve(self, state_file: str | os.PathLike[str] | None = None) -> None:
        """Train to max_iter, from the state in `state_file` if given."""
        self._solver.solve(None if state_file is None else os.fspath(state_file))

    def restore(self, state_file: str | os.PathLike[str]) -> None:
        """Go on from a solver state (binary or HDF5) and the weights it names."""
        self._solver.restore(os.fspath(state_file))

    def snapshot(self) -> None:
        """Write weights and state."""
        self._solver.snapshot()

    def share_weights(self, net: Net) -> None:
        """Make `net` use the training net's parameter data."""
        net.share_with(self._net)

    def apply_update(self) -> None:
        """Update the parameters from their diffs."""
        self._solver.apply_update()

    def add_callback(self, on_start: Any, on_gradients_ready: Any) -> None:
        """Call `on_start()` before and `on_gradients_ready()` after each iteration's forward and backward passes."""
        self._solver.add_callback(_Callback(on_start, on_gradients_ready))


class _Callback:
    def __init__(self, on_start: Any, on_gradients_ready: Any) -> None:
        self.on_start = on_start
        self.on_gradients_ready = on_gradients_ready


class _Typed(Solver):
    """A solver of one type, whatever `type` the file names."""

    kind: ClassVar[str]

    def __init__(self, solver_file: str | os.PathLike[str]) -> None:
        super().__init__(solver_file, self.kind)


class SGDSolver(_Typed):
    """Stochastic gradient descent with momentum."""

    kind = "SGD"


class NesterovSolver(_Typed):
    """Nesterov's accelerated gradient."""

    kind = "Nesterov"


class AdaGradSolver(_Typed):
    """AdaGrad (Duchi et al. 2011)."""

    kind = "AdaGrad"


class RMSPropSolver(_Typed):
    """RMSProp (Tieleman and Hinton 2012)."""

    kind = "RMSProp"


class AdaDeltaSolver(_Typed):
    """AdaDelta (Zeiler 2012)."""

    kind = "AdaDelta"


class AdamSolver(_Typed):
    """Adam (Kingma and Ba 2015)."""

    kind = "Adam"


def get_solver(solver_file: str | os.PathLike[str]) -> Solver:
    """A solver of the type that the file names."""
    return Solver(solver_file)
