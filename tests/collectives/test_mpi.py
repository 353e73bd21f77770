"""Messages between processes that mpirun starts, and what each hears of the others' ends."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from caffepy.collectives import mpi
from caffepy.collectives.launch import launched
from caffepy.collectives.mpi import start, widen_affinity
from caffepy.core.errors import UsageError

ROOT = Path(__file__).parents[2]
BESIDE = os.path.join(sys.prefix, "bin")
MPIRUN = shutil.which("mpirun", path=BESIDE) or shutil.which("mpirun")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
SBATCH = {  # what sbatch --ntasks=4 sets for its script, of SLURM 22.05
    "SLURM_JOB_ID": "11",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
SALLOC = SBATCH | {  # what salloc --ntasks=4 sets for a shell on the first node, likewise
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SRUN = SBATCH | {  # what srun --ntasks=2 sets for its second process, likewise
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
PMI2 = {"PMI_FD": "11", "PMI_JOBID": "2.0", "PMI_RANK": "1", "PMI_SIZE": "2"}
PMIX = {"PMIX_NAMESPACE": "slurm.pmix.2.0", "PMIX_RANK": "1", "SLURM_MPI_TYPE": "pmix"}

PRELUDE = """
import os, signal, sys, time
import numpy as np
from caffepy.collectives import mpi
from caffepy.collectives.world import DeadNodeError, Tag

def wait(*requests, seconds=40):
    end = time.monotonic() + seconds
    for request in requests:
        while not request.done():
            assert time.monotonic() < end, "hangs"
            time.sleep(1e-4)
    return [request.value for request in requests]

def others():
    return [node for node in range(world.nodes) if node != world.node]

def barrier():
    for node in others():
        world.send(node, Tag.VOTE, None)
    wait(*(world.receive(node, Tag.VOTE) for node in others()))

def say(*words):
    os.write(1, (" ".join(map(str, (world.node, *words))) + "\\n").encode())  # in one piece

