"""Data layers, and HDF5Output, which writes data: nothing to differentiate."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.core.files import locate
from caffepy.data.datum import COLOR, GRAY
from caffepy.data.loader import Loader, SequentialLoader
from caffepy.data.reader import Reader, Turn
from caffepy.data.sources import open_source
from caffepy.data.sources.base import Source
from caffepy.data.sources.databases import Database
from caffepy.data.sources.hdf5 import HDF5Rows, append_rows, new_file
from caffepy.data.sources.image_list import ImageList
from caffepy.data.transformer import Transformer
from caffepy.data.window_loader import WindowLoader
from caffepy.device.blob import Array, Blob, shape_string
from caffepy.device.device import Device
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.filler import fill
from caffepy.ops.objects import Staging
from caffepy.proto.caffe_pb2 import (
    DataParameter,
    DenseImageDataParameter,
    FillerParameter,
    HDF5DataParameter,
    ImageDataParameter,
    VideoDataParameter,
    WindowDataParameter,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        """The first `count` batches of each top, as one whose items are theirs."""
        first = [array[:count] for array in self.arrays]
        return [array.reshape(-1, *array.shape[2:]) for array in first]

    def give(self, top: Blobs) -> None:
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
        """Go back to the first batch that is left in the ring, and empty that."""
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
            self.ring.give(top)
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
        """Go to where `state` was taken; batches read ahead are dropped."""
        if self._reader:
            if self.ring:
                self.ring.empty()
            self._reader.set_state(state)

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None


@layer("Data")
class Data(Prefetching):
    """-> (N, C, h, w) and labels (N,): records of an LMDB or LevelDB in key order, transformed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Open the source, so that the log says so where Caffe's does."""
        super().__init__(*args, **kwargs)
        param = self.param.data_param
        _check_fields(param, "data_param", MOVED, ("rand_skip", "force_encoded_color"))
        if param.shuffle:
            log.warning(
                "data_param's shuffle has no effect: records come in the order of their keys"
            )
        backend = DataParameter.DB.Name(param.backend)
        self._source = open_source(locate(param.source, self.path), backend)

    def open(self) -> Loader:
        transformer = self.transformer()
        self._source.mode = transformer.decode_mode
        return SequentialLoader(self._source, transformer, self.param.data_param.batch_size)


@layer("AnnotatedData")
class AnnotatedData(Data):
    """-> (N, C, h, w) and boxes (1, 1, B, 8): records of AnnotatedDatum in key order (Liu et al.
    2016).

    A box is [number in the batch, label, instance, xmin, ymin, xmax, ymax, difficult]; labels
    (N, 1, 1, 1) of records without boxes; (N, 1, 300, 5) for MobileNet-YOLO.
    """

    def open(self) -> Loader:
        from caffepy.data.annotated_loader import AnnotatedLoader  # here, since it loads numba

        assert isinstance(self._source, Database)
        return AnnotatedLoader(self._source, self.param, self.phase, self.device, self.path)


@layer("CPMData")
class CPMData(Data):
    """-> (N, C, h, w) and maps of parts and limbs (N, 2 * (num_parts + 1), h / stride, w / stride):
    records of people with annotations in a channel (Wei et al. 2016, Cao et al. 2017).
    """

    def open(self) -> Loader:
        from caffepy.data.pose_loader import PoseLoader  # here, since it loads OpenCV

        return PoseLoader(self._source, self.param, self.phase, self.device, self.path)


@layer("ImageData")
class ImageData(Prefetching):
    """-> (N, C, h, w) and labels (N,): image files of a list, in order or shuffled, transformed."""

    tops = (2, 2)

    def open(self) -> Loader:
        param = self.param.image_data_param
        _check_fields(param, "image_data_param", MOVED)
        if param.short_side:
            log.warning("image_data_param's short_side has no effect; use new_height and new_width")
        transformer = self.transformer()
        if (param.new_height > 0) != (param.new_width > 0):
            raise ConfigError("new_height and new_width must both be given or neither")
        source = ImageList(
            locate(param.source, self.path),
            param.root_folder,
            self.path,
            mode=COLOR if param.is_color else GRAY,
            size=(param.new_width, param.new_height) if param.new_width else None,
            seed=self.device.draw_seed() if param.shuffle else None,
            skip=self.device.draw_seed() % param.rand_skip if param.rand_skip else None,
        )
        return SequentialLoader(source, transformer, param.batch_size)


