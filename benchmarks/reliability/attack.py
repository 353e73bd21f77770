"""Attack caffepy as disks, schedulers and strangers do, and count what it does not survive.

usage: python benchmarks/reliability/attack.py [--kills 10] [--signals 10] [--disks 10] [--text 200]
[--binary 200] [--lmdb 100] [--seed 1] [--folder FOLDER]

Each attempt is a process. Found is what ends by a crash or a traceback, takes more than 15 seconds,
loads a damaged snapshot, or resumes to other bytes than those of the run that nothing disturbed.
Exit code 1 if anything is found; FOLDER keeps the inputs.
"""

import argparse
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np

# loaded once, before processes are forked
import caffepy.commands.check
import caffepy.commands.data.show
import caffepy.commands.train
import caffepy.commands.weights
import caffepy.ops.cpu
from caffepy.cli import main
from caffepy.core.errors import CaffeError
from caffepy.data.sources import open_source
from caffepy.data.write import write_database
from caffepy.pycaffe import io
from caffepy.solver import newest_good

DEADLINE = 15.0  # seconds
KNOWN = {0, 2, 3, 4, 5, 6, 75}  # exit codes that tell the user's fault, or none
MEMORY = 8 << 30  # bytes of addresses that a process may take
END = 30  # iterations of a run
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
SOLVER = f"""
net: "net.prototxt" type: "Adam" base_lr: 0.001 lr_policy: "step" gamma: 0.5 stepsize: 10
max_iter: {END} snapshot: 3 display: 5 snapshot_prefix: "s" random_seed: 3
"""
TRAIN = ["train", "--solver", "solver.prototxt", "--no-progress", "--snapshot", "auto"]
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
ends: Counter[int | str] = Counter()  # of the trials of an attack


class Attempt:
    """A process that runs a function, or a command, in a folder; its output goes to `out`."""

    def __init__(self, folder: Path, work: list[str] | Callable[[], object]) -> None:
        self.out = folder / "out"
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
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                code = _run(work)
                sys.stdout.flush()
            finally:
                os._exit(code)

    def outcome(self, seconds: float = DEADLINE) -> int | str:
        """The exit code, minus a signal's number, or "hang"."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(self.process, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ends[code] += 1
                return code
            time.sleep(0.002)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        ends["hang"] += 1
        return "hang"


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
    return 0


def check_end(attempt: Attempt, what: str, found: Findings) -> int | str:
    """Wait for an attempt; note what is no known end."""
    code = attempt.outcome()
    if code not in KNOWN:
        last = attempt.out.read_text(errors="replace").strip().splitlines()[-2:]
        found[f"{what}: {code} {' '.join(last)[:200]}"] += 1
    return code


def workplace(folder: Path) -> Path:
    """A folder with the data, the net and the solver of a run."""
    folder.mkdir(parents=True)
    (folder / "digits_train_lmdb").symlink_to(MODELS / "digits" / "digits_train_lmdb")
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(SOLVER)
    return folder


def result(folder: Path) -> list[bytes]:
    """The last snapshot of a run: model and state."""
    names = (f"s_iter_{END}.{kind}" for kind in ("caffemodel", "solverstate"))
    return [(folder / name).read_bytes() for name in names if (folder / name).exists()]


def uninterrupted(folder: Path) -> tuple[list[bytes], float]:
    """What a run gives that nothing disturbs, and its seconds: of the second run, whose kernels
    are compiled.
    """
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        workplace(folder)
        start = time.monotonic()
        code = Attempt(folder, TRAIN).outcome(600)
        assert code == 0, (folder / "out").read_text()
    return result(folder), time.monotonic() - start


def interrupt(
    folder: Path, trials: int, signals: list[signal.Signals], whole: tuple[list[bytes], float]
) -> Findings:
    """Runs that signals interrupt at random moments, each resumed until it ends."""
    expected, seconds = whole
    found: Findings = Counter()
    done = 0
    while done < trials:
        here = workplace(folder / str(done))
        while True:
            attempt = Attempt(here, TRAIN)
            if done < trials:
                time.sleep(random.uniform(0, seconds))
                with suppress(ProcessLookupError):
                    os.kill(attempt.process, number := random.choice(signals))
                done += 1
            code = attempt.outcome()
            if code == 0:
                break
            if code not in (75, 130, -number):
                last = (here / "out").read_text(errors="replace").strip().splitlines()[-2:]
                found[f"{number.name}: {code} {' '.join(last)[:200]}"] += 1
                break
        if code == 0 and result(here) != expected:
            found["resumed to other bytes"] += 1
        if left := list(here.glob(".s*.tmp")):
            found[f"{len(left)} temporary files are left"] += 1
    return found


def fill_disk(folder: Path, trials: int, whole: tuple[list[bytes], float]) -> Findings:
    """Runs whose files may have so many bytes only; then the limit is gone, and they resume."""
    expected, _ = whole
    largest = sum(map(len, expected))
    found: Findings = Counter()
    for i in range(trials):
        here = workplace(folder / str(i))
        limit = random.randrange(largest)

        def limited(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            os._exit(_run(TRAIN))

        check_end(Attempt(here, limited), f"files of {limit} bytes", found)
        with suppress(CaffeError):  # none is whole
            newest_good(str(here / "s"))
        for path in here.glob("s_iter*"):
            if path.stat().st_size == 0:
                found[f"{path.name} is empty"] += 1
        if check_end(Attempt(here, TRAIN), "resumed", found) == 0 and result(here) != expected:
            found["resumed to other bytes"] += 1
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
        (here / "solver.prototxt").write_text(SOLVER)
        name = random.choice(("net.prototxt", "net.prototxt", "solver.prototxt"))
        (here / name).write_text(spoil_text((here / name).read_text()), errors="surrogateescape")
        check_end(Attempt(here, ["check", "--solver", "solver.prototxt"]), name, found)
    return found


def spoil(content: bytes) -> bytes:
    """A file with a few random changes."""
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


def readers(here: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Kind of file, the file to spoil, and the command that reads it."""
    mean = np.random.default_rng(0).random((1, 1, 8, 8))
    (here / "mean.binaryproto").write_bytes(io.array_to_blobproto(mean).SerializeToString())
    with h5py.File(here / "data.h5", "w") as file:
        file["data"], file["label"] = np.zeros((50, 3), np.float32), np.zeros(50, np.float32)
    show = ["weights", "show"]
    model, state = (f"s_iter_{END}.{kind}" for kind in ("caffemodel", "solverstate"))
    for name in (model, state, f"{model}.h5", f"{state}.h5", "mean.binaryproto"):
        yield name.split("_")[-1], here / name, [*show, name]
    yield "HDF5 data", here / "data.h5", ["data", "show", "data.h5"]
    if find_spec("plyvel"):
        with write_database(str(here / "leveldb"), "leveldb") as writer:
            for i in range(200):
                writer.put(f"{i:08d}", io.array_to_datum(mean[0], i % 10).SerializeToString())
        for path in sorted((here / "leveldb").iterdir()):
            if path.stat().st_size:
                yield f"LevelDB {path.name}", path, ["data", "show", "leveldb"]


