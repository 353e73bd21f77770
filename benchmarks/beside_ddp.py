"""caffepy beside PyTorch's DistributedDataParallel on 1, 2, 4... GPUs: training steps on data that
lies on the devices.

usage: python benchmarks/beside_ddp.py --out FOLDER [--nets lenet:64,caffenet:256]
           [--modes tf32,bf16] [--gpus 1,2,4] [--compile eager,default] [--seconds 600]
       python benchmarks/beside_ddp.py --out FOLDER --gpus 2 --modes bf16
           --mpirun 'mpirun --oversubscribe' [--turns 3]

The peer, peer_torch.py unless --peer names another file, trains the nets that --nets names, with the
batch of each GPU, in one process a GPU, and prints a line of JSON a case: net, mode, gpus, images_s;
it takes --nets, --batch, --modes, --seconds, --compile, --device, and in several processes ends a
case after some number of steps: their clocks differ. For every number of GPUs (by default 1, 2, 4...
and all that there are) and every way of --compile, eager or a mode of torch.compile, it runs under
torch.distributed.run; in between `caffepy bench scaling` trains the same nets in threads of one
process. After --seconds nothing more is begun, and the peer ends. Medians are printed as a table
beside the peer's best way, which FOLDER keeps as table.md, and all figures as results.json, after
each step.

With --mpirun caffepy runs in processes, too: a GPU each, as many as the last number of --gpus. Both
run in turns, DDP as it is and with modes of torch.compile, until --turns are done or another would
end after --seconds. A turn's figures are kept when it is done. --device cpu tries the program out.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from caffepy.core.errors import DeviceError
from caffepy.device.gpus import count_gpus

NETS = "lenet:64,cifar10_quick:256,caffenet:256,alexnet:256,googlenet:128,vgg16:64,resnet50:128"
EAGER = "eager"
ONE_PROCESS, NO_LIMIT = "1.5", "60"
"""Seconds that the peer measures a case."""
GRACE = 15.0
"""Seconds that a command has to end after SIGTERM."""
Rates = dict[tuple[str, str, int], float]
Turns = dict[tuple[str, str, str], list[float]]
"""Images a second in each turn, by net, mode and who trains."""


def lines(
    command: Sequence[str], environment: dict[str, str] | None = None, seconds: float | None = None
) -> list[Any]:
    """The JSON objects that a command prints, a line each, until `seconds` are over: then it ends."""
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        say(f"no end within {seconds:.0f} s: {shlex.join(command)}")
        run.terminate()  # torch.distributed.run ends its processes then
        try:
            output, _ = run.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            output, _ = run.communicate()
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def theirs(
    peer: str,
    nets: dict[str, int],
    modes: Sequence[str],
    gpus: int,
    compiled: str = EAGER,
    device: str = "cuda",
    most: float | None = None,
) -> Rates:
    """PyTorch's images a second."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    what = [
        "--nets",
        ",".join(nets),
        "--batch",
        ",".join(map(str, nets.values())),
        "--modes",
        ",".join(modes),
        *([] if compiled == EAGER else ["--compile", compiled]),
        *([] if device == "cuda" else ["--device", device]),
    ]
    visible = {**os.environ, "OMP_NUM_THREADS": "1"}
    seconds = ONE_PROCESS if gpus == 1 else NO_LIMIT
    found = lines([sys.executable, *launch, peer, *what, "--seconds", seconds], visible, most)
    for case in found:
        if "images_s" not in case:
            say(f"DDP, {compiled}: {json.dumps(case)}")
    return {(a["net"], a["mode"], gpus): a["images_s"] for a in found if "images_s" in a}


