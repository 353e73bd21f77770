"""Nets of forks: what the forks' own code answered, and where five iterations of SGD went."""

from pathlib import Path

import numpy as np
import pytest

from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import parse
from caffepy.solver import Solver

FOLDER = Path(__file__).parents[1] / "golden" / "forks"
NETS = sorted(path.stem for path in FOLDER.glob("*.npz"))


def blobs_of(solver: Solver) -> dict[str, list[Blob]]:
    return {layer.param.name: layer.blobs for layer in solver.net.layers}


def solver_of(golden: "np.lib.npyio.NpzFile", device: Device) -> Solver:
    param = parse(str(golden["solver"]), SolverParameter())
    parse(str(golden["prototxt"]), param.net_param)
    param.net_param.state.Clear()
    solver = Solver(param, device=device)
    blobs = blobs_of(solver)
    for key in golden.files:
        kind, *place = key.split(":")
        if kind == "in":
            solver.net.blobs[place[0]].host_data[...] = golden[key]
        elif kind == "param":
            blobs[place[0]][int(place[1])].host_data[...] = golden[key]
    return solver


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_five_iterations_go_where_the_fork_went(name: str, gpu: bool) -> None:
    golden = np.load(FOLDER / f"{name}.npz")
    device = CudaDevice(0, seed=1) if gpu else Device(seed=1)
    device.math_mode.precision = "fp32"
    solver = solver_of(golden, device)
    assert len(golden["losses"]) == 5
    for losses in golden["losses"]:
        solver.step(1)
        for blob, loss in zip(str(golden["loss_names"]).split(","), losses, strict=True):
            assert float(solver.net.blobs[blob].host_data) == pytest.approx(loss, rel=1e-4)
    after = [key for key in golden.files if key.startswith("after5:")]
    assert after
    blobs = blobs_of(solver)
    for key in after:
        _, layer, number = key.split(":")
        got = blobs[layer][int(number)].host_data
        scale = np.abs(golden[key]).max()
        np.testing.assert_allclose(got, golden[key], rtol=1e-4, atol=1e-5 * scale, err_msg=key)
    solver.close()
