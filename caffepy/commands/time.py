"""`caffepy time`: the milliseconds of each layer, forward and backward."""

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from caffepy import ops
from caffepy.collectives.world import World
from caffepy.commands.devices import choose_device
from caffepy.commands.nodes import gpus_of_process, nodes, threads_of_process
from caffepy.core.errors import ConfigError, UsageError
from caffepy.data.decoders import THREADS, decoding
from caffepy.layer.base import Layer
from caffepy.models.synthetic import synthetic as without_data
from caffepy.net import Net
from caffepy.parallel.nodes import check_alike
from caffepy.proto.caffe_pb2 import TEST, TRAIN
from caffepy.proto.text import format as format_text
from caffepy.proto.text import read_net
from caffepy.report.text import as_json, number

log = logging.getLogger(__name__)


@dataclass
class LayerTime:
    """Mean milliseconds of one layer."""

    name: str
    type: str
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class NodeTime:
    """Milliseconds of a node's passes, in all."""

    host: str
    total: float


@dataclass(frozen=True)
class Timing:
    """Mean milliseconds of each layer and of whole passes over `iterations` batches.

    `batch` is the number of images of one, 0 if it is unknown. `nodes` are all nodes, if this is
    the timing of one of several.
    """

    layers: Sequence[LayerTime]
    forward: float
    backward: float
    total: float
    iterations: int
    batch: int
    nodes: Sequence[NodeTime] = ()

    @property
    def images_per_s(self) -> float:
        """Images a second, forward and backward."""
        return self.batch * self.iterations / (self.total or math.nan) * 1000

    def table(self) -> str:
        """Return a line a layer: name, type, milliseconds forward and backward, share of both."""
        width = max(len(layer.name) for layer in self.layers)
        kind = max(len(layer.type) for layer in self.layers)
        whole = sum(layer.forward + layer.backward for layer in self.layers) or math.nan
        lines = [f"{'layer':{width}}  {'type':{kind}}  forward ms  backward ms  share"]
        for t in self.layers:
            share = (t.forward + t.backward) / whole
            lines.append(
                f"{t.name:{width}}  {t.type:{kind}}  {t.forward:10.3f}  {t.backward:11.3f}  "
                f"{share:5.1%}"
            )
        lines.append(f"{'all':{width}}  {'':{kind}}  {self.forward:10.3f}  {self.backward:11.3f}")
        if self.batch:
            lines.append(f"{self.images_per_s:.0f} images/s")
        if self.nodes:
            lines.append(self.slowest())
        return "\n".join(lines)

    def slowest(self) -> str:
        """Return which node takes longest, and by how much, as text."""
        totals = [node.total for node in self.nodes]
        slow, fast = totals.index(max(totals)), totals.index(min(totals))
        names = [f"node {i} ({node.host})" for i, node in enumerate(self.nodes)]
        ms = totals[slow] / self.iterations
        more = totals[slow] / (totals[fast] or math.nan) - 1
        return (
            f"the slowest of {len(names)} nodes is {names[slow]}: {ms:.3f} ms an iteration, "
            f"{more:.1%} more than {names[fast]}"
        )

    def json(self) -> str:
        """Return an object of the same fields; times in milliseconds, null for none."""
        return as_json(asdict(self) | {"images_per_s": self.images_per_s})


