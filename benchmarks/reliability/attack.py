"""Attack caffepy as disks, schedulers and strangers do, and count what it does not survive.

usage: python benchmarks/reliability/attack.py [--kills 10] [--signals 10] [--disks 10] [--tmpfs 10]
[--text 200] [--binary 20] [--lmdb 100] [--seed 1] [--folder FOLDER] [--gpu 0]
       python benchmarks/reliability/attack.py --processes 3 [--faults kill,stop] [--phases test]
[--trials 1]

Each attempt is a process. Found is what ends by a crash or a traceback, takes more than 15 seconds,
loads a damaged snapshot, or resumes to other bytes than those of the run that nothing disturbed.
With --processes mpirun starts each run, and only such attacks are made, see processes.py.
With --gpu runs train there and the other attacks, which need no GPU, are left out; 60 seconds.
Exit code 1 if anything is found; FOLDER keeps the inputs.
"""

import argparse
import gzip
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import cv2
import h5py
import numpy as np
import processes

# loaded once, before processes are forked
import caffepy.commands.check
import caffepy.commands.data.show
import caffepy.commands.train
import caffepy.commands.weights
import caffepy.data.datum_kernels
import caffepy.ops.cpu
import caffepy.ops.cpu.lock_watch
from caffepy.cli import main
from caffepy.commands import preprocess
from caffepy.commands.data import mnist_and_cifar
from caffepy.core.errors import CaffeError
from caffepy.data.sources import open_source
from caffepy.data.write import write_database
from caffepy.pycaffe import io
from caffepy.solver import newest_good

with suppress(ImportError):
    import_module("matplotlib.figure")
    import_module("matplotlib.backends.backend_agg")

KNOWN = {0, 2, 3, 4, 5, 6, 75}  # exit codes that tell the user's fault, or none
MEMORY = 8 << 30  # bytes of addresses that a process without a GPU may take
MODELS = Path(caffepy.commands.__file__).parents[2] / "models"
NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  transform_param { scale: 0.004 crop_size: 7 mirror: true }
  data_param { source: "digits_train_lmdb" batch_size: 13 backend: LMDB } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" type: "Adam" base_lr: 0.001 lr_policy: "step" gamma: 0.5 stepsize: 10
