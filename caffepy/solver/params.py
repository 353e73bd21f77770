"""Params: the learnable blobs of a net, concatenated into one flat data and one flat diff array."""

from collections.abc import Collection, Sequence

import numpy as np

from caffepy.device.blob import Array, Blob, Memory

ALIGNMENT = 16
"""Each blob starts at a multiple of this many elements: 64 bytes, for vector units and cuDNN."""

SPARE = ALIGNMENT
"""Spare elements after diff (loss, averaged with it) and data (loss scale, broadcast with it)."""


class Params:
    """Flat `data` and `diff` of at least one element; the blobs become views of them and keep their
    values.

    `segments[i]` is (offset, count) of `blobs[i]`. `reduced_diff` is the diff with its spare
    elements `metrics`, `data_with_scale` the data with its spare elements `scale_slot`.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = list(blobs)
        self.segments: list[tuple[int, int]] = []
        size = 0
        for blob in self.blobs:
            self.segments.append((size, blob.count))
            size += -(-blob.count // ALIGNMENT) * ALIGNMENT
        memory = self.blobs[0].data_memory if self.blobs else Memory(np.float32)
        self.data_with_scale: Array = memory.zeros(max(size, 1) + SPARE)
        self.data, self.scale_slot = self.data_with_scale[:-SPARE], self.data_with_scale[-SPARE:]
        self.reduced_diff: Array = memory.zeros(self.data.size + SPARE)
        self.diff, self.metrics = self.reduced_diff[:-SPARE], self.reduced_diff[-SPARE:]
        for blob, (offset, count) in zip(self.blobs, self.segments, strict=True):
            part = slice(offset, offset + count)
            self.data[part] = blob.data.reshape(-1)
            if blob.diff_memory.touched:
                self.diff[part] = blob.diff.reshape(-1)
            blob.data_memory.bind(self.data[part])
            blob.diff_memory.bind(self.diff[part])

    @property
    def ends(self) -> Array:
        """End of each segment, padding included, as an array for the update rules."""
        starts = [offset for offset, _ in self.segments]
        return np.array([*starts[1:], self.data.size], np.int64)

    def without(self, numbers: Collection[int]) -> list[Array]:
        """The diff without these blobs, as the fewest views."""
        left_out = [self.segments[i] for i in sorted(numbers)]
        starts = [0, *(offset + count for offset, count in left_out)]
        stops = [*(offset for offset, _ in left_out), self.diff.size]
        return [
            self.diff[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop
        ]

    def split(self, flat: Array) -> list[Array]:
        """Return views of a flat array of this layout in the blobs' shapes."""
        return [
            flat[offset : offset + count].reshape(blob.shape)
            for blob, (offset, count) in zip(self.blobs, self.segments, strict=True)
        ]