world = mpi.start()
"""


@cache
def printed_version() -> str:
    assert MPIRUN
    return subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def version(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    if not find_spec("mpi4py"):
        pytest.skip("mpi4py is missing")
    if not MPIRUN:
        pytest.skip("mpirun is missing")
    # A killed mpirun leaves $TMPDIR/ompi.PID, and one that gets the same PID later cannot start.
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path_factory.mktemp("mpirun")))
    told = printed_version()
    if "Open MPI" not in told:
        pytest.skip(f"{MPIRUN} is not Open MPI's, whose options these tests give")
    return told


@pytest.fixture
def ulfm(version: str) -> str:
    if "Open MPI) 4" in version:
        pytest.skip("Open MPI 4 has no ULFM")
    return version


def run(n: int, program: str, *options: str) -> tuple[int, list[str]]:
    """The exit code of mpirun and the lines of all processes, sorted."""
    assert MPIRUN
    started = [MPIRUN, "--oversubscribe", *options, "-n", str(n), sys.executable]
    ended = subprocess.run(
        [*started, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
    )
    lines = sorted(ended.stdout.splitlines())
    return ended.returncode, lines or ended.stderr.splitlines()


@pytest.mark.skipif(MPIRUN is None or not MPIRUN.startswith(sys.prefix), reason="not its own MPI")
@pytest.mark.usefixtures("version")
def test_devices_that_nobody_uses_are_not_looked_for_unless_mpirun_names_some() -> None:
    program = 'say(os.environ["OMPI_MCA_btl"]); world.close(failed=False)'
    assert run(2, program, "--mca", "btl", "self,sm,tcp") == (0, ["0 self,sm,tcp", "1 self,sm,tcp"])


@pytest.mark.usefixtures("version")
def test_values_and_arrays_arrive_in_order_beside_each_other() -> None:
    code, lines = run(
        3,
        """
        sent = [world.send(node, tag, (world.node, tag.name, i, "x" * 10**i))
                for i in range(6) for node in others() for tag in (Tag.GATHER, Tag.VOTE)]
        for tag in (Tag.VOTE, Tag.GATHER):
            for node in others():
                requests = [world.receive(node, tag) for i in range(6)]
                wait(*requests[::-1])
                found = [request.value for request in requests]
                assert found == [(node, tag.name, i, "x" * 10**i) for i in range(6)], found
        wait(*sent)

        mpi.PART = 1000  # bytes
        arrays = [np.arange(i * 700, dtype=kind).reshape(i, 7, 100) + world.node
                  for i, kind in enumerate((np.float32, np.int64, np.uint8, np.int16))]
        scalar = np.array(world.node + 0.5)
        values = [world.receive(node, Tag.ARRAY) for node in others()]
        came = [[np.zeros_like(a) for a in (*arrays, scalar)] for node in others()]
        receives = [world.receive_array(node, Tag.ARRAY, a)
                    for node, some in zip(others(), came) for a in some]
        sent = [world.send_array(node, Tag.ARRAY, a) for node in others() for a in (*arrays, scalar)]
        wait(*sent, *receives)
        for node, some in zip(others(), came):
            for a, b in zip(some, (*arrays, scalar)):
                assert np.array_equal(a, b - world.node + node), (node, a, b)
        assert not any(value.done() for value in values)
        barrier()
        wait(*(world.send(node, Tag.ARRAY, "value") for node in others()))
        assert wait(*values) == ["value"] * (world.nodes - 1)
        barrier()

        mpi.PART, size = 1 << 24, 10_000_000  # 40 MB
        to, source = (world.node + 1) % world.nodes, (world.node - 1) % world.nodes
        large = np.zeros(size, np.float32)
        receive = world.receive_array(source, Tag.ARRAY, large)
        send = world.send_array(to, Tag.ARRAY, np.arange(size, dtype=np.float32) * (world.node + 1))
        wait(receive, send)
        assert np.array_equal(large, np.arange(size, dtype=np.float32) * (source + 1))
        barrier()
        say(world.nodes, len(world.hosts), world.rank_on_host, world.processes_on_host)
        world.close(failed=False)
        """,
    )
    assert lines == [f"{node} 3 3 {node} 3" for node in range(3)]
    assert code == 0


@pytest.mark.usefixtures("version")
def test_threads_may_call_at_once() -> None:
    code, lines = run(
        2,
        """
        from threading import Thread
        other = 1 - world.node
        found = {}

        def values():
            for i in range(300):
                sent = world.send(other, Tag.VOTE, i)
                assert wait(world.receive(other, Tag.VOTE)) == [i]
                wait(sent)
            found["values"] = i

        def arrays():
            for i in range(300):
                came = np.zeros(1000)
                sent = world.send_array(other, Tag.ARRAY, np.full(1000, float(i)))
                wait(world.receive_array(other, Tag.ARRAY, came), sent)
                assert (came == i).all()
            found["arrays"] = i

        threads = [Thread(target=values), Thread(target=arrays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(found["values"], found["arrays"])
        world.close(failed=False)
        """,
    )
    assert lines == ["0 299 299", "1 299 299"]
    assert code == 0


DYING = """
    receives = {node: world.receive(node, Tag.VOTE) for node in others()}
    arrays = {node: world.receive_array(node, Tag.ARRAY, np.zeros(4)) for node in others()}
    barrier_with = [world.receive(node, Tag.GATHER) for node in others()]
    for node in others():
        world.send(node, Tag.GATHER, None)
    wait(*barrier_with)
    if world.node == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    heard = {}
    while time.monotonic() - begin < 10 and len(heard) < 2:
        for name, requests in ("value", receives), ("array", arrays):
            for node, request in requests.items():
                for _ in range(2):  # a request that failed fails again
                    try:
                        assert not request.done()
                    except DeadNodeError as error:
                        assert error.node == node
                        heard[name] = node
        time.sleep(1e-3)
"""


@pytest.mark.usefixtures("ulfm")
def test_ulfm_tells_which_node_died() -> None:
    code, lines = run(
        3,
        DYING
        + """
    for request in (world.receive(1, Tag.VOTE), world.send(1, Tag.VOTE, "x" * 10**6)):
        try:
            wait(request, seconds=10)
        except DeadNodeError as error:
            heard[len(heard)] = error.node
    alive = [node for node in others() if node != 1]
    for node in alive:
        world.send(node, Tag.FAILURE, None)
    wait(*(world.receive(node, Tag.FAILURE) for node in alive))
    say(*heard.items())
    time.sleep(1)  # after the death of one mpirun lets the others end by themselves
    world.close(failed=True)
    sys.exit(7)
    """,
        "--with-ft",
        "ulfm",
    )
    told = "('value', 1) ('array', 1) (2, 1) (3, 1)"
    assert [" ".join(sorted(line.split())) for line in lines] == [
        " ".join(sorted(f"{node} {told}".split())) for node in (0, 2)
    ]
    assert code == 7


@pytest.mark.usefixtures("version")
def test_without_ulfm_mpirun_ends_all() -> None:
    begin = time.monotonic()
    code, lines = run(2, DYING + "\n    say(*heard.items())\n    time.sleep(20)")
    assert code == 128 + signal.SIGKILL
    assert not [line for line in lines if line.startswith("0")]
    assert time.monotonic() - begin < 25


@pytest.mark.usefixtures("ulfm")
def test_a_stopped_process_is_not_heard_of() -> None:
    code, lines = run(
        2,
        """
        if world.node == 1:
            world.send(0, Tag.VOTE, os.getpid())
            time.sleep(60)
        victim, = wait(world.receive(1, Tag.VOTE))
        os.kill(victim, signal.SIGSTOP)
        requests = [world.receive(1, Tag.VOTE), world.receive_array(1, Tag.ARRAY, np.zeros(4)),
                    world.send_array(1, Tag.ARRAY, np.zeros(10**7))]
        begin = time.monotonic()
        longest = 0
        while time.monotonic() - begin < 2:
            for request in requests:
                asked = time.monotonic()
                assert not request.done()
                longest = max(longest, time.monotonic() - asked)
            time.sleep(1e-3)
        say("not heard", longest < 0.5)
        world.close(failed=True)
        os.kill(victim, signal.SIGCONT)
        sys.exit(7)
        """,
        "--with-ft",
        "ulfm",
    )
    assert lines == ["0 not heard True"]
    assert code == 7


@pytest.mark.usefixtures("ulfm")
def test_also_with_ulfm_mpirun_ends_all_when_one_exits_with_a_code() -> None:
    """So who has files to write must exit first."""
    code, lines = run(
        2,
        """
        if world.node == 1:
            world.close(failed=True)
            sys.exit(7)
        time.sleep(10)
        say("lives")
        """,
        "--with-ft",
        "ulfm",
    )
    assert not [line for line in lines if "lives" in line]
    assert code == 7


@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
@pytest.mark.usefixtures("ulfm")
def test_after_a_failure_the_exit_code_is_the_programs(options: tuple[str, ...]) -> None:
    begin = time.monotonic()
    code, _ = run(
        2,
        """
        pending = world.receive_array(1 - world.node, Tag.ARRAY, np.zeros(4))
        sent = world.send_array(1 - world.node, Tag.GATHER, np.zeros(10**7))
        world.close(failed=True)
        sys.exit(7)
        """,
        *options,
    )
    assert code == 7
    assert time.monotonic() - begin < 25


@pytest.mark.usefixtures("version")
def test_processes_of_another_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from caffepy.collectives import mpi; mpi.start()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PMI_SIZE": "3"},
    )
    assert ended.returncode == 1
    assert "this is one of 3 processes (PMI_SIZE=3), but mpi4py's " in ended.stderr
    assert " knows 1: start with the mpirun of the same MPI" in ended.stderr


@pytest.mark.usefixtures("version")
def test_srun_without_mpi_is_told_which_one() -> None:
    program = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from caffepy.collectives import mpi
for library in (
    "Open MPI v5.0.11", "MPICH Version:      5.0.2", "Intel(R) MPI Library 2021.18.1 for Linux* OS"
):
    MPI.Get_library_version = lambda: library
    try:
        mpi.start()
    except mpi.UsageError as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **SRUN},
    )
    told = ended.stdout.splitlines()
    assert len(told) == 3, ended.stderr
    for line, library, pmi in zip(
        told,
        ("Open MPI v5.0.11", "MPICH Version:      5.0.2", "Intel(R) MPI Library 2021.18.1"),
        ("pmix", "pmi2", "pmi2"),
        strict=True,
    ):
        assert f"(SLURM_STEP_NUM_TASKS=2), but mpi4py's {library}" in line
        assert f"(with srun, try --mpi={pmi})" in line


@pytest.mark.usefixtures("version")
def test_mpi_without_threads_is_refused() -> None:
    program = """
import mpi4py
mpi4py.rc.threads = False
from mpi4py import MPI
from caffepy.collectives import mpi
mpi.start()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PMI_SIZE": "3"},
    )
    assert "was started for a program without threads" in ended.stderr


def test_a_missing_mpi4py_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError) as error:
        start()
    assert "one of 4 processes (OMPI_COMM_WORLD_SIZE=4), which needs mpi4py" in str(error.value)
    assert "pip install 'caffepy[mpi]'" in str(error.value)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (4, "OMPI_COMM_WORLD_SIZE")),
        ({"MV2_COMM_WORLD_SIZE": "2"}, (2, "MV2_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "8"}, (8, "PMI_SIZE")),
        (SBATCH, None),
        (SALLOC, None),
        (SRUN, (2, "SLURM_STEP_NUM_TASKS")),
        (SRUN | PMIX, (2, "SLURM_STEP_NUM_TASKS")),
        (SRUN | PMI2, (2, "PMI_SIZE")),
        ({"SLURM_STEP_NUM_TASKS": "8"}, (8, "SLURM_STEP_NUM_TASKS")),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, (2, "WORLD_SIZE")),
        ({"WORLD_SIZE": "earth"}, None),
        # mpirun in a step of SLURM
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (4, "OMPI_COMM_WORLD_SIZE")),
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_launched(environment: dict[str, str], found: tuple[int, str] | None) -> None:
    assert launched(environment) == found


