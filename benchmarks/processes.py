"""Solvers in several processes that mpirun starts, beside as many in threads of one process.

usage: python benchmarks/processes.py --out FOLDER [--devices 4] [--nets resnet50:128,caffenet:256]
           [--precision bf16] [--deterministic] [--iterations 200] [--turns 2] [--seconds 600]
           [--mpirun 'mpirun --oversubscribe'] [--cpu]

N solvers train each net on random data: in one process; in 2, 4... and N processes, so that all
have as many; and as two nodes, for which NCCL takes processes whose NCCL_HOSTID differ: they talk
through the sockets of --interface. All ways take turns. The program prints images/s, the median
over the displays of a run but its first three and its last, their ratio to one process, and whether
the losses are those of one process, to the digit, as they are with --deterministic; and the lines
by which a run says that it is not captured. Then one process of N is killed with kill -9 while the first net trains: it prints the exit
code of the run, its one message, the seconds until then, and whether the snapshot is whole.
FOLDER keeps all as processes.json. --cpu takes N solvers on the CPU, to try the program out.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from google.protobuf import text_format
from two_nodes import NODE

from caffepy import models
from caffepy.commands.bench.train import SYNTHETIC, definition
from caffepy.models.synthetic import image_shape
from caffepy.proto.text import read_net
from caffepy.solver import snapshot

NETS = "resnet50:128,caffenet:256"
DISPLAY = 10
ENVIRONMENT = {
    **os.environ,
    "CAFFEPY_AUTOTUNE": "0",  # plans are the same in all ways
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
RANK = 'echo $$ > $0/pid.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; exec "$@"'
LONGEST = 180.0
"""Seconds of one run."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write(folder: str, net: str, batch: int, iterations: int, snapshot_after: bool) -> str:
    """Write a solver that trains a bundled net on random data; return its path."""
    path = models.path(net, "solver")
    model = models.path(net, "train_val")
    assert path, f"no bundled model {net}"
    assert model
    crops = any(layer.transform_param.crop_size for layer in read_net(model).layer)
    image = None if crops else image_shape(net)
    param = definition(path, batch, image, SYNTHETIC)
    param.display, param.max_iter, param.random_seed = DISPLAY, iterations, 1
    param.snapshot_prefix = os.path.join(folder, "s")
    param.snapshot_after_train = snapshot_after
    out = os.path.join(folder, "solver.prototxt")
    with open(out, "w") as file:
        file.write(text_format.MessageToString(param))
    return out


def ways(devices: int, mpirun: Sequence[str], interface: str, cpu: bool) -> dict[str, list[str]]:
    """Return the head of the command of each way, by its name."""
    node = [sys.executable, "-m", "caffepy"]
    found = {"1 process": node}
    for count in (n for n in range(2, devices + 1) if devices % n == 0):
        found[f"{count} processes"] = [*mpirun, "-n", str(count), *node]
    if devices > 1 and not cpu:
        found["2 nodes"] = [*mpirun, "-n", "2", "sh", "-c", NODE, interface, *node]
    return found


