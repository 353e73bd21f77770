"""`caffepy test`: the means of a net's outputs over a number of test batches, on one device or
several at once.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from caffepy import ops
from caffepy.collectives.rank_group import DEADLINES, RankGroup, named
from caffepy.collectives.worker_threads import WorkerThreads
from caffepy.commands.devices import choose_for_test
from caffepy.commands.inference import definition, load_all
from caffepy.core.errors import DataError
from caffepy.core.events import Output
from caffepy.data.bad_records import tolerating
from caffepy.device.blob import Array, shape_string
from caffepy.device.device import Device
from caffepy.layer import Layer
from caffepy.layer.python import Python
from caffepy.net import Net
from caffepy.parallel.manager import PATIENCE, quiet
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.report.text import as_json, number, scalars
from caffepy.solver.capture import GraphRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """What a net scored: mean loss and mean outputs (name, values, loss weight) over `iterations`
    batches.
    """

    iterations: int
    loss: float
    outputs: Sequence[Output]

    def table(self) -> str:
        """One line a scalar, as Caffe prints it."""
        return "\n".join(scalars(self.outputs))

    def json(self) -> str:
        """An object with iterations, loss, and outputs by name; an output of several scalars is a
        list of them.

        What is not finite is null.
        """
        outputs = {name: np.asarray(values).tolist() for name, values, _ in self.outputs}
        return as_json({"iterations": self.iterations, "loss": self.loss, "outputs": outputs})


def test(
    model: str,
    weights: Iterable[str],
    *,
    iterations: int = 50,
    max_bad_records: int = 0,
    gpu: str | None = None,
    cpu: int | None = None,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
    deadlines: Mapping[str, float] = DEADLINES,
    last_resort: Callable[[BaseException], object] | None = None,
) -> Score:
    """Run the net of the file `model` in its TEST phase with these trained weights; logs each batch
    as Caffe does.

    `gpu`: the numbers of GPUs, or "all"; `cpu`: so many nets on the CPU. Several devices take the
    batches in turn, from data layers that they share, and give what one would. `precision` on a
    GPU: "fp32", "tf32", "bf16" or "fp16". `deadlines`: see `Group`. So many records of each source
    that cannot be read are passed over: `max_bad_records`. `last_resort` is called with the error
    of another device, in a thread, if the first one does not get on. ConfigError and DataError say
    what is wrong with the net, the weights or the data.
    """
    devices = choose_for_test(gpu, cpu)
    if threads:
        ops.backend(devices[0]).set_num_threads(threads)
    param = definition(model, devices[0], precision=precision, level=level, stages=stages)
    group = RankGroup(len(devices), deadlines)
    with (
        tolerating(max_bad_records),
        _examiners(param, model, weights, devices, group, last_resort) as (root, others),
    ):
        return _run(root, others, iterations)


class Batch(NamedTuple):
    """What a net gave for a batch: its loss, and its outputs in the order of their names."""

    loss: float
    outputs: list[Array]


class _Examiner:
    """A net on a device, which does batches; on a GPU they are replayed where that can be."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self._run = GraphRunner(net, net.device.is_cuda, "The net runs")

    def follow(self, root: Net) -> None:
        """Take this net's parameters."""
        device = self.net.device
        with device.scope():
            for mine, theirs in zip(self.net.params, root.params, strict=True):
                device.upload(root.device.on_host(theirs.data), mine.data)

    def batch(self) -> Batch:
        """Do the next batch; DataError for what a GPU found wrong with it."""
        net = self.net
        with net.device.scope(), net.ops.blas_scope():
            if self._run.can_capture():
                self._run.feed()
                self._run.perform("forward", lambda: net.forward(steps=self._run.computing))
            else:
                net.forward(steps=self._run.eager_steps)
            net.device.check_errors()
            return Batch(net.loss(), [net.blobs[name].host_data.copy() for name in net.outputs])


