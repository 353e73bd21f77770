"""Boxes of detectors (SSD): xmin, ymin, xmax, ymax, normally in units of the image. Formulas in
`Ops.decode_boxes`, `Ops.match_boxes` and `Ops.location_losses`.

Boxes are computed in float, each operation rounded separately, as in SSD: which box is matched must
not depend on the processor.
"""

from functools import partial
from math import exp, log
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.boxes import (
    CENTER_SIZE,
    CORNER,
    NOWHERE,
    PRIORS,
    BoxCode,
    LocationLoss,
    Matching,
    Mining,
    TruthCheck,
)
from caffepy.ops.cpu.compiler import inlined, kernel

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())

Box = tuple[Any, Any, Any, Any]
LEAST = np.float32(1e-6)
"""An overlap that counts is larger."""

ROWS = 1024
"""Rows of scores for which a second thread pays."""


@_inside
def box_of(row: Array) -> Box:
    """Return the first four numbers of a row."""
    return np.float32(row[0]), np.float32(row[1]), np.float32(row[2]), np.float32(row[3])


@_inside
def area(a: Box) -> Any:
    """Width times height, 0 for a box whose ends are the wrong way round."""
    wide, high = a[2] - a[0], a[3] - a[1]
    return wide * high if wide >= 0 and high >= 0 else np.float32(0)


