"""MultiBoxLoss against a loop that follows SSD's rules, numerical gradients, and a GPU."""

from math import exp, log, log1p

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, seeded
from .on_gpu import check_plain_on_gpu

K = 4
TRUTHS = np.array(
    [
        [0, 1, 0, 0.1, 0.1, 0.45, 0.5, 0],
        [0, 3, 1, 0.5, 0.4, 0.95, 0.8, 1],
        [2, 2, 0, 0.3, 0.2, 0.7, 0.6, 0],
        [-1, -1, -1, -1, -1, -1, -1, -1],
        [0, 2, 2, 0.12, 0.1, 0.5, 0.45, 0],
        [2, 1, 1, 0.0, 0.5, 0.2, 0.9, 0],
    ]
)  # image 1 has none
CENTRED = "code_type: CENTER_SIZE "
# name: settings of multibox_loss_param, settings beside it
CASES = {
    "default": ("", ""),
    "centred": (CENTRED + "neg_pos_ratio: 1.5 neg_overlap: 0.3 loc_weight: 2", ""),
    "no negatives": (CENTRED + "neg_pos_ratio: 0", ""),
    "corner sizes": ("code_type: CORNER_SIZE loc_loss_type: L2 match_type: BIPARTITE", ""),
    "hard examples": (CENTRED + "mining_type: HARD_EXAMPLE sample_size: 5", ""),
    "no mining": (CENTRED + "mining_type: NONE", "loss_param { normalize: false }"),
    "each class its boxes": ("mining_type: NONE share_location: false", ""),
    "logistic": ("conf_loss_type: LOGISTIC", "loss_param { normalization: FULL }"),
    "logistic without mining": ("conf_loss_type: LOGISTIC mining_type: NONE", ""),
    "not difficult": ("use_difficult_gt: false overlap_threshold: 0.3", ""),
    "no box at the edge": ("ignore_cross_boundary_bbox: true bp_inside: true", ""),
    "edge": (CENTRED + "bp_inside: true", ""),
    "agnostic": ("map_object_to_agnostic: true num_classes: 2", ""),
    "targets with variances": (CENTRED + "encode_variance_in_target: true", ""),
    "apart": ("nms_param { nms_threshold: 0.3 top_k: 9 } use_prior_for_nms: true", ""),
    "predictions": (CENTRED + "use_prior_for_matching: false overlap_threshold: 0.35", ""),
    "predictions of classes": (
        CENTRED + "use_prior_for_matching: false share_location: false mining_type: NONE",
        "",
    ),
    "logistic of classes": (  # where a box may have matches of two classes
        CENTRED + "use_prior_for_matching: false share_location: false mining_type: NONE "
        "conf_loss_type: LOGISTIC overlap_threshold: 0.1",
        "",
    ),
    "predictions apart": (
        "nms_param { nms_threshold: 0.3 top_k: 9 } use_prior_for_matching: false bp_inside: true",
        "",
    ),
    "part": ("", "propagate_down: [true, false, false, false]"),
    "background last": ("background_label_id: 0 num_classes: 7", ""),
    "focal": (CENTRED + "neg_pos_ratio: 1.5", "focal_loss_param { gamma: 1.5 alpha: 0.6 }"),
    "focal without mining": (CENTRED + "mining_type: NONE", ""),
    "focal of hard examples": ("mining_type: HARD_EXAMPLE sample_size: 5", ""),
    "focal apart": ("nms_param { nms_threshold: 0.3 top_k: 9 } use_prior_for_nms: true", ""),
    "focal of each class": ("mining_type: NONE share_location: false", ""),
    "focal logistic": ("conf_loss_type: LOGISTIC", ""),
}


def given(case: str) -> tuple[str, list[np.ndarray]]:
    """Return the prototxt of a case and its bottoms: 3 images, 20 priors."""
    settings, beside = CASES[case]
    classes = {"agnostic": 2, "background last": 7}.get(case, K)
    if classes == K:
        settings += f" num_classes: {K}"
    rng = seeded(5)
    centre, size = rng.uniform(0.05, 0.95, (20, 2)), rng.uniform(0.15, 0.6, (20, 2))
    priors = np.hstack([centre - size / 2, centre + size / 2])
    priors[:6] = TRUTHS[:, 3:7] + rng.normal(0, 0.02, (6, 4))
    priors[3] = [0.2, 0.2, 0.2, 0.6]  # of no size
    variances = np.tile([0.1, 0.1, 0.2, 0.2], (20, 1))
    groups = 1 if "share_location: false" not in settings else classes
    bottoms = [
        rng.normal(0, 0.4, (3, 20 * groups * 4)),
        rng.normal(0, 2, (3, 20 * classes)),
        np.stack([priors, variances]).reshape(1, 2, -1),
        TRUTHS[None, None],
    ]
    # as the GPU and SSD see them
    bottoms = [np.float32(b).astype(np.float64) for b in bottoms]
    kind = "MultiBoxFocalLoss" if "focal" in case else "MultiBoxLoss"
    return f'type: "{kind}" multibox_loss_param {{ {settings} }} {beside}', bottoms


