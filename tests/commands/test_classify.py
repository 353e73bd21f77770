"""Classes of the digits' images, held to what the net says of the same images as data."""

import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from caffepy import models
from caffepy.commands.classify import Classification, Classified, Guess, classify, usual_dims
from caffepy.commands.preprocess import Preparation
from caffepy.core.errors import ConfigError, DataError, UsageError
from caffepy.data.datum import decode
from caffepy.data.sources import open_database
from caffepy.net.weights import save_binary
from caffepy.pycaffe import io
from caffepy.pycaffe.classifier import Classifier
from tests.nets import library

MODEL = str(models.path("digits", "deploy"))
DIGITS = Path(__file__).parents[1] / "golden" / "digits"
WEIGHTS = str(DIGITS / "digits_iter_500.caffemodel")
SCALE = Preparation(input_scale=0.00416667)
COUNT = 30

COLOUR = (
    library.inputs("in", **{"in": (10, 3, 6, 6)})
    + library.convolution("conv", "in", 4, 6, filler='type: "gaussian" std: 0.01')
    + library.layer("Softmax", "prob", "conv")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of the test data, named by number and label."""
    path: Path = tmp_path_factory.mktemp("digits")
    source = open_database(str(DIGITS / "digits_test_lmdb"), "LMDB")
    for i, (_, record) in enumerate(source.take(COUNT)):
        image, label, _ = decode(record)
        cv2.imwrite(str(path / f"{i:02d}_{label}.png"), image[0])
    source.close()
    return path


def digits(inputs: list[Any], **more: Any) -> Classification:
    return classify([str(path) for path in inputs], MODEL, [WEIGHTS], preparation=SCALE, **more)


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "scores.npy")
    result = digits([folder], top=3, output=output)
    assert [image.image for image in result.images] == sorted(map(str, folder.iterdir()))
    right = [int(image.image[-5]) == image.guesses[0].number for image in result.images]
    assert sum(right) >= COUNT - 1
    scores = np.load(output)
    assert scores.shape == (COUNT, 10)
    for image, row in zip(result.images, scores, strict=True):
        assert [guess.number for guess in image.guesses] == np.argsort(-row)[:3].tolist()
        assert [guess.score for guess in image.guesses] == np.sort(row)[::-1][:3].tolist()
    larger = str(tmp_path / "larger.npy")
    digits([folder], batch=16, output=larger)
    np.testing.assert_allclose(np.load(larger), scores, rtol=1e-5, atol=1e-7)
    result.check()


def test_arrays_and_files_give_the_same(folder: Path, tmp_path: Path) -> None:
    names = sorted(folder.iterdir())[:4]
    np.save(tmp_path / "x.npy", np.stack([io.load_image(str(name), color=False) for name in names]))
    np.save(tmp_path / "y.npy", io.load_image(str(names[0]), color=False))
    files, arrays = digits(names), digits([tmp_path / "x.npy", tmp_path / "y.npy"])
    assert [image.image for image in arrays.images] == [
        f"{tmp_path}/x.npy[{i}]" for i in range(4)
    ] + [f"{tmp_path}/y.npy"]
    guesses = [image.guesses for image in files.images]
    assert [image.guesses for image in arrays.images] == [*guesses, guesses[0]]
    np.save(tmp_path / "z.npy", np.zeros((2, 8, 8)))
    with pytest.raises(
        DataError, match=r"z.npy: an array \(N, H, W, 1\) or \(H, W, 1\) is needed, not 2 8 8"
    ):
        digits([tmp_path / "z.npy"])


def test_what_is_printed(folder: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"digit {i}\n" for i in range(10)), encoding="utf-8-sig")
    names = sorted(folder.iterdir())[:2]
    result = digits(names, top=2, labels=str(labels))
    head, first, second, third, _ = result.table().splitlines()
    assert head.split() == ["image", "score", "class", "label"]
    best = result.images[0].guesses[0]
    assert first.split() == [
        str(names[0]),
        f"{best.score:.6g}",
        str(best.number),
        "digit",
        str(best.number),
    ]
    assert second.startswith(" ")
    assert third.startswith(str(names[1]))
    told = json.loads(result.json())
    assert told[0]["image"] == str(names[0])
    assert told[0]["predictions"][0] == {
        "class": best.number,
        "label": f"digit {best.number}",
        "score": best.score,
    }
    labels.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"labels.txt: 2 labels, a line each, for the 10 classes"):
        digits(names, labels=str(labels))
    with pytest.raises(ConfigError, match=r"no.txt: cannot be read"):
        digits(names, labels="no.txt")


def test_scores_that_are_not_finite() -> None:
    result = Classification([Classified("a.png", [Guess(3, None, float("nan"))])])
    assert json.loads(result.json())[0]["predictions"] == [
        {"class": 3, "label": None, "score": None}
    ]
    assert result.table().splitlines()[1].split() == ["a.png", "nan", "3"]


def test_json_holds_names_of_any_bytes() -> None:
    result = Classification(
        [Classified(os.fsdecode(b"\xff\xc3\xa9.png"), [Guess(0, "\u732b", 1.0)])]
    )
    assert result.json().isascii()
    told = json.loads(result.json())[0]
    assert os.fsencode(told["image"]) == b"\xff\xc3\xa9.png"
    assert told["predictions"][0]["label"] == "\u732b"


def test_images_that_cannot_be_read_are_named(folder: Path, tmp_path: Path) -> None:
    good = sorted(folder.iterdir())[0]
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    result = digits([bad, good, tmp_path / "absent.png"], output=str(tmp_path / "s.npy"))
    scores = np.load(tmp_path / "s.npy")
    assert np.isnan(scores).all(1).tolist() == [True, False, True]
    lines = result.table().splitlines()
    assert lines[1].split() == [str(bad), "-", "-", "unreadable"]
    assert "absent.png: cannot be read" in json.loads(result.json())[2]["error"]
    with pytest.raises(
        DataError, match=r"bad.png: not an image that can be decoded .* \(and 1 more of 3 images\)"
    ):
        result.check()


@pytest.fixture
def colour(tmp_path: Path) -> tuple[str, str]:
    """A net for images of 3 x 6 x 6 and its weights."""
    model, weights = tmp_path / "colour.prototxt", tmp_path / "colour.caffemodel"
    model.write_text(COLOUR)
    save_binary(Classifier(model, None)._net, str(weights))
    return str(model), str(weights)


@pytest.mark.parametrize("oversample", [True, False, None])
def test_colour_images_as_pycaffe_classifies_them(
    oversample: bool | None, colour: tuple[str, str], tmp_path: Path
) -> None:
    model, weights = colour
    random = np.random.default_rng(1)
    names = []
    for i, size in enumerate([(9, 7), (6, 6), (20, 11)]):
        names.append(str(tmp_path / f"{i}.png"))
        cv2.imwrite(names[-1], random.integers(0, 256, (*size, 3), np.uint8))
    output = str(tmp_path / "s.npy")
    preparation = Preparation(mean_values=(100, 110, 120))
    more = {
        "oversample": oversample,
        "images_dim": (8, 9),
        "output": output,
        "preparation": preparation,
    }
    classify(names, model, [weights], **more)  # type: ignore[arg-type]
    net = Classifier(
        model,
        weights,
        image_dims=(8, 9),
        mean=np.array([100, 110, 120]),
        raw_scale=255,
        channel_swap=(2, 1, 0),
    )
    expected = net.predict([io.load_image(name) for name in names], oversample is not False)
    np.testing.assert_allclose(np.load(output), expected.reshape(3, 4), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"images of 4x9 are smaller than the net.s input of 6x6"):
        classify(names, model, [weights], images_dim=(4, 9))


@pytest.mark.parametrize(
    ("size", "dims"), [(6, (6, 6)), (128, (128, 128)), (129, (256, 256)), (300, (300, 300))]
)
def test_what_images_are_resized_to(size: int, dims: tuple[int, int]) -> None:
    assert usual_dims((size, size)) == dims


def test_nets_and_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.caffemodel"):
        classify([str(folder)], MODEL, [str(tmp_path / "no.caffemodel")])
    with pytest.raises(ConfigError, match="a deploy net"):
        classify([str(folder)], str(models.path("digits", "train_val")), [WEIGHTS])
    with pytest.raises(UsageError, match="cannot write"):
        digits([folder], output=str(tmp_path / "no" / "s.npy"))
    assert not list(tmp_path.iterdir())


def test_layers_without_weights_are_told_of(
    folder: Path, colour: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    classify([str(sorted(folder.iterdir())[0])], MODEL, [WEIGHTS], preparation=SCALE)
    assert not caplog.records
    with pytest.raises(ConfigError) as caught:
        classify([str(sorted(folder.iterdir())[0])], MODEL, [colour[1]])
    told = str(caught.value).partition("colour.caffemodel gives ")[2]
    assert told.startswith('no weights to this net: its layers are "')
    assert told.endswith(' those of the net "conv1", "conv2", "ip1", ...; names must agree')


@pytest.mark.gpu
def test_a_gpu_says_the_same(folder: Path, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("cpu.npy", "gpu.npy")]
    digits([folder], output=paths[0])
    digits([folder], output=paths[1], gpu="0", precision="fp32")
    np.testing.assert_allclose(np.load(paths[1]), np.load(paths[0]), rtol=1e-3, atol=1e-5)


def test_scores_of_places_are_no_classes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(COLOUR.replace("kernel_size: 6", "kernel_size: 5"))
    image = tmp_path / "a.png"
    cv2.imwrite(str(image), np.zeros((6, 6, 3), np.uint8))
    with pytest.raises(ConfigError, match=r'output "prob" .* has scores for each place'):
        classify([str(image)], str(path), [])
    classify([str(image)], str(path), [], output=str(tmp_path / "scores.npy"))
    assert np.load(tmp_path / "scores.npy").shape == (1, 4 * 2 * 2)


def test_a_net_of_boxes_does_not_classify(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        COLOUR + 'layer { name: "r" type: "Reshape" bottom: "prob" top: "rows" '
        "reshape_param { shape { dim: 1 dim: 1 dim: -1 dim: 8 } } }"
    )
    told = r'output "rows" of 1 1 5 8 \(40\) has no scores for each of 10 images; .* caffepy detect'
    with pytest.raises(ConfigError, match=told):
        classify(["a.png"], str(path), [])
