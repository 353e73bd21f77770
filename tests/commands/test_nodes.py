"""caffepy train in processes that mpirun starts: equal to one process, whatever goes wrong said once.

tests/data/test_deal.py counts the records that each node decodes, tests/parallel/test_nodes.py has
faults in every phase, in threads.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from caffepy.core.errors import STOPPED, ConfigError, DataError, SyncError, UsageError
from caffepy.solver import snapshot
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, ulfm, version  # noqa: F401  # fixtures
from tests.nets import library
from tests.parallel.cases import NET, net

pytestmark = [pytest.mark.usefixtures("version"), pytest.mark.xdist_group("mpirun")]

FAULTY = """
import os, resource, signal
NODE = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

class Layer:
    def setup(self, bottom, top):
        self.orders, self.passes = eval(self.param_str), 0
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        self.passes += 1
        if self.phase == 0 and (NODE, self.passes) in self.orders:
            exec(self.orders[NODE, self.passes])
    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff
"""
LAYER = """
layer { name: "faulty" type: "Python" bottom: "pool" top: "pool"
  python_param { module: "faulty" layer: "Layer" param_str: "ORDERS" } }
layer { name: "ip" """
SETTINGS = (
    'type: "Adam" base_lr: 0.002 lr_policy: "fixed" display: 4 test_iter: 9 test_interval: 8 '
    'random_seed: 3 snapshot_prefix: "s" net: "net.prototxt" '
)
DROPOUT = library.in_place("Dropout", "drop", "pool")
ULFM = ("--with-ft", "ulfm")
FOUND = "caffepy: error: "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(orders: dict[tuple[int, int], str] | None = None, settings: str = "max_iter: 16") -> None:
    """Write a solver and its net; at a pass of a node its Python layer does what `orders` say."""
    text = net(3, NET)
    if orders is None:
        text = text.replace('layer { name: "ip"', DROPOUT + 'layer { name: "ip"')
    else:
        escaped = repr(orders).replace("\\", r"\\").replace('"', r"\"")
        text = text.replace('layer { name: "ip" ', LAYER.replace("ORDERS", escaped))
        Path("faulty.py").write_text(FAULTY)
    Path("matplotlib.py").write_text("raise ImportError")  # curves take seconds
    Path("net.prototxt").write_text(text)
    Path("solver.prototxt").write_text(SETTINGS + settings + "\n")


def start(nodes: int, *arguments: str, options: Sequence[str] = ()) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt"]
    if nodes > 1:
        assert MPIRUN
        program = [MPIRUN, "--oversubscribe", *options, "-n", str(nodes), *program]
    environment = ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0", "MPLBACKEND": "agg"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*program, *arguments], stderr=pipe, text=True, env=environment)


def train(
    nodes: int, *arguments: str, options: Sequence[str] = (), cpu: int = 1
) -> tuple[int, str]:
    """The exit code of a run of so many processes with so many solvers each, and stderr."""
    with start(nodes, "--cpu", str(cpu), *arguments, options=options) as process:
        _, said = process.communicate(timeout=120)
    return process.returncode, said


def message(said: str) -> str:
    """The one message of a run that failed."""
    assert said.count(FOUND) == 1, said
    assert "Traceback" not in said, said
    return said.split(FOUND)[1].splitlines()[0]


def results(said: str) -> list[str]:
    """Losses and scores."""
    lines = (line.partition("] ")[2] for line in said.splitlines())
    kept = (line for line in lines if "net output" in line or ", loss = " in line)
    return [line.partition(" (")[0] + line.partition(")")[2] for line in kept]


def is_whole(state: str) -> bool:
    content = snapshot.read_sidecar(state)
    assert content
    model = snapshot.find_model(snapshot.read_state(state).learned_net, state)
    snapshot.verify(content, state, model)
    return True


def test_the_split_changes_nothing_also_when_resumed(folder: Path) -> None:
    said, models = {}, {}
    for nodes, cpu in ((1, 4), (2, 2), (4, 1)):
        place = folder / f"{nodes}x{cpu}"
        place.mkdir()
        os.chdir(place)
        write(settings="max_iter: 16 snapshot: 7")
        code, said[nodes] = train(nodes, cpu=cpu)
        assert code == 0, said[nodes]
        models[nodes] = Path("s_iter_16.caffemodel").read_bytes()
        states = [f"s_iter_{i}.{kind}" for i in (14, 16, 7) for kind in snapshot_kinds()]
        found = sorted(path.name for path in place.glob("s_*"))
        assert found == sorted([*states, "s_metrics.csv"])
    assert results(said[1]), said[1]
    for nodes in (2, 4):
        assert models[nodes] == models[1]
        assert results(said[nodes]) == results(said[1])
    for path in (folder / "4x1").glob("s_iter_1*"):
        path.unlink()
    code, resumed = train(2, "--snapshot", "auto", "--log-dir", "logs", cpu=2)  # what 4x1 saved
    assert code == 0, resumed
    assert "Resuming from s_iter_7.solverstate" in resumed
    assert Path("s_iter_16.caffemodel").read_bytes() == models[1]
    logs = [path for path in Path("logs").iterdir() if ".INFO." in path.name]
    assert len([path for path in logs if not path.is_symlink()]) == 2


def snapshot_kinds() -> tuple[str, ...]:
    return "caffemodel", "caffepystate", "solverstate"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.usefixtures("ulfm")
def test_a_killed_process_ends_the_others_with_a_snapshot(victim: int) -> None:
    write({(victim, 6): "os.kill(os.getpid(), signal.SIGKILL)"}, "max_iter: 5000 snapshot: 5000")
    code, said = train(2, options=ULFM)
    assert code == SyncError.exit_code, said
    assert f"universal rank {victim}) has died, iteration 5" in message(said)
    assert is_whole("s_iter_5.solverstate")


@pytest.mark.usefixtures("ulfm")
def test_a_process_killed_while_it_writes_the_first_snapshot_costs_nothing() -> None:
    kill = "import caffepy.core.files as f, os; f.os.fsync = lambda *_: os.kill(os.getpid(), 9)"
    write({(0, 6): kill}, "max_iter: 5000 snapshot: 6")
    code, said = train(2, options=ULFM)
    assert code == SyncError.exit_code, said
    assert "universal rank 0) has died, iteration 6" in message(said)
    assert is_whole("s_iter_6.solverstate")


@pytest.mark.usefixtures("ulfm")
def test_a_stopped_process_is_named_at_the_deadline() -> None:
    """Node 2 waits for node 0, which waits for node 1."""
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    write({(1, 6): stop}, "max_iter: 5000 snapshot: 5000")
    code, said = train(3, "--deadlines", "step=3", options=ULFM)
    assert code == SyncError.exit_code, said
    told = "universal rank 1) made no progress for 3 s (step, iteration 5)"
    assert told in message(said)
    assert "node 0 (" not in message(said)
    assert is_whole("s_iter_5.solverstate")


def test_a_signal_to_mpirun_stops_all_with_one_snapshot() -> None:
    asks = "os.kill(os.getppid(), signal.SIGUSR1)"
    write({(1, 6): asks}, "max_iter: 500000 snapshot: 500000")
    code, said = train(2)
    assert code == STOPPED, said
    (state,) = Path().glob("*.solverstate")
    assert is_whole(state.name)


def test_processes_end_without_mpirun() -> None:
    ends = "open(f'{NODE}.pid', 'w').write(str(os.getpid())); os.kill(os.getppid(), signal.SIGKILL)"
    write({(1, 6): ends, (0, 3): ends.split(";")[0]}, "max_iter: 500000 snapshot: 500000")
    code, _ = train(2)
    assert code == -signal.SIGKILL
    until = time.monotonic() + 30
    for path in map(Path, ("0.pid", "1.pid")):
        while is_running(int(path.read_text())):
            assert time.monotonic() < until, "an orphan is left"
            time.sleep(0.1)
    (state,) = Path().glob("*.solverstate")
    assert is_whole(state.name)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_error_of_a_layer_of_one_process_ends_all() -> None:
    write({(1, 6): "raise ValueError('it went wrong')"}, "max_iter: 5000 snapshot: 5000")
    code, said = train(3)
    assert code == ConfigError.exit_code, said
    assert said.count(FOUND) == 1, said
    assert ", iteration 5): " in said.split(FOUND)[1]
    assert "rank 1 (host " in said.split(FOUND)[1]
    assert "it went wrong" in said.split(FOUND)[1]
    assert is_whole("s_iter_5.solverstate")


def test_a_full_disk_of_the_first_process_costs_a_snapshot_only() -> None:
    write({(0, 3): "limit(300)", (0, 7): "limit(1 << 30)"}, "max_iter: 10 snapshot: 5")
    code, said = train(2)
    assert code == 0, said
    assert said.count("No snapshot of iteration 5: ") == 1
    assert [path.name for path in Path().glob("*.solverstate")] == ["s_iter_10.solverstate"]
    assert is_whole("s_iter_10.solverstate")


def test_a_disk_that_stays_full_is_told_once() -> None:
    write({(0, 3): "limit(300)"}, "max_iter: 10")
    code, said = train(2)
    assert code == ConfigError.exit_code, said
    assert "s_iter_10" in message(said)


@pytest.mark.parametrize("what", ["solver", "net", "source"])
def test_one_process_that_has_other_files_is_named(what: str) -> None:
    """Its working directory is another."""
    write(settings="max_iter: 8")
    os.mkdir("other")
    for name in ("solver.prototxt", "net.prototxt"):
        shutil.copy(name, "other")
    path, (old, new) = {
        "solver": ("other/solver.prototxt", ("max_iter: 8", "max_iter: 9")),
        "net": ("other/net.prototxt", ("batch_size: 3", "batch_size: 4")),
        "source": ("net.prototxt", (str(library.DIGITS), "data")),
    }[what]
    text = Path(path).read_text()
    assert old in text
    for name in (path, *(["other/net.prototxt"] if what == "source" else [])):
        Path(name).write_text(text.replace(old, new))
    if what == "source":
        shutil.copytree(str(library.DIGITS), "data")
    own = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt", "--cpu", "1"]
    assert MPIRUN
    run = subprocess.run(
        [*(MPIRUN, "--oversubscribe", "-n", "1"), *own, *(":", "-n", "1", "-wdir", "other"), *own],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert run.returncode == (DataError if what == "source" else ConfigError).exit_code, run.stderr
    assert "node 1 (host " in message(run.stderr)
    assert {"source": "lmdb"}.get(what, what) in message(run.stderr)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--on-divergence", "rollback:0.1"], "--on-divergence rollback is for one process"),
        (["--max-restarts", "2"], "--max-restarts is for one process"),
        (["--weights", "a", "--snapshot", "b"], "not both"),
    ],
    ids=["rollback", "restarts", "both"],
)
def test_what_cannot_be_is_told_once(arguments: list[str], told: str) -> None:
    write()
    code, said = train(2, *arguments)
    assert code == UsageError.exit_code, said
    assert told in message(said)


def test_a_gpu_for_each_process_needs_processes() -> None:
    write()
    with start(1, "--gpu", "local") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == UsageError.exit_code
    assert "--gpu local is for processes that mpirun or srun started" in message(said)
