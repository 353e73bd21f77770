"""Learn LeNet: write nets in Python, step a solver, watch losses and scores, try other solvers."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import params as P  # noqa: N812
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2
from tests.tutorials.material import as_mnist, digits, run, solver_file, written

TRAIN_BATCH, TEST_BATCH, TESTS = 64, 99, 3


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """LMDBs made of the digits in the files that MNIST comes in, by `caffepy convert-mnist`."""
    folder = tmp_path_factory.mktemp("mnist")
    for part in ("train", "test"):
        images, labels = digits(part)
        pixels = as_mnist(images)
        (folder / f"{part}-images").write_bytes(
            struct.pack(">4I", 2051, *pixels.shape) + pixels.tobytes()
        )
        (folder / f"{part}-labels").write_bytes(
            struct.pack(">2I", 2049, len(labels)) + labels.astype(np.uint8).tobytes()
        )
    for part in ("train", "test"):
        run(
            folder,
            "-m",
            "caffepy",
            "convert-mnist",
            f"{part}-images",
            f"{part}-labels",
            f"{part}_lmdb",
        )
    return {part: str(folder / f"{part}_lmdb") for part in ("train", "test")}


def data(source: str, batch: int) -> Any:
    return L.Data(
        batch_size=batch,
        backend=P.Data.LMDB,
        source=source,
        transform_param={"scale": 1 / 255},
        ntop=2,
    )


def lenet(source: str, batch: int) -> caffe_pb2.NetParameter:
    xavier = {"type": "xavier"}
    n = caffe.NetSpec()
    n.data, n.label = data(source, batch)
    n.conv1 = L.Convolution(n.data, kernel_size=5, num_output=20, weight_filler=xavier)
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.conv2 = L.Convolution(n.pool1, kernel_size=5, num_output=50, weight_filler=xavier)
    n.pool2 = L.Pooling(n.conv2, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.fc1 = L.InnerProduct(n.pool2, num_output=500, weight_filler=xavier)
    n.relu1 = L.ReLU(n.fc1, in_place=True)
    n.score = L.InnerProduct(n.relu1, num_output=10, weight_filler=xavier)
    n.loss = L.SoftmaxWithLoss(n.score, n.label)
    return n.to_proto()


def linear(source: str, batch: int) -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.data, n.label = data(source, batch)
    n.score = L.InnerProduct(n.data, num_output=10, weight_filler={"type": "xavier"})
    n.loss = L.SoftmaxWithLoss(n.score, n.label)
    return n.to_proto()


def share_right(net: "caffe.Net") -> float:
    """Of all test images, counted by hand."""
    right = 0
    for _ in range(TESTS):
        net.forward()
        right += int((net.blobs["score"].data.argmax(1) == net.blobs["label"].data).sum())
    return right / (TESTS * TEST_BATCH)


def log_loss(scores: Array, labels: Array) -> float:
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return float(-np.log(shares[np.arange(len(labels)), labels.astype(int)]).mean())


def test_lenet_is_learned_step_by_step(mnist: dict[str, str], tmp_path: Path) -> None:
    train = written(tmp_path / "train.prototxt", lenet(mnist["train"], TRAIN_BATCH))
    test = written(tmp_path / "test.prototxt", lenet(mnist["test"], TEST_BATCH))
    path = solver_file(
        tmp_path,
        train,
        test,
        test_iter=TESTS,
        base_lr=0.01,
        momentum=0.9,
        weight_decay=0.0005,
        lr_policy="inv",
        gamma=0.0001,
        power=0.75,
    )
    caffe.set_mode_cpu()
    solver = caffe.SGDSolver(path)
    assert {name: blob.data.shape for name, blob in solver.net.blobs.items()} == {
        "data": (64, 1, 28, 28),
        "label": (64,),
        "conv1": (64, 20, 24, 24),
        "pool1": (64, 20, 12, 12),
        "conv2": (64, 50, 8, 8),
        "pool2": (64, 50, 4, 4),
        "fc1": (64, 500),
        "score": (64, 10),
        "loss": (),
    }
    assert {name: param[0].data.shape for name, param in solver.net.params.items()} == {
        "conv1": (20, 1, 5, 5),
        "conv2": (50, 20, 5, 5),
        "fc1": (500, 800),
        "score": (10, 500),
    }

    # both nets read their own records, in order
    solver.net.forward()
    (test_net,) = solver.test_nets
    first = test_net.forward()
    for net, part, batch in ((solver.net, "train", TRAIN_BATCH), (test_net, "test", TEST_BATCH)):
        images, labels = digits(part)
        pixels = as_mnist(images[:batch]).astype(np.float32) * np.float32(1 / 255)
        np.testing.assert_array_equal(net.blobs["data"].data[:, 0], pixels)
        np.testing.assert_array_equal(net.blobs["label"].data, labels[:batch])
        tiled = net.blobs["data"].data[:8, 0].transpose(1, 0, 2).reshape(28, 8 * 28)
        np.testing.assert_array_equal(tiled[:, 28:56], pixels[1])
        assert net.blobs["loss"].data == pytest.approx(
            log_loss(net.blobs["score"].data, net.blobs["label"].data), rel=1e-5
        )
    assert first["loss"] == pytest.approx(np.log(10), rel=0.2)  # nothing is known yet

    # one step: weights move against the gradient that they hold, by the rate and the decay
    before = solver.net.params["conv1"][0].data.copy()
    solver.step(1)
    assert solver.iter == 1
    moved = before - solver.net.params["conv1"][0].data
    np.testing.assert_allclose(
        solver.net.params["conv1"][0].diff, moved, rtol=1e-3, atol=1e-7
    )  # that of the update
    assert 0 < np.abs(moved).max() < 0.05
    np.testing.assert_array_equal(
        test_net.params["conv1"][0].data, solver.net.params["conv1"][0].data
    )

    steps, every = 60, 20
    losses = np.zeros(steps)
    scores = np.zeros((steps, 8, 10))
    shares = []
    for it in range(steps):
        solver.step(1)
        losses[it] = solver.net.blobs["loss"].data
        test_net.forward(start="conv1")  # the same images again
        scores[it] = test_net.blobs["score"].data[:8]
        if it % every == every - 1:
            shares.append(share_right(test_net))
    _, labels = digits("test")
    np.testing.assert_array_equal(
        test_net.blobs["label"].data, labels[:TEST_BATCH]
    )  # after 1 + 3 + 3 * 3
    assert losses[0] > 2 > 0.4 > losses[-10:].mean()
    assert shares[0] < shares[-1]
    assert shares[-1] > 0.92
    growth = [scores[-1, i, label] - scores[0, i, label] for i, label in enumerate(labels[:8])]
    assert np.mean(growth) > 1  # scores of what the images show


SOLVERS = {
    "SGD": ({"base_lr": 0.1, "momentum": 0.9}, "SGDSolver"),
    "Nesterov": ({"base_lr": 0.1, "momentum": 0.9}, "NesterovSolver"),
    "AdaGrad": ({"base_lr": 0.05}, "AdaGradSolver"),
    "RMSProp": ({"base_lr": 0.005, "rms_decay": 0.9}, "RMSPropSolver"),
    "AdaDelta": ({"base_lr": 1, "momentum": 0.95, "delta": 1e-6}, "AdaDeltaSolver"),
    "Adam": ({"base_lr": 0.01, "momentum": 0.9, "momentum2": 0.999}, "AdamSolver"),
}


def two_updates(
    kind: str, rate: float, settings: dict[str, float], w: Array, gradients: Any
) -> Array:
    """The weights after two updates, from the formulas of the papers as Caffe has them."""
    m, m2, delta = (
        settings.get("momentum", 0),
        settings.get("momentum2", 0.999),
        settings.get("delta", 1e-8),
    )
    h, h2 = np.zeros_like(w), np.zeros_like(w)
    for t in (1, 2):
        g = gradients(w)
        if kind == "SGD":
            h = m * h + rate * g
            step = h
        elif kind == "Nesterov":
            last, h = h, m * h + rate * g
            step = (1 + m) * h - m * last
        elif kind == "AdaGrad":
            h = h + g**2
            step = rate * g / (np.sqrt(h) + delta)
        elif kind == "RMSProp":
            h = settings["rms_decay"] * h + (1 - settings["rms_decay"]) * g**2
            step = rate * g / (np.sqrt(h) + delta)
        elif kind == "AdaDelta":
            h = m * h + (1 - m) * g**2
            step = g * np.sqrt((h2 + delta) / (h + delta))
            h2 = m * h2 + (1 - m) * step**2
            step = rate * step
        else:
            h, h2 = m * h + (1 - m) * g, m2 * h2 + (1 - m2) * g**2
            step = rate * np.sqrt(1 - m2**t) / (1 - m**t) * h / (np.sqrt(h2) + delta)
        w = w - step
    return w


@pytest.mark.parametrize("kind", SOLVERS)
def test_solvers_are_swapped(kind: str, mnist: dict[str, str], tmp_path: Path) -> None:
    settings, name = SOLVERS[kind]
    train = written(tmp_path / "train.prototxt", linear(mnist["train"], TRAIN_BATCH))
    test = written(tmp_path / "test.prototxt", linear(mnist["test"], TEST_BATCH))
    path = solver_file(tmp_path, train, test, type=kind, **settings)
    caffe.set_mode_cpu()
    solver = caffe.get_solver(path)
    assert type(solver) is getattr(caffe, name)
    weight, bias = (param.data for param in solver.net.params["score"])

    images, labels = digits("train")
    x = (as_mnist(images) / 255).reshape(-1, 784)
    seen = iter([slice(0, 64), slice(64, 128)])

    def gradients(w: Array) -> Array:
        batch = next(seen)
        scores = x[batch] @ w[:, :-1].T + w[:, -1]
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) - np.eye(10)[labels[batch]]
        return np.column_stack([shares.T @ x[batch], shares.sum(0)]) / len(shares)

    before = np.column_stack([weight, bias]).astype(np.float64)
    solver.step(2)
    after = np.column_stack([weight, bias])
    expected = two_updates(kind, settings["base_lr"], settings, before, gradients)
    used = np.append(
        x[:128].max(0) > 0.1, True
    )  # where gradients are 0 but for rounding, some solvers go anywhere
    np.testing.assert_allclose(
        after[:, used], expected[:, used], rtol=0, atol=3e-3 * np.abs(expected - before).max()
    )

    solver.step(98)
    assert share_right(solver.test_nets[0]) > 0.88


WATCHED = """
import sys
import caffe

