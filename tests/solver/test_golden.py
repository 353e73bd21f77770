"""Twenty steps of every solver against Caffe's weights, and going on from Caffe's own snapshots."""

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.solver.cases import SOLVERS
from tests.solver.golden import CASES, begin, compare


def build(case: Any) -> Solver:
    text = f"{case['solver']} snapshot_after_train: false net_param {{ {case['net']} }}"
    return Solver(text_format.Parse(text, SolverParameter()))


def walk(solver: Solver, case: Any) -> None:
    """Step through what is left of the case."""
    blobs = solver.net.blobs
    for x, y in zip(case["x"][solver.iter :], case["y"][solver.iter :], strict=True):
        blobs["x"].data[...], blobs["y"].data[...] = x, y
        solver.step(1)
        compare(solver, case, float(blobs["loss"].data))


def test_there_are_cases() -> None:
    assert len(CASES) >= 14


@pytest.mark.parametrize("name", CASES)
def test_moves_as_caffe_does(name: str) -> None:
    case = np.load(SOLVERS / f"{name}.npz")
    solver = build(case)
    begin(solver, case)
    walk(solver, case)


@pytest.mark.parametrize("extension", ["solverstate", "solverstate.h5"])
@pytest.mark.parametrize("name", CASES)
def test_goes_on_from_caffes_snapshot(name: str, extension: str) -> None:
    case = np.load(SOLVERS / f"{name}.npz")
    solver = build(case)
    solver.restore(str(SOLVERS / f"{name}_iter_10.{extension}"))
    assert solver.iter == 10
    walk(solver, case)
