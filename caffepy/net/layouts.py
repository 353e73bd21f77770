"""In which layout each blob of a net lies on a GPU, and where it must be converted.

Layers follow their bottoms: what comes in the preferred layout goes on in it as long as layers take
it. Those that gain most, the convolutions and products, ask for it. Labels, losses and whatever
else is not an activation stay plain.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from caffepy.device.blob import PLAIN, Blob, Layout
from caffepy.layer import Layer
from caffepy.proto.nvcaffe import keeps_float32

Convert = Callable[[Any, Any], None]
"""ops.convert: copies an array into one of another layout."""


class Plan(NamedTuple):
    """`tops`: the layout of each top, by layer and place. `bottoms`: that in which each layer takes
    its bottoms.
    """

    tops: list[list[Layout]]
    bottoms: list[list[Layout]]


def plan(
    layers: Sequence[Layer],
    bottoms: Sequence[Sequence[Blob]],
    tops: Sequence[Sequence[Blob]],
    preferred: Layout,
) -> Plan:
    """The layouts of a net whose layers are wired by these blobs, each of which has its shape
    already.
    """
    of: dict[int, Layout] = {}  # by id of the blob
    taken: list[list[Layout]] = []
    readers: dict[int, list[Layout]] = {}
    losses = {
        id(t)
        for layer, outs in zip(layers, tops, strict=True)
        if any(layer.loss_weights)
        for t in outs
    }
    for layer, ins, outs in zip(layers, bottoms, tops, strict=True):
        coming = [of[id(b)] for b in ins]
        base = (
            preferred
            if layer.seeks_preferred_layout or layer.is_data or any(f != PLAIN for f in coming)
            else PLAIN
        )
        if keeps_float32(layer.param) or any(
            id(t) in losses for t in outs
        ):  # a scaled loss weight may be large
            base = base._replace(dtype=PLAIN.dtype)
        wanted = layer.layout_for(base)
        taken.append([_as_taken(layer, b, of[id(b)], wanted) for b in ins])
        for b, layout in zip(ins, taken[-1], strict=True):
            readers.setdefault(id(b), []).append(layout)
        going = (
            PLAIN
            if wanted == PLAIN
            else Layout(base.dtype, base.channels_last and wanted.channels_last)
        )
        for t in outs:
            if layer.is_data and len(t.shape) < 3:
                of[id(t)] = PLAIN
            elif not any(t is b for b in ins):  # in place nothing changes
                of[id(t)] = fit(going, t)
    for layer, ins, outs, layouts in reversed([*zip(layers, bottoms, tops, taken, strict=True)]):
        if layer.is_view and _is_plain_to(readers, outs):
            readers[id(ins[0])].remove(layouts[0])
            readers[id(ins[0])].append(PLAIN)
            layouts[0] = of[id(outs[0])] = PLAIN
        elif layer.is_matrix_product and _is_plain_to(readers, outs):
            of[id(outs[0])] = PLAIN
    return Plan([[of[id(t)] for t in outs] for outs in tops], taken)


def fit(layout: Layout, blob: Blob) -> Layout:
    """The layout for a blob of this shape: up to two axes have one order only."""
    return Layout(layout.dtype, layout.channels_last and len(blob.shape) > 2)


def _as_taken(layer: Layer, blob: Blob, lies: Layout, wanted: Layout) -> Layout:
    """How a layer takes a bottom; one position or one channel has one order, and a product's bottom
    keeps its size.
    """
    if (
        layer.is_matrix_product
        and wanted.dtype == lies.dtype
        and (prod(blob.shape[2:]) == 1 or blob.shape[1:2] == (1,))
    ):
        return lies
    return fit(wanted, blob)


def _is_plain_to(readers: dict[int, list[Layout]], tops: Sequence[Blob]) -> bool:
    """Whether nobody takes a layer's tops otherwise, as before a loss: products of 16-bit numbers
    are float32 there.
    """
    return all(layout == PLAIN for t in tops for layout in readers.get(id(t), []))


class LayoutCasts:
    """What one layer takes in another layout than the blobs have: copies in its own, made around
    its passes.
    """

    def __init__(
        self, bottoms: Sequence[Blob], tops: Sequence[Blob], layouts: Sequence[Layout]
    ) -> None:
        self._of: dict[int, tuple[Blob, Blob]] = {}  # id of the blob -> the blob and its twin
        for blob, layout in zip(bottoms, layouts, strict=True):
            if blob.layout != layout and id(blob) not in self._of:
                twin = Blob(blob.shape, blob.dtype, blob.gpu)
                twin.set_layout(layout)
                self._of[id(blob)] = blob, twin
        self.bottoms = [self._seen(b) for b in bottoms]
        self.tops = [self._seen(t) for t in tops]
        self._in_place = [self._of[id(t)] for t in tops if id(t) in self._of]

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Blob]:
        return (twin for _, twin in self._of.values())

    def _seen(self, blob: Blob) -> Blob:
        return self._of[id(blob)][1] if id(blob) in self._of else blob

    def reshape(self) -> None:
        """Give the copies the shapes of the blobs."""
        for blob, twin in self._of.values():
            twin.reshape_like(blob)

    def before_forward(self, convert: Convert) -> None:
        """Copy what the layer reads."""
        for blob, twin in self._of.values():
            convert(blob.data, twin.data)

    def after_forward(self, convert: Convert) -> None:
        """Copy back what it wrote in place."""
        for blob, twin in self._in_place:
            blob.reshape_like(twin)
            convert(twin.data, blob.data)

    def before_backward(self, convert: Convert) -> None:
        """Copy the gradients of the tops in place."""
        for blob, twin in self._in_place:
            convert(blob.diff, twin.diff)

    def after_backward(
        self, convert: Convert, bottoms: Sequence[Blob], propagate_down: Sequence[bool]
    ) -> None:
        """Copy the gradients that it wrote."""
        for blob, down in zip(bottoms, propagate_down, strict=True):
            if down and id(blob) in self._of:
                convert(self._of[id(blob)][1].diff, blob.diff)
