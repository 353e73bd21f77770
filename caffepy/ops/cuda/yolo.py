"""Losses of YOLO: comparison of the boxes of cells and anchors with true boxes."""

from caffepy.ops.cuda.launch import Array, launch, launch_blocks
from caffepy.ops.overlap import YoloWeights


def yolo_scores(
    x: Array,
    truths: Array,
    sizes: Array,
    softmax: bool,
    kind: int,
    scale: float,
    threshold: float,
    p: Array,
    delta: Array,
) -> None:
    images, anchors, _, h, w = x.shape
    numbers = truths.shape[1], int(softmax), kind, float(scale), float(threshold)
    arguments = (x, truths, sizes, p, delta, *x.shape, *numbers)
    launch("yolo", "yolo_scores", x, images * anchors * h * w, *arguments)


def region_truths(
    p: Array,
    truths: Array,
    sizes: Array,
    by_bias: bool,
    rule: int,
    object_scale: float,
    class_scale: float,
    coord_scale: float,
    delta: Array,
) -> None:
    scales = float(object_scale), float(class_scale), float(coord_scale)
    shape = (*p.shape[1:], truths.shape[1])
    arguments = (p, truths, sizes, delta, *shape, int(by_bias), rule, *scales)
    launch_blocks("yolo", "region_truths", p, len(p), *arguments, threads=32)


def sort_truths(rows: Array, truths: Array) -> None:
    launch_blocks("yolo", "sort_truths", rows, len(truths), rows, truths, len(rows), threads=32)


def yolo_truths(
    p: Array,
    truths: Array,
    anchors: Array,
    slots: Array,
    kind: int,
    weights: YoloWeights,
    delta: Array,
    stats: Array,
) -> None:
    shape = (*p.shape[1:], truths.shape[1], len(anchors))
    numbers = [int(v) if isinstance(v, bool) else float(v) for v in weights]
    arguments = (p, truths, anchors, slots, delta, stats, *shape, kind, *numbers)
    launch_blocks("yolo", "yolo_truths", p, len(p), *arguments, threads=32)
