"""Datums: serialized records of one image each, (C, H, W), uint8 or float32, raw or encoded as an
image file.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.core.errors import DataError
from caffepy.device.blob import shape_string
from caffepy.proto.caffe_pb2 import Datum

Array = NDArray[Any]
Record = memoryview | bytes

COLOR, GRAY, EITHER, NATIVE = (
    1,
    0,
    4,
    -1,
)  # how OpenCV decodes: three channels, one, one or three, as the file has them
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"


def decode(record: Record, mode: int = NATIVE) -> tuple[Array, int, bool]:
    """Image (C, H, W), label and whether it was encoded; DataError says what is wrong with the
    record.
    """
    try:
        datum = Datum.FromString(record)  # type: ignore[arg-type]  # takes a memoryview too
    except DecodeError:
        raise DataError(f"not a Datum ({len(record)} bytes)") from None
    if datum.encoded:
        return decode_image(datum.data, mode), datum.label, True
    shape = datum.channels, datum.height, datum.width
    values = (
        np.frombuffer(datum.data, np.uint8)
        if datum.data
        else np.array(datum.float_data, np.float32)
    )
    if min(shape) <= 0:
        raise DataError(f"not a Datum with an image: its shape is {shape_string(shape)}")
    if values.size != shape[0] * shape[1] * shape[2]:
        raise DataError(f"a Datum of shape {shape_string(shape)} with {values.size} values")
    return values.reshape(shape), datum.label, False


def image_file(record: Record) -> bytes:
    """The image file that an encoded record holds."""
    return Datum.FromString(record).data  # type: ignore[arg-type]  # takes a memoryview too


def decode_image(data: bytes, mode: int = NATIVE, size: tuple[int, int] | None = None) -> Array:
    """(C, H, W) uint8, channels in OpenCV's order (BGR), of an image file's bytes, resized to
    (width, height).
    """
    image = read_image(data, mode)
    if image is None:
        raise DataError(f"its image cannot be decoded ({len(data)} bytes)")
    if image.dtype != np.uint8:
        raise DataError(
            f"its image has {image.dtype.itemsize * 8} bits a channel; only 8 are supported"
        )
    if size:
        image = resized(image, *size)
    return planes(image)


def planes(image: Array) -> Array:
    """(C, H, W), a view of an image (H, W) or (H, W, C)."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def read_image(data: bytes, mode: int) -> Array | None:
    """`opened`, but a JPEG that is cut short is grey where it ends, as Caffe's cv::imread of the
    file has it.
    """
    image = opened(data, mode)
    return opened(data + JPEG_END, mode) if image is None and data.startswith(JPEG_START) else image


def opened(data: bytes | Array, mode: int) -> Array | None:
    """(H, W) or (H, W, C) as OpenCV decodes an image file's bytes; None if that is not possible."""
    import cv2

    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), mode) if len(data) else None
    except cv2.error:  # more pixels than OpenCV takes
        return None


def resized(image: Array, width: int, height: int) -> Array:
    """(height, width) or (height, width, C): the image, bilinearly; MemoryError if it is too large."""
    import cv2

    try:
        return cv2.resize(image, (width, height))
    except cv2.error:
        raise MemoryError(f"an image of {width} x {height} pixels") from None


@lru_cache(64)
def head_of(shape: tuple[int, ...]) -> bytes:
    """What a serialized raw datum with an image of this shape starts with, its fields in order, up
    to the image.
    """
    channels, height, width = shape
    size = channels * height * width
    return Datum(
        channels=channels, height=height, width=width, data=bytes(size)
    ).SerializeToString()[:-size]
