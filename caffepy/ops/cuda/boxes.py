"""Boxes of detectors (SSD)."""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.boxes import BoxCode, LocationLoss, Matching, Mining, TruthCheck
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import (
    MOST,
    THREADS,
    Array,
    arrivals,
    c_type,
    divisor,
    launch,
    launch_blocks,
    launch_reduce,
    scratch,
)

WIDE = 1024
"""Threads of a block that takes an image, or a row."""

SHARED = 1024
"""Most best boxes of a class in shared memory, as in boxes.cu."""

EACH = 4
"""Boxes of a thread that matches them, as in boxes.cu."""

SHARE = 16
"""Rows of a thread whose gradients are written by one block more, as in boxes.cu."""

LOSSES = 512
"""Boxes for which one more block pays."""

STAGE = 24 << 10
"""Most bytes of the rows of scores that a block has in shared memory."""

LEAST = float(np.finfo(np.float32).tiny)
"""The least share of which a loss is taken."""


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
    _match(boxes, truths, label, rule, matches, overlaps, counts, None)


def _match(
    boxes: Array,
    truths: Array,
    label: int,
    rule: Matching,
    matches: Array,
    overlaps: Array,
    counts: Array,
    check: TruthCheck | None,
) -> None:
    """Match boxes, and check the true ones, too."""
    (images, count), known = matches.shape, len(truths)
    blocks = *_rooms(images, count, known), arrivals(images)
    sizes = int(len(boxes) > 1), count, known, label, int(rule.difficult), int(rule.inside)
    arguments = boxes, truths, matches, overlaps, counts, *blocks, *sizes
    numbers = float(rule.threshold), int(rule.every), *_rules(check)
    if matches.size:
        match = kernel("boxes", f"match_boxes<{c_type(boxes)}>")
        match((_tiles(count), images), (THREADS,), (*arguments, *numbers))


