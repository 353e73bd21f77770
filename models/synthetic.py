"""Nets that need no data: their data layers make random images and labels, for checks, timings,
benchmarks and tests.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from caffepy.core.errors import ConfigError, one_or_each
from caffepy.device.blob import count_of
from caffepy.models import path
from caffepy.proto.caffe_pb2 import (
    DummyDataParameter,
    FillerParameter,
    LayerParameter,
    NetParameter,
    VideoDataParameter,
)
from caffepy.proto.text import read_net, where

_SOURCES = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "DataHeatmap": "heatmap_data_param",
    "DetectionData": "detection_data_param",
    "EvalData": "eval_data_param",
    "ImageGtData": "image_gt_data_param",
    "WindowData": "window_data_param",
    "HDF5Data": "hdf5_data_param",
    "AnnotatedData": "data_param",
    "BoxData": "data_param",
    "CPMData": "data_param",
    "DenseImageData": "dense_image_data_param",
    "ImageLabelmapData": "image_data_param",
    "ImageSegData": "image_data_param",
    "LaneData": "data_param",
    "MemoryData": "memory_data_param",
    "VideoData": "video_data_param",
    "VideoSegmentationData": "image_data_param",
    "VideoWithVoxelTruthData": "image_data_param",
}
_MEMORY = "memory_data_param"
"""Layers that read data, and where their batch size stands."""

_DENSE = frozenset({"DenseImageData", "ImageLabelmapData", "ImageSegData"})
"""Those whose labels are images."""

_WITH_MEANS = frozenset({"AnnotatedData", "Data", "ImageData", "MemoryData", "SequenceData"})
"""Data layers of images alone whose mean_value is one number, or one for each channel."""

_VOXELS = frozenset({"VideoSegmentationData", "VideoWithVoxelTruthData"})
"""Those whose labels are volumes, as their data: C3D's."""

_WITH_MASKS = frozenset({43, 56})
"""The num_parts of CPMData whose records have masks."""

_FIELDS: dict[str, Callable[[LayerParameter], Sequence[int]]] = {
    "DetectionData": lambda layer: layer.detection_data_param.stride,
    "ImageGtData": lambda layer: layer.image_gt_data_param.downsample_rate,
}
"""Those with maps of true boxes: by how much these are smaller than the images."""

_FRAMES = 16
"""The length of volumes that a net does not state."""

_LENGTH = 4
"""The length of sequences of labels."""

_BOXES = 2
"""Boxes of an image that stand for those of AnnotatedData."""

_TRUTHS = 8
"""Boxes of the image of Faster R-CNN."""

_OF_ONE_IMAGE = "im_info", "gt_boxes"
"""Its tops with sizes and true boxes."""

_REGIONS = 128
"""Regions of interest that stand for those of an image."""

_MULTIBOX = frozenset({"MultiBoxLoss", "MultiBoxFocalLoss"})
_READ_BOXES = frozenset({*_MULTIBOX, "DetectionEvaluate", "EvalDetection"})
_READ_YOLO_BOXES = frozenset({"RegionLoss", "Yolov3"})
"""Layers that read true boxes: SSD's and Intel's, and YOLO's."""

_READ_IMAGES = frozenset({"Convolution", "ConvolutionDepthwise", "DepthwiseConvolution", "Pooling"})
_READ_REGIONS = frozenset({"PSROIAlign", "PSROIPooling", "ROIAlign", "ROIPooling", "ROIWarping"})
_READ_SEQUENCES = frozenset({"CTCGreedyDecoder", "CtcLoss", "WarpCTCLoss"})
_COMPARE = frozenset({"EuclideanLoss", "L1Loss", "SigmoidCrossEntropyLoss", "SmoothL1Loss"})
"""Layers that say what a further top of data is: images, regions, or as many numbers as others."""

_READ_MAPS = frozenset({"YoloSeg", "SegmentationEvaluate", "EuclideanLossHeatmap", "GuidedDropout"})
"""Those whose second bottom has the channels of the first."""

_SHAPED = frozenset({*_DENSE, *_VOXELS, "CPMData", "BoxData", "DataHeatmap"})
"""Those whose tops have shapes of their own."""

