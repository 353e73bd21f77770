"""Training over two nodes that talk through sockets, on one host, beside the cost model.

usage: python benchmarks/two_nodes.py --out FOLDER [--nets lenet:64,caffenet:256,resnet50:128]
           [--gpu local] [--precision bf16] [--mpirun 'mpirun --oversubscribe'] [--cpu]

GPUs of one host become two nodes, of one GPU each (--gpu local), of half of them (--gpu all), or
both on one GPU (--gpu 0, which shows that it works, not how fast): NCCL takes processes whose
NCCL_HOSTID differ for those of two hosts, and here they neither reach each other's memory nor share
some, so that all between them goes through the sockets of --interface. The program measures
all-reduces of SIZES through them, before and after all else; takes from the medians the seconds that
each has and those of each byte; predicts with them and the speed of one GPU what two nodes reach
(`bench scaling --simulate`); and trains the nets on two. The model leaves out factors, which
caffenet's fully connected layers exchange. It prints predicted by measured images/s. FOLDER keeps
all as two_nodes.json. --cpu tries the program out with solvers on the CPU, which the model is not
made for.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

NETS = "lenet:64,caffenet:256,resnet50:128"
SIZES = "2M,32M"  # of the buckets of these nets, about
NODE = (
    "export NCCL_HOSTID=node${OMPI_COMM_WORLD_RANK:-$PMI_RANK} NCCL_P2P_DISABLE=1 "
    'NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=$0 NCCL_IB_DISABLE=1; exec "$@"'
)
LEAST_MESSAGE = 1e-6  # seconds


def result_of(command: Sequence[str]) -> Any:
    """Return the JSON object that a command prints; end with what it says if it fails."""
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    say(f"  {time.monotonic() - begun:.0f} s: {' '.join(command[command.index('bench') :])}")
    return json.loads(found[0])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def wires(timings: Sequence[Any]) -> tuple[float, float]:
    """Return bytes a second between two nodes, and seconds of a message of which an all-reduce of
    two has two, from all-reduces of two sizes.
    """
    by_size: dict[int, list[float]] = {}
    for timing in timings:
        by_size.setdefault(timing["bytes"], []).append(timing["ms"] / 1e3)
    (small, less), (large, more) = sorted((n, median(times)) for n, times in by_size.items())
    if more <= less:
        sys.exit(f"{large} bytes took {more:g} s, but {small} bytes {less:g} s: measure again")
    bandwidth = (large - small) / (more - less)
    return bandwidth, max(LEAST_MESSAGE, (less - small / bandwidth) / 2)


def table(results: Sequence[Any]) -> str:
    """A row for each net."""
    rows = [
        "| net, batch | one GPU ms | MB | model: images/s | exposed ms | measured: images/s | "
        "exposed ms | model / measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in results:
        model, (alone, *_, two) = found["model"], found["trained"]["points"]
        asked, rate = model["asked"], two["images_per_s"]
        rows.append(
            f"| {found['net']}, {model['batch']} | {model['ms']:.3f} | {model['gradient_mb']:.1f} | "
            f"{asked['images_per_s']:,.0f} | {asked['exposed_ms']:.2f} | {rate:,.0f} | "
            f"{two['ms'] - alone['ms']:.2f} | {asked['images_per_s'] / rate:.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--gpu", default="local", choices=["local", "all", "0"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--mpirun", default="mpirun --oversubscribe")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)
    bench = [sys.executable, "-m", "caffepy", "bench"]
    nodes = [*shlex.split(arguments.mpirun), "-n", "2", "sh", "-c", NODE, arguments.interface]
    on = ["--cpu", "1"] if arguments.cpu else ["--gpu", arguments.gpu]
    one = [] if arguments.cpu else ["--gpu", "0"]
    how = [] if arguments.cpu else ["--precision", arguments.precision]
    way = "flat" if arguments.cpu else "nccl"
    reduce = [*nodes, *bench, "allreduce", *on, "--sync", way, "--sizes", SIZES, "--json"]

    reduced = result_of(reduce)
    gpus, timings = reduced["ranks"] // 2, reduced["timings"]
    trained = {}
    for item in arguments.nets.split(","):
        net, batch = item.split(":")
        what = ["--model", net, "--batch", batch, *how, "--windows", "3", "--json"]
        trained[net, batch] = result_of([*nodes, *bench, "scaling", *what, *on])
    timings += result_of(reduce)["timings"]
    bandwidth, message = wires(timings)
    cluster = (
        f"nodes=2 gpus={gpus} nic=1x{bandwidth * 8e-9:.4f}measured latency={message * 1e6:.1f}us"
    )
    for timing in timings:
        say(f"all-reduce of {timing['bytes'] / 1e6:.1f} MB: {timing['ms']:.3f} ms")
    say(f"cluster: {cluster}")
    results = []
    for (net, batch), found in trained.items():
        what = ["--model", net, "--batch", batch, *how, "--windows", "3", "--json"]
        model = result_of([*bench, "scaling", *what, *one, "--simulate", cluster])
        results.append({"net": net, "model": model, "trained": found})
        with open(os.path.join(arguments.out, "two_nodes.json"), "w") as file:
            json.dump({"cluster": cluster, "timings": timings, "nets": results}, file, indent=1)
    say(table(results))


if __name__ == "__main__":
    main()