def bound(program: str, cpus: set[int], *before: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is bound to CPUs, as a child of this process that may run on all."""
    return subprocess.run(
        [*before, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )


needs_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs"
)


@needs_cpus
@pytest.mark.parametrize("before", [(), ("sh", "-c", '"$0" "$@"; exit $?')], ids=["child", "shell"])
def test_a_bound_process_gets_its_share_of_the_launchers_cpus(before: tuple[str, ...]) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    program = """
import os, sys, threading, time
from caffepy.collectives.mpi import widen_affinity
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
shares = []
begin = os.sched_getaffinity(0)
for processes in (1, 2):
    for rank in range(processes):
        widen_affinity(processes, rank)
        tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        assert len(tasks) > 1 and all(task == tasks[0] for task in tasks), tasks
        shares.append(sorted(tasks[0]))
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), begin)
print(shares)
"""
    whole, first, second = eval(bound(program, {cpus[0]}, *before).stdout)
    assert whole == cpus
    if len(cpus) >= 4:
        assert sorted(first + second) == cpus
    else:
        assert first == second == cpus[:1]  # its share is as large as what it has


def test_a_process_that_has_its_share_keeps_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1} if pid == 0 else {0, 1, 2, 3})
    calls: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: calls.append(args))
    widen_affinity(2, 1)
    assert not calls
    widen_affinity(1, 0)
    assert calls


def test_a_process_that_slurm_has_bound_keeps_its_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Srun's processes are children of slurmstepd, which may run on CPUs of other jobs."""
    parents = {os.getppid(): ("slurmstepd", 50), 50: ("slurmd", 1)}
    for process, (name, parent) in parents.items():
        status = tmp_path / str(process) / "status"
        status.parent.mkdir()
        status.write_text(f"Name:\t{name}\nUmask:\t0022\nState:\tS (sleeping)\nPPid:\t{parent}\n")
    monkeypatch.setattr(mpi, "PROCESSES", tmp_path)
    (tmp_path / "self/task/1").mkdir(parents=True)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {0, 1, 2, 3} if pid in parents else {0}
    )
    calls: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: calls.append(args))
    widen_affinity(1, 0)
    assert not calls


