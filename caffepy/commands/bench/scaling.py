"""`caffepy bench scaling`: the speed of training on several devices, beside that of one."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from caffepy import ops
from caffepy.collectives import peers
from caffepy.collectives.sync import reason_unavailable
from caffepy.collectives.topology import all_joined
from caffepy.commands.bench.train import WINDOW, Trainer
from caffepy.core.errors import UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_numbers
from caffepy.parallel.manager import SyncOptions, p2p_manager
from caffepy.report.performance import difference, shares
from caffepy.report.text import AsJson

CPU = "the CPU"


@dataclass(frozen=True)
class Point:
    """Speed of a number of devices: images a second of all, which is `times` that of one.

    `efficiency` is `times` by the number of devices; on the CPU, of which one solver alone uses all
    threads, it is `times`. `ms` is the time of an iteration, `exposed` the share of it in which
    devices, in the mean, only synchronize.
    """

    devices: int
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

    def table(self) -> str:
        """Return a table as text."""
        head = f"{self.net} on {self.device}, {self.precision}, batch {self.batch} each"
        lines = [
            f"{head}, sync {self.sync}",
            " devices    images/s   times one  efficiency        ms  exposed sync",
        ]
        for p in self.points:
            speeds = f"{p.images_per_s:12.0f}{p.times:12.2f}{p.efficiency:12.1%}"
            lines.append(f"{p.devices:8}{speeds}{p.ms:10.3f}{p.exposed:14.1%}")
        if self.device == CPU:
            lines.append("efficiency is that against one solver, which uses all threads by itself")
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
    windows: int = 5,
) -> Scaling:
    """Train the net of the solver file on synthetic data with 1, 2, 4, ... and all of the devices.

    `gpu` names GPUs ("all" for every one), `cpu` is a number of solvers on the CPU, `batch` that of
    each device. UsageError if `sync` cannot synchronize one of these numbers of devices.
    """
    numbers = gpu_numbers(gpu) if gpu else []
    size = len(numbers) or max(1, cpu)
    counts = sorted({n for n in (1, 2, 4, 8, 16, 32, 64) if n <= size} | {size})
    for count in counts[1:]:
        joined = peers.query(numbers[:count]) if numbers else all_joined(count)
        if why := reason_unavailable(sync, joined, bool(numbers)):
            raise UsageError(f"--sync {sync}: {why}")
    points: list[Point] = []
    for count in counts:
        gpus = [CudaDevice(number) for number in numbers[:count]]
        devices: Sequence[Device] = gpus or [Device() for _ in range(count)]
        ops.set_precision(devices[0], precision)
        with closing(Trainer(solver, device=devices[0], batch=batch, image=image)) as trainer:
            with p2p_manager(trainer.solver, devices, SyncOptions(sync)) as manager:
                trainer.window(5)
                iterations = trainer.iterations_in(WINDOW)
                before = manager.seconds() if manager else []
                done = [trainer.window(iterations) for _ in range(windows)]
                after = manager.seconds() if manager else []
            ms = median(w.seconds / w.iterations for w in done) * 1000
            hosts = [w.host_ms for w in done if w.host_ms is not None]
            rate = count * trainer.batch / ms * 1000
            times = rate / points[0].images_per_s if points else 1.0
            spent = [difference(*both) for both in zip(after, before, strict=True)]
            exposed = shares(spent)["synchronization"] if spent else 0.0
            host_ms = median(hosts) if hosts else None
            efficiency = times / count if gpus else times
            points.append(Point(count, rate, times, efficiency, ms, exposed, host_ms))
            name, each = trainer.net.name, trainer.batch
    first = devices[0]
    kind = first.name if isinstance(first, CudaDevice) else CPU
    return Scaling(name, kind, first.math_mode.precision, sync, each, points)
