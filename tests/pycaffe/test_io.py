import builtins
import io as python_io
import sys
import types
from pathlib import Path

import cv2
import numpy as np
import pytest

import caffepy as caffe
from caffepy.core.errors import CaffeError, DataError
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2

RNG = np.random.default_rng(0)


def test_a_blob_goes_there_and_back() -> None:
    values, diffs = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 3, 4))
    blob = caffe.io.array_to_blobproto(values.astype(np.float32), diffs)
    assert list(blob.shape.dim) == [2, 3, 4]
    array = caffe.io.blobproto_to_array(blob)
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, values.astype(np.float32))
    np.testing.assert_array_equal(
        caffe.io.blobproto_to_array(blob, return_diff=True), diffs.astype(np.float32)
    )


def test_old_fields_of_a_blob_mean_four_axes() -> None:
    blob = caffe_pb2.BlobProto(data=range(6), num=1, channels=2, height=3, width=1)
    blob.shape.dim.extend([6])
    assert caffe.io.blobproto_to_array(blob).shape == (1, 2, 3, 1)
    assert caffe.io.blobproto_to_array(caffe_pb2.BlobProto(double_data=[1.1])).item() == 1.1
    with pytest.raises(ValueError, match="reshape"):
        caffe.io.blobproto_to_array(caffe_pb2.BlobProto(data=range(6)))


def test_lists_of_arrays_in_a_string() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.array(5.0), np.zeros(0)]
    text = caffe.io.arraylist_to_blobprotovector_str(arrays)
    assert isinstance(text, bytes)
    for mine, theirs in zip(caffe.io.blobprotovector_str_to_arraylist(text), arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.shape == theirs.shape


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_datum_goes_there_and_back(dtype: type) -> None:
    image = RNG.integers(0, 256, (3, 4, 5)).astype(dtype)
    datum = caffe.io.array_to_datum(image, label=7)
    assert (datum.channels, datum.height, datum.width, datum.label) == (3, 4, 5, 7)
    assert bool(datum.data) == (dtype is np.uint8)
    back = caffe.io.datum_to_array(datum)
    assert back.dtype == (np.uint8 if dtype is np.uint8 else np.float64)
    np.testing.assert_array_equal(back, image)
    back[0] = 0  # may be written to
    assert not caffe.io.array_to_datum(image).HasField("label")
    with pytest.raises(ValueError, match="Incorrect array shape"):
        caffe.io.array_to_datum(image[0])


def test_an_encoded_datum_is_decoded() -> None:
    image = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    datum = caffe_pb2.Datum(data=cv2.imencode(".png", image)[1].tobytes(), encoded=True)
    np.testing.assert_array_equal(caffe.io.datum_to_array(datum), image.transpose(2, 0, 1))


COLOURED = RNG.integers(0, 256, (6, 5, 3), np.uint8)  # BGR, as OpenCV writes it
FILES = {
    "colour": COLOURED,
    "transparent": np.dstack([COLOURED, COLOURED[..., :1]]),
    "grey": COLOURED[..., 0],
    "deep": COLOURED.astype(np.uint16) * 256 + 7,
    "deep grey": COLOURED[..., 0].astype(np.uint16) * 256 + 7,
}


@pytest.mark.parametrize("name", FILES)
def test_load_image(name: str, tmp_path: Path) -> None:
    pixels = FILES[name]
    file = tmp_path / "i.png"
    cv2.imwrite(str(file), pixels)
    most = 65535 if pixels.dtype == np.uint16 else 255
    shares = np.atleast_3d(pixels)[..., :3].astype(np.float64) / most
    rgb = np.broadcast_to(shares, (6, 5, 3))[..., ::-1]
    image = caffe.io.load_image(file)
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, rgb, rtol=1e-7)
    grey = caffe.io.load_image(str(file), color=False)
    assert grey.shape == (6, 5, 1)
    assert grey.dtype == np.float32
    np.testing.assert_allclose(grey[..., 0], rgb @ [0.2125, 0.7154, 0.0721], rtol=1e-6)
    np.testing.assert_array_equal(caffe.io.load_image(python_io.BytesIO(file.read_bytes())), image)


