"""The scenes of digits_seg and of boxes around digits: what lies in their databases, and that they
are what the program makes.
"""

from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

import caffepy.models
from benchmarks import make_scenes
from caffepy.data.datum import decode_annotated
from caffepy.data.sources import open_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import Datum

FOLDER = Path(caffepy.models.__path__[0])


def values(path: Path) -> list[bytes]:
    with closing(open_database(str(path))) as source:
        return [bytes(value) for items in source.once(100) for _, value in items]


def labels_of(record: bytes) -> Array:
    datum = Datum.FromString(record)
    return cv2.imdecode(np.frombuffer(datum.data, np.uint8), cv2.IMREAD_GRAYSCALE)


@pytest.mark.parametrize("split", make_scenes.COUNTS)
def test_scenes(split: str) -> None:
    boxes = values(FOLDER / "digits_ssd" / f"scenes_{split}_lmdb")
    labels = values(FOLDER / "digits_seg" / f"labels_{split}_lmdb")
    assert len(boxes) == len(labels) == make_scenes.COUNTS[split]
    for scene, record, label in zip(make_scenes.scenes(split), boxes[:20], labels, strict=False):
        found, pixels = decode_annotated(record), labels_of(label)
        np.testing.assert_array_equal(found.image[0], scene.image)
        np.testing.assert_array_equal(pixels, scene.labels)
        assert len(found.objects) == len(scene.boxes) > 0
        for digit, _, *box, _ in found.objects:
            left, top, right, bottom = np.rint(np.array(box) * make_scenes.SIZE).astype(int)
            inside = pixels[top:bottom, left:right]
            assert set(np.unique(inside)) <= {0, digit, make_scenes.VOID}
            assert (inside == digit).any()
