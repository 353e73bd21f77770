"""Caffemodels that NVCaffe wrote, and older ones of Caffe, loaded into nets of today."""

from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.net import weights
from caffepy.proto.caffe_pb2 import (
    DOUBLE,
    FLOAT,
    FLOAT16,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    V1LayerParameter,
)
from tests.net.nets import net_of

DATA = (
    'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 2 dim: '
    "2 } } } "
)
NORM = 'layer { name: "bn" type: "BatchNorm" bottom: "x" top: "bn" %s } '
SCALE = 'layer { name: "s" type: "Scale" bottom: "%s" top: "%s" scale_param { bias_term: true } } '
SPLIT = NORM % "" + SCALE % ("bn", "y")
IN_PLACE = NORM.replace('top: "bn"', 'top: "x"') % "" + SCALE % ("x", "x")
WHOLE = NORM % "batch_norm_param { scale_bias: true }"

MEAN, VARIANCE, FACTOR, SHIFT = ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [1.0], [7.0, 8.0, 9.0])
GAIN = [0.5, 0.25, 2.0]
NV = [MEAN, VARIANCE, FACTOR, GAIN, SHIFT]
DIGITS = [GAIN, SHIFT, MEAN, VARIANCE, [0.0]]


def raw(
    values: list[float], kind: int, dtype: str, shape: tuple[int, ...] | None = None
) -> BlobProto:
    """A blob as NVCaffe stores it."""
    shape = BlobShape(dim=shape or [len(values)])
    return BlobProto(shape=shape, raw_data_type=kind, raw_data=np.array(values, dtype).tobytes())


KINDS = {"float": (FLOAT, "<f4"), "double": (DOUBLE, "<f8"), "half": (FLOAT16, "<f2")}


def write(path: Path, *layers: LayerParameter) -> str:
    path.write_bytes(NetParameter(name="n", layer=layers).SerializeToString())
    return str(path)


def norm(blobs: list[BlobProto], name: str = "bn") -> LayerParameter:
    return LayerParameter(name=name, type="BatchNorm", blobs=blobs)


def loaded(text: str, path: str) -> list[Array]:
    """The parameters of a net of this text after loading."""
    net = net_of(DATA + text)
    weights.load_weights(net, path)
    return [blob.data for blob in net.params]


def check(found: list[Array], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for array, values in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [SPLIT, IN_PLACE, WHOLE], ids=["split", "in place", "whole"])
@pytest.mark.parametrize("stored", [NV, DIGITS], ids=["nvcaffe", "digits"])
def test_five_blobs(kind: str, text: str, stored: list[list[float]], tmp_path: Path) -> None:
    check(loaded(text, write(tmp_path / "w", norm([raw(b, *KINDS[kind]) for b in stored]))), NV)


def test_four_axes_and_another_factor_do_not_matter(tmp_path: Path) -> None:
    blobs = [raw(b, FLOAT, "<f4", (1, len(b), 1, 1)) for b in (MEAN, VARIANCE, [0.0], GAIN, SHIFT)]
    check(loaded(SPLIT, write(tmp_path / "w", norm(blobs))), NV)


@pytest.mark.parametrize("factor", [1.0, 999.0])
def test_three_blobs_are_taken_as_they_are(factor: float, tmp_path: Path) -> None:
    blobs = [raw(b, FLOAT, "<f4") for b in (MEAN, VARIANCE, [factor])]
    check(loaded(NORM % "", write(tmp_path / "w", norm(blobs))), [MEAN, VARIANCE, [factor]])


def test_a_loaded_net_computes_what_nvcaffe_did(tmp_path: Path) -> None:
    path = write(tmp_path / "w", norm([raw(b, FLOAT, "<f4") for b in NV]))
    net = net_of(DATA + SPLIT + " state { phase: TEST }")
    weights.load_weights(net, path)
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 2)).astype(np.float32)
    net.blobs["x"].data[...] = x
    net.forward()
    mean, variance, gain, shift = (np.reshape(v, (3, 1, 1)) for v in (MEAN, VARIANCE, GAIN, SHIFT))
    expected = (x - mean) / np.sqrt(variance + 1e-5) * gain + shift
    np.testing.assert_allclose(net.blobs["y"].data, expected, rtol=1e-5)