# Layers whose tops have as many channels as their bottom; others than these and those with
# num_output end the trace.
_KEEP_CHANNELS = frozenset(
    {"BatchNorm", "Dropout", "LRN", "Pooling", "PReLU", "ReLU", "Scale", "Softmax"}
)


class Guess(NamedTuple):
    """Shapes to take where a net does not say them: that of its images, and whether labels have
    their less usual shape: images, too, or boxes of no class.
    """

    image: tuple[int, int, int]
    other_labels: bool = False


def synthetic(
    net: NetParameter,
    batch: int | None = None,
    image: Sequence[int] | None = None,
    guess: Guess | None = None,
    origin: str | None = None,
) -> NetParameter:
    """A copy of `net` whose layers that read data are DummyData: gaussian images, labels drawn from
    all classes.

    They are drawn once, so that they cost nothing from the second pass on. The first top has the
    images, others labels, boxes or what their names say. `batch` replaces the batch size of every
    data layer but Faster R-CNN's, which has one image. `image` is the shape (C, H, W); without it
    the layer must state one, as by its crop_size, else `guess` has it, else ConfigError. With a
    `guess`, all Python layers without bottoms, and those whose type has "Data" in its name, count
    as layers that read data. Labels lie in [0, classes) and are whole numbers once a loss has
    truncated them. Errors say where the layer stands in the file `origin`.
    """
    copy = NetParameter()
    copy.CopyFrom(net)
    compared = _compared(net)
    for layer in copy.layer:
        _leave_out_files(layer)
        setting = _SOURCES.get(layer.type, _MEMORY if layer.memory_data_param.source else "")
        is_source = setting or _is_python_source(layer, guess) or _is_other_source(layer, guess)
        if not is_source:
            if guess and layer.type == "Input" and not layer.input_param.shape:
                for _ in layer.top:
                    layer.input_param.shape.add(dim=[1, *(image or guess.image)])
            continue
        source = getattr(layer, setting or "data_param")
        size = (batch if layer.type != "Python" else 0) or _batch_size(source) or 1
        dummy = DummyDataParameter()
        try:
            shape = list(image or _image(layer, guess))
            for i in range(len(layer.top)):
                dims = _dims(net, layer, i, size, shape, guess, compared)
                count_of(dims)  # raises an error for what is no shape
                dummy.shape.add(dim=dims)
                dummy.data_filler.append(_filler(net, layer, i, dims, size, shape))
        except ConfigError as error:
            raise error.at(where(origin, layer)) from None
        layer.type = "DummyData"
        layer.dummy_data_param.CopyFrom(dummy)
        for field in ("transform_param", "cpm_transform_param", "python_param", _MEMORY):
            layer.ClearField(field)
        for field in _SOURCES.values():
            layer.ClearField(field)
    return copy


def _batch_size(source: Any) -> int:
    """The batch size that settings of data state, 0 if they state none."""
    stated: int = getattr(source, "batch_size", 0) or getattr(source, "batchsize", 0)
    return stated


def _leave_out_files(layer: LayerParameter) -> None:
    """Clear the settings of layers whose files name the images of the data."""
    if layer.type == "DetectionOutput":
        layer.detection_output_param.ClearField("save_output_param")
    elif layer.type == "FrcnnOutput":
        layer.frcnn_output_param.ClearField("save_output_param")
    elif layer.type == "DetectionEvaluate":
        layer.detection_evaluate_param.ClearField("name_size_file")


