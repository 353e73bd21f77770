"""The running statistics of a net, of which a test or a snapshot may need others than training.

Where several solvers train as one, a test has the mean of their statistics, and each goes on with
its own: a mean that stayed would round them, so that a run would depend on how often it was tested,
saved or stopped. The forward pass that shows the last loss changes them; a snapshot has those from
before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.net import Net


class Statistics:
    """The parameters that layers of a net compute from the data they see, not from gradients."""

    def __init__(self, net: Net) -> None:
        self.blobs = [blob for layer in net.layers for blob in layer.statistics]
        self._held: list[Array] | None = None

    def __bool__(self) -> bool:
        return bool(self.blobs)

    def __contains__(self, blob: Blob) -> bool:
        return any(blob.data_memory is own.data_memory for own in self.blobs)

    @property
    def present(self) -> list[Array]:
        """Copies of what the net has now."""
        return [blob.host_data.copy() for blob in self.blobs]

    @property
    def own(self) -> list[Array]:
        """Copies of those that training goes on with."""
        return self.present if self._held is None else self._held

    def are(self, values: Sequence[Array]) -> bool:
        """True if the net has exactly these now."""
        present = self.present
        return len(present) == len(values) and all(map(np.array_equal, present, values))

    def hold(self) -> None:
        """Keep what training goes on with, unless that is done; the net may get others."""
        self._held = self.own

    def release(self) -> None:
        """Go on with what the net has."""
        self._held = None

    def write(self, values: Sequence[Array]) -> None:
        """Give these to the net."""
        for blob, value in zip(self.blobs, values, strict=True):
            blob.host_data[...] = value

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block in which all parameters may be overwritten; after it, these are as before."""
        before = self.present
        yield
        self.write(before)

    @contextmanager
    def replaced(self, values: Sequence[Array]) -> Iterator[None]:
        """A block in which the net has these; after it, it has those from before."""
        before = self.present
        self.write(values)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # of a device that failed, say
                self.write(before)
            raise
        self.write(before)


def mean(solvers: Sequence[Sequence[Array]]) -> list[Array]:
    """Return the mean of the statistics of several solvers; that of equal ones is the same."""
    means = (np.mean(np.stack(arrays), 0, np.float64) for arrays in zip(*solvers, strict=True))
    return [np.asarray(value, np.float32) for value in means]
