import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from caffepy.pycaffe.nccl import take_turns
from tests.net.nets import net_of
from tests.pycaffe.test_solver import ROWS, rows  # noqa: F401 # a fixture
from tests.solver.cases import ENVIRONMENT, SETTINGS

TRAIN = """
import sys
from multiprocessing import Process
import numpy as np
import caffepy as caffe

def solve(file, count, uid, rank):
    caffe.set_mode_gpu()
    caffe.set_device(rank)
    caffe.set_solver_count(count)
    caffe.set_solver_rank(rank)
    caffe.set_multiprocess(True)
    solver = caffe.SGDSolver(file)
    nccl = caffe.NCCL(solver, uid)
    nccl.bcast()
    solver.add_callback(nccl)
    if solver.param.layer_wise_reduce:
        solver.net.after_backward(nccl)
    solver.step(5)
    np.save(f"{file}.{rank}.npy", solver.net.params["ip"][0].data)

if __name__ == "__main__":
    caffe.init_log(1)
    uid = caffe.NCCL.new_uid()
    ranks = [Process(target=solve, args=(sys.argv[1], 2, uid, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


def solver_file(folder: Path, rows: str, batch: int) -> str:  # noqa: F811
    file = folder / f"{batch}.prototxt"
    file.write_text(f"{SETTINGS} net_param {{ {ROWS % (rows, batch)} }}")
    return str(file)


@pytest.mark.parametrize("begun", [False, True])
def test_ranks_take_turns_at_the_data(rows: str, begun: bool) -> None:  # noqa: F811
    whole = net_of(ROWS % (rows, 4))
    batches = []
    for _ in range(15):
        whole.forward()
        batches.append(whole.blobs["x"].host_data.copy())
    for rank in range(3):
        net = net_of(ROWS % (rows, 4))
        if begun:
            net.forward()  # what rank 0 has taken
        take_turns(net, rank, 3, begun)
        for i in range(3):
            net.forward()
            np.testing.assert_array_equal(net.blobs["x"].host_data, batches[3 * (i + begun) + rank])


def test_nccl_is_for_gpus(rows: str, tmp_path: Path) -> None:  # noqa: F811
    solver = caffe.SGDSolver(solver_file(tmp_path, rows, 4))
    with pytest.raises(RuntimeError, match=r"NCCL is for GPUs: caffe\.set_mode_gpu\(\) before the solver"):
        caffe.NCCL(solver, bytes(128))
    assert isinstance(caffe.has_nccl(), bool)
    if not caffe.has_nccl():
        with pytest.raises(RuntimeError, match="NCCL"):
            caffe.NCCL.new_uid()


def alone_on_a_gpu(file: str) -> np.ndarray:  # type: ignore[type-arg]
    caffe.set_mode_gpu()
    try:
        solver = caffe.SGDSolver(file)
    finally:
        caffe.set_mode_cpu()
    solver.step(5)
    return solver.net.params["ip"][0].data


@pytest.mark.gpus(2)
def test_threads_train_as_one(rows: str, tmp_path: Path) -> None:  # noqa: F811
    uid = caffe.NCCL.new_uid()
    assert isinstance(uid, bytes)
    found = {}

    def work(rank: int) -> None:
        caffe.set_mode_gpu()
        caffe.set_device(rank)
        caffe.set_solver_count(2)
        caffe.set_solver_rank(rank)
        solver = caffe.get_solver(solver_file(tmp_path, rows, 4))
        nccl = caffe.NCCL(solver, uid)
        nccl.bcast()
        solver.add_callback(nccl)
        solver.net.after_backward(nccl)
        solver.step(5)
        found[rank] = solver.net.params["ip"][0].data.copy()
        nccl.close()
        solver.step(1)  # alone

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], alone_on_a_gpu(solver_file(tmp_path, rows, 8)), rtol=1e-3)


@pytest.mark.gpus(2)
def test_processes_train_as_one(rows: str, tmp_path: Path) -> None:  # noqa: F811
    script, file = tmp_path / "train.py", solver_file(tmp_path, rows, 4)
    script.write_text(TRAIN)
    subprocess.run([sys.executable, str(script), file], env=ENVIRONMENT, check=True, timeout=300)
    found = [np.load(f"{file}.{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], alone_on_a_gpu(solver_file(tmp_path, rows, 8)), rtol=1e-3)


@pytest.mark.gpus(2)
def test_one_solver_takes_others_in(rows: str, tmp_path: Path) -> None:  # noqa: F811
    caffe.set_mode_gpu()
    try:
        solver = caffe.SGDSolver(solver_file(tmp_path, rows, 4))
    finally:
        caffe.set_mode_cpu()
    with solver.together(gpus=[0, 1]):
        solver.step(5)
    expected = alone_on_a_gpu(solver_file(tmp_path, rows, 8))
    np.testing.assert_allclose(solver.net.params["ip"][0].data, expected, rtol=1e-3)
    for gpus in ([1, 0], [0, 0], []):
        with (
            pytest.raises(RuntimeError, match=r"this solver is on GPU 0: give gpus=\[0, \.\.\.\]"),
            solver.together(gpus),
        ):
            pass
