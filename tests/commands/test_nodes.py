"""caffepy train in processes that mpirun starts: equal to one process, whatever goes wrong said once.

tests/data/test_deal.py and tests/cli/test_mpirun_data.py count the records that each node decodes,
tests/parallel/test_nodes.py has faults in every phase, in threads.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from caffepy.cli import main
from caffepy.collectives.world import World
from caffepy.commands import nodes as joined
from caffepy.core import abandoned
from caffepy.core.errors import STOPPED, ConfigError, DataError, SyncError, UsageError
from caffepy.solver import snapshot
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, ulfm, version  # noqa: F401  # fixtures
from tests.collectives.threads_world import run_nodes
from tests.nets import library
from tests.parallel.cases import NET, net

pytestmark = pytest.mark.usefixtures("folder", "version")

FAULTY = """
import glob, os, resource, signal, time
NODE = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

def meet(nodes):
    open(f"{NODE}.met", "w").close()
    while len(glob.glob("*.met")) < nodes:
        time.sleep(0.01)

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


def write(
    orders: dict[tuple[int, int], str] | None = None,
    settings: str = "max_iter: 16",
    batch: int = 3,
) -> None:
    """Write a solver and its net; at a pass of a node its Python layer does what `orders` say."""
    text = net(batch, NET)
    if orders is None:
        text = text.replace('layer { name: "ip"', DROPOUT + 'layer { name: "ip"')
    else:
        escaped = repr(orders).replace("\\", r"\\").replace('"', r"\"")
        text = text.replace('layer { name: "ip" ', LAYER.replace("ORDERS", escaped))
        Path("faulty.py").write_text(FAULTY)
    Path("matplotlib.py").write_text("raise ImportError")  # curves take seconds
    Path("net.prototxt").write_text(text)
    Path("solver.prototxt").write_text(SETTINGS + settings + "\n")


def once_all_are_there(nodes: int, order: str, node: int = 1) -> dict[tuple[int, int], str]:
    """Orders for iteration 5, in which one of so many nodes does this when all have begun it: one
    that is late would still be in the iteration before.
    """
    return {(i, 6): f"meet({nodes}){f'; {order}' if i == node else ''}" for i in range(nodes)}


