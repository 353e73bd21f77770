"""WorkerSolver: a solver that follows a root, on its own device, with its share of the batches."""

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.positions import set_positions, take_positions
from caffepy.solver.solver import Solver
from caffepy.solver.test_pass import Totals


class WorkerSolver(Solver):
    """Caffe's WorkerSolver: runs one iteration or test batch a call, shows and saves nothing.

    It starts from the root's state. Layers that are shared in parallel, such as data layers, are
    the root's. Its random numbers continue from `positions`, of a worker of its rank, or start
    anew.
    """

    def __init__(
        self, root: Solver, rank: int, device: Device, positions: dict[str, Any] | None = None
    ) -> None:
        self.rank = rank
        super().__init__(
            _settings(root.param),
            device=device,
            path=root.path,
            rank=rank,
            precision=root.precision,
            root=root,
        )
        self.capture, self.fuse = root.capture, root.fuse
        if root.saves_memory:
            self.save_memory(*root.recompute)
        self.iterations.step.scripts_look = root.iterations.step.scripts_look
        self.loss = 0.0
        self.totals = Totals(0, [], 0.0)
        self.follow(root, positions)

    def follow(self, root: Solver, positions: dict[str, Any] | None) -> None:
        """Copy the root's state; take random numbers from `positions`, if there are any."""
        root.device.flush()
        with self.device.scope():
            for mine, theirs in zip(self.arrays, root.arrays, strict=True):
                self.device.upload(root.device.on_host(theirs), mine)
        of_root = root.iterations
        self.iterations.move_to(root.iter, of_root.current_step, of_root.plateau.state())
        self.iterations.rate_factor = of_root.rate_factor
        self.update_state.set_state(root.update_state.state())
        if positions:
            set_positions(positions, self.iterations.nets, self.device)

    def take(self, param: SolverParameter, edited: Mapping[int, Blob]) -> None:
        """Take over the root's settings and its `edits`."""
        self.wait_idle()
        self.param.CopyFrom(_settings(param))
        blobs = _editable(self)
        with self.device.scope():
            for place, theirs in edited.items():
                blobs[place].reshape_like(theirs)
                blobs[place].host_data[...] = theirs.host_data
            self.device.flush()

    def iterate(self, count: int = 1) -> None:
        """Run an iteration, or enqueue several as one graph."""
        with self.device.scope(), self.net.ops.blas_scope():
            if count == 1:
                self.iterations.run(show=False)
            else:
                self.iterations.enqueue_several(count)

    def forward(self) -> None:
        """Take the root's parameters, run a forward pass of the train net; `loss` is its loss."""
        self._pull()
        self.iterations.hold_positions()
        self.iterations.statistics.hold()
        with self.device.scope(), self.net.ops.blas_scope():
            self.loss = self.iterations.eager.forward(self.iter)
        self.device.step_count += 1
        self.device.check_errors()

    def begin_test(self, k: int) -> None:
        """Take the root's parameters, zero the totals of test net `k`."""
        self.wait_idle()
        self.iterations.hold_positions(anew=False)  # those from before all test nets
        self._test_passes[k].begin(self.net)
        self._pull()

    def _pull(self) -> None:
        """Take the root's parameters, if only that updates them."""
        self.wait_idle()
        with self.device.scope():
            self._step.pull()

    def test_batch(self, k: int) -> None:
        """Run a batch of test net `k`."""
        with self.device.scope(), self.net.ops.blas_scope():
            self._test_passes[k].batch(self.capture)

    def end_test(self, k: int) -> None:
        """End the test of net `k`; `totals` has the sums over its batches."""
        self.totals = self._test_passes[k].totals()
        if k == len(self.test_nets) - 1:
            self.iterations.release_positions()

    def wait_idle(self) -> None:
        """Wait for all enqueued iterations; the phase timer stops until the next one."""
        self.phase_timer.stop()
        with self.device.scope():
            self.iterations.collect(wait=True)

    def positions(self, iteration: int) -> dict[str, Any]:
        """Return the positions of its own layers and random numbers, now or before the test or
        iteration in progress; an iteration that the root has ended counts as done.
        """
        if self.iter < iteration:
            return copy.deepcopy(take_positions(self.iterations.nets, self.device))
        return copy.deepcopy(self.iterations.positions())

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError("Should not be called on worker solver.")

    snapshot = restore = solve = _refuse


def _settings(root: SolverParameter) -> SolverParameter:
    """Return the root's settings as a worker has them, which shows and saves nothing."""
    param = SolverParameter()
    param.CopyFrom(root)
    param.display = param.snapshot = 0
    param.debug_info = param.snapshot_after_train = False
    del param.weights[:]
    return param


def edits(root: Solver) -> dict[int, Blob]:
    """Return the blobs, by place, that a script may have written to since the last step."""
    written = root.device.dirty if root.device.is_cuda else None  # the CPU does not know
    return {
        place: blob
        for place, blob in enumerate(_editable(root))
        if (blob.data_memory.touched if written is None else blob.data_memory in written)
    }


def _editable(solver: Solver) -> list[Blob]:
    """Return the weights, without the running statistics, those of layers that only test nets have,
    and the tops that no layer writes.
    """
    own = {id(blob.data_memory) for layer in solver.net.layers for blob in layer.statistics}
    blobs = [blob for blob in solver.params.blobs if id(blob.data_memory) not in own]
    for net in solver.test_nets:
        blobs += net.params_beyond(solver.net)
    for net in (solver.net, *solver.test_nets):
        for node in net.nodes:
            blobs += node.layer.tops_of_user(node.tops)
    return blobs