def ours(
    net: str, batch: int, mode: str, on: Sequence[str], launch: Sequence[str] = ()
) -> list[Any]:
    """Return the results of `bench scaling` on 1, 2, 4... devices, or those that `launch` starts."""
    how = ["--model", net, "--batch", str(batch), "--precision", mode, *on, "--json"]
    return lines([*launch, sys.executable, "-m", "caffepy", "bench", "scaling", *how])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def table(own: dict[tuple[str, str], list[Any]], peer: dict[str, Rates]) -> str:
    """A row for each net, mode and number of GPUs, beside the fastest of the peer's ways."""
    rows = [
        "| net | mode | GPUs | images/s | times one GPU | exposed | PyTorch images/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (net, mode), points in own.items():
        for point in points:
            rate, count = point["images_per_s"], point["devices"]
            key = net, mode, count
            ways = [(rates[key], way) for way, rates in peer.items() if key in rates]
            other, way = max(ways, default=(0.0, ""))
            beside = f"{other:,.0f} ({way}) | {rate / other:.2f}" if other else "not measured | "
            times = f"{rate / points[0]['images_per_s']:.2f} | {point['exposed']:.1%}"
            rows.append(f"| {net} | {mode} | {count} | {rate:,.0f} | {times} | {beside} |")
    return "\n".join(rows)


def table_of_turns(rates: Turns, compiled: Sequence[str]) -> str:
    """A row for each net and mode: medians, and ratios to DDP in each of its ways."""
    heads = "".join(f" DDP {way} | ratio |" for way in compiled)
    rows = [
        f"| net | mode | turns | caffepy images/s |{heads}",
        "|---|---|---|---|" + "---|---|" * len(compiled),
    ]
    for (net, mode, who), own in rates.items():
        if who != "caffepy":
            continue
        rate, cells = median(own), ""
        for way in compiled:
            other = rates.get((net, mode, way))
            beside = f"{median(other):,.0f} | {rate / median(other):.2f}" if other else "none | "
            cells += f" {beside} |"
        rows.append(f"| {net} | {mode} | {len(own)} | {rate:,.0f} |{cells}")
    return "\n".join(rows)


def in_threads(arguments: argparse.Namespace, nets: dict[str, int]) -> None:
    """Measure caffepy in threads, each net once, and the peer in between."""
    modes, gpus = arguments.modes.split(","), counts(arguments)
    on = ["--gpu", ",".join(map(str, range(max(gpus))))]
    if arguments.device == "cpu":
        on = ["--cpu", str(max(gpus))]
    peer: dict[str, Rates] = {way: {} for way in arguments.compile.split(",")}
    own: dict[tuple[str, str], list[Any]] = {}
    begun = time.monotonic()
    theirs_to_do = [(way, count) for way in peer for count in reversed(gpus)]
    ours_to_do = [(net, mode) for net in nets for mode in modes]
    while (ours_to_do or theirs_to_do) and time.monotonic() - begun < arguments.seconds:
        if ours_to_do:
            net, mode = ours_to_do.pop(0)
            results = ours(net, nets[net], mode, on)
            own[net, mode] = [point for one in results for point in one["points"]]
        if theirs_to_do and len(theirs_to_do) >= len(ours_to_do):
            way, count = theirs_to_do.pop(0)
            left = max(1.0, arguments.seconds - (time.monotonic() - begun))
            found = theirs(arguments.peer, nets, modes, count, way, arguments.device, left)
            peer[way].update(found)
        results = {
            "caffepy": [[*key, points] for key, points in own.items()],
            "pytorch": [[way, *key, rate] for way in peer for key, rate in peer[way].items()],
        }
        say(f"{time.monotonic() - begun:.0f} s")
        keep(arguments.out, table(own, peer), results)


def counts(arguments: argparse.Namespace) -> list[int]:
    """Return the numbers of GPUs; ends the program if there are fewer."""
    try:
        there = (os.cpu_count() or 1) if arguments.device == "cpu" else count_gpus()
    except DeviceError as error:
        sys.exit(str(error))
    if not arguments.gpus:
        return sorted({n for n in (1, 2, 4, 8) if n <= there} | {there})
    found = [int(n) for n in arguments.gpus.split(",")]
    if max(found) > there:
        sys.exit(f"--gpus {arguments.gpus}: there are {there}")
    return found


def in_processes(arguments: argparse.Namespace, nets: dict[str, int]) -> None:
    """Measure caffepy in processes that mpirun starts, in turns with DDP."""
    modes, compiled = arguments.modes.split(","), arguments.compile.split(",")
    count = counts(arguments)[-1]
    launch = [*shlex.split(arguments.mpirun), "-n", str(count)]
    on = ["--cpu", "1"] if arguments.device == "cpu" else ["--gpu", "all"]
    on += ["--windows", "3"]
    rates: Turns = {}
    begun, longest = time.monotonic(), 0.0

    def note(who: str, net: str, mode: str, rate: float) -> None:
        say(f"{time.monotonic() - begun:5.0f} s: {who}, {net}, {mode}: {rate:,.0f} images/s")
        rates.setdefault((net, mode, who), []).append(rate)

    for _ in range(arguments.turns):
        start = time.monotonic()
        if start - begun + longest > arguments.seconds:
            break
        for net, batch in nets.items():
            for mode in modes:
                for result in ours(net, batch, mode, on, launch):
                    note("caffepy", net, mode, result["points"][-1]["images_per_s"])
        for way in compiled:
            for (net, mode, _), rate in theirs(
                arguments.peer, nets, modes, count, way, arguments.device
            ).items():
                note(way, net, mode, rate)
        longest = max(longest, time.monotonic() - start)
        results = [[*key, found] for key, found in rates.items()]
        keep(arguments.out, table_of_turns(rates, compiled), results)


def keep(folder: str, text: str, results: object) -> None:
    """Print a table, and write it and the results to the folder."""
    say(text)
    with open(os.path.join(folder, "table.md"), "w") as file:
        file.write(text + "\n")
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(results, file, indent=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", default=os.path.join(os.path.dirname(__file__), "peer_torch.py"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--modes", default="tf32,bf16")
    parser.add_argument("--gpus", default="")
    parser.add_argument("--mpirun", default="")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--compile", default=f"{EAGER},default")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    nets = {
        name: int(batch) for name, batch in (item.split(":") for item in arguments.nets.split(","))
    }
    os.makedirs(arguments.out, exist_ok=True)
    (in_processes if arguments.mpirun else in_threads)(arguments, nets)


if __name__ == "__main__":
    main()
