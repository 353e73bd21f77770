"""Fine-tuning: a net learned on some classes learns others, from image files, by a new last layer."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import params as P  # noqa: N812
from caffepy.device.blob import Array
from tests.tutorials.material import digits, solver_file, written

BATCH = 25
CROP, SIDE = 10, 12
LEARNED = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
FROZEN = [{"lr_mult": 0}, {"lr_mult": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image files of digits, white on grey; lists of those below 5 and of the others; a mean."""
    folder = tmp_path_factory.mktemp("images")
    for part in ("train", "test"):
        images, labels = digits(part)
        lists: dict[str, list[str]] = {"low": [], "high": []}
        for i, (image, label) in enumerate(zip(images[:500], labels, strict=False)):
            name = f"{part}{i:04d}.png"
            cv2.imwrite(str(folder / name), np.dstack([image // 2 + 60, image // 2 + 100, image]))
            lists["low" if label < 5 else "high"].append(f"{name} {label % 5}\n")
        for which, lines in lists.items():
            (folder / f"{part}_{which}.txt").write_text("".join(lines))
    mean = caffe.io.array_to_blobproto(
        np.full((1, 3, SIDE, SIDE), [[[90]], [[130]], [[60]]], np.float32)
    )
    (folder / "mean.binaryproto").write_bytes(mean.SerializeToString())
    return folder


def image_net(
    folder: Path, part: str, which: str, classifier: str, lower: Any = LEARNED, upper: Any = LEARNED
) -> "caffe.NetSpec":
    """A net of digits whose last layer has this name; rates of the layers below and of the last
    one.
    """
    gaussian = {"type": "gaussian", "std": 0.05}
    n = caffe.NetSpec()
    n.data, n.label = L.ImageData(
        transform_param={
            "mirror": False,
            "crop_size": CROP,
            "mean_file": str(folder / "mean.binaryproto"),
            "scale": 0.01,
        },
        source=str(folder / f"{part}_{which}.txt"),
        root_folder=f"{folder}/",
        batch_size=BATCH,
        new_height=SIDE,
        new_width=SIDE,
        ntop=2,
    )
    n.conv1 = L.Convolution(
        n.data, kernel_size=3, num_output=12, param=lower, weight_filler={"type": "xavier"}
    )
    n.relu1 = L.ReLU(n.conv1, in_place=True)
    n.pool1 = L.Pooling(n.relu1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.fc2 = L.InnerProduct(
        n.pool1, num_output=32, param=lower, weight_filler=gaussian, bias_filler={"value": 0.1}
    )
    n.relu2 = L.ReLU(n.fc2, in_place=True)
    if part == "train":
        n.drop2 = L.Dropout(n.relu2, in_place=True, dropout_param={"dropout_ratio": 0.2})
    below = n.drop2 if part == "train" else n.relu2
    last = L.InnerProduct(
        below, num_output=5, param=upper, weight_filler=gaussian, bias_filler={"value": 0.5}
    )
    n.__setattr__(classifier, last)
    if part == "test":
        n.probs = L.Softmax(last)
    n.loss = L.SoftmaxWithLoss(last, n.label)
    n.acc = L.Accuracy(last, n.label)
    return n


def net_file(path: Path, *args: Any, **kwargs: Any) -> str:
    return written(path, image_net(*args, **kwargs).to_proto())


def stepped(solvers: dict[str, Any], steps: int) -> dict[str, Array]:
    """Losses while the solvers take turns."""
    losses = {name: np.zeros(steps) for name in solvers}
    for it in range(steps):
        for name, solver in solvers.items():
            solver.step(1)
            losses[name][it] = solver.net.blobs["loss"].data
    return losses


def accuracy(path: str, weights: str, batches: int) -> float:
    net = caffe.Net(path, weights, caffe.TEST)
    return sum(float(net.forward()["acc"]) for _ in range(batches)) / batches


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> str:
    """Weights of a net that knows the digits below 5."""
    train = net_file(folder / "pre_train.prototxt", folder, "train", "low", "fc3")
    caffe.set_mode_cpu()
    solver = caffe.get_solver(
        solver_file(folder, train, base_lr=0.05, momentum=0.9, weight_decay=5e-4)
    )
    solver.step(120)
    weights = str(folder / "pretrained.caffemodel")
    solver.net.save(weights)
    test = net_file(folder / "pre_test.prototxt", folder, "test", "low", "fc3")
    assert accuracy(test, weights, 6) > 0.9
    return weights


def test_the_data_are_cropped_scaled_and_freed_of_their_mean(folder: Path, tmp_path: Path) -> None:
    net = caffe.Net(net_file(tmp_path / "n.prototxt", folder, "test", "high", "fc3"), caffe.TEST)
    net.forward()
    lines = (folder / "test_high.txt").read_text().splitlines()[:BATCH]
    np.testing.assert_array_equal(net.blobs["label"].data, [int(line.split()[1]) for line in lines])
    for i, line in enumerate(lines):
        image = cv2.resize(cv2.imread(str(folder / line.split()[0])), (SIDE, SIDE)).astype(
            np.float32
        )
        expected = ((image - [90, 130, 60]) * 0.01)[1:11, 1:11].transpose(2, 0, 1)
        np.testing.assert_allclose(net.blobs["data"].data[i], expected, atol=1e-6)


def test_weights_come_by_name_and_features_stay(
    folder: Path, pretrained: str, tmp_path: Path
) -> None:
    old = caffe.Net(
        net_file(tmp_path / "old.prototxt", folder, "test", "high", "fc3"), pretrained, caffe.TEST
    )
    caffe.set_random_seed(11)
    new = caffe.Net(
        net_file(tmp_path / "new.prototxt", folder, "test", "high", "fc3_new"),
        pretrained,
        caffe.TEST,
    )
    assert list(new.params) == ["conv1", "fc2", "fc3_new"]
    for name in ("conv1", "fc2"):
        for mine, theirs in zip(new.params[name], old.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, theirs.data)
    fresh = new.params["fc3_new"][0].data
    assert fresh.std() == pytest.approx(0.05, rel=0.3)
    assert not np.array_equal(fresh, old.params["fc3"][0].data)
    new.forward()
    image = new.blobs["data"].data[8].copy()
    old.blobs["data"].data[0] = image
    known = old.forward(start="conv1")["probs"][0]
    np.testing.assert_allclose(
        old.blobs["fc2"].data[0], new.blobs["fc2"].data[8], rtol=1e-5, atol=1e-7
    )
    for shown, net, layer in ((known, old, "fc3"), (new.blobs["probs"].data[8], new, "fc3_new")):
        weight, bias = (blob.data for blob in net.params[layer])
        shares = np.exp(weight @ new.blobs["fc2"].data[8] + bias)
        np.testing.assert_allclose(shown, shares / shares.sum(), rtol=1e-4)


def test_only_the_new_layer_learns_where_the_rest_is_frozen(
    folder: Path, pretrained: str, tmp_path: Path
) -> None:
    """Beside a net that was not learned before."""
    settings: dict[str, Any] = {"base_lr": 0.005, "momentum": 0.9, "weight_decay": 5e-4}
    train = net_file(tmp_path / "train.prototxt", folder, "train", "high", "fc3_new", lower=FROZEN)
    caffe.set_mode_cpu()
    solvers = {
        name: caffe.get_solver(solver_file(tmp_path, train, **settings))
        for name in ("pretrained", "scratch")
    }
    solvers["pretrained"].net.copy_from(pretrained)
    before = {
        name: [blob.data.copy() for blob in solvers[name].net.params["conv1"]] for name in solvers
    }
    fresh = {name: solver.net.params["fc3_new"][0].data.copy() for name, solver in solvers.items()}
    np.testing.assert_array_equal(fresh["pretrained"], fresh["scratch"])  # of one seed
    losses = stepped(solvers, 60)
    for name, solver in solvers.items():
        for blob, was in zip(solver.net.params["conv1"], before[name], strict=True):
            np.testing.assert_array_equal(blob.data, was)
        assert (solver.net.params["fc3_new"][0].data != fresh[name]).mean() > 0.99
        solver.net.save(str(tmp_path / f"{name}.caffemodel"))
    assert losses["pretrained"][0] == pytest.approx(np.log(5), rel=0.3)
    assert losses["pretrained"][-10:].mean() < 0.8 * losses["scratch"][-10:].mean()

    test = net_file(tmp_path / "test.prototxt", folder, "test", "high", "fc3_new")
    shares = {name: accuracy(test, str(tmp_path / f"{name}.caffemodel"), 5) for name in solvers}
    assert shares["pretrained"] > max(0.6, shares["scratch"] + 0.1)

    # then all layers, from what was found
    all_layers = net_file(tmp_path / "all.prototxt", folder, "train", "high", "fc3_new")
    solver = caffe.get_solver(solver_file(tmp_path, all_layers, **{**settings, "base_lr": 0.02}))
    solver.net.copy_from(str(tmp_path / "pretrained.caffemodel"))
    solver.step(80)
    assert (solver.net.params["conv1"][0].data != before["pretrained"][0]).any()
    solver.net.save(str(tmp_path / "all.caffemodel"))
    assert accuracy(test, str(tmp_path / "all.caffemodel"), 5) > max(0.9, shares["pretrained"])


def test_a_layer_learns_as_much_faster_as_its_rate_says(
    folder: Path, pretrained: str, tmp_path: Path
) -> None:
    """lr_mult 10 and 20 for the new layer, as Caffe's fine-tuning of CaffeNet on Flickr's styles
    has it.
    """
    moved: dict[int, list[Array]] = {}
    for factor in (1, 10):
        upper = [{"lr_mult": factor, "decay_mult": 1}, {"lr_mult": 2 * factor, "decay_mult": 0}]
        train = net_file(
            tmp_path / "train.prototxt", folder, "train", "high", "fc3_new", upper=upper
        )
        solver = caffe.get_solver(solver_file(tmp_path, train, base_lr=0.01, weight_decay=0.01))
        solver.net.copy_from(pretrained)
        params = [blob for name in ("fc2", "fc3_new") for blob in solver.net.params[name]]
        before = [blob.data.copy() for blob in params]
        solver.step(1)
        moved[factor] = [was - blob.data for was, blob in zip(before, params, strict=True)]
        # the same batch again: what the step was made of
        scores = solver.net.blobs["fc3_new"].data
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        gradient = (shares - np.eye(5)[solver.net.blobs["label"].data.astype(int)]) / BATCH
        weight, bias = moved[factor][2:]
        features = solver.net.blobs["fc2"].data
        np.testing.assert_allclose(
            weight,
            0.01 * factor * (gradient.T @ features + 0.01 * before[2]),
            rtol=1e-3,
            atol=1e-6 * factor,
        )
        np.testing.assert_allclose(
            bias, 0.02 * factor * gradient.sum(0), rtol=1e-3, atol=1e-6 * factor
        )  # no decay
    for slow, fast, factor in zip(moved[1], moved[10], (1, 1, 10, 10), strict=True):
        assert np.abs(slow).max() > 1e-6
        np.testing.assert_allclose(fast, factor * slow, rtol=1e-3, atol=1e-6)
