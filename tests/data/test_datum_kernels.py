"""Datums that are copied or found without being parsed: the same images and labels, and nothing
that needs parsing; by numba and by Python.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.data import datum_fields, datum_kernels
from caffepy.data.datum import head_of
from caffepy.data.sources.databases import Records
from caffepy.data.write import array_to_datum
from caffepy.proto.caffe_pb2 import Datum

SHAPE = (3, 4, 5)
IMAGES = np.random.default_rng(0).integers(0, 256, (7, *SHAPE), np.uint8)
WHOLE = array_to_datum(IMAGES[0]).SerializeToString()


@pytest.fixture(params=["numba", "python"], scope="module")
def loops(request):
    return datum_kernels if request.param == "numba" else datum_fields


def copy(loops, records, shape=SHAPE):
    joined = Records.copied([(b"key", record) for record in records], range(len(records)))
    images, labels = np.zeros((len(records), *shape), np.uint8), np.full(len(records), np.nan)
    return (
        loops.copy_images(joined.content, joined.rows, head_of(shape), images, labels),
        images,
        labels,
    )


def datum(image, label):
    result = array_to_datum(image, label or 0)
    if label is None:
        result.ClearField("label")
        result.ClearField("encoded")
    return result.SerializeToString()


def test_images_and_labels(loops):
    labels = [0, 5, 1000, -1, None, 2**31 - 1, -(2**31)]
    done, images, found = copy(
        loops, [datum(image, label) for image, label in zip(IMAGES, labels, strict=True)]
    )
    assert done.all()
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(found, [label or 0 for label in labels])


def test_images_larger_than_a_thread_takes(loops):
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 700, 700), np.uint8)
    done, copied, _ = copy(loops, [datum(image, 1) for image in images], images.shape[1:])
    assert done.all()
    np.testing.assert_array_equal(copied, images)


LEFT = {
    "other shape": array_to_datum(IMAGES[0].reshape(3, 5, 4)).SerializeToString(),
    "cut in the image": WHOLE[:40],
    "shape given twice": WHOLE + Datum(height=9).SerializeToString(),
    "encoded": WHOLE + Datum(encoded=True).SerializeToString(),
    "float data": WHOLE + Datum(float_data=[1]).SerializeToString(),
    "damaged end": WHOLE + b"\xff",
    "a number without an end": WHOLE + b"\x28" + b"\xff" * 20,
    "empty": b"",
}


@pytest.mark.parametrize("case", LEFT)
def test_the_rest_is_left_to_parsing(loops, case):
    done, images, _ = copy(loops, [WHOLE, LEFT[case], WHOLE])
    np.testing.assert_array_equal(done, [True, False, True])
    np.testing.assert_array_equal(images, [IMAGES[0], np.zeros(SHAPE), IMAGES[0]])


def test_joined_records_are_found_again():
    records = [(b"a", b""), (b"bcd", b"12"), (b"e", b"3456")]
    parts = Records.copied(records[:1], [7]), Records.copied(records[1:], [8, 0])
    joined = Records.joined(parts)
    assert joined.rows[:, 4].tolist() == [7, 8, 0]
    assert [(bytes(key), bytes(value)) for key, value in joined] == records
    assert [bytes(key) for key, _ in joined[1:]] == [b"bcd", b"e"]
    assert len(joined) == 3


def found(loops, *records):
    joined = Records.copied([(b"key", record) for record in records], range(len(records)))
    images, labels = loops.find_encoded(joined.content, joined.rows)
    return [
        joined.content[start : start + size].tobytes() for start, size in images.tolist()
    ], labels.tolist()


FILE = b"\xff\xd8 an image"


@pytest.mark.parametrize("label", [0, 5, 1000, -1, 2**31 - 1, -(2**31)])
def test_encoded_images_and_labels_are_found(loops, label):
    plain = Datum(encoded=True, data=FILE, label=label)
    shaped = Datum(channels=3, height=700, width=5, encoded=True, data=FILE * 40, label=label)
    files, labels = found(
        loops, *(d.SerializeToString() for d in (plain, shaped, Datum(encoded=True, data=b"x")))
    )
    assert files == [FILE, FILE * 40, b"x"]
    assert labels == [label, label, 0]


JPEG = Datum(encoded=True, data=FILE, label=3).SerializeToString()
NOT_FOUND = {
    "raw": WHOLE,
    "no longer encoded": JPEG + Datum(encoded=False).SerializeToString(),
    "no image": Datum(encoded=True, label=3).SerializeToString(),
    "float data": JPEG + Datum(float_data=[1]).SerializeToString(),
    "another field": JPEG + b"\x48\x01",
    "a field of a large number": JPEG + b"\x80\x01\x01",
    "a field of a large number at the end": JPEG + b"\xb8\x01",
    "cut in the image": JPEG[:8],
    "cut behind a tag": JPEG + b"\x28",
    "an image of 2 ** 64 - 1 bytes": b"\x22" + b"\xff" * 9 + b"\x01" + JPEG,
    "a number without an end": JPEG + b"\x28" + b"\xff" * 20,
    "a size of six bytes": bytes([0x22, 0x81, 0x80, 0x80, 0x80, 0x80, 0, 0x78, 0x38, 1]),
    "empty": b"",
}


def test_a_size_may_have_five_bytes(loops):
    record = bytes([0x22, 0x81, 0x80, 0x80, 0x80, 0, 0x78, 0x38, 1])
    assert Datum.FromString(record).data == b"x"
    assert found(loops, record) == ([b"x"], [0])


@pytest.mark.parametrize("case", NOT_FOUND)
def test_other_datums_are_not_taken_for_encoded_images(loops, case):
    files, _ = found(loops, JPEG, NOT_FOUND[case], JPEG)
    assert files == [FILE, b"", FILE]


def test_the_last_of_several_values_counts(loops):
    twice = JPEG + Datum(encoded=True, data=b"later", label=-7).SerializeToString()
    assert found(loops, twice) == ([b"later"], [-7])


@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 60))
def test_what_is_found_is_what_parsing_finds(loops, noise, lo, hi):
    record = JPEG[: min(lo, hi)] + noise + JPEG[max(lo, hi) :]
    (file,), (label,) = found(loops, record)
    if file:
        datum = Datum.FromString(record)
        assert (datum.encoded, datum.data, datum.label) == (True, file, label)


def test_what_stands_behind_an_image_is_not_kept():
    more = Datum(float_data=range(1000)).SerializeToString()
    before = datum_fields._label_behind.cache_info()
    done, _, _ = copy(datum_fields, [WHOLE + more])
    assert not done.any()
    assert datum_fields._label_behind.cache_info() == before
