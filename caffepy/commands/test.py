"""`caffepy test`: mean outputs of a net over a number of test batches, on one device or several, of
one node or several.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from caffepy import ops
from caffepy.collectives.rank_group import DEADLINES, RankGroup
from caffepy.collectives.world import World
from caffepy.commands.devices import choose_for_test
from caffepy.commands.inference import checked, definition, load_all
from caffepy.commands.nodes import gpus_of_process, nodes, threads_of_process
from caffepy.core import coco
from caffepy.core.average_precision import COCO, VERSIONS, mean_average_precision
from caffepy.core.errors import CaffeError, ConfigError, DataError, UsageError
from caffepy.core.events import Output
from caffepy.core.files import locate
from caffepy.data.decoders import THREADS, decoding
from caffepy.data.loader import tolerating
from caffepy.device.blob import Array, shape_string
from caffepy.device.device import Device
from caffepy.layer.hdf5_data import HDF5Output
from caffepy.net import Net
from caffepy.parallel.nodes import check_alike, check_data, send_from_first
from caffepy.parallel.turns import Turns
from caffepy.parallel.workers import Workers
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import format as format_text
from caffepy.proto.text import read_solver
from caffepy.report.text import as_json, number, scalars
from caffepy.solver.capture import GraphRunner
from caffepy.solver.test_pass import evaluations

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Mean loss and mean outputs (name, values, loss weight) of a net over `iterations` batches;
    COCO's figures of detections, by the name of their output, if they were asked for; how their
    precision is averaged, if there are detections, and who says so.
    """

    iterations: int
    loss: float
    outputs: Sequence[Output]
    coco: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    ap_version: str = ""
    ap_version_of: str = ""

    def table(self) -> str:
        """Return one line a scalar, as Caffe prints it, and one for the version of precision."""
        lines = list(scalars(self.outputs))
        if self.ap_version:
            lines.append(f"average precision: {self.ap_version} ({self.ap_version_of})")
        return "\n".join(lines)

    def json(self) -> str:
        """Return iterations, loss, and outputs by name as an object, and `ap_version` and `coco` if
        there are any; values not finite are null.
        """
        outputs = {name: np.asarray(values).tolist() for name, values, _ in self.outputs}
        content = {"iterations": self.iterations, "loss": self.loss, "outputs": outputs}
        more = {"ap_version": self.ap_version, "coco": self.coco}
        return as_json(content | {name: value for name, value in more.items() if value})


def test(
    model: str,
    weights: Iterable[str],
    *,
    iterations: int = 50,
    max_bad_records: int = 0,
    decode: str = THREADS,
    gpu: str | None = None,
    cpu: int | None = None,
    precision: str | None = None,
    ap_version: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
    deadlines: Mapping[str, float] = DEADLINES,
    last_resort: Callable[[BaseException], object] | None = None,
) -> Score:
    """Run the net of the file `model` in its TEST phase with trained weights; log as Caffe does.

    gpu: numbers of GPUs, or "all"; cpu: number of nets on the CPU. Several devices, and the nodes
        that mpirun or srun started, take the batches in turn, from data layers that devices of a
        node share; the result is that of one device.
    precision: on a GPU "fp32", "tf32", "bf16" or "fp16".
    ap_version: how the precision of detections is averaged, see `average_precision.VERSIONS`; None:
        as a solver.prototxt beside the net's file says that names it, or "Integral".
    max_bad_records: number of unreadable records of each source that are skipped.
    decode: what decodes images: "threads", "processes" (one for each thread) or "gpu".
    deadlines: see `RankGroup`.
    last_resort: is called with the error of another device, in a thread, if the first one hangs.

    ConfigError and DataError say what is wrong with the net, the weights or the data.
    """
    if iterations < 1:
        raise UsageError(f"the number of iterations must be 1 or more, not {iterations}")
    version, said_by = (ap_version, "--ap-version") if ap_version else version_beside(model)
    with nodes() as world, tolerating(max_bad_records), decoding(decode):
        devices = choose_for_test(gpus_of_process(gpu, world), cpu)
        _set_up(devices[0], threads, world)
        files = checked(weights) if devices[0].writes_files else []
        param = definition(model, devices[0], precision=precision, level=level, stages=stages)
        if world:
            _meet(world, param, iterations, devices)

        def make(rank: int) -> EvalWorker:
            net = Net(param, device=devices[rank], path=model, root_net=root.net if rank else None)
            turns.share(net, rank, batches=iterations)
            if rank:
                _copy_params(root.net, net)
            return EvalWorker(net, version, alone=len(devices) == 1 and not world)

        workers = Workers(devices, make, deadlines, last_resort=last_resort, world=world)
        turns = Turns(workers.group, devices)
        workers.group.join(0)
        root, failed = make(0), True
        try:
            workers.group.watch_nodes()
            load_all(root.net, files)
            if world:
                _follow_first(root.net, workers.group, model)
            root.net.device.flush()
            with workers.cpu_share(0):
                with workers.starting():
                    pass
                workers.group.phase = "test"
                score = _run(root, workers, iterations, version)
            workers.group.leave_nodes()
            failed = False
            if root.evaluations:
                score = replace(score, ap_version=version, ap_version_of=said_by)
                log.info("Average precision: %s (%s)", version, said_by)
            return score
        except BaseException as error:
            workers.abort(error)
            raise
        finally:
            workers.end(failed)
            root.close()


