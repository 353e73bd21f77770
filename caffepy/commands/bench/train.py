"""`caffepy bench train`: the speed of training a net, its memory, and where the time goes."""

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

from caffepy import ops
from caffepy.commands.devices import choose_device
from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.data.decoders import THREADS, decoding
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import gpu_memory, import_cupy
from caffepy.models.synthetic import synthetic
from caffepy.net import Net
from caffepy.net.fusion import Step
from caffepy.net.recompute import Recompute
from caffepy.proto.caffe_pb2 import DataParameter, SolverParameter
from caffepy.proto.sniff import sniff
from caffepy.proto.text import read_solver
from caffepy.report.text import AsJson
from caffepy.solver import Action, Solver
from caffepy.solver.nets import net_sources

log = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
CPU = "the CPU"  # the name of a device that is no GPU
WARM_UP = {"cpu": 2, "cuda": 10}  # iterations
AHEAD = 8  # iterations whose enqueuing is timed; a solver lets the host run at least as far ahead
PASSES = 5  # that measure the shares
WINDOW = 0.3  # seconds, unless iterations are given
GENTLE = 1e-3  # a learning rate at which no net grows without bounds on random data
MIB = 1 << 20


@dataclass(frozen=True)
class Window:
    """A number of iterations: their seconds, and the host's milliseconds to enqueue one of them."""

    iterations: int
    seconds: float
    host_ms: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU's memory: used by this run as the driver counts, and held by CuPy's pool.

    The driver's are the free bytes before the nets are built less those at the end; they include
    cuDNN's and cuBLAS's own memory, loaded kernels and captured graphs, and the use of other
    processes in the meantime.
    """

    driver: int
    pool: int


@dataclass(frozen=True)
class Bench(AsJson):
    """The result: `windows` are images a second of each window, whose median is `images_per_s`.

    `ms` is the time of an iteration, `host_ms` the host's time to enqueue one (None on the CPU,
    which computes it). `shares` are the parts of data, forward, backward and update in the time of
    a pass, from passes that run layer by layer and are enqueued as a whole; the overlap of a
    captured step is not in them.
    """

    net: str
    device: str
    precision: str
    data: str
    batch: int
    captured: bool
    fused: bool
    iterations: int
    windows: Sequence[float]
    images_per_s: float
    spread: float
    ms: float
    host_ms: float | None
    shares: dict[str, float]
    memory: Memory | None
    loss: float

    def table(self) -> str:
        """Return a few lines."""
        data = "synthetic data" if self.data == SYNTHETIC else f"data of {self.data}"
        how = [self.precision, f"batch {self.batch}", data]
        if self.memory:
            how.append("captured" if self.captured else "not captured")
            how.append("fused" if self.fused else "not fused")
        windows = f"{len(self.windows)} windows of {self.iterations} iterations"
        host = f", the host {self.host_ms:.3f} ms" if self.host_ms else ""
        lines = [
            f"{self.net} on {self.device}, {', '.join(how)}",
            f"{self.images_per_s:.0f} images/s, the median of {windows} "
            f"({min(self.windows):.0f} to {max(self.windows):.0f})",
            f"{self.ms:.3f} ms per iteration{host}",
            ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items()),
        ]
        if self.memory:
            driver, pool = self.memory.driver // MIB, self.memory.pool // MIB
            lines.append(f"{driver} MiB of GPU memory, {pool} MiB of it in pools")
        return "\n".join(lines)


class Trainer:
    """A solver whose train net has its data replaced, ready to be timed; `close` it at the end."""

    def __init__(
        self,
        solver: str,
        *,
        device: Device | None = None,
        batch: int | None = None,
        image: Sequence[int] | None = None,
        data: str = SYNTHETIC,
        capture: bool = True,
        fuse: bool = True,
        recompute: Recompute = 1,
    ) -> None:
        self.device = device or Device()
        self.device.writes_files = False
        self._free = self._free_memory()
        param = definition(solver, batch, image, data)
        self.solver = Solver(param, device=self.device, path=solver)
        self.solver.capture, self.solver.fuse = capture, fuse
        if recompute != 1:
            self.solver.save_memory(recompute)
        elif capture and fuse:
            self.solver.save_memory()
        self.net: Net = self.solver.net
        if not any(layer.is_data for layer in self.net.layers):
            no_images = "the train net has no data layer, so there are no images to count"
            raise ConfigError(no_images, solver)
        self._issued: list[tuple[int, float]] = []

        def note() -> Action:
            self._issued.append((self.solver.iter, perf_counter()))
            return Action.NONE

        note.takes_several = True  # type: ignore[attr-defined]
        self.solver.action = note
        self.solver.step(WARM_UP[self.device.kind])
        self.device.synchronize()

    def _free_memory(self) -> int:
        if self.device.kind == "cpu":
            return 0
        self.device.synchronize()
        with self.device.scope():
            import_cupy().get_default_memory_pool().free_all_blocks()
        return gpu_memory(self.device.index)[0]

    @property
    def batch(self) -> int:
        """Images of an iteration."""
        fed = next(node.tops[0] for node in self.net.nodes if node.layer.is_data)
        return int(fed.shape[0])

    def window(self, iterations: int) -> Window:
        """Train this number of iterations."""
        self._issued.clear()
        begin = perf_counter()
        self.solver.step(iterations)
        self.device.synchronize()
        seconds = perf_counter() - begin
        issued, host_ms = self._issued, None
        if self.device.kind == "cuda" and len(issued) > 1:
            (first, begin), *rest = issued
            last, end = next((i, t) for i, t in rest if i >= first + AHEAD or (i, t) == issued[-1])
            host_ms = (end - begin) / (last - first) * 1000
        return Window(iterations, seconds, host_ms)

    def iterations_in(self, seconds: float) -> int:
        """Return the number of iterations that take about this time."""
        probe = self.window(5)
        return max(5, round(seconds / probe.seconds * probe.iterations))

    def shares(self) -> dict[str, float]:
        """Return the parts of data, forward, backward and update in the device's time of a pass."""
        net = self.net
        steps = net.steps if self.solver.fuse else [Step(i) for i in range(len(net.layers))]
        feeding = [step for step in steps if net.layers[step.last].is_data]
        learning = [step for step in steps if step not in feeding]
        parts = {
            "data": lambda: net.forward(steps=feeding),
            "forward": lambda: net.forward(steps=learning),
            "backward": lambda: net.backward(steps=learning),
            "update": self.solver.apply_update,
        }
        # the device is held back before each part, so that it does not wait for the host
        holds, times = [0.0] * len(parts), []
        with self.device.scope(), net.ops.blas_scope():
            watch = net.ops.Stopwatch()
            for i in range(1 + PASSES):
                host = []
                for part, hold in zip(parts.values(), holds, strict=True):
                    watch.hold(hold)
                    watch.mark()
                    begin = perf_counter()
                    part()
                    host.append((perf_counter() - begin) * 1000)
                    watch.mark()
                times.append(watch.read()[::2])
                if i == 0:
                    holds = host
        times = times[1:]
        sums = [sum(column) for column in zip(*times, strict=True)]
        return {name: part / sum(sums) for name, part in zip(parts, sums, strict=True)}

    def memory(self) -> Memory | None:
        """Return the use of the GPU's memory so far; None on the CPU."""
        if self.device.kind == "cpu":
            return None
        with self.device.scope():
            pool = import_cupy().get_default_memory_pool().total_bytes()
        return Memory(self._free - gpu_memory(self.device.index)[0], int(pool))

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        self.solver.close()


