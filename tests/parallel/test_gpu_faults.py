"""A fault on one of several GPUs ends the run on all: within seconds, with the right exit code,
with the snapshot that is due, and with the memory freed. No GPU needs a reset after that.
"""

import fcntl
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.collectives import peers
from caffepy.collectives.synchronizer import Synchronizer
from caffepy.collectives.worker_threads import AHEAD
from caffepy.core.errors import ConfigError, DataError, DeviceError, SyncError
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.gpus import gpu_memory
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.parallel.worker import WorkerSolver
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver, newest_good, snapshot
from tests.parallel.cases import net
from tests.parallel.faults import EVERY, PLACES, KilledError, Killer, caffepy, write

pytestmark = pytest.mark.gpus(2)

GPUS = "--gpu 0,1"
SYNCS = ("nccl", "tree", "flat", "muji")
SECONDS = 10
"""Seconds that a process may last after a fault."""
DEADLINE = 5


@pytest.fixture(scope="module", autouse=True)
def sound() -> Iterator[None]:
    """After all these faults the driver asks for no more resets than before."""

    def recovery() -> list[str]:
        if not shutil.which("nvidia-smi"):
            return []
        said = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, check=True)
        return re.findall(r"GPU Recovery Action\s*: (.*)", said.stdout)

    before = recovery()
    yield
    assert recovery() == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    return tmp_path


def plain(settings: str = "snapshot: 100 max_iter: 8") -> None:
    """Write a solver whose step can be captured."""
    Path("net.prototxt").write_text(net(3))
    Path("solver.prototxt").write_text(
        f'net: "net.prototxt" {EVERY} snapshot_prefix: "s" {settings}\n'
    )


def arranged(where: str, what: str, at: int, rank: int, within: int = SECONDS) -> str:
    return f"import faulty; faulty.arrange({where!r}, {at}, rank={rank}, what={what!r}, within={within})"


def is_good(iteration: int) -> None:
    """The snapshot of this iteration is there, whole, and can be loaded."""
    state = newest_good("s")
    assert state == f"s_iter_{iteration}.solverstate"
    param = text_format.Parse(Path("solver.prototxt").read_text(), SolverParameter())
    with closing(Solver(param, path="solver.prototxt")) as solver:
        solver.restore(state)
        assert solver.iter == iteration
        assert np.isfinite(solver.params.data).all()


# the work of a worker is killed


@cache
def straight(sync: str, size: int) -> Array:
    """Return the parameters after ten iterations without a fault."""
    root = solver("")
    with together(root, sync, size):
        root.step(10)
    return end(root)


def solver(prefix: str) -> Solver:
    settings = (
        f'{EVERY} snapshot_prefix: "{prefix}" snapshot: 100 max_iter: 10 ' if prefix else EVERY
    )
    param = text_format.Parse(f"{settings} net_param {{ {net(2)} }}", SolverParameter())
    return Solver(param, device=CudaDevice(0), precision="fp32")


def together(root: Solver, sync: str, size: int) -> P2PManager:
    devices = [root.device, *(CudaDevice(i) for i in range(1, size))]
    deadlines = {"step": 60.0, "set-up": 300.0, "test": 60.0}
    return P2PManager(
        root,
        devices,
        peers.prepare(peers.query(range(size))),
        SyncOptions(sync, deadlines=deadlines),
    )


def end(root: Solver) -> Array:
    root.device.flush()
    data = np.array(root.device.on_host(root.params.data))
    root.close()
    return data


