from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from caffepy.device.blob import Array
from tests.nets import library

DEPLOY = (
    library.inputs(data=(4, 3, 8, 6))
    + library.convolution("conv", "data", 2, 3, "stride: 2", filler='type: "gaussian" std: 0.001')
    + library.inner_product("ip", "conv", 5, filler='type: "gaussian"')
    + library.layer("Softmax", "prob", "ip")
)
MEAN = np.array([104.0, 117.0, 123.0])
SETTINGS = {"mean": MEAN, "raw_scale": 255, "channel_swap": (2, 1, 0), "input_scale": 0.5}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A deploy net and its weights."""
    deploy, weights = tmp_path / "deploy.prototxt", tmp_path / "w.caffemodel"
    deploy.write_text(DEPLOY)
    caffe.set_random_seed(4)
    caffe.Net(str(deploy), caffe.TEST).save(weights)
    return str(deploy), str(weights)


def photos(*shapes: tuple[int, int]) -> list[Array]:
    rng = np.random.default_rng(1)
    return [rng.random((*shape, 3)).astype(np.float32) for shape in shapes]


def scores(files: tuple[str, str], crops: list[Array]) -> Array:
    """Return the net's output for crops (H, W, K) of its input size."""
    net = caffe.Net(files[0], caffe.TEST, weights=files[1])
    prepared = [
        (crop.transpose(2, 0, 1)[::-1] * np.float32(255) - MEAN[:, None, None]) * 0.5
        for crop in crops
    ]
    return net.forward_all(None, data=np.array(prepared))["prob"]


def test_the_centre_is_classified(files: tuple[str, str]) -> None:
    classifier = caffe.Classifier(*files, image_dims=(11, 10), **SETTINGS)  # type: ignore[arg-type]
    assert classifier.crop_dims.tolist() == [8, 6]
    images = photos((20, 30), (11, 10), (9, 7), (11, 10), (15, 15))
    found = classifier.predict(images, oversample=False)
    crops = [caffe.io.resize_image(image, (11, 10))[1:9, 2:8] for image in images]
    np.testing.assert_allclose(found, scores(files, crops), rtol=1e-5)


def test_ten_crops_are_averaged(files: tuple[str, str]) -> None:
    classifier = caffe.Classifier(*files, image_dims=np.array([11, 10]), **SETTINGS)  # type: ignore[arg-type]
    images = photos((20, 30), (11, 10))
    crops = caffe.io.oversample(
        [caffe.io.resize_image(image, (11, 10)) for image in images], (8, 6)
    )
    found = classifier.predict(images)
    assert found.shape == (2, 5)
    np.testing.assert_allclose(
        found, scores(files, list(crops)).reshape(2, 10, 5).mean(1), rtol=1e-5
    )


def test_without_dimensions_images_take_the_nets_size(files: tuple[str, str]) -> None:
    classifier = caffe.Classifier(*files)
    assert list(classifier.image_dims) == [8, 6]
    assert classifier.predict(photos((5, 5))).shape == (1, 5)
    assert caffe.Classifier(files[0], None).predict(photos((5, 5))).shape == (1, 5)
    with pytest.raises(ValueError, match="crop of 8x6 cannot be taken from images of"):
        caffe.Classifier(*files, image_dims=(7, 6)).predict(photos((5, 5)), oversample=False)


def test_nets_that_take_no_images_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    for text, message in {
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }': r"x of Blob\(2 3 \(6\)\)",
        'layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 } } }': "one has no inputs",
    }.items():
        file.write_text(text)
        with pytest.raises(
            RuntimeError, match=rf"net\.prototxt: a net with an input of shape .* {message}"
        ):
            caffe.Classifier(str(file), None)
