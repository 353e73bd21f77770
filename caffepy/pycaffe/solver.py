"""pycaffe's solvers: built from a solver file, stepped from Python."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import index
from typing import ClassVar

from caffepy.collectives.world import World
from caffepy.core.errors import ConfigError, UsageError, UserCodeError
from caffepy.core.events import Reporter
from caffepy.core.files import AnyPath
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.nodes import check_alike
from caffepy.parallel.parameter_server.attachment import attached
from caffepy.parallel.parameter_server.cluster import ClusterOptions, options_of_worker, served
from caffepy.parallel.parameter_server.messages import ServerUpdate
from caffepy.parallel.parameter_server.ray_cluster import LOCAL
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.pycaffe import mode, nodes
from caffepy.pycaffe.log import heed_environment
from caffepy.pycaffe.net import Averager, Net, raising_originals
from caffepy.report import LogReporter
from caffepy.solver import Solver as Inner


class Solver:
    """A solver of the type that its file names; `get_solver` makes one.

    In a thread whose `caffe.solver_rank()` is not 0 it is a worker: it has other random numbers,
    and does not test, display or save.
    """

    def __init__(self, solver_file: AnyPath, type: str | None = None) -> None:
        param = _read(solver_file)
        if type is not None:
            param.type = type
        self._build(os.fsdecode(solver_file), param)

    @raising_originals
    def _build(self, path: str, param: SolverParameter) -> None:
        rank, world = mode.solver_rank(), nodes.current()
        if rank and param.random_seed >= 0:
            param.random_seed += rank
        device = mode.new_device(world.first_rank)
        if world.node:
            device.follows, device.writes_files = True, False
            del param.weights[:]  # those of the first node come
        reporter = Reporter() if rank or world.node else LogReporter()
        self._solver = Inner(
            param, device=device, path=path, reporter=reporter, rank=world.first_rank
        )
        if rank:
            param.display = param.snapshot = param.test_interval = 0
            param.debug_info = param.snapshot_after_train = False
        self._at_work = False  # stays True after an error
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
        return self._solver.iterations.rate()

    @property
    def param(self) -> SolverParameter:
        """The solver's parameters."""
        return self._solver.param

    @property
    def capture(self) -> bool:
        """True if a GPU captures the training step as a graph; an `add_callback` prevents it."""
        return self._solver.capture

    @capture.setter
    def capture(self, capture: bool) -> None:
        self._solver.capture = capture

    @property
    def fuse(self) -> bool:
        """True if layers are computed together where possible: blobs between them are not stored.

        By default on a GPU only.
        """
        return self._solver.fuse

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        self._solver.fuse = fuse

    @raising_originals
    def step(self, iterations: int) -> None:
        """Train for this many iterations."""
        iterations = index(iterations)
        self._at_work = True
        self._solver.step(iterations)
        self._at_work = False

    @raising_originals
    def solve(self, state_file: AnyPath | None = None) -> None:
        """Train to max_iter, from the state in `state_file` if given."""
        self._at_work = True
        self._solver.solve(None if state_file is None else os.fsdecode(state_file))
        self._at_work = False

    def restore(self, state_file: AnyPath) -> None:
        """Resume from a solver state (binary or HDF5) and the weights it names."""
        self._solver.restore(os.fsdecode(state_file))

    def snapshot(self) -> None:
        """Write weights and state."""
        self._solver.snapshot()

    def close(self) -> None:
        """Stop the threads of data layers and close their files, so that a script can open them."""
        self._solver.close()

    def share_weights(self, net: Net) -> None:
        """Make `net` use the training net's parameter data."""
        net.share_with(self._net)

    def apply_update(self) -> None:
        """Update the parameters from their diffs."""
        self._solver.apply_update()

    def add_callback(
        self,
        on_start: Callable[[], object] | Averager,
        on_gradients_ready: Callable[[], object] | None = None,
    ) -> None:
        """Call `on_start()` before and `on_gradients_ready()` after each iteration's passes.

        Or, given an NCCL of this solver, average gradients with the other solvers of its group.
        UsageError for anything else.
        """
        synchronizer = getattr(on_start, "synchronizer", None)
        if synchronizer is not None:
            self._solver.synchronize(synchronizer)
        elif callable(on_start) and callable(on_gradients_ready):
            self._solver.add_callback(_Callback(on_start, on_gradients_ready))
        else:
            raise UsageError(
                "add_callback takes two functions, on_start and on_gradients_ready, or an NCCL"
            )

    @contextmanager
    def together(
        self,
        gpus: Sequence[int] = (),
        cpus: int = 0,
        sync: str = "auto",
        world: World | None = None,
    ) -> Iterator[None]:
        """Train on several devices as one solver with a larger batch during the block.

        `with solver.together(gpus=[0, 1, 2, 3]): solver.step(1000)`. The first of `gpus` is the one
        that the solver was built on; `cpus` is the number of solvers on the CPU. `sync`: "auto",
        "nccl", "tree", "muji" or "flat". The other solvers are threads of this process; UsageError,
        DeviceError or SyncError says what is wrong. After an error during an iteration the solver
        cannot continue; a new one can, from a snapshot. Add callbacks that change gradients before
        the block. Between steps, but not in callbacks, a script may run this solver's nets, and
        what it writes to its weights, inputs and `param` reaches the others; BatchNorm's statistics
        stay each solver's.

        `world=caffepy.world(n)`: the solvers of all processes that mpirun started train as one, n
        of this one, from the weights and state of node 0's. All processes do the same in the block,
        and before and after it: what a script writes to weights in one, it writes in all.
        """
        own = self._solver.device
        if own.kind == "cuda" and (
            not gpus or gpus[0] != own.index or len(set(gpus)) < len(gpus) or cpus
        ):
            raise UsageError(
                f"this solver is on GPU {own.index}: give gpus=[{own.index}, ...], each once"
            )
        if own.kind == "cpu" and (gpus or cpus < 1):
            raise UsageError(
                "this solver is on the CPU: give cpus=2 or more, or build it after "
                "caffe.set_mode_gpu()"
            )
        if world:
            self._check_world(world, max(len(gpus), cpus), sync)
        others: list[Device] = [CudaDevice(index) for index in gpus[1:]]
        others += [Device() for _ in range(cpus - 1)]
        self._at_work, outside = False, None  # an error that is raised behind the block
        try:
            with p2p_manager(self._solver, [own, *others], SyncOptions(sync=sync), world=world):
                try:
                    yield
                except BaseException as error:
                    if self._at_work or (world and world.nodes > 1):  # the others are in the block
                        raise
                    outside = error
        except UserCodeError as error:
            outside = error.original
        if outside:
            raise outside

    @contextmanager
    def served(
        self,
        cluster: str = LOCAL,
        workers: int = 2,
        gpus: Sequence[int] = (),
        cpus: int = 1,
        consistency: str = "sync",
        every: int = 1,
        servers: int = 2,
        replicas: int = 2,
        filters: str = "",
        update: str | ServerUpdate = "add",
        name: str = "",
    ) -> Iterator[None]:
        """Train by a parameter server during the block, as `caffepy train --cluster` does.

        `with solver.served(workers=4, consistency="ssp:1", every=5): solver.step(1000)`. This
        solver is worker 0, and begins with its weights; the others are processes of Ray with
        solvers of the same `param`, which train until the block ends or max_iter is reached.
        `cluster`: "local", "auto" or "HOST:PORT"; `gpus`: those of each worker, or those of this
        machine that are dealt to the workers of a local cluster, this solver's first; `cpus`:
        solvers of each worker on the CPU. Several of a worker train in step. After the block this
        solver has the values of the servers. UsageError says which options do not go together.

        `update(values, change, state)`, for "sync" and `every` from 2 on, returns the new values of
        a part of the parameters from the mean change of the workers since the last push; `state` is
        a dict of the part's own, empty at first. Servers must be able to unpickle it.

        With a `name` the servers are those that `caffepy server` has started under it, which go on
        after the block. If they hold a net already, this solver goes on with it, and has its
        iteration.
        """
        device = self._solver.device
        own = device.index if device.kind == "cuda" else None
        if gpus and gpus[0] != own:
            raise UsageError("the first of gpus is the one that the solver was built on")
        if own is not None and cpus != 1:
            raise UsageError("this solver is on a GPU: give gpus, not cpus")
        if cpus < 1:
            raise UsageError(f"{cpus} solvers on the CPU: give 1 or more")
        options = ClusterOptions(
            *(cluster, (workers, workers), consistency, every, servers, replicas, filters, update),
            name=name,
        )
        rule = options.rule()
        numbers = ",".join(map(str, gpus or ([] if own is None else [own])))
        worker = options_of_worker(
            self._solver,
            options,
            gpu=numbers or None,
            precision=device.math_mode.precision if numbers else None,
            threads=options.threads(),
            cpu=cpus,
        )
        others: list[Device] = [CudaDevice(index) for index in options.dealt(gpus)[1:]]
        others += [Device() for _ in range(cpus - 1)]
        with attached(cluster, name, self._solver.path) if name else nullcontext() as attachment:
            if attachment and attachment.held:
                attachment.restore(self._solver, rule)
            with (
                p2p_manager(self._solver, [device, *others], SyncOptions()),
                served(self._solver, options, worker, attachment),
            ):
                yield

    def _check_world(self, world: World, solvers: int, sync: str) -> None:
        """Raise UsageError or ConfigError unless this solver can train with those of all nodes."""
        solver = self._solver
        if solver.device.follows != (world.node > 0):
            raise UsageError("call caffepy.world() before the solver is built, in each process")
        if solvers != world.solvers[world.node]:
            count = world.solvers[world.node]
            raise UsageError(f"caffepy.world({count}) is for {count} solver(s), not {solvers}")
        param = SolverParameter()
        param.CopyFrom(solver.param)
        del param.weights[:]
        settings = {
            "solver": text.format(param),
            "net": text.format(solver.net.param),
            "kind of device": solver.device.kind,
            "precision": solver.device.math_mode.precision,
            "way to synchronize": sync,
        }
        check_alike(world, settings)