def _tiles(count: int) -> int:
    """Return the number of blocks that match `count` boxes of an image."""
    return -(-count // (EACH * THREADS))


def _rooms(images: int, count: int, known: int) -> tuple[Array, Array, Array]:
    """Return memory for what blocks that match tell each other."""
    tiles, memory = _tiles(count), context().array
    tops = memory("best pairs", (known, tiles * THREADS // 32), np.uint64)
    matched = memory("matched", (images, tiles), np.int32)
    pairs = memory("pairs", (images, known, 3), np.uint64) if known > THREADS else tops
    return tops, matched, pairs


def match_with_losses(
    scores: Array,
    locations: Array,
    priors: Array,
    truths: Array,
    matching: Matching,
    rule: LocationLoss,
    check: TruthCheck,
    matches: Array,
    overlaps: Array,
    counts: Array,
    labels: Array,
    of_location: Array,
    of_class: Array,
) -> None:
    if not matches.size:
        check_truths(truths, check)
        return
    (images, count), known, classes = matches.shape, len(truths), scores.shape[2]
    losses, kinds = (labels, of_location, of_class), (check.background, check.any_class)
    tall = next((n for n in (THREADS, THREADS // 2) if 4 * n * (classes | 1) <= STAGE), 0)
    if not tall:
        _match(priors[:1], truths, -1, matching, matches, overlaps, counts, check)
        box_losses(scores, locations, priors, truths, matches[:, None], rule, *kinds, *losses)
        return
    room = count + known  # each box, and each of those of the best pairs again
    lists = context().array("matched boxes", (images, room), np.int32)
    arrays = scores, locations, priors, truths, matches, overlaps, counts, *losses
    sizes = room, images, count, known, int(matching.difficult), int(matching.inside)
    rules = float(matching.threshold), int(matching.every), *_rules(check)
    of_rows = classes, divisor(classes), tall, LEAST, *_numbers(rule)
    run = kernel("boxes", f"match_with_losses<{c_type(scores)}>")
    given = *arrays, *_rooms(images, count, known), lists, arrivals(3 * images), *sizes, *rules
    grid, shared = images * (_tiles(count) + -(-count // tall)), 4 * tall * (classes | 1)
    run((grid,), (THREADS,), (*given, *of_rows), shared_mem=shared)


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
    """Return the keys of a thread, if a block takes a row of `count`."""
    return -(-count // (4 * WIDE)) * 4


def choose_largest(values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
    rows, count = values.shape
    arguments, variant = (values, allowed, numbers, chosen, count), f", {_held(count)}"
    if count:
        launch_blocks(
            "boxes", "choose_largest", values, rows, *arguments, threads=WIDE, variant=variant
        )


def _rules(check: TruthCheck | None) -> tuple[Any, ...]:
    """Return what a kernel needs to check true boxes, but for whether difficult ones count."""
    if check is None:
        return 0, 0, 0, None, None
    return check.classes, check.background, int(check.any_class), check.bad_label, check.bad_box


def check_truths(truths: Array, check: TruthCheck) -> None:
    arguments = truths, len(truths), int(check.difficult), *_rules(check)
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
    mining: Mining | None,
    norm: Array,
    loss: Array,
) -> None:
    by, like, numbers = -1.0 if divisor is None else float(divisor), location, map(float, weights)
    sums = location, matches, of_class, labels
    if mining is None or not labels.size:
        sizes = matches.size, labels.size, *numbers, by
        blocks = -(-matches.size // LOSSES)
        launch_reduce("boxes", "multibox_loss", like, blocks, *sums, norm, loss, *sizes)
        return
    overlaps, counts, ratio, most = mining
    images, count = labels.shape
    arguments = *sums, overlaps, counts, norm, loss, count, float(ratio), float(most), *numbers, by
    launch_blocks(
        "boxes",
        "mined_multibox_loss",
        like,
        images,
        *arguments,
        scratch("loss", 2 * images),
        arrivals(),
        threads=WIDE,
        variant=f", {_held(count)}",
    )


def _row_threads(classes: int) -> int:
    """Return the threads of a block that has a row of scores of each in shared memory; 0 if the
    rows are too long.
    """
    return next((n for n in (128, 64, 32) if 4 * n * _row_words(classes) <= STAGE), 0)


def _row_words(classes: int) -> int:
    """Return the words of a row in shared memory, with its label."""
    return (classes | 1) + 1


def _each_row(name: str, x: Array, *arguments: Any, rows_each: int = 1, blocks: int = 1) -> None:
    """Launch a thread for each row of scores, or `blocks` blocks for `rows_each` rows of
    each thread of a block; `None` among the arguments stands for the sizes.
    """
    rows, classes = x.shape
    if not rows:
        return
    threads = _row_threads(classes)
    sizes = rows, classes, divisor(classes)
    given = [b for a in arguments for b in (sizes if a is None else (a,))]
    run = kernel("boxes", f"{name}<{c_type(x)}>")
    shared = 4 * threads * _row_words(classes)
    grid = blocks * min(-(-rows // (rows_each * threads)), MOST)
    run((grid,), (threads,), tuple(given), shared_mem=shared)


def _each_long_row(name: str, x: Array, *arguments: Any) -> None:
    """Launch a warp for each row of scores, likewise."""
    given = [b for a in arguments for b in (x.shape if a is None else (a,))]
    launch_blocks("boxes", f"long_{name}", x, min(-(-len(x) * 32 // THREADS), MOST), *given)


def class_losses(x: Array, labels: Array, losses: Array) -> None:
    each = _each_row if _row_threads(x.shape[1]) else _each_long_row
    each("class_losses", x, x, labels, losses, None, LEAST)


def class_gradients(x: Array, labels: Array, factor: Array, gradients: Array) -> None:
    each = _each_row if _row_threads(x.shape[1]) else _each_long_row
    each("class_gradients", x, x, labels, factor, gradients, None)


def box_losses(
    scores: Array,
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    rule: LocationLoss,
    background: int,
    one_class: bool,
    labels: Array,
    of_location: Array,
    of_class: Array,
) -> None:
    x = scores.reshape(-1, scores.shape[2])
    if not _row_threads(x.shape[1]):
        label_matches(truths, matches, background, one_class, labels)
        location_losses(locations, priors, truths, matches, rule, of_location)
        class_losses(x, labels.reshape(-1), of_class.reshape(-1))
        return
    arrays = x, locations, priors, truths, matches, labels, of_location, of_class
    classes = scores.shape[1], background, int(one_class)
    _each_row("box_losses", x, *arrays, None, LEAST, *classes, *_numbers(rule))


def box_gradients(
    scores: Array,
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    labels: Array,
    rule: LocationLoss,
    weight: float,
    dloss: Array,
    norm: Array,
    dlocations: Array,
    dscores: Array,
) -> None:
    x, dx = (a.reshape(-1, scores.shape[2]) for a in (scores, dscores))
    if not _row_threads(x.shape[1]):
        factor = dloss / norm
        class_gradients(x, labels.reshape(-1), factor, dx)
        given = locations, priors, truths, matches, rule
        location_gradients(*given, factor * factor.dtype.type(weight), dlocations)
        return
    arrays = x, locations, priors, truths, matches, labels, dloss, norm, dlocations, dx
    sizes = float(weight), scores.shape[1], *_numbers(rule)
    _each_row("box_gradients", x, *arrays, None, *sizes, rows_each=SHARE, blocks=1 + SHARE)


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