@contextmanager
def _examiners(
    param: NetParameter,
    path: str,
    weights: Iterable[str],
    devices: Sequence[Device],
    group: RankGroup,
    last_resort: Callable[[BaseException], object] | None,
) -> Iterator[tuple[_Examiner, WorkerThreads[_Examiner]]]:
    """The net on the first device, with these weights, and those on the others, in threads of their
    own.

    Data layers are the first one's: their batches go to one after the other. What ends the block
    ends all.
    """

    def make(rank: int) -> _Examiner:
        net = Net(param, device=devices[rank], path=path, root_net=root.net if rank else None)
        net.set_forward_mutex(partial(_turn, group, rank))
        examiner = _Examiner(net)
        if rank:
            examiner.follow(root.net)
        return examiner

    def within(rank: int) -> AbstractContextManager[object]:
        if group.size == 1:
            return nullcontext()
        from caffepy.device.threads import share  # here, since the package loads numba

        return share(rank, group.size)

    group.join(0)
    root = make(0)
    worker_threads = WorkerThreads(group, make, within)
    group.on_abort(lambda: _see_to(group, last_resort))
    group.hung_ranks = lambda missing: worker_threads.at_work or missing
    try:
        load_all(root.net, weights)
        root.net.device.flush()
        _share(root.net, devices)
        with within(0):
            with quiet():
                worker_threads.start()
                worker_threads.wait_idle()
            group.phase = "test"
            yield root, worker_threads
    except BaseException as error:
        group.abort(0, error)
        raise
    finally:
        left = worker_threads.end(PATIENCE)
        if left:
            log.warning(
                "Still at work when the test ended: %s", ", ".join(f"rank {rank}" for rank in left)
            )
        for rank, examiner in worker_threads.members.items():
            if rank not in left:
                examiner.net.close()
        root.net.close()


@contextmanager
def _turn(group: RankGroup, rank: int, layer: Layer) -> Iterator[None]:
    with group.round_robin(rank, layer), layer.forward_lock:
        yield


def _share(net: Net, devices: Sequence[Device]) -> None:
    """Let the net's data layers serve all devices."""
    if len(devices) == 1:
        return
    for layer in net.shared_layers:
        layer.serve(devices)
    for node in net.nodes:
        layer = node.layer
        if isinstance(layer, Python) and not node.bottoms and not layer.share_in_parallel:
            log.warning(
                'Each device has a layer "%s" of its own, which may give what the others give, too; with '
                "share_in_parallel: true in its python_param they share one",
                layer.param.name,
            )


def _see_to(group: RankGroup, last_resort: Callable[[BaseException], object] | None) -> None:
    """See to it that all ends, even if the root is where it does not wait for others."""

    def watch() -> None:
        failure = group.wait_failure()
        assert failure
        if not group.root_informed(PATIENCE) and last_resort:
            last_resort(named(*failure))

    threading.Thread(target=watch, name="caffepy watch", daemon=True).start()


class _Sums:
    """Adds up batches in their order, whatever the order in which they come, and logs them as Caffe
    does.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._waiting: dict[int, Batch] = {}
        self._done = 0
        self._lock = threading.Lock()
        self.loss = 0.0
        self.outputs: list[Array] = []  # in double precision

    def take(self, number: int, batch: Batch) -> None:
        """Batch `number`, counted from 0; DataError if the shape of an output is not that of the
        first batch.
        """
        with self._lock:
            self._waiting[number] = batch
            while self._done in self._waiting:
                self._add(self._waiting.pop(self._done))
                self._done += 1

    def _add(self, batch: Batch) -> None:
        self.outputs = self.outputs or [np.zeros(values.shape) for values in batch.outputs]
        self.loss += batch.loss
        for name, total, values in zip(self._names, self.outputs, batch.outputs, strict=True):
            if values.shape != total.shape:
                raise DataError(
                    f'output "{name}" changed its shape between batches, from {shape_string(total.shape)} to '
                    f"{shape_string(values.shape)}, so there is no mean"
                )
            total += values
            for value in values.reshape(-1):
                log.info("Batch %d, %s = %s", self._done, name, number(value))


def _run(root: _Examiner, others: WorkerThreads[_Examiner], iterations: int) -> Score:
    log.info("Running for %d iterations.", iterations)
    sums, size = _Sums(root.net.outputs), others.group.size

    def do(examiner: _Examiner, k: int) -> None:
        sums.take(k, examiner.batch())

    for first in range(0, iterations, size):
        for k in range(first + 1, min(first + size, iterations)):
            others.give(partial(do, k=k), k % size)
        do(root, first)
    others.wait_idle()
    loss_weights = root.net.blob_loss_weights
    outputs = [
        (name, (total / iterations).astype(np.float32), loss_weights[name])
        for name, total in zip(root.net.outputs, sums.outputs, strict=True)
    ]
    log.info("Loss: %s", number(sums.loss / iterations))
    for line in scalars(outputs):
        log.info(line)
    return Score(iterations, sums.loss / iterations, outputs)