def size(box):
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def iou(a, b):
    both = size([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])
    return both / (size(a) + size(b) - both) if both > 0 else 0


def encode(g, p, v, text):
    v = [1] * 4 if "encode_variance" in text else v
    wide, high = p[2] - p[0], p[3] - p[1]
    if "CENTER_SIZE" in text:
        d = [(g[0] + g[2] - p[0] - p[2]) / 2 / wide, (g[1] + g[3] - p[1] - p[3]) / 2 / high]
        d += [log((g[2] - g[0]) / wide), log((g[3] - g[1]) / high)]
    else:
        by = [wide, high] * 2 if "CORNER_SIZE" in text else [1] * 4
        d = [(g[k] - p[k]) / by[k] for k in range(4)]
    return [x / y for x, y in zip(d, v, strict=True)]


def decode(x, p, v, text):
    v = [1] * 4 if "encode_variance" in text else v
    d, wide, high = [a * b for a, b in zip(x, v, strict=True)], p[2] - p[0], p[3] - p[1]
    if "CENTER_SIZE" in text:
        across, down = d[0] * wide + (p[0] + p[2]) / 2, d[1] * high + (p[1] + p[3]) / 2
        wide, high = exp(d[2]) * wide / 2, exp(d[3]) * high / 2
        return [across - wide, down - high, across + wide, down + high]
    by = [wide, high] * 2 if "CORNER_SIZE" in text else [1] * 4
    return [p[k] + d[k] * by[k] for k in range(4)]


def matched(boxes, truths, rows, settings, text):
    """Matches of boxes with rows of truths, and their overlaps."""
    found, largest, shares = [-1] * len(boxes), [0.0] * len(boxes), {}
    for p, box in enumerate(boxes):
        if settings.ignore_cross_boundary_bbox and rows and (min(box) < 0 or max(box) > 1):
            found[p] = -2
            continue
        for t in rows:
            if (both := iou(box, truths[t, 3:7])) > 1e-6:
                shares[p, t] = both
                largest[p] = max(largest[p], both)
    left = list(rows)
    while pairs := [(-s, p, t) for (p, t), s in shares.items() if t in left and found[p] == -1]:
        share, p, t = min(pairs)
        found[p], largest[p] = t, -share
        left.remove(t)
    for p in range(len(boxes)):
        own = [
            (-s, t) for (q, t), s in shares.items() if q == p and s >= settings.overlap_threshold
        ]
        if found[p] == -1 and own and "BIPARTITE" not in text:
            largest[p], found[p] = -min(own)[0], min(own)[1]
    return found, largest


def cross_entropy(x, target):
    return sum(max(v, 0) - v * t + log1p(exp(-abs(v))) for v, t in zip(x, target, strict=True))


def softmax_loss(x, label):
    return log(sum(exp(v - x[label]) for v in x))


def location_loss(x, p, v, g, settings, text):
    box = p if settings.use_prior_for_matching else decode(x, p, v, text)
    total = 0
    for k, target in enumerate(encode(g, p, v, text)):
        d = abs(x[k] - target) / (v[k] if "encode_variance" in text else 1)
        if settings.bp_inside and not 0 <= box[k] <= 1:
            d = 0
        total += 0.5 * d * d if d < 1 or "L2" in text else d - 0.5
    return total


def kept_apart(order, boxes, threshold):
    kept = []
    for p in order:
        if size(boxes[p]) >= 1e-5 and all(iou(boxes[q], boxes[p]) <= threshold for q in kept):
            kept.append(p)
    return kept