def definition(
    path: str, batch: int | None, image: Sequence[int] | None, data: str
) -> SolverParameter:
    """Return the solver's settings for its train net alone, without end, its data replaced.

    An iteration is one pass and an update. ConfigError if the net has no layer that could read a
    database in the place of its data.
    """
    param = read_solver(path)
    for field in ("test_iter", "test_net", "test_net_param", "test_state", "weights"):
        param.ClearField(field)
    param.test_interval = param.display = param.snapshot = 0
    param.snapshot_after_train = param.debug_info = False
    param.base_lr, param.max_iter = min(param.base_lr, GENTLE), 2**31 - 1
    param.iter_size = 1
    source, _ = net_sources(param, path)
    for field in ("net", "net_param", "train_net"):
        param.ClearField(field)
    net = param.train_net_param
    if data == SYNTHETIC:
        net.CopyFrom(synthetic(source.param, batch, image, origin=source.path))
        return param
    net.CopyFrom(source.param)
    layers = [layer for layer in net.layer if layer.type in ("Data", "ImageData")]
    if not layers:
        raise ConfigError("the net has no Data layer that could read a database", source.path)
    is_list = sniff(data) == "text"
    for layer in layers:  # which keep their own transformations, and folder and sizes of a list
        batch_size = layer.data_param.batch_size or layer.image_data_param.batch_size
        layer.type = "ImageData" if is_list else "Data"
        if not is_list:
            layer.ClearField("image_data_param")
        layer.data_param.source = os.path.abspath(data)
        layer.data_param.batch_size = batch or batch_size
        layer.data_param.backend = DataParameter.LMDB
        if is_list:
            layer.image_data_param.source = layer.data_param.source
            layer.image_data_param.batch_size = layer.data_param.batch_size
            if root := layer.image_data_param.root_folder:
                layer.image_data_param.root_folder = locate(root, source.path)
        if mean := layer.transform_param.mean_file:
            layer.transform_param.mean_file = os.path.abspath(locate(mean, source.path))
    return param


