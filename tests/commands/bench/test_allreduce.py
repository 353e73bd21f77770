import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caffepy.collectives.sync import HostSync
from caffepy.commands.bench.allreduce import AllReduceBench, bench_allreduce, parse_sizes, show_size
from caffepy.core.errors import SyncError, UsageError

Nodes = Callable[[int, Callable[[int], Any]], list[Any]]


def test_sizes_are_lists_and_ranges() -> None:
    assert parse_sizes("64K..512K") == [1 << 16, 1 << 17, 1 << 18, 1 << 19]
    assert parse_sizes("100, 1M,3M..8M") == [100, 1 << 20, 3 << 20, 6 << 20]
    assert [show_size(size) for size in (100, 1 << 16, 3 << 20, 1 << 30)] == [
        "100",
        "64K",
        "3M",
        "1G",
    ]


@pytest.mark.parametrize("text", ["", "64X", "0", "1M..64K", "1K..2K..4K", "6", "-4"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not a (size|range of sizes) such as|floats of 4 bytes"
    ):
        parse_sizes(text)


@pytest.fixture(scope="module")
def result() -> AllReduceBench:
    return bench_allreduce(cpu=4, sizes="4K,8K")


def test_all_ways_of_the_cpu_are_timed(result: AllReduceBench) -> None:
    assert [(t.sync, t.bytes) for t in result.timings] == [
        (name, size) for name in ("tree", "muji", "flat") for size in (4096, 8192)
    ]
    assert result.left_out == {"nccl": "NCCL is for GPUs"}
    for timing in result.timings:
        assert timing.ms > 0
        assert timing.algorithm_gb_s == pytest.approx(timing.bytes / timing.ms / 1e6)
        assert timing.bus_gb_s == pytest.approx(timing.algorithm_gb_s * 1.5)


def test_the_result_as_a_table_and_as_json(result: AllReduceBench) -> None:
    lines = result.table().splitlines()
    assert lines[0].startswith("All-reduce of 4 ranks on the CPU")
    assert (
        " ".join(lines[1].split()) == "size tree us muji us flat us tree GB/s muji GB/s flat GB/s"
    )
    assert [line.split()[0] for line in lines[2:]] == ["4K", "8K", "nccl:"]
    told = json.loads(result.json())
    assert told["ranks"] == 4
    assert set(told["timings"][0]) == {
        "sync",
        "bytes",
        "ms",
        "captured",
        "algorithm_gb_s",
        "bus_gb_s",
    }


def test_the_result_as_a_plot(result: AllReduceBench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result.plot(str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("gone/bench.png", 'cannot write ".*gone/bench.png": no such file'), ("bench.x", "extension")],
)
def test_a_plot_that_cannot_be_written(
    name: str, problem: str, result: AllReduceBench, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=problem):
        result.plot(f"{tmp_path}/{name}")


def test_only_what_is_named_is_timed_and_must_be_there() -> None:
    found = bench_allreduce(cpu=3, sync="flat", sizes="4K")
    assert [t.sync for t in found.timings] == ["flat"]
    with pytest.raises(UsageError, match="muji"):
        bench_allreduce(cpu=3, sync="flat,muji", sizes="4K")
    assert (
        bench_allreduce(cpu=3, sizes="4K")
        .left_out["muji"]
        .startswith("it is for 2, 4 or 8 devices")
    )


def test_ranks_of_several_nodes(as_nodes: Nodes) -> None:
    first, second = as_nodes(2, lambda number: bench_allreduce(cpu=1 + number, sizes="4K,8K"))
    assert isinstance(first, AllReduceBench), first
    assert first == second
    assert (first.ranks, first.devices) == (3, "the CPU of 2 nodes")
    assert {t.sync for t in first.timings} == {"tree", "flat"}
    assert "muji" in first.left_out


def test_a_wrong_mean_on_one_node_ends_all(
    as_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = HostSync.reduce

    def wrong(self: HostSync, count: int) -> None:
        reduce(self, count)
        if self.universal_rank == 1:
            self._diffs[1][:count] += 1

    monkeypatch.setattr(HostSync, "reduce", wrong)
    first, second = as_nodes(2, lambda number: bench_allreduce(cpu=1, sizes="4K", sync="flat"))
    assert "the mean of 1024 numbers in rank 1 (host host1) is wrong" in str(first)
    assert isinstance(second, SystemExit | SyncError)
