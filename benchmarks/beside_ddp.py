"""caffepy beside PyTorch's DistributedDataParallel on 1, 2, 4... GPUs: training steps on data that
lies on the devices.

usage: python benchmarks/beside_ddp.py --peer peer_torch.py --out FOLDER [--nets lenet:64,caffenet:256]
           [--modes tf32,bf16] [--gpus 1,2,4]

The file given as --peer trains the nets that --nets names, with the batch of each GPU, in one
process a GPU, and prints a line of JSON a case: net, mode, gpus, images_s; it takes --nets,
--batch, --modes, --seconds. For every number of GPUs it runs under torch.distributed.run; in
between `caffepy bench scaling` trains the same nets. Medians are printed as a table, which FOLDER
keeps as table.md, and all figures as results.json.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

NETS = "lenet:64,cifar10_quick:256,caffenet:256,googlenet:128,vgg16:64,resnet50:128"
Rates = dict[tuple[str, str, int], float]


def lines(command: list[str], environment: dict[str, str] | None = None) -> list[Any]:
    """The JSON objects that a command prints, a line each."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def theirs(peer: str, nets: dict[str, int], modes: list[str], gpus: int) -> Rates:
    """PyTorch's images a second."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    what = [
        "--nets",
        ",".join(nets),
        "--batch",
        ",".join(map(str, nets.values())),
        "--modes",
        ",".join(modes),
    ]
    visible = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = lines([sys.executable, *launch, peer, *what, "--seconds", "1.5"], visible)
    return {(a["net"], a["mode"], gpus): a["images_s"] for a in found if "images_s" in a}


def ours(net: str, batch: int, mode: str, gpus: list[int]) -> list[Any]:
    """Return the results of `bench scaling` on 1, 2, 4... GPUs."""
    numbers = ",".join(map(str, range(max(gpus))))
    how = ["--model", net, "--batch", str(batch), "--precision", mode, "--gpu", numbers, "--json"]
    return lines([sys.executable, "-m", "caffepy", "bench", "scaling", *how])


def table(own: dict[tuple[str, str], list[Any]], peer: Rates) -> str:
    """A row for each net, mode and number of GPUs."""
    rows = [
        "| net | mode | GPUs | images/s | times one GPU | exposed | PyTorch images/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (net, mode), points in own.items():
        for point in points:
            rate, count = point["images_per_s"], point["devices"]
            other = peer.get((net, mode, count))
            beside = f"{other:,.0f} | {rate / other:.2f}" if other else "not measured | "
            times = f"{rate / points[0]['images_per_s']:.2f} | {point['exposed']:.1%}"
            rows.append(f"| {net} | {mode} | {count} | {rate:,.0f} | {times} | {beside} |")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--modes", default="tf32,bf16")
    parser.add_argument("--gpus", default="1,2,4")
    arguments = parser.parse_args()
    nets = {
        name: int(batch) for name, batch in (item.split(":") for item in arguments.nets.split(","))
    }
    modes, gpus = arguments.modes.split(","), [int(n) for n in arguments.gpus.split(",")]
    os.makedirs(arguments.out, exist_ok=True)
    peer: Rates = {}
    own: dict[tuple[str, str], list[Any]] = {}
    for turn, (net, batch) in enumerate(nets.items()):
        for mode in modes:
            own[net, mode] = [
                point for told in ours(net, batch, mode, gpus) for point in told["points"]
            ]
        for count in gpus[turn : turn + 1] if turn + 1 < len(nets) else gpus[turn:]:
            peer.update(theirs(arguments.peer, nets, modes, count))
    text = table(own, peer)
    sys.stdout.write(text + "\n")
    with open(os.path.join(arguments.out, "table.md"), "w") as file:
        file.write(text + "\n")
    results = {
        "caffepy": [[*key, points] for key, points in own.items()],
        "pytorch": [[*key, rate] for key, rate in peer.items()],
    }
    with open(os.path.join(arguments.out, "results.json"), "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
