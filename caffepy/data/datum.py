"""Datums: serialized records of one image each, (C, H, W), uint8 or float32, raw or encoded as an image file."""

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.blob import shape_string
from caffepy.errors import DataError
from caffepy.proto.caffe_pb2 import Datum

Array = NDArray[Any]
Record = memoryview | bytes

COLOR, GRAY, NATIVE = 1, 0, -1  # how OpenCV decodes: three channels, one, as the file has them
MAX_LABELS = 4096


def decode(record: Record, mode: int = NATIVE) -> tuple[Array, int, bool]:
    """Image (C, H, W), label and whether it was encoded; DataError says what is wrong with the record."""
    try:
        datum = Datum.FromString(record)  # type: ignore[arg-type]  # takes a memoryview too
    except DecodeError:
        raise DataError(f"not a Datum ({len(record)} bytes)") from None
    if datum.encoded:
        return decode_image(datum.data, mode), datum.label, True
    shape = datum.channels, datum.height, datum.width
    values = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float32)
    if min(shape) <= 0:
        raise DataError(f"not a Datum with an image: its shape is {shape_string(shape)}")
    if values.size != shape[0] * shape[1] * shape[2]:
        raise DataError(f"a Datum of shape {shape_string(shape)} with {values.size} values")
    return values.reshape(shape), datum.label, False


def decode_image(data: bytes, mode: int = NATIVE, size: tuple[int, int] | None = None) -> Array:
    """(C, H, W) uint8, channels in OpenCV's order (BGR), of an image file's bytes, resized to (width, height)."""
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), mode) if data else None
    if image is None:
        raise DataError(f"its image cannot be decoded ({len(data)} bytes)")
    if image.dtype != np.uint8:
        raise DataError(f"its image has {image.dtype.itemsize * 8} bits a channel; only 8 are supported")
    if size:
        image = cv2.resize(image, size)
    if image.ndim == 2:
        return np.asarray(image)[None]
    return np.stack(cv2.split(image))  # (H, W, C) -> (C, H, W)


class RawLayout:
    """The bytes around the image of raw datums of one shape, so that most are read without parsing them.

    Serialized in field order, such records all start with the same bytes (shape and length of the image) and end with
    one of a few (label and flags).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        channels, height, width = shape
        self.shape = shape
        self.size = channels * height * width
        whole = Datum(channels=channels, height=height, width=width, data=bytes(self.size)).SerializeToString()
        self.head = whole[: len(whole) - self.size]
        self._labels: dict[bytes, int] = {}

    def read(self, record: Record, image: Array) -> int | None:
        """Copy the record's image into the flat uint8 array and return its label; None if it needs parsing."""
        start, end = len(self.head), len(self.head) + self.size
        if record[:start] != self.head or len(record) < end:
            return None
        tail = bytes(record[end:])
        label = self._labels.get(tail)
        if label is None:
            label = self._parse_tail(tail)
            if label is None:
                return None
        image[:] = np.frombuffer(record, np.uint8, self.size, start)
        return label

    def _parse_tail(self, tail: bytes) -> int | None:
        try:
            datum = Datum.FromString(tail)
        except DecodeError:
            return None
        if datum.encoded or any(datum.HasField(f) for f in ("channels", "height", "width", "data")):
            return None
        if len(self._labels) < MAX_LABELS:
            self._labels[tail] = datum.label
        return datum.label
