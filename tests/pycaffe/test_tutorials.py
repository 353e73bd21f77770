"""The steps that Caffe's tutorials go through in Python, on data that is at hand."""

from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import models
from caffepy import params as P  # noqa: N812
from caffepy.blob import Array
from caffepy.proto import caffe_pb2

DIGITS = Path(models.__file__).parent / "digits"


def written(path: Path, proto: Any) -> str:
    """The file of a net or solver."""
    path.write_text(str(proto))
    return str(path)


def solver_of(folder: Path, **settings: Any) -> "caffe.SGDSolver":
    """A solver of settings, written by way of caffe_pb2 as the tutorials do it."""
    caffe.set_random_seed(5)
    param = caffe_pb2.SolverParameter(lr_policy="fixed", snapshot_prefix=str(folder / "run"), random_seed=5)
    for name, value in settings.items():
        if isinstance(value, list):
            getattr(param, name).extend(value)
        else:
            setattr(param, name, value)
    return caffe.get_solver(written(folder / "solver.prototxt", param))


# classification


def test_classify_an_image_by_caffenet(tmp_path: Path) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (300, 360, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "photo.png"), photo)
    net = caffe.Net(str(DIGITS.parent / "caffenet" / "deploy.prototxt"), caffe.TEST)
    net.blobs["data"].reshape(2, 3, 227, 227)
    rng = np.random.default_rng(1)
    for name in ("conv1", "fc8"):
        weight = net.params[name][0].data
        weight[...] = rng.standard_normal(weight.shape) * 0.01

    mean = np.array([104.00698793, 116.66876762, 122.67891434])
    transformer = caffe.io.Transformer({"data": net.blobs["data"].data.shape})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_mean("data", mean)
    transformer.set_raw_scale("data", 255)
    transformer.set_channel_swap("data", (2, 1, 0))
    image = caffe.io.load_image(str(tmp_path / "photo.png"))
    np.testing.assert_array_equal(image, (photo[..., ::-1] * (1 / 255)).astype(np.float32))
    prepared = transformer.preprocess("data", image)

    resized = caffe.io.resize_image(image, (227, 227))
    expected = resized.transpose(2, 0, 1)[::-1] * np.float32(255)
    np.testing.assert_array_equal(prepared, (expected - mean[:, None, None]).astype(np.float32))

    net.blobs["data"].data[...] = prepared
    probabilities = net.forward()["prob"]
    assert probabilities.shape == (2, 1000)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(probabilities[0], probabilities[1])
    shapes = {name: blob.data.shape for name, blob in net.blobs.items()}
    assert (shapes["conv1"], shapes["pool5"], shapes["fc6"]) == ((2, 96, 55, 55), (2, 256, 6, 6), (2, 4096))
    assert {name: param[0].data.shape for name, param in net.params.items()}["conv2"] == (256, 48, 5, 5)
    assert transformer.deprocess("data", net.blobs["data"].data[0]).shape == (227, 227, 3)


# learning


def lenet(source: str, batch: int) -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.data, n.label = L.Data(
        batch_size=batch, backend=P.Data.LMDB, source=source, transform_param={"scale": 1 / 240}, ntop=2
    )
    n.conv1 = L.Convolution(n.data, kernel_size=3, pad=1, num_output=8, weight_filler={"type": "xavier"})
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.fc1 = L.InnerProduct(n.pool1, num_output=40, weight_filler={"type": "xavier"})
    n.relu1 = L.ReLU(n.fc1, in_place=True)
    n.score = L.InnerProduct(n.relu1, num_output=10, weight_filler={"type": "xavier"})
    n.loss = L.SoftmaxWithLoss(n.score, n.label)
    return n.to_proto()


def test_learn_to_read_digits_step_by_step(tmp_path: Path) -> None:
    solver = solver_of(
        tmp_path,
        train_net=written(tmp_path / "train.prototxt", lenet(str(DIGITS / "digits_train_lmdb"), 50)),
        test_net=[written(tmp_path / "test.prototxt", lenet(str(DIGITS / "digits_test_lmdb"), 99))],
        test_iter=[3],
        test_interval=1000,
        base_lr=0.05,
        momentum=0.9,
    )
    assert [(name, blob.data.shape) for name, blob in solver.net.blobs.items()][:2] == [
        ("data", (50, 1, 8, 8)),
        ("label", (50,)),
    ]
    solver.net.forward()
    assert solver.net.blobs["loss"].data == pytest.approx(np.log(10), rel=0.3)
    losses, shares = [], []
    for iteration in range(150):
        solver.step(1)
        losses.append(float(solver.net.blobs["loss"].data))
        if iteration % 50 == 49:
            right = 0
            for _ in range(3):
                solver.test_nets[0].forward()
                blobs = solver.test_nets[0].blobs
                right += (blobs["score"].data.argmax(1) == blobs["label"].data).sum()
            shares.append(right / 297)
    assert np.mean(losses[-10:]) < 0.2 < 1 < losses[0]
    assert shares[-1] > 0.93
    assert solver.net.params["conv1"][0].diff.any()
    data = solver.test_nets[0].blobs["data"].data.copy()
    solver.test_nets[0].forward(start="conv1")
    np.testing.assert_array_equal(solver.test_nets[0].blobs["data"].data, data)


