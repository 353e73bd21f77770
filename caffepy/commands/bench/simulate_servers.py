"""`caffepy bench scaling --simulate '... sync=ps'`: the speed of many nodes that train by a
parameter server, by a simulation of its events.

A worker is a node. At each clock it computes H iterations, whose time is drawn anew, and pushes and
pulls: with slack 0 it waits for both; else they go beside the next clock, which then begins with
what they brought, as `ServedWorkers` does it. A pull at clock c waits until all have pushed up to
clock c - slack; beside the iterations with a slack smaller by one.

    compute    H (t + E) s (1 + sigma z), z normal; E of the node's all-reduce, s of a slow node
    push       n bytes of each of R copies to the servers; n (R - 1) bytes between them
    pull       n bytes from the servers
    memory     3 n bytes of each copy of a push, n of a pull; filters do not change these

The S servers, on machines of their own, hold equal parts and are one here, of S NICs of a node each
way and S times the memory's bandwidth; those who push or pull at a time share it equally, and none
gets more than a NIC carries. Not in the model: copies between a GPU and its host, filters' own
time, servers that the ring gave more than others, and what the program that carries messages loses.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from caffepy.collectives.synchronizer import FLOAT32
from caffepy.commands.bench.simulate import (
    HIDDEN,
    MOST_NODES,
    Cluster,
    Load,
    Simulated,
    cluster_of,
    measured_load,
    parts_of,
    point,
)
from caffepy.core.errors import UsageError
from caffepy.parallel.parameter_server.messages import Rule, slack_of
from caffepy.report.text import columns

EXAMPLE = "nodes=64 gpus=8 nic=1x100 sync=ps consistency=ssp:4 every=25 servers=16 replicas=2"
NAMES = ("sync", "consistency", "every", "servers", "replicas", "straggler", "slow", "filters")

MEMORY = 40e9
"""Bytes a second of a server's memory."""

FILTERS = {"": 1.0, "bf16": 0.5, "significant": 1 / 6, "bf16+significant": 0.1}
"""Bytes of a push, of those in float32; with `significant:1.6` as measured on digits."""

MANY = 128
"""More workers than these are simulated for half as long: their mean has as many draws."""

CLOCKS, BEGINNING = 90, 30
"""Clocks of a worker, in the mean; those that are left out, until all is in its usual course."""

MOST_SIGMA, LEAST_FACTOR = 0.5, 0.1
"""Of the random times of computing: more variation would often give times below zero."""

STALEST = 10
"""Last class of the histogram: this staleness in clocks, or more."""


class Servers(NamedTuple):
    """A parameter server and the nodes' unevenness: `slow` nodes are `factor` times slower, sigma
    is that of each clock.
    """

    slack: float = 0
    every: int = 1
    servers: int = 2
    replicas: int = 2
    sigma: float = 0.0
    slow: int = 0
    factor: float = 1.0
    push: float = 1.0
    pull: float = 1.0


def asks(text: str) -> bool:
    """Return True if this is a cluster with sync=ps."""
    return "sync=ps" in re.split(r"[\s,]+", text.strip())


