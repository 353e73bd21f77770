"""pycaffe's NCCL: solvers of several threads or processes, each on its own GPU, train as one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import reason_nccl_unavailable
from caffepy.core.errors import DeviceError
from caffepy.device.gpus import import_cupy
from caffepy.layer import Layer
from caffepy.net import Net
from caffepy.parallel.synchronization import flat_params
from caffepy.pycaffe import mode
from caffepy.pycaffe.solver import Solver

_groups: dict[bytes, RankGroup] = {}
_lock = threading.Lock()


def has_nccl() -> bool:
    """True if NCCL is available: CuPy with NCCL 2.10 or later."""
    return reason_nccl_unavailable(gpu=True) is None


class NCCL:
    """Keeps the `caffe.solver_count()` solvers of one `uid` in step; `caffe.solver_rank()` is this.

    They are in other processes after `caffe.set_multiprocess(True)`, else in other threads of this
    one. All make their NCCL at about the same time, then call `bcast`. Data layers that read files
    give each solver its own batches. `solver.add_callback(nccl)` averages gradients, during the
    backward pass if possible. If a solver dies, the others wait forever, so prefer
    `solver.together` or `caffepy train` in new scripts. DeviceError says what is missing.
    """

    def __init__(self, solver: Solver, uid: bytes) -> None:
        if solver._solver.device.kind == "cpu":
            raise DeviceError("NCCL is for GPUs: caffe.set_mode_gpu() before the solver is built")
        _check()
        from caffepy.collectives.nccl import NcclSync

        self.solver = solver
        self._uid = uid
        rank, count = mode.solver_rank(), mode.solver_count()
        if not 0 <= rank < count:
            raise DeviceError(
                f"solver rank {rank} of {count}: caffe.set_solver_count and set_solver_rank go "
                "before this"
            )
        group: RankGroup = _Processes(count)
        if not mode.multiprocess():
            with _lock:
                group = _groups.setdefault(uid, RankGroup(count))
        params = flat_params(solver._solver)
        self.synchronizer = NcclSync(group, rank, lambda value: [value], params, uid)
        group.phase = "idle"
        take_turns(solver._solver.net, rank, count, begun=solver.iter > 0)

    @staticmethod
    def new_uid() -> bytes:
        """Return a new id, which all solvers that train together must get."""
        _check()
        import_cupy()
        from caffepy.collectives.nccl import new_unique_id

        return new_unique_id()

    def bcast(self) -> None:
        """Broadcast the parameters of rank 0; returns when this solver has them."""
        device = self.solver._solver.device
        device.flush()
        with device.scope():
            self.synchronizer.on_start()
        device.synchronize()

    def close(self) -> None:
        """Make the solver train alone again; all solvers must call this."""
        self.solver._solver.synchronize(None)
        self.solver._solver.net.set_forward_mutex(None)
        self.synchronizer.close()
        with _lock:
            _groups.pop(self._uid, None)


def _check() -> None:
    if reason_unavailable := reason_nccl_unavailable(gpu=True):
        raise DeviceError(reason_unavailable)


class _Processes(RankGroup):
    """A group of which this process has one rank: only NCCL waits."""

    def barrier(self, rank: int, name: str = "") -> None:
        """Do nothing."""


def take_turns(net: Net, rank: int, count: int, begun: bool = False) -> None:
    """Make layers that read files give this net every `count`-th batch, from number `rank` on.

    `begun`: the layers have the position that they had in rank 0 after its batch.
    """
    places = {id(layer): i for i, layer in enumerate(net.layers) if layer.reads_files}
    to_skip = dict.fromkeys(places, rank + (count - 1 if begun else 0))

    @contextmanager
    def taken(layer: Layer) -> Iterator[None]:
        with layer.forward_lock:
            if id(layer) in places:
                place = places[id(layer)]
                for _ in range(to_skip[id(layer)]):
                    layer.forward(net.nodes[place].bottoms, net.nodes[place].tops)
                to_skip[id(layer)] = count - 1
            yield

    net.set_forward_mutex(taken)
