"""`caffepy compute-image-mean`: the mean of a database's images as a file, logged as Caffe does.

Sums are exact: whole numbers of raw pixels, float64 of others. Caffe's float32 sums round above
2^24.
"""

import logging
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from caffepy.core.errors import DataError
from caffepy.core.files import check_writable, written
from caffepy.data.prefetch import mapped
from caffepy.data.sources import open_source
from caffepy.data.sources.base import RAW, Items
from caffepy.device.blob import Array, shape_string
from caffepy.proto import binary
from caffepy.report import counting
from caffepy.report.text import as_json, number

log = logging.getLogger(__name__)

CHUNK = 32  # records that a thread sums at a time
TELL_EVERY = 10_000


@dataclass(frozen=True)
class Mean:
    """The mean (C, H, W) of `count` images, float32."""

    count: int
    image: Array

    @property
    def channels(self) -> list[float]:
        """The mean of each channel: transform_param's mean_value."""
        return [float(value) for value in self.image.mean((1, 2), np.float64)]

    def json(self) -> str:
        """An object with count, shape and mean_value."""
        mean = {"shape": self.image.shape, "mean_value": self.channels}
        return as_json({"count": self.count, **mean})


def compute_image_mean(
    database: str,
    output: str | None = None,
    *,
    backend: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> Mean:
    """The mean of all records of an LMDB or LevelDB, also written to `output`, a .binaryproto.

    `backend` is only compared with the database's own. DataError names the record whose image
    cannot be read or has another size than the first.
    """
    if output:
        check_writable(output)
    with closing(open_source(database, backend and backend.upper())) as source:
        item = source.peek()
        first, _ = source.decode(item)
        shape = first.shape
        if source.stored(item, first) not in RAW:
            log.info("Decoding Datum")
        log.info("Starting iteration")
        total, count = np.zeros(shape, np.int64), 0

        def add(items: Items) -> tuple[Array, int]:
            part: Array = np.zeros(shape, np.uint32)
            for item in items:
                image, _ = source.decode(item)
                if image.shape != shape:
                    raise DataError(
                        f"{source.name(item)} has shape {shape_string(image.shape)}, "
                        f"the first one {shape_string(shape)}"
                    )
                if image.dtype != np.uint8:
                    part = part.astype(np.float64, copy=False)
                part += image
            return part, len(items)

        sums = mapped(add, source.once(CHUNK), threads)
        with closing(sums), counting(source.length, "records", progress) as advance:
            for part, added in sums:
                before, count = count, count + added
                total = total + part
                if count // TELL_EVERY > before // TELL_EVERY:
                    log.info("Processed %d files.", count // TELL_EVERY * TELL_EVERY)
                advance(added)
    if count % TELL_EVERY:
        log.info("Processed %d files.", count)
    mean = Mean(count, (total / count).astype(np.float32))
    if output:
        log.info("Write to %s", output)
        write_mean(output, mean.image)
    log.info("Number of channels: %d", shape[0])
    for c, value in enumerate(mean.channels):
        log.info("mean_value channel [%d]: %s", c, number(value))
    return mean


def write_mean(path: str, image: Array) -> None:
    """Write an image (C, H, W) as Caffe's tool does, as a blob with four legacy extents."""
    channels, height, width = image.shape
    blob = binary.array_to_blob(image)
    blob.ClearField("shape")
    blob.num, blob.channels, blob.height, blob.width = 1, channels, height, width
    with written(path) as temporary, open(temporary, "wb") as file:
        file.write(blob.SerializeToString())