@_inside
def overlap(a: Box, b: Box) -> Any:
    """Intersection over union; 0 for boxes that only touch."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    both = wide * high
    return both / (area(a) + area(b) - both) if wide > 0 and high > 0 else np.float32(0)


@_inside
def _variances(row: Array, scaled: bool) -> Box:
    one = np.float32(1)
    return box_of(row) if scaled else (one, one, one, one)


@_inside
def decoded(locations: Array, prior: Array, variance: Array, kind: int, scaled: bool) -> Box:
    """Return the box of four locations."""
    x, p, v = box_of(locations), box_of(prior), _variances(variance, scaled)
    wide, high, half = p[2] - p[0], p[3] - p[1], np.float32(0.5)
    if kind == CORNER:
        return p[0] + v[0] * x[0], p[1] + v[1] * x[1], p[2] + v[2] * x[2], p[3] + v[3] * x[3]
    if kind == CENTER_SIZE:
        across = v[0] * x[0] * wide + (p[0] + p[2]) * half
        down = v[1] * x[1] * high + (p[1] + p[3]) * half
        reach = np.float32(exp(v[2] * x[2])) * wide * half
        rise = np.float32(exp(v[3] * x[3])) * high * half
        return across - reach, down - rise, across + reach, down + rise
    return (
        p[0] + v[0] * x[0] * wide,
        p[1] + v[1] * x[1] * high,
        p[2] + v[2] * x[2] * wide,
        p[3] + v[3] * x[3] * high,
    )


@_inside
def encoded(truth: Array, prior: Array, variance: Array, kind: int, scaled: bool) -> Box:
    """Return the four locations of a true box."""
    g, p, v = box_of(truth), box_of(prior), _variances(variance, scaled)
    wide, high, half = p[2] - p[0], p[3] - p[1], np.float32(0.5)
    d = (g[0] - p[0], g[1] - p[1], g[2] - p[2], g[3] - p[3])
    if kind == CENTER_SIZE:
        across = ((g[0] + g[2]) * half - (p[0] + p[2]) * half) / wide
        down = ((g[1] + g[3]) * half - (p[1] + p[3]) * half) / high
        grown = np.float32(log((g[2] - g[0]) / wide)), np.float32(log((g[3] - g[1]) / high))
        return across / v[0], down / v[1], grown[0] / v[2], grown[1] / v[3]
    if kind == CORNER:
        return d[0] / v[0], d[1] / v[1], d[2] / v[2], d[3] / v[3]
    return d[0] / wide / v[0], d[1] / high / v[1], d[2] / wide / v[2], d[3] / high / v[3]


@_exact
def _decode(
    locations: Array, priors: Array, kind: int, scaled: bool, boxes: Array, lo: int, hi: int
) -> None:
    for n in range(lo, hi):
        for c in range(boxes.shape[1]):
            for p in range(boxes.shape[2]):
                box = decoded(locations[n, p, c], priors[0, p], priors[1, p], kind, scaled)
                for k in range(4):
                    boxes[n, c, p, k] = box[k]


def decode_boxes(locations: Array, priors: Array, code: BoxCode, boxes: Array) -> None:
    parallel(partial(_decode, locations, priors, *code, boxes), len(boxes))


@_exact
def _match(
    boxes: Array,
    truths: Array,
    label: int,
    threshold: float,
    every: bool,
    inside: bool,
    difficult: bool,
    matches: Array,
    overlaps: Array,
    counts: Array,
    lo: int,
    hi: int,
) -> None:
    own = np.empty(len(truths), np.int64)
    best, place = np.empty(len(truths), np.float32), np.empty(len(truths), np.int64)
    for n in range(lo, hi):
        of_image, known = boxes[n if len(boxes) > 1 else 0], 0
        counts[n] = 0
        for t in range(len(truths)):
            if int(truths[t, 0]) == n and (difficult or truths[t, 7] == 0):
                counts[n, 0] += 1
                if label < 0 or int(truths[t, 1]) == label:
                    own[known], best[known] = t, LEAST
                    known += 1
        found, share = matches[n], overlaps[n]
        found[:], share[:] = -1, 0
        if known == 0:
            continue
        for p in range(len(found)):
            a = box_of(of_image[p])
            if inside and (min(a) < 0 or max(a) > 1):
                found[p] = -2
                continue
            for k in range(known):
                both = overlap(a, box_of(truths[own[k], 3:]))
                if both > LEAST:
                    share[p] = max(share[p], both)
                if both > best[k]:
                    best[k], place[k] = both, p
        for _ in range(known):  # the best pair of those that are left
            most = -1
            for k in range(known):
                if best[k] > LEAST and (
                    most < 0
                    or best[k] > best[most]
                    or (best[k] == best[most] and place[k] < place[most])
                ):
                    most = k
            if most < 0:
                break
            taken = place[most]
            found[taken], share[taken] = own[most], best[most]
            best[most] = 0
            for k in range(known):  # those whose best is gone look for another
                if best[k] <= LEAST or place[k] != taken:
                    continue
                best[k] = LEAST
                for p in range(len(found)):
                    if found[p] == -1:
                        both = overlap(box_of(of_image[p]), box_of(truths[own[k], 3:]))
                        if both > best[k]:
                            best[k], place[k] = both, p
        for p in range(len(found)):
            if every and found[p] == -1:
                largest = LEAST
                for k in range(known):
                    both = overlap(box_of(of_image[p]), box_of(truths[own[k], 3:]))
                    if both > largest and both >= threshold:
                        largest = both
                        found[p], share[p] = own[k], both
            counts[n, 1] += found[p] > -1


def match_boxes(
    boxes: Array,
    truths: Array,
    label: int,
    rule: Matching,
    matches: Array,
    overlaps: Array,
    counts: Array,
) -> None:
    threshold, *switches = rule
    given = boxes, truths, label, np.float32(threshold), *switches
    parallel(partial(_match, *given, matches, overlaps, counts), len(matches))


@_inside
def _differences(
    locations: Array,
    prior: Array,
    variance: Array,
    truth: Array,
    kind: int,
    scaled: bool,
    crossing: int,
    d: Array,
) -> None:
    """Write how far four locations are from those of the true box; 0 where that costs nothing."""
    target = encoded(truth, prior, variance, kind, scaled)
    box = box_of(prior)
    if crossing != PRIORS:
        box = decoded(locations, prior, variance, kind, scaled)
    for k in range(4):
        d[k] = locations[k] - target[k]
        if not scaled:
            d[k] /= variance[k]
        if crossing != NOWHERE and (box[k] < 0 or box[k] > 1):
            d[k] = 0


@_exact
def _location_losses(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    kind: int,
    scaled: bool,
    square: bool,
    crossing: int,
    losses: Array,
    lo: int,
    hi: int,
) -> None:
    half, one = losses.dtype.type(0.5), losses.dtype.type(1)
    d = np.empty(4, losses.dtype)
    for n in range(lo, hi):
        for c in range(matches.shape[1]):
            for p in range(matches.shape[2]):
                losses[n, c, p] = 0
                t = matches[n, c, p]
                if t < 0:
                    continue
                given = locations[n, p, c], priors[0, p], priors[1, p], truths[t, 3:]
                _differences(given[0], given[1], given[2], given[3], kind, scaled, crossing, d)
                for k in range(4):
                    size = abs(d[k])
                    is_square = square or size < one
                    losses[n, c, p] += half * size * size if is_square else size - half


def location_losses(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    rule: LocationLoss,
    losses: Array,
) -> None:
    given = locations, priors, truths, matches, *rule.code, rule.square, rule.crossing
    parallel(partial(_location_losses, *given, losses), len(losses))


@_exact
def _location_gradients(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    kind: int,
    scaled: bool,
    square: bool,
    crossing: int,
    factor: Array,
    gradients: Array,
    lo: int,
    hi: int,
) -> None:
    one, by = gradients.dtype.type(1), factor[()]
    d = np.empty(4, gradients.dtype)
    for n in range(lo, hi):
        gradients[n] = 0
        for c in range(matches.shape[1]):
            for p in range(matches.shape[2]):
                t = matches[n, c, p]
                if t < 0:
                    continue
                given = locations[n, p, c], priors[0, p], priors[1, p], truths[t, 3:]
                _differences(given[0], given[1], given[2], given[3], kind, scaled, crossing, d)
                for k in range(4):
                    slope = d[k] if square else max(-one, min(d[k], one))
                    gradients[n, p, c, k] = by * slope


def location_gradients(
    locations: Array,
    priors: Array,
    truths: Array,
    matches: Array,
    rule: LocationLoss,
    factor: Array,
    gradients: Array,
) -> None:
    given = locations, priors, truths, matches, *rule.code, rule.square, rule.crossing
    parallel(partial(_location_gradients, *given, factor, gradients), len(gradients))


@_exact
def _choose(values: Array, allowed: Array, numbers: Array, chosen: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        chosen[n] = 0
        places = np.flatnonzero(allowed[n])
        order = np.argsort(-values[n][places], kind="mergesort")
        for k in range(min(numbers[n], len(order))):
            chosen[n, places[order[k]]] = 1


def choose_largest(values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
    parallel(partial(_choose, values, allowed, numbers, chosen), len(values))


def check_truths(truths: Array, check: TruthCheck) -> None:
    classes, background, any_class, difficult, bad_label, bad_box = check
    image, label = truths[:, 0], truths[:, 1]
    counts = (image >= 0) & (difficult | (truths[:, 7] == 0))
    inside = (label > -1) & ((label < classes) | any_class) & (label != background)
    finite = np.all(np.abs(truths[:, 3:7]) < np.inf, axis=1)
    for bad, values, flag in ((~inside, label, bad_label), (~finite, image, bad_box)):
        if np.any(counts & bad):
            flag[:] = 1, np.max(values[counts & bad])
            return


def label_matches(
    truths: Array, matches: Array, background: int, one_class: bool, labels: Array
) -> None:
    labels.fill(background)
    known = truths[:, 1].astype(np.int32)
    for c in range(matches.shape[1]):
        own = matches[:, c]
        matched = own >= 0
        labels[matched] = background + 1 if one_class else known[own[matched]]


def mine_negatives(
    losses: Array,
    matches: Array,
    overlaps: Array,
    counts: Array,
    ratio: float,
    most: float,
    labels: Array,
) -> None:
    allowed = ((matches == -1) & (overlaps < most)).astype(np.int32)
    numbers = (counts[:, 1] * np.float32(ratio)).astype(np.int32)
    chosen = np.empty_like(allowed)
    choose_largest(losses, allowed, np.where(counts[:, 0] > 0, numbers, 0), chosen)
    labels[(matches < 0) & (chosen == 0)] = -1


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
    if mining is not None:
        mine_negatives(of_class, matches.reshape(labels.shape), *mining, labels)
    matched, (by_location, by_class) = matches >= 0, weights
    norm[...] = max(np.sum(matched), 1) if divisor is None else divisor
    total = by_location * np.sum(np.where(matched, location, 0))
    total = total + by_class * np.sum(np.where(labels >= 0, of_class, 0))
    loss[...] = total / norm


@kernel
def _class_losses(x: Array, labels: Array, least: float, losses: Array, lo: int, hi: int) -> None:
    for r in range(lo, hi):
        losses[r] = 0
        if labels[r] < 0:
            continue
        row = x[r]
        most, total = row[0], x.dtype.type(0)
        for k in range(1, len(row)):
            most = max(most, row[k])
        for k in range(len(row)):
            total += np.exp(row[k] - most)
        share = np.exp(row[labels[r]] - most) / total
        losses[r] = -np.log(share if share > least or share != share else least)


def class_losses(x: Array, labels: Array, losses: Array) -> None:
    least = x.dtype.type(np.finfo(np.float32).tiny)
    parallel(partial(_class_losses, x, labels, least, losses), len(x), ROWS)


@kernel
def _class_gradients(
    x: Array, labels: Array, factor: Array, gradients: Array, lo: int, hi: int
) -> None:
    by = factor[()]
    for r in range(lo, hi):
        d = gradients[r]
        if labels[r] < 0:
            d[:] = 0
            continue
        row = x[r]
        most, total = row[0], x.dtype.type(0)
        for k in range(1, len(row)):
            most = max(most, row[k])
        for k in range(len(row)):
            d[k] = np.exp(row[k] - most)
            total += d[k]
        share = by / total
        for k in range(len(row)):
            d[k] *= share
        d[labels[r]] -= by


def class_gradients(x: Array, labels: Array, factor: Array, gradients: Array) -> None:
    parallel(partial(_class_gradients, x, labels, factor, gradients), len(x), ROWS)


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
    label_matches(truths, matches, background, one_class, labels)
    location_losses(locations, priors, truths, matches, rule, of_location)
    x = scores.reshape(-1, scores.shape[2])
    class_losses(x, labels.reshape(-1), of_class.reshape(-1))


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
    check_truths(truths, check)
    if check.bad_label[0] or check.bad_box[0]:
        return
    match_boxes(priors[:1], truths, -1, matching, matches, overlaps, counts)
    kinds, losses = (check.background, check.any_class), (labels, of_location, of_class)
    box_losses(scores, locations, priors, truths, matches[:, None], rule, *kinds, *losses)


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
    factor = np.asarray(dloss / norm)
    x, dx = (a.reshape(-1, scores.shape[2]) for a in (scores, dscores))
    class_gradients(x, labels.reshape(-1), factor, dx)
    given = locations, priors, truths, matches, rule
    location_gradients(*given, np.asarray(factor * factor.dtype.type(weight)), dlocations)


@_exact
def _detect(
    boxes: Array,
    scores: Array,
    background: int,
    least: float,
    threshold: float,
    eta: float,
    found: Array,
    counts: Array,
    lo: int,
    hi: int,
) -> None:
    classes = scores.shape[2]
    for row in range(lo, hi):
        n, k = row // classes, row % classes
        counts[n, k] = 0
        if k == background:
            continue
        of_class = boxes[n, k if boxes.shape[1] > 1 else 0]
        places = np.flatnonzero(scores[n, :, k] > least)
        order = np.argsort(-scores[n, :, k][places], kind="mergesort")
        kept, limit = 0, threshold
        for i in order[: found.shape[2]]:
            p = places[i]
            box, free = box_of(of_class[p]), True
            for j in range(kept):
                if overlap(box, box_of(found[n, k, j, 1:])) > limit:
                    free = False
                    break
            if free:
                found[n, k, kept, 0] = scores[n, p, k]
                for c in range(4):
                    found[n, k, kept, 1 + c] = box[c]
                kept += 1
                if eta < 1 and limit > np.float32(0.5):
                    limit *= eta
        counts[n, k] = kept


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
    numbers = np.float32(least), np.float32(threshold), np.float32(eta)
    parallel(partial(_detect, boxes, scores, background, *numbers, found, counts), counts.size)