def before(call: Callable[..., Any], wrong: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        wrong()
        return call(*arguments)

    return called


def after(call: Callable[..., Any], wrong: Callable[[], None]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        result = call(*arguments)
        wrong()
        return result

    return called


def kill(worker: WorkerSolver, place: str, iteration: int) -> None:
    """Make the worker fail in this iteration, or the first test after it."""

    def wrong() -> None:
        if worker.iter >= iteration:
            raise KilledError

    runner, test_pass = worker.iterations.captured, worker._test_passes[0]
    if place in PLACES:
        Killer(worker, iteration, place)
    elif place == "before replay":
        runner.enqueue = before(runner.enqueue, wrong)  # type: ignore[method-assign]
    elif place == "after replay":
        runner.enqueue = after(runner.enqueue, wrong)  # type: ignore[method-assign]
    elif place == "feeding":
        graphs = worker.iterations.step.graphs
        graphs.run_data_layers = before(graphs.run_data_layers, wrong)  # type: ignore[method-assign]
    elif place == "test":
        test_pass.batch = before(test_pass.batch, wrong)  # type: ignore[method-assign]
    else:
        test_pass.totals = before(test_pass.totals, wrong)  # type: ignore[method-assign]


REPLAYED = ("before replay", "after replay", "feeding", "test", "totals")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.parametrize("seed", range(24))
def test_the_work_of_a_worker_is_killed(seed: int, size: int, tmp_path: Path) -> None:
    places = PLACES + REPLAYED
    place, sync = places[seed % len(places)], SYNCS[seed % len(SYNCS)]
    iteration = int(np.random.default_rng(seed).integers(1, 9))
    threads = set(threading.enumerate())

    def run(root: Solver) -> None:
        with together(root, sync, size) as manager:
            kill(manager.workers[seed % (size - 1)], place, iteration)
            root.solve()

    with closing(solver(f"{tmp_path}/s")) as root:
        with pytest.raises(KilledError):
            run(root)
        if place in ("test", "totals"):
            assert root.iter >= iteration
            assert root.iter % 3 == 0
        else:
            # What a worker gave before its end may do for the root's iteration; the all-reduce of
            # iterations that GPUs had still before them is aborted, which rolls them back.
            last = iteration + (place in ("after replay", "on_gradients_ready"))
            assert iteration - AHEAD <= root.iter <= last
        reached = root.iter
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not [name for name in left if name.startswith("caffepy rank")]
    resumed = solver("")
    resumed.restore(f"{tmp_path}/s_iter_{reached}.solverstate")
    with together(resumed, sync, size):
        resumed.step(10 - resumed.iter)
    np.testing.assert_allclose(end(resumed), straight(sync, size), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.parametrize("sync", SYNCS)
def test_waits_end_then_the_snapshot_is_written_then_synchronizers_close(
    sync: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU waits for another while the root's memory is read, and what ranks share is freed when
    nothing uses it any more.
    """
    from caffepy.collectives.nccl import NcclSync

    order: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def run(root: Solver) -> None:
        with together(root, sync, size) as manager:
            manager.group.on_abort(note("waits end"))  # after the callbacks of the synchronizers
            kill(manager.workers[-1], "before replay", 6)
            root.solve()

    for kind in (Synchronizer, NcclSync):
        monkeypatch.setattr(kind, "close", before(kind.close, note("close")))
    monkeypatch.setattr(snapshot, "write", before(snapshot.write, note("write")))
    with closing(solver(f"{tmp_path}/s")) as root:
        start = time.monotonic()
        with pytest.raises(KilledError):
            run(root)
        assert time.monotonic() - start < 60 + SECONDS  # with the set-up, before the deadline
    assert order == ["waits end", "write", *["close"] * size]


# processes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_python_layer_raises(rank: int, folder: Path) -> None:
    write(folder, {"what": "raise", "rank": rank, "at": 6, "within": SECONDS})
    run = caffepy(on=GPUS)
    assert run.returncode == ConfigError.exit_code, run.stderr
    where = rf'{"" if rank == 0 else f"rank {rank}: "}net.prototxt:\d+:\d+: layer "faulty" \(Python\): .*it went wrong'
    assert re.search(f"^caffepy: error: {where}", run.stderr.splitlines()[-1])
    is_good(5)


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.usefixtures("folder")
def test_a_forward_pass_raises(sync: str) -> None:
    plain()
    run = caffepy(
        "--sync",
        sync,
        on=GPUS,
        code=arranged("caffepy.solver.runners:CapturedRunner.enqueue", "raise", 6, 1),
    )
    assert run.returncode == 70, run.stderr
    assert "RuntimeError: it went wrong\n(rank 1)" in run.stderr
    is_good(5)


@pytest.mark.usefixtures("folder")
def test_a_data_layer_fails() -> None:
    plain()
    code = f"""
import faulthandler
from caffepy.data.loader import SequentialLoader
from caffepy.core.errors import DataError
following = SequentialLoader._next
def fail(self):
    if self.state()["record"] >= 30 and self.batch_size == 3:
        faulthandler.dump_traceback_later({SECONDS}, exit=True)
        raise DataError("the record is damaged")
    return following(self)
SequentialLoader._next = fail
"""
    run = caffepy(on=GPUS, code=code)
    assert run.returncode == DataError.exit_code, run.stderr
    last = run.stderr.splitlines()[-1]
    assert re.search(
        r'^caffepy: error: (rank 1: )?net.prototxt:\d+:\d+: layer "data" \(Data\): the record', last
    ), last
    state = newest_good("s")
    assert state
    is_good(int(state.rpartition("_")[2].partition(".")[0]))


PHASE = {
    "set-up": ("caffepy.parallel.worker:WorkerSolver.follow", 1, 1),
    "step": ("caffepy.solver.runners:CapturedRunner.enqueue", 5, 1),
    "test": ("caffepy.solver.test_pass:TestPass.batch", 3, 1),
    "snapshot": ("caffepy.solver.snapshot:write", 1, 0),
}


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("phase", PHASE)
@pytest.mark.usefixtures("folder")
def test_a_signal(phase: str, number: str) -> None:
    plain("snapshot: 3 max_iter: 8" if phase == "snapshot" else "snapshot: 100 max_iter: 8")
    where, at, rank = PHASE[phase]
    # SIGHUP asks for a snapshot, and the run goes on to its end
    within = 4 * SECONDS if number == "SIGHUP" else SECONDS
    run = caffepy(on=GPUS, code=arranged(where, number, at, rank, within))
    states = sorted(int(path.stem.rpartition("_")[2]) for path in Path().glob("*.solverstate"))
    if number == "SIGHUP":
        assert run.returncode == 0, run.stderr
        assert states[-1] == 8
        assert len(states) > 1
    elif (phase, number) == ("set-up", "SIGINT"):  # nothing was learned that a snapshot could keep
        assert run.returncode == 130, run.stderr
        assert not states
    else:
        assert run.returncode == 75, run.stderr
        assert "Optimization stopped early." in run.stderr
        assert len(states) == 1
    if states:
        is_good(states[-1])


@pytest.mark.parametrize("sync", ["nccl", "tree"])
@pytest.mark.usefixtures("folder")
def test_a_worker_meets_an_error_of_cuda(sync: str) -> None:
    """All GPUs that reach each other's memory meet it, and nothing of theirs can be read after
    that.
    """
    plain("snapshot: 3 max_iter: 8")
    code = arranged("caffepy.solver.runners:CapturedRunner.enqueue", "illegal address", 6, 1)
    run = caffepy("--sync", sync, on=GPUS, code=code)
    assert run.returncode == DeviceError.exit_code, run.stderr
    last = run.stderr.splitlines()[-1]
    assert re.match(
        r"caffepy: error: GPU 0 and GPU 1 failed \(.*illegal.*--snapshot s_iter_3.solverstate$",
        last,
    ), last
    assert "Traceback" not in run.stderr
    assert "ignored" not in run.stderr
    is_good(3)


@pytest.mark.parametrize("what", ["hang", "endless kernel"])
@pytest.mark.parametrize("sync", ["nccl", "tree"])
@pytest.mark.usefixtures("folder")
def test_a_worker_that_hangs_is_found_by_its_deadline(sync: str, what: str) -> None:
    plain()
    code = arranged("caffepy.solver.runners:CapturedRunner.enqueue", what, 6, 1, DEADLINE + SECONDS)
    run = caffepy("--sync", sync, "--deadlines", f"step={DEADLINE}", on=GPUS, code=code)
    assert run.returncode == SyncError.exit_code, run.stderr
    assert f"rank 1 made no progress for {DEADLINE} s (step)" in run.stderr.splitlines()[-1]
    is_good(5)


BALLAST = """
import cupy
with cupy.cuda.Device(1):
    ballast = cupy.zeros({}, cupy.uint8)
"""


@pytest.fixture
def gpu_1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """GPU 1 without other tests of this module, in whatever process, that take much of its memory."""
    with open(Path(tempfile.gettempdir()) / "caffepy-test-gpu-1.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def memory_comes_back(free: int, total: int) -> None:
    """Wait until about so much of GPU 1 is free again."""
    until = time.monotonic() + SECONDS
    while gpu_memory(1)[0] < free - total // 8:
        assert time.monotonic() < until, "the memory is not back"
        time.sleep(0.1)


@pytest.mark.parametrize("what", ["raise", "illegal address", "hang"])
@pytest.mark.usefixtures("gpu_1", "folder")
def test_the_memory_comes_back(what: str) -> None:
    """The run takes a quarter of GPU 1 more than it needs, so that others on that GPU do not
    matter.
    """
    free, total = gpu_memory(1)
    plain()
    code = BALLAST.format(total // 4) + arranged(
        "caffepy.solver.runners:CapturedRunner.enqueue", what, 6, 1, DEADLINE + SECONDS
    )
    run = caffepy("--deadlines", f"step={DEADLINE}", on=GPUS, code=code)
    assert run.returncode not in (0, 1), run.stderr
    memory_comes_back(free, total)


@pytest.mark.parametrize("phase", PHASE)
@pytest.mark.parametrize("number", ["SIGKILL", "SIGABRT"])
@pytest.mark.usefixtures("gpu_1", "folder")
def test_a_run_that_is_killed_leaves_gpus_that_work(number: str, phase: str) -> None:
    """Its memory comes back, and the same command goes on with the same GPUs."""
    free, total = gpu_memory(1)
    plain("snapshot: 3 max_iter: 8")
    where, at, rank = PHASE[phase]
    code = BALLAST.format(total // 4) + arranged(where, number, at, rank)
    run = caffepy(on=GPUS, code=code)
    # faulthandler, which reads the stacks of threads that go on running, may meet a SIGSEGV itself
    ends = {"SIGKILL": [-signal.SIGKILL], "SIGABRT": [-signal.SIGABRT, -signal.SIGSEGV]}
    assert run.returncode in ends[number], run.stderr
    memory_comes_back(free, total)
    again = caffepy("--snapshot", "auto", on=GPUS)
    assert again.returncode == 0, again.stderr
    is_good(8)