def _set_up(device: Device, threads: int | None, world: World | None) -> None:
    """Set the number of threads; let only the first node write files."""
    if world and not threads:
        threads = threads_of_process(world)
    if threads:
        ops.backend(device).set_num_threads(threads)
    device.writes_files = world is None or world.node == 0


def _meet(world: World, param: NetParameter, iterations: int, devices: Sequence[Device]) -> None:
    """Compare what the nodes were given, and count their devices."""
    alike = {
        "net": format_text(param),
        "number of iterations": iterations,
        "kind of device": devices[0].kind,
        "precision": devices[0].math_mode.precision,
    }
    check_alike(world, alike)
    world.join(len(devices))


def _copy_params(source: Net, target: Net) -> None:
    """Copy the parameters of a net to one of the same definition on another device."""
    with target.device.scope():
        for theirs, mine in zip(source.params, target.params, strict=True):
            target.device.upload(source.device.on_host(theirs.data), mine.data)


def version_beside(model: str) -> tuple[str, str]:
    """Return the ap_version of the solver.prototxt beside a net's file, if that names it, else
    SSD's default; and who says so.
    """
    path = os.path.join(os.path.dirname(model), "solver.prototxt")
    with suppress(CaffeError, OSError):
        param = read_solver(path)
        files = [locate(name, path) for name in (param.net, param.train_net, *param.test_net)]
        named = any(os.path.exists(name) and os.path.samefile(name, model) for name in files)
        if named and param.ap_version in VERSIONS:
            return param.ap_version, f"as {path} says"
    return VERSIONS[0], "unless --ap-version says another"


def _follow_first(net: Net, group: RankGroup, path: str) -> None:
    """Copy the parameters and the state of data layers of the first node's net to those of the
    others.
    """
    if any(isinstance(layer, HDF5Output) for layer in net.layers):
        raise ConfigError("an HDF5Output layer writes the batches of one process: start one", path)
    check_data([net], net.device, group)
    device, layers = net.device, net.shared_layers
    with device.scope(), group.among_nodes() as world:
        for param in net.params:
            send_from_first(param.data, device, world)
        states = world.broadcast([layer.state() for layer in layers])
        if world.node:
            for layer, state in zip(layers, states, strict=True):
                layer.set_state(state)


Batch = tuple[float, list[Array]]
"""Loss and outputs of a net for a batch, in the order of `Net.outputs`."""


class EvalWorker:
    """A net on a device that runs test batches, on a GPU as CUDA graphs if they can be captured."""

    def __init__(self, net: Net, ap_version: str, alone: bool) -> None:
        self.net, self.evaluations = net, evaluations(net, ap_version, sizes=alone)
        self._run = GraphRunner(net, True, "The net runs")

    def batch(self) -> Batch:
        """Run the next batch; DataError for what a GPU found wrong with it."""
        net = self.net
        with net.device.scope(), net.ops.blas_scope():
            self._run.forward()
            net.device.check_errors()
            rows = self.evaluations
            return net.loss(), [
                rows[name].rows() if name in rows else net.blobs[name].host_data.copy()
                for name in net.outputs
            ]

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        self.net.close()


