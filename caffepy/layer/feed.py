"""Base of data layers: batches that are read ahead, and several of them at once."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.data.loader import Loader
from caffepy.data.reader import Reader, Turn
from caffepy.data.transformer import Transformer
from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.layer.base import Blobs, Layer
from caffepy.ops.objects import Staging
from caffepy.proto.caffe_pb2 import (
    DataParameter,
    DenseImageDataParameter,
    HDF5DataParameter,
    ImageDataParameter,
    WindowDataParameter,
)

log = logging.getLogger(__name__)


class Ring:
    """Batches of a layer that were read together: of `arrays`, one (count, *shape) for each top,
    those from `used` on are still to come. `state_after(k)` is the layer's state after k of them.
    """

    def __init__(self, most: int, shapes: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> None:
        self.most, self.used, self.count = most, 0, 0
        self.shapes = [tuple(shape) for shape in shapes]
        self.arrays = [np.zeros((most, *shape), dtype) for shape in shapes]
        self._state_after: Callable[[int], dict[str, Any]] = lambda _: {}

    def fill(self, count: int, state_after: Callable[[int], dict[str, Any]]) -> None:
        """Begin anew: the first `count` batches were written."""
        self.used, self.count, self._state_after = 0, count, state_after

    @property
    def left(self) -> int:
        """Number of batches to come."""
        return self.count - self.used

    @property
    def state(self) -> dict[str, Any]:
        """The layer's state before the next of them."""
        return self._state_after(self.used)

    def empty(self) -> None:
        """Drop those that are left."""
        self.count = self.used

    def room(self, count: int) -> list[Array]:
        """Return for each top its first `count` batches as one batch of all their items."""
        first = [array[:count] for array in self.arrays]
        return [array.reshape(-1, *array.shape[2:]) for array in first]

    def write_tops(self, top: Blobs) -> None:
        """Copy the next one to the tops."""
        for array, t in zip(self.arrays, top, strict=True):
            t.reshape(array.shape[1:])
            t.data[...] = array[self.used]
        self.used += 1


RING_BATCHES, RING_BYTES = 128, 1 << 18
"""The most batches in a ring, and bytes, so that it fits into a core's cache."""