@layer("ImageSegData")
class ImageSegData(Prefetching):
    """-> (N, C, h, w), labels (N, 1, h, w) and sizes (N, 1, 1, 2): image files of a list with label
    images, or a label each (Chen et al. 2015, Zhao et al. 2017).
    """

    tops = (2, 3)

    def open(self) -> Loader:
        from caffepy.data.segmentation_loader import ImageSegLoader  # here, since it loads OpenCV

        _check_fields(self.param.image_data_param, "image_data_param", MOVED)
        return ImageSegLoader(self.param, self.phase, self.device, self.path)


@layer("ImageGtData")
class ImageGtData(Prefetching):
    """-> (N, 3, h, w), maps of true boxes (N, 6, h / rate, w / rate), one for each field, and
    with output_gt_boxes the boxes (G, 7, 1, 1): image files of a list with boxes (Cai et al. 2016).
    """

    tops = (2, None)

    def open(self) -> Loader:
        from caffepy.data.field_loader import FieldLoader  # here, since it loads OpenCV

        param = self.param.image_gt_data_param
        maps = len(param.downsample_rate) + param.output_gt_boxes
        if len(self.param.top) != 1 + maps:
            raise ConfigError(
                f"ImageGtData has a top of images and {maps} of its downsample_rates and true "
                f"boxes, not {len(self.param.top)} in all"
            )
        return FieldLoader(self.param, self.phase, self.device, self.path)


@layer("DenseImageData")
class DenseImageData(Prefetching):
    """-> (N, C, h, w) and labels (N, 1, h, w): image files of a list with label images
    (Badrinarayanan et al. 2015).
    """

    tops = (2, 2)

    def open(self) -> Loader:
        from caffepy.data.segmentation_loader import DenseImageLoader  # here, since it loads OpenCV

        param = self.param.dense_image_data_param
        _check_fields(param, "dense_image_data_param", ("mean_file",))
        return DenseImageLoader(self.param, self.phase, self.device, self.path)


@layer("VideoData")
class VideoData(Prefetching):
    """-> (N, 3, h, w) and labels (N,) of 0: the frames of a video file or of a camera, endlessly
    (SSD's).
    """

    def open(self) -> Loader:
        from caffepy.data.annotated_loader import VideoLoader  # here, since it loads numba
        from caffepy.data.sources.video import CameraFrames, VideoFrames

        param = self.param.video_data_param
        _check_fields(self.param.data_param, "data_param")
        if param.HasField("source"):
            raise ConfigError("video_data_param: lists of videos, as C3D has them, are not read")
        source: Source
        if param.video_type == VideoDataParameter.WEBCAM:
            if param.video_file:
                raise ConfigError("video_data_param: a video_file needs video_type: VIDEO")
            source = CameraFrames(param.device_id, param.skip_frames)
        elif param.video_file:
            source = VideoFrames(locate(param.video_file, self.path), param.skip_frames)
        else:
            raise ConfigError("video_data_param: video_type: VIDEO needs a video_file")
        return VideoLoader(source, self.param, self.phase, self.device, self.path)


@layer("WindowData")
class WindowData(Prefetching):
    """-> (N, 3, crop, crop) and labels (N,): windows of images, background before foreground
    (Girshick et al. 2014).
    """

    tops = (2, 2)

    def open(self) -> Loader:
        param = self.param.window_data_param
        _check_fields(param, "window_data_param", MOVED[1:])
        if self.param.transform_param.HasField("scale"):
            log.warning(
                "transform_param's scale is ignored, as in Caffe; window_data_param has one"
            )
        return WindowLoader(self.param, self.device, self.path)


MOVED = ("scale", "mean_file", "crop_size", "mirror")


