"""Topology: devices, which of them have peer access, and the tree of device pairs made from that.

Devices are named by their numbers; `access[a][b]` is True if a can read and write b's memory.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from caffepy.core.errors import ConfigError, UsageError

log = logging.getLogger(__name__)

NO_PARENT = -1


class DevicePair(NamedTuple):
    """An edge of the tree: `device` sends gradients to `parent`, which sends parameters back."""

    parent: int
    device: int


@dataclass(frozen=True)
class Topology:
    """Devices in the order given, the root first, with their boards and peer access.

    `boards[i]` numbers the board that device i shares with others, None if it has one to itself.
    """

    devices: tuple[int, ...]
    boards: tuple[int | None, ...]
    access: tuple[tuple[bool, ...], ...]  # by place in `devices`

    def __post_init__(self) -> None:
        n = len(self.devices)
        if not n:
            raise UsageError("no device is named")
        for device in self.devices:
            if self.devices.count(device) > 1:
                raise UsageError(f"device {device} is named twice")
            if device < 0:
                raise UsageError(f"{device} is no device number")
        if {len(self.boards), len(self.access), *map(len, self.access)} != {n}:
            raise ConfigError(f"{n} devices need as many boards and {n} rows of {n} of access")

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def reaches(self, a: int, b: int) -> bool:
        """True if the devices at two places can use each other's memory."""
        return a == b or (self.access[a][b] and self.access[b][a])

    def same_board(self, a: int, b: int) -> bool:
        """True if the devices at two places are GPUs of one board."""
        return self.boards[a] is not None and self.boards[a] == self.boards[b]


def all_joined(size: int) -> Topology:
    """Topology of threads on the CPU, of which each reaches the memory of all."""
    access = tuple(tuple(a != b for b in range(size)) for a in range(size))
    return Topology(tuple(range(size)), (None,) * size, access)


def device_pairs(topology: Topology) -> list[DevicePair]:
    """Return Caffe's tree: devices of one board are paired first, then those with peer access, then
    the rest.

    The first is (NO_PARENT, root); then come the leaves, so that gradients summed along the list,
    parents last, end in the root.
    """
    remaining = list(range(topology.size))
    pairs: list[tuple[int, int]] = []
    named = topology.devices
    for how, joined in (
        ("by boards", topology.same_board),
        ("by P2P access", lambda a, b: topology.access[a][b]),
        ("regardless of that", lambda a, b: True),
    ):
        before = len(pairs)
        _pair(remaining, pairs, joined)
        paired = ", ".join(f"{named[a]}:{named[b]}" for a, b in pairs[before:]) or "none"
        rest = ", ".join(str(named[device]) for device in remaining)
        log.debug("GPUs paired %s: %s, remaining: %s", how, paired, rest)
    (root,) = remaining
    below = [DevicePair(named[parent], named[child]) for parent, child in pairs]
    return [DevicePair(NO_PARENT, named[root]), *below]


def _pair(
    remaining: list[int], pairs: list[tuple[int, int]], joined: Callable[[int, int], bool]
) -> None:
    """Pair in rounds: each device that remains takes the next one that it is joined to as child."""
    for _ in range(ceil(log2(len(remaining)))):
        i = 0
        while i < len(remaining):
            parent = remaining[i]
            child = next((device for device in remaining[i + 1 :] if joined(parent, device)), None)
            if child is not None:
                pairs.append((parent, child))
                remaining.remove(child)
            i += 1


def show(pairs: Sequence[DevicePair]) -> str:
    """Format the pairs as Caffe does: parent:child with commas, without the root's own entry."""
    return ", ".join(f"{pair.parent}:{pair.device}" for pair in pairs if pair.parent != NO_PARENT)


def draw(pairs: Sequence[DevicePair]) -> str:
    """Draw the tree as text, a line a device, children below their parent in summing order."""
    children: dict[int, list[int]] = {}
    for pair in pairs:
        children.setdefault(pair.parent, []).append(pair.device)

    def lines(device: int, indent: str, last: bool, root: bool) -> list[str]:
        own = "" if root else ("└── " if last else "├── ")
        found = [f"{indent}{own}{device}"]
        below = children.get(device, [])
        deeper = indent if root else indent + ("    " if last else "│   ")
        for child in below:
            found += lines(child, deeper, child == below[-1], False)
        return found

    (root,) = children[NO_PARENT]
    return "\n".join(lines(root, "", True, True))
