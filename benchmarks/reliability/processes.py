"""Attacks on runs of several processes that mpirun starts; `attack.py --processes N` runs them.

A trial is a run into which one fault comes. A Python layer of its net brings it, in the phase that
the trial is for: a pass of training ("iteration") or of a test, or one of the writes of a snapshot.
Before there are nets it comes from here: in the phase "launch" until MPI_Init is over, in "start"
while the nodes compare their files and build their nets.
"""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from caffepy.core.errors import CaffeError
from caffepy.data.sources import open_source
from caffepy.data.write import write_database
from caffepy.solver import snapshot

Findings = Counter[str]

BESIDE = os.path.join(sys.prefix, "bin")
MPIRUN = shutil.which("mpirun", path=BESIDE) or shutil.which("mpirun") or ""
DIGITS = Path(snapshot.__file__).parents[2] / "models" / "digits"
PHASES = ("launch", "start", "iteration", "test", "snapshot")
HOSTS = ("caffepy-a", "caffepy-b")
"""Network namespaces that stand for two hosts, and their ends of the link between them."""
RANK = "OMPI_COMM_WORLD_RANK"
PASSED = ("PYTHONPATH", "NUMBA_CACHE_DIR", "MPLBACKEND")
PERIODIC = 7
"""Iterations between snapshots where the fault comes into one."""

LONGEST = 60.0
"""Seconds after which a process that is left is killed by us, and counts as found."""

NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  transform_param { scale: 0.004 crop_size: 7 mirror: true }
  data_param { source: "lmdb" batch_size: 5 backend: LMDB } }
layer { name: "faulty" type: "Python" bottom: "data" top: "faulty"
  python_param { module: "faulty" layer: "Layer" } }
