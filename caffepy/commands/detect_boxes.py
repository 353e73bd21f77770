"""`caffepy detect` with a net that finds boxes itself, as SSD, YOLO and Faster R-CNN do."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from caffepy.commands.detect import OUTPUTS
from caffepy.commands.preprocess import (
    EXTENSIONS,
    PREPARATION,
    READERS,
    ImageResults,
    Preparation,
    image_net,
    load,
    names_in,
    read_lines,
)
from caffepy.commands.regions import SCORES, find_in_regions, proposers
from caffepy.commands.regions import SIDES as INPUT_SIDES
from caffepy.core.errors import ConfigError, DataError, UsageError, reason
from caffepy.core.files import check_writable, written
from caffepy.data.prefetch import mapped
from caffepy.device.blob import Array
from caffepy.drawing.boxes import draw_boxes
from caffepy.proto.caffe_pb2 import LabelMap, LayerParameter
from caffepy.proto.text import read_message, read_net
from caffepy.pycaffe.classifier import ImageNet
from caffepy.report import counting
from caffepy.report.grid import FORMATS, save
from caffepy.report.text import as_json, columns, extension_of, number

SSD = "DetectionOutput"
FINDERS = SSD, "YoloDetectionOutput", "Yolov3DetectionOutput"
"""Types of layers that find boxes; other nets find them by what they say of proposed regions."""

COLUMNS = 7  # of the layers' rows: image, class, score, xmin, ymin, xmax, ymax
SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class Box:
    """A class, its label if labels are known, its score, and (xmin, ymin, xmax, ymax) in pixels."""

    number: int
    label: str | None
    score: float
    sides: tuple[float, ...]


@dataclass(frozen=True)
class ImageDetections:
    """An image, its size and the boxes found, the best first; `error` says why it has none."""

    image: str
    width: int
    height: int
    boxes: Sequence[Box]
    error: str | None = None


@dataclass(frozen=True)
class BoxDetections(ImageResults):
    """The boxes of all images."""

    images: Sequence[ImageDetections]

    def table(self) -> str:
        """Return a line a box: image, label, class, score, sides; a dash where nothing is found."""
        rows = [["image", "label", "class", "score", *SIDES]]
        for image in self.images:
            boxes = [
                [
                    box.label or "",
                    str(box.number),
                    number(box.score),
                    *(f"{v:.1f}" for v in box.sides),
                ]
                for box in image.boxes
            ]
            first, *others = boxes or [["", "unreadable" if image.error else "-", *"-----"]]
            rows += [[image.image, *first], *(["", *cells] for cells in others)]
        if not any(row[1] for row in rows[1:]):
            rows = [[row[0], *row[2:]] for row in rows]
        return "\n".join(columns(rows, left=len(rows[0]) - 6))

    def json(self) -> str:
        """Return a list of objects: image, and error or width, height and boxes, each with class,
        label (or null), score, xmin, ymin, xmax, ymax.
        """
        objects: list[dict[str, object]] = []
        for image in self.images:
            if image.error:
                objects.append({"image": image.image, "error": image.error})
                continue
            boxes = [
                {"class": box.number, "label": box.label, "score": box.score}
                | dict(zip(SIDES, box.sides, strict=True))
                for box in image.boxes
            ]
            size = {"width": image.width, "height": image.height}
            objects.append({"image": image.image, **size, "boxes": boxes})
        return as_json(objects)

    def save(self, path: str) -> None:
        """Write `json()` to a file; UsageError if that fails."""
        with written(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(self.json() + "\n")


def finders(model: str) -> list[LayerParameter]:
    """Return the layers of the net of the file `model` that find boxes, or the one that proposes
    regions; none if it scores images only.
    """
    layers = read_net(model).layer
    return [layer for layer in layers if layer.type in FINDERS] or proposers(layers)


def is_image(path: str) -> bool:
    """True for a folder, and for a file with the extension of an image."""
    return os.path.isdir(path) or extension(path) in EXTENSIONS


def split_output(paths: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return the images of a command line and the file for results at its end, "" if there is
    none.
    """
    last = extension(paths[-1])
    has_output = len(paths) > 1 and (
        last in OUTPUTS or (last not in ("", *EXTENSIONS) and not os.path.exists(paths[-1]))
    )
    return (paths[:-1], paths[-1]) if has_output else (paths, "")