# net surgery


def head(kind: str, size: int) -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.data = L.Input(shape={"dim": [1, 2, size, size]})
    n.conv = L.Convolution(n.data, kernel_size=3, num_output=4, weight_filler={"type": "xavier"})
    n.relu = L.ReLU(n.conv, in_place=True)
    if kind == "fc":
        n.fc1 = L.InnerProduct(n.relu, num_output=6, weight_filler={"type": "xavier"}, bias_filler={"value": 0.3})
        n.fc2 = L.InnerProduct(n.fc1, num_output=3, weight_filler={"type": "xavier"})
        n.prob = L.Softmax(n.fc2)
    else:
        n["fc1-conv"] = L.Convolution(n.relu, kernel_size=4, num_output=6)
        n["fc2-conv"] = L.Convolution(n["fc1-conv"], kernel_size=1, num_output=3)
        n.prob = L.Softmax(n["fc2-conv"])
    return n.to_proto()


def test_fully_connected_layers_become_convolutions(tmp_path: Path) -> None:
    caffe.set_random_seed(1)
    net = caffe.Net(written(tmp_path / "fc.prototxt", head("fc", 6)), caffe.TEST)
    net.save(str(tmp_path / "fc.caffemodel"))
    conv = caffe.Net(written(tmp_path / "conv.prototxt", head("conv", 9)), str(tmp_path / "fc.caffemodel"), caffe.TEST)
    np.testing.assert_array_equal(conv.params["conv"][0].data, net.params["conv"][0].data)
    for layer in ("fc1", "fc2"):
        conv.params[f"{layer}-conv"][0].data.flat = net.params[layer][0].data.flat
        conv.params[f"{layer}-conv"][1].data[...] = net.params[layer][1].data
    conv.save(str(tmp_path / "conv.caffemodel"))
    image = np.random.default_rng(0).standard_normal((1, 2, 9, 9)).astype(np.float32)
    conv = caffe.Net(str(tmp_path / "conv.prototxt"), caffe.TEST, weights=str(tmp_path / "conv.caffemodel"))
    everywhere = conv.forward_all(None, data=image)["prob"]
    assert everywhere.shape == (1, 3, 4, 4)
    for y, x in np.ndindex(4, 4):
        there = net.forward(data=image[:, :, y : y + 6, x : x + 6])["prob"]
        np.testing.assert_allclose(everywhere[0, :, y, x], there[0], rtol=1e-5)


def test_filters_may_be_set(tmp_path: Path) -> None:
    n = caffe.NetSpec()
    n.data = L.Input(shape={"dim": [1, 1, 5, 5]})
    n.conv = L.Convolution(n.data, kernel_size=3, num_output=2, weight_filler={"type": "gaussian"})
    net = caffe.Net(written(tmp_path / "net.prototxt", n.to_proto()), caffe.TEST)
    image = np.random.default_rng(0).random((7, 6))
    net.blobs["data"].reshape(1, 1, *image.shape)
    net.blobs["data"].data[...] = image
    weight, bias = (param.data for param in net.params["conv"])
    weight[0] = np.eye(3)
    weight[1] = 0
    bias[1] = 2
    net.forward()
    diagonal = sum(image[i : i + 5, i : i + 4] for i in range(3))
    np.testing.assert_allclose(net.blobs["conv"].data[0, 0], diagonal, rtol=1e-5)
    assert (net.blobs["conv"].data[0, 1] == 2).all()


# fine-tuning


def pretrained(classes: int, rate: float, name: str) -> caffe_pb2.NetParameter:
    """A net whose lower layer learns at `rate`, with a last layer of this name."""
    n = caffe.NetSpec()
    n.data, n.label = L.Data(
        batch_size=50,
        backend=P.Data.LMDB,
        source=str(DIGITS / "digits_train_lmdb"),
        transform_param={"scale": 1 / 240},
        ntop=2,
    )
    learned = [{"lr_mult": rate}, {"lr_mult": 2 * rate}]
    n.conv1 = L.Convolution(
        n.data, kernel_size=3, num_output=8, stride=2, weight_filler={"type": "xavier"}, param=learned
    )
    n.relu1 = L.ReLU(n.conv1, in_place=True)
    n[name] = L.InnerProduct(
        n.relu1, num_output=classes, weight_filler={"type": "xavier"}, param=[{"lr_mult": 10}, {"lr_mult": 20}]
    )
    n.loss = L.SoftmaxWithLoss(n[name], n.label)
    return n.to_proto()


