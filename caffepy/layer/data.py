"""Layers that feed a net: Data and DummyData. They have no bottoms and nothing to differentiate."""

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from caffepy.data.loader import RecordLoader
from caffepy.data.reader import Reader
from caffepy.data.source import open_source
from caffepy.data.transformer import Transformer
from caffepy.errors import ConfigError
from caffepy.filler import fill
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.paths import locate
from caffepy.proto.caffe_pb2 import DataParameter, FillerParameter

log = logging.getLogger(__name__)

T = TypeVar("T")


class Feed(Layer):
    """Base of the layers without bottoms."""

    bottoms = 0
    share_in_parallel = True
    is_data = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The tops were shaped by `setup`; forward shapes them anew if the data's shape changes."""

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Nothing lies below."""


@layer("Data")
class Data(Feed):
    """-> (N, C, h, w) and labels (N,): records of an LMDB or LevelDB in key order, transformed.

    A thread reads up to `prefetch` batches ahead; forward copies the next one into the tops. The first record of a
    batch decides its shape.
    """

    tops = (1, 2)
    _reader: Reader | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Open the source and shape the tops by its first record, which is not consumed."""
        param = self.param.data_param
        _warn_ignored(param)
        if not param.batch_size:
            raise ConfigError("data_param needs a batch_size of 1 or more")
        if not param.prefetch:
            raise ConfigError("data_param needs a prefetch of 1 or more")
        transformer = Transformer(self.param.transform_param, self.phase, self.device, self.path)
        source = open_source(locate(param.source, self.path), DataParameter.DB.Name(param.backend))
        loader = RecordLoader(source, transformer, param.batch_size)
        top[0].reshape((param.batch_size, *loader.shape()))
        log.info("output data size: %s", ",".join(map(str, top[0].shape)))
        if len(top) > 1:
            top[1].reshape((param.batch_size,))
        self._reader = Reader(loader, param.prefetch, self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Copy the next batch."""
        assert self._reader is not None
        batch = self._reader.take()
        try:
            top[0].reshape(batch.data.shape)
            self.ops.copy(batch.data, top[0].data)
            if len(top) > 1:
                top[1].data[...] = batch.label
        finally:
            self._reader.give_back(batch)

    def state(self) -> dict[str, Any]:
        """Position and random stream after the last batch that forward gave."""
        return self._reader.state() if self._reader else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; batches read ahead are dropped."""
        if self._reader:
            self._reader.set_state(state)

    def close(self) -> None:
        """Stop the thread and release the database."""
        if self._reader:
            self._reader.close()
        self._reader = None


def _warn_ignored(param: DataParameter) -> None:
    """Name the fields of data_param that Caffe reads and ignores."""
    names = "scale", "mean_file", "crop_size", "mirror", "rand_skip", "force_encoded_color"
    moved = [n for n in names[:4] if param.HasField(n)]
    ignored = [n for n in names if param.HasField(n)]
    if ignored:
        remedy = f"; {', '.join(moved)} belong in transform_param" if moved else ""
        log.warning("data_param's %s are ignored, as in Caffe%s", ", ".join(ignored), remedy)


@layer("DummyData")
class DummyData(Feed):
    """-> tops of given shapes: constants, filled once, or fresh random values at each forward."""

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Shape the tops; fill those with constant fillers, which a user may overwrite for good."""
        fillers = list(self.param.dummy_data_param.data_filler) or [FillerParameter()]
        self._fillers = _each("data_filler", fillers, len(top))
        for blob, shape in zip(top, self._shapes(len(top)), strict=True):
            blob.reshape(shape)
        self._fill(top, constant=True)

    def _shapes(self, tops: int) -> list[tuple[int, ...]]:
        param = self.param.dummy_data_param
        legacy = {name: list(getattr(param, name)) for name in ("num", "channels", "height", "width")}
        if any(legacy.values()):
            if param.shape:
                raise ConfigError("dummy_data_param takes either shape or num, channels, height and width, not both")
            return list(zip(*(_each(name, sizes, tops) for name, sizes in legacy.items()), strict=True))
        return _each("shape", [tuple(shape.dim) for shape in param.shape], tops)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Fill the tops whose filler is not constant."""
        self._fill(top, constant=False)

    def _fill(self, top: Blobs, constant: bool) -> None:
        for blob, filler in zip(top, self._fillers, strict=True):
            if (filler.type == "constant") == constant:
                fill(blob, filler, self.device.rng)


def _each(name: str, values: list[T], tops: int) -> list[T]:
    """One value for each top, from one for all of them or one each."""
    if len(values) not in (1, tops):
        raise ConfigError(f"{name} must be given once or once for each top, not {len(values)} times for {tops} tops")
    return values * tops if len(values) == 1 else values