def _dims(
    net: NetParameter,
    layer: LayerParameter,
    i: int,
    size: int,
    shape: list[int],
    guess: Guess | None,
    compared: Mapping[str, int],
) -> list[int]:
    """The shape of top i of a data layer with `size` images of this shape, as readers want it."""
    top, dims = layer.top[i], None
    if layer.type not in ("AnnotatedData", "EvalData", *_FIELDS):
        dims = _boxes(net, top, size) if i else None
        if guess and not dims:
            dims = _reshaped(net, top, _top_shape(layer, i, size, shape, guess))
        if guess and i and not dims and layer.type not in _SHAPED:
            named = layer.type == "Python" and _region_top(top, "", False)
            if not named or compared.get(top):
                dims = _read_as(net, layer, top, size, shape, compared)
        if not i and layer.type == "Data" and not layer.transform_param.crop_size:
            dims = _sliced(net, top, size, shape[0]) or dims
            if any(x.type == "GuidedDropout" and top in x.bottom[1:] for x in net.layer):
                dims = [size, _pixel_classes(net, top)]
    dims = dims or _top_shape(layer, i, size, shape, guess)
    if layer.type == "AnnotatedData" and i == 2:
        dims[1] = _pixel_classes(net, top)
    elif layer.type == "DataHeatmap" and i == 1:
        kept = [place for place in layer.heatmap_data_param.labelinds.split(",") if place.strip()]
        dims[1] = len(kept) // 2 or _pixel_classes(net, top)
    return dims


def _filler(
    net: NetParameter, layer: LayerParameter, i: int, dims: list[int], size: int, shape: list[int]
) -> FillerParameter:
    """What fills top i of a data layer, of shape `dims`: images, labels, boxes or maps."""
    top = layer.top[i]
    if i == 0 and not _is_label(net, top):
        return FillerParameter(type="gaussianstatic", std=1)
    if layer.type in _FIELDS:  # background or class 1; no image of true boxes
        is_map = dims[-1] > 1 and len(dims) > 2
        return FillerParameter(type="uniformstatic", min=0, max=1.99 if is_map else 1)
    if layer.type == "EvalData" and i == 2:
        return FillerParameter(value=min(shape[-2:]))
    if _cells(net, top):  # a box of class 0 in each cell
        return FillerParameter(type="uniformstatic", min=0, max=0.99)
    if dims == [_REGIONS, 5]:
        return FillerParameter(type="truthsstatic", value=-min(shape[-2:]))
    if dims == [size, 1, 300, 5]:
        most = _yolo_classes(net, top) - 1
        return FillerParameter(type="truthsstatic", min=0, max=most, value=1)
    if dims == _truths(size) or (layer.type == "Python" and top in _OF_ONE_IMAGE):
        low, high = _true_classes(net, layer, top)
        value = min(shape[-2:]) if layer.type == "Python" else size
        return FillerParameter(type="truthsstatic", min=low, max=high, value=value)
    return FillerParameter(type="uniformstatic", min=0, max=_classes(net, top) - 0.01)


def image_shape(name: str) -> tuple[int, ...]:
    """The shape (C, H, W) of one image of a bundled net, as its deploy net takes it.

    ConfigError for a name that is not bundled.
    """
    deploy = path(name, "deploy")
    if deploy is None:
        raise ConfigError(f"there is no bundled net {name!r}")
    return tuple(read_net(deploy).layer[0].input_param.shape[0].dim[1:])


def _is_python_source(layer: LayerParameter, guess: Guess | None) -> bool:
    """True for py-faster-rcnn's layer that reads data, with a guess for any without bottoms."""
    known = layer.python_param.module == "roi_data_layer.layer"
    return layer.type == "Python" and not layer.bottom and (known or guess is not None)


def _is_other_source(layer: LayerParameter, guess: Guess | None) -> bool:
    """True, with a guess, for a layer without bottoms that is a fork's own to read data."""
    named = "Data" in layer.type and layer.type != "DummyData"
    return guess is not None and named and not layer.bottom


