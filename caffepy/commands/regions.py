"""Detections of nets that propose regions: Faster R-CNN (Ren et al. 2015), R-FCN."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from caffepy import ops
from caffepy.data.datum import resized
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.layer.rpn import moved
from caffepy.proto.caffe_pb2 import LayerParameter
from caffepy.pycaffe.classifier import ImageNet

SCORES, DELTAS = "cls_prob", "bbox_pred"
"""Blobs (R, K) and (R, 4K), or (R, 8) for all classes alike, of R regions."""

SIDES = 600, 1000
"""Least of the shorter and most of the longer side that the net sees, in pixels."""

OVERLAP, MOST = 0.3, 100
"""Overlap with a better box of its class above which a box is left out, and most boxes of an image.
"""


def proposers(layers: Iterable[LayerParameter]) -> list[LayerParameter]:
    """Return the layer that proposes the regions whose scores and deltas the net gives, if it gives
    these.
    """
    layers = list(layers)
    if not {SCORES, DELTAS} <= {top for layer in layers for top in layer.top}:
        return []
    return [
        layer
        for layer in layers
        if layer.type in ("Proposal", "FrcnnProposal")
        or layer.python_param.layer == "ProposalLayer"
    ]


def find_in_regions(
    net: ImageNet, rois: str, sides: Sequence[int], threshold: float, images: Sequence[Array]
) -> Iterator[Array]:
    """Yield for each image (H, W, K) what is found in it, (D, 6) = class, score, xmin, ymin, xmax,
    ymax in pixels.

    The net sees an image with its shorter side of sides[0] pixels, if the longer one has sides[1]
    at most, and a second input (1, 3) = height and width of that, scale. `rois` is the blob of
    the regions. Scores of a class are `threshold` or more.
    """
    name, info = net.inputs
    for image in images:
        height, width, _ = image.shape
        scale = min(sides[0] / min(height, width), sides[1] / max(height, width))
        size = max(1, round(width * scale)), max(1, round(height * scale))
        shape = (1, net.blobs[name].shape[1], size[1], size[0])
        seen = resized(image, *size).reshape(size[1], size[0], -1)
        net.transformer.inputs = {name: shape}
        net.blobs[name].reshape(*shape)
        net.reshape()
        net.blobs[name].data[0] = net.transformer.preprocess(name, seen)
        given = size[1], size[0], scale, scale
        row = net.blobs[info].data.reshape(-1)
        row[...] = given[: len(row)]
        net.forward()
        regions = net.blobs[rois].data.reshape(-1, 5)[:, 1:] / np.float32(scale)
        scores = net.blobs[SCORES].data.reshape(len(regions), -1)
        deltas = net.blobs[DELTAS].data.reshape(len(regions), -1, 4)
        most = np.array([width - 1, height - 1] * 2, np.float32)
        yield _best(regions, scores, deltas, most, threshold)


def _best(regions: Array, scores: Array, deltas: Array, most: Array, threshold: float) -> Array:
    """Return the rows (D, 6) of an image, cut to 0 to `most`; the first class is the background."""
    host = ops.backend(Device())
    found: list[Array] = [np.zeros((0, 6))]
    for label in range(1, scores.shape[1]):
        places = np.flatnonzero(scores[:, label] >= np.float32(threshold))
        places = places[np.argsort(-scores[places, label], kind="stable")]
        own = deltas[places, label if deltas.shape[1] == scores.shape[1] else -1]
        boxes = np.clip(moved(regions[places], own), 0, most).astype(np.float32)
        kept, counts = np.empty((1, MOST), np.int32), np.empty(1, np.int32)
        host.suppress_overlaps(boxes[None], OVERLAP, 1.0, kept, counts)
        best = kept[0, : counts[0]]
        heads = np.full(len(best), label), scores[places[best], label]
        found.append(np.column_stack([*heads, boxes[best]]))
    rows = np.concatenate(found)
    return rows[np.argsort(-rows[:, 1], kind="stable")[:MOST]]