def time(
    model: str,
    *,
    iterations: int = 50,
    phase: str = "TRAIN",
    gpu: str | None = None,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
    decode: str = THREADS,
    synthetic: bool = False,
    image: Sequence[int] | None = None,
) -> Timing:
    """Time the net of the file `model`, after one pass to warm up; log Caffe's lines.

    `synthetic` replaces data by random images, of the shape `image` (C, H, W) if the net does not
    state it. Times of a GPU, the first of `gpu`, are the device's: each pass is enqueued as a
    whole, so that it waits neither for the host nor between layers. `precision` is "fp32", "tf32",
    "bf16" or "fp16"; `decode` is what decodes images, one of `decoders.WAYS`. The nodes that
    mpirun or srun started each time their own device, all at a time. ConfigError and DataError say
    what is wrong with the net.
    """
    if iterations < 1:
        raise UsageError(f"the number of iterations must be 1 or more, not {iterations}")
    with nodes() as world, decoding(decode):
        if world and not threads:
            threads = threads_of_process(world)
        device = choose_device(gpus_of_process(gpu, world), threads)
        ops.set_precision(device, precision)
        param = read_net(model)
        param.state.phase, param.state.level = TEST if phase == "TEST" else TRAIN, level
        param.state.stage.extend(stages)
        param = without_data(param, image=image) if synthetic else param
        device.writes_files = False
        if world:
            alike = {
                "net": format_text(param),
                "number of iterations": iterations,
                "kind of device": device.kind,
                "precision": device.math_mode.precision,
            }
            check_alike(world, alike)
        with closing(Net(param, device=device, path=model)) as net:
            if not net.layers:
                raise ConfigError(f"the net has no layers in the {phase} phase", model)
            timing = _time(net, iterations)
        return _beside_others(timing, world) if world else timing


def _beside_others(timing: Timing, world: World) -> Timing:
    """Return a node's timing with the totals of all."""
    totals = world.gather(timing.total)
    each = [NodeTime(*both) for both in zip(world.hosts, totals, strict=True)]
    timing = replace(timing, nodes=each)
    log.info("%s", timing.slowest())
    return timing


def _time(net: Net, iterations: int) -> Timing:
    layers = [LayerTime(node.name, node.layer.type) for node in net.nodes]
    for node in net.nodes:
        node.need_backward = type(node.layer).backward is not Layer.backward  # as in Caffe: all
    with net.device.scope(), net.ops.blas_scope():
        watch = net.ops.Stopwatch()
        log.info("Performing Forward")
        net.forward()
        log.info("Initial loss: %s", number(net.loss()))
        log.info("Performing Backward")
        net.backward()
        net.device.synchronize()
        begin = perf_counter()
        _pass(net, watch, 0)
        host = (perf_counter() - begin) * 1000
        watch.read()
        log.info("*** Benchmark begins ***")
        log.info("Testing for %d iterations.", iterations)
        forward = backward = 0.0
        for j in range(iterations):
            _pass(net, watch, host)
            times = watch.read()
            ahead, back = times[: len(layers)], times[len(layers) + 1 :]
            for layer, f, b in zip(layers, ahead, reversed(back), strict=True):
                layer.forward += f / iterations
                layer.backward += b / iterations
            forward, backward = forward + sum(ahead), backward + sum(back)
            both = number(sum(ahead) + sum(back))
            log.info("Iteration: %d forward-backward time: %s ms.", j + 1, both)
    tops = net.nodes[0].tops
    batch = tops[0].shape[0] if tops and tops[0].shape else 0
    timing = Timing(
        layers, forward / iterations, backward / iterations, forward + backward, iterations, batch
    )
    log.info("Average time per layer: ")
    for layer in timing.layers:
        log.info("%10s\tforward: %s ms.", layer.name, number(layer.forward))
        log.info("%10s\tbackward: %s ms.", layer.name, number(layer.backward))
    log.info("Average Forward pass: %s ms.", number(timing.forward))
    log.info("Average Backward pass: %s ms.", number(timing.backward))
    log.info("Average Forward-Backward: %s ms.", number(timing.total / iterations))
    log.info("Total Time: %s ms.", number(timing.total))
    log.info("*** Benchmark ends ***")
    return timing


def _pass(net: Net, watch: Any, hold: float) -> None:
    """Run forward and backward, with a time mark before the first layer and after each.

    The device is held back before both, so that it does not wait for the host.
    """
    count = len(net.layers)
    for run, order in ((net.forward, range(count)), (net.backward, reversed(range(count)))):
        watch.hold(hold)
        watch.mark()
        for i in order:
            run(i, i)
            watch.mark()
