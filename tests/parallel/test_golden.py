"""Caffe's own numbers from two and four solvers with half the batch each: twenty steps, and on from
Caffe's snapshots.

All cases can be halved: their loss is a mean over the batch, so that the mean of both halves'
gradients is the whole's. Of four solvers two have the same half.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.collectives import peers
from caffepy.collectives.topology import Topology, all_joined
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.solver.cases import SOLVERS
from tests.solver.golden import CASES, begin, compare

HALF = 3


def build(case: Any, device: Device) -> Solver:
    net = str(case["net"]).replace("dim: 6", f"dim: {HALF}")
    text = f"{case['solver']} snapshot_after_train: false net_param {{ {net} }}"
    return Solver(text_format.Parse(text, SolverParameter()), device=device, precision="fp32")


def walk(manager: P2PManager, case: Any) -> None:
    """Step through what is left of the case, and compare as for one solver."""
    solvers: Sequence[Solver] = [manager.root, *manager.workers]
    root = manager.root
    iterate = manager.iterate

    def feed_and_iterate() -> None:
        """Give each solver its half; what a script writes before a step is for all solvers."""
        for solver, part in zip(solvers, cycle((slice(0, HALF), slice(HALF, None))), strict=False):
            for name in "xy":
                solver.net.blobs[name].host_data[...] = case[name][root.iter][part]
        iterate()

    manager.iterate = feed_and_iterate  # type: ignore[method-assign]
    while root.iter < len(case["x"]):
        root.step(1)
        manager.raise_worker_error()
        losses = [float(solver.net.blobs["loss"].host_data) for solver in solvers]
        compare(root, case, float(np.mean(losses)))


def together(
    name: str, sync: str, devices: Sequence[Device], state: str, joined: Topology | None = None
) -> None:
    case = np.load(SOLVERS / f"{name}.npz")
    root = build(case, devices[0])
    if state:
        root.restore(str(SOLVERS / f"{name}_iter_10.{state}"))
        assert root.iter == 10
    else:
        begin(root, case)
    if joined is None:
        gpus = [device.index for device in devices if device.kind == "cuda"]
        joined = peers.prepare(peers.query(gpus)) if gpus else all_joined(len(devices))
    with P2PManager(root, devices, joined, SyncOptions(sync)) as manager:
        walk(manager, case)
    root.close()


STATES = ["", "solverstate", "solverstate.h5"]


def test_there_are_cases() -> None:
    assert len(CASES) >= 14


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sync", ["tree", "muji", "flat"])
@pytest.mark.parametrize("name", CASES)
def test_halves_on_the_cpu_move_as_caffe_does(name: str, sync: str, state: str, size: int) -> None:
    together(name, sync, [Device() for _ in range(size)], state)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sync", ["nccl", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_halves_on_gpus_move_as_caffe_does(name: str, sync: str, state: str, size: int) -> None:
    together(name, sync, [CudaDevice(i) for i in range(size)], state)
