"""Layers in place that would destroy what the backward pass of an earlier layer reads.

The top of such a layer gets separate memory, as if the definition gave it another name; the name
then means the new blob. Nothing else of a net changes.
"""

import logging
from collections.abc import Sequence

from caffepy.device.blob import Blob, Memory
from caffepy.layer.base import Kept
from caffepy.layer.neuron import SameShape
from caffepy.layer.python import Python
from caffepy.net.node import Node

log = logging.getLogger(__name__)


def separate_tops(nodes: Sequence[Node], blobs: dict[str, Blob]) -> None:
    """Replace these tops in the nodes and in `blobs`, and reshape the layers from there on.

    A Python layer may write parts of its top only: it goes on working in place, on a copy.
    """
    changed = False
    for j, node in enumerate(nodes):
        if changed:  # views share the memory of their bottoms from reshape on
            node.cast([b.layout for b in node.bottoms])
        for name, top in zip(node.top_names, node.tops, strict=True):
            if not any(top is b for b in node.bottoms) or node.layer.in_place_keeps == Kept.ALL:
                continue
            if reader := _other_reader(nodes[j + 1 :], top):
                if reader.need_backward:
                    log.warning(
                        "%s reads under another name what %s wrote in place, as in Caffe, but its "
                        "gradient does not go through %s; give its top another name",
                        *(reader.name, node.name, node.name),
                    )
                continue
            if not _destroys(nodes, j, top):
                continue
            blobs[name] = own = Blob(top.shape, top.dtype, top.gpu)
            if isinstance(node.layer, Python):
                node.copied[id(top)] = own
            node.tops = _replaced(node.tops, top, own)
            for later in nodes[j + 1 :]:
                later.bottoms = _replaced(later.bottoms, top, own)
                later.tops = _replaced(later.tops, top, own)
            node.cast([b.layout for b in node.bottoms])
            changed = True


def _replaced(blobs: Sequence[Blob], old: Blob, new: Blob) -> list[Blob]:
    return [new if blob is old else blob for blob in blobs]


def _other_reader(nodes: Sequence[Node], top: Blob) -> Node | None:
    """Return the first of these layers that reads the top's memory, but neither the top nor a view
    of it.
    """
    written = [top]
    for node in nodes:
        for bottom in node.bottoms:
            if bottom.data_memory is top.data_memory and not any(bottom is b for b in written):
                return node
        written += [t for t in node.tops if t.data_memory is top.data_memory]
    return None


def _destroys(nodes: Sequence[Node], index: int, top: Blob) -> bool:
    """True if layer `index`, in place, overwrites a parameter, or what an earlier layer's backward
    reads.
    """
    memory, keeps = top.data_memory, nodes[index].layer.in_place_keeps
    alone = True  # all gradients of the memory come through the layer
    for node in reversed(nodes[:index]):
        holding = sum(t.data_memory is memory for t in node.tops)
        needs = node.layer.backward_needs if alone and holding else Kept.ALL
        if keeps < needs and _reads(node, memory):
            return True
        alone = alone and holding < 2
    return False


def _reads(node: Node, memory: Memory) -> bool:
    """True if backward reads the memory, or it is that of a parameter."""
    layer = node.layer
    if any(blob.data_memory is memory for blob in layer.blobs):
        return True
    learns = any(node.propagate_down) or any(layer.param_propagate_down)
    read = list(node.tops) if layer.backward_reads_top else []
    if layer.backward_reads_bottom:
        copies = isinstance(layer, SameShape) and layer.copies
        read += node.bottoms[1:] if copies else node.bottoms
    return node.need_backward and learns and any(blob.data_memory is memory for blob in read)
