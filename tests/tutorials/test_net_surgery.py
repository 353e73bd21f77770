"""Net surgery: filters set by hand, and a classifier that is made to look at every place of an
image.
"""

from pathlib import Path

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

import caffepy as caffe
from caffepy import layers as L  # noqa: N812 # pycaffe's habit
from caffepy import params as P  # noqa: N812
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2
from tests.tutorials.material import MODELS, as_mnist, digits, solver_file, written


def filtered(image: Array, kernel: Array) -> Array:
    """Correlation of an image with a kernel where it fits, term by term."""
    height, width = (a - b + 1 for a, b in zip(image.shape, kernel.shape, strict=True))
    return sum(
        (image[i : i + height, j : j + width] * kernel[i, j] for i, j in np.ndindex(kernel.shape)),
        start=np.zeros((height, width)),
    )


def test_filters_are_set_by_hand(tmp_path: Path) -> None:
    n = caffe.NetSpec()
    n.data = L.Input(shape={"dim": [1, 1, 100, 100]})
    n.conv = L.Convolution(
        n.data,
        num_output=3,
        kernel_size=5,
        weight_filler={"type": "gaussian", "std": 0.01},
        bias_filler={"value": 0},
    )
    net = caffe.Net(written(tmp_path / "conv.prototxt", n.to_proto()), caffe.TEST)
    assert list(net.blobs) == ["data", "conv"]
    assert list(net.params) == ["conv"]
    pixels = cv2.resize(
        np.random.default_rng(2).integers(0, 256, (9, 12, 3)).astype(np.uint8), (120, 90)
    )
    cv2.imwrite(str(tmp_path / "photo.png"), pixels)

    grey = np.array(caffe.io.load_image(str(tmp_path / "photo.png"), color=False)).squeeze()
    np.testing.assert_allclose(grey, pixels @ [0.0721, 0.7154, 0.2125] / 255, rtol=1e-5)
    batch = grey[np.newaxis, np.newaxis, :, :]
    net.blobs["data"].reshape(*batch.shape)
    net.blobs["data"].data[...] = batch
    net.forward()
    first = net.blobs["conv"].data[0, 0]
    assert first.shape == (86, 116)
    weight, bias = (blob.data for blob in net.params["conv"])
    assert 0.005 < weight.std() < 0.015
    np.testing.assert_allclose(first, filtered(grey, weight[0, 0]), atol=1e-6)

    before = first.mean()
    bias[0] = 1.0
    net.forward()
    assert first.mean() == pytest.approx(before + 1, abs=1e-5)  # the same array shows what is new

    y, x = np.mgrid[-2:3, -2:3]
    blur = np.exp(-(x**2 + y**2) / 2)
    blur /= blur.sum()
    sobel = np.outer([-1, 0, 1], [1, 2, 1])
    weight[0] = blur
    weight[1:] = 0
    weight[1, 0, 1:-1, 1:-1] = sobel
    weight[2, 0, 1:-1, 1:-1] = sobel.T
    bias[0] = 0
    net.forward()
    inner = slice(2, -2)
    for shown, expected in zip(
        net.blobs["conv"].data[0],
        [cv2.GaussianBlur(grey, (5, 5), 1), cv2.Sobel(grey, -1, 0, 1), cv2.Sobel(grey, -1, 1, 0)],
        strict=True,
    ):
        np.testing.assert_allclose(shown, expected[inner, inner], atol=1e-5)


# from fully connected to convolutional


