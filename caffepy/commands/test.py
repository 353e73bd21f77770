"""`caffepy test`: mean outputs of a net over a number of test batches, on one device or several."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from caffepy import ops
from caffepy.collectives.rank_group import DEADLINES
from caffepy.commands.devices import choose_for_test
from caffepy.commands.inference import checked, definition, load_all
from caffepy.core.errors import DataError
from caffepy.core.events import Output
from caffepy.data.loader import tolerating
from caffepy.device.blob import Array, shape_string
from caffepy.net import Net
from caffepy.parallel.turns import Turns
from caffepy.parallel.workers import Workers
from caffepy.report.text import as_json, number, scalars
from caffepy.solver.capture import GraphRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Mean loss and mean outputs (name, values, loss weight) of a net over `iterations` batches."""

    iterations: int
    loss: float
    outputs: Sequence[Output]

    def table(self) -> str:
        """Return one line a scalar, as Caffe prints it."""
        return "\n".join(scalars(self.outputs))

    def json(self) -> str:
        """Return iterations, loss, and outputs by name as an object; values not finite are null."""
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
    """Run the net of the file `model` in its TEST phase with trained weights; log as Caffe does.

    gpu: numbers of GPUs, or "all"; cpu: number of nets on the CPU. Several devices take the batches
        in turn, from data layers that they share; the result is that of one device.
    precision: on a GPU "fp32", "tf32", "bf16" or "fp16".
    max_bad_records: number of unreadable records of each source that are skipped.
    deadlines: see `RankGroup`.
    last_resort: is called with the error of another device, in a thread, if the first one hangs.

    ConfigError and DataError say what is wrong with the net, the weights or the data.
    """
    devices = choose_for_test(gpu, cpu)
    weights = checked(weights)
    if threads:
        ops.backend(devices[0]).set_num_threads(threads)
    param = definition(model, devices[0], precision=precision, level=level, stages=stages)

    def make(rank: int) -> EvalWorker:
        net = Net(param, device=devices[rank], path=model, root_net=root.net if rank else None)
        turns.share(net, rank)
        worker = EvalWorker(net)
        if rank:
            with net.device.scope():
                for mine, theirs in zip(net.params, root.net.params, strict=True):
                    net.device.upload(root.net.device.on_host(theirs.data), mine.data)
        return worker

    workers = Workers(devices, make, deadlines, last_resort=last_resort)
    turns = Turns(workers.group, devices)
    with tolerating(max_bad_records):
        workers.group.join(0)
        root, failed = make(0), True
        try:
            load_all(root.net, weights)
            root.net.device.flush()
            with workers.cpu_share(0):
                with workers.starting():
                    pass
                workers.group.phase = "test"
                score = _run(root, workers, iterations)
            failed = False
            return score
        except BaseException as error:
            workers.abort(error)
            raise
        finally:
            workers.end(failed)
            root.close()


Batch = tuple[float, list[Array]]
"""Loss and outputs of a net for a batch, in the order of `Net.outputs`."""


class EvalWorker:
    """A net on a device that runs test batches, on a GPU as CUDA graphs if they can be captured."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self._run = GraphRunner(net, net.device.is_cuda, "The net runs")

    def batch(self) -> Batch:
        """Run the next batch; DataError for what a GPU found wrong with it."""
        net = self.net
        with net.device.scope(), net.ops.blas_scope():
            self._run.forward()
            net.device.check_errors()
            return net.loss(), [net.blobs[name].host_data.copy() for name in net.outputs]

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        self.net.close()


class _Totals:
    """Sums over batches, added and logged in the order of the batches, whichever comes first.

    So the sums are those of one device to the last bit.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._waiting: dict[int, Batch] = {}
        self._done = 0
        self._lock = threading.Lock()
        self.loss = 0.0
        self.outputs: list[Array] = []  # in double precision

    def add(self, index: int, added: Batch) -> None:
        """Add the batch of this index; DataError if an output has changed its shape."""
        with self._lock:
            self._waiting[index] = added
            while batch := self._waiting.pop(self._done, None):
                loss, outputs = batch
                self.outputs = self.outputs or [np.zeros(values.shape) for values in outputs]
                self.loss += loss
                for name, total, x in zip(self._names, self.outputs, outputs, strict=True):
                    if x.shape != total.shape:
                        raise DataError(
                            f'output "{name}" changed its shape between batches, from '
                            f"{shape_string(total.shape)} to {shape_string(x.shape)}, so there is "
                            "no mean"
                        )
                    total += x
                    for value in x.reshape(-1):
                        log.info("Batch %d, %s = %s", self._done, name, number(value))
                self._done += 1


def _run(root: EvalWorker, workers: Workers[EvalWorker], iterations: int) -> Score:
    log.info("Running for %d iterations.", iterations)
    totals, size = _Totals(root.net.outputs), workers.group.size

    def run(worker: EvalWorker, k: int) -> None:
        totals.add(k, worker.batch())

    for first in range(0, iterations, size):
        for k in range(first + 1, min(first + size, iterations)):
            workers.threads.give(partial(run, k=k), k % size)
        run(root, first)
    workers.threads.wait_idle()
    loss_weights = root.net.blob_loss_weights
    count = iterations or math.nan
    outputs = [
        (name, (total / count).astype(np.float32), loss_weights[name])
        for name, total in zip(root.net.outputs, totals.outputs, strict=iterations > 0)
    ]
    log.info("Loss: %s", number(totals.loss / count))
    for line in scalars(outputs):
        log.info(line)
    return Score(iterations, totals.loss / count, outputs)
