"""Boxes of detectors (SSD)."""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.boxes import BoxCode, LocationLoss, Matching
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import (
    MOST,
    THREADS,
    Array,
    c_type,
    divisor,
    launch,
    launch_blocks,
    launch_reduce,
)

WIDE = 1024
"""Threads of a block that takes an image, or a row."""

SHARED = 1024
"""Most true boxes, and best boxes of a class, in shared memory, as in boxes.cu."""

LOSSES = 512
"""Boxes for which one more block pays."""

STAGE = 24 << 10
"""Most bytes of the rows of scores that a block has in shared memory."""


def decode_boxes(locations: Array, priors: Array, code: BoxCode, boxes: Array) -> None:
    sizes = (*boxes.shape[:3], code.kind, int(code.scaled))
    launch("boxes", "decode_boxes", boxes, boxes.size // 4, locations, priors, boxes, *sizes)


def match_boxes(
    boxes: Array,
    truths: Array,
    label: int,
    rule: Matching,
    matches: Array,
    overlaps: Array,
    counts: Array,
) -> None:
    images, count = matches.shape
    known, own = len(truths), int(len(boxes) > 1)
    if not matches.size:
        return
    best = context().array("best pairs", (known + images,), np.uint64)
    best.fill(0)
    pairs = context().array("pairs", (images, known, 3), np.uint64) if known > SHARED else best
    of, sizes = c_type(boxes), (own, count, known, label, int(rule.difficult), int(rule.inside))
    arguments = boxes, truths, matches, overlaps, best
    compare = kernel("boxes", f"compare_boxes<{of}>")
    switches = float(rule.threshold), int(rule.every)
    grid = -(-count // THREADS), images
    compare(grid, (THREADS,), (*arguments, *sizes, *switches))
    given = *arguments, pairs, counts, *sizes
    launch_blocks("boxes", "match_pairs", boxes, images, *given, threads=WIDE)


def _numbers(rule: LocationLoss) -> tuple[int, ...]:
    return rule.code.kind, int(rule.code.scaled), int(rule.square), rule.crossing


def location_losses(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    rule: LocationLoss,
    losses: Array,
) -> None:
    arrays = locations, priors, truths, matches, losses
    numbers = *losses.shape, *_numbers(rule)
    launch("boxes", "location_losses", losses, losses.size, *arrays, *numbers)


def location_gradients(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    rule: LocationLoss,
    factor: Array,
    gradients: Array,
) -> None:
    arrays = locations, priors, truths, matches, factor, gradients
    numbers = *matches.shape, *_numbers(rule)
    launch("boxes", "location_gradients", gradients, gradients.size // 4, *arrays, *numbers)


def _held(count: int) -> int:
    """Return the keys of a thread, if a block takes a row of so many."""
    return -(-count // (4 * WIDE)) * 4


def choose_largest(values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
    rows, count = values.shape
    arguments, variant = (values, allowed, numbers, chosen, count), f", {_held(count)}"
    if count:
        launch_blocks(
            "boxes", "choose_largest", values, rows, *arguments, threads=WIDE, variant=variant
        )


def check_truths(
    truths: Array,
    classes: int,
    background: int,
    any_class: bool,
    difficult: bool,
    bad_label: Array,
    bad_box: Array,
) -> None:
    rules = len(truths), classes, background, int(any_class), int(difficult)
    arguments = truths, bad_label, bad_box, *rules
    launch_blocks("boxes", "check_truths", truths, min(1, len(truths)), *arguments, threads=WIDE)


def label_matches(
    truths: Array, matches: Array, background: int, one_class: bool, labels: Array
) -> None:
    arguments = truths, matches, labels, *matches.shape, background, int(one_class)
    launch("boxes", "label_matches", truths, labels.size, *arguments)


def mine_negatives(
    losses: Array,
    matches: Array,
    overlaps: Array,
    counts: Array,
    ratio: float,
    most: float,
    labels: Array,
) -> None:
    images, count = losses.shape
    arguments = losses, matches, overlaps, counts, labels, count, float(ratio), float(most)
    variant, blocks = f", {_held(count)}", images if count else 0
    launch_blocks(
        "boxes", "mine_negatives", losses, blocks, *arguments, threads=WIDE, variant=variant
    )


def multibox_loss(
    location: Array,
    matches: Array,
    of_class: Array,
    labels: Array,
    weights: tuple[float, float],
    divisor: float | None,
    norm: Array,
    loss: Array,
) -> None:
    by = -1.0 if divisor is None else float(divisor)
    sizes = matches.size, labels.size, *map(float, weights), by
    arguments = location, matches, of_class, labels, norm, loss, *sizes
    launch_reduce("boxes", "multibox_loss", location, -(-matches.size // LOSSES), *arguments)


def _class_rows(name: str, x: Array, arguments: tuple[Any, ...], *numbers: float) -> None:
    """Launch a thread for each row of scores, in shared memory; a warp for rows that are too
    long.
    """
    rows, classes = x.shape
    words = (classes | 1) + 1
    threads = next((n for n in (128, 64, 32) if 4 * n * words <= STAGE), 0)
    if threads:
        size, run = 4 * threads * words, kernel("boxes", f"{name}<{c_type(x)}>")
        grid, sizes = (min(-(-rows // threads), MOST),), (rows, classes, divisor(classes))
        if rows:
            run(grid, (threads,), (*arguments, *sizes, *numbers), shared_mem=size)
    else:
        blocks = min(-(-rows * 32 // THREADS), MOST)
        launch_blocks("boxes", f"long_{name}", x, blocks, *arguments, rows, classes, *numbers)


def class_losses(x: Array, labels: Array, losses: Array) -> None:
    _class_rows("class_losses", x, (x, labels, losses), float(np.finfo(np.float32).tiny))


def class_gradients(x: Array, labels: Array, factor: Array, gradients: Array) -> None:
    _class_rows("class_gradients", x, (x, labels, factor, gradients))


def detect(
    boxes: Array,
    scores: Array,
    background: int,
    least: float,
    threshold: float,
    eta: float,
    found: Array,
    counts: Array,
) -> None:
    count, most = scores.shape[1], found.shape[2]
    sizes = *boxes.shape[1:3], scores.shape[2], most, background
    limits = float(threshold), float(eta)
    if most <= SHARED and count:
        arguments = boxes, scores, found, counts, *sizes, float(least), *limits
        variant = f", {_held(count)}"
        launch_blocks(
            "boxes", "detect", boxes, counts.size, *arguments, threads=WIDE, variant=variant
        )
        return
    each = scores.transpose(0, 2, 1)
    allowed = each > np.float32(least)
    order = cupy.argsort(cupy.where(allowed, -each, np.inf), axis=2, kind="stable")
    order = cupy.ascontiguousarray(order[:, :, :most], np.int64)
    numbers = cupy.minimum(allowed.sum(axis=2), most).astype(np.int32)
    arguments = boxes, scores, order, numbers, found, counts, *sizes, *limits
    launch_blocks("boxes", "detect_sorted", boxes, counts.size, *arguments, threads=WIDE)
