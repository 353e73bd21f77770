"""Positions of a run's data layers and random numbers, which the sidecar keeps for a resumed run.

The train net comes first among the nets; a resumed run may have other test nets.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from caffepy.device.device import Device
from caffepy.layer import Layer
from caffepy.net import Net

log = logging.getLogger(__name__)


def take_positions(nets: Sequence[Net], device: Device) -> dict[str, Any]:
    """Return the states of all layers, of the random numbers and of the step counter."""
    return _positions([net.state() for net in nets], device)


def data_layers(net: Net) -> dict[str, Layer]:
    """Return the data layers of a net, by the names of their states."""
    return {name: node.layer for name, node in net.own_nodes.items() if node.layer.is_data}


def take_data_positions(feeds: Sequence[dict[str, Layer]], device: Device) -> dict[str, Any]:
    """Return the same of `data_layers` alone: other layers' states are in the memory of a GPU."""
    return _positions([{k: layer.state() for k, layer in feed.items()} for feed in feeds], device)


def _positions(states: Sequence[dict[str, Any]], device: Device) -> dict[str, Any]:
    train, *tests = states
    random, tick = device.random.state, device.step_count
    return {"net": train, "test_nets": tests, "rng": random, "tick": tick}


def completed(positions: dict[str, Any], nets: Sequence[Net]) -> dict[str, Any]:
    """Return these positions with the current states of the layers that they lack."""
    train, *tests = ({**net.state(), **known} for net, known in _nets_and_states(positions, nets))
    return {**positions, "net": train, "test_nets": tests}


def set_positions(positions: dict[str, Any], nets: Sequence[Net], device: Device) -> None:
    """Continue from these positions."""
    for net, state in _nets_and_states(positions, nets):
        net.set_state(state)
    device.random.state = positions["rng"]
    device.step_count = positions.get("tick", 0)


def compare_layers(positions: dict[str, Any], nets: Sequence[Net], path: str) -> None:
    """Warn of layers that only the positions in the file `path`, or only the nets, have."""
    for net, state in _nets_and_states(positions, nets):
        own, known = net.state().keys(), state.keys()
        warn_of_layers(f"{path} has no position of", own - known, "they start anew")
        there = f"{path} has a position of"
        warn_of_layers(there, known - own, "which this net does not have")


def warn_of_layers(what: str, names: Iterable[str], consequence: str) -> None:
    """Log one warning that names the layers, if there are any."""
    if names := sorted(names):
        log.warning("%s %s: %s", what, ", ".join(f'"{name}"' for name in names), consequence)


def _nets_and_states(
    positions: dict[str, Any], nets: Sequence[Net]
) -> list[tuple[Net, dict[str, Any]]]:
    return list(zip(nets, (positions["net"], *positions["test_nets"]), strict=False))
