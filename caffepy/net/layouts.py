"""Layout of each blob of a net on a GPU, and where a layer needs a cast.

Layers follow their bottoms: an activation in the preferred layout stays in it as long as layers
take it. Layers that gain most, convolutions and matrix products, ask for it. Labels, losses and
whatever else is not an activation stay plain.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from caffepy.device.blob import PLAIN, Blob, Layout
from caffepy.layer import Layer
from caffepy.net.node import Node
from caffepy.proto.nvcaffe import keeps_float32


class Plan(NamedTuple):
    """Layout of each top, by layer, and that in which each layer takes its bottoms."""

    tops: list[list[Layout]]
    bottoms: list[list[Layout]]


def set_layouts(nodes: Sequence[Node], preferred: Layout) -> None:
    """Put activations into the preferred layout; give layers that do not take it casts."""
    layouts = plan(nodes, preferred)
    for node, top_layouts in zip(nodes, layouts.tops, strict=True):
        for blob, layout in zip(node.tops, top_layouts, strict=True):
            # a view shares the memory of its bottom's cast from reshape on
            sharing = [b for b in node.bottoms if b.data_memory is blob.data_memory]
            if layout != PLAIN and all(b.layout == layout for b in sharing):
                blob.set_layout(layout)
    for node, bottom_layouts in zip(nodes, layouts.bottoms, strict=True):
        node.cast(bottom_layouts)


def plan(nodes: Sequence[Node], preferred: Layout) -> Plan:
    """Return the layouts of a net whose blobs have their shapes already."""
    of: dict[int, Layout] = {}  # by id of the blob
    taken: list[list[Layout]] = []
    readers: dict[int, list[Layout]] = {}
    losses = {id(t) for node in nodes if any(node.layer.loss_weights) for t in node.tops}
    for node in nodes:
        layer, ins, outs = node.layer, node.bottoms, node.tops
        coming = [of[id(b)] for b in ins]
        seeks = layer.seeks_preferred_layout or layer.is_data or any(f != PLAIN for f in coming)
        base = preferred if seeks else PLAIN
        if keeps_float32(layer.param) or any(id(t) in losses for t in outs):
            # a scaled loss weight may be large
            base = base._replace(dtype=PLAIN.dtype)
        wanted = layer.layout_for(base)
        taken.append([_as_taken(layer, b, of[id(b)], wanted) for b in ins])
        if not layer.reads_shapes_only:
            for b, layout in zip(ins, taken[-1], strict=True):
                readers.setdefault(id(b), []).append(layout)
        going = Layout(base.dtype, base.channels_last and wanted.channels_last)
        going = PLAIN if wanted == PLAIN or layer.plain_tops else going
        for t in outs:
            if layer.is_data and len(t.shape) < 3:
                of[id(t)] = PLAIN
            elif not any(t is b for b in ins):  # in place nothing changes
                of[id(t)] = fit(going, t)
    for node, layouts in reversed([*zip(nodes, taken, strict=True)]):
        layer, ins, outs = node.layer, node.bottoms, node.tops
        if layer.is_view and _is_plain_to(readers, outs):
            readers[id(ins[0])].remove(layouts[0])
            readers[id(ins[0])].append(PLAIN)
            layouts[0] = of[id(outs[0])] = PLAIN
        elif layer.is_matrix_product and _is_plain_to(readers, outs):
            of[id(outs[0])] = PLAIN
    for node, layouts in zip(nodes, taken, strict=True):
        if node.layer.reads_shapes_only:
            layouts[:] = [of[id(b)] for b in node.bottoms]
    return Plan([[of[id(t)] for t in node.tops] for node in nodes], taken)


def fit(layout: Layout, blob: Blob) -> Layout:
    """Return the layout for a blob of this shape: up to two axes have one order only."""
    return Layout(layout.dtype, layout.channels_last and len(blob.shape) > 2)


def _as_taken(layer: Layer, blob: Blob, lies: Layout, wanted: Layout) -> Layout:
    """Return the layout in which a layer takes a bottom: `wanted`, but the one in which it lies if
    a matrix product reads it and it has one position or one channel, so that both are the same.
    """
    one_order = prod(blob.shape[2:]) == 1 or blob.shape[1:2] == (1,)
    as_is = layer.is_matrix_product and wanted.dtype == lies.dtype and one_order
    return lies if as_is else fit(wanted, blob)


def _is_plain_to(readers: dict[int, list[Layout]], tops: Sequence[Blob]) -> bool:
    """True if all readers take these tops plain: products of 16-bit numbers then write float32."""
    return all(layout == PLAIN for t in tops for layout in readers.get(id(t), []))
