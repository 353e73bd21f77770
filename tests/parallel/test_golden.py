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
from tests.solver.cases import GOLDEN

FOLDER = GOLDEN / "solvers"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz"))
HALF = 3


def build(case: Any, device: Device) -> Solver:
    net = str(case["net"]).replace("dim: 6", f"dim: {HALF}")
    text = f"{case['solver']} snapshot_after_train: false net_param {{ {net} }}"
    return Solver(text_format.Parse(text, SolverParameter()), device=device, precision="fp32")


def begin(solver: Solver, case: Any) -> None:
    """Give the parameters their first values."""
    for key in case.files:
        what, _, rest = key.partition(":")
        if what == "init":
            layer, _, index = rest.partition(":")
            blobs = solver.net.layers[solver.net.layer_names.index(layer)].blobs
            blobs[int(index)].host_data[...] = case[key]


def walk(manager: P2PManager, case: Any) -> None:
    """Step through what is left of the case, and compare as for one solver."""
    solvers: Sequence[Solver] = [manager.root, *manager.workers]
    root = manager.root
    params = {
        name: layer.blobs for name, layer in zip(root.net.layer_names, root.net.layers, strict=True)
    }
    iterate = manager.iterate

    def feed_and_iterate() -> None:
        """Give each solver its half; what a script writes before a step is for all solvers."""
        for solver, part in zip(solvers, cycle((slice(0, HALF), slice(HALF, None))), strict=False):
            for name in "xy":
                solver.net.blobs[name].host_data[...] = case[name][root.iter][part]
        iterate()

    manager.iterate = feed_and_iterate  # type: ignore[method-assign]
    for i in range(root.iter, len(case["x"])):
        root.step(1)
        manager.raise_worker_error()
        loss = np.mean([float(solver.net.blobs["loss"].host_data) for solver in solvers])
        assert abs(loss - case["losses"][i]) <= 1e-3 * max(1, abs(case["losses"][i])), (
            f"loss {i + 1}"
        )
        for key in case.files:
            when, _, rest = key.partition(":")
            if when == f"after{i + 1}":
                layer, _, index = rest.partition(":")
                np.testing.assert_allclose(
                    params[layer][int(index)].host_data, case[key], 1e-3, 1e-4, err_msg=key
                )


def together(
    name: str, sync: str, devices: Sequence[Device], state: str, joined: Topology | None = None
) -> None:
    case = np.load(FOLDER / f"{name}.npz")
    root = build(case, devices[0])
    if state:
        root.restore(str(FOLDER / f"{name}_iter_10.{state}"))
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