def _image(layer: LayerParameter, guess: Guess | None) -> list[int]:
    """The shape (C, H, W) of the images by the layer's own settings."""
    transform, files = layer.transform_param, layer.image_data_param
    dense, resize = layer.dense_image_data_param, transform.resize_param
    video, memory = layer.video_data_param, layer.memory_data_param
    people, marked = layer.cpm_transform_param, layer.image_gt_data_param
    cascade, evaluated = layer.detection_data_param, layer.eval_data_param
    grey = transform.force_gray or not files.is_color or memory.channels == 1
    channels = 3
    sizes = (
        (transform.crop_size, transform.crop_size),
        (transform.crop_h, transform.crop_w),
        (transform.crop_height, transform.crop_width),
        (resize.height, resize.width),
        (files.new_height, files.new_width),
        (dense.crop_height, dense.crop_width),
        (dense.new_height, dense.new_width),
        (video.crop_size, video.crop_size),
        (video.new_height, video.new_width),
        (memory.height, memory.width),
        (marked.crop_height, marked.crop_width),
        (marked.resize_height, marked.resize_width),
        (cascade.crop_height, cascade.crop_width),
        (cascade.resize_height, cascade.resize_width),
        (cascade.crop_short_size, cascade.crop_long_size),
        (cascade.short_size, cascade.long_size),
        (evaluated.resize_height, evaluated.resize_width),
        (evaluated.short_size, evaluated.long_size),
        (layer.heatmap_data_param.outsize, layer.heatmap_data_param.outsize),
        *([(people.crop_size_y, people.crop_size_x)] if layer.type == "CPMData" else []),
    )
    height, width = next((size for size in sizes if all(size)), (0, 0))
    if not (height and width) and guess:
        channels, height, width = guess.image
    if not (height and width):
        raise ConfigError(
            "no crop_size: give the shape of the images, --image CHANNELS,HEIGHT,WIDTH"
        )
    if video.HasField("num_segments"):  # of each some frames, or flows of two channels
        per_frame = 3 if video.modality == VideoDataParameter.RGB else 2
        return [video.num_segments * per_frame * max(video.new_length, 1), height, width]
    if layer.type == "CPMData":
        channels = 6 if people.num_parts in _WITH_MASKS else 4
    frames = video.new_length or (layer.type in _VOXELS and (files.new_length or _FRAMES))
    length = [frames] if frames else []
    means = len(transform.mean_value) if layer.type in _WITH_MEANS else 0
    if guess and means > 1:  # those of records, which have any number of channels
        channels = means
    channels = 1 if grey else channels
    if means not in (0, 1, channels):
        raise ConfigError(f"{means} mean_value for {one_or_each(channels)}")
    return [channels, *length, height, width]