def _check_fields(
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


@layer("HDF5Data")
class HDF5Data(Feed):
    """-> one top a dataset of the top's name: N rows of the HDF5 files that the source lists."""

    tops = (1, None)
    reads_files = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.hdf5_data_param
        if self.param.HasField("transform_param"):
            raise ConfigError("HDF5Data does not transform data; remove transform_param")
        _check_fields(param, "hdf5_data_param")
        seed = self.device.draw_seed() if param.shuffle else None
        self._rows = HDF5Rows(locate(param.source, self.path), self.param.top, self.dtype, seed)
        for blob, shape in zip(top, self._rows.row_shapes, strict=True):
            blob.reshape((param.batch_size, *shape))

    def extent(self) -> str:
        return self._rows.extent()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.ring and self.ring.left:
            self.ring.give(top)
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


@layer("MemoryData")
class MemoryData(Feed):
    """-> (N, C, H, W), labels (N, 1, 1, 1): arrays of `reset`, endlessly, or images of `add`."""

    tops = 2
    fixed_batch = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.memory_data_param
        self._shape = param.channels, param.height, param.width
        self.batch_size = param.batch_size
        if not self.batch_size * prod(self._shape):
            raise ConfigError(
                "memory_data_param needs batch_size, channels, height and width of 1 or more"
            )
        transform = self.param.transform_param
        self._transformer = Transformer(transform, self.phase, self.device, self.path)
        self._data: Array | None = None
        # Where the random stream stood before the images were added.
        self._before: dict[str, Any] | None = None
        self._unread = False
        self._restored = 0  # where to go on in arrays that are still to come
        top[0].reshape((self.batch_size, *self._shape))
        top[1].reshape((self.batch_size,))

    def reset(self, data: Array, labels: Array) -> None:
        """Take arrays (n, C, H, W) and (n, ...) as they are; the batch size must divide n."""
        n = len(data)
        if data.shape[1:] != self._shape:
            raise DataError(
                f"arrays of shape {shape_string(data.shape[1:])} for a layer of "
                f"{shape_string(self._shape)}"
            )
        if not n or n % self.batch_size or len(labels) != n:
            raise DataError(
                f"{n} arrays and {len(labels)} labels; give a multiple of the batch size "
                f"{self.batch_size}"
            )
        self._data, self._labels = data, np.reshape(labels, (n, -1))[:, 0]
        self._position, self._restored, self._unread = self._restored % n, 0, True
        self._before = None

    def add(self, images: Array, labels: Array) -> None:
        """Take images (n, C, H, W), which are transformed; earlier ones must have been used up."""
        if self._unread:
            raise DataError("images cannot be added before those given earlier were used up")
        before = self._transformer.state()
        out = np.empty((len(images), *self._transformer.output_shape(images.shape[1:])), self.dtype)
        self._transformer.apply(images, out, self._transformer.draw(len(images)))
        self.reset(out, labels)
        self._before = before

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._need_data()
        top[1].reshape((self.batch_size, 1, 1, 1))
        self.hand_over(top, self._next)
        self._unread = self._position > 0

    def skip(self, batches: int) -> None:
        self._position = (self._position + batches * self.batch_size) % len(self._need_data())
        self._unread = self._position > 0

    def _need_data(self) -> Array:
        if self._data is None:
            raise DataError("MemoryData needs data before forward; call set_input_arrays")
        return self._data

    def _next(self, arrays: Sequence[Array]) -> None:
        assert self._data is not None
        here = slice(self._position, self._position + self.batch_size)
        data, labels = arrays
        data[...], labels[:, 0, 0, 0] = self._data[here], self._labels[here]
        self._position = here.stop % len(self._data)

    def state(self) -> dict[str, Any]:
        """Position in the arrays, and the random stream of `add`, as it was before the images that
        are being read.
        """
        if self._data is None:
            return {"position": self._restored, **self._transformer.state()}
        before = self._before if self._unread else None
        random = self._transformer.state() if before is None else before
        return {"position": self._position, **random}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken, in the present arrays or in the next ones."""
        super().set_state(state)
        self._restored = int(state.get("position", 0))
        self._transformer.set_state(state)
        if self._data is not None:
            self._position, self._restored = self._restored % len(self._data), 0
            self._unread = self._position > 0


STATIC, FRESH = range(2)
"""Kinds of random streams of DummyData."""

SIZES = ("num", "channels", "height", "width")


@layer("DummyData")
class DummyData(Feed):
    """-> tops of given shapes: constants, which are filled once, or new random values at each
    forward.

    NVCaffe's fillers whose names end in "static" fill at the first forward of each net only. The
    layer has a random stream of its own, since several solvers share it.
    """

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        fillers = list(self.param.dummy_data_param.data_filler) or [FillerParameter()]
        self._fillers = _each("data_filler", fillers, len(top))
        self._filled: list[Blob] = []
        self._draws = any(filler.type != "constant" for filler in self._fillers)
        self._has_fresh = any(map(_is_fresh, self._fillers))
        self._seed = self.device.draw_seed() if self._draws else 0
        self._batch = 0
        for blob, shape in zip(top, self._shapes(len(top)), strict=True):
            blob.reshape(shape)

    def _shapes(self, tops: int) -> list[tuple[int, ...]]:
        param = self.param.dummy_data_param
        legacy = [list(getattr(param, name)) for name in SIZES]
        if not any(legacy):
            return _each("shape", [tuple(shape.dim) for shape in param.shape], tops)
        if param.shape:
            raise ConfigError(
                "dummy_data_param takes either shape or num, channels, height and width, not both"
            )
        sizes = [_each(name, given, tops) for name, given in zip(SIZES, legacy, strict=True)]
        return list(zip(*sizes, strict=True))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Fill untouched tops that have constant fillers; what a user writes to them stays."""
        constant = (filler for filler in self._fillers if filler.type == "constant")
        for blob, filler in zip(self.tops_of_user(top), constant, strict=True):
            if not blob.data_memory.touched:
                fill(blob, filler, self.device.rng)

    def tops_of_user(self, top: Blobs) -> Blobs:
        pairs = zip(top, self._fillers, strict=True)
        return [blob for blob, filler in pairs if filler.type == "constant"]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        fresh = []
        for blob, filler in zip(top, self._fillers, strict=True):
            if filler.type.endswith("static") and not any(known is blob for known in self._filled):
                fill(blob, filler, self._rng(STATIC, len(self._filled) + self._filled_elsewhere()))
                self._filled.append(blob)
            elif _is_fresh(filler):
                fresh.append((blob, filler))
        if fresh:
            rng = self._rng(FRESH, self._batch)

            def draw(arrays: Sequence[Array]) -> None:
                for array, (_, filler) in zip(arrays, fresh, strict=True):
                    fill(array, filler, rng)
                self._batch += 1

            self.hand_over([blob for blob, _ in fresh], draw)

    def _filled_elsewhere(self) -> int:
        """Number of tops that are filled once in other processes, by nets before this one."""
        turns = self.deal[: self.turn + 1]
        nets = sum(turn.before for turn in turns) + sum(turn.after for turn in turns[:-1])
        return nets * sum(filler.type.endswith("static") for filler in self._fillers)

    def skip(self, batches: int) -> None:
        self._batch += batches * self._has_fresh

    def _rng(self, kind: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.MT19937([self._seed, kind, number]))

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed, "batch": self._batch} if self._draws else {}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if self._draws and "seed" in state:
            self._seed, self._batch = int(state["seed"]), int(state["batch"])


def _is_fresh(filler: FillerParameter) -> bool:
    """True if each forward draws new values."""
    return filler.type != "constant" and not filler.type.endswith("static")


def _each(name: str, values: list[T], tops: int) -> list[T]:
    """One value for each top, from one for all of them or one each."""
    if len(values) not in (1, tops):
        raise ConfigError(
            f"{name} must be given once or once for each top, not {len(values)} times for {tops} "
            "tops"
        )
    return values * tops if len(values) == 1 else values