max_iter: END snapshot: EVERY display: 5 snapshot_prefix: "s" random_seed: 3
"""


class Run(NamedTuple):
    """A run: how it is started, its iterations, those between snapshots, the seconds after which a
    process of it hangs, and the bytes of addresses that it may take.
    """

    command: list[str]
    end: int = 30
    every: int = 3
    deadline: float = 15.0
    memory: int = MEMORY

    @property
    def solver(self) -> str:
        return SOLVER.replace("END", str(self.end)).replace("EVERY", str(self.every))


TRAIN = ["train", "--solver", "solver.prototxt", "--no-progress"]
ON_CPU = Run(TRAIN)


def on_gpus(gpus: str) -> Run:
    """A run there, long enough to be met while it trains."""
    command = [*TRAIN, "--gpu", gpus, "--deterministic"]
    return Run(command, 1200, 20, 60.0, resource.RLIM_INFINITY)


NUMBERS = [
    "0",
    "-1",
    "1",
    "2147483647",
    "4294967295",
    "-2147483648",
    "9223372036854775808",
    "1e39",
    "nan",
    "inf",
    "1e-45",
]

Findings = Counter[str]
ends: defaultdict[str, Counter[int | str]] = defaultdict(Counter)  # of an attack, by what it was


class Attempt:
    """A process that runs a function, or a command, in a folder; its output goes to `out`."""

    def __init__(
        self, folder: Path, work: list[str] | Callable[[], object], run: Run = ON_CPU
    ) -> None:
        self.out, self._deadline = folder / "out", run.deadline
        self.out.write_bytes(b"")
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            code = 71
            try:
                os.chdir(folder)
                target = os.open("out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(target, 1)
                os.dup2(target, 2)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_AS, (run.memory, run.memory))
                code = _run(work)
                sys.stdout.flush()
            finally:
                os._exit(code)

    @property
    def at_work(self) -> bool:
        """True if the process has not ended."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process, look) is None

    def outcome(self, what: str, seconds: float | None = None) -> int | str:
        """The exit code, minus a signal's number, or "hang"; counted as an end of `what`."""
        end = time.monotonic() + (seconds or self._deadline)
        code: int | str = "hang"
        while code == "hang" and time.monotonic() < end:
            done, status = os.waitpid(self.process, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        if code == "hang":
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        ends[what][code] += 1
        return code

    @property
    def last_words(self) -> str:
        """The end of the output."""
        lines = self.out.read_text(errors="replace").strip().splitlines()[-2:]
        return " ".join(lines)[:200]


def _run(work: list[str] | Callable[[], object]) -> int:
    if isinstance(work, list):
        sys.argv = ["caffepy", *work]
        try:
            main.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
    try:
        assert not isinstance(work, list)
        work()
    except CaffeError as error:
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 71
    return 0


def check_end(attempt: Attempt, what: str, found: Findings) -> int | str:
    """Wait for an attempt; note what is no known end."""
    code = attempt.outcome(what)
    if code not in KNOWN:
        found[f"{what}: {code} {attempt.last_words}"] += 1
    return code


def workplace(folder: Path, run: Run = ON_CPU) -> Path:
    """A folder with the data, the net and the solver of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits_train_lmdb").symlink_to(MODELS / "digits" / "digits_train_lmdb")
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(run.solver)
    return folder


class Whole(NamedTuple):
    """Results of a run that nothing disturbs, its seconds, and those until its first snapshot."""

    run: Run
    result: list[bytes]
    seconds: float
    first: float

    @property
    def again(self) -> list[str]:
        """The command that goes on from the newest snapshot."""
        return [*self.run.command, "--snapshot", "auto"]

    def moment(self) -> float:
        """A random time to wait; each second one falls into the part with snapshots."""
        return random.uniform(random.choice((0, self.first)), self.seconds)


def result(folder: Path, run: Run) -> list[bytes]:
    """The last snapshot of a run: model and state."""
    names = (f"s_iter_{run.end}.{kind}" for kind in ("caffemodel", "solverstate"))
    return [(folder / name).read_bytes() for name in names if (folder / name).exists()]


def uninterrupted(folder: Path, run: Run) -> Whole:
    """A run without an attack: the second one, whose kernels are compiled."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        workplace(folder, run)
        start, since = time.monotonic(), time.time()
        attempt = Attempt(folder, run.command, run)
        assert attempt.outcome("undisturbed", 600) == 0, attempt.out.read_text()
    seconds = time.monotonic() - start
    first = (folder / f"s_iter_{run.every}.solverstate").stat().st_mtime - since
    return Whole(run, result(folder, run), seconds, min(max(first, 0.0), seconds))


def lost_iterations(folder: Path) -> int:
    """The iterations between the newest snapshot of a run and the last that its log shows."""
    shown = re.findall(r"Iteration (\d+)", (folder / "out").read_text(errors="replace"))
    saved = [int(path.stem.rpartition("_")[2]) for path in folder.glob("s_iter_*.solverstate")]
    return max(map(int, shown), default=0) - max(saved, default=0)


def interrupt(folder: Path, trials: int, signals: list[signal.Signals], whole: Whole) -> Findings:
    """Runs that signals interrupt at random moments, each resumed until it ends."""
    found: Findings = Counter()
    done = 0
    while done < trials:
        here = workplace(folder / str(done), whole.run)
        while True:
            attempt, number, what = Attempt(here, whole.again, whole.run), None, "undisturbed"
            if done < trials:
                time.sleep(whole.moment())
                if attempt.at_work:
                    number, done = random.choice(signals), done + 1
                    what = number.name
                    os.kill(attempt.process, number)
            code = attempt.outcome(what)
            lost = lost_iterations(here)
            if lost > (whole.run.every if number == signal.SIGKILL else 0):
                found[f"{what}: {lost} iterations are lost"] += 1
            if code == 0:
                break
            if number is None or code not in (75, 130, -number):
                found[f"{what}: {code} {attempt.last_words}"] += 1
                break
        if code == 0 and result(here, whole.run) != whole.result:
            found["resumed to other bytes"] += 1
        if left := list(here.glob(".s*.tmp")):
            found[f"{len(left)} temporary files are left"] += 1
        if not found:  # the process that draws the curve of a killed run may still write
            shutil.rmtree(here, ignore_errors=True)
    return found


def check_resumed(here: Path, whole: Whole, found: Findings) -> None:
    """Look at what a run left whose disk was full, and let it go on now that there is room."""
    with suppress(CaffeError):  # none is whole
        newest_good(str(here / "s"))
    for path in here.glob("s_iter*"):
        if path.stat().st_size == 0:
            found[f"{path.name} is empty"] += 1
    code = check_end(Attempt(here, whole.again, whole.run), "resumed", found)
    if code:
        found[f"not resumed: {code}"] += 1
    elif result(here, whole.run) != whole.result:
        found["resumed to other bytes"] += 1


def limit_files(folder: Path, trials: int, whole: Whole) -> Findings:
    """Runs whose files may have a limited number of bytes; then the limit is gone, and they resume."""
    largest = sum(map(len, whole.result))
    found: Findings = Counter()
    for i in range(trials):
        here = workplace(folder / str(i), whole.run)
        limit = random.randrange(largest)

        def limited(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            os._exit(_run(whole.again))

        check_end(Attempt(here, limited, whole.run), "files of limited size", found)
        check_resumed(here, whole, found)
    return found


MOUNT = ["mount", "-t", "tmpfs", "-o"]


def can_mount(folder: Path) -> bool:
    """True if this process may mount file systems, as root outside containers may."""
    if not all(map(shutil.which, ("mount", "umount"))):
        return False
    tried = subprocess.run([*MOUNT, "size=4096", "caffepy", folder], capture_output=True)
    return tried.returncode == 0 and subprocess.run(["umount", folder]).returncode == 0


def fill_disk(folder: Path, trials: int, whole: Whole) -> Findings:
    """Runs in a small file system of their own, log and all, which another file fills at a random
    moment but for some pages; that is removed while they run, or after, and they resume.
    """
    found: Findings = Counter()
    for i in range(trials):
        here = folder / str(i)
        here.mkdir(parents=True)
        subprocess.run([*MOUNT, "size=16m", "caffepy", here], check=True)
        try:
            workplace(here, whole.run)
            attempt = Attempt(here, whole.again, whole.run)
            time.sleep(whole.moment())
            with (here / "ballast").open("wb", buffering=0) as ballast:
                with suppress(OSError):  # the disk is full
                    while ballast.write(bytes(4096)):
                        pass
                ballast.truncate(max(0, ballast.tell() - 4096 * random.randrange(20)))
            if random.random() < 0.5:
                time.sleep(random.uniform(0, whole.seconds - whole.first))
                (here / "ballast").unlink()
            check_end(attempt, "full disk", found)
            (here / "ballast").unlink(missing_ok=True)
            check_resumed(here, whole, found)
        finally:
            subprocess.run(["umount", "-l", here], check=True)
    return found


def spoil_text(text: str) -> str:
    """A prototxt with a few random changes."""
    for _ in range(random.choice((1, 1, 2, 5))):
        tokens = re.split(r"(\s+)", text)
        i = random.randrange(len(tokens))
        kind = random.randrange(6)
        if kind == 0:
            place = random.randrange(len(text))
            text = text[:place] + chr(random.choice((0, 34, 58, 123, 125, 233))) + text[place + 1 :]
        elif kind == 1:
            text = "".join(tokens[:i] + tokens[i + random.randrange(1, 4) :])
        elif kind == 2:
            text = "".join([*tokens[:i], random.choice(tokens), *tokens[i:]])
        elif kind == 3 and (numbers := list(re.finditer(r"-?\d+\.?\d*", text))):
            number = random.choice(numbers)
            text = text[: number.start()] + random.choice(NUMBERS) + text[number.end() :]
        elif kind == 4:
            start = random.randrange(len(text))
            text = text[:start] + text[start + random.randrange(200) :]
        elif words := list(re.finditer(r'"[^"\n]*"', text)):
            word = random.choice(words)
            value = random.choice(['""', '"\\000"', '"/"', '"x"', '"' + "y" * 300 + '"', "MAX"])
            text = text[: word.start()] + value + text[word.end() :]
        text = text or "x"
    return text


def attack_text(folder: Path, trials: int) -> Findings:
    """Solver and net as text, with random changes."""
    found: Findings = Counter()
    here = workplace(folder)
    for _ in range(trials):
        (here / "net.prototxt").write_text(NET)
        (here / "solver.prototxt").write_text(ON_CPU.solver)
        name = random.choice(("net.prototxt", "net.prototxt", "solver.prototxt"))
        (here / name).write_text(spoil_text((here / name).read_text()), errors="surrogateescape")
        check_end(Attempt(here, ["check", "--solver", "solver.prototxt"]), name, found)
    return found


def spoil(content: bytes) -> bytes:
    """A file with a few random changes; never the same."""
    while (spoiled := spoil_once(content)) == content:
        pass
    return spoiled


def spoil_once(content: bytes) -> bytes:
    """The file after a few random changes, which may leave it as it was."""
    data = bytearray(content)
    kind = random.randrange(6)
    place = random.randrange(len(data))
    if kind == 0:
        return bytes(data[:place])
    if kind == 1:
        return bytes(data) + random.randbytes(random.randrange(1, 100))
    if kind == 2:
        data[place : place + random.randrange(1, 300)] = bytes(random.randrange(1, 300))
    elif kind == 3:
        data[place : place + 8] = random.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7))
    else:  # mostly near the start, where the structure is
        for _ in range(random.choice((1, 1, 3, 30))):
            most = random.choice((100, 1000, len(data)))
            data[random.randrange(min(most, len(data)))] = random.randrange(256)
    return bytes(data)


