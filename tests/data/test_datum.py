"""Datums: raw, float and encoded, and what is refused."""

import cv2
import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.data.datum import COLOR, GRAY, decode
from caffepy.data.write import array_to_datum
from caffepy.proto.caffe_pb2 import Datum

IMAGE = np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)


def encoded(image, suffix=".png", **fields):
    _, data = cv2.imencode(suffix, image)
    return Datum(data=data.tobytes(), encoded=True, **fields).SerializeToString()


def same(result, image, label, is_encoded=False):
    array, *rest = result
    np.testing.assert_array_equal(array, image)
    return array.dtype == image.dtype and rest == [label, is_encoded]


def test_raw_and_float():
    assert same(decode(array_to_datum(IMAGE, 7).SerializeToString()), IMAGE, 7)
    values = (IMAGE / 7 - 3).astype(np.float32)
    assert same(decode(array_to_datum(values, -2).SerializeToString()), values, -2)


def test_data_wins_over_float_data():
    datum = array_to_datum(IMAGE)
    datum.float_data.append(1)
    assert same(decode(datum.SerializeToString()), IMAGE, 0)


def test_encoded_color_gray_and_native():
    hwc = np.ascontiguousarray(IMAGE.transpose(1, 2, 0))
    assert same(decode(encoded(hwc, label=3)), IMAGE, 3, True)
    assert same(decode(encoded(hwc), COLOR), IMAGE, 0, True)
    gray, _, _ = decode(encoded(hwc), GRAY)
    luminance = np.einsum("chw,c->hw", IMAGE, [0.114, 0.587, 0.299])
    np.testing.assert_allclose(gray[0], luminance, rtol=0, atol=1)  # fractions are cut off
    assert same(decode(encoded(IMAGE[0])), IMAGE[:1], 0, True)
    assert same(decode(encoded(IMAGE[0]), COLOR), np.repeat(IMAGE[:1], 3, 0), 0, True)
    bgra = np.dstack([hwc, hwc[:, :, 0]])
    assert same(decode(encoded(bgra)), bgra.transpose(2, 0, 1), 0, True)


@pytest.mark.parametrize("mode", [COLOR, GRAY])
@pytest.mark.parametrize("share", [0.3, 0.9, 1])
def test_a_jpeg_that_is_cut_short_is_as_from_its_file(share, mode, tmp_path):
    """The end of the file comes when some of its rows are there, or all of them."""
    _, whole = cv2.imencode(
        ".jpg", np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    )
    cut = whole[: int(share * (len(whole) - 2))]
    cut.tofile(tmp_path / "cut.jpg")
    expected = cv2.imread(str(tmp_path / "cut.jpg"), mode)
    record = Datum(data=cut.tobytes(), encoded=True).SerializeToString()
    assert same(decode(record, mode), np.stack(cv2.split(expected)), 0, True)


REFUSED = {
    "not a Datum": (b"\xff\xff\xff", r"not a Datum \(3 bytes\)"),
    "no shape": (b"", r"not a Datum with an image: its shape is 0 0 0 \(0\)"),
    "too few values": (
        Datum(channels=1, height=2, width=3, data=b"12345").SerializeToString(),
        r"a Datum of shape 1 2 3 \(6\) with 5 values",
    ),
    "no values": (Datum(channels=1, height=2, width=3).SerializeToString(), "with 0 values"),
    "encoded, empty": (Datum(encoded=True).SerializeToString(), r"cannot be decoded \(0 bytes\)"),
    "encoded, no image": (
        Datum(encoded=True, data=b"hello").SerializeToString(),
        r"cannot be decoded \(5 bytes\)",
    ),
    "encoded, a JPEG without a row": (
        Datum(encoded=True, data=b"\xff\xd8\xff").SerializeToString(),
        "cannot be decoded",
    ),
    "more pixels than OpenCV takes": (
        Datum(encoded=True, data=b"P5 1000000 1000000 255 ").SerializeToString(),
        "more pixels than OpenCV takes; to read it, set OPENCV_IO_MAX_IMAGE_PIXELS",
    ),
    "16 bits": (encoded(IMAGE[0].astype(np.uint16) * 200), "16 bits a channel; only 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    record, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        decode(record)
