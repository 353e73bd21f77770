"""compute-image-mean: Caffe's file, exact sums, encoded records, records that do not fit."""

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.commands.data import compute_image_mean as module
from caffepy.commands.data.compute_image_mean import compute_image_mean
from caffepy.core.errors import DataError, UsageError
from caffepy.data.transformer import load_mean
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Array
from caffepy.proto.caffe_pb2 import BlobProto, Datum

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


def write(folder: Path, values: list[Datum | bytes]) -> str:
    with write_database(f"{folder}/db") as writer:
        for i, value in enumerate(values):
            writer.put(f"{i:08d}", value)
    return f"{folder}/db"


def encoded(image: Array) -> Datum:
    return Datum(data=cv2.imencode(".png", image.transpose(1, 2, 0))[1].tobytes(), encoded=True)


def test_what_caffe_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    mean = compute_image_mean(str(GOLDEN / "raw_lmdb"), f"{tmp_path}/mean.binaryproto")
    written, caffes = (
        Path(p).read_bytes() for p in (f"{tmp_path}/mean.binaryproto", GOLDEN / "mean.binaryproto")
    )
    assert written == caffes
    assert BlobProto.FromString(written).num == 1
    assert mean.count == 10
    for line in (
        "Starting iteration",
        "Processed 10 files.",
        "Number of channels: 3",
        "mean_value channel [0]: 135.137",
    ):
        assert line in caplog.messages
    assert "Decoding Datum" not in caplog.messages
    assert not any("Restarting" in message for message in caplog.messages)


def test_many_records_are_told_of_and_summed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TELL_EVERY", 100)
    caplog.set_level(logging.INFO, "caffepy")
    images = np.random.default_rng(0).integers(0, 256, (330, 3, 4, 5), np.uint8)
    mean = compute_image_mean(
        write(tmp_path, [array_to_datum(image) for image in images]), threads=3
    )
    np.testing.assert_array_equal(mean.image, images.mean(0).astype(np.float32))
    np.testing.assert_allclose(mean.channels, images.mean((0, 2, 3)), rtol=1e-6)
    assert [m for m in caplog.messages if "Processed" in m] == [
        f"Processed {n} files." for n in (100, 200, 300, 330)
    ]


def test_encoded_and_float_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 4, 5), np.uint8)
    values = images[:3] / np.float32(7)
    records = [*map(encoded, images), *map(array_to_datum, values)]
    mean = compute_image_mean(write(tmp_path, records))
    np.testing.assert_allclose(
        mean.image, (images.sum(0) + values.sum(0, np.float64)) / 43, rtol=1e-6
    )
    assert caplog.messages[1:3] == ["Decoding Datum", "Starting iteration"]


WRONG = {
    "another size": (
        np.zeros((3, 4, 6), np.uint8),
        r'record "00000002" has shape 3 4 6 \(72\), the first one 3 4 5',
    ),
    "no image": (b"\xff\xff", r'db: record "00000002": not a Datum'),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_does_not_fit_is_named_and_nothing_written(case: str, tmp_path: Path) -> None:
    value, message = WRONG[case]
    good = array_to_datum(np.zeros((3, 4, 5), np.uint8))
    bad = value if isinstance(value, bytes) else array_to_datum(value)
    with pytest.raises(DataError, match=message):
        compute_image_mean(write(tmp_path, [good, good, bad, good]), f"{tmp_path}/mean")
    assert not (tmp_path / "mean").exists()


def test_an_output_that_cannot_be_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, "open_source")
    with pytest.raises(UsageError, match=r'cannot write ".*no/mean": no such file or directory'):
        compute_image_mean(
            write(tmp_path, [array_to_datum(np.zeros((1, 2, 2), np.uint8))]), f"{tmp_path}/no/mean"
        )


def test_a_mean_that_is_no_number_is_json(tmp_path: Path) -> None:
    values = np.array([1, np.nan, np.inf], np.float32).reshape(3, 1, 1)
    mean = compute_image_mean(write(tmp_path, [array_to_datum(values)]))
    assert mean.json() == '{"count": 1, "shape": [3, 1, 1], "mean_value": [1.0, null, null]}'


def test_a_mean_is_read_again(tmp_path: Path) -> None:
    image = np.random.default_rng(0).random((2, 3, 4)).astype(np.float32)
    module.write_mean(f"{tmp_path}/mean.binaryproto", image)
    np.testing.assert_array_equal(load_mean(f"{tmp_path}/mean.binaryproto"), image)