def test_a_share_has_whole_cores_of_one_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # 2 packages of 2 cores of 2 threads, numbered as Linux does: package last, threads apart
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "core_id").write_text(f"{cpu // 2 % 2}\n")
    monkeypatch.setattr(mpi, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0} if pid == 0 else set(range(8)))
    shares: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: shares.append(cpus))
    monkeypatch.setattr(os, "listdir", lambda path: ["0"])
    for rank in range(2):
        widen_affinity(2, rank)
    assert shares == [[0, 4, 2, 6], [1, 5, 3, 7]]


def test_where_affinity_is_fixed_a_warning_names_the_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3} if pid == 0 else {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.WARNING):
        widen_affinity(2, 0)
    assert caplog.messages == [
        "This process may run on 1 of the launcher's 4 CPUs, and cannot widen that "
        "(Operation not permitted): start it with mpirun --bind-to none"
    ]


@needs_cpus
@pytest.mark.usefixtures("version")
def test_a_process_bound_by_mpirun_gets_all_cpus() -> None:
    code, lines = run(
        2,
        """
        own = os.sched_getaffinity(0)
        mpi.widen_affinity(1, 0)
        say(len(own), sorted(os.sched_getaffinity(0)), os.environ.get("OMPI_MCA_btl"))
        world.close(failed=False)
        """,
        "--bind-to",
        "core",
    )
    assert MPIRUN
    unused = "^ofi" if MPIRUN.startswith(sys.prefix) else ENVIRONMENT.get("OMPI_MCA_btl")
    cpus = sorted(os.sched_getaffinity(0))
    assert lines == [f"{node} 1 {cpus} {unused}" for node in range(2)]
    assert code == 0
