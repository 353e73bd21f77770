"""Operands of the losses of YOLO: boxes of cells and anchors with true boxes, x, y, w, h of the
centre and the size, all in units of the image. Reckoned in double precision.
"""

from functools import partial
from math import atan, exp, inf, isfinite, log, pi

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.overlap import CIOU, DIOU, GIOU, MSE, PLAIN, RESCORE, SMOOTH, YoloWeights

Box = tuple[float, float, float, float]


@inlined
def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


@inlined
def _share(a: Box, b: Box) -> tuple[float, float]:
    """Intersection and union."""
    wide = min(a[0] + a[2] / 2, b[0] + b[2] / 2) - max(a[0] - a[2] / 2, b[0] - b[2] / 2)
    high = min(a[1] + a[3] / 2, b[1] + b[3] / 2) - max(a[1] - a[3] / 2, b[1] - b[3] / 2)
    both = 0.0 if wide < 0 or high < 0 else wide * high
    return both, a[2] * a[3] + b[2] * b[3] - both


@inlined
def _ratio_term(a: Box, b: Box) -> float:
    """Difference of the ratios of width to height, 0 to 1."""
    return 4 / pi**2 * (atan(b[2] / b[3]) - atan(a[2] / a[3])) ** 2


@inlined
def _overlap(a: Box, b: Box, kind: int) -> float:
    """IoU, GIoU, DIoU or CIoU of two boxes."""
    both, union = _share(a, b)
    iou: float = both / union
    wide = max(a[0] + a[2] / 2, b[0] + b[2] / 2) - min(a[0] - a[2] / 2, b[0] - b[2] / 2)
    high = max(a[1] + a[3] / 2, b[1] + b[3] / 2) - min(a[1] - a[3] / 2, b[1] - b[3] / 2)
    away = (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
    hull, diagonal = wide * high, wide * wide + high * high
    if kind == GIOU and hull != 0:
        iou -= (hull - union) / hull
    elif kind == DIOU and diagonal != 0:
        iou -= (away / diagonal) ** 0.6
    elif kind == CIOU and diagonal != 0:
        term = _ratio_term(a, b)
        iou -= away / diagonal + term / (1 - iou + term + 0.000001) * term
    return iou


@kernel
def _yolo_scores(
    x: Array,
    truths: Array,
    sizes: Array,
    softmax: bool,
    kind: int,
    scale: float,
    threshold: float,
    p: Array,
    delta: Array,
    lo: int,
    hi: int,
) -> None:
    anchors, length, h, w = x.shape[1:]
    for n in range(lo, hi):
        known = 0
        while known < truths.shape[1] and truths[n, known, 1] != 0:
            known += 1
        for a in range(anchors):
            for i in range(h):
                for j in range(w):
                    v, q, d = x[n, a, :, i, j], p[n, a, :, i, j], delta[n, a, :, i, j]
                    d[:] = 0
                    for c in range(4):
                        q[c] = v[c]
                    q[4] = _sigmoid(v[4])
                    if softmax:
                        most = v[5:].max()
                        total = 0.0
                        for c in range(5, length):
                            q[c] = exp(v[c] - most)
                            total += q[c]
                        for c in range(5, length):
                            q[c] /= total
                    else:
                        for c in range(5, length):
                            q[c] = _sigmoid(v[c])
                    u0, u1 = _sigmoid(v[0]), _sigmoid(v[1])
                    if not softmax:
                        q[0], q[1] = u0, u1
                    box = (
                        (j + u0) / w,
                        (i + u1) / h,
                        exp(v[2]) * sizes[a, 0],
                        exp(v[3]) * sizes[a, 1],
                    )
                    best = 0.0
                    for t in range(known):
                        b = truths[n, t]
                        share = _overlap(box, (b[1], b[2], b[3], b[4]), kind)
                        if share > best:
                            best = share
                    if best <= threshold:
                        d[4] = scale * q[4] * q[4] * (1 - q[4]) if softmax else q[4]


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
    given = x, truths, sizes, softmax, kind, scale, threshold, p, delta
    parallel(partial(_yolo_scores, *given), len(x))


@inlined
def _cell(place: float, size: int) -> int:
    return min(max(int(place * size), 0), size - 1)


@inlined
def _bounded_move(value: float, most: float) -> float:
    return min(max(value, -most), most)


@kernel
def _region_truths(
    p: Array,
    truths: Array,
    sizes: Array,
    by_bias: bool,
    rule: int,
    object_scale: float,
    class_scale: float,
    coord_scale: float,
    delta: Array,
    lo: int,
    hi: int,
) -> None:
    anchors, length, h, w = p.shape[1:]
    for n in range(lo, hi):
        for t in range(truths.shape[1]):
            kind, x, y, wide, high = truths[n, t]
            if wide == 0:
                break
            i, j = _cell(y, h), _cell(x, w)
            best, chosen, row, column = 0.0, 0, 0, 0
            for a in range(anchors):
                q = p[n, a, :, i, j]
                bw, bh = float(sizes[a, 0]), float(sizes[a, 1])
                if not by_bias:
                    bw, bh = exp(q[2]) * bw, exp(q[3]) * bh
                iou = _overlap((0.0, 0.0, bw, bh), (0.0, 0.0, wide, high), MSE)
                if iou > best:
                    best, chosen, row, column = iou, a, i, j
            q, d = p[n, chosen, :, row, column], delta[n, chosen, :, row, column]
            sx, sy = _sigmoid(q[0]), _sigmoid(q[1])
            bw, bh = sizes[chosen]
            box = (j + sx) / w, (i + sy) / h, exp(q[2]) * bw, exp(q[3]) * bh
            c = coord_scale * (2 - wide * high) if rule == PLAIN else coord_scale
            most = 1.0 if rule == SMOOTH else inf
            d[0] = -c * _bounded_move(x * w - j - sx, most) * sx * (1 - sx)
            d[1] = -c * _bounded_move(y * h - i - sy, most) * sy * (1 - sy)
            d[2] = -c * _bounded_move(log(wide / bw) - q[2], most)
            d[3] = -c * _bounded_move(log(high / bh) - q[3], most)
            goal = _overlap(box, (x, y, wide, high), MSE) if rule == RESCORE else 1.0
            away = 2 * (1 - q[4]) ** 3 if rule == SMOOTH else goal - q[4]
            d[4] = -object_scale * away * q[4] * (1 - q[4])
            for k in range(5, length):
                d[k] = -class_scale * ((1.0 if k - 5 == int(kind) else 0.0) - q[k])


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
    given = p, truths, sizes, by_bias, rule, object_scale, class_scale, coord_scale, delta
    parallel(partial(_region_truths, *given), len(p))


@kernel
def _sort_truths(rows: Array, truths: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        truths[n] = 0
        count = 0
        for g in range(rows.shape[0]):
            if int(rows[g, 0]) != n or rows[g, 0] < 0:
                continue
            left, top, right, bottom = rows[g, 3], rows[g, 4], rows[g, 5], rows[g, 6]
            row = truths[n, count]
            row[0] = rows[g, 1] - 1
            row[1], row[2] = (left + right) / 2, (top + bottom) / 2
            row[3], row[4] = right - left, bottom - top
            count += 1


def sort_truths(rows: Array, truths: Array) -> None:
    parallel(partial(_sort_truths, rows, truths), len(truths))


@inlined
def _slope(a: Box, b: Box, kind: int) -> Box:
    """Darknet's derivatives of the overlap by x, y, w and h of box a."""
    al, ar, at, ab = a[0] - a[2] / 2, a[0] + a[2] / 2, a[1] - a[3] / 2, a[1] + a[3] / 2
    bl, br, bt, bb = b[0] - b[2] / 2, b[0] + b[2] / 2, b[1] - b[3] / 2, b[1] + b[3] / 2
    wide, high = ar - al, ab - at
    iw, ih = min(ar, br) - max(al, bl), min(ab, bb) - max(at, bt)
    both = iw * ih
    union = wide * high + (br - bl) * (bb - bt) - both
    cw, ch = max(ar, br) - min(al, bl), max(ab, bb) - min(at, bt)
    hull = cw * ch
    # by the left, right, top and bottom end: intersection, union, hull
    il, ir = -ih if al > bl else 0.0, ih if ar < br else 0.0
    it, ib = -iw if at > bt else 0.0, iw if ab < bb else 0.0
    ul, ur, ut, ub = -high - il, high - ir, -wide - it, wide - ib
    hl, hr = -ch if al < bl else 0.0, ch if ar > br else 0.0
    ht, hb = -cw if at < bt else 0.0, cw if ab > bb else 0.0
    dl = dr = dt = db = 0.0
    if union > 0:
        square = union * union
        dl, dr = (union * il - both * ul) / square, (union * ir - both * ur) / square
        dt, db = (union * it - both * ut) / square, (union * ib - both * ub) / square
    apart = iw <= 0 or ih <= 0
    if kind == GIOU:
        if apart:
            dl = dr = dt = db = 0.0
        if hull > 0 or apart:
            square = hull * hull
            dl, dr = dl + (hull * ul - union * hl) / square, dr + (hull * ur - union * hr) / square
            dt, db = dt + (hull * ut - union * ht) / square, db + (hull * ub - union * hb) / square
    dx, dy, dw, dh = dl + dr, dt + db, dr - dl, db - dt
    if kind in (DIOU, CIOU):
        away, diagonal = (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2, cw * cw + ch * ch
        left, right = 1.0 if al < bl else 0.0, 1.0 if ar > br else 0.0
        top, bottom = 1.0 if at < bt else 0.0, 1.0 if ab > bb else 0.0
        if apart:
            dx = dy = dw = dh = 0.0
        if diagonal > 0 or apart:
            square = diagonal * diagonal
            dx += (2 * (b[0] - a[0]) * diagonal - 2 * cw * (right - left) * away) / square
            dy += (2 * (b[1] - a[1]) * diagonal - 2 * ch * (bottom - top) * away) / square
            dw += 2 * cw * 0.5 * (right + left) * away / square
            dh += 2 * ch * 0.5 * (bottom + top) * away / square
            if kind == CIOU:
                term = _ratio_term(a, b)
                alpha = term / (1 - both / union + term + 0.000001)
                turn = 8 / pi**2 * (atan(b[2] / b[3]) - atan(a[2] / a[3]))
                dw += alpha * turn * a[3]
                dh -= alpha * turn * a[2]
    return dx, dy, dw, dh


@inlined
def _bounded(value: float, most: float) -> float:
    return min(max(value, -most), most) if isfinite(value) else 0.0


@kernel
def _yolo_truths(
    p: Array,
    truths: Array,
    anchors: Array,
    slots: Array,
    kind: int,
    weights: YoloWeights,
    delta: Array,
    stats: Array,
    lo: int,
    hi: int,
) -> None:
    length, h, w = p.shape[2:]
    for n in range(lo, hi):
        stats[n, 0] = stats[n, 1] = 0
        for t in range(truths.shape[1]):
            label, x, y, wide, high = truths[n, t]
            if wide == 0:
                break
            truth = (float(x), float(y), float(wide), float(high))
            i, j = _cell(y, h), _cell(x, w)
            best, chosen = 0.0, -1
            for a in range(len(anchors)):
                size = (0.0, 0.0, anchors[a, 0], anchors[a, 1])
                share = _overlap(size, (0.0, 0.0, wide, high), kind)
                if share > best:
                    best, chosen = share, a
            found = slots[chosen] if chosen >= 0 else -1
            # The fork compares the number of an anchor with the slot of the best one.
            excluded = found if found >= 0 else chosen
            for turn in range(-1, len(anchors)):
                a = chosen if turn < 0 else turn
                slot = slots[a] if a >= 0 else -1
                if slot < 0:
                    continue
                if turn >= 0:
                    size = (0.0, 0.0, anchors[a, 0], anchors[a, 1])
                    share = _overlap(size, (0.0, 0.0, wide, high), kind)
                    if turn == excluded or weights.least >= 1 or not share > weights.least:
                        continue
                q, d = p[n, slot, :, i, j], delta[n, slot, :, i, j]
                bw, bh = anchors[a]
                box = (j + q[0]) / w, (i + q[1]) / h, exp(q[2]) * bw, exp(q[3]) * bh
                if kind == MSE:
                    scale = -weights.coord * (2 - wide * high)
                    d[0] = scale * (x * w - j - q[0])
                    d[1] = scale * (y * h - i - q[1])
                    d[2] = scale * (log(wide / bw) - q[2])
                    d[3] = scale * (log(high / bh) - q[3])
                    share = _overlap(box, truth, MSE)
                else:
                    share = _overlap(box, truth, kind if kind in (GIOU, CIOU) else DIOU)
                    dx, dy, dw, dh = _slope(box, truth, kind)
                    if not weights.accumulate:
                        d[:4] = 0
                    d[0] -= _bounded(dx * weights.box, weights.most)
                    d[1] -= _bounded(dy * weights.box, weights.most)
                    d[2] -= _bounded(dw * exp(q[2]) * weights.box, weights.most)
                    d[3] -= _bounded(dh * exp(q[3]) * weights.box, weights.most)
                stats[n, 0] += 1 - share
                stats[n, 1] += 1
                d[4] = -weights.object * (1 - q[4])
                true = 5 + min(max(int(label), 0), length - 6)
                smooth = weights.smooth / 2
                if d[true] != 0:
                    d[true] = -weights.label * (1 - weights.smooth + smooth - q[true])
                else:
                    factor = weights.label
                    if weights.focal:
                        u = q[true] + 1e-15
                        factor *= -0.5 * (1 - u) * (2 * u * log(u) + u - 1)
                        smooth = 0.0
                    for k in range(5, length):
                        goal = smooth
                        if k == true:
                            goal += 1 - (0.0 if weights.focal else weights.smooth)
                        d[k] = -factor * (goal - q[k])


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
    given = p, truths, anchors, slots, kind, weights, delta, stats
    parallel(partial(_yolo_truths, *given), len(p))