caffe.set_mode_cpu()
solver = caffe.get_solver(sys.argv[1])
net = solver.test_nets[0]
net.share_with(solver.net)
for it in range(0, 41, 20):
    right = 0
    for _ in range(3):
        net.forward()
        right += int((net.blobs["score"].data.argmax(1) == net.blobs["label"].data).sum())
    print(it, right / 297)
    solver.step(20 if it < 40 else 1)
"""


def test_scores_by_hand_are_those_of_the_log(mnist: dict[str, str], tmp_path: Path) -> None:
    """A script for Caffe: the solver tests by itself, and the script after it."""
    n = caffe_pb2.NetParameter()
    n.CopyFrom(linear(mnist["test"], TEST_BATCH))
    n.layer.add(type="Accuracy", name="accuracy", bottom=["score", "label"], top=["accuracy"])
    train = written(tmp_path / "train.prototxt", linear(mnist["train"], TRAIN_BATCH))
    test = written(tmp_path / "test.prototxt", n)
    path = solver_file(
        tmp_path, train, test, test_iter=TESTS, base_lr=0.05, momentum=0.9, display=20
    )
    text = Path(path).read_text().replace("test_interval: 1000000", "test_interval: 20")
    Path(path).write_text(text)
    (tmp_path / "watched.py").write_text(WATCHED)
    done = run(tmp_path, "-m", "caffepy.as_caffe", "watched.py", path, GLOG_minloglevel="0")
    by_hand = [float(line.split()[1]) for line in done.stdout.splitlines()]
    logged = [float(score) for score in re.findall(r"accuracy = ([\d.]+)", done.stderr)]
    assert re.findall(r"Iteration (\d+), Testing net", done.stderr) == ["0", "20", "40"]
    assert by_hand == pytest.approx(logged, abs=1e-5)
    assert by_hand[0] < 0.3 < 0.8 < by_hand[-1]