@pytest.mark.parametrize("rate", [0, 1])
def test_fine_tuning_keeps_what_has_the_same_name(rate: float, tmp_path: Path) -> None:
    first = solver_of(
        tmp_path, train_net=written(tmp_path / "first.prototxt", pretrained(12, 1, "old")), base_lr=0.02, momentum=0.9
    )
    first.step(30)
    weights = str(tmp_path / "first.caffemodel")
    first.net.save(weights)

    second = solver_of(
        tmp_path, train_net=written(tmp_path / "second.prototxt", pretrained(10, rate, "new")), base_lr=0.002
    )
    fresh = second.net.params["new"][0].data.copy()
    second.net.copy_from(weights)
    learned = first.net.params["conv1"][0].data.copy()
    np.testing.assert_array_equal(second.net.params["conv1"][0].data, learned)
    np.testing.assert_array_equal(second.net.params["new"][0].data, fresh)
    second.net.forward()
    before = float(second.net.blobs["loss"].data)
    second.step(30)
    assert float(second.net.blobs["loss"].data) < before
    assert (second.net.params["new"][0].data != fresh).any()
    assert bool((second.net.params["conv1"][0].data == learned).all()) is (rate == 0)


# logistic regression from HDF5


def test_logistic_regression_from_hdf5(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 4)).astype(np.float32)
    label = (x @ [2, -1, 0, 1] + 0.5 > 0).astype(np.float32)
    for name, rows in {"train": slice(0, 300), "test": slice(300, 400)}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("data", data=x[rows], compression="gzip")
            file["label"] = label[rows]
        (tmp_path / f"{name}.txt").write_text(f"{tmp_path / name}.h5\n")

    def logreg(name: str) -> str:
        n = caffe.NetSpec()
        n.data, n.label = L.HDF5Data(batch_size=20, source=str(tmp_path / f"{name}.txt"), ntop=2)
        n.ip1 = L.InnerProduct(n.data, num_output=2, weight_filler={"type": "xavier"})
        n.accuracy = L.Accuracy(n.ip1, n.label)
        n.loss = L.SoftmaxWithLoss(n.ip1, n.label)
        return written(tmp_path / f"{name}.prototxt", n.to_proto())

    solver = solver_of(
        tmp_path,
        train_net=logreg("train"),
        test_net=[logreg("test")],
        test_iter=[5],
        test_interval=100,
        base_lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        max_iter=200,
        snapshot=200,
    )
    solver.solve()
    right = []
    for _ in range(5):
        solver.test_nets[0].forward()
        right.append(float(solver.test_nets[0].blobs["accuracy"].data))
    assert np.mean(right) > 0.95
    assert (tmp_path / "run_iter_200.caffemodel").is_file()
    slope = np.diff(solver.net.params["ip1"][0].data, axis=0)[0]
    assert np.dot(slope, [2, -1, 0, 1]) / np.linalg.norm(slope) / np.sqrt(6) > 0.98


# siamese LeNet


def test_a_siamese_net_brings_equal_digits_together(tmp_path: Path) -> None:
    images, labels = read_digits(600, tmp_path)
    rng = np.random.default_rng(0)
    others = rng.permutation(600)
    pairs = np.stack([images, images[others]], axis=1).astype(np.float32)
    with h5py.File(tmp_path / "pairs.h5", "w") as file:
        file["pair_data"] = pairs
        file["sim"] = (labels == labels[others]).astype(np.float32)
    (tmp_path / "pairs.txt").write_text(f"{tmp_path / 'pairs.h5'}\n")

    def tower(n: "caffe.NetSpec", bottom: Any, suffix: str) -> Any:
        for name, outputs in (("ip1", 40), ("feat", 2)):
            shared = [{"name": f"{name}_w", "lr_mult": 1}, {"name": f"{name}_b", "lr_mult": 2}]
            bottom = L.InnerProduct(bottom, num_output=outputs, weight_filler={"type": "xavier"}, param=shared)
            n[name + suffix] = bottom
            if name == "ip1":
                bottom = n[f"relu{suffix}"] = L.ReLU(bottom, in_place=True)
        return bottom

    n = caffe.NetSpec()
    n.pair_data, n.sim = L.HDF5Data(batch_size=60, source=str(tmp_path / "pairs.txt"), shuffle=True, ntop=2)
    n.data, n.data_p = L.Slice(n.pair_data, axis=1, slice_point=1, ntop=2)
    one, two = tower(n, n.data, ""), tower(n, n.data_p, "_p")
    n.loss = L.ContrastiveLoss(one, two, n.sim, margin=1)
    solver = solver_of(tmp_path, train_net=written(tmp_path / "net.prototxt", n.to_proto()), base_lr=0.02, momentum=0.9)
    net = solver.net
    net.params["feat"][1].data[0] = 0.5
    assert net.params["feat_p"][1].data[0] == 0.5  # one and the same

    def apart() -> tuple[float, float]:
        """Mean distances of equal and of different digits."""
        features = np.concatenate([features_of(net, batch) for batch in np.split(images, 10)])
        distance = np.linalg.norm(features[:, None] - features, axis=2)
        same = labels[:, None] == labels
        return distance[same].mean(), distance[~same].mean()

    solver.step(300)
    near, far = apart()
    assert near < 0.6 * far
    np.testing.assert_array_equal(net.params["ip1"][0].data, net.params["ip1_p"][0].data)


