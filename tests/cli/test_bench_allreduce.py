import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from caffepy.cli.bench_allreduce import allreduce
from caffepy.core.errors import UsageError


def test_the_command_prints_a_table_or_json() -> None:
    table = CliRunner().invoke(
        allreduce, ["--cpu", "2", "--sizes", "4K", "--sync", "tree"], catch_exceptions=False
    )
    assert table.exit_code == 0
    assert "tree GB/s" in table.stdout
    told = CliRunner().invoke(
        allreduce, ["--cpu", "2", "--sizes", "4K", "--json"], catch_exceptions=False
    )
    assert json.loads(told.stdout.splitlines()[-1])["ranks"] == 2


def test_gpus_or_threads_not_both() -> None:
    result = CliRunner().invoke(allreduce, ["--cpu", "2", "--gpu", "0"])
    assert result.exit_code == 2
    assert "not both" in result.output


def test_a_plot_that_cannot_be_written_is_told_before_anything_is_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(allreduce, ["--gpu", "77", "--plot", f"{tmp_path}/gone/plot.png"])
    assert isinstance(result.exception, UsageError)
    assert "cannot write" in str(result.exception)