def parse(text: str) -> tuple[Cluster, Servers]:
    """Parse a cluster with a parameter server, see EXAMPLE. UsageError for anything else.

    Defaults are those of `caffepy train`. `straggler=0.2` is sigma, `slow=2:1.5` two nodes that are
    1.5 times slower, `filters=bf16+significant:1.6` what workers push.
    """
    found = parts_of(text, NAMES, EXAMPLE)
    cluster = cluster_of(text, found, EXAMPLE)

    def number(name: str, default: str, least: float, most: float, value: str = "") -> float:
        value = value or found.get(name, default)
        if not re.fullmatch(r"\d{1,6}(\.\d+)?", value) or not least <= float(value) <= most:
            wanted = f"{least:g} to {most:g}"
            raise UsageError(f"--simulate: {name}={value} is no number of {wanted}")
        return float(value)

    def count(name: str, default: str, most: int, value: str = "", least: int = 1) -> int:
        result = number(name, default, least, most, value)
        if result != int(result):
            raise UsageError(f"--simulate: {name}={result:g} is no whole number")
        return int(result)

    if cluster.nodes > MOST_NODES:
        raise UsageError(f"--simulate: sync=ps is simulated with up to {MOST_NODES} nodes")
    try:
        slack = slack_of(found.get("consistency", "sync"))
    except UsageError:
        raise UsageError(
            f"--simulate: consistency={found['consistency']} is none of sync, ssp:S, async"
        ) from None
    servers = count("servers", "2", MOST_NODES)
    slow, _, factor = found.get("slow", "0:1").partition(":")
    filters = dict(part.partition(":")[::2] for part in found.get("filters", "").split("+"))
    kept = "+".join(sorted(filters))
    if kept not in FILTERS or filters.get("bf16"):
        raise UsageError(
            f"--simulate: filters={found['filters']} is none of bf16, significant:T, "
            "bf16+significant:T"
        )
    if "significant" in filters:
        number("significant", "", 0.1, 100, filters["significant"] or "0")
    return cluster, Servers(
        slack=slack,
        every=count("every", "1", 100_000),
        servers=servers,
        replicas=count("replicas", str(min(2, servers)), servers),
        sigma=number("straggler", "0", 0, MOST_SIGMA),
        slow=count("slow", "0", cluster.nodes, slow or "-", least=0),
        factor=number("slow", "1", 1, 1000, factor or "-"),
        push=FILTERS[kept],
        pull=0.5 if "bf16" in filters else 1.0,
    )


class Course(NamedTuple):
    """Results of a simulation: seconds of a clock of all workers, and shares of their time.

    seconds: in which as many clocks were computed as there are workers.
    others, wire: waited while a worker that a pull waits for computed, and for all else.
    staleness: shares of 0, 1, 2... clocks by which pushes of other workers are missing in what one
        trains on.
    mean_staleness: in clocks.
    """

    seconds: float
    others: float
    wire: float
    staleness: Sequence[float]
    mean_staleness: float


class _Shared:
    """Something that carries bytes, shared by all that are on it: by weight, and none gets more
    than its weight times `most` bytes a second.

    `level` is the number of bytes a weight of one has got so far.
    """

    def __init__(self, bandwidth: float, most: float) -> None:
        self.next = inf  # when the first one is done
        self._bandwidth, self._most = bandwidth, most
        self._level, self._weight, self._time, self._rate = 0.0, 0, 0.0, 0.0
        self._heap: list[tuple[float, int, int]] = []  # level at its end, number, weight

    def add(self, now: float, size: float, number: int, weight: int = 1) -> None:
        """Begin to carry `size` bytes for each unit of weight."""
        self._move(now)
        heappush(self._heap, (self._level + size, number, weight))
        self._weight += weight
        self._plan()

    def pop(self) -> int:
        """Return who is done first, at the time `next`."""
        self._move(self.next)
        self._level, number, weight = heappop(self._heap)
        self._weight -= weight
        self._plan()
        return number

    def _move(self, now: float) -> None:
        self._level += (now - self._time) * self._rate
        self._time = now

    def _plan(self) -> None:
        if not self._weight:
            self.next, self._rate = inf, 0.0
            return
        self._rate = min(self._most, self._bandwidth / self._weight)
        missing = self._heap[0][0] - self._level
        self.next = self._time + missing / self._rate if missing > 0 else self._time


@dataclass
class _Worker:
    """The clock of a worker, and since when."""

    clock: int = 0  # pushes that are counted
    began: float = 0.0  # to compute
    ended: float = 0.0  # to compute
    asked: float = 0.0  # to pull
    let: float = 0.0  # the pull may go
    late: tuple[float, float] = (0.0, 0.0)  # when the last that the pull waits for computed
    parts: int = 0  # of a push or pull that are on their way
    pulls: bool = False
    exchanges: bool = False  # a push or pull is on its way
    blocked: bool = False  # it waits for that


