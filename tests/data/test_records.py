"""Raw datums that are copied without being parsed: the same images and labels, and nothing that needs parsing."""

import numpy as np
import pytest

from caffepy.data.datum import head_of
from caffepy.data.records import copy_images
from caffepy.data.source import Records
from caffepy.data.write import array_to_datum
from caffepy.proto.caffe_pb2 import Datum

SHAPE = (3, 4, 5)
IMAGES = np.random.default_rng(0).integers(0, 256, (7, *SHAPE), np.uint8)
WHOLE = array_to_datum(IMAGES[0]).SerializeToString()


def copy(records, shape=SHAPE):
    joined = Records.joined([(b"key", record) for record in records])
    images, labels = np.zeros((len(records), *shape), np.uint8), np.full(len(records), np.nan)
    return copy_images(joined.content, joined.rows, head_of(shape), images, labels), images, labels


def datum(image, label):
    result = array_to_datum(image, label or 0)
    if label is None:
        result.ClearField("label")
        result.ClearField("encoded")
    return result.SerializeToString()


def test_images_and_labels():
    labels = [0, 5, 1000, -1, None, 2**31 - 1, -(2**31)]
    done, images, found = copy([datum(image, label) for image, label in zip(IMAGES, labels, strict=True)])
    assert done.all()
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(found, [label or 0 for label in labels])


def test_images_larger_than_a_thread_takes():
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 700, 700), np.uint8)
    done, copied, _ = copy([datum(image, 1) for image in images], images.shape[1:])
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
def test_the_rest_is_left_to_parsing(case):
    done, images, _ = copy([WHOLE, LEFT[case], WHOLE])
    np.testing.assert_array_equal(done, [True, False, True])
    np.testing.assert_array_equal(images, [IMAGES[0], np.zeros(SHAPE), IMAGES[0]])


def test_joined_records_are_found_again():
    records = [(b"a", b""), (b"bcd", b"12"), (b"e", b"3456")]
    joined = Records.joined(records)
    assert [(bytes(key), bytes(value)) for key, value in joined] == records
    assert [bytes(key) for key, _ in joined[1:]] == [b"bcd", b"e"]
    assert len(joined) == 3
