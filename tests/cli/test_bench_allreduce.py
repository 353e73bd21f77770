import json

from click.testing import CliRunner

from caffepy.cli.bench_allreduce import allreduce


def test_the_command_prints_a_table_or_json() -> None:
    table = CliRunner().invoke(allreduce, ["--cpu", "2", "--sizes", "4K", "--sync", "tree"], catch_exceptions=False)
    assert table.exit_code == 0
    assert "tree GB/s" in table.stdout
    told = CliRunner().invoke(allreduce, ["--cpu", "2", "--sizes", "4K", "--json"], catch_exceptions=False)
    assert json.loads(told.stdout.splitlines()[-1])["ranks"] == 2


def test_gpus_or_threads_not_both() -> None:
    result = CliRunner().invoke(allreduce, ["--cpu", "2", "--gpu", "0"])
    assert result.exit_code == 2
    assert "not both" in result.output
