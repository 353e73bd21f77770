"""Nets without their data: the shapes of images and labels that they do not state are guessed."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import lcm, prod
from time import monotonic

from caffepy.core.errors import ConfigError
from caffepy.device.blob import MAX_COUNT
from caffepy.models.synthetic import Guess, synthetic
from caffepy.net import Net
from caffepy.net.build import filter_state
from caffepy.proto.caffe_pb2 import NetParameter

_SHAPES = [(3, side, side) for side in (224, 299, 321, 384, 473)]
_SHAPES += [(3, 360, 480), (3, 416, 416), (3, 32, 32), (1, 28, 28), (2, 28, 28)]
_SHAPES += [(3, 32, 128), (1, 32, 100)]
GUESSES = [Guess(shape, other) for shape in _SHAPES for other in (False, True)]
"""Shapes of images and labels that are tried where a net states none: first those of ImageNet."""

PATIENCE = 5.0
"""Seconds for which guesses are tried."""

_COMPARE = frozenset(
    {"EuclideanLoss", "HingeLoss", "L1Loss", "SigmoidCrossEntropyLoss", "SmoothL1Loss"}
)
"""Layers whose labels have the shape of their predictions; of SoftmaxWithLoss without classes."""
_KEEP_SHAPE = frozenset({"AbsVal", "Exp", "Log", "Power", "Scale", "Sigmoid", "Threshold"})
"""Layers that labels may pass on their way."""


def build_without_data(
    param: NetParameter,
    image: Sequence[int] | None,
    build: Callable[[NetParameter], Net],
    origin: str | None,
) -> Net:
    """Build the net of the file `origin` without its data, with images of the shape `image` (C, H,
    W) if that is given.

    What it does not state of images and labels is the first of GUESSES with which it can be built;
    if there is none, the ConfigError of all tries that stands farthest down the file is raised.
    """
    tried: list[NetParameter] = []
    errors: list[ConfigError] = []
    begun = monotonic()
    for guess in GUESSES:
        try:
            if (made := synthetic(param, image=image, guess=guess, origin=origin)) in tried:
                continue
        except ConfigError as error:
            errors.append(error)
            continue
        tried.append(made)
        try:
            return build(made)
        except ConfigError as error:
            errors.append(error)
        for fit in (_with_fitting_labels, partial(_with_fitting_items, until=begun + PATIENCE)):
            try:
                if (fitted := fit(made, build)) is not None:
                    return build(fitted)
            except ConfigError as error:  # these shapes are not all that is wrong
                errors.append(error)
        if monotonic() - begun > PATIENCE:
            break
    raise max(errors, key=_line)


def _line(error: ConfigError) -> int:
    """Return the line of a file in which an error stands, 0 if it names none."""
    found = re.search(r":(\d+):\d+\b", error.where or "")
    return int(found[1]) if found else 0


def _with_fitting_labels(
    param: NetParameter, build: Callable[[NetParameter], Net]
) -> NetParameter | None:
    """Return a net without data whose labels have the shapes of the predictions that losses compare
    them with, by the net before these losses; None if there are none, or they have these shapes.
    """
    state = filter_state(param)
    compared = list(_compared_labels(state))
    if not compared:
        return None
    with closing(build(_before(state, {label for *_, label in compared}))) as net:
        shapes = {name: list(blob.shape) for name, blob in net.blobs.items()}
    fitting = {}
    for kind, x, label in compared:
        if shape := shapes.get(x):
            fitting[label] = shape if kind in _COMPARE else [*shape[:1], 1, *shape[2:]]
    fitted = NetParameter()
    fitted.CopyFrom(param)
    for layer in fitted.layer:
        for top, given in zip(layer.top, layer.dummy_data_param.shape, strict=False):
            if (dims := fitting.get(top)) and prod(dims) != prod(given.dim):
                given.dim[:] = dims
    return fitted if fitted != param else None


def _with_fitting_items(
    param: NetParameter, build: Callable[[NetParameter], Net], until: float
) -> NetParameter | None:
    """Return a net without data with so many times more items in what reaches each Reshape that
    they fill its dims, as one that joins the frames of a video states them, and in what reaches a
    loss that there are as many predictions as labels; None if all fit, or if it takes until then.
    """
    fitted, before = param, NetParameter()
    state = filter_state(param)
    before.CopyFrom(state)
    del before.layer[:]
    for layer in state.layer:
        if monotonic() > until:
            return None
        dims = list(layer.reshape_param.shape.dim)
        whole = not layer.reshape_param.axis and layer.reshape_param.num_axes == -1
        more = {}
        if layer.type == "Reshape" and len(layer.bottom) == 1 and dims and whole:
            for shape in _shapes(before, layer.bottom, build):
                more[layer.bottom[0]] = _times_to_fill(shape, dims)
        elif layer.type.endswith("Loss") and len(layer.bottom) > 1:
            sizes = [prod(s[:1]) for s in _shapes(before, layer.bottom[:2], build)]
            for blob, size, other in zip(layer.bottom, sizes, reversed(sizes), strict=False):
                more[blob] = 1 if other % max(size, 1) else other // max(size, 1)
        for blob, times in more.items():
            if times > 1:
                sources = _sources(before, blob)
                before, fitted = (_with_more(net, sources, times) for net in (before, fitted))
        before.layer.add().CopyFrom(layer)
    return fitted if fitted is not param else None


def _shapes(
    net: NetParameter, blobs: Sequence[str], build: Callable[[NetParameter], Net]
) -> list[tuple[int, ...]]:
    """Return the shapes of these blobs of a net, of none if one is not there."""
    with closing(build(net)) as built:
        found = built.blobs
        return [found[blob].shape for blob in blobs if all(b in found for b in blobs)]


def _times_to_fill(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Return how many times the elements of a shape fill the dims of a Reshape, 1 if none does."""
    if dims[0] == 0:
        return 1
    stated = [shape[i] if d == 0 and i < len(shape) else d for i, d in enumerate(dims)]
    wanted, count = prod(map(abs, stated)), max(prod(shape), 1)
    filled = lcm(count, wanted)
    fits = (-1 in dims or filled == wanted) and filled <= MAX_COUNT
    return filled // count if fits else 1


