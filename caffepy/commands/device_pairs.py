"""`caffepy device-pairs`: links between devices, and the schedule of each way to synchronize."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from caffepy.collectives import links, peers
from caffepy.collectives.links import Links
from caffepy.collectives.schedule import Operation, Schedule, flat, muji, tree
from caffepy.collectives.sync import fastest, reason_nccl_unavailable
from caffepy.collectives.topology import DevicePair, Topology, all_joined, device_pairs, draw, show
from caffepy.collectives.world import World
from caffepy.commands.nodes import gpus_of_process, nodes
from caffepy.core.errors import CaffeError, ConfigError
from caffepy.core.names import nearest
from caffepy.device.gpus import gpu_numbers
from caffepy.report.text import AsJson, columns

FIELDS = ("devices", "boards", "access", "links")
DERIVED = ("pairs", "schedules", "sync", "speeds")
"""Fields of `Pairing.json` that follow from the others, or that only a real machine has."""

LEGEND = (
    "NV#: # NVLinks; PIX: one PCIe bridge, PXB: several, PHB: the host bridge, "
    "NODE: one NUMA node, SYS: several"
)

SMALL, LARGE = 1, 1 << 22
"""Floats of the arrays that measure the latency and the bandwidth between nodes."""

ROUNDS = {SMALL: 200, LARGE: 5}


@dataclass(frozen=True)
class NodeSpeed:
    """Speed of arrays between the memories of two hosts, through MPI, one way."""

    nodes: tuple[int, int]
    gigabytes_per_s: float
    microseconds: float


@dataclass(frozen=True)
class NodePairing(AsJson):
    """Nodes: their hosts and numbers of solvers, the speeds between each two, and what --sync auto
    takes.
    """

    hosts: Sequence[str]
    solvers: Sequence[int]
    speeds: Sequence[NodeSpeed]
    auto: str
    why: str

    def text(self) -> str:
        """Return tables as text."""
        rows = [["node", "host", "solvers"]]
        rows += [
            [str(node), host, str(count)]
            for node, (host, count) in enumerate(zip(self.hosts, self.solvers, strict=True))
        ]
        pairs = [["nodes", "GB/s", "us of 4 bytes"]]
        for speed in self.speeds:
            a, b = speed.nodes
            pairs.append([f"{a}, {b}", f"{speed.gigabytes_per_s:.2f}", f"{speed.microseconds:.0f}"])
        parts = [
            "\n".join(columns(rows, left=2)),
            "\n".join(["Through MPI, from host memory", *columns(pairs, left=1)]),
            f"--sync auto takes {self.auto}: {self.why}",
        ]
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Pairing:
    """Devices, their topology and the schedules that follow from it.

    `links` is None if they are unknown, `speeds` is empty unless they were measured. The devices
    are GPUs, or solvers `on_cpu`. `without_nccl` is why NCCL is not available, if it is not.
    """

    topology: Topology
    pairs: list[DevicePair]
    schedules: dict[str, Schedule | None]
    speeds: list[peers.Speed]
    links: Links | None = None
    on_cpu: bool = False
    without_nccl: str | None = None

    def json(self) -> str:
        """Return one JSON object; steps are [operation, source, destination, through the host]."""
        names = self.topology.devices
        return json.dumps(
            {
                "devices": names,
                "boards": self.topology.boards,
                "access": self.topology.access,
                "links": self.links,
                "pairs": [[pair.parent, pair.device] for pair in self.pairs],
                "schedules": {
                    name: schedule
                    and [[_step(step, names) for step in level] for level in schedule]
                    for name, schedule in self.schedules.items()
                },
                "sync": {"auto": self._auto()[0], "without_nccl": self.without_nccl},
                "speeds": [
                    {
                        "from": names[speed.source],
                        "to": names[speed.destination],
                        "gigabytes_per_s": round(speed.gigabytes_per_s, 1),
                        "microseconds": round(speed.microseconds, 1),
                    }
                    for speed in self.speeds
                ],
            }
        )

    def text(self) -> str:
        """Return the tree, the access matrix, the schedules and the speeds as text."""

        def reach(a: int, b: int) -> str:
            if self.topology.same_board(a, b):
                return "+"
            return "P" if self.topology.reaches(a, b) else "-"

        kind = "Solvers" if self.on_cpu else "GPUs"
        parts = [
            f"{kind} pairs {show(self.pairs) or 'none'}\n{draw(self.pairs)}",
            "Peer access (board: +, peer: P, through the host: -)\n" + self._matrix(reach),
        ]
        links = self.links
        if links:
            parts.append(f"Links ({LEGEND})\n" + self._matrix(lambda a, b: links[a][b] or "?"))
        names, signs = self.topology.devices, {Operation.ADD: "+=", Operation.COPY: "="}
        for name, schedule in self.schedules.items():
            if schedule is None:
                none = f"no schedule for {self.topology.size} devices joined like this"
                parts.append(f"{name}: {none}")
                continue
            lines = [f"{name}: {len(schedule)} levels"]
            for level in schedule:
                steps = [
                    f"{names[step.destination]} {signs[step.operation]} "
                    f"{names[step.source]}{' (host)' * step.staged}"
                    for step in level
                ]
                lines.append(f"  {', '.join(steps)}")
            parts.append("\n".join(lines))
        way, why = self._auto()
        parts.append(f"nccl: {self.without_nccl or 'NCCL chooses its own schedule'}")
        parts.append(f"--sync auto takes {way}: {why}")
        if self.speeds:
            of = {(speed.source, speed.destination): speed for speed in self.speeds}
            parts.append(
                "Bandwidth from row to column, GB/s\n"
                + self._matrix(lambda a, b: f"{of[a, b].gigabytes_per_s:.0f}")
                + "\n\nTime of 4 bytes from row to column, us\n"
                + self._matrix(lambda a, b: f"{of[a, b].microseconds:.1f}")
            )
        return "\n\n".join(parts)

    def _auto(self) -> tuple[str, str]:
        choice, why = fastest(self.topology, self.without_nccl)
        return choice.name, why

    def _matrix(self, cell: Any) -> str:
        names = [str(device) for device in self.topology.devices]
        rows = [["", *names]]
        for a, name in enumerate(names):
            rows.append([name, *("." if a == b else cell(a, b) for b in range(len(names)))])
        width = max(len(text) for row in rows for text in row)
        return "\n".join(" ".join(text.rjust(width) for text in row) for row in rows)


def _step(step: Any, names: tuple[int, ...]) -> list[Any]:
    return [step.operation.value, names[step.source], names[step.destination], step.staged]


def pairing(
    topology: Topology,
    joined: Links | None = None,
    measured: bool = False,
    on_cpu: bool = False,
    without_nccl: str | None = None,
) -> Pairing:
    """Return the pairing of devices `joined` by these links; `measured`: with their speeds."""
    speeds = []
    if measured and topology.size > 1:
        speeds = peers.measure(topology)
    schedules = {"tree": tree(topology), "muji": muji(topology), "flat": flat(topology)}
    pairs = device_pairs(topology)
    return Pairing(topology, pairs, schedules, speeds, joined, on_cpu, without_nccl)


def of_this_machine(gpus: str, measured: bool = False) -> Pairing:
    """Return the pairing of the GPUs that --gpu names, "all" for every one."""
    topology = peers.query(gpu_numbers(gpus))
    joined, without_nccl = links.query(topology.devices), reason_nccl_unavailable(True)
    return pairing(topology, joined, measured, without_nccl=without_nccl)


def of_nodes(gpus: str | None, cpu: int | None) -> NodePairing | None:
    """Return the pairing of the nodes that mpirun or srun started, each with these GPUs, or `cpu`
    solvers; None if this process is alone.
    """
    with nodes() as world:
        if world is None:
            return None
        numbers = [] if cpu else gpu_numbers(gpus_of_process(gpus or "all", world) or "")
        world.join(cpu or len(numbers))
        without_nccl = reason_nccl_unavailable(bool(numbers))
        if numbers:
            auto, why = "nccl", without_nccl or "the way for GPUs of several processes"
        else:
            choice, why = fastest(all_joined(world.size), without_nccl)
            auto = choice.name
        speeds = [_speed(world, *pair) for pair in combinations(range(world.nodes), 2)]
        return NodePairing(world.hosts, world.solvers, speeds, auto, why)


def _speed(world: World, a: int, b: int) -> NodeSpeed:
    """Return the speed between two nodes, while all others wait."""
    seconds = {}
    for count, rounds in ROUNDS.items():
        world.barrier()
        times = []
        if world.node in (a, b):
            array, other = np.zeros(count, np.float32), a + b - world.node
            there, back = [(other, array)], list[tuple[int, Any]]()
            if world.node == b:
                there, back = back, there
            for _ in range(rounds):
                begin = perf_counter()
                world.exchange(there, back)
                world.exchange(back, there)
                times.append((perf_counter() - begin) / 2)
        seconds[count] = world.gather(median(times) if times else 0.0)[a]
    return NodeSpeed((a, b), 4 * LARGE / seconds[LARGE] / 1e9, seconds[SMALL] * 1e6)


def of_cpu(solvers: int) -> Pairing:
    """Return the pairing of this many solvers on the CPU."""
    return pairing(all_joined(solvers), on_cpu=True, without_nccl=reason_nccl_unavailable(False))


def simulated(path: str) -> Pairing:
    """Return the pairing of the devices in a JSON file: {"devices": [0, 1], "boards": [null, null],
    "access": [[0, 1], [1, 0]]}.

    `boards` may be left out; `access` may be one number for all pairs. "links" may have rows of
    texts such as "NV18" or "SYS", and null on the diagonal. ConfigError says what is wrong.
    """
    try:
        with open(path, encoding="utf-8") as file:
            description = json.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("devices"), list):
        needed = 'an object with "devices", and perhaps "boards", "access" and "links"'
        raise ConfigError(f"{path} must be {needed}")
    for name in description:
        if name not in FIELDS + DERIVED:
            raise ConfigError(
                f'{path}: there is no "{name}"{nearest(name, FIELDS)} (known: {", ".join(FIELDS)})'
            )
    devices, n, joined = (
        description["devices"],
        len(description["devices"]),
        description.get("links"),
    )
    boards, access = description.get("boards", [None] * n), description.get("access", 1)
    if isinstance(access, int):
        access = [[access] * n] * n
    checks = {
        "devices": (_is_list(devices, _is_number), "whole numbers"),
        "boards": (
            _is_list(boards, lambda board: board is None or _is_number(board)),
            "a list of whole numbers, null for a device that has one to itself",
        ),
        "access": (
            _is_list(access, lambda row: _is_list(row, lambda cell: cell in (0, 1))),
            "a list of rows of 0 and 1",
        ),
        "links": (
            joined is None or _is_list(joined, lambda row: _is_list(row, _is_link, n), n),
            f"{n} rows of {n} texts, or null where there is none",
        ),
    }
    for name, (good, needed) in checks.items():
        if not good:
            raise ConfigError(f'{path}: "{name}" must be {needed}')
    try:
        rows = tuple(
            tuple(bool(cell) and a != b for b, cell in enumerate(row))
            for a, row in enumerate(access)
        )
        topology = Topology(tuple(devices), tuple(boards), rows)
    except CaffeError as error:
        raise ConfigError(error.message, path) from None
    return pairing(topology, joined)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_link(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_list(value: Any, valid: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(value)) and all(map(valid, value))
