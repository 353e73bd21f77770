"""Datums: serialized records of one image each, (C, H, W), uint8 or float32, raw or encoded as an
image file; AnnotatedDatums: the same with boxes.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from caffepy.core.errors import DataError
from caffepy.device.blob import Array, shape_string
from caffepy.proto.caffe_pb2 import AnnotatedDatum, Datum, NormalizedBBox

Record = memoryview | bytes

# how OpenCV decodes: three channels, one, one or three, as the file has them
COLOR, GRAY, EITHER, NATIVE = 1, 0, 4, -1
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
SIGNATURES = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"RIFF": "webp",
    b"II": "tiff",
}
LONGEST_SIGNATURE = max(map(len, SIGNATURES))


def decode(record: Record, mode: int = NATIVE) -> tuple[Array, int, bool]:
    """Image (C, H, W), label and True if it was encoded; DataError says what is wrong."""
    try:
        datum = Datum.FromString(record)  # type: ignore[arg-type]  # takes a memoryview too
    except DecodeError:
        raise DataError(f"not a Datum ({len(record)} bytes)") from None
    if datum.encoded:
        return decode_image(datum.data, mode), datum.label, True
    if not datum.channels and _annotated(record):
        raise DataError("not a Datum, but an AnnotatedDatum; the layer AnnotatedData reads it")
    return _raw_image(datum), datum.label, False


def _raw_image(datum: Datum) -> Array:
    shape = datum.channels, datum.height, datum.width
    values: Array = np.frombuffer(datum.data, np.uint8)
    if not datum.data:
        values = np.array(datum.float_data, np.float32)
    if min(shape) <= 0:
        raise DataError(f"not a Datum with an image: its shape is {shape_string(shape)}")
    if values.size != shape[0] * shape[1] * shape[2]:
        raise DataError(f"a Datum of shape {shape_string(shape)} with {values.size} values")
    return values.reshape(shape)


class Annotated(NamedTuple):
    """An image with boxes: `image` (C, H, W), its Datum's label if it has one, True if it was
    `encoded`, the type of annotation if the record has one, and the objects (n, 7) of
    `caffepy.data.boxes`.
    """

    image: Array
    label: int | None
    encoded: bool
    type: int | None
    objects: Array


def decode_annotated(record: Record, mode: int = NATIVE) -> Annotated:
    """The content of a serialized AnnotatedDatum; DataError says what is wrong."""
    annotated = _annotated(record)
    if annotated is None:
        plain = _is_datum(record)
        hint = ", but a Datum; the layer Data reads it" if plain else f" ({len(record)} bytes)"
        raise DataError(f"not an AnnotatedDatum{hint}")
    datum = annotated.datum
    rows = [
        (group.group_label, one.instance_id, *_box(one.bbox))
        for group in annotated.annotation_group
        for one in group.annotation
    ]
    return Annotated(
        decode_image(datum.data, mode) if datum.encoded else _raw_image(datum),
        datum.label if datum.HasField("label") else None,
        datum.encoded,
        annotated.type if annotated.HasField("type") else None,
        np.array(rows, np.float32).reshape(-1, 7),
    )


def _annotated(record: Record) -> AnnotatedDatum | None:
    try:
        annotated = AnnotatedDatum.FromString(record)  # type: ignore[arg-type]
    except DecodeError:
        return None
    return annotated if annotated.HasField("datum") else None


def _is_datum(record: Record) -> bool:
    try:
        datum = Datum.FromString(record)  # type: ignore[arg-type]
    except DecodeError:
        return False
    return datum.encoded or datum.channels > 0


def _box(box: NormalizedBBox) -> tuple[float, float, float, float, bool]:
    return box.xmin, box.ymin, box.xmax, box.ymax, box.difficult


def image_file(record: Record) -> bytes | None:
    """The image file in an encoded record, annotated or not; None for a raw one."""
    datum = Datum.FromString(record)  # type: ignore[arg-type]  # takes a memoryview too
    if not datum.channels and (annotated := _annotated(record)):
        datum = annotated.datum
    return datum.data if datum.encoded else None


def encoding_of(content: bytes) -> str:
    """The type of an image file, by its first bytes."""
    kinds = (kind for start, kind in SIGNATURES.items() if content.startswith(start))
    return next(kinds, "another kind of image file")


def decode_image(
    data: bytes | Array, mode: int = NATIVE, size: tuple[int, int] | None = None
) -> Array:
    """An image file's bytes as (C, H, W) uint8, BGR as in OpenCV, resized to (width, height); or
    an image (H, W, 3) that was decoded before.
    """
    if isinstance(data, np.ndarray):
        image: Array | None = None if mode == GRAY else data
    else:
        image = read_image(data, mode)
    if image is None:
        raise DataError(f"its image cannot be decoded ({len(data)} bytes)")
    if image.dtype != np.uint8:
        bits = image.dtype.itemsize * 8
        raise DataError(f"its image has {bits} bits a channel; only 8 are supported")
    return planes(resized(image, *size) if size else image)


def decode_file(mode: int, size: tuple[int, int] | None, data: bytes | Array, _: None) -> Array:
    """Do `decode_image` for another process, or take what a GPU decoded."""
    return decode_image(data, mode, size)


def planes(image: Array) -> Array:
    """(C, H, W), a view of an image (H, W) or (H, W, C)."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def read_image(data: bytes, mode: int) -> Array | None:
    """`opened`, but the missing end of a truncated JPEG is grey, as in Caffe's cv::imread."""
    image = opened(data, mode)
    return opened(data + JPEG_END, mode) if image is None and data.startswith(JPEG_START) else image


def opened(data: bytes | Array, mode: int) -> Array | None:
    """(H, W) or (H, W, C) as OpenCV decodes an image file's bytes; None if that is not possible,
    DataError if it has more pixels than OpenCV takes.
    """
    import cv2

    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), mode) if len(data) else None
    except cv2.error:
        remedy = "to read it, set OPENCV_IO_MAX_IMAGE_PIXELS in the environment to more"
        raise DataError(f"its image has more pixels than OpenCV takes; {remedy}") from None


def resized(image: Array, width: int, height: int) -> Array:
    """The image as (height, width) or (height, width, C), bilinear; MemoryError if too large."""
    import cv2

    try:
        return cv2.resize(image, (width, height))
    except cv2.error:
        raise MemoryError(f"an image of {width} x {height} pixels") from None


@lru_cache(64)
def head_of(shape: tuple[int, ...]) -> bytes:
    """The start of a serialized raw Datum with an image of this shape, up to the image's bytes."""
    channels, height, width = shape
    size = channels * height * width
    datum = Datum(channels=channels, height=height, width=width, data=bytes(size))
    return datum.SerializeToString()[:-size]
