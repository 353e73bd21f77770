"""Data layers whose images a thread reads ahead."""

import logging
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.data.datum import COLOR, GRAY
from caffepy.data.loader import Loader, SequentialLoader
from caffepy.data.sources import open_source
from caffepy.data.sources.base import Source
from caffepy.data.sources.databases import Database
from caffepy.data.sources.image_list import ImageList
from caffepy.data.window_loader import WindowLoader
from caffepy.layer.base import layer
from caffepy.layer.detection_files import warn_of_unread
from caffepy.layer.feed import Prefetching, check_fields
from caffepy.proto.caffe_pb2 import DataParameter, VideoDataParameter

log = logging.getLogger(__name__)

MOVED = ("scale", "mean_file", "crop_size", "mirror")
"""Fields of data layers that transform_param has now."""


@layer("Data")
class Data(Prefetching):
    """-> (N, C, h, w) and labels (N,): records of an LMDB or LevelDB in key order, transformed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Open the source, so that the log says so where Caffe's does."""
        super().__init__(*args, **kwargs)
        param = self.param.data_param
        check_fields(param, "data_param", MOVED, ("rand_skip", "force_encoded_color"))
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
        from caffepy.data.annotated_loader import AnnotatedLoader  # here, since it loads kernels

        assert isinstance(self._source, Database)
        label_map = self.param.annotated_data_param.label_map_file
        warn_of_unread(label_map, self.path, "as records have labels of their own")
        return AnnotatedLoader(self._source, self.param, self.phase, self.device, self.path)


@layer("CPMData")
class CPMData(Data):
    """-> (N, C, h, w) and maps of parts and limbs (N, 2 * (num_parts + 1), h / stride, w / stride):
    records of people with annotations in a channel (Wei et al. 2016, Cao et al. 2017).
    """

    def open(self) -> Loader:
        from caffepy.data.pose_loader import PoseLoader  # here, since it loads OpenCV

        return PoseLoader(self._source, self.param, self.phase, self.device, self.path)


@layer("DataHeatmap")
class DataHeatmap(Prefetching):
    """-> (N, 3, outsize, outsize) and maps of joints (N, J, label_height, label_width): image files
    of a list with coordinates (Pfister et al. 2015).
    """

    tops = (2, 2)

    def open(self) -> Loader:
        from caffepy.data.heatmap_loader import HeatmapLoader  # here, since it loads OpenCV

        return HeatmapLoader(self.param, self.device, self.path)


@layer("ImageData")
class ImageData(Prefetching):
    """-> (N, C, h, w) and labels (N,): image files of a list, in order or shuffled, transformed."""

    tops = (2, 2)

    def open(self) -> Loader:
        param = self.param.image_data_param
        check_fields(param, "image_data_param", MOVED)
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

        check_fields(self.param.image_data_param, "image_data_param", MOVED)
        return ImageSegLoader(self.param, self.phase, self.device, self.path)


@layer("ImageLabelmapData")
class ImageLabelmapData(Prefetching):
    """-> (N, C, h, w) and labels 0 and 1 (N, 1, h, w): image files of a list with images of edges
    (Xie and Tu 2015).
    """

    tops = (2, 2)

    def open(self) -> Loader:
        from caffepy.data.segmentation_loader import LabelmapLoader  # here, since it loads OpenCV

        check_fields(self.param.image_data_param, "image_data_param", MOVED)
        return LabelmapLoader(self.param, self.device, self.path)


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


@layer("DetectionData")
class DetectionData(Prefetching):
    """-> (N, 3, h, w), maps of true boxes (N, 6, h / stride, w / stride), one for each field, and
    with output_gt_boxes the boxes (G, 8, 1, 1): image files of a list with boxes, of another size
    in each batch (Cai and Vasconcelos 2018).
    """

    tops = (1, None)

    def open(self) -> Loader:
        from caffepy.data.cascade_loader import DetectionLoader  # here, since it loads OpenCV

        param = self.param.detection_data_param
        maps = len(param.stride) + param.output_gt_boxes
        if len(self.param.top) != 1 + maps:
            raise ConfigError(
                f"DetectionData has a top of images and {maps} of its strides and true boxes, not "
                f"{len(self.param.top)} in all"
            )
        return DetectionLoader(self.param, self.phase, self.device, self.path)


@layer("EvalData")
class EvalData(Prefetching):
    """-> (N, 3, h, w), true boxes (G, 8, 1, 1) and, as an optional top 2, heights and widths of the
    images (N, 2, 1, 1): image files of a list with boxes (Cai and Vasconcelos 2018).
    """

    tops = (2, 3)

    def open(self) -> Loader:
        from caffepy.data.cascade_loader import EvalLoader  # here, since it loads OpenCV

        return EvalLoader(self.param, self.phase, self.device, self.path)


@layer("DenseImageData")
class DenseImageData(Prefetching):
    """-> (N, C, h, w) and labels (N, 1, h, w): image files of a list with label images
    (Badrinarayanan et al. 2015).
    """

    tops = (2, 2)

    def open(self) -> Loader:
        from caffepy.data.segmentation_loader import DenseImageLoader  # here, since it loads OpenCV

        param = self.param.dense_image_data_param
        check_fields(param, "dense_image_data_param", ("mean_file",))
        return DenseImageLoader(self.param, self.phase, self.device, self.path)


@layer("VideoData")
class VideoData(Prefetching):
    """-> (N, 3, h, w) and labels (N,) of 0: the frames of a video file or of a camera, endlessly
    (SSD's).
    """

    def open(self) -> Loader:
        from caffepy.data.annotated_loader import VideoLoader  # here, since it loads kernels
        from caffepy.data.sources.video import CameraFrames, VideoFrames

        param = self.param.video_data_param
        check_fields(self.param.data_param, "data_param")
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
        check_fields(param, "window_data_param", MOVED[1:])
        if self.param.transform_param.HasField("scale"):
            log.warning(
                "transform_param's scale is ignored, as in Caffe; window_data_param has one"
            )
        return WindowLoader(self.param, self.device, self.path)