@dataclass
class _Run:
    """A simulation of M workers that compute the times that `times` yields, and exchange."""

    workers: int
    times: Iterator[Sequence[float]]
    size: float
    nic: float
    latency: float
    at: Servers
    computed: float = 0.0
    others: float = 0.0
    waited: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (STALEST + 1))
    stale: int = 0

    def __post_init__(self) -> None:
        count, servers = self.at.servers, self.nic * self.at.servers
        parts = 2 if self.workers > MANY else 1
        self._end, self._beginning = CLOCKS // parts, BEGINNING // parts
        self._in = _Shared(servers, self.nic)
        self._out = _Shared(servers, self.nic)
        self._memory = _Shared(MEMORY * count, inf)
        self._of = [_Worker() for _ in range(self.workers)]
        self._events: list[tuple[float, int, int]] = []  # time, kind, worker
        self._clocks = [self.workers, 0, 0]  # number of workers by clock
        self._slowest = 0
        self._waiting: list[int] = []  # pulls that may not go yet
        self._times: list[Sequence[float]] = []
        self._turns = [0] * self.workers
        self._beside = self.at.slack > 0
        self._slack = self.at.slack - self._beside
        self._measures = False

    def course(self) -> Course:
        """Run it."""
        for worker in range(self.workers):
            self._compute(0.0, worker)
        done, begun, now = 0, 0.0, 0.0
        while done < self.workers * self._end:
            first = self._in if self._in.next <= self._out.next else self._out
            if self._memory.next < first.next:
                first = self._memory
            if not self._events or first.next <= self._events[0][0]:
                now = first.next
                self._part_done(now, first.pop())
                continue
            now, kind, worker = heappop(self._events)
            if kind:
                self._answered(now, worker)
                continue
            done += 1
            self._computed(now, worker)
            if done == self.workers * self._beginning:
                begun, self._measures = now, True
        clocks = self._end - self._beginning
        whole = self.computed + self.waited
        seen = max(sum(self.histogram), 1)
        return Course(
            seconds=(now - begun) / clocks,
            others=self.others / whole,
            wire=(self.waited - self.others) / whole,
            staleness=[n / seen for n in self.histogram],
            mean_staleness=self.stale / seen,
        )

    def _compute(self, now: float, worker: int) -> None:
        turn, w = self._turns[worker], self._of[worker]
        self._turns[worker] += 1
        while turn >= len(self._times):
            self._times.append(next(self.times))
        w.began, w.ended = now, now + self._times[turn][worker]
        heappush(self._events, (w.ended, 0, worker))

    def _computed(self, now: float, worker: int) -> None:
        w = self._of[worker]
        if self._measures:
            self.computed += now - w.began
        if w.exchanges:
            w.blocked = True
            return
        self._push(now, worker)
        if self._beside:
            self._compute(now, worker)
        else:
            w.blocked = True

    def _push(self, now: float, worker: int) -> None:
        w, at, size = self._of[worker], self.at, self.size * self.at.push
        w.pulls, w.exchanges, w.late = False, True, (w.began, w.ended)
        w.parts = 2 + (at.replicas > 1)
        self._in.add(now, size, worker, at.replicas)
        self._memory.add(now, 3 * self.size * at.replicas, worker)
        if at.replicas > 1:
            self._out.add(now, size, worker, at.replicas - 1)

    def _part_done(self, now: float, worker: int) -> None:
        w = self._of[worker]
        w.parts -= 1
        if not w.parts:
            hops = 2 if w.pulls or self.at.replicas == 1 else 4
            heappush(self._events, (now + hops * self.latency, 1, worker))

    def _answered(self, now: float, worker: int) -> None:
        if self._of[worker].pulls:
            self._pulled(now, worker)
            return
        self._count(now, worker)
        self._of[worker].asked = now
        if self._may_go(worker):
            self._let(now, worker, (0.0, 0.0))
        else:
            self._waiting.append(worker)

    def _may_go(self, worker: int) -> bool:
        return self._slowest >= self._of[worker].clock - self._slack

    def _count(self, now: float, worker: int) -> None:
        """Count a push, and let those pull that waited for it."""
        w = self._of[worker]
        if w.clock + 3 > len(self._clocks):
            self._clocks.append(0)
        self._clocks[w.clock] -= 1
        w.clock += 1
        self._clocks[w.clock] += 1
        if self._clocks[self._slowest]:
            return
        self._slowest += 1
        waiting, self._waiting = self._waiting, []
        for other in waiting:
            if self._may_go(other):
                self._let(now, other, w.late)
            else:
                self._waiting.append(other)

    def _let(self, now: float, worker: int, late: tuple[float, float]) -> None:
        w, size = self._of[worker], self.size * self.at.pull
        w.pulls, w.parts, w.let, w.late = True, 2, now, late
        self._out.add(now, size, worker)
        self._memory.add(now, self.size, worker)
        if self._measures:
            self._observe(w.clock)

    def _observe(self, clock: int) -> None:
        """Take down how many clocks each other worker is behind what this one will train."""
        trained = clock + self._beside
        own, seen = int(self._beside), 0
        for behind in range(trained - self._slowest + 1):
            count = self._clocks[trained - behind]
            if count:
                seen += count
                self.stale += behind * count
                self.histogram[min(behind, STALEST)] += count
        self.stale -= own
        self.histogram[min(own, STALEST)] -= 1
        self.histogram[0] += self.workers - seen  # those ahead

    def _pulled(self, now: float, worker: int) -> None:
        w = self._of[worker]
        w.exchanges = False
        if not w.blocked:
            return
        w.blocked = False
        if self._measures:
            self.waited += now - w.ended
            begin = max(w.ended, w.asked, w.late[0])
            self.others += max(0.0, min(w.let, w.late[1]) - begin)
        if self._beside:
            self._push(now, worker)
        self._compute(now, worker)