def _read(solver_file: AnyPath) -> SolverParameter:
    heed_environment()
    path = os.fsdecode(solver_file)
    if not os.path.isfile(path):
        raise ConfigError(f"Could not open file {path}")
    return text.read_solver(path)


@dataclass
class _Callback:
    on_start: Callable[[], object]
    on_gradients_ready: Callable[[], object]


class _Typed(Solver):
    """A solver of one type, whatever `type` the file names."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind

    def __init__(self, solver_file: AnyPath) -> None:
        super().__init__(solver_file, self.kind)


class SGDSolver(_Typed, kind="SGD"):
    """Stochastic gradient descent with momentum."""


class NesterovSolver(_Typed, kind="Nesterov"):
    """Nesterov's accelerated gradient."""


class AdaGradSolver(_Typed, kind="AdaGrad"):
    """AdaGrad (Duchi et al. 2011)."""


class RMSPropSolver(_Typed, kind="RMSProp"):
    """RMSProp (Tieleman and Hinton 2012)."""


class AdaDeltaSolver(_Typed, kind="AdaDelta"):
    """AdaDelta (Zeiler 2012)."""


class AdamSolver(_Typed, kind="Adam"):
    """Adam (Kingma and Ba 2015)."""


def get_solver(solver_file: AnyPath) -> Solver:
    """Return a solver of the type that the file names."""
    param = _read(solver_file)
    made_by = next((known for known in _Typed.__subclasses__() if known.kind == param.type), Solver)
    solver = made_by.__new__(made_by)
    solver._build(os.fsdecode(solver_file), param)
    return solver