def net_of(kind: str, source: str = "") -> caffe_pb2.NetParameter:
    """A net of digits of 8 x 8 without padding: as a classifier ("fc") or fully convolutional
    ("conv").
    """
    xavier = {"type": "xavier"}
    n = caffe.NetSpec()
    if source:
        n.data, n.label = L.Data(
            batch_size=50,
            backend=P.Data.LMDB,
            source=source,
            transform_param={"scale": 1 / 240},
            ntop=2,
        )
    else:
        n.data = L.Input(shape={"dim": [1, 1, 8, 8]})
    n.conv1 = L.Convolution(n.data, kernel_size=3, num_output=16, weight_filler=xavier)
    n.relu1 = L.ReLU(n.conv1, in_place=True)
    n.pool1 = L.Pooling(n.relu1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    if kind == "fc":
        n.fc2 = L.InnerProduct(n.pool1, num_output=48, weight_filler=xavier)
        n.relu2 = L.ReLU(n.fc2, in_place=True)
        n.fc3 = L.InnerProduct(n.relu2, num_output=10, weight_filler=xavier)
        last = n.fc3
    else:
        n["fc2-conv"] = L.Convolution(n.pool1, kernel_size=3, num_output=48)
        n.relu2 = L.ReLU(n["fc2-conv"], in_place=True)
        n["fc3-conv"] = L.Convolution(n.relu2, kernel_size=1, num_output=10)
        last = n["fc3-conv"]
    if source:
        n.loss = L.SoftmaxWithLoss(last, n.label)
    else:
        n.prob = L.Softmax(last)
    return n.to_proto()


def transplant(source: "caffe.Net", target: "caffe.Net", names: list[str]) -> None:
    """Weights of fully connected layers into the convolutions that are to do the same."""
    for name in names:
        weight, bias = (blob.data for blob in source.params[name])
        into = [blob.data for blob in target.params[f"{name}-conv"]]
        assert weight.ndim == 2
        assert into[0].ndim == 4
        into[0].flat = weight.flat
        into[1][...] = bias


def test_a_learned_classifier_scans_an_image(tmp_path: Path) -> None:
    """Digits are found where they stand in a large image, by one forward pass."""
    source = str(MODELS / "digits" / "digits_train_lmdb")
    path = solver_file(
        tmp_path,
        written(tmp_path / "train.prototxt", net_of("fc", source)),
        base_lr=0.05,
        momentum=0.9,
        weight_decay=0.0005,
    )
    caffe.set_mode_cpu()
    solver = caffe.get_solver(path)
    solver.step(200)
    weights = str(tmp_path / "learned.caffemodel")
    solver.net.save(weights)
    net = caffe.Net(written(tmp_path / "fc.prototxt", net_of("fc")), weights, caffe.TEST)
    conv = caffe.Net(written(tmp_path / "conv.prototxt", net_of("conv")), weights, caffe.TEST)
    np.testing.assert_array_equal(conv.params["conv1"][0].data, solver.net.params["conv1"][0].data)
    assert not conv.params["fc2-conv"][0].data.any()  # no layer of this name was learned
    assert conv.params["fc2-conv"][0].data.shape == (48, 16, 3, 3)
    assert net.params["fc2"][0].data.shape == (48, 144)
    transplant(net, conv, ["fc2", "fc3"])
    conv.save(str(tmp_path / "conv.caffemodel"))
    conv = caffe.Net(
        str(tmp_path / "conv.prototxt"), caffe.TEST, weights=str(tmp_path / "conv.caffemodel")
    )

    images, labels = digits("test")
    rows, columns, apart = 5, 7, 10
    canvas = np.zeros((rows * apart, columns * apart), np.float32)
    for k, (i, j) in enumerate(np.ndindex(rows, columns)):
        canvas[i * apart : i * apart + 8, j * apart : j * apart + 8] = images[k] / 240
    conv.blobs["data"].reshape(1, 1, *canvas.shape)
    out = conv.forward_all(data=canvas[np.newaxis, np.newaxis])["prob"]
    assert out.shape == (1, 10, 22, 32)  # a place for every second pixel

    batch = np.stack([canvas[2 * i : 2 * i + 8, 2 * j : 2 * j + 8] for i, j in np.ndindex(22, 32)])
    everywhere = net.forward_all(data=batch[:, np.newaxis])["prob"].reshape(22, 32, 10)
    np.testing.assert_allclose(out[0].transpose(1, 2, 0), everywhere, rtol=1e-4, atol=1e-6)
    read = out[0].argmax(axis=0)[::5, ::5]
    assert read.shape == (rows, columns)
    assert (read.ravel() == labels[: rows * columns]).mean() > 0.9
    assert np.ptp(out[0, 3]) > 0.9  # the map of one class tells its places from others


def test_lenet_becomes_convolutional(tmp_path: Path) -> None:
    """The deploy net that comes with caffepy, its prototxt edited by a script."""
    deploy = MODELS / "lenet" / "deploy.prototxt"
    rng = np.random.default_rng(0)
    net = caffe.Net(str(deploy), caffe.TEST)
    net.blobs["data"].reshape(1, 1, 28, 28)
    for weight, bias in net.params.values():
        weight.data[...] = rng.standard_normal(weight.shape) * np.sqrt(2 / weight.data[0].size)
        bias.data[...] = rng.normal(0, 0.1, bias.shape)
    net.save(str(tmp_path / "lenet.caffemodel"))

    edited = text_format.Parse(deploy.read_text(), caffe_pb2.NetParameter())
    edited.layer[0].input_param.shape[0].dim[:] = [2, 1, 48, 40]
    sizes = {"ip1": 4, "ip2": 1}
    for layer in edited.layer:
        for blobs in (layer.bottom, layer.top):
            blobs[:] = [f"{name}-conv" if name in sizes else name for name in blobs]
        if layer.name in sizes:
            layer.type = "Convolution"
            layer.convolution_param.num_output = layer.inner_product_param.num_output
            layer.convolution_param.kernel_size.append(sizes[layer.name])
            layer.ClearField("inner_product_param")
            layer.name += "-conv"
    conv = caffe.Net(
        written(tmp_path / "conv.prototxt", edited), str(tmp_path / "lenet.caffemodel"), caffe.TEST
    )
    transplant(net, conv, ["ip1", "ip2"])

    canvases = (
        np.stack([np.tile(image, (2, 2))[:48, :40] for image in as_mnist(digits("test")[0][:2])])
        / 255
    )
    out = conv.forward(data=canvases[:, np.newaxis])["prob"]
    assert out.shape == (2, 10, 6, 4)
    for k, i, j in np.ndindex(2, 6, 4):
        part = canvases[k, 4 * i : 4 * i + 28, 4 * j : 4 * j + 28]
        there = net.forward(data=part[np.newaxis, np.newaxis])["prob"][0]
        np.testing.assert_allclose(
            out[k, :, i, j], there, rtol=1e-4, atol=1e-7, err_msg=f"{k} {i} {j}"
        )
    assert np.ptp(out, axis=(2, 3)).max() > 0.01