def course(load: Load, cluster: Cluster, at: Servers, seed: int = 0) -> Course:
    """Simulate a cluster; the same seed draws the same times."""
    workers = cluster.nodes
    alone = point(load, cluster._replace(nodes=1), 1)
    seconds = at.every * (load.seconds + alone.exposed_ms / 1e3)
    usual = np.full(workers, seconds)
    usual[: at.slow] *= at.factor
    rng = np.random.default_rng(seed)

    def times() -> Iterator[Sequence[float]]:
        while True:
            random = 1 + at.sigma * rng.standard_normal(workers)
            yield (usual * np.maximum(random, LEAST_FACTOR)).tolist()

    nic = cluster.rail * cluster.gpus
    return _Run(workers, times(), load.bytes, nic, cluster.latency, at).course()


@dataclass(frozen=True)
class ServedPoint:
    """A number of nodes: images a second of all, efficiency, milliseconds of a clock, shares of the
    workers' time, staleness in clocks, and what limits it.

    histogram: shares of 0, 1, ... 9 clocks, and of 10 or more.
    """

    nodes: int
    gpus: int
    images_per_s: float
    efficiency: float
    clock_ms: float
    waited_for_others: float
    waited_for_wire: float
    staleness: float
    histogram: Sequence[float]
    bottleneck: str


@dataclass(frozen=True)
class ServedSimulation(Simulated):
    """The simulation's figures, by number of nodes; `asked` is the one that was asked for."""

    title = "simulated:"

    net: str
    device: str
    precision: str
    batch: int
    cluster: str
    node_gb_s: float
    latency_us: float
    consistency: str
    every: int
    servers: int
    replicas: int
    parameter_mb: float
    push_mb: float
    pull_mb: float
    ms: float
    asked: ServedPoint
    points: Sequence[ServedPoint]

    def table(self) -> str:
        """Return a table as text."""
        asked = self.asked
        head = "nodes,GPUs,images/s,efficiency,clock ms,others,wire,staleness,limit"
        rows = [head.split(",")]
        rows += [
            [
                f"{p.nodes}",
                f"{p.gpus}",
                f"{p.images_per_s:.0f}",
                f"{p.efficiency:.1%}",
                f"{p.clock_ms:.1f}",
                f"{p.waited_for_others:.1%}",
                f"{p.waited_for_wire:.1%}",
                f"{p.staleness:.2f}",
                p.bottleneck,
            ]
            for p in self.points
        ]
        copies = "copy" if self.replicas == 1 else "copies"
        return "\n".join(
            [
                self.measured,
                f"simulated on {self.cluster}: {self.node_gb_s:.2f} GB/s of each node and server, "
                f"{self.latency_us:g} us a message",
                f"{self.consistency}, a clock of {self.every} iterations; {self.servers} servers, "
                f"{self.replicas} {copies} of {self.parameter_mb:.1f} MB; a push of "
                f"{self.push_mb:.1f} MB, a pull of {self.pull_mb:.1f} MB",
                *columns(rows, left=0),
                f"{asked.nodes} nodes: {asked.images_per_s:.0f} images/s, limited by "
                f"{asked.bottleneck}",
            ]
        )