RELU = 'layer { name: "r" type: "ReLU" bottom: "bn" top: "r" } '
HOMELESS = {
    "no scale": NORM % "",
    "something between": NORM % "" + RELU + SCALE % ("r", "s"),
    "no bias": NORM % "" + 'layer { name: "s" type: "Scale" bottom: "bn" top: "s" }',
    "two consumers": NORM % "" + SCALE % ("bn", "y") + RELU,
}


@pytest.mark.parametrize("case", HOMELESS)
def test_scale_and_bias_without_a_place(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w", norm([raw(b, FLOAT, "<f4") for b in NV]))
    with pytest.raises(
        ConfigError,
        match=r"w: layer bn is a BatchNorm of NVCaffe .* Scale layer with bias_term: true",
    ):
        loaded(HOMELESS[case], path)


def test_a_scale_that_the_file_fills_is_not_overwritten(tmp_path: Path) -> None:
    scale = LayerParameter(
        name="s", type="Scale", blobs=[raw(b, FLOAT, "<f4") for b in (GAIN, SHIFT)]
    )
    path = write(tmp_path / "w", norm([raw(b, FLOAT, "<f4") for b in NV]), scale)
    with pytest.raises(ConfigError, match="of a name that the file has no weights for"):
        loaded(SPLIT, path)


def test_layers_that_the_net_lacks_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "w", norm([raw(b, FLOAT, "<f4") for b in NV], name="other"))
    check(loaded(SPLIT, path), [[0] * 3, [0] * 3, [0], [1] * 3, [0] * 3])


def test_a_layer_of_another_type_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w", norm([raw(b, FLOAT, "<f4") for b in NV], name="s"))
    with pytest.raises(
        ConfigError, match="Incompatible number of blobs for layer s: 5 in the file, 2 in the net"
    ):
        loaded(SPLIT, path)


def test_channels_that_differ_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w",
        norm([raw(b, FLOAT, "<f4") for b in (GAIN[:2], SHIFT[:2], MEAN[:2], NV[1][:2], [1])]),
    )
    with pytest.raises(
        ConfigError, match=r"Cannot copy param 0 weights from layer 'bn'; shape mismatch"
    ):
        loaded(SPLIT, path)


LINES = """
layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 2 kernel_size: 2 } }
layer { name: "p" type: "InnerProduct" bottom: "c" top: "p" inner_product_param { num_output: 4 } }
"""


def legacy(*shape: int, start: float = 0) -> BlobProto:
    num, channels, height, width = shape
    values = np.arange(np.prod(shape), dtype=np.float32) + start
    return BlobProto(num=num, channels=channels, height=height, width=width, data=values.tolist())


def test_v1_caffemodel_with_blobs_of_four_axes(tmp_path: Path) -> None:
    source = NetParameter(
        name="old",
        layers=[
            V1LayerParameter(
                name="c",
                type=V1LayerParameter.CONVOLUTION,
                blobs=[legacy(2, 3, 2, 2), legacy(1, 1, 1, 2, start=9)],
            ),
            V1LayerParameter(
                name="p",
                type=V1LayerParameter.INNER_PRODUCT,
                blobs=[legacy(1, 1, 4, 2), legacy(1, 1, 1, 4, start=5)],
            ),
        ],
    )
    source.layers[0].convolution_param.num_output = 2
    source.layers[0].blobs_lr.extend([1, 2])
    path = tmp_path / "old.caffemodel"
    path.write_bytes(source.SerializeToString())
    w, b, v, d = loaded(LINES, str(path))
    np.testing.assert_array_equal(w, np.arange(24).reshape(2, 3, 2, 2))
    np.testing.assert_array_equal(b, [9, 10])
    np.testing.assert_array_equal(v, np.arange(8).reshape(4, 2))
    np.testing.assert_array_equal(d, [5, 6, 7, 8])


def test_legacy_shapes_must_agree_from_the_right(tmp_path: Path) -> None:
    source = NetParameter(layers=[V1LayerParameter(name="p", type=V1LayerParameter.INNER_PRODUCT)])
    source.layers[0].blobs.extend([legacy(1, 4, 2, 1), legacy(1, 1, 1, 4)])
    path = tmp_path / "old.caffemodel"
    path.write_bytes(source.SerializeToString())
    with pytest.raises(
        ConfigError, match=r"Source param shape is 1 4 2 1 \(8\); target param shape is 4 2 \(8\)"
    ):
        loaded(LINES, str(path))
