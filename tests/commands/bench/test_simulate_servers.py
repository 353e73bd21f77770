"""The simulation of a parameter server, held to closed formulas, to the rule of bounded staleness as
a recursion, and to figures that were worked out.
"""

import json
from math import erf, inf, sqrt
from pathlib import Path

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.commands.bench import simulate_servers
from caffepy.commands.bench.simulate import Cluster, Load
from caffepy.commands.bench.simulate_servers import (
    EXAMPLE,
    MEMORY,
    Servers,
    asks,
    course,
    parse,
    served_point,
)
from caffepy.core.errors import UsageError
from tests.commands.bench.test_simulate import MEASURED

CAFFENET = Load(4 * 61e6, 4.2e-3, 2.4e-3, 0.5)
FREE = 1e18  # bytes a second
CONSISTENCY = {"sync": 0.0, "ssp:1": 1.0, "ssp:4": 4.0, "async": inf}


def cluster(nodes: int, nic: float = FREE, latency: float = 0.0) -> Cluster:
    return Cluster(nodes, 1, nic, latency)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_servers, "MEMORY", FREE)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 25])
@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (4, 3), (16, 16), (200, 8)])
def test_without_variation_sync_takes_computing_and_both_ways(
    workers: int, servers: int, every: int, copies: int
) -> None:
    n, b, latency = CAFFENET.bytes, 1.25e9, 30e-6
    at = Servers(every=every, servers=servers, replicas=copies)
    found = course(CAFFENET, cluster(workers, b, latency), at)
    link, memory = n / (b * servers), n / (MEMORY * servers)
    push = max(n / b, workers * copies * link, workers * 3 * copies * memory)
    pull = max(n / b, workers * link, workers * memory)
    hops = (4 if copies == 1 else 6) * latency
    assert found.seconds == pytest.approx(every * 4.2e-3 + push + pull + hops)
    assert found.wire == pytest.approx(1 - every * 4.2e-3 / found.seconds)
    assert found.others == pytest.approx(0, abs=1e-12)
    assert found.mean_staleness == 0


@pytest.mark.parametrize("slack", [1.0, 4.0, inf])
def test_beside_the_iterations_the_longer_of_both_counts(slack: float) -> None:
    n, b = CAFFENET.bytes, 10e9
    one = Servers(slack=slack, servers=4, replicas=1)
    assert course(CAFFENET, cluster(1, b), one).seconds == pytest.approx(2 * n / b)
    hidden = course(CAFFENET, cluster(4, b), one._replace(every=25))
    assert hidden.seconds == pytest.approx(25 * 4.2e-3)
    assert hidden.wire == pytest.approx(0, abs=1e-12)


ROUNDS = {  # workers, servers, bytes/s: milliseconds of a round that were worked out
    (4, 3, 1.15e9): 283,
    (4, 3, 10e9): 32.5,
    (16, 16, 45e9): 24.4,
}


@pytest.mark.parametrize(("workers", "servers", "nic"), ROUNDS)
def test_a_round_takes_what_was_worked_out(workers: int, servers: int, nic: float) -> None:
    """Those let pushes and pulls go at a time, so that sync takes up to twice as long."""
    ms = ROUNDS[workers, servers, nic] / 1e3
    at = Servers(servers=servers, replicas=1)
    in_turns = course(CAFFENET, cluster(workers, nic), at).seconds - 4.2e-3
    assert ms * 0.99 < in_turns < 2.01 * ms
    beside = course(CAFFENET, cluster(workers, nic), at._replace(slack=inf, sigma=0.2)).seconds
    assert ms * 0.99 < beside < 1.01 * in_turns


def expected_maximum(count: int) -> float:
    """Of so many normals: the integral of x dF(x)^count."""
    x = np.linspace(-8, 8, 20_001)
    cdf = np.array([(1 + erf(v / sqrt(2))) / 2 for v in x]) ** count
    return float(((x[1:] + x[:-1]) / 2 * np.diff(cdf)).sum())


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize("workers", [4, 16, 64, 256, 1024])
def test_with_variation_sync_takes_the_expected_maximum(workers: int) -> None:
    found = course(CAFFENET, cluster(workers), Servers(every=25, sigma=0.2))
    expected = 1 + 0.2 * expected_maximum(workers)
    assert found.seconds / (25 * 4.2e-3) == pytest.approx(expected, rel=0.03)
    assert found.others == pytest.approx(1 - 1 / expected, rel=0.1)
    assert found.wire < 1e-6


