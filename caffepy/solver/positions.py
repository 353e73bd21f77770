"""Where a run's data layers and random numbers stand: what the sidecar keeps and a resumed run
takes up again.

The train net comes first among the nets; a run may have other test nets than the one before it.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from caffepy.device.device import Device
from caffepy.layer import Layer
from caffepy.net import Net

log = logging.getLogger(__name__)


def take_positions(nets: Sequence[Net], device: Device) -> dict[str, Any]:
    """Where all layers, the random numbers and the count of passes stand now."""
    train, *tests = (net.state() for net in nets)
    return {"net": train, "test_nets": tests, **_random(device)}


def data_layers(net: Net) -> dict[str, Layer]:
    """The layers that feed a net, by the names of their states."""
    return {f"{i}/{node.name}": node.layer for i, node in net.own_nodes if node.layer.is_data}


def take_data_positions(feeds: Sequence[dict[str, Layer]], device: Device) -> dict[str, Any]:
    """Likewise of the `data_layers` of each net alone: for the states of others, a GPU would have
    to be asked.
    """
    train, *tests = ({key: layer.state() for key, layer in feed.items()} for feed in feeds)
    return {"net": train, "test_nets": tests, **_random(device)}


def _random(device: Device) -> dict[str, Any]:
    return {"rng": device.random.state, "tick": device.step_count}


def completed(positions: dict[str, Any], nets: Sequence[Net]) -> dict[str, Any]:
    """Positions with the states of all layers: those that they lack as they are now."""
    train, *tests = ({**net.state(), **known} for net, known in _nets_and_states(positions, nets))
    return {**positions, "net": train, "test_nets": tests}


def set_positions(positions: dict[str, Any], nets: Sequence[Net], device: Device) -> None:
    """Go on from there."""
    for net, state in _nets_and_states(positions, nets):
        net.set_state(state)
    device.random.state = positions["rng"]
    device.step_count = positions.get("tick", 0)


def compare_layers(positions: dict[str, Any], nets: Sequence[Net], path: str) -> None:
    """Warn of layers that the positions saved in the file `path` or the nets do not know."""
    for net, state in _nets_and_states(positions, nets):
        own = net.state().keys()
        warn_of_layers(
            f"{path} does not say where to go on with", own - state.keys(), "they start anew"
        )
        warn_of_layers(
            f"{path} says where to go on with", state.keys() - own, "which this net does not have"
        )


def warn_of_layers(what: str, names: Iterable[str], consequence: str) -> None:
    """One warning that names the layers, if there are any."""
    if names := sorted(names):
        log.warning("%s %s: %s", what, ", ".join(f'"{name}"' for name in names), consequence)


def _nets_and_states(
    positions: dict[str, Any], nets: Sequence[Net]
) -> list[tuple[Net, dict[str, Any]]]:
    return list(zip(nets, (positions["net"], *positions["test_nets"]), strict=False))
