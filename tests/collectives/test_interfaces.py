"""What is said of network interfaces where NCCL connects several hosts."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from caffepy.collectives import interfaces
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.world import World
from caffepy.core.errors import SyncError
from caffepy.parallel.synchronization import flat_params
from tests.collectives.test_nccl import Communicator, nccl_sync
from tests.collectives.threads_world import run_nodes
from tests.solver.cases import NET, SETTINGS, solver_of

__all__ = ["nccl_sync"]

BRIDGED = ", which lead to containers or virtual machines of this host"


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(interfaces, "NETWORK", tmp_path)
    monkeypatch.delenv(interfaces.VARIABLE, raising=False)
    return tmp_path


def add(network: Path, **states: str) -> None:
    for name, state in states.items():
        (network / name).mkdir()
        (network / name / "operstate").write_text(f"{state}\n")


def test_interfaces_that_are_up(network: Path) -> None:
    add(network, lo="unknown", eth0="up", eth1="down", docker0="up", tun0="unknown")
    (network / "bonding_masters").write_text("")
    unset = "NCCL_SOCKET_IFNAME is not set, and up here are"
    assert interfaces.told() == f"{unset} docker0, eth0, tun0"
    assert interfaces.told({interfaces.VARIABLE: "ib0"}) == "NCCL_SOCKET_IFNAME is ib0"


def test_bridges_alone_are_named(network: Path) -> None:
    add(network, lo="unknown", docker0="up", virbr0="up", eth0="down")
    assert interfaces.told().endswith(f"docker0, virbr0{BRIDGED}")


def test_a_system_that_tells_nothing(network: Path) -> None:
    network.rmdir()
    assert interfaces.told().endswith("up here are no interfaces")


def test_where_nccl_cannot_connect_hosts_the_error_says_what_to_set(
    nccl_sync: Any,
    network: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("NCCL_ERROR_SYSTEM_ERROR")

    def node(world: World) -> None:
        world.join(1)
        group = RankGroup(1, world=world)
        nccl_sync(group, 0, partial(group.all_gather, 0), flat_params(solver_of(SETTINGS, NET)))

    add(network, docker0="up")
    monkeypatch.setattr(Communicator, "__init__", fail)
    caplog.set_level(logging.DEBUG, "caffepy")
    told = f"NCCL_SOCKET_IFNAME is not set, and up here are docker0{BRIDGED}"
    for error in run_nodes(2, node):
        assert isinstance(error, SyncError)
        assert str(error) == (
            "NCCL failed (NCCL_ERROR_SYSTEM_ERROR); if it cannot connect the 2 hosts, name the "
            f"interface to the others on each of them: NCCL_SOCKET_IFNAME=eth0 ({told}); "
            "NCCL_DEBUG=INFO tells more"
        )
    assert caplog.messages.count(f"NCCL connects 2 hosts: {told}") == 1
    (alone,) = run_nodes(1, node)
    assert str(alone) == "NCCL failed (NCCL_ERROR_SYSTEM_ERROR); NCCL_DEBUG=INFO tells more"
