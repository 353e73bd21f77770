"""Logistic regression, and a net that is not linear, on rows of HDF5 files: from Python and from
the command line.
"""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2
from tests.tutorials.material import run, written

ROWS, TRAINED, BATCH = 1200, 900, 10


def rows() -> tuple[Array, Array]:
    """Four features of which two tell the classes: two clusters each, such that no line parts them
    well.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 4))
    cluster = rng.integers(0, 4, ROWS)
    centres = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.7], [2.5, -1.2]])
    x[:, 1:3] = centres[cluster] + 0.5 * x[:, 1:3]
    return x, np.array([0, 0, 1, 1])[cluster].astype(float)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lists of HDF5 files: for training one file twice, of doubles; for tests a packed one."""
    folder = tmp_path_factory.mktemp("rows")
    x, label = rows()
    with h5py.File(folder / "train.h5", "w") as file:
        file["data"] = x[:TRAINED]
        file["label"] = label[:TRAINED].astype(np.float32)
    (folder / "train.txt").write_text(f"{folder / 'train.h5'}\n" * 2)
    with h5py.File(folder / "test.h5", "w") as file:
        file.create_dataset("data", data=x[TRAINED:], compression="gzip", compression_opts=1)
        file.create_dataset(
            "label", data=label[TRAINED:].astype(np.float32), compression="gzip", compression_opts=1
        )
    (folder / "test.txt").write_text(f"{folder / 'test.h5'}\n")
    return {part: str(folder / f"{part}.txt") for part in ("train", "test")}


def net(source: str, hidden: int) -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.data, n.label = L.HDF5Data(batch_size=BATCH, source=source, ntop=2)
    below = n.data
    if hidden:
        n.ip1 = L.InnerProduct(n.data, num_output=hidden, weight_filler={"type": "xavier"})
        below = n.relu1 = L.ReLU(n.ip1, in_place=True)
    n.score = L.InnerProduct(below, num_output=2, weight_filler={"type": "xavier"})
    n.accuracy = L.Accuracy(n.score, n.label)
    n.loss = L.SoftmaxWithLoss(n.score, n.label)
    return n.to_proto()


def solver_in(folder: Path, lists: dict[str, str], hidden: int) -> str:
    s = caffe_pb2.SolverParameter()
    s.train_net = written(folder / "train.prototxt", net(lists["train"], hidden))
    s.test_net.append(written(folder / "test.prototxt", net(lists["test"], hidden)))
    s.test_iter.append((ROWS - TRAINED) // BATCH)
    s.test_interval = 300
    s.max_iter = 900
    s.base_lr = 0.03
    s.lr_policy = "step"
    s.gamma = 0.1
    s.stepsize = 600
    s.momentum = 0.9
    s.weight_decay = 5e-4
    s.display = 300
    s.snapshot = 900
    s.snapshot_prefix = str(folder / "snap")
    s.solver_mode = caffe_pb2.SolverParameter.CPU
    s.random_seed = 3
    return written(folder / "solver.prototxt", s)


def mean_accuracy(test_net: "caffe.Net") -> float:
    total = 0.0
    for _ in range((ROWS - TRAINED) // BATCH):
        test_net.forward()
        total += float(test_net.blobs["accuracy"].data)
    return total / ((ROWS - TRAINED) // BATCH)


def by_newton(x: Array, label: Array, decay: float) -> Array:
    """Weights and bias of logistic regression by Newton's method, of class 1 against class 0."""
    wide = np.column_stack([x, np.ones(len(x))])
    w = np.zeros(5)
    for _ in range(20):
        p = 1 / (1 + np.exp(-wide @ w))
        # two weight vectors that are each other's opposite share the decay: half of it for their
        # difference
        gradient = wide.T @ (p - label) / len(x) + decay / 2 * w
        w -= np.linalg.solve(
            wide.T @ (wide * (p * (1 - p))[:, None]) / len(x) + decay / 2 * np.eye(5), gradient
        )
    return w


def test_rows_come_in_order_across_files(lists: dict[str, str], tmp_path: Path) -> None:
    x, label = rows()
    train = caffe.Net(written(tmp_path / "net.prototxt", net(lists["train"], 0)), caffe.TRAIN)
    assert train.blobs["data"].data.shape == (BATCH, 4)
    seen = []
    for _ in range(2 * TRAINED // BATCH + 3):
        train.forward()
        seen.append((train.blobs["data"].data.copy(), train.blobs["label"].data.copy()))
    for i, (data, labels) in enumerate(seen):
        at = i * BATCH % TRAINED
        np.testing.assert_array_equal(data, x[at : at + BATCH].astype(np.float32))
        np.testing.assert_array_equal(labels, label[at : at + BATCH])
    scores = train.blobs["score"].data
    weight, bias = (blob.data for blob in train.params["score"])
    np.testing.assert_allclose(scores, seen[-1][0] @ weight.T + bias, rtol=1e-4, atol=1e-5)
    own = float((scores.argmax(1) == seen[-1][1]).mean())
    assert float(train.blobs["accuracy"].data) == pytest.approx(own)


def test_logistic_regression_finds_what_newton_finds(lists: dict[str, str], tmp_path: Path) -> None:
    caffe.set_mode_cpu()
    solver = caffe.get_solver(solver_in(tmp_path, lists, 0))
    solver.solve()
    assert solver.iter == 900
    assert solver.lr == pytest.approx(0.003)
    x, label = rows()
    exact = by_newton(x[:TRAINED], label[:TRAINED], 5e-4)
    weight, bias = (blob.data for blob in solver.net.params["score"])
    found = np.append(weight[1] - weight[0], bias[1] - bias[0])
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.12)
    predicted = x[TRAINED:] @ exact[:4] + exact[4] > 0
    assert mean_accuracy(solver.test_nets[0]) == pytest.approx(
        (predicted == label[TRAINED:]).mean(), abs=0.02
    )


def test_one_nonlinearity_parts_what_lines_do_not(lists: dict[str, str], tmp_path: Path) -> None:
    shares = {}
    for hidden in (0, 40):
        solver = caffe.get_solver(solver_in(tmp_path, lists, hidden))
        solver.solve()
        shares[hidden] = mean_accuracy(solver.test_nets[0])
    assert shares[40] > 0.93
    assert shares[0] < shares[40] - 0.05


@pytest.mark.parametrize("hidden", [0, 40])
def test_the_command_line_does_the_same(hidden: int, lists: dict[str, str], tmp_path: Path) -> None:
    solver = caffe.get_solver(solver_in(tmp_path, lists, hidden))
    solver.solve()
    share = mean_accuracy(solver.test_nets[0])
    own = (tmp_path / "snap_iter_900.caffemodel").rename(tmp_path / "python.caffemodel")
    done = run(tmp_path, "-m", "caffepy", "train", "-solver", "solver.prototxt")
    mine, theirs = (
        caffe_pb2.NetParameter.FromString(path.read_bytes())
        for path in (own, tmp_path / "snap_iter_900.caffemodel")
    )
    assert [layer.name for layer in mine.layer if layer.blobs] == (
        ["ip1", "score"] if hidden else ["score"]
    )
    for one, other in zip(mine.layer, theirs.layer, strict=True):
        assert one.blobs == other.blobs  # the same numbers, to the last bit
    iterations = re.findall(r"Iteration (\d+), Testing net \(#0\)", done.stderr)
    logged = re.findall(r"Test net output #0: accuracy = ([\d.]+)", done.stderr)
    assert iterations == ["0", "300", "600", "900"]
    assert float(logged[-1]) == pytest.approx(share, abs=1e-5)
    assert "Optimization Done." in done.stderr
