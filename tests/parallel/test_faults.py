"""A fault in one solver ends all of them.

What is shown, for errors, signals, hangs, lost devices and killed workers, in any rank and phase:

- all solvers stop at the same iteration, and the process ends with the fault's exit code;
- the message names the rank of the first fault, not of one that follows from it;
- the snapshot that is due is written, and a run resumed from it ends like one without a fault;
- no thread or process is left, and nothing waits longer than its deadline.
"""

import gc
import math
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from caffepy.collectives.rank_group import PATIENCE
from caffepy.collectives.sync import HostSync
from caffepy.collectives.topology import all_joined
from caffepy.core.errors import ConfigError, DataError, DeviceError, SyncError
from caffepy.data.sources import open_database
from caffepy.data.write import write_database
from caffepy.device.device import Device
from caffepy.ops.update_state import StepResult, StepStatus
from caffepy.parallel import watchdog
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.parallel.worker import WorkerSolver
from caffepy.solver import Solver
from tests.nets import library
from tests.nets.library import DIGITS
from tests.parallel.cases import Run, net
from tests.parallel.faults import (
    EVERY,
    NOTHING,
    PLACES,
    KilledError,
    Killer,
    caffepy,
    goes_on_exactly,
    write,
)
from tests.solver.cases import solver_of


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile what the CPU runs, so that no deadline passes meanwhile."""
    Run(2, net(3), until=2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    return tmp_path


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_forward(rank: int, folder: Path) -> None:
    write(folder, {"what": "raise", "rank": rank, "at": 6})
    run = caffepy()
    assert run.returncode == ConfigError.exit_code
    last = run.stderr.splitlines()[-1]
    where = rf'{"" if rank == 0 else f"rank {rank}: "}net.prototxt:\d+:\d+: layer "faulty" \(Python\): .*it went wrong'
    assert re.search(f"^caffepy: error: {where}", last), last
    saved = sorted(path.name for path in folder.glob("*.solverstate"))
    assert saved == ["s_iter_5.solverstate"]
    if rank != 1:
        goes_on_exactly(folder)


@pytest.mark.parametrize("record", [38, 40])
def test_a_record_that_cannot_be_read(record: int, folder: Path) -> None:
    named = "rank 1: " if record == 40 else ""
    shutil.copytree(DIGITS / "digits_train_lmdb", "db")
    source = open_database("db", "LMDB")
    records = source.take(60)
    source.close()
    shutil.rmtree("db")
    with write_database("db") as writer:
        for i, (key, value) in enumerate(records):
            writer.put(bytes(key).decode(), bytes(value) if i != record else b"no datum")
    write(folder, NOTHING)
    text = (folder / "net.prototxt").read_text()
    (folder / "net.prototxt").write_text(text.replace(f"{DIGITS}/digits_train_lmdb", "db"))
    run = caffepy()
    assert run.returncode == DataError.exit_code
    assert re.search(rf'error: {named}net.prototxt:.*layer "data" \(Data\): db: record', run.stderr)
    assert (
        "The data failed; what was learned up to iteration 4 is saved before the run ends"
        in run.stderr
    )
    assert Path("s_iter_4.solverstate").exists()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("phase", ["set-up", "step", "test"])
def test_a_signal_stops_all_with_a_snapshot(phase: str, number: str, folder: Path) -> None:
    orders = {
        "set-up": {"at": "setup", "rank": 1},
        "step": {"at": 5, "rank": 2},
        "test": {"at": 3, "rank": 1, "phase": 1},
    }
    write(folder, {"what": number, **orders[phase]})
    run = caffepy()
    assert "Optimization stopped early." in run.stderr
    unlearned = (phase, number) == (
        "set-up",
        "SIGINT",
    )  # nothing was learned that a snapshot could keep
    assert run.returncode == (130 if unlearned else 75), run.stderr[-2000:]
    assert len(list(folder.glob("*.solverstate"))) == int(not unlearned)
    if number == "SIGTERM":
        goes_on_exactly(folder)


IN_SNAPSHOT = """
import os, signal
from caffepy.solver import snapshot
write = snapshot.write
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    write(*arguments)
snapshot.write = interrupted
"""


def test_a_signal_in_a_snapshot(folder: Path) -> None:
    write(folder, NOTHING, "snapshot: 3 max_iter: 8")
    run = caffepy(code=IN_SNAPSHOT)
    assert run.returncode == 75
    assert [path.name for path in folder.glob("*.solverstate")] == ["s_iter_3.solverstate"]
    goes_on_exactly(folder)


IN_A_WORKER = """
from caffepy.core.errors import DataError
from caffepy.parallel.worker import WorkerSolver
from caffepy.solver import resume_state
check = resume_state.check_params
def failing(worker):
    raise DataError("the records are gone")