layer { name: "conv" type: "Convolution" bottom: "faulty" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" type: "Adam" base_lr: 0.001 lr_policy: "fixed" max_iter: END snapshot: EVERY
display: 5 test_iter: 9 test_interval: 8 snapshot_prefix: "PREFIX" random_seed: 3
"""
FAULTY = """
import json, os, signal, time

NODE = int(os.environ["OMPI_COMM_WORLD_RANK"])
ORDER = json.load(open("order.json"))
LAUNCHER = os.getppid()
counts = {}
write_through = os.fsync
with open(f"{NODE}.pid", "w") as file:
    file.write(str(os.getpid()))

def count(phase):
    counts[phase] = counts.get(phase, 0) + 1
    if NODE == ORDER["where"] and phase == ORDER["phase"] and counts[phase] == ORDER["at"]:
        time.sleep(ORDER["delay"])
        with open("fault", "w") as file:
            file.write(str(time.time()))
        exec(ORDER["work"])

def send(number, nodes):
    for node in nodes:
        os.kill(int(open(f"{node}.pid").read()), number)

def fill():
    with open("disk/ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

def fsync(descriptor):
    if "s_iter_" in os.readlink(f"/proc/self/fd/{descriptor}"):
        count("snapshot")
    write_through(descriptor)

class Layer:
    def setup(self, bottom, top):
        os.fsync = fsync
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        count("test" if self.phase else "iteration")
    def backward(self, top, propagate_down, bottom):
        pass
"""


class Fault(NamedTuple):
    """A fault that a trial causes in a run, and what must come of it.

    work: what the layer executes; VICTIM and ALL are nodes. codes: exit codes of mpirun; None: any
    but 0. says: pattern of the one message, with VICTIM in place of a node. snapshots: snapshots
    that the fault leads to. seconds: until all processes have ended, but for daemons of mpirun
    where the link is cut. writer_dies: a process that writes may be killed, whose unfinished files
    have other names, and go when the run goes on. apart: each node has a folder of its own.
    """

    work: str
    codes: Sequence[int] | None
    seconds: float
    says: str = ""
    snapshots: int | None = 1
    ulfm: bool = True
    writer_dies: bool = False
    phases: Sequence[str] = ("iteration", "test", "snapshot")
    end: int = 200_000
    every: int = 100_000
    victims: Sequence[int] | None = None
    apart: bool = False

    @property
    def prefix(self) -> str:
        """The snapshot_prefix."""
        return "disk/s" if "fill" in self.work else "s"

    @property
    def cuts(self) -> bool:
        """True if the run is on two hosts, between which the link is cut."""
        return "link set" in self.work


TO_MISS = 5.0
"""Seconds that it may take longer to miss a process that died before MPI_Init was over."""

SET_UP_WAIT = r"(?:made no progress|did not answer) for ([\d.]+) s"
"""Words by which a message tells the wait of the set-up, which has a deadline of its own."""

DEADLINE = 3.0
"""Seconds without progress; one second is the least that --deadlines takes."""
WHERE = r"node VICTIM \(host \S+, universal rank VICTIM\)"
PLAIN = "send(signal.SIG%s, %s)"
TO_MPIRUN = "os.kill(LAUNCHER, signal.SIG%s)"
FAULTS = {
    "kill": Fault(
        PLAIN % ("KILL", "[VICTIM]"), [7], 5, rf"{WHERE} has died, iteration \d+", phases=PHASES
    ),
    "kill-without-ulfm": Fault(
        PLAIN % ("KILL", "[VICTIM]"),
        None,
        5,
        snapshots=None,
        ulfm=False,
        writer_dies=True,
        phases=PHASES,
    ),
    "stop": Fault(
        PLAIN % ("STOP", "[VICTIM]"),
        [7],
        DEADLINE + 5,
        rf"{WHERE} made no progress for [\d.]+ s \(\S+, iteration \d+\)",
        phases=("start", "iteration", "test", "snapshot"),
    ),
    "term-all": Fault(PLAIN % ("TERM", "ALL"), [75], 25),
    "term-one": Fault(PLAIN % ("TERM", "[VICTIM]"), [75], 25),
    "usr1-all": Fault(PLAIN % ("USR1", "ALL"), [75], 25),
    "usr1-mpirun": Fault(TO_MPIRUN % "USR1", [75], 25, ulfm=False),
    "term-mpirun": Fault(
        TO_MPIRUN % "TERM", None, 5, snapshots=None, ulfm=False, writer_dies=True, phases=PHASES
    ),
    "kill-mpirun": Fault(TO_MPIRUN % "KILL", [-9], 8, ulfm=False),
    "raise": Fault(
        "raise ValueError('it went wrong')",
        [3],
        8,
        r"rank VICTIM \(host \S+, iteration \d+\): [^\n]*it went wrong",
        ulfm=False,
        phases=("iteration", "test"),
    ),
    "disk": Fault(
        "fill()",
        [3],
        25,
        r"disk/s_iter_60\S*: [^\n]*No space",
        snapshots=0,
        ulfm=False,
        phases=("iteration", "test"),
        end=60,
        every=20,
        victims=[0],
    ),
    "record": Fault(
        "",
        [4],
        LONGEST,
        r"rank VICTIM \(host \S+, iteration \d+\): ",
        ulfm=False,
        phases=("iteration",),
        victims=[2],
        apart=True,
    ),
    "cut": Fault(
        f"os.system('ip -n {HOSTS[1]} link set {HOSTS[1]} down')",
        [7],
        DEADLINE + 5,
        rf"{WHERE} made no progress for {DEADLINE:g} s \(\S+, iteration \d+\)",
        victims=[1],
        apart=True,
    ),
}


class Ended(NamedTuple):
    """The end of a run: mpirun's exit code, what it said, and seconds from the fault until the last
    node and until the last process had ended.
    """

    code: int
    said: str
    nodes: float
    last: float


def processes_of(mark: str) -> dict[int, dict[str, str]]:
    """Return the environments of the processes that have this mark in theirs, by number."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                if f"ATTACK={mark}\0" in text:
                    pairs = (entry.partition("=") for entry in text.split("\0"))
                    found[int(folder.name)] = {name: value for name, _, value in pairs}
    return found


def train(here: Path, fault: Fault, processes: int) -> list[str]:
    """Return the command of a run."""
    program = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt", "--cpu"]
    deadlines = f"set-up=20,step={DEADLINE:g},test={DEADLINE:g},snapshot={DEADLINE:g}"
    program += ["1", "--log-dir", "logs", "--deadlines", deadlines]
    start = [MPIRUN, *(["--with-ft", "ulfm"] if fault.ulfm else [])]
    if not fault.apart:
        return [*start, "--oversubscribe", "-n", str(processes), *program]
    if fault.cuts:
        passed = [name for name in ("ATTACK", *PASSED) if name in os.environ or name == "ATTACK"]
        start += ["--prtemca", "plm_ssh_agent", str(here / "agent")]
        start += [word for name in passed for word in ("-x", name)]
    for node in range(processes):
        place = ["--host", f"{HOSTS[node]}:1"] if fault.cuts else ["--oversubscribe"]
        start += [*([":"] * bool(node)), *place, "-n", "1", "-wdir", str(here / f"at{node}")]
        start += program
    return [str(here / "agent"), HOSTS[0], shlex.join(start)] if fault.cuts else start


def watch(here: Path, command: list[str], fault: Fault, phase: str, victims: list[int]) -> Ended:
    """Run a command to its end, and until no process of it is left."""
    mark = f"{os.getpid()}-{here.name}"
    settings = dict.fromkeys(("OMPI", "PRTE"), "1")
    allowed = {
        f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in settings for more in ("", "_CONFIRM")
    }
    environment = {**os.environ, **allowed, "ATTACK": mark, "MPLBACKEND": "agg"}
    begun = time.time()
    with (here / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=here, stdout=out, stderr=out, env=environment)
    if phase in ("launch", "start"):
        bring(here, mark, process.pid, fault, phase, victims)
    nodes = begun
    while (left := processes_of(mark)) or process.poll() is None:  # mpirun may be between two execs
        if time.time() > since(here, begun + LONGEST) + LONGEST:
            break
        if any(RANK in environment for environment in left.values()):
            nodes = time.time()
        process.poll()  # else it would stay as a zombie
        time.sleep(0.05)
    last = time.time() if not left else math.inf
    for number in left:
        with suppress(OSError):
            os.kill(number, signal.SIGKILL)
    said, when = (here / "out").read_text(errors="replace"), since(here, begun)
    return Ended(process.wait(), said, nodes - when, last - when)


def since(here: Path, default: float) -> float:
    """Return the time of the fault, once it has come."""
    texts = [path.read_text() for path in (*here.glob("fault"), *here.glob("at*/fault"))]
    return float(next(filter(None, texts), default))


def bring(
    here: Path, mark: str, mpirun: int, fault: Fault, phase: str, victims: Sequence[int]
) -> None:
    """Send a signal before the optimization starts: after the last process began, or after the
    first line of the first, which MPI_Init comes before.
    """
    until, ranks = time.time() + LONGEST, dict[str, int]()
    while len(ranks) <= max(victims) or (
        phase == "start" and "Use CPU" not in (here / "out").read_text(errors="replace")
    ):
        assert time.time() < until, "no process has begun"
        time.sleep(0.01)
        environments = processes_of(mark).items()
        ranks = {
            environment[RANK]: number for number, environment in environments if RANK in environment
        }
    time.sleep(random.uniform(0, 0.5))
    number = getattr(signal, re.findall(r"SIG\w+", fault.work)[0])
    (here / "fault").write_text(str(time.time()))
    for target in [mpirun] if "LAUNCHER" in fault.work else [ranks[str(i)] for i in victims]:
        os.kill(target, number)


def damage_record(source: Path, target: Path) -> None:
    """Copy an LMDB, with 100 records in the middle that cannot be read."""
    reader = open_source(str(source))
    count = len(reader)
    with write_database(str(target)) as writer:
        for i in range(count):
            key, value = reader.read()
            writer.put(key, bytes(value) if not count / 2 < i < count / 2 + 100 else b"\xff" * 20)
    reader.close()


def prepare(here: Path, fault: Fault, phase: str, victim: int, processes: int) -> None:
    """Write the files of a trial into its folder."""
    periodic = PERIODIC if phase == "snapshot" else fault.every
    solver = SOLVER.replace("END", str(fault.end)).replace("EVERY", str(periodic))
    everyone = list(range(processes))
    work = fault.work.replace("VICTIM", str(victim)).replace("ALL", str(everyone))
    at = random.randrange(1, 8) if phase == "snapshot" else random.randrange(20, 40)
    where = 0 if phase == "snapshot" else victim
    order = {"where": where, "phase": phase, "at": at, "work": work, "delay": 0}
    places = [here / f"at{node}" for node in everyone] if fault.apart else [here]
    for node, place in enumerate(places):
        place.mkdir(parents=True, exist_ok=True)
        (place / "order.json").write_text(json.dumps(order))
        (place / "faulty.py").write_text(FAULTY)
        (place / "net.prototxt").write_text(NET)
        (place / "solver.prototxt").write_text(solver.replace("PREFIX", fault.prefix))
        if not fault.work and node == victim:
            damage_record(DIGITS / "digits_train_lmdb", place / "lmdb")
        else:
            (place / "lmdb").symlink_to(DIGITS / "digits_train_lmdb")


def check_files(place: Path, fault: Fault) -> Iterator[str]:
    """Yield what is wrong with the files of a run."""
    stem = str(place / fault.prefix)
    folder = Path(stem).parent
    unfinished = [path.name for path in folder.glob(".s*.tmp")]
    if unfinished and not fault.writer_dies:
        yield "temporary files are left"
    try:
        newest = snapshot.newest_good(stem)
    except CaffeError:  # those that the clean up makes whole count
        newest = None
    snapshot.clean(stem)
    if list(folder.glob(".s*.tmp")):
        yield "temporary files stay"
    states = snapshot.under(stem)
    if states and newest is None:
        newest = snapshot.newest_good(stem)
    for found in states:
        try:
            content = snapshot.read_sidecar(found.state)
            assert content, "no sidecar"
            model = snapshot.find_model(snapshot.read_state(found.state).learned_net, found.state)
            snapshot.verify(content, found.state, model)
        except (CaffeError, AssertionError) as error:
            yield f"a broken snapshot: {error}"
    for path in folder.glob("s_iter*"):
        if not path.stat().st_size:
            yield f"{path.name} is empty"


def iteration_of(state: Path) -> int:
    """Return the iteration of a snapshot."""
    return int(state.stem.rpartition("_")[2])


def judge(ended: Ended, place: Path, fault: Fault, phase: str, victim: int) -> Iterator[str]:
    """Yield what a run did other than it must."""
    started = phase not in ("launch", "start")
    if math.isinf(ended.last):
        yield "processes are left"
    limit = fault.seconds
    if phase == "launch":
        limit += TO_MISS
    elif not started and (waited := re.search(SET_UP_WAIT, ended.said)):
        limit += float(waited[1]) - DEADLINE
    if limit < (ended.nodes if fault.cuts else ended.last) < math.inf:
        yield f"late: more than {limit:g} s"
    if ended.code not in fault.codes if fault.codes else ended.code == 0:
        yield f"exit code {ended.code}"
    if "Traceback" in ended.said and "it went wrong" not in ended.said:
        yield "a traceback"
    messages = re.findall(r"caffepy: error: (.*)", ended.said)
    if fault.says:
        says = fault.says.replace("VICTIM", str(victim))
        if phase == "launch" and "has died" in says:
            says += rf"|process {victim} of \d+ \(host \S+\) died before MPI_Init was over"
        if not started:  # the solvers are not counted yet, or iterations have not begun
            says = says.replace(rf", universal rank {victim}", rf"(, universal rank {victim})?")
            says = says.replace(r", iteration \d+", r"(, iteration \d+)?")
            if "made no progress" in says:
                says += rf"|node {victim} \(host [^)]*\) did not answer for"
        if len(messages) != 1:
            yield f"{len(messages)} messages"
        if not any(re.search(says, message) for message in messages):
            yield f"not reported: {messages}"
    yield from check_files(place, fault)
    kept = sorted(place.glob(f"{fault.prefix}_iter_*.solverstate"))
    periodic = PERIODIC if phase == "snapshot" else fault.every
    if fault.snapshots is not None:
        own = [path for path in kept if iteration_of(path) % periodic]  # the fault's
        least = fault.snapshots if phase in ("iteration", "test") else 0
        if not least <= len(own) <= fault.snapshots or (started and len(kept) < fault.snapshots):
            yield f"{len(kept)} snapshots: {[path.name for path in kept]}"
    named = re.search(r"iteration (\d+)", messages[0]) if messages else None
    if named and kept and started and fault.codes == [7] and fault.snapshots == 1:
        newest = max(map(iteration_of, kept))
        if newest != int(named[1]):
            yield f"iteration {named[1]} is named, {newest} is saved"


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of its own, which can be filled."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "caffepy", str(place)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[None]:
    """Two network namespaces with a link between them, and a program that mpirun calls as it calls
    ssh. TCP gives a connection up after 5 attempts, so that mpirun's daemons end, too.
    """
    commands = [
        *(f"netns add {host}" for host in HOSTS),
        "link add {0} netns {0} type veth peer name {1} netns {1}".format(*HOSTS),
    ]
    for i, host in enumerate(HOSTS, start=1):
        commands += [f"-n {host} addr add 10.98.0.{i}/24 dev {host}"]
        commands += [f"-n {host} link set {name} up" for name in ("lo", host)]
        commands += [f"netns exec {host} sysctl -q net.ipv4.tcp_retries2=5"]
    known = "127.0.0.1 localhost\n10.98.0.1 {}\n10.98.0.2 {}\n".format(*HOSTS)
    agent = folder / "agent"
    run_in = 'exec ip netns exec $host unshare --uts sh -c \'hostname $0; eval "$1"\' $host "$*"'
    agent.write_text(f"#!/bin/sh\nhost=$1; shift\n{run_in}\n")
    agent.chmod(0o755)
    try:
        for host in HOSTS:  # `ip netns exec` shows such files in place of those of /etc
            (Path("/etc/netns") / host).mkdir(parents=True)
            (Path("/etc/netns") / host / "hosts").write_text(known)
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host])
            shutil.rmtree(Path("/etc/netns") / host)


