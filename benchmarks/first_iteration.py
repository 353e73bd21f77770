"""Seconds until bundled nets have trained their first iterations on a GPU: in a process that finds
no compiled kernels and no timed plans, then in one that finds them.

    python benchmarks/first_iteration.py --nets lenet:64,googlenet:128,resnet50:128

A process imports caffepy, builds the net and its solver, and runs the warm-up of `caffepy bench
train` and one iteration more; its time begins after Python's own start.
"""

import argparse
import os
import subprocess
import sys
import tempfile

CACHES = "HOME", "XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"
PROCESS = """
import sys, time
begin = time.perf_counter()
from caffepy import models, ops
from caffepy.commands.bench.train import Trainer
from caffepy.device.cuda import CudaDevice
from caffepy.models.synthetic import image_shape

net, batch, precision = sys.argv[1:]
device = CudaDevice(0)
ops.set_precision(device, precision)
path = models.path(net, "solver")
trainer = Trainer(path, device=device, batch=int(batch), image=image_shape(net))
trainer.window(1)
sys.stdout.write(f"{time.perf_counter() - begin:.2f}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="lenet:64,googlenet:128,resnet50:128")
    parser.add_argument("--precision", default="bf16")
    given = parser.parse_args()
    for each in given.nets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = os.environ | {name: os.path.join(folder, name) for name in CACHES}
            os.mkdir(found["HOME"])
            command = [sys.executable, "-c", PROCESS, *each.split(":"), given.precision]
            cold, warm = (
                subprocess.run(command, env=found, stdout=subprocess.PIPE, text=True, check=True)
                for _ in range(2)
            )
        sys.stdout.write(f"{each}: cold {cold.stdout.strip()} s, warm {warm.stdout.strip()} s\n")


if __name__ == "__main__":
    main()