def test_names_of_images_may_be_bytes(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.full((2, 2, 3), 255, np.uint8))
    assert (caffe.io.load_image(bytes(tmp_path / "a.png")) == 1).all()
    with pytest.raises(ValueError, match=r"an image has axes \(H, W, K\)"):
        caffe.io.resize_image("a.png", (2, 2))  # type: ignore[arg-type]


def test_load_image_names_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg: cannot be read: no such file"):
        caffe.io.load_image(tmp_path / "gone.jpg")
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(DataError, match=r"text\.jpg: not an image"):
        caffe.io.load_image(tmp_path / "text.jpg")
    (tmp_path / "huge.pgm").write_bytes(b"P5 1000000 1000000 255 ")
    with pytest.raises(DataError, match=r"huge\.pgm: its image has more pixels than OpenCV"):
        caffe.io.load_image(tmp_path / "huge.pgm")


def bilinear(image: Array, height: int, width: int) -> Array:
    """Between the corners of the pixels, 0 beyond the edge."""

    def pixel(y: int, x: int) -> Array:
        inside = 0 <= y < image.shape[0] and 0 <= x < image.shape[1]
        return image[y, x] if inside else np.zeros(image.shape[2])

    resized = np.empty((height, width, image.shape[2]))
    for i, j in np.ndindex(height, width):
        y, x = (i + 0.5) * image.shape[0] / height - 0.5, (j + 0.5) * image.shape[1] / width - 0.5
        y0, x0 = int(np.floor(y)), int(np.floor(x))
        for dy, dx in np.ndindex(2, 2):
            weight = (1 - abs(y - y0 - dy)) * (1 - abs(x - x0 - dx))
            resized[i, j] = (0 if dy + dx == 0 else resized[i, j]) + weight * pixel(
                y0 + dy, x0 + dx
            )
    return resized


SIZES = {
    "smaller": (5, 4),
    "larger": (17, 30),
    "turned": (12, 8),
    "the same": (8, 12),
    "a point": (1, 1),
}


@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_resize_image(dims: tuple[int, int], channels: int) -> None:
    image = RNG.uniform(-20, 200, (8, 12, channels)).astype(np.float32)
    resized = caffe.io.resize_image(image, dims)
    assert resized.dtype == np.float32
    low = image.min()
    np.testing.assert_allclose(resized, bilinear(image - low, *dims) + low, rtol=1e-5, atol=1e-4)


def test_resize_image_has_the_bits_of_scipy() -> None:
    """A smooth image has many values that lie halfway between two float32: the order of the sums
    decides them.
    """
    ndimage = pytest.importorskip("scipy.ndimage")
    y, x = np.mgrid[:300, :360]
    image = (np.stack([y + x, 2 * y - x, 3 * x - y], axis=-1) % 256 / 255).astype(np.float32)
    zoomed = ndimage.zoom(
        image.astype(float),
        (227 / 300, 227 / 360, 1),
        order=1,
        mode="grid-constant",
        grid_mode=True,
    )
    np.testing.assert_array_equal(
        caffe.io.resize_image(image, (227, 227)), zoomed.astype(np.float32)
    )


def test_resize_image_of_bytes_and_by_nearest_pixels() -> None:
    image = RNG.integers(0, 256, (8, 12, 3), np.uint8)
    np.testing.assert_allclose(
        caffe.io.resize_image(image, (4, 5)), bilinear(image, 4, 5), atol=1 + image.min()
    )
    nearest = caffe.io.resize_image(image, (4, 6), interp_order=0)
    np.testing.assert_allclose(nearest, image[1::2, 1::2], rtol=1e-6)
    np.testing.assert_array_equal(
        caffe.io.resize_image(np.full((3, 3, 3), 7, np.uint8), (5, 6)), np.full((5, 6, 3), 7)
    )