def reference(text, bottoms, settings):
    """The loss of locations, that of classes, and the number of matches."""
    n, k = 3, settings.num_classes
    (priors, variances), truths = bottoms[2].reshape(2, 20, 4), bottoms[3].reshape(-1, 8)
    locations, scores = bottoms[0].reshape(n, 20, -1, 4), bottoms[1].reshape(n, 20, k)
    groups = locations.shape[2]
    of_locations = of_classes = count = 0
    targets = np.zeros(n * 20 * k)
    for i in range(n):
        rows = [
            t
            for t in range(len(truths))
            if truths[t, 0] == i and (settings.use_difficult_gt or not truths[t, 7])
        ]
        maps = []
        for c in range(groups):
            boxes = priors
            if not settings.use_prior_for_matching:
                own = zip(locations[i, :, c], priors, variances, strict=True)
                boxes = [decode(*each, text) for each in own]
            own = rows
            if groups > 1 and not settings.use_prior_for_matching:
                own = [t for t in rows if truths[t, 1] == c]
            found, shares = matched(boxes, truths, own, settings, text)
            if groups > 1:
                found = [t if t >= 0 and truths[t, 1] == c else -1 for t in found]
            maps.append(found)
        labels = [0] * 20
        for found in maps:
            for p, t in enumerate(found):
                if t >= 0:
                    labels[p] = 1 if settings.map_object_to_agnostic else int(truths[t, 1])
        learning = set(range(20))
        found = maps[0]

        def loss_at(p, t, c=0, i=i):
            x = locations[i, p, c]
            return location_loss(x, priors[p], variances[p], truths[t, 3:7], settings, text)

        if "NONE" not in text:
            losses = [
                cross_entropy(x, np.eye(k)[label]) if "LOGISTIC" in text else softmax_loss(x, label)
                for x, label in zip(scores[i], labels, strict=True)
            ]
            positive = [p for p in range(20) if found[p] >= 0]
            allowed = [p for p in range(20) if found[p] == -1 and shares[p] < settings.neg_overlap]
            number = int(len(positive) * settings.neg_pos_ratio)
            if "HARD" in text:
                allowed, number = list(range(20)), settings.sample_size
                losses = [
                    v + (loss_at(p, found[p]) if p in positive else 0) for p, v in enumerate(losses)
                ]
            order = sorted(allowed, key=lambda p: (-losses[p], p))
            if "nms_param" in text:
                at = priors
                if not settings.use_prior_for_nms:
                    own = zip(locations[i, :, 0], priors, variances, strict=True)
                    at = [decode(*each, text) for each in own]
                order = kept_apart(order[:9], at, 0.3)
            chosen = set(order[:number]) if rows else set()
            if "HARD" in text:
                found[:] = [t if p in chosen or t < 0 else -1 for p, t in enumerate(found)]
                learning = {p for p in chosen if found[p] > -2}
            else:
                learning = chosen | set(positive)
        for c, own in enumerate(maps):
            for p, t in enumerate(own):
                if t >= 0:
                    of_locations += loss_at(p, t, c)
                    count += 1
                    # without mining SSD writes the targets of image i at i * 20
                    start = i * 20 if "NONE" in text else i * 20 * k
                    label = labels[p] if groups == 1 else c
                    targets[start + p * k + label] = 1
        for p in learning:
            if labels[p] == 0 and "NONE" not in text:
                targets[(i * 20 + p) * k] = 1
            if "LOGISTIC" not in text:
                loss = softmax_loss(scores[i, p], labels[p])
                alpha, gamma = (0.6, 1.5) if "gamma" in text else (0.25, 2)
                weight = alpha * (1 - exp(-loss)) ** gamma if "Focal" in text else 1
                of_classes += weight * loss
            elif "NONE" not in text:
                of_classes += cross_entropy(scores[i, p], np.eye(k)[labels[p]])
    if "LOGISTIC" in text and "NONE" in text:
        of_classes = cross_entropy(scores.reshape(-1), targets)
    return of_locations, of_classes, count


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    text, bottoms = given(case)
    single = Single(text, *bottoms)
    (loss,) = single.forward()
    locations, classes, count = reference(text, bottoms, single.layer.settings)
    assert count > 1
    assert locations > 0
    divisor = {"no mining": 3, "logistic": 60}.get(case, count)
    weight = 2 if case == "centred" else 1
    want = weight * locations + (classes if case != "part" else 0)
    assert loss == pytest.approx(want / divisor, rel=1e-5)


DERIVED = [name for name in CASES if not {"part", "targets with variances", "edge"} & {name}]


@pytest.mark.parametrize("case", DERIVED)
def test_gradient(case):
    """What is matched and mined does not change with so small a step."""
    text, bottoms = given(case)
    bottoms[0] = bottoms[0] + 0.01
    down = [True, True, False, False]
    check_gradient(text, *bottoms, propagate_down=down, step=1e-4, tolerance=1e-4)


