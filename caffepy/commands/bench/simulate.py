"""`caffepy bench scaling --simulate`: the speed of a net on many nodes, by a model of what their
wires cost.

n bytes of gradients, M nodes of G GPUs, b bytes a second from each GPU to other nodes while all of
a node send, B those of the links in a node, a and a_in seconds a message between and in nodes:

    T_in  = 2 (G - 1)/G n/B + 2 (G - 1) a_in              reduce-scatter, all-gather in the node
    T_out = min(2 (M - 1)/M n/(G b) + 2 (M - 1) a,        ring of nodes
                2 n/(G b) + 2 ceil(log2 M) a)             tree of nodes
    T     = max(T_in, T_out) + min(T_in, T_out)/10        one beside the other
    E     = max(T - overlap, kappa T)                     what the backward pass does not hide
    t_G   = max(t + E, HOST G h) if G > 1, else t + E     of an iteration of t alone
    efficiency = t/t_G

The overlap is the backward pass. kappa is the part of T that is paid all the same, since NCCL's
kernels hold up those of the net. It was measured for some nets on four H200; others lie between,
by the share of their gradients that is of fully connected layers. h is the host's time to enqueue
an iteration of one solver: threads of G solvers do it in turns, under Python's lock, so that GPUs
wait for the host where iterations are short. Nodes that are uneven, what
fetching data costs, and factors in place of gradients are not in the model.

With gradients in bfloat16 several nodes send n/2 bytes, also within them, and T is longer by the
time of rounding, widening and scaling the gradients in a GPU's memory.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, NamedTuple

from caffepy.collectives import interfaces
from caffepy.collectives.factors import IN_HOST, together
from caffepy.collectives.synchronizer import BF16, FLOAT32
from caffepy.commands.bench.train import CPU, SYNTHETIC, Bench, bench_train, definition
from caffepy.core.errors import ConfigError, UsageError, reason
from caffepy.core.files import read_regular
from caffepy.layer.inner_product import InnerProduct
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.report import plot
from caffepy.report.text import AsJson, columns
from caffepy.solver.nets import build_train_net, net_sources

EXAMPLE = "nodes=64 gpus=8 nic=8x400"
IN_NODE = IN_HOST, 2e-6
"""Bytes a second and seconds of a message between GPUs of a node: NVLink of an H200."""

PROTOCOLS = {
    "rdma": (interfaces.RDMA, 5e-6),
    "tcp": (interfaces.TCP, 25e-6),
    "measured": (1.0, 25e-6),
}
"""Part of a NIC's bits that arrives, and seconds of a message between nodes.

What was measured has arrived: by `bench allreduce` with a GPU a node it is the bus bandwidth.
"""

LEAST_RDMA = 200
"""Gb/s of the slowest NIC that is taken to have RDMA."""

CASTS = 5.0, 4e12
"""Bytes that casts read and write for each byte of gradients, and bytes a second of the memory."""

KAPPA = {"CaffeNet": 0.5, "VGG16": 0.6, "ResNet-50": 0.15}
"""Measured, by the name of the net."""

HOST = 2.75
"""Host's time for an iteration of a solver among others in a process, by that of one alone: lenet
and cifar10_quick took 0.10 to 0.17 ms each on two and four H200, where one alone took 0.05.
"""

HIDDEN = 0.05
"""Of an iteration: the exposed part at which computing is still what takes the time."""

MOST_NODES = 1024


class Cluster(NamedTuple):
    """Nodes with GPUs; bytes a second from each GPU to other nodes, and seconds of a message."""

    nodes: int
    gpus: int
    rail: float
    latency: float


class AllReduce(NamedTuple):
    """Seconds in the node and between nodes, and those of the latter in which nothing is sent."""

    inside: float
    outside: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole."""
        return together(self.inside, self.outside)


def parse(text: str) -> Cluster:
    """Parse a cluster such as "nodes=64 gpus=8 nic=8x400": 8 NICs a node of 400 Gb/s each.

    `nic=4x200tcp` and `nic=1x100rdma` name the protocol, `nic=1x3.2measured latency=60us` gives
    what was measured. UsageError for anything else.
    """
    return cluster_of(text, parts_of(text, (), EXAMPLE), EXAMPLE)