@pytest.mark.parametrize("dims", [(15, 23), (3, 5)])
def test_resize_image_of_other_numbers_of_channels_keeps_the_corner_pixels(
    dims: tuple[int, int],
) -> None:
    y, x = np.mgrid[:8, :12]
    planes = np.stack([y, x, y + 2 * x, 3 * y - x], axis=-1).astype(np.float32)
    at = np.meshgrid(np.linspace(0, 7, dims[0]), np.linspace(0, 11, dims[1]), indexing="ij")
    expected = np.stack([at[0], at[1], at[0] + 2 * at[1], 3 * at[0] - at[1]], axis=-1)
    resized = caffe.io.resize_image(planes, dims)
    assert resized.dtype == np.float32
    np.testing.assert_allclose(resized, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
@pytest.mark.parametrize("channels", [2, 4])
def test_resize_image_of_whole_numbers_rounds_as_scipy(channels: int, kind: type) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    image = RNG.integers(0, 256, (7, 9, channels)).astype(kind)
    for dims in ((20, 5), (3, 13)):
        zoomed = ndimage.zoom(image, (dims[0] / 7, dims[1] / 9, 1), order=1)
        resized = caffe.io.resize_image(image, dims)
        np.testing.assert_array_equal(resized, zoomed.astype(np.float32))
        assert resized.dtype == np.float32


def test_what_caffes_module_has_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    assert caffe.io.zoom is ndimage.zoom
    fake = types.ModuleType("skimage.transform")
    fake.resize = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "skimage", types.ModuleType("skimage"))
    monkeypatch.setitem(sys.modules, "skimage.transform", fake)
    assert caffe.io.resize is len
    monkeypatch.setitem(sys.modules, "skimage.transform", None)
    with pytest.raises(AttributeError, match="resize is that of scikit-image: pip install"):
        caffe.io.resize  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'resise'"):
        caffe.io.resise  # noqa: B018


def test_resize_image_by_splines() -> None:
    pytest.importorskip("scipy")
    x = np.linspace(0, 1, 40)
    image = np.stack([np.sin(6 * x)[:, None] * np.cos(5 * x)] * 3, axis=-1)
    there = (np.arange(80) + 0.5) / 2 - 0.5
    expected = np.sin(6 * there / 39)[:, None] * np.cos(5 * there / 39)
    linear, cubic = (
        np.abs(
            caffe.io.resize_image(image, (80, 80), order)[10:-10, 10:-10, 0]
            - expected[10:-10, 10:-10]
        ).max()
        for order in (1, 3)
    )
    assert cubic < linear / 2
    assert caffe.io.resize_image(np.dstack([image, image]), (20, 30), 3).shape == (20, 30, 6)


def test_splines_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def no_scipy(name: str, *args: object) -> object:
        if name.startswith("scipy"):
            raise ImportError(name)
        return imported(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_scipy)
    with pytest.raises(CaffeError, match="order 3 needs SciPy: install it"):
        caffe.io.resize_image(RNG.random((4, 4, 3)), (2, 2), interp_order=3)
    with pytest.raises(ValueError, match=r"axes \(H, W, K\)"):
        caffe.io.resize_image(np.zeros((4, 4)), (2, 2))


def test_oversample() -> None:
    images = [RNG.random((9, 8, 2)) for _ in range(2)]
    crops = caffe.io.oversample(images, (4, 3))
    assert crops.shape == (20, 4, 3, 2)
    assert crops.dtype == np.float32
    starts = [(0, 0), (0, 5), (5, 0), (5, 5), (2, 2)]
    for i, (image, (y, x)) in enumerate((image, start) for image in images for start in starts):
        expected = image[y : y + 4, x : x + 3].astype(np.float32)
        first = i // 5 * 10 + i % 5
        np.testing.assert_array_equal(crops[first], expected)
        np.testing.assert_array_equal(crops[first + 5], expected[:, ::-1])
    with pytest.raises(ValueError, match="crops of 10x3 cannot be taken from images of 9x8"):
        caffe.io.oversample(images, (10, 3))