def test_gradient_of_targets_with_variances_lacks_their_factor():
    text, bottoms = given("targets with variances")
    plain = text.replace("encode_variance_in_target: true", "")
    one, other = Single(text, *bottoms), Single(plain, *bottoms)
    for single in (one, other):
        single.forward()
    down = [True, True, False, False]
    (ours, *_), _ = one.backward(propagate_down=down)
    matches = one.layer.matches.data.reshape(-1) >= 0
    assert matches.any()
    variances, truths = bottoms[2][0, 1].reshape(20, 4), TRUTHS[:, 3:7]
    priors = bottoms[2][0, 0].reshape(20, 4)
    for i, match in enumerate(one.layer.matches.data.reshape(-1)):
        n, p = divmod(i, 20)
        got = ours[n].reshape(20, 4)[p]
        if match < 0:
            assert not got.any()
            continue
        target = encode(truths[match], priors[p], variances[p], text)
        d = (bottoms[0][n].reshape(20, 4)[p] - target) / variances[p]
        np.testing.assert_allclose(got, np.clip(d, -1, 1) / matches.sum(), rtol=1e-5, atol=1e-6)


def test_coordinates_outside_learn_nothing():
    text, bottoms = given("edge")
    single, free = Single(text, *bottoms), Single(text.replace("bp_inside: true", ""), *bottoms)
    for each in (single, free):
        each.forward()
    down = [True, True, False, False]
    (inside, *_), _ = single.backward(propagate_down=down)
    (everywhere, *_), _ = free.backward(propagate_down=down)
    priors = bottoms[2][0, 0]
    np.testing.assert_array_equal(inside, np.where((priors < 0) | (priors > 1), 0, everywhere))
    assert (inside != everywhere).any()


def test_images_without_true_boxes_learn_nothing():
    text, bottoms = given("default")
    bottoms[3] = np.full((1, 1, 1, 8), -1.0)
    single = Single(text, *bottoms)
    assert single.forward()[0] == 0
    (dx, dscores, *_), _ = single.backward(propagate_down=[True, True, False, False])
    assert not dx.any()
    assert np.abs(dscores).max() < 1e-40


@pytest.mark.parametrize("label", [0, 4, -1])
def test_a_true_box_of_no_class_is_named(label):
    text, bottoms = given("default")
    bottoms[3] = bottoms[3].copy()
    bottoms[3][0, 0, 1, 1] = label
    with pytest.raises(DataError, match=f"a true box has class {label}; num_classes 4 has 0 to 3"):
        Single(text, *bottoms).forward()


