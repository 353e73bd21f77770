"""Backward flags: layers under a loss run backward, unless nothing below them needs a gradient."""

import logging
from collections.abc import Sequence

from caffepy.net.node import Node

log = logging.getLogger(__name__)


def prune_backward(nodes: Sequence[Node]) -> None:
    """Walk from the last layer and clear the backward flags of layers that no loss depends on, and
    of bottoms whose gradient nobody needs.
    """
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for node in reversed(nodes):
        contributes = any(
            weight or name in under_loss
            for name, weight in zip(node.top_names, node.layer.loss_weights, strict=True)
        )
        if not contributes or skipped.issuperset(node.top_names):
            node.need_backward = False
            node.propagate_down = [False] * len(node.bottoms)
        for name, down in zip(node.bottom_names, node.propagate_down, strict=True):
            if contributes:
                under_loss.add(name)
            if not down:
                skipped.add(name)
        needs = "needs" if node.need_backward else "does not need"
        log.info("%s %s backward computation.", node.name, needs)


def force_backward(nodes: Sequence[Node]) -> None:
    """Run every layer backward, to every bottom that allows it, with the gradient of every
    parameter.
    """
    for node in nodes:
        node.need_backward = True
        node.propagate_down = [
            down or node.layer.allow_force_backward(j) for j, down in enumerate(node.propagate_down)
        ]
        node.layer.param_propagate_down = [True] * len(node.layer.blobs)