def check_params(*arguments):
    check(*arguments)
    WorkerSolver.wait_idle = failing
resume_state.check_params = check_params
"""


@pytest.mark.parametrize("asked_by", ["SIGTERM", "the solver"])
def test_an_error_of_a_worker_during_a_snapshot(asked_by: str, folder: Path) -> None:
    """The root meets the error where it waits for the workers; the run ends, and saves then."""
    if asked_by == "SIGTERM":
        write(folder, {"what": "SIGTERM", "rank": 0, "at": 5})
    else:
        write(folder, NOTHING, "snapshot: 5 max_iter: 8")
    run = caffepy(on="--cpu 2", code=IN_A_WORKER)
    assert run.returncode == DataError.exit_code
    assert run.stderr.splitlines()[-1] == "caffepy: error: rank 1: the records are gone"
    assert "No snapshot" not in run.stderr
    assert "what was learned up to iteration 5 is saved before the run ends" in run.stderr
    assert [path.name for path in folder.glob("*.solverstate")] == ["s_iter_5.solverstate"]
    goes_on_exactly(folder, on="--cpu 2")


def test_two_interrupts_end_at_once(folder: Path) -> None:
    write(folder, {"what": "twice", "rank": 1, "at": 5})
    run = caffepy()
    assert run.returncode == 130
    assert not list(folder.glob("*.solverstate"))


@pytest.mark.parametrize("how", ["hang", "deaf"])
@pytest.mark.usefixtures("compiled")
def test_a_root_that_hangs_is_found_and_named(how: str, folder: Path) -> None:
    write(folder, {"what": how, "rank": 0, "at": 6})
    run = caffepy("--deadlines", "step=5")
    assert run.returncode == SyncError.exit_code
    assert "rank 0 made no progress for 5 s (step)" in run.stderr
    assert "time.sleep(60)" in run.stderr, "the stacks of all threads"
    assert ("the main thread does not answer" in run.stderr) == (how == "deaf")
    assert Path("s_iter_5.solverstate").exists()
    goes_on_exactly(folder)


@pytest.mark.usefixtures("compiled")
def test_a_worker_that_hangs_is_found_and_named(folder: Path) -> None:
    write(folder, {"what": "hang", "rank": 2, "at": 6})
    run = caffepy("--deadlines", "step=5")
    assert run.returncode == SyncError.exit_code
    assert run.stderr.splitlines()[-1].startswith(
        "caffepy: error: rank 2 made no progress for 5 s (step)"
    )
    assert re.search(r"rank 2:\n(.*\n)*.*time\.sleep\(60\)", run.stderr)
    assert Path("s_iter_5.solverstate").exists()
    assert "Still at work when the run ended: rank 2" in run.stderr


@pytest.mark.parametrize("seed", range(20))
def test_the_work_of_a_worker_is_killed(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    size, place, iteration = (
        int(draw.integers(2, 6)),
        PLACES[seed % len(PLACES)],
        int(draw.integers(1, 8)),
    )
    rank, sync = int(draw.integers(1, size)), ("tree", "flat")[seed % 2]
    settings = f'{EVERY} snapshot_prefix: "{tmp_path}/s" snapshot: 100 max_iter: 10 '

    def run(root: Solver) -> None:
        with P2PManager(
            root, [Device() for _ in range(size)], all_joined(size), SyncOptions(sync)
        ) as manager:
            Killer(manager.workers[rank - 1], iteration, place)
            root.solve()

    threads = set(threading.enumerate())
    with closing(solver_of(settings, net(2))) as root:
        with pytest.raises(KilledError):
            run(root)
        late = place == "on_gradients_ready"  # when the root has what it needs to end the iteration
        assert iteration <= root.iter <= iteration + late
    left = {
        thread.name
        for thread in set(threading.enumerate()) - threads
        if not thread.name.startswith("caffepy-")
    }
    assert left <= {"caffepy watch"}
    state = f"{tmp_path}/s_iter_{root.iter}.solverstate"
    assert Path(state).exists()
    resumed = Run(size, net(2), sync, settings=settings, until=10, state=state)
    straight = Run(size, net(2), sync, settings=settings, until=10)
    np.testing.assert_array_equal(resumed.data[0], straight.data[0])


class Ends:
    """Replaces HostSync.close: keeps the patience of each call, and True if all solvers were alone
    by then.
    """

    def __init__(self, then: Callable[[float], object]) -> None:
        self.solvers: list[Solver] = []
        self.patience: list[float] = []
        self.alone: list[bool] = []
        self._then = then

    def __call__(self, patience: float = PATIENCE) -> None:
        callbacks = [
            callback for solver in self.solvers for callback in solver.iterations.step.callbacks
        ]
        self.alone.append(not any(isinstance(callback, HostSync) for callback in callbacks))
        self.patience.append(patience)
        self._then(patience)


class Late:
    """A callback that fails in the last of eight iterations, when the manager has begun to end."""

    def __init__(self, worker: Solver, ended: threading.Event) -> None:
        self._worker, self._ended = worker, ended

    def on_start(self) -> None:
        pass

    def on_gradients_ready(self) -> None:
        if self._worker.iter == 7:
            assert self._ended.wait(30)
            raise KilledError


def fails(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[float], object], late: bool = False
) -> Ends:
    """Train eight iterations with three solvers, of which rank 2 fails."""
    ends, closed = Ends(then), set[int]()

    def close(worker: WorkerSolver) -> None:
        closed.add(worker.rank)

    def run(root: Solver) -> None:
        with P2PManager(
            root, [Device() for _ in range(3)], all_joined(3), SyncOptions("flat")
        ) as manager:
            ends.solvers += [root, *manager.workers]
            worker = manager.workers[1]
            if late:
                worker.add_callback(Late(worker, manager.watchdog.stopped))
            else:
                Killer(worker, 2, "before_forward")
            root.step(8)

    with monkeypatch.context() as patch:
        patch.setattr(HostSync, "close", lambda _, *patience: ends(*patience))
        patch.setattr(WorkerSolver, "close", close)
        with closing(solver_of(EVERY, net(2))) as root:
            with pytest.raises(KilledError):
                run(root)
            with pytest.raises(SyncError, match="until an error ended that, and cannot go on"):
                root.step(1)
    assert closed == {1, 2}
    return ends


@pytest.mark.parametrize("late", [False, True])
def test_all_solvers_are_alone_before_a_synchronizer_ends(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends in no rank while a captured graph of any rank uses it."""
    alone = fails(monkeypatch, lambda patience: None, late).alone
    assert alone[-3:] == [True] * 3