def train(
    nodes: int, *arguments: str, options: Sequence[str] = (), cpu: int = 1
) -> tuple[int, str]:
    """The exit code of a run of so many processes with so many solvers each, and stderr."""
    assert MPIRUN
    program = [MPIRUN, "--oversubscribe", *options, "-n", str(nodes), sys.executable, "-m"]
    program += ["caffepy", "train", "--solver", "solver.prototxt", "--cpu", str(cpu), *arguments]
    environment = ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0", "MPLBACKEND": "agg"}
    ended = subprocess.run(program, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    return ended.returncode, ended.stderr


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


class Threads:
    """Runs a command line in each of two threads, which are nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._own, self._capsys = threading.local(), capsys
        self._environment = partial(monkeypatch.setenv, "OMPI_COMM_WORLD_SIZE")
        monkeypatch.setitem(sys.modules, "matplotlib", None)  # curves take seconds
        monkeypatch.setattr("caffepy.commands.nodes.join_launched", lambda *_: self._own.world)
        monkeypatch.setattr("caffepy.commands.nodes._node", 0)

    def __call__(self, *arguments: Sequence[str]) -> tuple[list[int], str]:
        """The exit codes of both, and stderr; one that another's message stands for raises its."""
        self._environment("2")

        def node(world: World) -> int:
            self._own.world = world
            return main.run(["train", *arguments[world.node], "--cpu", "1", "--threads", "1"])

        ended = run_nodes(2, node)
        codes = [end.code if isinstance(end, SystemExit) else end for end in ended]
        return codes, self._capsys.readouterr().err

    def alone(self, *arguments: str, cpu: int = 1) -> tuple[int, str]:
        """The exit code of one process with so many solvers, and stderr."""
        self._environment("1")
        command = ["train", "--solver", "solver.prototxt", "--cpu", str(cpu), *arguments]
        return main.run(command), self._capsys.readouterr().err


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Threads:
    return Threads(monkeypatch, capsys)


def test_the_split_changes_nothing_also_when_resumed(folder: Path, threads: Threads) -> None:
    """One process with 4 solvers, 4 with one, and 2 with 2 solvers that go on."""
    said, models = {}, {}
    for nodes, cpu in ((1, 4), (4, 1)):
        place = folder / f"{nodes}x{cpu}"
        place.mkdir()
        os.chdir(place)
        write(settings="max_iter: 16 snapshot: 7")
        code, said[nodes] = threads.alone(cpu=cpu) if nodes == 1 else train(nodes, cpu=cpu)
        assert code == 0, said[nodes]
        models[nodes] = Path("s_iter_16.caffemodel").read_bytes()
        states = [f"s_iter_{i}.{kind}" for i in (14, 16, 7) for kind in snapshot_kinds()]
        found = sorted(path.name for path in place.glob("s_*"))
        assert found == sorted([*states, "s_metrics.csv"])
    assert results(said[1]), said[1]
    assert models[4] == models[1]
    assert results(said[4]) == results(said[1])
    for path in (folder / "4x1").glob("s_iter_1*"):
        path.unlink()
    code, resumed = train(2, "--snapshot", "auto", "--log-dir", "logs", cpu=2)  # what 4x1 saved
    assert code == 0, resumed
    assert "Resuming from s_iter_7.solverstate" in resumed
    assert Path("s_iter_16.caffemodel").read_bytes() == models[1]
    last = [line for line in results(resumed) if "Test" in line]
    assert len(last) == 4  # of two tests
    assert [line for line in results(said[1]) if "Test" in line][-4:] == last
    logs = [path for path in Path("logs").iterdir() if ".INFO." in path.name]
    assert len([path for path in logs if not path.is_symlink()]) == 2


def snapshot_kinds() -> tuple[str, ...]:
    return "caffemodel", "caffepystate", "solverstate"


def test_a_run_without_a_random_seed_is_repeated_by_the_one_it_drew_and_goes_on(
    threads: Threads,
) -> None:
    def seeded(seed: str, settings: str) -> None:
        write(settings=settings)
        solver = Path("solver.prototxt")
        solver.write_text(solver.read_text().replace("random_seed: 3", seed))

    seeded("", "max_iter: 4")
    code, said = train(2)
    assert code == 0, said
    drawn = said.split("The random seed is ")[1].partition(";")[0]
    model = Path("s_iter_4.caffemodel").read_bytes()
    seeded("", "max_iter: 8")
    command = ["--solver", "solver.prototxt"]
    auto = ["--snapshot", "auto", "--nodes", "1:2"]
    for nodes in (2, 1):
        codes, said = threads(*[[*command, *auto]] * 2) if nodes == 2 else threads.alone(*auto)
        assert codes in ([0, 0], 0), said
        assert "The random seed is" not in said
        assert is_whole("s_iter_8.solverstate")
        for path in Path().glob("s_iter_8.*"):
            path.unlink()

    seeded(f"random_seed: {drawn}", "max_iter: 4")
    codes, said = threads(command, command)
    assert codes == [0, 0], said
    assert Path("s_iter_4.caffemodel").read_bytes() == model

    seeded("", "max_iter: 2")
    models = []
    for _ in range(2):
        codes, said = threads(*[[*command, "--deterministic"]] * 2)
        assert codes == [0, 0], said
        models.append(Path("s_iter_2.caffemodel").read_bytes())
    assert models[0] == models[1]


def test_a_resumed_run_takes_as_many_images_or_is_asked_for(threads: Threads) -> None:
    write({}, "max_iter: 8 snapshot: 4", batch=6)
    code, whole = threads.alone("--batch-mode", "global", cpu=3)
    assert code == 0, whole
    for path in Path().glob("s_iter_8.*"):
        path.unlink()
    first = {path: path.read_bytes() for path in Path().glob("s_iter_4.*")}
    auto = ("--snapshot", "auto")

    code, said = train(2, "--batch-mode", "global", *auto)
    assert code == 0, said
    assert "now 2 solvers" not in said
    resumed, whole_run = figures(said), figures(whole)
    assert resumed.keys() >= {("Iteration 4, loss", 0), ("Test net output #1: loss", 0)}, resumed
    for what, figure in resumed.items():
        assert figure == pytest.approx(whole_run[what], rel=1e-4), what

    def again() -> None:
        for path in Path().glob("s_*"):
            path.unlink()
        for path, content in first.items():
            path.write_bytes(content)

    again()
    two = ["--solver", "solver.prototxt", *auto]
    codes, said = threads(two, two)
    assert codes == [ConfigError.exit_code] * 2, said
    told = message(said)
    assert "3 solvers wrote this snapshot and took 6 images in an iteration; " in told
    assert "now 2 solvers on 2 nodes would take 12: start 3 again, or " in told
    assert told.endswith("to go on with 12, give --nodes 2:3")

    again()
    code, said = train(2, *auto, "--nodes", "2:3")
    assert code == 0, said
    assert said.count("now 2 solvers on 2 nodes would take 12; base_lr stays as it is") == 1
    assert is_whole("s_iter_8.solverstate")

    again()
    code, said = threads.alone(*auto)  # as before there were nodes
    assert code == 0, said


def figures(said: str) -> dict[tuple[str, int], float]:
    """What all solvers found together; tests are counted from the last one."""
    found: dict[tuple[str, int], float] = {}
    counts = Counter[str]()
    for line in reversed(results(said)):
        what, _, value = line.strip().partition(" = ")
        if not what.startswith("Train"):
            found[what, counts[what]] = float(value.split()[0])
            counts[what] += 1
    return found


@pytest.mark.usefixtures("ulfm")
def test_a_killed_process_ends_the_others_with_a_snapshot() -> None:
    kill = once_all_are_there(2, "os.kill(os.getpid(), signal.SIGKILL)")
    write(kill, "max_iter: 5000 snapshot: 5000")
    code, said = train(2, options=ULFM)
    assert code == SyncError.exit_code, said
    assert "universal rank 1) has died, iteration 5" in message(said)
    assert is_whole("s_iter_5.solverstate")


@pytest.mark.usefixtures("ulfm")
def test_a_process_that_dies_before_mpi_init_is_over_is_named() -> None:
    write({}, "max_iter: 5000 snapshot: 5000")
    assert MPIRUN
    dies = 'test $OMPI_COMM_WORLD_RANK = 1 && kill -9 $$; exec "$@"'
    program = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt"]
    ended = subprocess.run(
        [MPIRUN, "--oversubscribe", *ULFM, "-n", "2", "sh", "-c", dies, "sh", *program],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    assert ended.returncode == SyncError.exit_code, ended.stderr
    told = message(ended.stderr)
    assert told.startswith("process 1 of 2 (host "), told
    assert ") died before MPI_Init was over; process 0 waited " in told


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
    write(once_all_are_there(3, stop), "max_iter: 5000 snapshot: 5000")
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
    fails = once_all_are_there(2, "raise ValueError('it went wrong')")
    write(fails, "max_iter: 5000 snapshot: 5000")
    code, said = train(2)
    assert code == ConfigError.exit_code, said
    assert said.count(FOUND) == 1, said
    assert ", iteration 5): " in said.split(FOUND)[1]
    assert "rank 1 (host " in said.split(FOUND)[1]
    assert "it went wrong" in said.split(FOUND)[1]
    assert is_whole("s_iter_5.solverstate")


def test_a_full_disk_of_the_first_process_costs_a_snapshot_and_at_the_end_the_run() -> None:
    full, free = "limit(300)", "limit(1 << 30)"
    write({(0, 3): full, (0, 7): free, (0, 11): full}, "max_iter: 12 snapshot: 5")
    code, said = train(2)
    assert code == ConfigError.exit_code, said
    assert said.count("No snapshot of iteration 5: ") == 1
    assert [path.name for path in Path().glob("*.solverstate")] == ["s_iter_10.solverstate"]
    assert is_whole("s_iter_10.solverstate")
    assert "s_iter_12" in message(said)


def test_gradients_in_16_bits_between_processes(threads: Threads) -> None:
    write()
    code, exact = threads.alone(cpu=4)
    assert code == 0, exact
    code, said = train(2, "--wire", "bf16", cpu=2)
    assert code == 0, said
    assert said.count("Gradients go between nodes as bf16: ") == 1
    assert "Gradients go" not in exact
    assert len(results(said)) == len(results(exact))
    assert results(said) != results(exact)


def test_a_node_with_another_wire_is_named(threads: Threads) -> None:
    write()
    command = ["--solver", "solver.prototxt"]
    codes, said = threads(command, [*command, "--wire", "bf16"])
    assert codes == [ConfigError.exit_code] * 2, said
    assert "the --wire of node 1 (host " in message(said)


def test_a_node_that_lacks_the_data_is_named(threads: Threads) -> None:
    write(settings="max_iter: 8")
    text = Path("net.prototxt").read_text()
    assert str(library.DIGITS) in text
    solvers = []
    for folder in ("own", "other"):
        os.mkdir(folder)
        shutil.copy("solver.prototxt", folder)
        (Path(folder) / "net.prototxt").write_text(text.replace(str(library.DIGITS), "data"))
        solvers.append(["--solver", f"{folder}/solver.prototxt"])
    os.remove("net.prototxt")
    shutil.copytree(str(library.DIGITS), "own/data")
    codes, said = threads(*solvers)
    assert codes == [DataError.exit_code] * 2, said
    assert "node 1 (host " in message(said)
    assert "lmdb" in message(said)


@pytest.mark.parametrize("what", ["solver", "net"])
def test_a_node_that_has_another_file_is_named(what: str, threads: Threads) -> None:
    write(settings="max_iter: 8")
    for folder in ("own", "other"):
        os.mkdir(folder)
        for name in ("solver.prototxt", "net.prototxt"):
            shutil.copy(name, folder)
    os.remove("net.prototxt")
    path, (old, new) = {
        "solver": ("other/solver.prototxt", ("max_iter: 8", "max_iter: 9")),
        "net": ("other/net.prototxt", ("batch_size: 3", "batch_size: 4")),
    }[what]
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))
    codes, said = threads(
        *(["--solver", f"{folder}/solver.prototxt"] for folder in ("own", "other"))
    )
    assert codes == [ConfigError.exit_code] * 2, said
    assert f"the {what} of node 1 (host " in message(said)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-restarts", "2"], "--max-restarts is for one process"),
        (["--on-divergence", "rollback:0.1"], "--on-divergence rollback is for one process"),
        (["--weights", "a", "--snapshot", "b"], "not both"),
        (["--nodes", "3:4"], "--nodes 3:4: this run has 2 nodes ("),
        (["--nodes", "1"], "start 1 with mpirun -n 1 or srun -n 1, or give --nodes 2"),
    ],
    ids=["restarts", "rollback", "both", "few", "many"],
)
def test_what_nodes_cannot_do_is_told_once(
    arguments: list[str], told: str, threads: Threads
) -> None:
    write()
    codes, said = threads(*[["--solver", "solver.prototxt", *arguments]] * 2)
    assert codes == [UsageError.exit_code] * 2, said
    assert told in message(said)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu", "local"], "--gpu local is for processes that mpirun or srun started"),
        (["--nodes", "2:4"], "start 2 with mpirun -n 2 or srun -n 2, or give --nodes 1"),
        (["--nodes", "4:2"], "the first number is the least"),
        (["--nodes", "0:2"], "is neither N nor MIN:MAX, numbers from 1"),
    ],
    ids=["local", "few", "order", "zero"],
)
def test_what_one_process_cannot_do(arguments: list[str], told: str, threads: Threads) -> None:
    write()
    code, said = threads.alone(*arguments)
    assert code == UsageError.exit_code
    assert told in message(said)


