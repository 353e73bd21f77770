"""Which commands one of several processes may run."""

import sys
from collections.abc import Iterator

import click
import pytest

from caffepy.cli import main
from caffepy.cli.group import OVER_NODES, WRITES_NOTHING


def commands(
    group: click.Group, names: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))
        else:
            yield " ".join((*names, name)), command


ALL = dict(commands(main.caffepy))
FOR_ONE = sorted(ALL.keys() - OVER_NODES - WRITES_NOTHING)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")


def arguments(name: str) -> list[str]:
    """The command with a word for each argument that it needs."""
    needed = [p for p in ALL[name].params if isinstance(p, click.Argument) and p.required]
    return [*name.split(), *(f"x{i}" for i, p in enumerate(needed))]


def test_the_lists_name_commands() -> None:
    assert ALL.keys() > OVER_NODES | WRITES_NOTHING
    assert not OVER_NODES & WRITES_NOTHING
    assert {"export", "convert-imageset", "weights convert", "draw", "plot"} < set(FOR_ONE)


@pytest.mark.parametrize("name", FOR_ONE)
@pytest.mark.usefixtures("one_of_two")
def test_commands_that_write_are_for_one_process(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = [
        f"--{p.name}=x" for p in ALL[name].params if isinstance(p, click.Option) and p.required
    ]
    assert main.run([*arguments(name), *needed]) == 2
    told = capsys.readouterr().err
    assert (
        f"caffepy {name} is for one process, but this is one of 2 (OMPI_COMM_WORLD_SIZE=2): start "
        "it without mpirun or srun" in told
    ), told


@pytest.mark.parametrize("name", sorted(WRITES_NOTHING | OVER_NODES))
@pytest.mark.usefixtures("one_of_two")
def test_others_are_not_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # MPI stays out of this process, where it would listen until the end.
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    main.run(arguments(name))
    assert "is for one process" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("one_of_two")
def test_all_show_their_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*name.split(), "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


@pytest.mark.usefixtures("one_of_two")
def test_one_of_several_simulates_none(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = ["--simulate", "nodes=2 gpus=8 nic=8x400"]
    assert main.run(["bench", "scaling", "--model", "caffenet", *simulate]) == 2
    assert "caffepy bench scaling --simulate is for one process" in capsys.readouterr().err