def _top_shape(
    layer: LayerParameter, i: int, batch: int, image: list[int], guess: Guess | None
) -> list[int]:
    """The shape of a top: images, then what the type or the names of layer and top say."""
    name, inside = layer.top[i], image[-2:]
    if layer.type == "Python":
        other = guess is not None and guess.other_labels
        if shape := _region_top(name, layer.python_param.param_str, other):
            return shape
    elif layer.type == "AnnotatedData" and i == 1:
        return [batch, 1, 300, 5] if layer.annotated_data_param.yolo_data_type else _truths(batch)
    elif layer.type == "AnnotatedData" and i == 2:
        annotated = layer.annotated_data_param
        size = [annotated.seg_resize_height, annotated.seg_resize_width]
        scaled = [side // max(annotated.seg_scales, 1) for side in inside]
        return [batch, 1, *(size if all(size) else scaled)]
    elif layer.type == "BoxData" and i:
        return [batch, 1, 300, 5]
    if i == 0 and not (guess and guess.other_labels and "label" in name):
        return [batch, *image]
    if layer.type in _VOXELS:
        return [batch, layer.image_data_param.num_truth_channels, *image[1:]]
    if layer.type == "CPMData":
        people = layer.cpm_transform_param
        height, width = (side // max(people.stride, 1) for side in inside)
        return [batch, 2 * (people.num_parts + 1), height, width]
    if layer.type == "DataHeatmap":
        joints = layer.heatmap_data_param
        return [batch, 1, joints.label_height, joints.label_width]
    if layer.type in _FIELDS:
        rates = _FIELDS[layer.type](layer)
        if min(rates, default=1) < 1:
            raise ConfigError("downsample_rate and stride must be 1 or more")
        grid = [int(side / rates[i - 1] + 0.5) for side in inside] if 0 < i <= len(rates) else []
        of_cascade = layer.type == "DetectionData"
        return [batch, 6, *grid] if grid else [_TRUTHS, 8, 1, 1] if of_cascade else [_TRUTHS, 7]
    if layer.type == "EvalData":
        return [_TRUTHS, 8, 1, 1] if i == 1 else [batch, 2, 1, 1]
    if layer.type in _DENSE and i == 2:
        return [batch, 1, 1, 2]
    if layer.type in _DENSE:
        factor = max(layer.dense_image_data_param.label_divide_factor, 1)
        return [batch, 1, *(side // factor for side in inside)]
    if guess and guess.other_labels:
        return [batch, 1, *inside]
    return [batch]


def _truths_of(layer: LayerParameter) -> Sequence[str]:
    """The bottom of a layer of detectors that has true boxes."""
    return layer.bottom[3:4] if layer.type in _MULTIBOX else layer.bottom[1:2]


def _boxes(net: NetParameter, name: str, batch: int) -> list[int] | None:
    """The shape of true boxes by the layer that reads them; None for other blobs."""
    if places := _cells(net, name):
        return [batch, 7 * places]
    types = {layer.type for layer in net.layer if name in _truths_of(layer)}
    if types & _READ_YOLO_BOXES:
        return [batch, 1, 300, 5]
    return _truths(batch) if types & _READ_BOXES else None


def _cells(net: NetParameter, name: str) -> int:
    """The number of cells of the first YOLO's loss that reads true boxes from this blob, or 0."""
    for layer in net.layer:
        grid = layer.detection_loss_param
        if layer.type == "DetectionLoss" and name in layer.bottom[1:] and not grid.cls_num:
            return grid.side**2
    return 0


def _read_as(
    net: NetParameter,
    source: LayerParameter,
    top: str,
    batch: int,
    image: list[int],
    compared: Mapping[str, int],
) -> list[int] | None:
    """The shape of a further top by a layer that reads it: images, their sizes, regions, parts of a
    label, or as many numbers as are compared with it; None if none says it.
    """
    regions = any(
        layer.type in _READ_REGIONS and blob in layer.bottom[1:]
        for layer in net.layer
        for blob in source.top
    )
    rows = _REGIONS if regions else batch
    for layer in net.layer:
        if top not in layer.bottom:
            continue
        place = list(layer.bottom).index(top)
        if layer.type in _READ_IMAGES and place == 0:
            return [batch, *image]
        if layer.type in _READ_REGIONS and place == 1:
            return [_REGIONS, 5]
        if layer.type == "DenseCRF" and place == 1:
            return [batch, 1, 1, 2]
        if layer.type == "InnerProduct":
            return [rows, *image] if len(image) > 1 else None
        if layer.type == "Slice" and layer.slice_param.axis == 1:
            parts = [compared.get(part, 0) for part in layer.top]
            if all(parts) or not layer.slice_param.slice_point:
                return [rows, sum(part or 1 for part in parts)]
            return [rows, layer.slice_param.slice_point[-1] + (parts[-1] or 1)]
        if layer.type in _READ_SEQUENCES and place == 1 and len(layer.bottom) == 2:
            return [rows, _LENGTH]
        if number := compared.get(top, 0):
            return [rows, number]
    return None


def _sliced(net: NetParameter, top: str, size: int, channels: int) -> list[int] | None:
    """The shape of records of labels, which a Slice cuts where images have no channels."""
    for layer in net.layer:
        points = list(layer.slice_param.slice_point)
        cuts = layer.type == "Slice" and top in layer.bottom and layer.slice_param.axis == 1
        if cuts and points and points[-1] >= channels:
            before = points[-2] if len(points) > 1 else 0
            return [size, 2 * points[-1] - before, 1, 1]
    return None


def _reshaped(net: NetParameter, top: str, shape: list[int]) -> list[int] | None:
    """The shape of a top by a Reshape that reads it, if it states one that the elements of `shape`
    do not fill; zeros stand for what `shape` has there.
    """
    for layer in net.layer:
        param = layer.reshape_param
        if (
            layer.type != "Reshape"
            or layer.bottom[:1] != [top]
            or param.axis
            or not param.shape.dim
        ):
            continue
        dims = [d or s for d, s in zip_longest(param.shape.dim, shape[: len(param.shape.dim)])]
        if None in dims or param.num_axes != -1:
            return None
        stated = prod(d for d in dims if d > 0)
        return [d if d > 0 else 1 for d in dims] if prod(shape) % stated else None
    return None


def _pixel_classes(net: NetParameter, label: str) -> int:
    """The number of channels of MobileNet-YOLO's labels of pixels, of maps of joints or of a
    guidance, by the scores beside them.
    """
    scores = {
        layer.bottom[0]
        for layer in net.layer
        if layer.type in _READ_MAPS and label in layer.bottom[1:2]
    }
    while True:  # through sigmoids and their like to a convolution, or an inner product
        for layer in net.layer:
            outputs = layer.convolution_param.num_output or layer.inner_product_param.num_output
            if scores & set(layer.top) and outputs:
                return outputs
        more = {b for x in net.layer if scores & set(x.top) for b in x.bottom} - scores
        if not more:
            return 1
        scores |= more


def _compared(net: NetParameter) -> dict[str, int]:
    """The numbers of outputs that losses compare with each blob, where they are known."""
    outputs = {
        top: layer.inner_product_param.num_output for layer in net.layer for top in layer.top
    }
    found: dict[str, int] = {}
    for loss in net.layer:
        if loss.type in _COMPARE:
            for blob in loss.bottom:
                counts = [outputs.get(other, 0) for other in loss.bottom if other != blob]
                found[blob] = max([found.get(blob, 0), *counts])
    return found


def _truths(batch: int) -> list[int]:
    """The shape of AnnotatedData's true boxes."""
    return [1, 1, _BOXES * batch, 8]


def _region_top(name: str, param_str: str, agnostic: bool) -> list[int] | None:
    """The shape of a top of Fast or Faster R-CNN's data layer, by its name."""
    classes = 2 if agnostic else _region_classes(param_str)
    shapes = {
        "im_info": [1, 3],
        "gt_boxes": [_TRUTHS, 5],
        "rois": [_REGIONS, 5],
        "labels": [_REGIONS, 1, 1, 1],
    }
    return shapes.get(name) or ([_REGIONS, 4 * classes] if name.startswith("bbox_") else None)


def _is_label(net: NetParameter, top: str) -> bool:
    """True for a blob that a loss compares with its first bottom: a layer of labels alone."""
    return any(top in layer.bottom[1:] for layer in net.layer if layer.type.endswith("Loss"))


def _region_classes(param_str: str) -> int:
    found = re.search(r"num_classes'?\"?\s*:\s*(\d+)", param_str)
    return int(found[1]) if found else 21


def _true_classes(net: NetParameter, layer: LayerParameter, top: str) -> tuple[int, int]:
    """The least and the largest class of true boxes: without the background, class 0."""
    if layer.type == "Python":
        return 1, max(_region_classes(layer.python_param.param_str) - 1, 1)
    for reader in net.layer:
        loss = reader.multibox_loss_param
        if top in reader.bottom and loss.num_classes:
            first = 1 if loss.background_label_id == 0 else 0
            return first, max(loss.num_classes - 1, first)
    return 1, 1


def _yolo_classes(net: NetParameter, boxes: str) -> int:
    """The number of classes of the layers that read these boxes of YOLO; 1 if unknown."""
    readers = [layer for layer in net.layer if boxes in layer.bottom[1:2]]
    regions = [x.region_loss_param.num_class for x in readers if x.type == "RegionLoss"]
    cells = [x.yolov3_param.num_class for x in readers if x.type == "Yolov3"]
    return min([*regions, *cells], default=1)


def _classes(net: NetParameter, label: str) -> int:
    """The smallest number of scores that a layer compares with this label; 1 if unknown."""
    channels: dict[str, int] = {}
    found = []
    for layer in net.layer:
        first = channels.get(layer.bottom[0], 0) if layer.bottom else 0
        if first and label in layer.bottom[1:]:
            found.append(first)
        kept = first if layer.type in _KEEP_CHANNELS else 0
        for top in layer.top:
            channels[top] = (
                layer.inner_product_param.num_output or layer.convolution_param.num_output or kept
            )
    return min(found, default=1)
