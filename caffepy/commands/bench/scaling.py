"""`caffepy bench scaling`: the speed of training on several devices, of one node or several, beside
that of one.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from caffepy import ops
from caffepy.collectives import peers
from caffepy.collectives.sync import reason_unavailable
from caffepy.collectives.synchronizer import BF16, FLOAT32
from caffepy.collectives.topology import Topology, all_joined
from caffepy.collectives.world import World
from caffepy.commands.bench.train import CPU, SYNTHETIC, WINDOW, Trainer
from caffepy.commands.nodes import check_wire, gpus_of_process, nodes, threads_of_process
from caffepy.core.errors import UsageError
from caffepy.data.decoders import THREADS, decoding
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_numbers
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.nodes import check_alike, gather
from caffepy.parallel.synchronization import SyncOptions
from caffepy.report.performance import difference, shares
from caffepy.report.text import AsJson


@dataclass(frozen=True)
class Point:
    """Speed of `devices` devices of `nodes` nodes: images a second of all, which is `times` that
    of one.

    `efficiency` is `times` by the number of devices; on the CPU, of which one solver alone uses all
    threads of its node, by that of nodes. `ms` is the time of an iteration, `exposed` the share of
    it in which devices, in the mean, only synchronize.
    """

    devices: int
    nodes: int
    images_per_s: float
    times: float
    efficiency: float
    ms: float
    exposed: float
    host_ms: float | None


@dataclass(frozen=True)
class Scaling(AsJson):
    """Results, in the order of the numbers of devices, 1 first."""

    net: str
    device: str
    precision: str
    sync: str
    batch: int
    points: Sequence[Point]
    wire: str = FLOAT32
    data: str = SYNTHETIC

    def table(self) -> str:
        """Return a table as text."""
        several = self.points[-1].nodes > 1
        head = f"{self.net} on {self.device}, {self.precision}, batch {self.batch} each"
        if self.data != SYNTHETIC:
            head += f", data of {self.data}"
        nodes = " nodes" if several else ""
        lines = [
            f"{head}, sync {self.sync}" + (", bf16 between nodes" if self.wire == BF16 else ""),
            f"{nodes} devices    images/s   times one  efficiency        ms  exposed sync",
        ]
        for p in self.points:
            nodes = f"{p.nodes:6}" if several else ""
            speeds = f"{p.images_per_s:12.0f}{p.times:12.2f}{p.efficiency:12.1%}"
            lines.append(f"{nodes}{p.devices:8}{speeds}{p.ms:10.3f}{p.exposed:14.1%}")
        if several:
            lines.append("of one node: the slowest, while each trains alone")
        if self.device == CPU:
            lines.append(
                "efficiency is that against one solver, which uses all threads of its node"
                if several
                else "efficiency is relative to one solver that has all threads to itself"
            )
        return "\n".join(lines)


def bench_scaling(
    solver: str,
    *,
    gpu: str | None = None,
    cpu: int = 0,
    batch: int | None = None,
    image: Sequence[int] | None = None,
    precision: str | None = None,
    sync: str = "auto",
    iterations: int | None = None,
    windows: int = 5,
    wire: str = FLOAT32,
    data: str = SYNTHETIC,
    decode: str = THREADS,
) -> Scaling:
    """Train the net of the solver file with 1, 2, 4, ... and all of the devices, for windows of
    `iterations` iterations, or of 1 s.

    `gpu` names GPUs ("all" for every one), `cpu` is a number of solvers on the CPU, `batch` that of
    each device; `data` and `decode` are those of `bench_train`. The nodes that mpirun or srun
    started each do so, and then all together, with gradients of the type `wire` between them.
    UsageError if `sync` cannot synchronize one of these numbers of devices.
    """
    with nodes() as world, decoding(decode):
        check_wire(wire, world)
        gpu = gpus_of_process(gpu, world)
        numbers = gpu_numbers(gpu) if gpu else []
        size = len(numbers) or max(1, cpu)
        counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n <= size} | {size})
        for count in counts[1:]:
            joined = peers.query(numbers[:count]) if numbers else all_joined(count)
            _check(sync, joined, bool(numbers))
        if world:
            alike = {
                "solver": Path(solver).read_text(),
                "settings": (
                    *(bool(numbers), batch, image, precision, iterations, windows),
                    *(sync, wire, data, decode),
                ),
            }
            check_alike(world, alike)
            world.join(size)
            joined = peers.query(numbers) if numbers else all_joined(world.size)
            _check(sync, joined, bool(numbers), world.nodes)
            smallest = min(world.solvers)
            counts = [count for count in counts if count <= smallest]
        runs: list[tuple[int, World | None]] = [(count, None) for count in counts]
        if world:
            runs.append((size, world))
        points: list[Point] = []
        for count, together in runs:
            gpus = [CudaDevice(number) for number in numbers[:count]]
            devices: Sequence[Device] = gpus or [Device() for _ in range(count)]
            if world and not gpus:
                ops.backend(devices[0]).set_num_threads(threads_of_process(world))
            ops.set_precision(devices[0], precision)
            made = Trainer(solver, device=devices[0], batch=batch, image=image, data=data)
            with closing(made) as trainer:
                options = SyncOptions(sync, wire=wire if together else FLOAT32)
                ms, exposed, host_ms = _measure(
                    trainer, devices, options, iterations, windows, together
                )
                if world:  # the slowest node
                    ms, exposed, host_ms = max(world.gather((ms, exposed, host_ms or 0.0)))
                    host_ms = host_ms or None
                count, on = (world.size, world.nodes) if world and together else (count, 1)
                rate = count * trainer.batch / ms * 1000
                times = rate / points[0].images_per_s if points else 1.0
                efficiency = times / (count if gpus else on)
                points.append(Point(count, on, rate, times, efficiency, ms, exposed, host_ms))
                name, each = trainer.net.name, trainer.batch
        first = devices[0]
        kind = first.name if isinstance(first, CudaDevice) else CPU
        return Scaling(name, kind, first.math_mode.precision, sync, each, points, wire, data)


def _check(sync: str, topology: Topology, gpu: bool, nodes: int = 1) -> None:
    if why := reason_unavailable(sync, topology, gpu, nodes):
        raise UsageError(f"--sync {sync}: {why}")


def _measure(
    trainer: Trainer,
    devices: Sequence[Device],
    options: SyncOptions,
    iterations: int | None,
    windows: int,
    world: World | None,
) -> tuple[float, float, float | None]:
    """Return the milliseconds of an iteration, the share that only synchronizes, and the host's
    milliseconds, of solvers on these devices, and with them those of other nodes.
    """
    with p2p_manager(trainer.solver, devices, options, world=world) as manager:
        trainer.window(5)
        iterations = iterations or trainer.iterations_in(WINDOW)
        if manager:  # of the first node
            iterations = gather(manager.group, [iterations])[0]
        before = manager.seconds() if manager else []
        done = [trainer.window(iterations) for _ in range(windows)]
        after = manager.seconds() if manager else []
    hosts = [w.host_ms for w in done if w.host_ms is not None]
    spent = [difference(*both) for both in zip(after, before, strict=True)]
    return (
        median(w.seconds / w.iterations for w in done) * 1000,
        shares(spent)["synchronization"] if spent else 0.0,
        median(hosts) if hosts else None,
    )
