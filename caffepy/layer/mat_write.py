"""DeepLab's way to keep what a net computes: files of MATLAB."""

import os
import struct

import numpy as np

from caffepy.core.errors import ConfigError, DataError, reason
from caffepy.core.files import locate, replacing
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer

MATRIX, INT8, INT32, UINT32, SINGLE = 14, 1, 5, 6, 7
"""Types of data elements."""

SINGLES = 7
"""The class of a matrix of floats."""


def element(kind: int, data: bytes) -> bytes:
    """Return a data element of a MAT file: type, number of bytes, and these, filled to eights."""
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def mat_file(values: Array) -> bytes:
    """Return a MAT file of version 5 with the matrix `data`: MATLAB's order of axes and elements is
    the other way round, so that (N, C, H, W) is its (W, H, C, N) without a copy.
    """
    parts = (
        element(UINT32, struct.pack("<II", SINGLES, 0)),
        element(INT32, struct.pack(f"<{values.ndim}i", *reversed(values.shape))),
        element(INT8, b"data"),
        element(SINGLE, np.ascontiguousarray(values, "<f4").tobytes()),
    )
    head = b"MATLAB 5.0 MAT-file, written by caffepy".ljust(124) + struct.pack("<H", 0x100) + b"IM"
    return head + element(MATRIX, b"".join(parts))


@layer("MatWrite")
class MatWrite(Layer):
    """Blobs with up to four axes -> MAT files with a matrix `data` (W, H, C, N) (DeepLab).

    In every period'th forward blob i is written to `prefix` + name + "_blob_i.mat". Names are the
    first words of the lines of `source` without their last `strip` letters, one for each forward,
    or iter_0, iter_1, ... A device that writes no files leaves them alone.
    """

    bottoms = (1, None)
    tops = 0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.mat_write_param
        if not param.prefix:
            raise ConfigError("mat_write_param needs a prefix, with which the names of files begin")
        if param.period < 1 or param.strip < 0:
            raise ConfigError(
                "mat_write_param: period must be 1 or more and strip 0 or more, not "
                f"{param.period} and {param.strip}"
            )
        self.forwards = 0
        self.names = self._names() if param.source and self.device.writes_files else []

    def _names(self) -> list[str]:
        path, strip = locate(self.settings.source, self.path), self.settings.strip
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                words = [line.split()[0] if line.split() else "" for line in file]
        except OSError as error:
            raise ConfigError(f"source cannot be read: {reason(error)}", path) from None
        for number, word in enumerate(words, start=1):
            if len(word) <= strip:
                left = f"nothing is left of the name {word[:60]!r} without {strip} letters"
                problem = left if word else "the line is empty; remove it, or write a name"
                raise ConfigError(f"source: {problem}", f"{path}:{number}")
        return [word[: len(word) - strip] for word in words]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom:
            blob.legacy_shape()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        number, param = self.forwards, self.settings
        self.forwards += 1
        if number % param.period or not self.device.writes_files:
            return
        if param.source and number >= len(self.names):
            raise DataError(
                f"{param.source} names {len(self.names)} images, but this is pass {number + 1}; "
                "run as many"
            )
        name = self.names[number] if param.source else f"iter_{number}"
        for i, blob in enumerate(bottom):
            path = f"{param.prefix}{name}_blob_{i}.mat"
            values = mat_file(blob.host_data.reshape(blob.legacy_shape()))
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                with replacing(path) as new, open(new, "wb") as file:
                    file.write(values)
            except OSError as error:
                raise DataError(f"{path} cannot be written: {reason(error)}") from None
