"""Operations of detectors on one GPU beside what its memory allows.

usage: python benchmarks/detection_ops.py [--only REGEX] [--rounds 7]

Each operation, or pass of a layer, is captured in a CUDA graph many times over, on as many sets of
its arrays as do not fit the cache together, and timed by events; the median of the rounds is given.
Bytes are those of its arrays, each read or written once. Beside it stands a copy that moves as many
bytes, timed alike: `share` is its time over that of the operation, 1 where memory allows no more.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import text_format

from caffepy import ops as backends
from caffepy.device.blob import PLAIN, Blob, Layout
from caffepy.device.cuda import CudaDevice
from caffepy.layer import create_layer
from caffepy.ops.boxes import (
    CENTER_SIZE,
    PRIORS,
    BoxCode,
    LocationLoss,
    Matching,
    Mining,
    TruthCheck,
)
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

CACHE = 120e6
"""Bytes of all sets of arrays, more than the cache has."""

IMAGES, COUNT, CLASSES, TRUE = 32, 8732, 21, 8
"""Of SSD300: images, priors, classes, true boxes of an image."""

Array = Any
Work = Callable[[], None]


class Case(NamedTuple):
    """A name, the bytes that are read and written, and what makes an operation on new arrays."""

    name: str
    bytes: int
    make: Callable[[], Work]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@cache
def normal(shape: tuple[int, ...]) -> Array:
    return rng().standard_normal(shape, np.float32)


def priors() -> Array:
    """Boxes around the cells of SSD300's six maps, and their variances, (2, P, 4)."""
    boxes = []
    for cells, each, size in (
        (38, 4, 30),
        (19, 6, 60),
        (10, 6, 111),
        (5, 6, 162),
        (3, 4, 213),
        (1, 4, 264),
    ):
        centres = (np.arange(cells) + 0.5) / cells
        y, x = (a.ravel()[:, None] for a in np.meshgrid(centres, centres, indexing="ij"))
        ratios = np.array([1, 1.2, 2, 0.5, 3, 1 / 3][:each]) ** 0.5
        wide, high = size / 300 * ratios / 2, size / 300 / ratios / 2
        boxes.append(np.stack([x - wide, y - high, x + wide, y + high], axis=2).reshape(-1, 4))
    found = np.concatenate(boxes)
    return np.stack([found, np.broadcast_to([0.1, 0.1, 0.2, 0.2], found.shape)]).astype(np.float32)


def truths() -> Array:
    """True boxes (G, 8)."""
    draw = rng()
    low = draw.uniform(0, 0.6, (IMAGES * TRUE, 2))
    high = low + draw.uniform(0.1, 0.4, low.shape)
    image = np.repeat(np.arange(IMAGES), TRUE)
    label = draw.integers(1, CLASSES, len(image))
    zero = np.zeros(len(image))
    return np.column_stack([image, label, zero, low, high, zero]).astype(np.float32)


def boxes_in(count: int, height: int, width: int, images: int, largest: int) -> Array:
    """Regions (R, 5) in pixels of images of this size."""
    draw = rng()
    size = draw.uniform(32, largest, (count, 2))
    low = draw.uniform(0, 1, (count, 2)) * (np.array([width, height]) - size).clip(1)
    image = np.arange(count) % images
    return np.column_stack([image, low, low + size]).astype(np.float32)


def scattered(count: int) -> Array:
    """Boxes (1, P, 4) in an image of 600 x 1000 pixels."""
    return boxes_in(count, 600, 1000, 1, 400)[None, :, 1:].copy()