class _Totals:
    """Sums over the batches of a node, which have these numbers. They are added and logged in that
    order, whichever comes first, so that the sums are those of one device to the last bit. Rows of
    the `evaluations`, outputs of DetectionEvaluate, follow each other instead.
    """

    def __init__(
        self, names: Sequence[str], evaluations: Collection[str], numbers: Iterable[int]
    ) -> None:
        self.names, self.evaluations = names, evaluations
        self._waiting: dict[int, Batch] = {}
        self._left = deque(numbers)
        self._lock = threading.Lock()
        self.loss = 0.0
        self.outputs: list[Array] = []  # in double precision

    def add(self, index: int, added: Batch) -> None:
        """Add the batch of this number; DataError if an output has changed its shape."""
        with self._lock:
            self._waiting[index] = added
            while self._left and (batch := self._waiting.pop(self._left[0], None)):
                self.plus(*batch)
                done = self._left.popleft()
                for name, values in zip(self.names, batch[1], strict=True):
                    for value in values.reshape(-1) if name not in self.evaluations else ():
                        log.info("Batch %d, %s = %s", done, name, number(value))

    def plus(self, loss: float, outputs: Sequence[Array]) -> None:
        """Add a batch, or the sums of another node; DataError if shapes differ."""
        self.loss += loss
        self.outputs = self.outputs or [
            np.zeros((0, values.shape[1]) if name in self.evaluations else values.shape)
            for name, values in zip(self.names, outputs, strict=True)
        ]
        for k, (name, total, x) in enumerate(zip(self.names, self.outputs, outputs, strict=True)):
            if name in self.evaluations:
                self.outputs[k] = np.concatenate([total, x])
                continue
            if x.shape != total.shape:
                raise DataError(
                    f'output "{name}" changed its shape between batches, from '
                    f"{shape_string(total.shape)} to {shape_string(x.shape)}, so there is no mean"
                )
            total += x


def _run(root: EvalWorker, workers: Workers[EvalWorker], iterations: int, ap_version: str) -> Score:
    """Run batch b on universal rank b mod N, for all b; return the means of all."""
    log.info("Running for %d iterations.", iterations)
    group, world = workers.group, workers.group.world
    rounds = range(world.first_rank, iterations, world.size)
    mine = [range(first, min(first + group.size, iterations)) for first in rounds]
    names = root.net.outputs, root.evaluations
    totals = _Totals(*names, (k for of_round in mine for k in of_round))

    def run(worker: EvalWorker, k: int) -> None:
        totals.add(k, worker.batch())

    for first, *others in mine:
        for rank, k in enumerate(others, start=1):
            workers.threads.submit(partial(run, k=k), rank)
        group.check(0)
        run(root, first)
    workers.threads.wait_idle()
    if world.nodes > 1:
        totals = _of_all_nodes(totals, group)
    loss_weights = root.net.blob_loss_weights
    outputs, of_coco = list[Output](), dict[str, dict[str, float | None]]()
    for name, total in zip(root.net.outputs, totals.outputs, strict=True):
        mean = total / iterations
        if name in totals.evaluations:
            if ap_version == COCO:
                of_coco[name] = coco.summarize(total)
            mean = np.asarray(mean_average_precision(total, ap_version, show=True))
        outputs.append((name, mean.astype(np.float32), loss_weights[name]))
    log.info("Loss: %s", number(totals.loss / iterations))
    for line in scalars(outputs):
        log.info(line)
    return Score(iterations, totals.loss / iterations, outputs, of_coco)


def _of_all_nodes(own: _Totals, group: RankGroup) -> _Totals:
    """Return the sums of the nodes' totals, in the order of the nodes."""
    with group.among_nodes() as world:
        of_nodes = world.gather((own.loss, own.outputs))
    totals = _Totals(own.names, own.evaluations, ())
    for loss, outputs in of_nodes:
        if outputs:  # a node may have had no batch
            totals.plus(loss, outputs)
    return totals