class Reader(NamedTuple):
    """Something that reads a file: its name, the file, the command or function; and if it resumes a
    run.
    """

    name: str
    file: Path
    command: list[str] | Callable[[], object]
    resumes: bool = False


def readers(here: Path) -> Iterator[Reader]:
    """Readers of binary files in a folder with the snapshots of a run in both formats."""
    mean = np.random.default_rng(0).random((1, 1, 8, 8))
    (here / "mean.binaryproto").write_bytes(io.array_to_blobproto(mean).SerializeToString())
    with h5py.File(here / "data.h5", "w") as file:
        file["data"], file["label"] = np.zeros((50, 3), np.float32), np.zeros(50, np.float32)
    model, state = (f"s_iter_{ON_CPU.end}.{kind}" for kind in ("caffemodel", "solverstate"))
    for folder, name in (
        ("", model),
        ("", state),
        ("hdf5", f"{model}.h5"),
        ("hdf5", f"{state}.h5"),
    ):
        path = here / folder / name
        yield Reader(name.split("_")[-1][3:], path, ["weights", "show", str(path)])
    yield Reader("binaryproto", here / "mean.binaryproto", ["weights", "show", "mean.binaryproto"])
    yield Reader("HDF5 data", here / "data.h5", ["data", "show", "data.h5"])
    if find_spec("plyvel"):
        with write_database(str(here / "leveldb"), "leveldb") as writer:
            for i in range(200):
                writer.put(f"{i:08d}", io.array_to_datum(mean[0], i % 10).SerializeToString())
        for path in sorted((here / "leveldb").iterdir()):
            if path.stat().st_size:
                yield Reader(f"LevelDB {path.name}", path, ["data", "show", "leveldb"])
    middle = f"s_iter_{ON_CPU.end - ON_CPU.every}"
    for folder, end in (("", ""), ("hdf5", ".h5")):
        command = [*TRAIN, "--snapshot", f"{middle}.solverstate{end}"]
        for kind in (f"caffemodel{end}", f"solverstate{end}", "caffepystate"):
            path = here / folder / f"{middle}.{kind}"
            yield Reader(f"resume, {path.suffixes[0][1:]}{end}", path, command, True)