def test_what_earlier_solvers_left_is_freed_before_a_team_begins() -> None:
    class Left:
        """Refers to itself, as solvers do."""

    left = Left()
    left.self = left  # type: ignore[attr-defined]
    there = weakref.ref(left)
    gc.disable()
    try:
        del left
        assert there()
        with (
            closing(solver_of(EVERY, net(2))) as root,
            P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions("flat")),
        ):
            assert not there()
    finally:
        gc.enable()


def test_a_root_none_of_whose_layers_are_shared_cannot_go_on_either() -> None:
    text = (
        library.inputs("in", x=(2, 3))
        + library.inner_product("ip", "x", 4, filler="", top="y")
        + library.layer("Reduction", "loss", "y", "loss_weight: 1", top="l")
    )
    devices = [Device(), Device()]

    def run(root: Solver) -> None:
        with P2PManager(root, devices, all_joined(2), SyncOptions("flat")) as manager:
            Killer(manager.workers[0], 2, "before_forward")
            root.step(4)

    with closing(solver_of("", text)) as root:
        with pytest.raises(KilledError):
            run(root)
        for more in (lambda: root.step(1), lambda: run(root)):
            with pytest.raises(SyncError, match="and cannot go on"):
                more()


def test_a_root_goes_on_alone_if_others_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(worker: WorkerSolver, *_: object) -> None:
        raise DeviceError("no memory is left")

    def run(root: Solver) -> None:
        with P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions("flat")):
            pass

    monkeypatch.setattr(WorkerSolver, "follow", follow)
    with closing(solver_of(EVERY, net(2))) as root:
        with pytest.raises(DeviceError, match="no memory is left"):
            run(root)
        root.step(2)
        assert root.iter == 2