def crowd(count: int) -> Array:
    """Boxes (1, P, 4) around a fortieth as many objects in an image of 600 x 1000 pixels."""
    draw = rng()
    objects = boxes_in(count // 40, 600, 1000, 1, 400)[:, 1:]
    which = draw.integers(0, len(objects), count)
    size = np.tile(objects[:, 2:] - objects[:, :2], 2)
    boxes = objects[which] + draw.normal(0, 0.12, (count, 4)) * size[which]
    return boxes[None].astype(np.float32)


SIZE = IMAGES * COUNT
WORD, ROW = 4 * SIZE, 4 * CLASSES * SIZE
"""Boxes of all images, and bytes of an array with a number and with the scores of each."""

CODE = BoxCode(CENTER_SIZE)
LOSS = LocationLoss(CODE, False, PRIORS)


class Maker:
    """What makes arrays on a device, and the operations of its back end."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.ops = device, backends.backend(device)
        self.given, self.true = device.on_device(priors()), device.on_device(truths())
        self.one = device.on_device(np.array(1, np.float32))

    def floats(self, *shape: int) -> Array:
        """Numbers of a normal distribution."""
        return self.device.on_device(normal(shape))

    def ints(self, *shape: int, value: int = 0) -> Array:
        return self.device.on_device(np.full(shape, value, np.int32))

    def few(self, share: float, values: Array) -> Array:
        """These values (N, P) at this share of the places, else -1."""
        draw = rng().uniform(size=(IMAGES, COUNT))
        found = np.where(draw < share, np.broadcast_to(values, draw.shape), -1)
        return self.device.on_device(found.astype(np.int32))


def of_ops(device: CudaDevice) -> list[Case]:
    """Operations on boxes of SSD, and the suppression of proposals."""
    make = Maker(device)
    return [*of_matching(make), *of_classes(make), *of_locations(make), *of_detection(make)]


def of_matching(make: Maker) -> list[Case]:
    ops, given, true = make.ops, make.given, make.true
    rule = Matching(0.5, True, False, True)
    numbers, ones = make.ints(IMAGES, value=90), make.ints(IMAGES, COUNT, value=1)
    matches = make.few(0.01, np.arange(IMAGES)[:, None] * TRUE)[:, None]

    def found() -> tuple[Array, ...]:
        return make.ints(IMAGES, COUNT), make.floats(IMAGES, COUNT), make.ints(IMAGES, 2)

    def match() -> Work:
        out = found()
        return lambda: ops.match_boxes(given[:1], true, -1, rule, *out)

    def match_with_losses() -> Work:
        x, at = make.floats(IMAGES, COUNT, CLASSES), make.floats(IMAGES, COUNT, 1, 4)
        check = TruthCheck(CLASSES, 0, False, True, *[make.device.on_device(np.zeros(2))] * 2)
        out = *found(), make.ints(IMAGES, COUNT), make.floats(IMAGES, 1, COUNT)
        y = make.floats(IMAGES, COUNT)
        return lambda: ops.match_with_losses(x, at, given, true, rule, LOSS, check, *out, y)

    def choice() -> Work:
        values, chosen = abs(make.floats(IMAGES, COUNT)), make.ints(IMAGES, COUNT)
        return lambda: ops.choose_largest(values, ones, numbers, chosen)

    def mined() -> Work:
        at, of_class = abs(make.floats(IMAGES, 1, COUNT)), abs(make.floats(IMAGES, COUNT))
        counts = make.device.on_device(np.full((IMAGES, 2), [TRUE, 90], np.int32))
        mining = Mining(make.floats(IMAGES, COUNT), counts, 3, 0.5)
        sums = at, matches, of_class, make.ints(IMAGES, COUNT), (1.0, 1.0)
        norm, loss = make.floats(), make.floats()
        return lambda: ops.multibox_loss(*sums, None, mining, norm, loss)

    return [
        Case("matching", 2 * WORD + 16 * COUNT, match),
        Case("matching with losses", ROW + 5 * WORD + 16 * COUNT, match_with_losses),
        Case("choice of the hardest", 3 * WORD, choice),
        Case("mining and sum", 5 * WORD, mined),
    ]


def of_classes(make: Maker) -> list[Case]:
    ops, one = make.ops, make.one
    few = make.few(0.04, rng().integers(0, CLASSES, (IMAGES, COUNT))).reshape(-1)
    every = make.ints(SIZE)

    def losses() -> Work:
        x, y = make.floats(SIZE, CLASSES), make.floats(SIZE)
        return lambda: ops.class_losses(x, every, y)

    def gradients(labels: Array) -> Callable[[], Work]:
        def work() -> Work:
            x, dx = make.floats(SIZE, CLASSES), make.floats(SIZE, CLASSES)
            return lambda: ops.class_gradients(x, labels, one, dx)

        return work

    return [
        Case("class losses", ROW + 2 * WORD, losses),
        Case("class gradients, 4 % of rows", int(1.04 * ROW) + WORD, gradients(few)),
        Case("class gradients, all rows", 2 * ROW + WORD, gradients(every)),
    ]


def of_locations(make: Maker) -> list[Case]:
    ops, given, true = make.ops, make.given, make.true
    matches = make.few(0.01, np.arange(IMAGES)[:, None] * TRUE)[:, None]

    def losses() -> Work:
        x, y = make.floats(IMAGES, COUNT, 1, 4), make.floats(IMAGES, 1, COUNT)
        return lambda: ops.location_losses(x, given, true, matches, LOSS, y)

    def gradients() -> Work:
        x, dx = make.floats(IMAGES, COUNT, 1, 4), make.floats(IMAGES, COUNT, 1, 4)
        return lambda: ops.location_gradients(x, given, true, matches, LOSS, make.one, dx)

    def decode() -> Work:
        x, boxes = make.floats(IMAGES, COUNT, 1, 4), make.floats(IMAGES, 1, COUNT, 4)
        return lambda: ops.decode_boxes(x, given, CODE, boxes)

    return [
        Case("location losses", 2 * WORD, losses),
        Case("location gradients", 5 * WORD, gradients),
        Case("decoding", 8 * WORD + 32 * COUNT, decode),
    ]


def of_detection(make: Maker) -> list[Case]:
    ops = make.ops

    def detect(least: float) -> Callable[[], Work]:
        def work() -> Work:
            scores = abs(make.floats(IMAGES, COUNT, CLASSES))
            boxes = np.broadcast_to(priors()[0], (IMAGES, 1, COUNT, 4)).copy()
            out = make.floats(IMAGES, CLASSES, 400, 5), make.ints(IMAGES, CLASSES)
            of = make.device.on_device(boxes)
            return lambda: ops.detect(of, scores, 0, least, 0.45, 1.0, *out)

        return work

    def suppress(given: Array, most: int) -> Callable[[], Work]:
        def work() -> Work:
            boxes, out = make.device.on_device(given), (make.ints(1, most), make.ints(1))
            return lambda: ops.suppress_overlaps(boxes, 0.7, 1.0, *out)

        return work

    return [
        Case("detections, every score", ROW + 4 * WORD + 20 * 400 * IMAGES * CLASSES, detect(0)),
        Case("detections, 1 % of scores", ROW + 4 * WORD, detect(2.576)),
        Case("NMS of 6,000, 300 kept", 16 * 6000, suppress(scattered(6000), 300)),
        Case("NMS of 12,000, 2,000 kept", 16 * 12000, suppress(scattered(12000), 2000)),
        Case("NMS of 12,000 in a crowd", 16 * 12000, suppress(crowd(12000), 2000)),
    ]


def passes(
    device: CudaDevice,
    name: str,
    text: str,
    *bottoms: Array,
    wants: list[bool],
    layout: Layout = PLAIN,
) -> list[Case]:
    """Both passes of a layer, in a layout."""

    def make(backward: bool) -> Work:
        with device.scope():
            bottom, top = [Blob(b.shape, device=device) for b in bottoms], [Blob(device=device)]
            for blob in (*bottom, *top):
                blob.set_layout(layout)
            layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
            layer.setup(bottom, top)
            layer.reshape(bottom, top)
        layer.param_propagate_down = [True] * len(layer.blobs)
        for blob, values in zip(bottom, bottoms, strict=True):
            blob.host_data[...] = values
        top[0].host_diff[...] = 1 if not top[0].shape else normal(tuple(top[0].shape))
        device.flush()
        with device.scope():
            layer.forward(bottom, top)
            layer.backward(top, wants, bottom)
        if backward:
            return lambda: layer.backward(top, wants, bottom)
        return lambda: layer.forward(bottom, top)

    each = layout.dtype.itemsize
    read = [int(np.size(b)) * each for b in bottoms]
    shape = sizes_of(device, text, bottoms)
    top = int(np.prod(shape)) * each
    index = top // each * 4 if "ROIPooling" in text and "PS" not in text else 0
    gradient = sum(n for n, want in zip(read, wants, strict=True) if want)
    forth, back = sum(read) + top + index, gradient + top + index
    if "Normalize" in text:
        back += gradient  # it reads the bottom again
    return [
        Case(f"{name} forward", forth, lambda: make(False)),
        Case(f"{name} backward", back, lambda: make(True)),
    ]


def sizes_of(device: CudaDevice, text: str, bottoms: tuple[Array, ...]) -> tuple[int, ...]:
    """The shape of a layer's top."""
    with device.scope():
        bottom, top = [Blob(b.shape, device=device) for b in bottoms], [Blob(device=device)]
        layer = create_layer(text_format.Parse(text, LayerParameter()), TRAIN, device)
        layer.setup(bottom, top)
        layer.reshape(bottom, top)
    return tuple(top[0].shape)


def of_layers(device: CudaDevice) -> list[Case]:
    """Both passes of Normalize, MultiBoxLoss and the layers that pool regions."""
    cases = []
    x = normal((32, 512, 38, 38))
    text = 'type: "Normalize" norm_param { across_spatial: false channel_shared: false }'
    for kind, name in (("uint16", "bf16"), ("float32", "float32")):
        layout = Layout(np.dtype(kind), True)
        cases += passes(device, f"Normalize, {name}", text, x, wants=[True], layout=layout)
    loss = (
        'type: "MultiBoxLoss" loss_weight: 1 multibox_loss_param { num_classes: 21 '
        "overlap_threshold: 0.5 background_label_id: 0 neg_pos_ratio: 3 neg_overlap: 0.5 "
        "use_prior_for_matching: true code_type: CENTER_SIZE mining_type: MAX_NEGATIVE }"
    )
    given = (
        normal((IMAGES, 4 * COUNT)),
        normal((IMAGES, CLASSES * COUNT)),
        priors().reshape(1, 2, -1),
        truths().reshape(1, 1, -1, 8),
    )
    cases += passes(device, "MultiBoxLoss", loss, *given, wants=[True, True, False, False])
    for count, images in ((128, 1), (512, 4)):
        x = normal((images, 512, 38, 63))
        parts = normal((images, 21 * 49, 38, 63))
        rois = boxes_in(count, 600, 1000, images, 400)
        pooled = "pooled_h: 7 pooled_w: 7 spatial_scale: 0.0625"
        score = "spatial_scale: 0.0625 output_dim: 21 group_size: 7"
        for name, settings, maps in (
            ("ROIPooling", f"roi_pooling_param {{ {pooled} }}", x),
            ("PSROIPooling", f"psroi_pooling_param {{ {score} }}", parts),
            ("ROIAlign", f"roi_align_param {{ {pooled} sampling_ratio: 2 }}", x),
            ("PSROIAlign", f"psroi_align_param {{ {score} sample_num: 2 }}", parts),
        ):
            text = f'type: "{name}" {settings}'
            what = f"{name}, {count} boxes, {images} images"
            cases += passes(device, what, text, maps, rois, wants=[True, False])
    return cases


def time_of(device: CudaDevice, works: list[Work], rounds: int) -> float:
    """Microseconds of one of these, run one after the other in a captured graph."""
    import cupy

    repeats = max(1, 24 // len(works))

    def run() -> None:
        for _ in range(repeats):
            for work in works:
                work()

    with device.scope():
        for work in works:
            work()
    device.flush()
    graph = device.capture(run)
    times = []
    with device.scope():
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(rounds + 2):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end))
    graph.close()
    return median(times[2:]) * 1000 / (repeats * len(works))


