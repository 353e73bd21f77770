"""Classify an image with CaffeNet: prepare it, run it, look at what the layers hold."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import caffepy as caffe
from caffepy.device.blob import Array
from tests.tutorials.material import MODELS

SIZE = 227
CLASSES = 1000


@pytest.fixture(scope="module")
def caffenet() -> "caffe.Net":
    """CaffeNet's deploy net with random weights, such that images are told apart."""
    caffe.set_mode_cpu()
    net = caffe.Net(str(MODELS / "caffenet" / "deploy.prototxt"), caffe.TEST)
    assert net.blobs["data"].data.shape == (10, 3, SIZE, SIZE)
    rng = np.random.default_rng(1)
    for name, (weight, bias) in net.params.items():
        rng.standard_normal(dtype=np.float32, out=weight.data)
        weight.data[...] *= np.sqrt(2 / weight.data[0].size) * (1 / 80 if name == "conv1" else 1)
        bias.data[...] = rng.normal(0, 0.1, bias.data.shape)
    return net


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Array]:
    """The file of an image that is neither square nor of the net's size, and its pixels (300, 360,
    3), RGB.
    """
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (6, 7, 3)).astype(np.float32)
    pixels = cv2.resize(coarse, (360, 300), interpolation=cv2.INTER_CUBIC) + rng.normal(
        0, 6, (300, 360, 3)
    )
    rgb = pixels.clip(0, 255).round().astype(np.uint8)
    path = str(tmp_path_factory.mktemp("photo") / "photo.png")
    cv2.imwrite(path, rgb[..., ::-1])
    return path, rgb


@pytest.fixture(scope="module")
def mean_image() -> Array:
    """A mean of images (3, 256, 256), BGR."""
    y, x = np.mgrid[:256, :256] / 255
    return np.stack([104 + 9 * y - 5 * x, 117 - 8 * y * x, 123 + 6 * np.sin(3 * x)])


def transformer_of(mean: Array) -> "caffe.io.Transformer":
    transformer = caffe.io.Transformer({"data": (10, 3, SIZE, SIZE)})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_mean("data", mean)
    transformer.set_raw_scale("data", 255)
    transformer.set_channel_swap("data", (2, 1, 0))
    return transformer


# what the transformer should give, computed otherwise


