"""Caffe's own numbers from two and four nodes that share each batch: as closely as from one.

Each golden batch has six rows. Two nodes take three each; for four the batch is repeated once, which
changes neither the mean loss nor its gradient.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.collectives.world import World
from caffepy.device.device import Device
from caffepy.net.weights import save_binary
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.binary import blob_to_array, read_net
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import parse
from caffepy.solver import Solver
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, version
from tests.collectives.threads_world import run_nodes
from tests.solver.cases import SOLVERS
from tests.solver.golden import CASES, begin

__all__ = ["version"]

ROWS = 6
TOLERANCE = {"adam": 3e-6}  # of others 1e-6; one solver differs by 2.6e-6, others by 0.4e-6


def write(name: str, nodes: int, place: Path, start: int = 0) -> str:
    """Write the rows from iteration `start` on; return the solver, whose net reads them."""
    case = np.load(SOLVERS / f"{name}.npz")
    settings, net, copies = str(case["solver"]), str(case["net"]), nodes // 2
    passes = re.search(r"iter_size: (\d+)", settings)
    repeats = copies * (int(passes[1]) if passes else 1)
    with h5py.File(place / "rows.h5", "w") as file:
        for blob in "xy":
            file[blob] = np.concatenate(
                [np.tile(rows, (repeats, 1)) for rows in case[blob][start:]]
            )
    (place / "files.txt").write_text(f"{place}/rows.h5\n")
    layers = net[net.index('layer { name: "ip1"') :]
    data = (
        f'layer {{ name: "rows" type: "HDF5Data" top: "x" top: "y" hdf5_data_param {{ '
        f'source: "{place}/files.txt" batch_size: {ROWS * copies} }} }}'
    )
    return f"{settings} random_seed: 1 net_param {{ {data} {layers} }} "


def compare(name: str, iteration: int, blob_of: Callable[[str, int], Any]) -> bool:
    """Compare with Caffe's parameters after this iteration; return False if they are not known."""
    case, compared = np.load(SOLVERS / f"{name}.npz"), False
    for key in case.files:
        when, _, rest = key.partition(":")
        if when == f"after{iteration}":
            layer, _, index = rest.partition(":")
            own, most = blob_of(layer, int(index)), TOLERANCE.get(name, 1e-6)
            np.testing.assert_allclose(own, case[key], rtol=0, atol=most, err_msg=key)
            compared = True
    return compared


def blob_of(solver: Solver) -> Callable[[str, int], Any]:
    names, layers = solver.net.layer_names, solver.net.layers
    return lambda name, index: layers[names.index(name)].blobs[index].host_data


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("state", ["", "solverstate"])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_batches_move_as_caffe_does(
    name: str, state: str, nodes: int, tmp_path: Path
) -> None:
    text = write(name, nodes, tmp_path, start=10 if state else 0) + "snapshot_after_train: false"

    def node(world: World) -> list[int]:
        world.join(1)
        device = Device(seed=1)
        device.follows = world.node > 0
        param = parse(text, SolverParameter())
        root = Solver(param, device=device, rank=world.node, batch_parts=nodes)
        assert root.batch == 3
        if state and world.node == 0:
            root.restore(str(SOLVERS / f"{name}_iter_10.{state}"))
        elif world.node == 0:
            begin(root, np.load(SOLVERS / f"{name}.npz"))
        compared, failed = list[int](), True
        try:
            with p2p_manager(root, [device], SyncOptions(), world=world):
                while root.iter < 20:
                    root.step(1)
                    if compare(name, root.iter, blob_of(root)):
                        compared.append(root.iter)
            failed = False
        finally:
            world.close(failed)
            root.close()
        return compared

    for found in run_nodes(nodes, node):
        if isinstance(found, BaseException):
            raise found
        assert found == ([20] if state else [1, 5, 10, 20])


@pytest.mark.parametrize(
    ("name", "state", "nodes"), [("adam", "", 2), ("sgd_poly", "solverstate", 4)]
)
@pytest.mark.usefixtures("version")
def test_processes_move_as_caffe_does(name: str, state: str, nodes: int, tmp_path: Path) -> None:
    assert MPIRUN
    text = write(name, nodes, tmp_path, start=10 if state else 0)
    root = Solver(parse(text, SolverParameter()))
    begin(root, np.load(SOLVERS / f"{name}.npz"))
    save_binary(root.net, str(tmp_path / "first.caffemodel"))
    root.close()
    for path in SOLVERS.glob(f"{name}_iter_10.*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "matplotlib.py").write_text("raise ImportError")  # curves take seconds
    (tmp_path / "solver.prototxt").write_text(f'{text} snapshot: 5 snapshot_prefix: "s"')
    options = ["--solver", "solver.prototxt", "--cpu", "1", "--batch-mode", "global"]
    if state:
        options += ["--snapshot", f"{name}_iter_10.{state}"]
    else:
        options += ["--weights", "first.caffemodel"]
    program = [MPIRUN, "--oversubscribe", "-n", str(nodes), sys.executable, "-m", "caffepy"]
    ended = subprocess.run(
        [*program, "train", *options],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    for iteration in (20,) if state else (5, 10, 20):
        model = read_net(os.fspath(tmp_path / f"s_iter_{iteration}.caffemodel"))
        blobs = {layer.name: list(map(blob_to_array, layer.blobs)) for layer in model.layer}
        assert compare(name, iteration, lambda layer, i, blobs=blobs: blobs[layer][i])  # type: ignore[misc]