def attack_binary(folder: Path, trials: int, whole: tuple[list[bytes], float]) -> Findings:
    """Each reader of binary files; and snapshots with their sidecars, which must be whole."""
    found: Findings = Counter()
    here = workplace(folder)
    for form in ("HDF5", "BINARYPROTO"):
        (here / "solver.prototxt").write_text(SOLVER + f"snapshot_format: {form}")
        assert Attempt(here, TRAIN[:-2]).outcome(600) == 0
    files = list(readers(here))
    middle = f"s_iter_{END - 3}"
    resume = [*TRAIN[:-1], f"{middle}.solverstate"]
    parts = [here / f"{middle}.{kind}" for kind in ("caffemodel", "solverstate", "caffepystate")]
    for i in range(trials):
        if i % 2:
            what, path, command = files[i // 2 % len(files)]
            good = path.read_bytes()
            path.write_bytes(spoil(good))
            check_end(Attempt(here, command), what, found)
        else:
            path = parts[i // 2 % 3]
            good = path.read_bytes()
            path.write_bytes(spoil(good))
            code = check_end(Attempt(here, resume), path.suffix, found)
            if code == 0 and result(here) != whole[0]:
                found[f"{path.suffix}: a damaged snapshot was loaded"] += 1
        path.write_bytes(good)
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
    whole = uninterrupted(folder / "whole")
    gentle = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    attacks: dict[str, Callable[[Path, int], Findings]] = {
        "kills": lambda place, n: interrupt(place, n, [signal.SIGKILL], whole),
        "signals": lambda place, n: interrupt(place, n, gentle, whole),
        "disks": lambda place, n: fill_disk(place, n, whole),
        "text": attack_text,
        "binary": lambda place, n: attack_binary(place, n, whole),
        "lmdb": attack_lmdb,
    }
    anything = False
    for name, run in attacks.items():
        trials, start = getattr(arguments, name), time.monotonic()
        if trials:
            ends.clear()
            found = run(folder / name, trials)
            seconds = time.monotonic() - start
            codes = ", ".join(f"{count} x {code}" for code, count in sorted(ends.items(), key=str))
            figures = f"{trials} trials, {found.total()} found, {seconds:.0f} s"
            lines = [f"{name}: {figures} (processes ended with {codes})"]
            lines += [f"  {count} x {what}" for what, count in found.most_common()]
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            anything |= bool(found)
    return anything


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    counts = {"kills": 10, "signals": 10, "disks": 10, "text": 200, "binary": 200, "lmdb": 100}
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"trials ({count})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.folder:
        given.folder.mkdir()
        sys.exit(attack(given, given.folder.resolve()))
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(attack(given, Path(scratch)))
