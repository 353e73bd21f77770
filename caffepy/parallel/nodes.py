"""Messages of the nodes of a run beside gradients: what they were given, where they start,
where their data layers and random numbers stand, and BatchNorm's statistics.

Data layers stand at the same batch on all nodes between iterations, since each node skips what the
others take.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import PIECE
from caffepy.collectives.world import World
from caffepy.core.errors import ConfigError, DataError, DeviceError
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.device.gpus import nccl_version
from caffepy.layer import Layer
from caffepy.net import Net
from caffepy.proto.text import where
from caffepy.solver import Solver
from caffepy.solver.positions import set_positions, take_positions

Positions = dict[str, Any]


def check_alike(world: World, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names the odd node, unless all nodes have these settings."""
    from importlib.metadata import PackageNotFoundError, version  # here, since it takes 20 ms

    caffepy = "unknown"  # as where it is run from a clone
    with suppress(PackageNotFoundError):
        caffepy = version("caffepy")
    settings = {"version of caffepy": caffepy, **settings}
    _compare(world, settings, lambda name, message: ConfigError(message))


def check_data(nets: Sequence[Net], device: Device, group: RankGroup) -> None:
    """Raise DataError, which names the odd node, unless the layers of these nets read the same data
    on all nodes, as their number, first and last name show; DeviceError for NCCL.
    """
    if group.world.nodes == 1:
        return
    nodes = (node for net in nets for node in net.own_nodes.values())
    layers = [node.layer for node in nodes if node.layer.reads_files]
    readers = {f"data: {i}": layer for i, layer in enumerate(layers)}
    extents = {name: layer.extent() for name, layer in readers.items()}

    def at_layer(name: str, message: str) -> DataError:
        return DataError(message, where(readers[name].path, readers[name].param))

    with group.among_nodes() as world:
        _compare(world, extents, at_layer)
        if device.is_cuda:
            nccl = {"version of NCCL": nccl_version()}
            _compare(world, nccl, lambda name, message: DeviceError(message))


def _compare(
    world: World, values: Mapping[str, Any], error: Callable[[str, str], Exception]
) -> None:
    """Raise `error(name, message)` on node 0 for the first value that another node has otherwise;
    the others wait until it has compared, and get its error.
    """
    first, *others = world.gather(dict(values))
    for node, theirs in enumerate(others if world.node == 0 else (), start=1):
        for name, value in theirs.items():
            if value != first[name]:
                what, (value, right) = name.split(":")[0], _difference(value, first[name])
                place = world.describe(node)
                raise error(
                    name, f"the {what} of {place} is not that of node 0: {value} instead of {right}"
                )
    world.broadcast()


def _difference(mine: object, theirs: object) -> tuple[str, str]:
    """Return two values as text; of long texts the first lines that differ."""
    texts = [
        "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        for value in (mine, theirs)
    ]
    for left, right in zip_longest(*(text.splitlines() for text in texts)):
        if left != right:
            return _quoted(left), _quoted(right)
    return _quoted(texts[0]), _quoted(texts[1])


def _quoted(line: str | None) -> str:
    return "nothing" if line is None else line.strip() or '""'


def gather(group: RankGroup, values: Sequence[Any]) -> list[Any]:
    """Return the values of all nodes' ranks, by universal rank; called in the root's thread."""
    if group.world.nodes == 1:
        return list(values)
    phase = "step" if group.phase == "idle" else group.phase  # where nobody waits without end
    with group.during(phase), group.among_nodes() as world:
        return [value for node in world.gather(list(values)) for value in node]


def follow_first(root: Solver, group: RankGroup) -> None:
    """Give the roots of all nodes the parameters, history and positions of universal rank 0.

    Random numbers stay those of each rank, or come from the state that universal rank 0 restored.
    """
    if group.world.nodes == 1:
        return
    device, state = root.device, root.resume_state
    device.flush()
    with device.scope(), group.among_nodes() as world:
        for flat in root.arrays:
            for start in range(0, flat.size, PIECE):
                send_from_first(flat[start : start + PIECE], device, world)
        news: dict[str, Any] = world.broadcast(
            {
                "iteration": (
                    root.iter,
                    root.iterations.current_step,
                    root.iterations.plateau.state(),
                ),
                "rescued": state.rescued,
                "rate_factor": root.iterations.rate_factor,
                "control": root.update_state.state(),
                "shared": [
                    {name: layer.state() for name, layer in shared(net).items()}
                    for net in root.iterations.nets
                ],
                "tick": device.step_count,
                "workers": state.workers_positions,
                "statistics": state.statistics,
            }
        )
        if world.node == 0:
            return
    root.iterations.move_to(*news["iteration"])
    root.iterations.rate_factor = news["rate_factor"]
    (state.started_at, *_), state.rescued = news["iteration"], news["rescued"]
    root.update_state.set_state(news["control"])
    state.workers_positions, state.statistics = news["workers"], news["statistics"]
    restored = restored_positions(root, world.size)[world.first_rank - 1]
    own = restored or own_positions(take_positions(root.iterations.nets, device), root)
    train, *tests = (
        {**known, **shared}
        for known, shared in zip((own["net"], *own["test_nets"]), news["shared"], strict=False)
    )
    complete = {**own, "net": train, "test_nets": tests, "tick": news["tick"]}
    set_positions(complete, root.iterations.nets, device)


def send_from_first(array: Array, device: Device, world: World) -> None:
    """Copy an array of the first node's device to those of all nodes."""
    if world.node == 0:
        host = np.ascontiguousarray(device.on_host(array))
        world.exchange([(node, host) for node in range(1, world.nodes)], [])
    else:
        host = np.empty(array.shape, array.dtype)
        world.exchange([], [(0, host)])
        device.upload(host, array)


def restored_positions(root: Solver, size: int) -> Sequence[Positions | None]:
    """Return the positions of universal ranks 1, 2, ... in the state that was restored, if any."""
    restored = root.resume_state.workers_positions
    return restored if len(restored) == size - 1 else [None] * (size - 1)


def own_positions(positions: Positions, root: Solver) -> Positions:
    """Return these positions of a root as those of a worker, without layers that are shared."""
    train, *tests = (
        {name: state for name, state in states.items() if name not in shared(net)}
        for net, states in zip(
            root.iterations.nets, (positions["net"], *positions["test_nets"]), strict=False
        )
    )
    return {**positions, "net": train, "test_nets": tests}


def shared(net: Net) -> dict[str, Layer]:
    """Return the layers that the solvers of a node share, by the names of their states."""
    nodes = net.own_nodes.items()
    return {name: node.layer for name, node in nodes if node.layer.share_in_parallel}
