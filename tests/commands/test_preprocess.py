import logging
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.commands.preprocess import (
    Preparation,
    load,
    names_in,
    read_array,
    read_mean,
)
from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import BlobProto

SHAPE = 1, 3, 2, 2


def prepared(
    preparation: Preparation, image: np.ndarray, shape: tuple[int, ...] = SHAPE
) -> np.ndarray:
    return preparation.transformer("data", shape).preprocess("data", image)


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).random((2, 2, 3)).astype(np.float32)


def test_images_become_what_caffes_nets_take(image: np.ndarray) -> None:
    bgr = image.transpose(2, 0, 1)[::-1]
    np.testing.assert_allclose(prepared(Preparation(), image), bgr * 255, rtol=1e-6)
    given = Preparation(mean_values=(10, 20, 30), input_scale=0.5, raw_scale=100.0)
    means = np.array([10, 20, 30])[:, None, None]
    np.testing.assert_allclose(prepared(given, image), (bgr * 100 - means) * 0.5, rtol=1e-5)
    np.testing.assert_allclose(
        prepared(Preparation(channel_swap=(0, 1, 2)), image), bgr[::-1] * 255, rtol=1e-6
    )
    one = Preparation(mean_values=(50,), input_scale=0.01)
    np.testing.assert_allclose(prepared(one, image), (bgr * 255 - 50) * 0.01, rtol=1e-4, atol=1e-6)
    grey = Preparation(raw_scale=None)
    np.testing.assert_array_equal(prepared(grey, image[..., :1], (1, 1, 2, 2))[0], image[..., 0])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("npy", "mean.npy"),
        ("new", "mean.binaryproto"),
        ("legacy", "mean.binaryproto"),
        ("legacy", "mean.npy"),
    ],
)
def test_means(kind: str, name: str, image: np.ndarray, tmp_path: Path) -> None:
    mean = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    path = str(tmp_path / name)
    if kind == "npy":
        np.save(path, mean)
    else:
        blob = BlobProto(data=mean.ravel().tolist())
        if kind == "legacy":
            blob.num, blob.channels, blob.height, blob.width = 1, 3, 2, 2
        else:
            blob.shape.dim.extend(mean.shape)
        Path(path).write_bytes(blob.SerializeToString())
    np.testing.assert_array_equal(read_mean(path), mean)
    bgr = image.transpose(2, 0, 1)[::-1] * 255
    np.testing.assert_allclose(prepared(Preparation(mean_file=path), image), bgr - mean, rtol=1e-5)
    by_channel = Preparation(mean_file=path).transformer("data", SHAPE, by_channel=True)
    means = mean.mean((1, 2))[:, None, None]
    np.testing.assert_allclose(by_channel.preprocess("data", image), bgr - means, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Preparation(mean_values=(1, 2)), "Mean channels incompatible with input: 2 for 3"),
        (Preparation(channel_swap=(0, 1)), "Channel swap needs to name the 3 channels"),
        (Preparation(channel_swap=(0, 1, 5)), "Channel swap 0,1,5 does not name each channel once"),
    ],
)
def test_what_does_not_fit(given: Preparation, message: str) -> None:
    with pytest.raises(
        ConfigError, match=f'images do not fit input "data" of 1 3 2 2 .12.: {message}'
    ):
        given.transformer("data", SHAPE)


@pytest.mark.parametrize(
    "damaged",
    [b"(3, 8, 8 ", b"(3, 8,-8)", b"(9999999999999999999,)", b"('3', 8,)", b"(None, 8,)"],
    ids=["open", "negative", "huge", "text", "none"],
)
@pytest.mark.parametrize("read", [read_array, read_mean])
def test_the_head_of_an_array_is_damaged(
    read: Callable[[str], Array], damaged: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 8, 8)))
    head, shape = 128, b"(3, 8, 8)"
    content = path.read_bytes()
    path.write_bytes(content[:head].replace(shape, damaged)[:head].ljust(head) + content[head:])
    with pytest.raises(DataError, match=r"x\.npy: not an array that can be read"):
        read(str(path))


@pytest.mark.parametrize("name", ["'descr'", "'fortran_order'"])
def test_a_key_of_an_array_is_damaged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 8, 8)))
    path.write_bytes(path.read_bytes().replace(name.encode(), b"1".ljust(len(name))))
    with pytest.raises(DataError, match=r"x\.npy: not an array that can be read"):
        read_array(str(path))