def attempt(here: Path, name: str, phase: str, victim: int, count: int) -> tuple[Ended, list[str]]:
    """One trial with `count` processes: how it ended, and what was wrong."""
    fault = FAULTS[name]
    processes = 2 if fault.cuts else count
    here.mkdir(parents=True)
    with ExitStack() as stack:
        if "fill" in fault.work:
            stack.enter_context(small_disk(here / "disk"))
        if fault.cuts:
            stack.enter_context(two_hosts(here))
        prepare(here, fault, phase, victim, processes)
        victims = list(range(processes)) if "ALL" in fault.work else [victim]
        ended = watch(here, train(here, fault, processes), fault, phase, victims)
        return ended, list(
            judge(ended, here / "at0" if fault.apart else here, fault, phase, victim)
        )


def used() -> tuple[float, float]:
    """Return the seconds that all programs had of the machine's cores, and those that trials had."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]))
    busy = sum(ticks[:3]) + sum(ticks[5:8])  # neither idle nor waiting for a disk
    return busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def wait_for_quiet(share: float) -> None:
    """Wait until other programs take at most this share of the machine for two seconds."""
    while True:
        before = used()
        time.sleep(2)
        if others(before, 2) <= share:
            return


def others(before: tuple[float, float], seconds: float) -> float:
    """Return the share of the machine that other programs had in the seconds since `before`."""
    (every, own), (earlier, ours) = used(), before
    return (every - earlier - own + ours) / seconds / (os.cpu_count() or 1)


def attempt_in_quiet(
    here: Path, name: str, phase: str, victim: int, count: int, share: float
) -> tuple[Ended, list[str], float]:
    """One trial, which is repeated until other programs take no more than this share of the machine
    meanwhile; the last item is what they took.
    """
    while True:
        if share < 1:
            wait_for_quiet(share)
        before, begun = used(), time.time()
        result = attempt(here, name, phase, victim, count)
        theirs = others(before, time.time() - begun)
        if theirs <= share or share >= 1:
            return *result, theirs
        tell(f"  {here.name}: others had {theirs:.0%} of the machine, not counted")
        shutil.rmtree(here)


def attack(
    folder: Path,
    processes: int,
    trials: int,
    names: Sequence[str],
    phases: Sequence[str],
    share: float,
) -> bool:
    """Bring each fault so often in each phase, while others take no more than this share of the
    machine; print and return what was found.
    """
    anything = False
    for name in names:
        fault = FAULTS[name]
        for phase in [phase for phase in fault.phases if phase in phases]:
            found: Findings = Counter()
            ends: defaultdict[int, int] = defaultdict(int)
            seconds, busiest = [], 0.0
            for i in range(trials):
                victims = [node for node in fault.victims or range(processes) if node < processes]
                here = folder / f"{name}-{phase}-{i}"
                victim = victims[i % len(victims)]
                ended, wrong, theirs = attempt_in_quiet(here, name, phase, victim, processes, share)
                busiest = max(busiest, theirs)
                ends[ended.code] += 1
                seconds.append(ended.nodes if fault.cuts else ended.last)
                found.update(wrong)
                if wrong:
                    tell(f"  {here.name}: {'; '.join(wrong)}: {seconds[-1]:.1f} s")
                else:
                    shutil.rmtree(here)
            codes = ", ".join(f"{n} x {code}" for code, n in sorted(ends.items()))
            seconds.sort()
            tell(
                f"{name}, {phase}: {trials} trials, {found.total()} found, ended after "
                f"{seconds[0]:.1f} to {seconds[-1]:.1f} s (median {seconds[trials // 2]:.1f}) with {codes}; "
                f"other programs had up to {busiest:.0%} of the machine"
            )
            anything |= bool(found)
    return anything


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