def test_the_node_that_shows_an_error_then_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own clean-up takes a second on a busy machine, in which launchers end no other."""
    monkeypatch.setattr(abandoned, "_things", [])
    world = SimpleNamespace(
        node=0, hosts=["a"], failure=lambda: None, send_failure=lambda error: None
    )
    world.close = lambda failed: False
    joined._leave(world, DataError("no records"))
    assert abandoned.at_work()


def test_an_exit_code_that_is_raised_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with abandoned devices then ends without Python's clean-up."""

    def leave(*_: object, **__: object) -> None:
        raise SystemExit(SyncError.exit_code)

    command_line = sys.modules["caffepy.cli.main"]
    monkeypatch.setattr(command_line, "caffepy", SimpleNamespace(main=leave, commands={}))
    monkeypatch.setattr(command_line, "flags", lambda arguments: {})
    monkeypatch.setattr(command_line, "groups", dict)
    assert command_line.run([]) == SyncError.exit_code


def test_a_node_that_leaves_the_message_to_another_exits_soon_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abandoned, "_things", [])
    world = SimpleNamespace(node=1, hosts=["a", "a"], failure=lambda: DataError("no records"))
    world.close = lambda failed: True
    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        joined._leave(world, DataError("no records"))
    assert ended.value.code == DataError.exit_code
    assert abandoned.at_work()
    assert joined.FIRST_EXITS <= time.monotonic() - begun < 5, "the first shows its message"
