"""The running statistics of a net; tests and snapshots may use other values than training.

Where several solvers train as one, a test uses the mean of their statistics, and each solver
continues with its own: if they kept the mean, its rounding would make a run depend on how often it
is tested, saved or stopped. The forward pass that shows the last loss changes them; a snapshot has
the values from before it.
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
        """Copies of the values in the net."""
        return [blob.host_data.copy() for blob in self.blobs]

    @property
    def own(self) -> list[Array]:
        """Copies of the values with which training continues."""
        return self.present if self._held is None else self._held

    def are(self, values: Sequence[Array]) -> bool:
        """True if the net has exactly these values."""
        present = self.present
        return len(present) == len(values) and all(map(np.array_equal, present, values))

    def hold(self) -> None:
        """Keep the values with which training continues, unless they are kept already; those in the
        net may then change.
        """
        self._held = self.own

    def release(self) -> None:
        """Let training continue with the values in the net."""
        self._held = None

    def write(self, values: Sequence[Array]) -> None:
        """Copy these values into the net."""
        for blob, value in zip(self.blobs, values, strict=True):
            blob.host_data[...] = value

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a block in which parameters may be overwritten; after it, these are as before."""
        before = self.present
        yield
        self.write(before)

    @contextmanager
    def replaced(self, values: Sequence[Array]) -> Iterator[None]:
        """Return a block in which the net has these; after it, it has those from before."""
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