def test_files_that_are_no_means_or_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"no array")
    for read in (read_array, read_mean):
        with pytest.raises(DataError, match=r'x.npy" looks like text, not a numpy array$'):
            read(str(path))
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"x.npy: not an array that can be read"):
        read_array(str(path))
    np.save(path, np.array(["text"]))
    with pytest.raises(DataError, match="not an array of numbers"):
        read_array(str(path))
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"a mean is \(C, H, W\) or \(C,\), not 2 2"):
        read_mean(str(path))
    two = tmp_path / "two.binaryproto"
    two.write_bytes(binary.array_to_blob(np.zeros((2, 3, 4, 5))).SerializeToString())
    with pytest.raises(
        DataError, match=r"two.binaryproto: a mean is \(C, H, W\) or \(C,\), not 2 3 4 5"
    ):
        read_mean(str(two))
    for name in ("no.npy", "no.binaryproto"):
        with pytest.raises(DataError, match=rf"{name}.*[Nn]o such file"):
            read_mean(str(tmp_path / name))


def test_images_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "c.txt", "d.jpeg"):
        (tmp_path / name).write_text("")
    assert names_in(str(tmp_path), ["jpg", ".png"]) == [
        str(tmp_path / "a.jpg"),
        str(tmp_path / "b.PNG"),
    ]
    with pytest.raises(DataError, match=r"no files \*.bmp, \*.tif are in this folder"):
        names_in(str(tmp_path), ["bmp", "tif"])
    with pytest.raises(DataError, match="no such file or directory"):
        names_in(str(tmp_path / "no"), ["jpg"])


def test_image_files(tmp_path: Path) -> None:
    path = str(tmp_path / "x.png")
    cv2.imwrite(path, np.array([[[255, 0, 0]]], np.uint8))
    assert load(path, 3).tolist() == [[[0, 0, 1]]], "RGB"
    assert load(path, 1).shape == (1, 1, 1)
    with pytest.raises(DataError, match="an image file has no 4 channels"):
        load(path, 4)


@pytest.mark.parametrize(
    ("preparation", "missing"),
    [
        (Preparation(), "--mean-values 104,117.5 --input-scale 0.017"),
        (Preparation(mean_values=(104, 117.5)), "--input-scale 0.017"),
        (Preparation(mean_file="mean.npy", input_scale=0.017), ""),
        (Preparation(raw_scale=1.0), "--mean-values 104,117.5"),
    ],
)
@pytest.mark.parametrize("name", ["train_val.prototxt", "train.prototxt"])
def test_a_mean_and_a_scale_of_the_training_net_are_missed(
    preparation: Preparation,
    missing: str,
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    deploy, training = str(tmp_path / "deploy.prototxt"), tmp_path / name
    preparation.warn_of_missing(deploy)
    training.write_text("layer { type: }")  # says nothing of the deploy net
    preparation.warn_of_missing(deploy)
    assert not caplog.messages
    transform = "transform_param { mean_value: 104 mean_value: 117.5 scale: 0.017 }"
    training.write_text(f'name: "n"\nlayer {{ name: "data" type: "Data" {transform} }}')
    preparation.warn_of_missing(deploy)
    said = f"{training}:2:1: the net was trained on images with this mean or scale: give {missing}"
    assert caplog.messages == ([said] if missing else [])


def test_a_mean_file_of_the_training_net_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = 'layer { name: "d" type: "Data" transform_param { mean_file: "m.binaryproto" } }'
    (tmp_path / "train_val.prototxt").write_text(layer)
    Preparation().warn_of_missing(str(tmp_path / "deploy.prototxt"))
    assert caplog.messages[0].endswith("give --mean-file m.binaryproto")


def test_the_old_format_of_the_training_net_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user asked for another net."""
    layer = 'layers { name: "d" type: DATA data_param { scale: 0.5 } }'
    (tmp_path / "train_val.prototxt").write_text(layer)
    with caplog.at_level(logging.INFO, "caffepy"):
        Preparation().warn_of_missing(str(tmp_path / "deploy.prototxt"))
    (message,) = caplog.messages
    assert message.endswith("give --input-scale 0.5")