def readers_of_images(here: Path) -> Iterator[Reader]:
    """Readers of images and arrays; each function is that of the commands."""
    draw = np.random.default_rng(1)
    image = draw.integers(0, 256, (40, 50, 3), np.uint8)
    for kind in ("png", "jpg", "bmp"):
        path = here / f"image.{kind}"
        cv2.imwrite(str(path), image)
        yield Reader(kind, path, partial(preprocess.load, str(path), 3))
    np.save(here / "mean.npy", draw.random((3, 8, 8)))
    path = here / "mean.npy"
    yield Reader("npy", path, partial(preprocess.read_mean, str(path)))
    idx = np.array([mnist_and_cifar.IMAGES, 30, 8, 8], ">i4").tobytes() + draw.bytes(30 * 64)
    for name, content in (("images-idx3", idx), ("images-idx3.gz", gzip.compress(idx))):
        (here / name).write_bytes(content)
        read = partial(mnist_and_cifar.read_idx, str(here / name), mnist_and_cifar.IMAGES, 3)
        yield Reader(name, here / name, read)


def attack_binary(folder: Path, trials: int, whole: Whole) -> Findings:
    """Each reader of binary files so often; and snapshots with their sidecars, which must be whole,
    or else not be loaded.
    """
    found: Findings = Counter()
    here = workplace(folder)
    workplace(here / "hdf5")
    for place, form in ((here, "BINARYPROTO"), (here / "hdf5", "HDF5")):
        quiet = ON_CPU.solver.replace(
            "display: 5", "display: 0"
        )  # without a curve, which takes time
        (place / "solver.prototxt").write_text(f"{quiet} snapshot_format: {form}")
        assert Attempt(place, TRAIN).outcome("undisturbed", 600) == 0
    end = f"s_iter_{ON_CPU.end}"
    results = {
        here: [here / f"{end}.caffemodel", here / f"{end}.solverstate"],
        here / "hdf5": [
            here / "hdf5" / f"{end}.{kind}.h5" for kind in ("caffemodel", "solverstate")
        ],
    }
    expected = {place: [path.read_bytes() for path in paths] for place, paths in results.items()}
    assert expected[here] == whole.result
    for reader in [*readers(here), *readers_of_images(here)]:
        place = reader.file.parent if reader.resumes else here
        good = reader.file.read_bytes()
        for _ in range(trials):
            if reader.resumes:
                for path in results[place]:
                    path.unlink(missing_ok=True)
            reader.file.write_bytes(spoil(good))
            code = check_end(Attempt(place, reader.command), reader.name, found)
            if code == 0 and reader.resumes:
                ended = [path.read_bytes() for path in results[place]]
                if ended != expected[place]:
                    found[f"{reader.name}: a damaged snapshot was loaded"] += 1
        reader.file.write_bytes(good)
    return found