def features_of(net: "caffe.Net", images: Array) -> Array:
    net.blobs["data"].data[...] = images[:, None]
    net.forward(start="ip1", end="feat")
    return net.blobs["feat"].data.copy()


def read_digits(count: int, folder: Path) -> tuple[Array, Array]:
    """Images (N, 8, 8) in [0, 1] and labels."""
    n = caffe.NetSpec()
    n.data, n.label = L.Data(batch_size=count, backend=P.Data.LMDB, source=str(DIGITS / "digits_train_lmdb"), ntop=2)
    blobs = caffe.Net(written(folder / "digits.prototxt", n.to_proto()), caffe.TEST).forward()
    return blobs["data"][:, 0] / 240, blobs["label"]


# a Python layer that gives several labels an image

LAYERS = '''
import json
import numpy as np
import caffe


class Shapes(caffe.Layer):
    """Images with a bar, a column, both or neither; a label for each of the two."""

    def setup(self, bottom, top):
        self.top_names = ["data", "label"]
        settings = json.loads(self.param_str)
        if len(bottom):
            raise Exception("a data layer has no bottoms")
        self.batch, self.size = settings["batch"], settings["size"]
        self.rng = np.random.default_rng(settings["seed"])
        top[0].reshape(self.batch, 1, self.size, self.size)
        top[1].reshape(self.batch, 2)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        for i in range(self.batch):
            bar, column = self.rng.integers(0, 2, 2)
            image = self.rng.normal(0, 0.1, (self.size, self.size))
            image[self.rng.integers(self.size)] += bar
            image[:, self.rng.integers(self.size)] += column
            top[0].data[i, 0] = image
            top[1].data[i] = bar, column

    def backward(self, top, propagate_down, bottom):
        pass
'''


def test_a_python_layer_gives_several_labels(tmp_path: Path) -> None:
    (tmp_path / "shape_layers.py").write_text(LAYERS)

    def net(name: str, seed: int) -> str:
        n = caffe.NetSpec()
        settings = f'{{"batch": 40, "size": 8, "seed": {seed}}}'
        n.data, n.label = L.Python(module="shape_layers", layer="Shapes", ntop=2, param_str=settings)
        n.high = L.Convolution(n.data, kernel_size=[8, 1], num_output=6, weight_filler={"type": "xavier"})
        n.wide = L.Convolution(n.data, kernel_size=[1, 8], num_output=6, weight_filler={"type": "xavier"})
        tops = []
        for layer in ("high", "wide"):
            n[f"relu_{layer}"] = L.ReLU(n[layer], in_place=True)
            n[f"pool_{layer}"] = L.Pooling(n[f"relu_{layer}"], pool=P.Pooling.MAX, global_pooling=True)
            tops.append(n[f"pool_{layer}"])
        n.both = L.Concat(*tops)
        n.score = L.InnerProduct(n.both, num_output=2, weight_filler={"type": "xavier"})
        n.loss = L.SigmoidCrossEntropyLoss(n.score, n.label)
        return written(tmp_path / name, n.to_proto())

    solver = solver_of(
        tmp_path,
        train_net=net("train.prototxt", 0),
        test_net=[net("test.prototxt", 1)],
        test_iter=[1],
        test_interval=1000,
        base_lr=0.1,
        momentum=0.9,
    )

    def hamming() -> float:
        test = solver.test_nets[0]
        test.forward()
        return float(((test.blobs["score"].data > 0) == test.blobs["label"].data).mean())

    solver.step(150)
    assert np.mean([hamming() for _ in range(5)]) > 0.9