def parts_of(text: str, more: Collection[str], example: str) -> dict[str, str]:
    """Return the parts `name=value` of a cluster by name; `more` are names beside the usual.

    UsageError for other names, or one that comes twice.
    """
    found: dict[str, str] = {}
    for part in re.split(r"[\s,]+", text.strip()):
        name, _, value = part.partition("=")
        if name in found or name not in ("nodes", "gpus", "nic", "latency", *more):
            raise UsageError(f"--simulate: {part!r} is not a part of a cluster such as {example!r}")
        found[name] = value
    return found


def cluster_of(text: str, found: Mapping[str, str], example: str) -> Cluster:
    """Return the cluster of these parts of a text; UsageError for one that is missing or wrong."""
    if missing := [name for name in ("nodes", "gpus", "nic") if name not in found]:
        raise UsageError(f"--simulate: {missing[0]} is missing, as in {example!r}")
    nic = re.fullmatch(rf"(\d+)x(\d+(?:\.\d+)?)({'|'.join(PROTOCOLS)})?", found["nic"])
    message = re.fullmatch(r"(\d+(?:\.\d+)?)us", found.get("latency", "0us"))
    counts = [found["nodes"], found["gpus"], nic[1] if nic else ""]
    if (
        nic is None
        or message is None
        or not all(re.fullmatch(r"0*[1-9]\d{0,4}", count) for count in counts)
    ):
        raise UsageError(f"--simulate: {text!r} is not a cluster such as {example!r}")
    nodes, gpus, nics = map(int, counts)
    gbit = float(nic[2])
    if not gbit:
        raise UsageError(f"--simulate: {found['nic']!r} carries nothing")
    protocol = nic[3] or ("rdma" if gbit >= LEAST_RDMA else "tcp")
    part, usual = PROTOCOLS[protocol]
    latency = float(message[1]) * 1e-6 if "latency" in found else usual
    return Cluster(nodes, gpus, nics * gbit * 1e9 / 8 * part / gpus, latency)


def all_reduce(size: float, cluster: Cluster) -> AllReduce:
    """Return the seconds of an all-reduce of `size` bytes, see the head of this file."""
    (bandwidth, latency), (nodes, gpus, rail, between) = IN_NODE, cluster
    inside = 2 * (gpus - 1) / gpus * size / bandwidth + 2 * (gpus - 1) * latency
    if nodes == 1:
        return AllReduce(inside, 0.0, 0.0)
    ring, tree = 2 * (nodes - 1) * between, 2 * ceil(log2(nodes)) * between
    whole = 2 * size / (gpus * rail)
    outside, waiting = min(((nodes - 1) / nodes * whole + ring, ring), (whole + tree, tree))
    return AllReduce(inside, outside, waiting)


def exposed(seconds: float, overlap: float, kappa: float) -> float:
    """Return what an all-reduce adds to an iteration."""
    return max(seconds - overlap, kappa * seconds)


class Load(NamedTuple):
    """Load of a net on the wires: bytes of its gradients, seconds of an iteration alone and of
    the part of it that hides an all-reduce, and kappa; and on the host: seconds to enqueue one.
    """

    bytes: float
    seconds: float
    overlap: float
    kappa: float
    host: float = 0.0


@dataclass(frozen=True)
class Point:
    """A number of nodes: images a second of all, efficiency, milliseconds, and what limits it."""

    nodes: int
    gpus: int
    images_per_s: float
    efficiency: float
    all_reduce_ms: float
    exposed_ms: float
    bottleneck: str