class Feed(Layer):
    """Base of the layers without bottoms; forward reshapes the tops if the data's shape changes."""

    bottoms = 0
    share_in_parallel = True
    is_data = True
    on_gpu = True
    takes_preferred_layout = True  # values from the host are converted on their way
    ring: Ring | None = None

    def several(self, top: Blobs) -> Ring | None:
        """The layer's ring with one batch at least, for those who take batches from there and count
        them in `used`; None if it has to run forward.

        It holds batches as forward would give them, in the order of their turn; forward takes what
        is left in it first.
        """
        shapes = [t.shape for t in top]
        if self.ring is None or self.ring.shapes != shapes:
            if self.ring is not None and self.ring.left:
                return None
            size = sum(t.count for t in top) * self.dtype.itemsize
            self.ring = Ring(min(RING_BATCHES, RING_BYTES // max(1, size)), shapes, self.dtype)
        if not self.ring.left and self.ring.most > 1:
            self._fill(self.ring, top)
        return self.ring if self.ring.left else None

    def _fill(self, ring: Ring, top: Blobs) -> None:
        """Read batches into the ring, if several can be read at once."""

    def hand_over(self, top: Blobs, write: Callable[[list[Array]], object]) -> None:
        """Copy to the tops the host arrays that `write` fills; asynchronously on a GPU."""
        if top[0].gpu is None:
            write([t.data for t in top])
            return
        staging = self._stagings[top[0].gpu]
        write(staging.room(tuple((t.shape, self.dtype) for t in top)))
        staging.send()
        for array, t in zip(staging.take(), top, strict=True):
            self.ops.copy(array, t.data)
        staging.done()

    @cached_property
    def _stagings(self) -> defaultdict[object, Staging]:
        """By the device on which the tops lie."""
        return defaultdict(self.ops.Staging)


class Prefetching(Feed):
    """-> (N, C, h, w) and labels (N,), or what else the loader makes: images that a thread reads up
    to `data_param.prefetch` batches ahead.

    The first image of a batch decides its shape.
    """

    tops: ClassVar[int | tuple[int, int | None]] = (1, 2)
    reads_files = True
    _reader: Reader | None = None
    _interrupted = False  # an exception, such as Ctrl-C, came between `take` and `give_back`
    # The reader gives several batches at a time; None: it was not asked to, False: it could not.
    _reads_several: bool | None = None

    def open(self) -> Loader:
        """The loader that fills the batches."""
        raise NotImplementedError

    def transformer(self) -> Transformer:
        """The transform_param of the layer."""
        return Transformer(self.param.transform_param, self.phase, self.device, self.path)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Open the source and shape the tops by its first image, which is not consumed."""
        prefetch = self.param.data_param.prefetch
        if not prefetch:
            raise ConfigError("data_param needs a prefetch of 1 or more")
        loader = self.open()
        top[0].reshape((loader.batch_size, *loader.shape()))
        log.info("output data size: %s", ",".join(map(str, top[0].shape)))
        for t, shape in zip(top[1:], loader.label_shapes(), strict=False):
            t.reshape(shape)
        self._mean, self._scale, self.length = loader.mean, loader.scale, loader.length
        self._means: dict[object, Blob] = {}  # by the device on which the tops lie
        self._reader = Reader(loader, prefetch, self.dtype, self.ops.Staging)

    def extent(self) -> str:
        return self._reader.extent() if self._reader else ""

    def serve(self, devices: Sequence[Device], deal: Sequence[Turn] | None = None) -> None:
        if self._reader:
            self._read_anew()
            self._reader.serve([device.scope for device in devices], deal)

    def lease(self, turns: Callable[[int], Iterator[Turn]]) -> None:
        if self._reader:
            self._read_anew()
            self._reader.lease(turns)

    def _read_anew(self) -> None:
        """Return to the first batch that is left in the ring, and empty the ring."""
        if self._reader and self.ring and self.ring.left:
            self._reader.set_state(self.ring.state)
            self.ring.empty()

    def read_ahead(self) -> None:
        if self._reader:
            self._reader.begin()

    def begin_turn(self) -> None:
        """The reading thread skips."""

    def end_turn(self) -> None:
        """The reading thread has skipped before the batch came."""

    def skip(self, batches: int) -> None:
        if self._reader is None:
            raise DataError("the layer is closed")
        self._read_anew()
        self._reader.skip(batches)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._reader is None:
            raise DataError("the layer is closed")
        if self.ring and not self.ring.left and self._reads_several:
            self._fill(self.ring, top)
        if self.ring and self.ring.left:
            self.ring.write_tops(top)
        else:
            self._take(top)

    def _take(self, top: Blobs, ring: Ring | None = None) -> None:
        """Write the reader's next batch to the tops, or those that it holds into the ring."""
        assert self._reader
        if self._interrupted:
            self._reader.stop()
        self._interrupted = True
        batch = self._reader.take()
        try:
            images, h_off, w_off, mirror, *labels = batch.staging.take()
            if ring:
                outs = ring.room(batch.count)
            else:
                top[0].reshape(batch.shape)
                for t, label in zip(top[1:], labels, strict=False):
                    t.reshape(label.shape)
                outs = [t.data for t in top]
            crops = (h_off, w_off, mirror)
            place, mean = top[0].gpu, None
            if self._mean is not None:
                if place not in self._means:
                    self._means[place] = Blob(self._mean.shape, self.dtype, place)
                    self._means[place].host_data[...] = self._mean
                mean = self._means[place].data
            self.ops.transform_batch(images, outs[0], crops, mean, self._scale)
            for label, out in zip(labels, outs[1:], strict=False):
                self.ops.copy(label, out)
            if ring:
                ring.fill(batch.count, batch.state_after)
            batch.staging.done()
        finally:
            self._reader.give_back(batch)
        self._interrupted = False

    def _fill(self, ring: Ring, top: Blobs) -> None:
        reader = self._reader
        if reader is None or self._reads_several is False:
            return
        if self._reads_several is None:
            self._reads_several = True
            reader.read_several(ring.most)
        before = reader.state()
        try:
            try:
                batch = reader.peek()
            except CaffeError:  # forward raises it again
                return
            fits = 1 < batch.count <= ring.most and batch.shape[1:] == ring.shapes[0][1:]
            if fits:
                self._take(top, ring)
        except BaseException:  # an interruption
            ring.empty()
            reader.set_state(before)
            raise
        if not fits:
            self._reads_several = False
            reader.read_several(1)

    def state(self) -> dict[str, Any]:
        """Position and random stream after the last batch that forward copied."""
        if self._reader and self.ring and self.ring.left:
            return self.ring.state
        return self._reader.state() if self._reader else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Return to where `state` was taken; batches read ahead are dropped."""
        if self._reader:
            if self.ring:
                self.ring.empty()
            self._reader.set_state(state)

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None


def check_fields(
    param: DataParameter
    | DenseImageDataParameter
    | HDF5DataParameter
    | ImageDataParameter
    | WindowDataParameter,
    name: str,
    moved: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> None:
    """ConfigError without a batch size; log fields that moved to transform_param or are unused."""
    if not param.batch_size:
        raise ConfigError(f"{name} needs a batch_size of 1 or more")
    moved = [n for n in moved if param.HasField(n)]
    ignored = [*moved, *(n for n in unused if param.HasField(n))]
    if ignored:
        remedy = f"; write {', '.join(moved)} in transform_param" if moved else ""
        log.warning("%s: without effect, as in Caffe: %s%s", name, ", ".join(ignored), remedy)