def resized_by_sums(image: Array, size: int) -> Array:
    """Pixels are as wide as the image has room for them; linear between their middles, 0 outside;
    float64.
    """
    height, width, _ = image.shape
    framed = np.pad(image.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    y, x = (
        (np.arange(size) + 0.5) * (height / size) - 0.5,
        (np.arange(size) + 0.5) * (width / size) - 0.5,
    )
    top, left = np.floor(y), np.floor(x)
    values = np.zeros((size, size, image.shape[2]))
    for i, j in np.ndindex(2, 2):
        pixels = framed[top.astype(int) + 1 + i][:, left.astype(int) + 1 + j]
        values += (
            pixels * np.abs(1 - i - (y - top))[:, None, None] * np.abs(1 - j - (x - left))[:, None]
        )
    return values


def resized_by_skimage(image: Array, size: int) -> Array:
    transform = pytest.importorskip("skimage.transform")
    resized: Array = transform.resize(
        image.astype(np.float64), (size, size), order=1, mode="constant", anti_aliasing=False
    )
    return resized


RESIZERS = {"sums": resized_by_sums, "scikit-image": resized_by_skimage}


def resized(image: Array, by: str) -> Array:
    """As Caffe resizes, float32: what lies between least and greatest value is brought to 0 .. 1
    for it, and back.
    """
    low, high = image.min(), image.max()
    values: Array = RESIZERS[by]((image - low) / (high - low), SIZE) * (high - low) + low
    return values.astype(np.float32)


def resized_mean(mean: Array, by: str) -> Array:
    """As Caffe resizes a mean image (C, H, W), between its least and greatest value."""
    low, high = mean.min(), mean.max()
    return (
        resized(((mean - low) / (high - low)).transpose(1, 2, 0), by).transpose(2, 0, 1)
        * (high - low)
        + low
    )


@pytest.mark.parametrize("by", RESIZERS)
@pytest.mark.parametrize("kind", ["numbers", "image"])
def test_an_image_is_prepared_to_the_last_bit(
    photo: tuple[str, Array], mean_image: Array, kind: str, by: str, tmp_path: Path
) -> None:
    path, pixels = photo
    np.save(tmp_path / "mean.npy", mean_image)
    mean = np.load(tmp_path / "mean.npy")
    if kind == "numbers":
        mean = mean.mean(1).mean(1)
    subtracted = mean[:, None, None] if kind == "numbers" else resized_mean(mean, by)
    image = caffe.io.load_image(path)
    assert image.dtype == np.float32
    np.testing.assert_array_equal(image, (pixels / 255).astype(np.float32))

    before = image.copy()
    prepared = transformer_of(mean).preprocess("data", image)
    np.testing.assert_array_equal(image, before)

    assert prepared.dtype == np.float32
    bgr = resized(image, by)[..., ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(prepared, (bgr * np.float32(255) - subtracted).astype(np.float32))


def test_scikit_image_reads_the_same_pixels(photo: tuple[str, Array]) -> None:
    skimage = pytest.importorskip("skimage")
    io = pytest.importorskip("skimage.io")
    theirs = skimage.img_as_float(io.imread(photo[0])).astype(np.float32)
    np.testing.assert_array_equal(caffe.io.load_image(photo[0]), theirs)


def test_the_mean_may_be_a_binaryproto(mean_image: Array, tmp_path: Path) -> None:
    blob = caffe.io.array_to_blobproto(mean_image[np.newaxis].astype(np.float32))
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    read = caffe.proto.caffe_pb2.BlobProto()
    read.ParseFromString((tmp_path / "mean.binaryproto").read_bytes())
    array = caffe.io.blobproto_to_array(read)
    assert array.shape == (1, 3, 256, 256)
    np.testing.assert_array_equal(array[0], mean_image.astype(np.float32))
    mean = array[0].mean(1).mean(1)
    image = np.random.default_rng(5).random((SIZE, SIZE, 3)).astype(np.float32)
    prepared = transformer_of(mean).preprocess("data", image)
    scaled = image.transpose(2, 0, 1)[::-1] * np.float32(255)
    np.testing.assert_array_equal(prepared, (scaled - mean[:, None, None]).astype(np.float32))
    back = transformer_of(mean).deprocess("data", prepared)
    np.testing.assert_allclose(back, image, rtol=0, atol=1e-6)


# what the net should give, computed otherwise: one image (C, H, W)


def convolution(
    x: Array, weight: Array, bias: Array, stride: int = 1, pad: int = 0, group: int = 1
) -> Array:
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    k = weight.shape[2]
    parts = [
        np.tensordot(
            filters,
            sliding_window_view(part, (k, k), (1, 2))[:, ::stride, ::stride],
            ((1, 2, 3), (0, 3, 4)),
        )
        for part, filters in zip(np.split(padded, group), np.split(weight, group), strict=True)
    ]
    return np.concatenate(parts) + bias[:, None, None]


def pooling(x: Array) -> Array:
    return sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2].max((3, 4))


def lrn(x: Array) -> Array:
    squares = np.pad(x**2, ((2, 2), (0, 0), (0, 0)))
    return x / (1 + 1e-4 / 5 * sum(squares[i : i + len(x)] for i in range(5))) ** 0.75


def caffenet_by_hand(image: Array, params: dict[str, Any]) -> dict[str, Array]:
    """Blobs of CaffeNet, as Krizhevsky's net of 2012 but with pooling before normalization."""
    p = {name: [blob.data for blob in blobs] for name, blobs in params.items()}
    blobs = {}
    x = image
    for i, options in enumerate(
        [
            {"stride": 4},
            {"pad": 2, "group": 2},
            {"pad": 1},
            {"pad": 1, "group": 2},
            {"pad": 1, "group": 2},
        ],
        1,
    ):
        x = blobs[f"conv{i}"] = np.maximum(0, convolution(x, *p[f"conv{i}"], **options))
        if i in (1, 2, 5):
            x = blobs[f"pool{i}"] = pooling(x)
        if i in (1, 2):
            x = blobs[f"norm{i}"] = lrn(x)
    x = x.ravel()
    for name in ("fc6", "fc7", "fc8"):
        x = p[name][0] @ x + p[name][1]
        x = blobs[name] = x if name == "fc8" else np.maximum(0, x)
    shares = np.exp(x - x.max())
    blobs["prob"] = shares / shares.sum()
    return blobs


SHAPES = {
    "data": (3, 227, 227),
    "conv1": (96, 55, 55),
    "pool1": (96, 27, 27),
    "norm1": (96, 27, 27),
    "conv2": (256, 27, 27),
    "pool2": (256, 13, 13),
    "norm2": (256, 13, 13),
    "conv3": (384, 13, 13),
    "conv4": (384, 13, 13),
    "conv5": (256, 13, 13),
    "pool5": (256, 6, 6),
    "fc6": (4096,),
    "fc7": (4096,),
    "fc8": (1000,),
    "prob": (1000,),
}
FILTERS = {
    "conv1": (96, 3, 11, 11),
    "conv2": (256, 48, 5, 5),
    "conv3": (384, 256, 3, 3),
    "conv4": (384, 192, 3, 3),
    "conv5": (256, 192, 3, 3),
    "fc6": (4096, 9216),
    "fc7": (4096, 4096),
    "fc8": (1000, 4096),
}


def test_an_image_is_classified(
    caffenet: "caffe.Net", photo: tuple[str, Array], mean_image: Array
) -> None:
    mu = mean_image.mean(1).mean(1)
    transformer = transformer_of(mu)
    image = transformer.preprocess("data", caffe.io.load_image(photo[0]))
    caffenet.blobs["data"].reshape(50, 3, SIZE, SIZE)
    caffenet.blobs["data"].data[...] = image
    output = caffenet.forward()

    assert list(output) == ["prob"]
    assert {name: blob.data.shape for name, blob in caffenet.blobs.items()} == {
        name: (50, *shape) for name, shape in SHAPES.items()
    }
    assert list(caffenet.blobs) == list(SHAPES)
    assert {name: tuple(p[0].data.shape) for name, p in caffenet.params.items()} == FILTERS
    assert all(p[1].data.shape == FILTERS[name][:1] for name, p in caffenet.params.items())

    expected = caffenet_by_hand(image, caffenet.params)
    for name, values in expected.items():
        for place in (0, 49):
            np.testing.assert_allclose(
                caffenet.blobs[name].data[place],
                values,
                rtol=0,
                atol=2e-5 * np.abs(values).max(),
                err_msg=name,
            )
    probabilities = output["prob"][0]
    assert 2 / CLASSES < probabilities.max() < 0.9  # neither all the same nor all in one
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    labels = np.array([f"n{i:08d} thing {i}" for i in range(CLASSES)])
    top = probabilities.argsort()[::-1][:5]
    assert list(labels[top]) == list(labels[np.argsort(-expected["prob"], kind="stable")[:5]])

    timer = caffe.Timer()
    caffenet.blobs["data"].reshape(1, 3, SIZE, SIZE)
    caffenet.blobs["data"].data[...] = image
    timer.start()
    caffenet.forward()
    timer.stop()
    assert timer.ms > 0
    np.testing.assert_allclose(caffenet.blobs["prob"].data[0], expected["prob"], rtol=0, atol=1e-5)
    shown = transformer.deprocess("data", caffenet.blobs["data"].data[0])
    np.testing.assert_allclose(
        shown, caffe.io.resize_image(caffe.io.load_image(photo[0]), (SIZE, SIZE)), atol=1e-6
    )


def squares(data: Array) -> Array:
    """Pictures (N, H, W) or (N, H, W, 3) as one, in rows and columns with white lines between them."""
    values = (data - data.min()) / (data.max() - data.min())
    side = int(np.ceil(np.sqrt(len(values))))
    _, height, width, *colours = values.shape
    sheet = np.ones((side * (height + 1), side * (width + 1), *colours))
    for i, picture in enumerate(values):
        y, x = i // side * (height + 1), i % side * (width + 1)
        sheet[y : y + height, x : x + width] = picture
    return sheet


def test_filters_and_features_are_shown(
    caffenet: "caffe.Net", photo: tuple[str, Array], mean_image: Array
) -> None:
    plt = pytest.importorskip("matplotlib.figure")
    mean = mean_image.mean(1).mean(1)
    image = transformer_of(mean).preprocess("data", caffe.io.load_image(photo[0]))
    caffenet.blobs["data"].reshape(1, 3, SIZE, SIZE)
    pooled = caffenet.forward(blobs=["conv1"], end="pool5", data=image[np.newaxis])
    assert set(pooled) == {"conv1", "pool5"}
    filters = caffenet.params["conv1"][0].data
    sheet = squares(filters.transpose(0, 2, 3, 1))
    assert sheet.shape == (120, 120, 3)
    np.testing.assert_allclose(
        sheet[12:23, 24:35, 0],
        (filters[12, 0] - filters.min()) / (filters.max() - filters.min()),
        atol=1e-6,
    )
    features = squares(caffenet.blobs["conv1"].data[0, :36])
    assert features.shape == (336, 336)
    row, column = np.unravel_index(features[:55, :55].argmax(), (55, 55))
    y, x = 4 * row, 4 * column
    seen = image[:, y : y + 11, x : x + 11]
    assert caffenet.blobs["conv1"].data[0, 0, row, column] == pytest.approx(
        (seen * filters[0]).sum() + caffenet.params["conv1"][1].data[0], rel=1e-4
    )
    figure = plt.Figure()
    axes = figure.subplots(2, 2)
    axes[0, 0].imshow(sheet)
    axes[0, 1].imshow(features, cmap="gray")
    axes[1, 0].imshow(squares(pooled["pool5"][0]))
    caffenet.forward(start="fc6")
    fc6 = caffenet.blobs["fc6"].data[0]
    axes[1, 1].plot(fc6.flat)
    counts, _, _ = axes[1, 1].hist(fc6.flat[fc6.flat > 0], bins=100)
    assert counts.sum() == (fc6 > 0).sum()


def test_the_classifier_does_it_all(photo: tuple[str, Array], tmp_path: Path) -> None:
    """caffe.Classifier, on a small net so that ten crops cost nothing."""
    n = caffe.NetSpec()
    n.data = caffe.layers.Input(shape={"dim": [4, 3, 8, 8]})
    n.score = caffe.layers.InnerProduct(n.data, num_output=5, weight_filler={"type": "xavier"})
    n.prob = caffe.layers.Softmax(n.score)
    (tmp_path / "small.prototxt").write_text(str(n.to_proto()))
    caffe.set_random_seed(3)
    made = caffe.Net(str(tmp_path / "small.prototxt"), caffe.TEST)
    made.params["score"][0].data[...] /= 100
    made.save(str(tmp_path / "small.caffemodel"))
    mean = np.array([100.0, 110, 120])
    classifier = caffe.Classifier(
        str(tmp_path / "small.prototxt"),
        str(tmp_path / "small.caffemodel"),
        mean=mean,
        channel_swap=(2, 1, 0),
        raw_scale=255,
        image_dims=(12, 10),
    )
    image = caffe.io.load_image(photo[0])
    small = caffe.io.resize_image(image, (12, 10))
    weight, bias = (p.data for p in made.params["score"])

    def by_hand(crop: Array) -> Array:
        shares = np.exp(weight @ (255 * crop[..., ::-1] - mean).transpose(2, 0, 1).ravel() + bias)
        return shares / shares.sum()

    centre = classifier.predict([image, image[:, ::-1]], oversample=False)
    assert centre.shape == (2, 5)
    np.testing.assert_allclose(centre[0], by_hand(small[2:10, 1:9]), rtol=1e-4)
    crops = [small[y : y + 8, x : x + 8] for y, x in [(0, 0), (0, 2), (4, 0), (4, 2), (2, 1)]]
    over = np.mean([by_hand(c) for crop in crops for c in (crop, crop[:, ::-1])], axis=0)
    np.testing.assert_allclose(classifier.predict([image])[0], over, rtol=1e-4)
