"""A siamese LeNet: two towers that share their weights bring pairs of equal digits together, others
apart.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import params as P  # noqa: N812
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2
from tests.tutorials.material import as_mnist, digits, solver_file, write_database, written

PAIRS, BATCH = 1200, 50
LEARNED = ("conv1", "conv2", "ip1", "ip2", "feat")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Array, Array]:
    """An LMDB of pairs, an image a channel, with label 1 for pairs of one digit; and what it holds."""
    images, labels = digits("train")
    pixels = as_mnist(images)
    rng = np.random.default_rng(4)
    ones, others = rng.integers(0, len(labels), (2, PAIRS))
    for i in range(0, PAIRS, 2):  # or else nine of ten pairs were of different digits
        others[i] = rng.choice(np.flatnonzero(labels == labels[ones[i]]))
    stacked = np.stack([pixels[ones], pixels[others]], axis=1)
    similar = labels[ones] == labels[others]
    datums = [
        caffe.io.array_to_datum(pair, int(same))
        for pair, same in zip(stacked, similar, strict=True)
    ]
    return write_database(tmp_path_factory.mktemp("pairs") / "pairs_lmdb", datums), stacked, similar


def tower(n: "caffe.NetSpec", below: Any, suffix: str = "") -> Any:
    """LeNet with a last layer of two features, its parameters named for both towers."""
    for name in LEARNED:
        shared = [{"name": f"{name}_w", "lr_mult": 1}, {"name": f"{name}_b", "lr_mult": 2}]
        filler = {"weight_filler": {"type": "xavier"}, "bias_filler": {"type": "constant"}}
        if name.startswith("conv"):
            below = L.Convolution(
                below,
                kernel_size=5,
                num_output={"conv1": 8, "conv2": 16}[name],
                param=shared,
                **filler,
            )
            n[name + suffix] = below
            below = L.Pooling(below, kernel_size=2, stride=2, pool=P.Pooling.MAX)
            n[name.replace("conv", "pool") + suffix] = below
        else:
            outputs = {"ip1": 60, "ip2": 10, "feat": 2}[name]
            below = L.InnerProduct(below, num_output=outputs, param=shared, **filler)
            n[name + suffix] = below
            if name == "ip1":
                below = n[f"relu1{suffix}"] = L.ReLU(below, in_place=True)
    return below


def siamese(source: str) -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.pair_data, n.sim = L.Data(
        batch_size=BATCH,
        backend=P.Data.LMDB,
        source=source,
        transform_param={"scale": 0.00390625},
        ntop=2,
    )
    n.data, n.data_p = L.Slice(n.pair_data, axis=1, slice_point=1, ntop=2)
    one, other = tower(n, n.data), tower(n, n.data_p, "_p")
    n.loss = L.ContrastiveLoss(one, other, n.sim, contrastive_loss_param={"margin": 1})
    return n.to_proto()


def deploy() -> caffe_pb2.NetParameter:
    n = caffe.NetSpec()
    n.data = L.Input(shape={"dim": [99, 1, 28, 28]})
    tower(n, n.data)
    return n.to_proto()


def test_the_towers_are_one(pairs: tuple[str, Array, Array], tmp_path: Path) -> None:
    source, stacked, similar = pairs
    caffe.set_random_seed(2)
    net = caffe.Net(written(tmp_path / "net.prototxt", siamese(source)), caffe.TRAIN)
    for name in LEARNED:
        for mine, theirs in zip(net.params[name], net.params[f"{name}_p"], strict=True):
            assert np.shares_memory(mine.data, theirs.data)
    net.params["feat_p"][1].data[...] = [0.25, -0.5]
    assert net.params["feat"][1].data.tolist() == [0.25, -0.5]

    net.forward()
    for name, channel in (("data", 0), ("data_p", 1)):
        np.testing.assert_array_equal(
            net.blobs[name].data[:, 0], stacked[:BATCH, channel] / np.float32(256)
        )
    np.testing.assert_array_equal(net.blobs["sim"].data, similar[:BATCH])
    features = [net.blobs[name].data.copy() for name in ("feat", "feat_p")]
    one, other = (f.astype(np.float64) for f in features)
    distance = np.linalg.norm(one - other, axis=1)
    terms = np.where(similar[:BATCH], distance**2, np.maximum(0, 1 - distance) ** 2)
    loss = terms.sum() / (2 * BATCH)
    assert float(net.blobs["loss"].data) == pytest.approx(loss, rel=1e-4)

    # the gradient is the sum of both towers' parts
    net.clear_param_diffs()
    net.backward()
    push = np.where(similar[:BATCH], 1, -np.maximum(0, 1 - distance) / (distance + 1e-4))[:, None]
    slope = push * (one - other) / BATCH
    np.testing.assert_allclose(net.blobs["feat"].diff, slope, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(net.blobs["feat_p"].diff, -slope, rtol=1e-3, atol=1e-6)
    below = [net.blobs[name].data for name in ("ip2", "ip2_p")]
    np.testing.assert_allclose(
        net.params["feat"][0].diff, slope.T @ (below[0] - below[1]), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(net.params["feat"][1].diff, 0, atol=1e-6)

    # swapped towers have swapped features
    net.blobs["data"].data[...], net.blobs["data_p"].data[...] = (
        net.blobs["data_p"].data.copy(),
        net.blobs["data"].data.copy(),
    )
    net.forward(start="conv1")
    np.testing.assert_allclose(net.blobs["feat_p"].data, features[0], rtol=1e-4, atol=1e-6)


def test_equal_digits_come_together(pairs: tuple[str, Array, Array], tmp_path: Path) -> None:
    path = solver_file(
        tmp_path,
        written(tmp_path / "train.prototxt", siamese(pairs[0])),
        base_lr=0.02,
        lr_policy="inv",
        gamma=0.0001,
        power=0.75,
        momentum=0.9,
    )
    caffe.set_mode_cpu()
    solver = caffe.SGDSolver(path)
    losses = []
    for _ in range(200):
        solver.step(1)
        losses.append(float(solver.net.blobs["loss"].data))
    assert np.mean(losses[-20:]) < 0.4 * np.mean(losses[:10])
    np.testing.assert_array_equal(
        solver.net.params["conv1"][0].data, solver.net.params["conv1_p"][0].data
    )
    weights = str(tmp_path / "siamese.caffemodel")
    solver.net.save(weights)
    saved = caffe_pb2.NetParameter.FromString(Path(weights).read_bytes())
    assert {layer.name for layer in saved.layer if layer.blobs} == {
        *LEARNED,
        *(f"{name}_p" for name in LEARNED),
    }

    net = caffe.Net(written(tmp_path / "deploy.prototxt", deploy()), weights, caffe.TEST)
    assert list(net.params) == list(LEARNED)
    images, labels = digits("test")
    feat = net.forward_all(data=(as_mnist(images) * 0.00390625)[:, np.newaxis])["feat"]
    assert feat.shape == (297, 2)
    distance = np.linalg.norm(feat[:, np.newaxis] - feat, axis=2)
    equal = labels[:, np.newaxis] == labels
    near, far = distance[equal].mean(), distance[~equal].mean()
    assert near < 0.45 * far
    np.fill_diagonal(distance, np.inf)
    assert (
        labels[distance.argmin(axis=1)] == labels
    ).mean() > 0.5  # two numbers tell ten digits, by their neighbours