def devices_of(way: str, devices: int, cpu: bool) -> list[str]:
    """Return the options that give a way its devices."""
    if cpu:
        return ["--cpu", str(devices // int(way.split()[0]))]
    return ["--gpu", ",".join(map(str, range(devices))) if way == "1 process" else "all"]


def metrics(path: str) -> Iterator[tuple[int, float, float]]:
    """Yield iteration, loss and images/s of the displays of a run."""
    with open(path) as file:
        for row in csv.DictReader(file):
            if row["loss"] and row["images/s"]:
                yield int(row["iteration"]), float(row["loss"]), float(row["images/s"])


def train(command: Sequence[str], folder: str) -> dict[str, Any]:
    """Return what a run gave: its losses, its images/s, what it logged of captures."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=LONGEST
        )
    except subprocess.TimeoutExpired as error:
        return {"failed": f"no end in {LONGEST:.0f} s", "said": str(error.stderr)[-2000:]}
    if done.returncode:
        return {"failed": f"exit code {done.returncode}", "said": done.stderr[-2000:]}
    shown = list(metrics(os.path.join(folder, "s_metrics.csv")))
    return {
        "losses": {iteration: loss for iteration, loss, _ in shown},
        "rates": [rate for iteration, _, rate in shown if iteration > 2 * DISPLAY][:-1],
        "not captured": [line for line in done.stderr.splitlines() if "captured" in line],
        "seconds": time.monotonic() - begun,
    }


def kill(command: Sequence[str], folder: str, victim: str) -> dict[str, Any]:
    """Return the end of a run of which a process was killed after some displays, if it did not
    end before.
    """
    path = os.path.join(folder, "s_metrics.csv")
    for name in os.listdir(folder):
        if name == "s_metrics.csv" or name.startswith("s_iter_"):
            os.unlink(os.path.join(folder, name))
    log = os.path.join(folder, "killed.log")
    with open(log, "w") as file:
        run = subprocess.Popen(command, stderr=file, env=ENVIRONMENT)
    begun = time.monotonic()
    while run.poll() is None and time.monotonic() - begun < LONGEST:
        if os.path.exists(path) and len(list(metrics(path))) > 2:
            break
        time.sleep(0.1)
    killed = time.monotonic()
    if run.poll() is None:
        with open(os.path.join(folder, f"pid.{victim}")) as file:
            os.kill(int(file.read()), signal.SIGKILL)
    try:
        code = run.wait(LONGEST)
    except subprocess.TimeoutExpired:
        run.kill()
        code = run.wait()
    with open(log) as file:
        said = file.read()
    states = [name for name in os.listdir(folder) if name.endswith(".solverstate")]
    return {
        "exit code": code,
        "seconds": time.monotonic() - killed,
        "messages": [line for line in said.splitlines() if "caffepy: error:" in line],
        "snapshots": {name: is_whole(os.path.join(folder, name)) for name in states},
    }


def is_whole(state: str) -> bool:
    """True if the files of a snapshot are those that were written."""
    content = snapshot.read_sidecar(state)
    assert content
    model = snapshot.find_model(snapshot.read_state(state).learned_net, state)
    snapshot.verify(content, state, model)
    return True


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """A row for each net and way."""
    rows = ["| net | way | images/s | ratio | losses |", "|---|---|---|---|---|"]
    for net, runs in found.items():
        base: float | None = None
        losses = next((run["losses"] for run in runs["1 process"] if "losses" in run), None)
        for way, turns in runs.items():
            whole = [run for run in turns if "rates" in run]
            if not whole:
                rows.append(
                    f"| {net} | {way} | {turns[-1]['failed'] if turns else 'not run'} | | |"
                )
                continue
            rates = [median(run["rates"]) for run in whole]
            rate = median(rates)
            base = base or rate
            alike = all(run["losses"] == losses for run in whole)
            apart = (
                max(
                    abs(loss / losses[iteration] - 1)
                    for run in whole
                    for iteration, loss in run["losses"].items()
                )
                if losses
                else float("nan")
            )
            compared = "the same" if alike else f"{apart:.1e} apart"
            each = " and ".join(f"{rate:,.0f}" for rate in rates)
            rows.append(f"| {net} | {way} | {each} | {rate / base:.3f} | {compared} |")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--mpirun", default="mpirun --oversubscribe")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    begun, folder = time.monotonic(), os.path.abspath(arguments.out)
    os.makedirs(folder, exist_ok=True)
    mpirun = shlex.split(arguments.mpirun)
    every = ways(arguments.devices, mpirun, arguments.interface, arguments.cpu)
    how = [] if arguments.cpu else ["--precision", arguments.precision]
    how += ["--deterministic"] if arguments.deterministic else []
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    results: dict[str, Any] = {"nets": found}

    def keep() -> None:
        with open(os.path.join(folder, "processes.json"), "w") as file:
            json.dump(results, file, indent=1)

    for item in arguments.nets.split(","):
        net, batch = item.split(":")
        found[item] = {way: [] for way in every}
        solver = write(folder, net, int(batch), arguments.iterations, snapshot_after=False)
        for _ in range(arguments.turns):
            for way, head in every.items():
                if time.monotonic() - begun > arguments.seconds:
                    break
                on = devices_of(way, arguments.devices, arguments.cpu)
                run = train([*head, "train", "--solver", solver, *on, *how], folder)
                found[item][way].append(run)
                say(f"{time.monotonic() - begun:5.0f} s: {item}, {way}: {short(run)}")
                keep()
    say(table(found))

    net, batch = arguments.nets.split(",")[0].split(":")
    count = arguments.devices
    if count > 1 and shutil.which(mpirun[0]):
        solver = write(folder, net, int(batch), 10**6, snapshot_after=True)
        on = devices_of(f"{count} processes", count, arguments.cpu)
        start = [*mpirun, "--with-ft", "ulfm", "-n", str(count), "sh", "-c", RANK, folder]
        command = [*start, sys.executable, "-m", "caffepy", "train", "--solver", solver, *on, *how]
        results["killed"] = kill(command, folder, str(count - 1))
        say(json.dumps(results["killed"], indent=1))
        keep()


def short(run: dict[str, Any]) -> str:
    """Return a run in a few words."""
    if "failed" in run:
        return f"{run['failed']}\n{run['said']}"
    last = list(run["losses"].values())[-1]
    captures = "".join(f"; {line}" for line in run["not captured"])
    return f"{median(run['rates']):,.0f} images/s, last loss {last:.6g}{captures}"


if __name__ == "__main__":
    main()
