"""pycaffe's NCCL: solvers of several threads or processes, each on its own GPU, train as one."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import reason_nccl_unavailable
from caffepy.core.errors import DeviceError
from caffepy.data.reader import Turn, deal_of
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
    """A callback that keeps the `caffe.solver_count()` solvers of one `uid` in step;
    `caffe.solver_rank()` is this one.

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
        take_turns(solver._solver.net, rank, count)

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
        take_all(self.solver._solver.net)
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


def take_turns(net: Net, rank: int, count: int) -> None:
    """Make layers that read files give this net every `count`-th batch, from number `rank` on.

    They skip the others without decoding them, and stand behind all of a round after it.
    """
    readers = {id(layer) for layer in net.layers if layer.reads_files}
    _serve(net, deal_of(rank, 1, count))

    @contextmanager
    def taken(layer: Layer) -> Iterator[None]:
        with layer.forward_lock:
            if id(layer) in readers:
                layer.begin_turn()
            yield
            if id(layer) in readers:
                layer.end_turn()

    net.set_forward_mutex(taken)


def take_all(net: Net) -> None:
    """Make the layers give this net all batches again."""
    net.set_forward_mutex(None)
    _serve(net)


def _serve(net: Net, deal: Sequence[Turn] | None = None) -> None:
    for layer in net.layers:
        if layer.reads_files:
            layer.serve([net.device], deal)