@pytest.mark.parametrize("side", [np.inf, np.nan])
def test_a_true_box_that_is_not_finite_is_named(side):
    text, bottoms = given("default")
    bottoms[3] = bottoms[3].copy()
    bottoms[3][0, 0, 2, 5] = side
    with pytest.raises(DataError, match="a true box of image 2 of the batch is not finite"):
        Single(text, *bottoms).forward()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "needs num_classes"),
        ("num_classes: 4 share_location: false", "share_location false needs mining_type: NONE"),
        ("num_classes: 4 do_neg_mining: false", "do_neg_mining and mining_type"),
        ("num_classes: 4 neg_pos_ratio: -1", "neg_pos_ratio must not be below 0"),
        ("num_classes: 4 mining_type: HARD_EXAMPLE sample_size: 0", "sample_size must be above 0"),
        ("num_classes: 4 map_object_to_agnostic: true", "needs num_classes 2"),
        ("num_classes: 4 background_label_id: 4", "none of the 4 classes"),
        ("num_classes: 5", "need 3 x 100 scores.*; these are of 4 classes, but num_classes is 5"),
        (
            "num_classes: 4 share_location: false mining_type: NONE",
            "need 3 x 320 locations.*a num_output of 16 x the boxes that the PriorBox",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    _, bottoms = given("default")
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "MultiBoxLoss" multibox_loss_param {{ {settings} }}', *bottoms)


@pytest.mark.parametrize(
    ("bottom", "shape", "message"),
    [
        (2, (1, 160), r"bottom 2 .*\(1, 2, P \* 4\), as Prior"),
        (3, (1, 1, 8, 6), r"bottom 3 .*\(1, 1, G, 8\), as Anno"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(bottom, shape, message):
    text, bottoms = given("default")
    bottoms[bottom] = np.zeros(shape)
    with pytest.raises(ConfigError, match=message):
        Single(text, *bottoms)


def test_a_focal_loss_of_what_is_sure_has_no_gradient():
    text, bottoms = given("focal without mining")
    bottoms[1][...] = np.tile([50.0, -50, -50, -50], 60).reshape(3, -1)
    bottoms[3][..., 0] = -1
    single = Single(text, *bottoms)
    assert single.forward()[0] == 0
    (_, dscores, *_), _ = single.backward(propagate_down=[True, True, False, False])
    assert np.abs(dscores).max() < 1e-40
    with pytest.raises(ConfigError, match="gamma must be 0 or more, not -1"):
        Single(text + "focal_loss_param { gamma: -1 }", *bottoms)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    text, bottoms = given(case)
    check_plain_on_gpu(text, *bottoms, propagate_down=[True, True, False, False])


REFINED = {
    "moved": (CENTRED + "neg_pos_ratio: 2", True),
    "corners": ("", True),
    "only sure": (CENTRED + "neg_pos_ratio: 2", False),
    "no mining": (CENTRED + "mining_type: NONE", True),
    "edge": (CENTRED + "bp_inside: true loc_weight: 2", True),
    "each class": (CENTRED + "mining_type: NONE share_location: false", True),
}
NO_NORMALIZER = "loss_param { normalization: NONE }"


def refined(case):
    """RefineDet's six bottoms, or five; few priors of images 0 and 2 are sure."""
    settings, moves = REFINED[case]
    _, bottoms = given("each class its boxes" if "share_location" in settings else "default")
    rng = seeded(11)
    bottoms[2][0, 0, 12:16] = 0.2, 0.2, 0.5, 0.6  # the prior of no size
    sure = np.stack([rng.random((3, 20)), rng.random((3, 20))], axis=2)
    bottoms.append(np.float32(sure.reshape(3, -1)).astype(np.float64))
    if moves:
        bottoms.append(np.float32(rng.normal(0, 0.4, (3, 80))).astype(np.float64))
    settings += f" objectness_score: 0.6 num_classes: {K}"
    return f'type: "MultiBoxLoss" multibox_loss_param {{ {settings} }} {NO_NORMALIZER}', bottoms


@pytest.mark.parametrize("case", REFINED)
def test_priors_of_each_image(case):
    """Image by image what SSD's layer does with its priors, moved; priors that are not sure are
    boxes that overlap a truth too much to be negatives.
    """
    text, bottoms = refined(case)
    single = Single(text, *bottoms)
    (loss,) = single.forward()
    wanted = [True, True, *[False] * (len(bottoms) - 2)]
    (dloc, dconf, *_), _ = single.backward([np.array(1.0)], propagate_down=wanted)
    total, (boxes, variances) = 0.0, bottoms[2].reshape(2, 20, 4)
    for n in range(3):
        own = boxes.copy()
        if len(bottoms) > 5:
            moves = bottoms[5].reshape(3, 20, 4)[n]
            own = np.array(
                [decode(m, p, v, text) for m, p, v in zip(moves, boxes, variances, strict=True)]
            )
        truths = TRUTHS.copy()
        truths[:, 0] = np.where(TRUTHS[:, 0] == n, 0, -1)
        plain = text.replace("objectness_score: 0.6", "")
        given_n = [bottoms[0][n : n + 1], bottoms[1][n : n + 1], np.stack([own, variances])]
        one = Single(plain, *given_n[:2], given_n[2].reshape(1, 2, -1), truths[None, None])
        if "NONE share" not in text and "mining_type" not in text:
            unsure = bottoms[4].reshape(3, 20, 2)[n, :, 1] < np.float32(0.6)
            for name in ("match", "match_with_losses"):
                match = getattr(one.layer, name)

                def and_unsure(*given, one=one, match=match, unsure=unsure):
                    match(*given)
                    one.layer.overlaps.data[0, unsure] = 1

                setattr(one.layer, name, and_unsure)
        total += one.forward()[0]
        (dl, dc, *_), _ = one.backward([np.array(1.0)], propagate_down=[True, True, False, False])
        np.testing.assert_allclose(dloc[n], dl[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dconf[n], dc[0], rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(total, rel=1e-4)
    assert np.count_nonzero(dloc) > 20


def test_scores_of_priors_that_do_not_fit():
    text, bottoms = refined("moved")
    bottoms[4] = bottoms[4][:, 2:]
    with pytest.raises(ConfigError, match="bottom 4 must be RefineDet's scores of 20 priors"):
        Single(text, *bottoms)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REFINED)
def test_priors_of_each_image_on_gpu(case):
    text, bottoms = refined(case)
    wanted = [True, True, *[False] * (len(bottoms) - 2)]
    check_plain_on_gpu(text, *bottoms, propagate_down=wanted)
