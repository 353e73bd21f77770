"""Params: the learnable blobs of a net, laid one after the other into one flat data and one flat diff array."""

from collections.abc import Sequence

import numpy as np

from caffepy.blob import Array, Blob


class Params:
    """Flat `data` and `diff` of at least one element; the blobs become views of them and keep their values.

    `segments[i]` is (offset, count) of `blobs[i]`.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = list(blobs)
        self.segments: list[tuple[int, int]] = []
        size = 0
        for blob in self.blobs:
            self.segments.append((size, blob.count))
            size += blob.count
        dtype = self.blobs[0].dtype if self.blobs else np.dtype(np.float32)
        self.data: Array = np.zeros(max(size, 1), dtype)
        self.diff: Array = np.zeros(max(size, 1), dtype)
        for blob, (offset, count) in zip(self.blobs, self.segments, strict=True):
            part = slice(offset, offset + count)
            self.data[part] = blob.data.reshape(-1)
            self.diff[part] = blob.diff.reshape(-1)
            blob.data_memory.bind(self.data[part])
            blob.diff_memory.bind(self.diff[part])

    @property
    def ends(self) -> Array:
        """Where each segment ends, as an array for the update rules."""
        return np.array([offset + count for offset, count in self.segments], np.int64)

    def split(self, flat: Array) -> list[Array]:
        """Views of a flat array of this layout in the blobs' shapes."""
        return [
            flat[offset : offset + count].reshape(blob.shape)
            for blob, (offset, count) in zip(self.blobs, self.segments, strict=True)
        ]
