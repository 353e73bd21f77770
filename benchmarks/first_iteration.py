"""Seconds until bundled nets have trained their first iterations on a GPU, by parts: in a process
that finds no compiled kernels and no timed plans, then in one that finds them.

    python benchmarks/first_iteration.py --nets lenet:64,googlenet:128,resnet50:128

A process imports caffepy, opens the device, builds the net and its solver as `caffepy bench train`
does, on a database of random images, and trains 11 iterations, of which the second is captured. Its
time begins after Python's own start; a process before it has imported the same modules, so that
their bytecode is there. With `--synthetic` the net draws its images itself, once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from caffepy.models.synthetic import image_shape

CACHES = "HOME", "XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"
IMPORTS = """
from time import perf_counter
marks = [perf_counter()]
import json, sys
from caffepy.device.gpus import open_ahead
open_ahead(0)  # as the command does
from caffepy import models, ops
from caffepy.commands.bench.train import definition
from caffepy.device.cuda import CudaDevice
from caffepy.models.synthetic import image_shape
from caffepy.solver import Solver
"""
PROCESS = (
    IMPORTS
    + """
net, batch, precision, data = sys.argv[1:]
marks.append(perf_counter())
device = CudaDevice(0)
ops.set_precision(device, precision)
ops.backend(device)
device.synchronize()
marks.append(perf_counter())
path = models.path(net, "solver")
device.writes_files = False
solver = Solver(definition(path, int(batch), image_shape(net), data), device=device, path=path)
solver.save_memory()
device.synchronize()
marks.append(perf_counter())
for iterations in (1, 10):
    solver.step(iterations)
    device.synchronize()
    marks.append(perf_counter())
sys.stdout.write(json.dumps(marks))
"""
)
PARTS = "imports", "device", "net", "first iteration", "10 more"


def seconds(arguments: list[str], found: dict[str, str]) -> dict[str, float]:
    """Return the seconds of each part of a process, and until its first iteration is done."""
    command = [sys.executable, "-c", PROCESS, *arguments]
    done = subprocess.run(command, env=found, stdout=subprocess.PIPE, text=True, check=True)
    marks: list[float] = json.loads(done.stdout)
    parts = [after - before for before, after in pairwise(marks)]
    until = {"until then": marks[-2] - marks[0], "in all": marks[-1] - marks[0]}
    return dict(zip(PARTS, parts, strict=True)) | until


def made(net: str, batch: str, folder: str) -> str:
    """Return the path of a new database with images for eight batches."""
    path = os.path.join(folder, "data")
    shape = ",".join(map(str, image_shape(net)))
    program = Path(__file__).with_name("make_lmdb.py")
    sizes = ["--count", str(8 * int(batch)), "--shape", shape, "--classes", "10"]
    command = [sys.executable, str(program), path, *sizes]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="lenet:64,googlenet:128,resnet50:128")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--synthetic", action="store_true")
    given = parser.parse_args()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    for each in given.nets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = os.environ | {name: os.path.join(folder, name) for name in CACHES}
            os.mkdir(found["HOME"])
            net, batch = each.split(":")
            data = "synthetic" if given.synthetic else made(net, batch, folder)
            for state in ("cold", "warm"):
                parts = seconds([net, batch, given.precision, data], found)
                text = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
                sys.stdout.write(f"{each}, {state}: {text}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