@pytest.mark.usefixtures("free_memory")
@pytest.mark.parametrize("slack", CONSISTENCY.values(), ids=CONSISTENCY)
@pytest.mark.parametrize("slow", [0, 2])
def test_clocks_are_those_of_the_rule(slack: float, slow: int) -> None:
    """When the wire is free:

    x(k) = max(e(k), d(k - 1))                        the exchange k begins
    d(k) = max(x(k), x of all others at k - slack)    the pull may go; slack - 1 if beside
    e(k + 1) = its time + x(k), or d(k) with slack 0
    """
    workers, clocks = 8, 400
    at = Servers(slack=slack, every=2, sigma=0.3, slow=slow, factor=1.5)
    usual = np.full(workers, 2 * 4.2e-3)
    usual[:slow] *= 1.5
    drawn = np.random.default_rng(5).standard_normal((clocks, workers))
    times = usual * np.maximum(1 + 0.3 * drawn, 0.1)
    begun, ended = np.zeros((clocks, workers)), np.zeros((clocks, workers))
    may_go = np.zeros((clocks, workers))
    for k in range(clocks):
        before = may_go[k - 1] if k else np.zeros(workers)
        ended[k] = times[k] + ((begun[k - 1] if slack else before) if k else 0)
        begun[k] = np.maximum(ended[k], before)
        waits_for = k - (slack - 1 if slack else 0)
        may_go[k] = begun[k] if waits_for < 0 else np.maximum(begun[k], begun[int(waits_for)].max())
    order = np.sort(ended.ravel())
    expected = (order[workers * 90 - 1] - order[workers * 30 - 1]) / 60
    assert course(CAFFENET, cluster(workers), at, seed=5).seconds == pytest.approx(expected)


@pytest.mark.parametrize("name", CONSISTENCY)
def test_staleness_keeps_to_the_slack(name: str) -> None:
    at = Servers(slack=CONSISTENCY[name], every=25, servers=16, sigma=0.3, slow=1, factor=1.3)
    found = course(CAFFENET, cluster(16, 10e9, 25e-6), at)
    assert sum(found.staleness) == pytest.approx(1)
    if name in ("sync", "ssp:1"):
        assert found.staleness[int(at.slack)] == 1
        assert found.mean_staleness == at.slack
    elif name == "ssp:4":
        assert found.staleness[4] > 0.01
        assert sum(found.staleness[5:]) == 0
        assert 1 < found.mean_staleness < 4
    else:
        assert found.staleness[-1] > 0.01


def test_more_slack_is_faster_where_times_vary() -> None:
    nodes = cluster(16, 10e9, 25e-6)
    at = Servers(every=100, servers=16, sigma=0.2)
    sync, ssp1, ssp4, free = (
        course(CAFFENET, nodes, at._replace(slack=slack)) for slack in CONSISTENCY.values()
    )
    assert sync.seconds > 1.05 * ssp1.seconds
    assert ssp1.seconds > 1.03 * ssp4.seconds
    assert ssp4.seconds > free.seconds
    assert sync.others > ssp4.others > free.others == 0


def test_a_slow_node_holds_up_all_but_those_without_bound() -> None:
    nodes = cluster(8, 45e9)
    at = Servers(every=100, servers=8, slow=1, factor=2)
    usual = 100 * 4.2e-3
    assert course(CAFFENET, nodes, at).seconds > 2 * usual
    bound = course(CAFFENET, nodes, at._replace(slack=4))
    assert bound.seconds == pytest.approx(2 * usual, rel=0.02)
    assert bound.others == pytest.approx(7 / 16, rel=0.05)
    free = course(CAFFENET, nodes, at._replace(slack=inf))
    assert free.seconds == pytest.approx(usual * 8 / 7.5, rel=0.02)


