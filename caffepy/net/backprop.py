"""Which layers run backward: those under a loss, unless nothing below them wants a gradient."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caffepy.net.net import Net

log = logging.getLogger(__name__)


def prune_backward(net: "Net") -> None:
    """Walk from the last layer and clear the backward flags of layers and bottoms that no loss or
    nobody asks for.
    """
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for i in reversed(range(len(net.layers))):
        names, bottoms = net.top_names[i], net.bottom_names[i]
        contributes = any(
            weight or name in under_loss
            for name, weight in zip(names, net.layers[i].loss_weights, strict=True)
        )
        if not contributes or skipped.issuperset(names):
            net.layer_need_backward[i] = False
            net.bottom_need_backward[i] = [False] * len(bottoms)
        for j, name in enumerate(bottoms):
            if contributes:
                under_loss.add(name)
            if not net.bottom_need_backward[i][j]:
                skipped.add(name)
        needs = "needs" if net.layer_need_backward[i] else "does not need"
        log.info("%s %s backward computation.", net.layer_names[i], needs)
    if net.param.force_backward:
        force_backward(net)


def force_backward(net: "Net") -> None:
    """Every layer runs backward, to every bottom that allows it, and every parameter gets its
    gradient.
    """
    for i, layer in enumerate(net.layers):
        net.layer_need_backward[i] = True
        need = net.bottom_need_backward[i]
        net.bottom_need_backward[i] = [
            n or layer.allow_force_backward(j) for j, n in enumerate(need)
        ]
        layer.param_propagate_down = [True] * len(layer.blobs)