def bench_train(
    solver: str,
    *,
    gpu: str | None = None,
    batch: int | None = None,
    image: Sequence[int] | None = None,
    precision: str | None = None,
    iterations: int | None = None,
    windows: int = 5,
    data: str = SYNTHETIC,
    capture: bool = True,
    fuse: bool = True,
    recompute: Recompute = 1,
    threads: int | None = None,
    decode: str = THREADS,
) -> Bench:
    """Train the net of the solver file for some windows of `iterations` and return its speed.

    Without `iterations` a window takes 0.3 s. The data are random images, of the shape `image` (C,
    H, W) if the net does not state it, or those of the database or list of images `data`; `decode`
    is what decodes them, one of `decoders.WAYS`. `recompute` is that of `Solver.save_memory`. The
    first GPU of `gpu` computes. The learning rate is at most 0.001.
    """
    device = choose_device(gpu, threads)
    ops.set_precision(device, precision)
    make = partial(Trainer, solver, device=device, batch=batch, image=image, data=data)
    make = partial(make, capture=capture, fuse=fuse, recompute=recompute)
    with decoding(decode), closing(make()) as trainer:
        count = iterations or trainer.iterations_in(WINDOW)
        done = [trainer.window(count) for _ in range(windows)]
        rates = [trainer.batch * w.iterations / w.seconds for w in done]
        hosts = [w.host_ms for w in done if w.host_ms is not None]
        memory, loss = trainer.memory(), trainer.solver.update_state.loss()
        return Bench(
            net=trainer.net.name,
            device=device.name if isinstance(device, CudaDevice) else CPU,
            precision=device.math_mode.precision,
            data=data,
            batch=trainer.batch,
            captured=device.kind == "cuda"
            and not trainer.solver.iterations.step.graphs.reasons_not_capturable(capture),
            fused=fuse,
            iterations=count,
            windows=rates,
            images_per_s=median(rates),
            spread=(max(rates) - min(rates)) / median(rates),
            ms=trainer.batch / median(rates) * 1000,
            host_ms=median(hosts) if hosts else None,
            shares=trainer.shares(),
            memory=memory,
            loss=loss,
        )