def _sources(net: NetParameter, blob: str) -> set[str]:
    """Return the blobs that a blob is computed from."""
    found = {blob}
    for layer in reversed(net.layer):
        if found.intersection(layer.top):
            found.update(layer.bottom)
    return found


def _with_more(net: NetParameter, tops: Collection[str], times: int) -> NetParameter:
    """Return a net whose made-up data of these names have that many times more items."""
    larger = NetParameter()
    larger.CopyFrom(net)
    for layer in larger.layer:
        for top, shape in zip(layer.top, layer.dummy_data_param.shape, strict=False):
            if top in tops:
                shape.dim[0] *= times
    return larger


def _compared_labels(net: NetParameter) -> Iterator[tuple[str, str, str]]:
    """Yield for each loss that reads data its type, what it predicts, and the top of data that it
    compares this with.
    """
    source = {top: top for layer in net.layer if layer.type == "DummyData" for top in layer.top}
    for layer in net.layer:
        if layer.type in _KEEP_SHAPE:
            for x, y in zip(layer.bottom[:1], layer.top, strict=False):
                if x in source:
                    source[y] = source[x]
        elif layer.type in {*_COMPARE, "SoftmaxWithLoss"} and len(layer.bottom) > 1:
            x, label = layer.bottom[:2]
            if x in source and layer.type in _COMPARE:
                x, label = label, x
            if label in source:
                yield layer.type, x, source[label]


def _before(net: NetParameter, blobs: Collection[str]) -> NetParameter:
    """Return the net without the layers that read these blobs, or what such layers make."""
    behind, before = set(blobs), NetParameter()
    before.CopyFrom(net)
    del before.layer[:]
    for layer in net.layer:
        if behind.intersection(layer.bottom):
            behind.update(layer.top)
        else:
            before.layer.add().CopyFrom(layer)
    return before