class Simulated(AsJson):
    """Base of what `--simulate` returns: speeds of a net by number of nodes of a cluster. A point
    has `nodes`, `images_per_s` and `efficiency`.
    """

    title = ""
    """Words between the net and the cluster."""

    net: str
    device: str
    precision: str
    batch: int
    cluster: str
    ms: float
    points: Sequence[Any]

    @property
    def measured(self) -> str:
        """The measurement in words."""
        device = CPU if self.device == CPU else f"one {self.device}"
        return (
            f"{self.net}, {self.precision}, batch {self.batch} each, as measured on {device}: "
            f"{self.ms:.3f} ms an iteration"
        )

    def plot(self, path: str) -> None:
        """Draw images/s over the nodes with matplotlib, in the format of the extension.

        UsageError if it cannot be drawn or written.
        """
        plot.format_of(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="nodes", ylabel="images/s")
        nodes = [p.nodes for p in self.points]
        axes.plot(nodes, [p.images_per_s for p in self.points], marker="o", label=self.net)
        ideal = [p.images_per_s / p.efficiency for p in self.points]
        axes.plot(nodes, ideal, linestyle="--", label="no synchronization")
        axes.set_title(f"{self.net}, {self.title} {self.cluster}")
        axes.grid(alpha=0.3)
        axes.legend()
        plot.save(figure, path)


@dataclass(frozen=True)
class Simulation(Simulated):
    """The model's figures, by number of nodes; `asked` is the one that was asked for.

    gpu_gb_s: what goes from each GPU to other nodes.
    """

    title = "a model of"

    net: str
    device: str
    precision: str
    batch: int
    cluster: str
    gpu_gb_s: float
    latency_us: float
    wire: str
    gradient_mb: float
    ms: float
    overlap_ms: float
    kappa: float
    asked: Point
    points: Sequence[Point]

    def table(self) -> str:
        """Return a table as text."""
        p = self.asked
        rows = [["nodes", "GPUs", "images/s", "efficiency", "all-reduce ms", "exposed ms", "limit"]]
        rows += [
            [
                f"{p.nodes}",
                f"{p.gpus}",
                f"{p.images_per_s:.0f}",
                f"{p.efficiency:.1%}",
                f"{p.all_reduce_ms:.2f}",
                f"{p.exposed_ms:.2f}",
                p.bottleneck,
            ]
            for p in self.points
        ]
        return "\n".join(
            [
                self.measured,
                f"modelled on {self.cluster}: {self.gpu_gb_s:.2f} GB/s from each GPU to other "
                f"nodes, {self.latency_us:g} us a message",
                f"{self.gradient_mb:.1f} MB of gradients; up to {self.overlap_ms:.3f} ms of an "
                f"all-reduce hide behind the backward pass, but at least {self.kappa:.0%} of it "
                "does not" + ("; bf16 where there are several nodes" if self.wire == BF16 else ""),
                *columns(rows, left=0),
                f"{p.nodes} nodes: {p.images_per_s:.0f} images/s, {p.exposed_ms:.2f} ms exposed, "
                f"limited by {p.bottleneck}",
            ]
        )


def simulate(
    solver: str,
    cluster: str,
    *,
    measured: str | None = None,
    gpu: str | None = None,
    batch: int | None = None,
    image: Sequence[int] | None = None,
    precision: str | None = None,
    windows: int = 5,
    wire: str = FLOAT32,
) -> Simulation:
    """Return how fast the net of the solver file trains on a cluster, see `parse`, and on others
    of 1 to 1024 nodes of its kind.

    An iteration alone is that of the file `measured`, which `caffepy bench train --json` wrote;
    without it, it is measured on the first GPU of `gpu`, or on the CPU. ConfigError if the file is
    not of that net.
    """
    asked = parse(cluster)
    net, load, alone = measured_load(
        solver,
        measured,
        gpu=gpu,
        batch=batch,
        image=image,
        precision=precision,
        windows=windows,
    )
    counts = {asked.nodes, *(1 << i for i in range(MOST_NODES.bit_length()))}
    clusters = {nodes: asked._replace(nodes=nodes) for nodes in counts}
    points = {nodes: point(load, clusters[nodes], alone.batch, wire) for nodes in counts}
    return Simulation(
        net=net,
        device=alone.device,
        precision=alone.precision,
        batch=alone.batch,
        cluster=cluster,
        gpu_gb_s=asked.rail / 1e9,
        latency_us=asked.latency * 1e6,
        wire=wire,
        gradient_mb=load.bytes / 1e6,
        ms=alone.ms,
        overlap_ms=load.overlap * 1e3,
        kappa=load.kappa,
        asked=points[asked.nodes],
        points=[points[nodes] for nodes in sorted(counts)],
    )


