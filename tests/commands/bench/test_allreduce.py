import json
from pathlib import Path

import pytest

from caffepy.commands.bench.allreduce import AllReduceBench, bench_allreduce, parse_sizes, show_size
from caffepy.core.errors import UsageError


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
    with pytest.raises(UsageError):
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
