"""`caffepy bench allreduce`: the time of each way to synchronize solvers, by size."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from caffepy.collectives import peers
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.rank_names import rank_name
from caffepy.collectives.sync import NAMES, Choice, choose, reason_unavailable
from caffepy.collectives.synchronizer import BF16, FLOAT32, FlatParams, Synchronizer
from caffepy.collectives.topology import all_joined
from caffepy.collectives.world import World
from caffepy.commands.nodes import check_wire, gpus_of_process, nodes
from caffepy.core.errors import SyncError, UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_numbers
from caffepy.parallel.nodes import check_alike
from caffepy.report import plot
from caffepy.report.text import AsJson, columns

SIZES = "64K..512M"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STEP = 2  # from one size to the next
WINDOWS = 7
ENOUGH = 64 << 20  # bytes that a window moves at least
MOST_RUNS = 50  # of a window
CAPTURED = 10  # runs in a captured graph, so that the times are the device's
EDGE = 256  # elements at each end that are checked


@dataclass(frozen=True)
class Timing:
    """Median time of one all-reduce of this number of bytes of float32; GB/s of the algorithm, and
    of the bus, which is 2(n - 1)/n times that.
    """

    sync: str
    bytes: int
    ms: float
    captured: bool
    algorithm_gb_s: float
    bus_gb_s: float


@dataclass(frozen=True)
class AllReduceBench(AsJson):
    """Results; `left_out` has the ways that could not be measured, with the reason."""

    devices: str
    ranks: int
    timings: Sequence[Timing]
    left_out: dict[str, str]
    wire: str = FLOAT32

    def table(self) -> str:
        """Return a table as text, a line a size: microseconds, then bus bandwidth, of each way."""
        names = list(dict.fromkeys(t.sync for t in self.timings))
        of = {(t.sync, t.bytes): t for t in self.timings}
        rows = [["size", *(f"{name} us" for name in names), *(f"{name} GB/s" for name in names)]]
        for size in dict.fromkeys(t.bytes for t in self.timings):
            found = [of[name, size] for name in names]
            times = [f"{t.ms * 1e3:.1f}" for t in found]
            rows.append([show_size(size), *times, *(f"{t.bus_gb_s:.2f}" for t in found)])
        between = ", bf16 between nodes" if self.wire == BF16 else ""
        ranks = f"{self.ranks} ranks on {self.devices}{between}"
        head = f"All-reduce of {ranks}; times, and bus bandwidth"
        lines = [head, *columns(rows, left=0)]
        for name in names if "GPU" in self.devices else ():
            if not all(t.captured for t in self.timings if t.sync == name):
                lines.append(f"{name}: not captured")
        return "\n".join([*lines, *(f"{name}: {why}" for name, why in self.left_out.items())])

    def plot(self, path: str) -> None:
        """Draw the bus bandwidth over the sizes with matplotlib, in the format of the extension.

        UsageError if it cannot be drawn or written.
        """
        plot.format_of(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        for name in dict.fromkeys(t.sync for t in self.timings):
            mine = [t for t in self.timings if t.sync == name]
            axes.plot([t.bytes for t in mine], [t.bus_gb_s for t in mine], marker="o", label=name)
        axes.set_title(f"All-reduce of {self.ranks} ranks on {self.devices}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        plot.save(figure, path)


def parse_sizes(text: str) -> list[int]:
    """Parse sizes in bytes, such as 64K,1M or 64K..512M (doubling); UsageError if that fails."""
    found: list[int] = []
    for item in text.split(","):
        ends = [_size(end) for end in item.split("..")]
        if len(ends) > 2 or ends[0] > ends[-1]:
            raise UsageError(f"{item!r} is not a range of sizes such as {SIZES}")
        size = ends[0]
        while size <= ends[-1]:
            found.append(size)
            size *= STEP
    return found


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    if not match or not int(match[1]):
        raise UsageError(f"{text!r} is not a size such as 64K, 16M or 1G")
    bytes_ = int(match[1]) * UNITS[match[2]]
    if bytes_ % 4:
        raise UsageError(f"{text!r} is not a whole number of floats of 4 bytes")
    return bytes_


def show_size(size: int) -> str:
    """Format a number of bytes in the largest unit of which it is a multiple."""
    unit = next(unit for unit in reversed(UNITS) if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]}{unit}"


def bench_allreduce(
    gpu: str | None = None,
    cpu: int = 0,
    sync: str = "",
    sizes: str = SIZES,
    wire: str = FLOAT32,
) -> AllReduceBench:
    """Time the ways in `sync` (NAME,...), or all that are available, on GPUs or `cpu` threads, of
    all nodes that mpirun or srun started; numbers go between nodes in the type `wire`.

    SyncError if a result is not the mean, which is checked for each size.
    """
    counts = [size // 4 for size in parse_sizes(sizes)]
    on_gpu = not cpu
    with nodes() as world:
        check_wire(wire, world)
        if on_gpu:
            numbers = gpu_numbers(gpus_of_process(gpu or "all", world) or "")
            topology = peers.prepare(peers.query(numbers))
            devices: Sequence[Device] = [CudaDevice(index) for index in topology.devices]
        else:
            devices = [Device() for _ in range(cpu)]
        if world:
            check_alike(world, {"kind of device": on_gpu, "sizes": sizes, "way": (sync, wire)})
            world.join(len(devices))
        else:
            world = World(solvers=len(devices))
        if on_gpu:
            where = f"{world.size} GPUs ({devices[0].name})"  # type: ignore[attr-defined]
        else:
            topology = all_joined(world.size)
            where = "the CPU"
        timings: list[Timing] = []
        left_out = {}
        for name in sync.split(",") if sync else NAMES:
            why = reason_unavailable(name, topology, on_gpu, world.nodes)
            if why and not sync:
                left_out[name] = why
                continue
            choice = choose(name, topology, on_gpu, world.nodes)
            choice = choice._replace(root_updates=False, wire=wire)
            timings += _measure(choice, devices, counts, world)
        where += f" of {world.nodes} nodes" if world.nodes > 1 else ""
        return AllReduceBench(where, world.size, timings, left_out, wire)


def _measure(
    choice: Choice, devices: Sequence[Device], counts: Sequence[int], world: World
) -> list[Timing]:
    group = RankGroup(len(devices), {}, world)
    group.phase = "step"

    def work(rank: int) -> list[tuple[float, bool]]:
        with group.guard(rank):
            return _rank(group, rank, choice, devices[rank], counts)

    group.watch_nodes()
    with ThreadPoolExecutor(len(devices), "rank") as pool:
        ranks = [pool.submit(work, rank) for rank in range(len(devices))]
    group.leave_nodes()
    if group.failure:
        raise group.failure[1]
    times = [rank.result() for rank in ranks]
    if world.nodes > 1:
        times = [of_rank for of_node in world.gather(times) for of_rank in of_node]
    found, n = [], world.size
    for count, *of_ranks in zip(counts, *times, strict=True):
        ms, captured = max(of_ranks)
        speed = count * 4 / ms / 1e6
        found.append(Timing(choice.name, count * 4, ms, captured, speed, speed * 2 * (n - 1) / n))
    return found


def _rank(
    group: RankGroup, rank: int, choice: Choice, device: Device, counts: Sequence[int]
) -> list[tuple[float, bool]]:
    """Return one rank's times in milliseconds, each with True if it was captured."""
    with device.scope():
        diff: Any = np.zeros(max(counts), np.float32)
        if device.kind == "cuda":
            diff = device.on_device(diff)
        meet = partial(group.barrier, rank, "bench")
        found = []
        # GPUs that are joined take another way for small gradients, so each size is one of its own.
        for alike in [[count] for count in counts] if choice.joined else [counts]:
            whole = diff[: max(alike)]
            synchronizer = choice.join(group, rank, FlatParams(device, whole, whole))
            error = synchronizer.size * 2.0**-9 if choice.wire == BF16 else 1e-5  # of rounded sums
            for count in alike:
                diff[:count] = 1 + synchronizer.universal_rank
                synchronizer.reduce(count)
                mean = (synchronizer.size + 1) / 2
                for part in (diff[:count][:EDGE], diff[:count][-EDGE:]):
                    if not np.allclose(device.on_host(part), mean, rtol=error):
                        name = rank_name(group.world, rank)
                        raise SyncError(f"the mean of {count} numbers in {name} is wrong")
                meet()
                found.append(_time(synchronizer, device, count, meet))
            device.synchronize()
            meet()
            synchronizer.close()
    return found


def _time(
    synchronizer: Synchronizer, device: Device, count: int, meet: Callable[[], None]
) -> tuple[float, bool]:
    """Return the milliseconds of one run, the median over windows, and True if it was captured."""
    runs = max(2, min(MOST_RUNS, ENOUGH // (count * 4)))
    work: Callable[[], None] = partial(synchronizer.reduce, count)
    if captured := synchronizer.capturable and isinstance(device, CudaDevice):
        recording = device.capture(partial(_repeat, work, CAPTURED))
        work, replays = recording.replay, max(1, runs // CAPTURED)
        runs = replays * CAPTURED
    else:
        replays = runs
    times = []
    for _ in range(WINDOWS):
        device.synchronize()
        meet()
        begin = perf_counter()
        _repeat(work, replays)
        device.synchronize()
        times.append((perf_counter() - begin) / runs * 1e3)
    meet()  # before the captured graph is freed
    return median(times), captured


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