def copies(device: CudaDevice, size: int) -> Callable[[], Work]:
    """A function that makes a copy that reads and writes `size` bytes in all."""

    ops = backends.backend(device)

    def make() -> Work:
        source, to = (device.on_device(np.zeros(max(1, size // 8), np.float32)) for _ in range(2))
        return lambda: ops.copy(source, to)

    return make


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="operations in whose name this is found")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = CudaDevice(0)
    sys.stdout.write(
        "| operation | us | MB | GB/s | a copy, us | share |\n|---|---|---|---|---|---|\n"
    )
    for case in [*of_ops(device), *of_layers(device)]:
        if not re.search(args.only, case.name):
            continue
        sets = int(min(24, max(2, -(-CACHE // case.bytes))))
        try:
            copy = time_of(device, [copies(device, case.bytes)() for _ in range(sets)], args.rounds)
            us = time_of(device, [case.make() for _ in range(sets)], args.rounds)
        except Exception as error:  # the others are timed all the same
            sys.stdout.write(f"| {case.name} | {type(error).__name__}: {error} | | | | |\n")
            continue
        sys.stdout.write(
            f"| {case.name} | {us:.1f} | {case.bytes / 1e6:.1f} | {case.bytes / us / 1e3:,.0f} "
            f"| {copy:.1f} | {copy / us:.2f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
