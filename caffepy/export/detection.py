"""SSD's detections: boxes from locations and priors, of which NonMaxSuppression keeps the best."""

import numpy as np

from caffepy.export.graph import InexpressibleError, Site, writers
from caffepy.proto.caffe_pb2 import PriorBoxParameter

COLUMNS = 7  # image, class, score, box


@writers("DetectionOutput")
def detection_output(site: Site) -> None:
    """Rows (1, 1, D, 7) as SSD's; of scores that are the top_k'th of their class all count."""
    layer, settings = site.layer, site.layer.settings
    n, count, groups = layer.view
    if groups > 1:
        raise InexpressibleError("NonMaxSuppression has one box for all classes: share_location")
    if any(layer.refines):
        raise InexpressibleError("it has no operators for RefineDet's further bottoms")
    if settings.nms_param.eta < 1:
        raise InexpressibleError("NonMaxSuppression has one threshold: eta must be 1")
    if n > 1 and settings.keep_top_k > -1:
        raise InexpressibleError(f"keep_top_k is of one image, and the net has {n}")
    boxes, scores = _boxes(site), _scores(site)
    labels = [k for k in range(layer.classes) if k != settings.background_label_id]
    chosen = site.node(
        "NonMaxSuppression",
        boxes,
        scores,
        site.integers([count], "most"),
        site.constant([settings.nms_param.nms_threshold]),
        site.constant([layer.least]),
    )  # (D, 3) = image, class, box
    parts = [site.between(what) for what in ("image", "class", "place")]
    site.node("Split", chosen, site.integers([1, 1, 1], "sizes"), out=parts, axis=1)
    image, label, place = parts
    score = site.node("GatherND", scores, chosen)
    box = site.node("GatherND", boxes, site.node("Concat", image, place, axis=1))
    rows = site.node(
        "Concat",
        site.node("Cast", image, to=1),
        site.node("Gather", site.constant(labels), label),
        site.node("Unsqueeze", score, site.integers([1], "axes")),
        box,
        axis=1,
    )
    if settings.keep_top_k > -1:
        rows = _best(site, rows, score, settings.keep_top_k)
    rows = site.node("Concat", rows, _nothing(site, rows, scores), axis=0)
    site.finish("Unsqueeze", rows, site.integers([0, 1], "axes"))
    site.graph.shapes[site.tops[0]] = (1, 1, f"{site.tops[0]}_found", COLUMNS)


def _boxes(site: Site) -> str:
    """The boxes (N, P, 4) of locations and priors."""
    n, count, _ = site.layer.view
    code = site.layer.code
    locations = site.reshape(site.bottoms[0], (n, count, 4))
    whole = site.reshape(site.bottoms[2], (2, count, 4))
    prior, variance = (site.between(what) for what in ("prior", "variance"))
    site.node("Split", whole, site.integers([1, 1], "sizes"), out=[prior, variance], axis=0)
    if code.scaled:
        locations = site.node("Mul", locations, variance)
    if code.kind == PriorBoxParameter.CORNER:
        return site.node("Add", prior, locations)
    low, high = _halves(site, prior)
    size = site.node("Sub", high, low)
    if code.kind == PriorBoxParameter.CORNER_SIZE:
        sizes = site.node("Concat", size, size, axis=2)
        return site.node("Add", prior, site.node("Mul", locations, sizes))
    half = site.constant(0.5)
    shift, grow = _halves(site, locations)
    middle = site.node("Mul", site.node("Add", low, high), half)
    centre = site.node("Add", middle, site.node("Mul", shift, size))
    reach = site.node("Mul", site.node("Mul", size, site.node("Exp", grow)), half)
    ends = (site.node(op, centre, reach) for op in ("Sub", "Add"))
    return site.node("Concat", *ends, axis=2)


def _halves(site: Site, boxes: str) -> tuple[str, str]:
    """The first two and the last two numbers of boxes (N, P, 4)."""
    parts = site.between("first"), site.between("second")
    site.node("Split", boxes, site.integers([2, 2], "sizes"), out=parts, axis=2)
    return parts


def _scores(site: Site) -> str:
    """The scores (N, K, P) of all classes but the background, those beyond top_k the lowest."""
    layer, settings = site.layer, site.layer.settings
    n, count, _ = layer.view
    scores = site.reshape(site.bottoms[1], (n, count, layer.classes))
    scores = site.node("Transpose", scores, perm=[0, 2, 1])
    labels = [k for k in range(layer.classes) if k != settings.background_label_id]
    if len(labels) < layer.classes:
        scores = site.node("Gather", scores, site.integers(labels, "labels"), axis=1)
    most = layer.found.shape[2]
    if most == count:
        return scores
    best = [site.between("best"), site.between("places")]
    site.node("TopK", scores, site.integers([most], "most"), out=best, axis=2)
    ends = (site.integers(v, w) for v, w in (([-1], "start"), ([2**31], "end"), ([2], "axes")))
    least = site.node("Slice", best[0], *ends)  # (N, K, 1)
    far = site.node("Less", scores, least)
    return site.node("Where", far, site.constant(np.finfo(np.float32).min), scores)


def _best(site: Site, rows: str, score: str, most: int) -> str:
    """The rows of the largest scores, in their order."""
    found = site.node("Shape", score)
    count = site.node("Min", found, site.integers([most], "most"))
    best = [site.between("best"), site.between("places")]
    site.node("TopK", score, count, out=best, axis=0)
    places = [site.between("sorted"), site.between("order")]
    site.node("TopK", best[1], count, out=places, axis=0, largest=0)
    return site.node("Gather", rows, places[0], axis=0)


def _nothing(site: Site, rows: str, scores: str) -> str:
    """A row of image, -1, -1, ... for each image of the scores if there are no rows, else none."""
    start, end, axis = (
        site.integers([k], what) for k, what in ((0, "start"), (1, "end"), (0, "axes"))
    )
    count, images = (
        site.node("Slice", site.node("Shape", x), start, end, axis) for x in (rows, scores)
    )
    bounds = site.constant(0, np.int64), site.node("Squeeze", images), site.constant(1, np.int64)
    numbers = site.node("Cast", site.node("Range", *bounds), to=1)
    numbers = site.node("Unsqueeze", numbers, end)
    size = site.node("Concat", images, site.integers([COLUMNS - 1], "columns"), axis=0)
    others = site.node("Expand", site.constant(-1), size)
    value = site.node("Concat", numbers, others, axis=1)
    is_empty = site.node("Cast", site.node("Equal", count, start), to=7)
    return site.node("Slice", value, start, site.node("Mul", is_empty, images), axis)