def simulate_servers(
    solver: str,
    cluster: str,
    *,
    measured: str | None = None,
    gpu: str | None = None,
    batch: int | None = None,
    image: Sequence[int] | None = None,
    precision: str | None = None,
    windows: int = 5,
    wire: str = FLOAT32,
) -> ServedSimulation:
    """Return how fast the net of the solver file trains by a parameter server, see `parse`, and
    with 1 to 1024 nodes of the cluster's kind and as many servers; the rest is that of `simulate`.

    UsageError for a `wire` other than float32: pushes have filters instead.
    """
    asked, at = parse(cluster)
    if wire != FLOAT32:
        raise UsageError(f"--wire {wire} is for all-reduces: with sync=ps give filters=bf16")
    net, load, alone = measured_load(
        solver,
        measured,
        gpu=gpu,
        batch=batch,
        image=image,
        precision=precision,
        windows=windows,
    )
    counts = sorted({asked.nodes, *(1 << i for i in range(MOST_NODES.bit_length()))})
    points = {
        nodes: served_point(load, asked._replace(nodes=nodes), at, alone.batch) for nodes in counts
    }
    return ServedSimulation(
        net=net,
        device=alone.device,
        precision=alone.precision,
        batch=alone.batch,
        cluster=cluster,
        node_gb_s=asked.rail * asked.gpus / 1e9,
        latency_us=asked.latency * 1e6,
        consistency=Rule(slack=at.slack).name,
        every=at.every,
        servers=at.servers,
        replicas=at.replicas,
        parameter_mb=load.bytes / 1e6,
        push_mb=load.bytes * at.push / 1e6,
        pull_mb=load.bytes * at.pull / 1e6,
        ms=alone.ms,
        asked=points[asked.nodes],
        points=list(points.values()),
    )


def served_point(load: Load, cluster: Cluster, at: Servers, batch: int) -> ServedPoint:
    """Return the simulation's figures for a cluster; of its nodes at most all are slow."""
    at = at._replace(slow=min(at.slow, cluster.nodes))
    found = course(load, cluster, at)
    gpus = cluster.nodes * cluster.gpus
    efficiency = at.every * load.seconds / found.seconds
    return ServedPoint(
        nodes=cluster.nodes,
        gpus=gpus,
        images_per_s=gpus * batch * at.every / found.seconds,
        efficiency=efficiency,
        clock_ms=found.seconds * 1e3,
        waited_for_others=found.others,
        waited_for_wire=found.wire,
        staleness=found.mean_staleness,
        histogram=found.staleness,
        bottleneck=_bottleneck(load, cluster, at, found, efficiency),
    )


def _bottleneck(load: Load, cluster: Cluster, at: Servers, found: Course, efficiency: float) -> str:
    """Name what takes most of the time that is not computing as on one GPU alone."""
    if efficiency * (1 + HIDDEN) > 1:
        return "computing"
    computing = 1 - found.others - found.wire
    inside = point(load, cluster._replace(nodes=1), 1).efficiency
    share = at.slow / cluster.nodes
    slowness = computing * (1 - 1 / (1 + share * (at.factor - 1)))
    most = max(
        (found.wire, "wire"),
        (found.others + slowness, "waiting for slower nodes"),
        (computing * (1 - inside), "bandwidth in the node"),
    )[1]
    if most != "wire":
        return most
    size, workers, copies = load.bytes, cluster.nodes, at.replicas
    push, pull = size * at.push, size * at.pull
    nic = cluster.rail * cluster.gpus
    both = push + pull if at.slack == 0 else max(push, pull)
    received, sent = copies * push, (copies - 1) * push + pull
    links = received + sent if at.slack == 0 else max(received, sent)
    return max(
        (workers * links / (nic * at.servers), "bandwidth of the servers' links"),
        (workers * size * (3 * copies + 1) / (MEMORY * at.servers), "memory of the servers"),
        (both / nic, "bandwidth of the nodes' links"),
        ((4 if copies == 1 else 6) * cluster.latency, "latency"),
    )[1]
