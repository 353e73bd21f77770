"""CPU time of iterations of small nets, and of net.forward: what is left beside the kernels.

    python benchmarks/small_nets.py [--threads 2] [--no-capture]

Prints, for each net, the least of several runs: microseconds of the main thread and of the process
for an iteration (or a pass), by the clocks of CPU time, so that other processes disturb little; the
same where a script makes one step at a time; and of compiled code alone, where that does several
iterations as one call. To compare two versions run it with PYTHONPATH set to one and the other in
turns.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

import caffepy as caffe
from caffepy.device.device import Device
from caffepy.device.threads import set_num_threads
from caffepy.proto.text import read_solver
from caffepy.solver import Solver

MODELS = Path(caffe.__file__).parent / "models"
DIGITS = MODELS / "digits"
RUNS = 9

LOGISTIC_REGRESSION = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label"
        hdf5_data_param { source: "rows.txt" batch_size: 10 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
LENET_DATA = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label"
        hdf5_data_param { source: "images.txt" batch_size: 1 } }
"""
SOLVER = 'train_net: "train.prototxt" base_lr: 1e-5 lr_policy: "fixed" momentum: 0.9 max_iter: 1 '


def least(work: Callable[[], object], count: int) -> tuple[float, float]:
    """Microseconds of the main thread and of the process for one of `count`, the least of RUNS."""
    clocks = time.thread_time, time.process_time
    times = []
    for _ in range(RUNS):
        before = [clock() for clock in clocks]
        work()
        times.append(
            [(clock() - since) / count for clock, since in zip(clocks, before, strict=True)]
        )
    return min(t[0] for t in times) * 1e6, min(t[1] for t in times) * 1e6


def solver_in(folder: Path, net: str, capture: bool) -> Solver:
    (folder / "train.prototxt").write_text(net)
    (folder / "solver.prototxt").write_text(SOLVER)
    path = str(folder / "solver.prototxt")
    solver = Solver(read_solver(path), device=Device(seed=1), path=path)
    solver.capture, solver.fuse = capture, True
    solver.step(20)
    return solver


def compiled(solver: Solver, count: int) -> float | None:
    """Microseconds of an iteration in one call of compiled code for `count`; None without that."""
    graph = getattr(getattr(solver.iterations, "loop", None), "_graph", None)
    if graph is None:
        return None
    series = solver.iterations.loop._series

    def replay() -> None:
        series.begin([(0.0, 1.0)] * count, [0] * len(series.begun))
        graph.replay(count)

    return least(lambda: [replay() for _ in range(20)], 20 * count)[0]


def one_by_one(solver: Solver, count: int) -> None:
    for _ in range(count):
        solver.step(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-capture", dest="capture", action="store_false")
    options = parser.parse_args()
    set_num_threads(options.threads)
    net = (DIGITS / "train_val.prototxt").read_text().replace("digits_t", f"{DIGITS}/digits_t")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = np.random.default_rng(0).standard_normal((7500, 4)).astype(np.float32)
        with h5py.File(folder / "rows.h5", "w") as file:
            file["data"], file["label"] = rows, (rows[:, 1] > 0).astype(np.float32)
        images = np.random.default_rng(1).random((500, 1, 28, 28), np.float32)
        with h5py.File(folder / "images.h5", "w") as file:
            file["data"], file["label"] = images, np.arange(500) % 10
        for name in ("rows", "images"):
            (folder / f"{name}.txt").write_text(f"{folder}/{name}.h5")
        lenet = (MODELS / "lenet" / "train_val.prototxt").read_text()
        lenet = LENET_DATA + lenet[lenet.index('layer {\n  name: "conv1"') :]
        nets = {
            "logistic regression, batch 10": (LOGISTIC_REGRESSION, 1000),
            "digits, batch 1": (net.replace("batch_size: 50", "batch_size: 1"), 500),
            "digits, batch 50": (net, 100),
            "lenet, batch 1": (lenet, 50),
        }
        for what, (definition, count) in nets.items():
            solver = solver_in(folder, definition, options.capture)
            main_thread, process = least(lambda s=solver, n=count: s.step(n), count)  # type: ignore[misc]
            single, _ = least(lambda s=solver, n=count: one_by_one(s, n), count)  # type: ignore[misc]
            code = compiled(solver, 10)
            sys.stdout.write(
                f"{what}: {main_thread:.1f} us of the main thread, {process:.1f} of the process; "
                f"{single:.1f} one by one"
                + (f"; {code:.1f} compiled code\n" if code is not None else "\n")
            )
            solver.close()
    deploy = caffe.Net(str(DIGITS / "deploy.prototxt"), caffe.TEST)
    for _ in range(3):
        deploy.forward()
    main_thread, _ = least(lambda: [deploy.forward() for _ in range(1000)], 1000)
    sys.stdout.write(f"net.forward of digits, batch 1: {main_thread:.1f} us\n")


if __name__ == "__main__":
    main()