def check_output(path: str) -> None:
    """Raise UsageError if a file of boxes has another extension than .json or cannot be written."""
    extension_of(path, ("json",))
    check_writable(path)


def detect_boxes(
    inputs: Sequence[str],
    model: str,
    weights: Sequence[str],
    *,
    preparation: Preparation = PREPARATION,
    labels: str = "",
    threshold: float = 0.5,
    draw: str = "",
    sides: Sequence[int] = INPUT_SIDES,
    extensions: Sequence[str] = EXTENSIONS,
    batch: int | None = None,
    gpu: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> BoxDetections:
    """Return the boxes that the deploy net of `model` with these weights finds in images, those of
    a score of `threshold` or more.

    `inputs` are image files and folders. Images are resized to the net's input, those of a net of
    regions to `sides`, the shorter one and most of the longer; sides of boxes are in pixels of the
    image as it was, cut to it. `labels` is a LabelMap (.prototxt) or a text
    file with the name of a class in each line, with or without the background. Into the folder
    `draw` go the images with the boxes on them, under their names. Errors say what does not fit.
    """
    layers = finders(model)
    if any(layer.type != SSD for layer in layers):
        batch = 1  # YOLO's layers do not say which image of a batch a box is of; regions are of one
    files = [
        name
        for path in inputs
        for name in (names_in(path, extensions) if os.path.isdir(path) else [path])
    ]
    drawn = drawings(files, draw) if draw else {}
    net = image_net(ImageNet, model, weights, batch, gpu, precision, threads)
    by_regions = layers[-1].type not in FINDERS
    _check_inputs(net, by_regions, model)
    at_once, channels, *_ = shape = net.blobs[net.inputs[0]].shape
    net.transformer = preparation.transformer(net.inputs[0], shape, by_channel=by_regions)
    preparation.warn_of_missing(model)
    names = read_labels(labels, max(classes(layer, net) for layer in layers)) if labels else {}
    tops = [layer.top[0] for layer in layers]
    find: Callable[[Sequence[Array]], Iterator[Array]] = partial(_find, net, tops)
    if by_regions:
        find = partial(find_in_regions, net, tops[-1], sides, threshold)
    found = []
    read = partial(_read, channels=channels)
    with (
        counting(len(files), "images", progress) as done,
        closing(mapped(read, files, READERS)) as loaded,
    ):
        while part := list(islice(loaded, at_once)):
            images = [image for _, image in part if isinstance(image, np.ndarray)]
            rows = find(images)
            for name, image in part:
                if isinstance(image, DataError):
                    found.append(ImageDetections(name, 0, 0, [], str(image)))
                    continue
                height, width, _ = image.shape
                boxes = _boxes(next(rows), threshold, names)
                found.append(ImageDetections(name, width, height, boxes))
                if draw:
                    _draw(image, boxes, drawn[name])
            done(len(part))
    return BoxDetections(found)


def classes(layer: LayerParameter, net: ImageNet) -> int:
    """Return the number of classes of what `finders` returns, the background included."""
    if layer.type == SSD:
        return layer.detection_output_param.num_classes
    if layer.type == "YoloDetectionOutput":
        return layer.yolo_detection_output_param.num_classes + 1
    if layer.type == "Yolov3DetectionOutput":
        return layer.yolov3_detection_output_param.num_classes + 1
    return net.blobs[SCORES].shape[1]


def read_labels(path: str, count: int) -> Mapping[int, str]:
    """Return the labels of `count` classes, of which 0 is the background; ConfigError if a text
    file has another number of lines than there are classes, with the background or without.
    """
    if extension(path) in ("prototxt", "pbtxt"):
        items = read_message(path, LabelMap()).item
        return {item.label: item.display_name or item.name for item in items}
    lines = read_lines(path)
    if len(lines) not in (count, count - 1):
        raise ConfigError(
            f"{path}: {len(lines)} labels, a line each, for the {count - 1} classes of the net and "
            "the background, which may be left out"
        )
    return dict(enumerate(lines, start=count - len(lines)))


def drawings(files: Sequence[str], folder: str) -> dict[str, str]:
    """Return the file in `folder`, which is made, for each image with its boxes.

    UsageError if two images would have one file, or an image would be replaced by its drawing.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f'cannot make the folder "{folder}": {reason(error)}') from None
    drawn: dict[str, str] = {}
    for name in dict.fromkeys(files):
        base = os.path.basename(name)
        path = os.path.join(folder, base if extension(base) in FORMATS else f"{base}.png")
        if path in drawn.values():
            raise UsageError(f'two images would be drawn to "{path}": search their folders in turn')
        if os.path.exists(path) and os.path.exists(name) and os.path.samefile(path, name):
            raise UsageError(f'"{path}" is an image to search; draw to another folder')
        drawn[name] = path
    return drawn


def extension(path: str) -> str:
    """Return what stands behind the last dot of a file's name, in small letters."""
    return os.path.splitext(path)[1][1:].lower()


def _read(name: str, channels: int) -> tuple[str, Array | DataError]:
    try:
        return name, load(name, channels)
    except DataError as error:
        return name, error


def _check_inputs(net: ImageNet, by_regions: bool, model: str) -> None:
    """Raise a ConfigError unless the net takes images of 1 or 3 channels, and with regions their
    height, width and scale.
    """
    name, *others = net.inputs
    wanted = [[3], [4]] if by_regions else [[]]
    if [net.blobs[other].count for other in others] not in wanted:
        also = " and then their height, width and scale" if by_regions else ""
        has = ", ".join(f"{name} {net.blobs[name]!r}" for name in net.inputs)
        raise ConfigError(f"a net is needed whose inputs are images{also}, not {has}", model)
    if (channels := net.blobs[name].shape[1]) not in (1, 3):
        raise ConfigError(f"takes images of {channels} channels; image files have 1 or 3", model)


def _find(net: ImageNet, tops: Sequence[str], images: Sequence[Array]) -> Iterator[Array]:
    """Yield for each of at most a batch of images what layers with these tops find in it, (D, 6) =
    class, score, xmin, ymin, xmax, ymax in pixels.
    """
    if not images:
        return
    data = net.blobs[net.inputs[0]].data
    for i, image in enumerate(images):
        data[i] = net.transformer.preprocess(net.inputs[0], image)
    net.forward()
    rows = np.concatenate([net.blobs[top].data.reshape(-1, COLUMNS) for top in tops])
    for i, image in enumerate(images):
        own = rows[(rows[:, 0] == i) & (rows[:, 1] >= 0), 1:].astype(np.float64)
        if not np.isfinite(own).all():
            raise DataError("what the net finds is not finite: its weights or inputs are damaged")
        own[:, 2:] = np.clip(own[:, 2:], 0, 1) * (image.shape[1::-1] * 2)
        yield own


def _boxes(rows: Array, threshold: float, labels: Mapping[int, str]) -> list[Box]:
    """Return the boxes of an image, from rows (D, 6), the best first."""
    rows = rows[rows[:, 1] >= np.float32(threshold)]
    rows = rows[np.argsort(-rows[:, 1], kind="stable")]
    return [
        Box(int(label), labels.get(int(label)), score, tuple(sides))
        for label, score, *sides in rows.tolist()
    ]


def _draw(image: Array, boxes: Sequence[Box], path: str) -> None:
    """Write an image (H, W, K) of 0 to 1, RGB or grey, with its boxes, the best one on top."""
    pixels = np.clip(np.rint(image[..., ::-1] * 255), 0, 255).astype(np.uint8)
    picture = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy()
    captions = [
        (box.sides, box.number, f"{box.label or box.number} {box.score:.2f}") for box in boxes
    ]
    draw_boxes(picture, captions[::-1])
    save(picture, path)