def measured_load(
    solver: str,
    measured: str | None,
    *,
    gpu: str | None,
    batch: int | None,
    image: Sequence[int] | None,
    precision: str | None,
    windows: int,
) -> tuple[str, Load, Bench]:
    """Return the net's name, its load on the wires and an iteration alone, see `simulate`."""
    net, size, connected = _gradients(solver, batch, image)
    if measured is None:
        alone = bench_train(
            solver, gpu=gpu, batch=batch, image=image, precision=precision, windows=windows
        )
    else:
        alone = _read(measured, net)
    kappa = KAPPA.get(net, 0.1 + 0.5 * connected)
    seconds, host = alone.ms / 1e3, (alone.host_ms or 0.0) / 1e3
    return net, Load(size, seconds, seconds * alone.shares["backward"], kappa, host), alone


def point(load: Load, cluster: Cluster, batch: int, wire: str = FLOAT32) -> Point:
    """Return the model's figures for a cluster."""
    size, casts = load.bytes, 0.0
    if wire == BF16 and cluster.nodes > 1:
        times, bandwidth = CASTS
        size, casts = size / 2, times * size / bandwidth
    sync = all_reduce(size, cluster)
    more = exposed(sync.seconds + casts, load.overlap, load.kappa)
    seconds, gpus = load.seconds + more, cluster.nodes * cluster.gpus
    host = HOST * cluster.gpus * load.host if cluster.gpus > 1 else 0.0
    if host > seconds:
        seconds, more, bottleneck = host, host - load.seconds, "the host"
    elif more < HIDDEN * load.seconds:
        bottleneck = "computing"
    elif sync.inside >= sync.outside:
        bottleneck = "bandwidth in the node"
    elif sync.waiting > sync.outside / 2:
        bottleneck = "latency between nodes"
    else:
        bottleneck = "bandwidth between nodes"
    return Point(
        nodes=cluster.nodes,
        gpus=gpus,
        images_per_s=gpus * batch / seconds,
        efficiency=load.seconds / seconds,
        all_reduce_ms=(sync.seconds + casts) * 1e3,
        exposed_ms=more * 1e3,
        bottleneck=bottleneck,
    )


def _gradients(
    solver: str, batch: int | None, image: Sequence[int] | None
) -> tuple[str, int, float]:
    """Return the name of the net, the bytes of its gradients, and the share of them that is of
    fully connected layers.
    """
    source, _ = net_sources(definition(solver, batch, image, SYNTHETIC), solver)
    device = ShapesOnlyDevice(seed=0)
    device.writes_files = False
    with closing(build_train_net(source, device, root=None)) as net:
        sizes = [(4 * p.blob.count, net.nodes[p.layer].layer) for p in net.learnable]
    whole = sum(size for size, _ in sizes)
    if not whole:
        raise ConfigError("the train net has no parameters, so there is nothing to average", solver)
    connected = sum(size for size, layer in sizes if isinstance(layer, InnerProduct))
    return net.name, whole, connected / whole


def _read(path: str, net: str) -> Bench:
    try:
        content: Mapping[str, Any] = json.loads(read_regular(path))
        alone = Bench(**{**content, "memory": None})
        times = [alone.ms, alone.batch, alone.shares["backward"]]
        if not all(isinstance(value, (int, float)) and value > 0 for value in times):
            raise ValueError
    except OSError as error:
        raise ConfigError(f"cannot read the measured times: {reason(error)}", path) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("this is no output of caffepy bench train --json", path) from error
    if alone.net != net:
        raise ConfigError(f'the times are of the net "{alone.net}", not of "{net}"', path)
    return alone