def transformer(size: int = 4) -> caffe.io.Transformer:
    return caffe.io.Transformer({"data": (2, 3, size, size)})


def test_preprocess_does_its_steps_in_order() -> None:
    image = RNG.random((4, 4, 3)).astype(np.float32)
    before = image.copy()
    t = transformer()
    np.testing.assert_array_equal(t.preprocess("data", image), image)
    t.set_transpose("data", (2, 0, 1))
    t.set_channel_swap("data", (2, 1, 0))
    t.set_raw_scale("data", 255)
    mean = np.array([104.0, 117.0, 123.0])
    t.set_mean("data", mean)
    t.set_input_scale("data", 0.017)
    expected = image.transpose(2, 0, 1)[[2, 1, 0]] * np.float32(255)
    expected = (expected - mean[:, None, None]).astype(np.float32) * np.float32(0.017)
    prepared = t.preprocess("data", image)
    assert prepared.dtype == np.float32
    np.testing.assert_array_equal(prepared, expected)  # to the last bit
    np.testing.assert_array_equal(image, before)
    np.testing.assert_allclose(t.deprocess("data", prepared[None]), image, atol=1e-6)


def test_the_callers_array_is_left_alone() -> None:
    t = transformer()
    t.set_raw_scale("data", 2)
    image = np.ones((4, 4, 3), np.float32)
    assert (t.preprocess("data", image) == 2).all()
    assert (image == 1).all()


def test_preprocess_resizes() -> None:
    t = transformer(6)
    image = RNG.random((4, 5, 3)).astype(np.float32)
    np.testing.assert_array_equal(t.preprocess("data", image), caffe.io.resize_image(image, (6, 6)))
    t.set_transpose("data", (2, 0, 1))
    assert t.preprocess("data", image).shape == (3, 6, 6)


def test_a_mean_image_is_resized() -> None:
    t = transformer(6)
    rows = np.linspace(0, 9, 10)
    t.set_mean("data", np.broadcast_to(rows[:, None], (3, 10, 10)).copy())
    assert t.mean["data"].shape == (3, 6, 6)
    np.testing.assert_allclose(
        t.mean["data"][1, :, 2], (np.arange(6) + 0.5) * 10 / 6 - 0.5, atol=1e-6
    )
    t.set_mean("data", np.full((3, 10, 10), 5.0))
    np.testing.assert_allclose(t.mean["data"], np.full((3, 6, 6), 5.0))
    own = RNG.random((3, 6, 6))
    t.set_mean("data", own)
    np.testing.assert_array_equal(t.mean["data"], own)
    t.set_mean("data", [1, 2, 3])
    assert t.mean["data"].shape == (3, 1, 1)
    grey = caffe.io.Transformer({"data": (1, 1, 6, 6)})
    grey.set_mean("data", own[0])
    assert grey.mean["data"].shape == (1, 6, 6)


def test_settings_are_checked() -> None:
    t = transformer()
    for setting in (
        t.preprocess,
        t.deprocess,
        t.set_transpose,
        t.set_mean,
        t.set_raw_scale,
        t.set_input_scale,
    ):
        with pytest.raises(Exception, match="dat is not one of the net inputs: data"):
            setting("dat", np.zeros(3))  # type: ignore[operator]
    with pytest.raises(ValueError, match="Transpose order needs to name the 3 axes"):
        t.set_transpose("data", (1, 0))
    with pytest.raises(ValueError, match="Channel swap needs to name the 3 channels"):
        t.set_channel_swap("data", (1, 0))
    with pytest.raises(ValueError, match="Mean channels incompatible with input"):
        t.set_mean("data", np.zeros(2))
    with pytest.raises(ValueError, match="Mean shape invalid"):
        t.set_mean("data", np.zeros((1, 3, 4, 4)))
