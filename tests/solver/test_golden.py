"""Twenty steps of every solver against Caffe's weights, and going on from Caffe's own snapshots."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.solver.cases import GOLDEN

CASES = sorted(path.stem for path in (GOLDEN / "solvers").glob("*.npz"))


def build(case: Any) -> Solver:
    text = f"{case['solver']} snapshot_after_train: false net_param {{ {case['net']} }}"
    return Solver(text_format.Parse(text, SolverParameter()))


def walk(solver: Solver, case: Any, first: int) -> None:
    params = {
        name: layer.blobs
        for name, layer in zip(solver.net.layer_names, solver.net.layers, strict=True)
    }
    for i in range(first, len(case["x"])):
        solver.net.blobs["x"].data[...], solver.net.blobs["y"].data[...] = (
            case["x"][i],
            case["y"][i],
        )
        solver.step(1)
        loss = float(solver.net.blobs["loss"].data)
        assert abs(loss - case["losses"][i]) <= 1e-3 * max(1, abs(case["losses"][i])), (
            f"loss {i + 1}"
        )
        for key in case.files:
            when, _, rest = key.partition(":")
            if when == f"after{i + 1}":
                layer, _, index = rest.partition(":")
                np.testing.assert_allclose(
                    params[layer][int(index)].data, case[key], 1e-3, 1e-4, err_msg=key
                )


def test_there_are_cases() -> None:
    assert len(CASES) >= 14


@pytest.mark.parametrize("name", CASES)
def test_moves_as_caffe_does(name: str) -> None:
    case = np.load(GOLDEN / "solvers" / f"{name}.npz")
    solver = build(case)
    for key in case.files:
        what, _, rest = key.partition(":")
        if what == "init":
            layer, _, index = rest.partition(":")
            solver.net.layers[solver.net.layer_names.index(layer)].blobs[int(index)].data[...] = (
                case[key]
            )
    walk(solver, case, 0)


@pytest.mark.parametrize("extension", ["solverstate", "solverstate.h5"])
@pytest.mark.parametrize("name", CASES)
def test_goes_on_from_caffes_snapshot(name: str, extension: str) -> None:
    folder: Path = GOLDEN / "solvers"
    case = np.load(folder / f"{name}.npz")
    solver = build(case)
    solver.restore(str(folder / f"{name}_iter_10.{extension}"))
    assert solver.iter == 10
    walk(solver, case, 10)