def read_all(path: str) -> None:
    """Read a database by each of its ways."""
    source = open_source(path)
    count = min(len(source), 500)
    for _ in range(count):
        source.read()
    source.take(count)
    source.seek(count // 2)
    source.take(5)
    source.close()


def attack_lmdb(folder: Path, trials: int) -> Findings:
    """LMDBs of small and of large records with damaged pages."""
    found: Findings = Counter()
    folder.mkdir()
    contents = []
    for name, count, size in (("small", 500, 64), ("large", 25, 9000)):
        with write_database(str(folder / name)) as writer:
            for i in range(count):
                image = np.full((1, 8, size // 8), i % 256, np.uint8)
                writer.put(f"{i:08d}", io.array_to_datum(image, i % 10).SerializeToString())
        contents.append((folder / name / "data.mdb").read_bytes())
    (folder / "damaged").mkdir()
    for _ in range(trials):
        data = bytearray(random.choice(contents))
        for _ in range(random.choice((1, 3, 30))):  # headers and nodes of pages, metas above all
            page = random.choice((0, 1, random.randrange(len(data) // 4096)))
            place = 4096 * page + random.randrange(random.choice((20, 160, 4096)))
            data[place] = random.choice((0, 1, 2, 4, 255, random.randrange(256)))
        if random.random() < 0.1:
            del data[random.randrange(len(data)) :]
        (folder / "damaged" / "data.mdb").write_bytes(data)
        check_end(Attempt(folder, lambda: read_all("damaged")), "LMDB", found)
    return found


def attack(arguments: argparse.Namespace, folder: Path) -> bool:
    """Run all attacks; print and return what was found."""
    random.seed(arguments.seed)
    if arguments.processes:
        faults, phases = arguments.faults.split(","), arguments.phases.split(",")
        trials, share = arguments.trials, arguments.busy / 100
        return processes.attack(folder, arguments.processes, trials, faults, phases, share)
    run = on_gpus(arguments.gpu) if arguments.gpu else ON_CPU
    whole = uninterrupted(folder / "whole", run)
    gentle = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    attacks: dict[str, Callable[[Path, int], Findings]] = {
        "kills": lambda place, n: interrupt(place, n, [signal.SIGKILL], whole),
        "signals": lambda place, n: interrupt(place, n, gentle, whole),
        "disks": lambda place, n: limit_files(place, n, whole),
        "tmpfs": lambda place, n: fill_disk(place, n, whole),
    }
    if not arguments.gpu:
        attacks |= {
            "text": attack_text,
            "binary": lambda place, n: attack_binary(place, n, whole),
            "lmdb": attack_lmdb,
        }
    if not can_mount(folder):
        sys.stdout.write("tmpfs: left out, since none can be mounted here; root may\n")
        del attacks["tmpfs"]
    anything = False
    for name, work in attacks.items():
        trials, start = getattr(arguments, name), time.monotonic()
        if trials:
            ends.clear()
            found = work(folder / name, trials)
            seconds = time.monotonic() - start
            lines = [f"{name}: {trials} trials, {found.total()} found, {seconds:.0f} s"]
            for what, codes in ends.items():
                each = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items(), key=str))
                lines.append(f"  {what}: {codes.total()} processes ended with {each}")
            lines += [f"  FOUND {count} x {what}" for what, count in found.most_common()]
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            anything |= bool(found)
    return anything


COUNTS = {
    "kills": 10,
    "signals": 10,
    "disks": 10,
    "tmpfs": 10,
    "text": 200,
    "binary": 20,
    "lmdb": 100,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, count in COUNTS.items():
        each = " of each reader" if name == "binary" else ""
        parser.add_argument(f"--{name}", type=int, default=count, help=f"trials{each} ({count})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gpu", default="", help="train there, such as 0 or 0,1")
    parser.add_argument(
        "--processes", type=int, default=0, help="number of processes, started by mpirun"
    )
    parser.add_argument("--faults", default=",".join(processes.FAULTS), help="of such runs")
    parser.add_argument("--phases", default=",".join(processes.PHASES), help="they come in")
    parser.add_argument("--trials", type=int, default=1, help="of each fault in each phase (1)")
    parser.add_argument(
        "--busy",
        type=int,
        default=100,
        help="percent of the machine that other programs may take; else a trial of --processes is "
        "repeated (100)",
    )
    given = parser.parse_args()
    if given.folder:
        given.folder.mkdir()
        sys.exit(attack(given, given.folder.resolve()))
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(attack(given, Path(scratch)))
