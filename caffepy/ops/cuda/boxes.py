"""Boxes of detectors (SSD)."""

import cupy
import numpy as np

from caffepy.ops.boxes import BoxCode, LocationLoss, Matching
from caffepy.ops.cuda.launch import MOST, THREADS, Array, launch, launch_blocks

WIDE = 1024
"""Threads of a block that takes an image."""


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
    nearest = cupy.empty(matches.shape, np.int32)
    best = cupy.empty(max(known, 1), np.uint64)
    wanted = known, label, int(rule.difficult)
    found = matches, overlaps, nearest
    sizes = own, images, count, *wanted, int(rule.inside)
    launch("boxes", "compare_boxes", boxes, matches.size, boxes, truths, *found, *sizes)
    arguments = boxes, truths, matches, best, own, images, count, *wanted
    launch_blocks("boxes", "best_boxes", boxes, min(known, MOST), *arguments)
    last = own, count, *wanted, float(rule.threshold), int(rule.every)
    given = boxes, truths, *found, best, counts, *last
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


def choose_largest(values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
    rows, count = values.shape
    arguments = values, allowed, numbers, chosen, count
    launch_blocks("boxes", "choose_largest", values, rows, *arguments, threads=WIDE)


def class_losses(x: Array, labels: Array, losses: Array) -> None:
    least = float(np.finfo(np.float32).tiny)
    blocks = min(-(-len(x) * 32 // THREADS), MOST)
    launch_blocks("boxes", "class_losses", x, blocks, x, labels, losses, *x.shape, least)


def class_gradients(x: Array, labels: Array, factor: Array, gradients: Array) -> None:
    blocks = min(-(-len(x) * 32 // THREADS), MOST)
    launch_blocks("boxes", "class_gradients", x, blocks, x, labels, factor, gradients, *x.shape)


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
    each = scores.transpose(0, 2, 1)
    allowed = each > np.float32(least)
    order = cupy.argsort(cupy.where(allowed, -each, np.inf), axis=2, kind="stable")
    order = cupy.ascontiguousarray(order[:, :, : found.shape[2]], np.int64)
    numbers = cupy.minimum(allowed.sum(axis=2), found.shape[2]).astype(np.int32)
    sizes = *boxes.shape[1:3], scores.shape[2], found.shape[2], background
    arguments = boxes, scores, order, numbers, found, counts, *sizes, float(threshold), float(eta)
    launch_blocks("boxes", "detect", boxes, counts.size, *arguments, threads=128)
