"""HDF5Data and HDF5Output."""

from collections.abc import Sequence
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.data.sources.hdf5 import HDF5Rows, append_rows, new_file
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.feed import Feed, Ring, check_fields


@layer("HDF5Data")
class HDF5Data(Feed):
    """-> one top a dataset of the top's name: N rows of the HDF5 files that the source lists."""

    tops = (1, None)
    reads_files = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.hdf5_data_param
        if self.param.HasField("transform_param"):
            raise ConfigError("HDF5Data does not transform data; remove transform_param")
        check_fields(param, "hdf5_data_param")
        seed = self.device.draw_seed() if param.shuffle else None
        self._rows = HDF5Rows(locate(param.source, self.path), self.param.top, self.dtype, seed)
        for blob, shape in zip(top, self._rows.row_shapes, strict=True):
            blob.reshape((param.batch_size, *shape))

    def extent(self) -> str:
        return self._rows.extent()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.ring and self.ring.left:
            self.ring.write_tops(top)
        else:
            self.hand_over(top, self._rows.read)

    def _fill(self, ring: Ring, top: Blobs) -> None:
        rows, size = self._rows, self.param.hdf5_data_param.batch_size
        at_hand, before = rows.at_hand, rows.state()
        count = ring.most if at_hand is None else min(ring.most, at_hand // size)
        if count:
            try:
                rows.read(ring.room(count))
            except BaseException:  # an interruption
                rows.set_state(before)
                raise
            ring.fill(count, lambda batches: rows.state_after(before, batches * size))

    def skip(self, batches: int) -> None:
        if self.ring and self.ring.left:
            self._rows.set_state(self.ring.state)
            self.ring.empty()
        self._rows.skip(batches * self.param.hdf5_data_param.batch_size)

    def state(self) -> dict[str, Any]:
        return self.ring.state if self.ring and self.ring.left else self._rows.state()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if self.ring:
            self.ring.empty()
        self._rows.set_state(state)


@layer("HDF5Output")
class HDF5Output(Layer):
    """(N, ...) and (N, ...) -> datasets `data` and `label` of an HDF5 file, with four axes each.

    One forward writes Caffe's file; where Caffe's second one fails, rows are appended. Between
    forwards the file is complete and closed. A device that writes no files leaves it alone.
    """

    bottoms = 2
    tops = 0
    share_in_parallel = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._file = self.param.hdf5_output_param.file_name
        if not self._file:
            raise ConfigError("hdf5_output_param needs a file_name")
        if self._param_device.writes_files:
            new_file(self._file)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        data, label = (b.legacy_shape() for b in bottom)
        if data[0] != label[0]:
            raise ConfigError(
                f"data and labels must have the same number of rows, not {data[0]} and {label[0]}"
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        data, label = (b.data.reshape(b.legacy_shape()) for b in bottom)
        if self._param_device.writes_files:
            append_rows(self._file, {"data": data, "label": label})

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """No loss lies above."""
