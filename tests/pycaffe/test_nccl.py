import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from caffepy.core.hangs import stacks
from caffepy.net import Net
from caffepy.pycaffe.nccl import take_all, take_turns
from tests.data.test_deal import counted
from tests.net.nets import net_of
from tests.parallel.faults import still_there
from tests.parallel.test_data import folder  # noqa: F401 # a fixture
from tests.pycaffe.test_solver import ROWS, rows  # noqa: F401 # a fixture
from tests.solver.cases import ENVIRONMENT, SETTINGS

TRAIN = """
import faulthandler
import sys
from multiprocessing import Process
import numpy as np
import caffepy as caffe

def solve(file, count, uid, rank):
    faulthandler.dump_traceback_later(50, exit=True)
    caffe.set_mode_gpu()
    caffe.set_precision("fp32")
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
    codes = [rank.exitcode for rank in ranks]
    sys.exit(f"exit codes {codes}" if any(codes) else 0)
"""
SECONDS = 60
"""How long solvers may take to train together."""


def solver_file(folder: Path, rows: str, batch: int) -> str:  # noqa: F811
    file = folder / f"{batch}.prototxt"
    file.write_text(f"{SETTINGS} net_param {{ {ROWS % (rows, batch)} }}")
    return str(file)


IMAGES = 'transform_param { mirror: true } data_param { source: "db" backend: LMDB batch_size: 2 }'
READERS = {"Data": IMAGES, "HDF5Data": 'hdf5_data_param { source: "h5.txt" batch_size: 3 }'}


def reader(kind: str) -> Net:
    return net_of(f'layer {{ name: "d" type: "{kind}" top: "data" top: "label" {READERS[kind]} }}')


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("begun", [False, True])
def test_ranks_take_turns_at_the_data(
    begun: bool,
    kind: str,
    folder: Path,  # noqa: F811
) -> None:
    """`begun`: all go on from the state of rank 0 after a round."""
    whole = reader(kind)
    batches = []
    for _ in range(15):
        whole.forward()
        batches.append(whole.blobs["data"].host_data.copy())
    first = reader(kind)
    take_turns(first, 0, 3)
    first.forward()
    for rank in range(3):
        net = reader(kind)
        take_turns(net, rank, 3)
        if begun:
            net.set_state(first.state())
        for i in range(begun, 4):
            net.forward()
            np.testing.assert_array_equal(net.blobs["data"].host_data, batches[3 * i + rank])
        take_all(net)
        net.forward()
        np.testing.assert_array_equal(net.blobs["data"].host_data, batches[12])
        net.close()
    whole.close()
    first.close()


def test_what_other_ranks_take_is_not_decoded(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = reader("Data")
    take_turns(net, 20, 40)
    seen = counted(monkeypatch)
    for _ in range(5):
        net.forward()
    net.close()
    assert 5 <= len(seen) <= (5 + 4) * 2  # batches and those that are read ahead


def test_nccl_is_for_gpus(rows: str, tmp_path: Path) -> None:  # noqa: F811
    solver = caffe.SGDSolver(solver_file(tmp_path, rows, 4))
    with pytest.raises(
        RuntimeError, match=r"NCCL is for GPUs: caffe\.set_mode_gpu\(\) before the solver"
    ):
        caffe.NCCL(solver, bytes(128))
    assert isinstance(caffe.has_nccl(), bool)
    if not caffe.has_nccl():
        with pytest.raises(RuntimeError, match="NCCL"):
            caffe.NCCL.new_uid()


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(rank) in a thread each; raises what one raises, though others may then wait for it
    for ever.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    for rank in range(count):
        threading.Thread(target=guarded, args=(rank,), daemon=True).start()
    until = time.monotonic() + SECONDS
    for _ in range(count):
        try:
            error = ended.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise AssertionError(stacks({})) from None
        if error is not None:
            raise error


def alone_on_a_gpu(file: str) -> np.ndarray:  # type: ignore[type-arg]
    caffe.set_mode_gpu()
    try:
        solver = caffe.SGDSolver(file)
    finally:
        caffe.set_mode_cpu()
    solver.step(5)
    return solver.net.params["ip"][0].data


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("exact")
def test_threads_train_as_one(rows: str, tmp_path: Path) -> None:  # noqa: F811
    uid, file = caffe.NCCL.new_uid(), solver_file(tmp_path, rows, 4)
    assert isinstance(uid, bytes)
    found = {}

    def work(rank: int) -> None:
        caffe.set_mode_gpu()
        caffe.set_device(rank)
        caffe.set_solver_count(2)
        caffe.set_solver_rank(rank)
        solver = caffe.get_solver(file)
        nccl = caffe.NCCL(solver, uid)
        nccl.bcast()
        solver.add_callback(nccl)
        solver.net.after_backward(nccl)
        solver.step(5)
        found[rank] = solver.net.params["ip"][0].data.copy()
        nccl.close()
        solver.step(1)  # alone

    in_threads(2, work)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(
        found[0], alone_on_a_gpu(solver_file(tmp_path, rows, 8)), rtol=1e-3, atol=1e-5
    )


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("exact")
def test_processes_train_as_one(rows: str, tmp_path: Path) -> None:  # noqa: F811
    script, file = tmp_path / "train.py", solver_file(tmp_path, rows, 4)
    script.write_text(TRAIN)
    with subprocess.Popen(
        [sys.executable, str(script), file],
        env=ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=SECONDS)
        finally:
            still_there(process.pid)
    assert process.returncode == 0, said
    found = [np.load(f"{file}.{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(
        found[0], alone_on_a_gpu(solver_file(tmp_path, rows, 8)), rtol=1e-3, atol=1e-5
    )


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("exact")
def test_one_solver_takes_others_in(rows: str, tmp_path: Path) -> None:  # noqa: F811
    caffe.set_mode_gpu()
    try:
        solver = caffe.SGDSolver(solver_file(tmp_path, rows, 4))
    finally:
        caffe.set_mode_cpu()
    with solver.together(gpus=[0, 1]):
        solver.step(5)
    expected = alone_on_a_gpu(solver_file(tmp_path, rows, 8))
    np.testing.assert_allclose(solver.net.params["ip"][0].data, expected, rtol=1e-3, atol=1e-5)
    for gpus in ([1, 0], [0, 0], []):
        with (
            pytest.raises(RuntimeError, match=r"this solver is on GPU 0: give gpus=\[0, \.\.\.\]"),
            solver.together(gpus),
        ):
            pass