def test_what_limits_is_named() -> None:
    def limit(text: str) -> str:
        return served_point(CAFFENET, *parse(text), 256).bottleneck

    assert limit("nodes=4 gpus=1 nic=1x100 sync=ps every=4000") == "computing"
    assert limit("nodes=9 gpus=1 nic=1x10 sync=ps") == "bandwidth of the servers' links"
    assert limit("nodes=2 gpus=1 nic=1x10 sync=ps servers=16") == "bandwidth of the nodes' links"
    assert limit("nodes=16 gpus=1 nic=8x400 sync=ps servers=16") == "memory of the servers"
    assert limit("nodes=2 gpus=8 nic=8x400 sync=ps servers=9 consistency=async every=99") == (
        "bandwidth in the node"
    )
    assert limit("nodes=8 gpus=1 nic=1x100 sync=ps servers=8 every=999 straggler=0.2") == (
        "waiting for slower nodes"
    )
    tiny = Load(1e3, 1e-3, 0.0, 1.0)
    there = parse("nodes=2 gpus=1 nic=1x100 sync=ps latency=900us")
    assert served_point(tiny, *there, 256).bottleneck == "latency"


def test_clusters_are_parsed() -> None:
    found, at = parse(f"{EXAMPLE} straggler=0.2 slow=3:1.5 filters=bf16+significant:1.6")
    assert found == (64, 8, pytest.approx(10e9 / 8), 25e-6)
    assert at == Servers(4, 25, 16, 2, 0.2, 3, 1.5, 0.1, 0.5)
    assert parse("nodes=2 gpus=1 nic=1x10 sync=ps")[1] == Servers(0, 1, 2, 2)
    assert parse("nodes=2 gpus=1 nic=1x10 sync=ps servers=1")[1].replicas == 1
    there = "nodes=2 gpus=1 nic=1x10 sync=ps"
    assert parse(f"{there} filters=bf16")[1][-2:] == (0.5, 0.5)
    assert parse(f"{there} filters=significant:1.6")[1][-2:] == (1 / 6, 1.0)
    assert asks("nodes=2,sync=ps")
    assert not asks("nodes=2 gpus=8 nic=8x400")


@pytest.mark.parametrize(
    ("text", "told"),
    {
        "nodes=1025": "up to 1024 nodes",
        "nodes=2 disks=3": "'disks=3' is not a part of a cluster such as 'nodes=64 .* sync=ps",
        "nodes=2 every=2 every=3": "'every=3' is not a part",
        "nodes=2 consistency=ssp": "consistency=ssp is none of sync, ssp:S, async",
        "nodes=2 every=0": "every=0 is no number of 1 to 100000",
        "nodes=2 every=2.5": "every=2.5 is no whole number",
        "nodes=2 servers=x": "servers=x is no number of 1 to 1024",
        "nodes=2 servers=2 replicas=3": "replicas=3 is no number of 1 to 2",
        "nodes=2 straggler=0.6": "straggler=0.6 is no number of 0 to 0.5",
        "nodes=2 slow=3:2": "slow=3 is no number of 0 to 2",
        "nodes=2 slow=1": "slow=- is no number of 1 to 1000",
        "nodes=2 slow=1:0.5": "slow=0.5 is no number of 1 to 1000",
        "nodes=2 filters=zlib": "filters=zlib is none of bf16, significant:T",
        "nodes=2 filters=bf16:2": "filters=bf16:2 is none of bf16",
        "nodes=2 filters=significant": "significant=0 is no number of 0.1 to 100",
    }.items(),
)
def test_what_is_no_cluster_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"--simulate: .*{told}"):
        parse(f"{text} gpus=8 nic=1x100 sync=ps")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(MEASURED))
    command = ["bench", "scaling", "--model", "caffenet", "--measured", str(path), "--simulate"]
    command.append("nodes=48 gpus=8 nic=1x100 sync=ps consistency=ssp:4 every=25 filters=bf16")
    assert main.run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("10.00 GB/s of each node and server, 25 us a message")
    assert lines[2] == (
        "ssp:4, a clock of 25 iterations; 2 servers, 2 copies of 243.9 MB; a push of 121.9 MB, "
        "a pull of 121.9 MB"
    )
    assert len(lines) == 4 + 12 + 1
    assert lines[-1].endswith("limited by memory of the servers")
    assert main.run([*command, "--wire", "bf16"]) == 2
    assert "with sync=ps give filters=bf16" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    picture = tmp_path / "servers.png"
    assert main.run([*command, "--json", "--plot", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"]["nodes"] == 48
    assert [p["nodes"] for p in told["points"]][-1] == 1024
    assert sum(told["asked"]["histogram"]) == pytest.approx(1)
    assert picture.stat().st_size > 1000