def test_all_synchronizers_together_have_so_long_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SETTLING", 0.2)
    first, *others = fails(monkeypatch, time.sleep).patience
    assert 0 < first <= 0.2
    assert others == [0, 0]


def test_an_error_of_an_end_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(patience: float) -> None:
        raise RuntimeError("the GPU is lost")

    assert len(fails(monkeypatch, end).alone) == 3


HANGING_DATA = """
import time
from caffepy.data.loader import SequentialLoader
following = SequentialLoader._next
def hang(self):
    if self.state()["record"] >= 60 and self.batch_size == 3:
        time.sleep(60)
    return following(self)
SequentialLoader._next = hang
"""


@pytest.mark.usefixtures("compiled")
def test_data_that_hangs_is_found_and_the_run_ends(folder: Path) -> None:
    write(folder, NOTHING)
    run = caffepy("--deadlines", "step=5", code=HANGING_DATA)
    assert run.returncode == SyncError.exit_code
    assert (
        "made no progress for 5 s (step)"
        in run.stderr.splitlines()[-1] + run.stderr.splitlines()[-2]
    )
    assert "Reading data hangs" in run.stderr


LOST = """
import threading
from caffepy.device.device import Device
from caffepy.core.errors import DeviceError
from caffepy.solver.step import TrainingStep
from faulty import this_rank
dead = threading.Event()
Device.lost = property(lambda device: "cudaErrorIllegalAddress: no such memory" if dead.is_set() else "")
def unreadable(*_):
    if dead.is_set():
        raise DeviceError("GPU 0 failed: cudaErrorIllegalAddress: no such memory")
read, ready, passes = Device.on_host, TrainingStep.gradients_ready, []
def on_host(device, array):
    unreadable()
    return read(device, array)
def gradients_ready(step):
    unreadable()
    if this_rank() == RANK:
        passes.append(None)
        if len(passes) == 6:
            dead.set()
            unreadable()
    ready(step)
Device.on_host, Device.synchronize, TrainingStep.gradients_ready = on_host, unreadable, gradients_ready
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("every", [3, 100])
def test_devices_that_cannot_be_read_any_more(rank: int, every: int, folder: Path) -> None:
    write(folder, NOTHING, f"snapshot: {every} max_iter: 8")
    run = caffepy(code=LOST.replace("RANK", str(rank)))
    assert run.returncode == DeviceError.exit_code, run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        "caffepy: error: GPU 0 and GPU 0 and GPU 0 failed (cudaErrorIllegalAddress: no such memory)"
    )
    assert last.endswith(
        "--snapshot s_iter_3.solverstate" if every == 3 else "to lose less the next time"
    )
    assert "Traceback" not in run.stderr
    left = sorted(path.name for path in folder.glob("s_iter*"))
    assert left == (
        [f"s_iter_3.{kind}" for kind in ("caffemodel", "caffepystate", "solverstate")]
        if every == 3
        else []
    )


class Endless(Device):
    """A device whose work never ends, from a certain time on."""

    ends = True

    @property
    def idle(self) -> bool:
        return self.ends


@pytest.mark.usefixtures("compiled")
def test_a_device_that_never_ends_is_named_and_not_the_root_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[object] = []
    monkeypatch.setattr("caffepy.parallel.workers.abandon", kept.append)
    devices, ended = [Device(), Endless(), Device()], threading.Event()
    passes = iter(range(100))

    def run(root: Solver) -> None:
        with P2PManager(root, devices, all_joined(3), SyncOptions("flat")) as manager:
            group = manager.group
            group.on_abort(ended.set)

            class Waiting:
                def on_start(self) -> None:
                    pass

                def on_gradients_ready(self) -> None:
                    if next(passes) == 4:
                        devices[1].ends = False  # type: ignore[attr-defined]
                        group.deadlines["step"] = 1.0
                        assert ended.wait(30)  # as in CUDA

            root.add_callback(Waiting())
            root.step(8)

    with closing(solver_of(EVERY, net(2))) as root:
        with pytest.raises(SyncError, match=r"^rank 1 made no progress for 1 s \(step\)$"):
            run(root)
        assert root.iter == 4
    assert kept


class GivingUp:
    """A callback of the root at whose n-th call a deadline passes; `then` is called while the rank that
    hangs is being found.
    """

    def __init__(
        self, manager: P2PManager, at: int, then: Callable[[P2PManager], object], early: bool
    ) -> None:
        self._manager, self._left, self._then, self._early = manager, at, then, early

    def on_start(self) -> None:
        if self._early:
            self._count()

    def on_gradients_ready(self) -> None:
        if not self._early:
            self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left:
            return
        group, found = self._manager.group, threading.Event()

        def hung_ranks(missing: list[int]) -> list[int]:
            found.set()
            time.sleep(0.5)
            return [1]

        group.hung_ranks = hung_ranks
        threading.Thread(target=group.abort_hung, args=([0], 8.0), daemon=True).start()
        assert found.wait(20)
        self._then(self._manager)


def damaged(*_: object) -> None:
    raise DataError("the record is damaged")


def worker_fails(manager: P2PManager) -> None:
    manager.workers[0].net.before_forward.append(damaged)


AFTERMATH: dict[str, tuple[bool, Callable[[P2PManager], object]]] = {
    "loss": (True, lambda manager: setattr(manager.root.update_state, "loss", lambda: math.nan)),
    "mean": (False, lambda manager: setattr(manager.root.update_state, "mean", lambda: math.nan)),
    "step_result": (
        False,
        lambda manager: setattr(manager.root.update_state, "step_results", lambda wait: [STOPPED]),
    ),
    "data": (True, lambda manager: manager.root.net.before_forward.append(damaged)),
    "worker": (True, worker_fails),
    "test": (False, lambda manager: setattr(manager.root._test_passes[0], "totals", damaged)),
}
STOPPED = StepResult(math.nan, 0.0, 1.0, 1.0, StepStatus.STOPPED)


@pytest.mark.parametrize("what", AFTERMATH)
def test_what_comes_of_giving_a_rank_up_is_no_error_of_its_own(what: str, tmp_path: Path) -> None:
    early, then = AFTERMATH[what]
    settings = f'{EVERY} snapshot_prefix: "{tmp_path}/s" snapshot: 100 max_iter: 10 '

    def run(root: Solver) -> None:
        with P2PManager(
            root, [Device() for _ in range(2)], all_joined(2), SyncOptions("flat")
        ) as manager:
            root.add_callback(GivingUp(manager, 6, then, early))
            root.solve()

    with closing(solver_of(settings, net(2))) as root:
        with pytest.raises(SyncError, match=r"^rank 1 made no progress for 8 s \(step\)$"):
            run(root)
        assert root.iter == 5
        assert np.isfinite(root.iterations.display.window.smoothed)
    assert Path(f"{tmp_path}/s_iter_5.solverstate").exists()


def test_an_abort_tells_which_solver_it_was(folder: Path) -> None:
    write(folder, {"what": "abort", "at": 3, "rank": 2})
    run = caffepy()
    assert run.returncode == -signal.SIGABRT
    threads = re.search(r"Threads of solvers 0 to 2: (\w+), (\w+), (\w+)", run.stderr)
    assert threads
    assert f"Current thread {threads[3]} (most recent call first):" in run.stderr
