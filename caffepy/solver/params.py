"""Params: the learnable blobs of a net, laid one after the other into one flat data and one flat
diff array.
"""

from collections.abc import Collection, Sequence

import numpy as np

from caffepy.device.blob import Array, Blob, Memory

ALIGNMENT = 16
"""Elements to a multiple of which each blob starts: 64 bytes, as vector units and cuDNN want it."""

NOTES = ALIGNMENT
"""Elements behind the diff for what is averaged with it, such as the loss, and behind the data for
what goes along.
"""


class Params:
    """Flat `data` and `diff` of at least one element; the blobs become views of them and keep their
    values.

    `segments[i]` is (offset, count) of `blobs[i]`. `averaged` is the diff with the `notes` behind
    it, `sent` the data with `told`.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = list(blobs)
        self.segments: list[tuple[int, int]] = []
        size = 0
        for blob in self.blobs:
            self.segments.append((size, blob.count))
            size += -(-blob.count // ALIGNMENT) * ALIGNMENT
        memory = self.blobs[0].data_memory if self.blobs else Memory(np.float32)
        self.sent: Array = memory.zeros(max(size, 1) + NOTES)
        self.data, self.told = self.sent[:-NOTES], self.sent[-NOTES:]
        self.averaged: Array = memory.zeros(self.data.size + NOTES)
        self.diff, self.notes = self.averaged[:-NOTES], self.averaged[-NOTES:]
        for blob, (offset, count) in zip(self.blobs, self.segments, strict=True):
            part = slice(offset, offset + count)
            self.data[part] = blob.data.reshape(-1)
            self.diff[part] = blob.diff.reshape(-1)
            blob.data_memory.bind(self.data[part])
            blob.diff_memory.bind(self.diff[part])

    @property
    def ends(self) -> Array:
        """Where each segment ends, the zeros that fill it up included, as an array for the update
        rules.
        """
        starts = [offset for offset, _ in self.segments]
        return np.array([*starts[1:], self.data.size], np.int64)

    def without(self, numbers: Collection[int]) -> list[Array]:
        """The diff as views, as few as can be, of all that there is but the blobs with these
        numbers.
        """
        left_out = [self.segments[i] for i in sorted(numbers)]
        starts = [0, *(offset + count for offset, count in left_out)]
        stops = [*(offset for offset, _ in left_out), self.diff.size]
        return [
            self.diff[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop
        ]

    def split(self, flat: Array) -> list[Array]:
        """Views of a flat array of this layout in the blobs' shapes."""
        return [
            flat[offset : offset + count].reshape(blob.shape)
            for blob, (offset, count) in zip(self.blobs, self.segments, strict=True)
        ]
