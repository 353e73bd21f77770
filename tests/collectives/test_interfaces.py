"""What is said of network interfaces where NCCL connects several hosts."""

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
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
from tests.collectives.threads_world import Wires, run_nodes
from tests.solver.cases import NET, SETTINGS, solver_of

__all__ = ["nccl_sync"]

BRIDGED = ", which lead to containers or virtual machines of this host"


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(interfaces, "NETWORK", tmp_path / "net")
    monkeypatch.setattr(interfaces, "INFINIBAND", tmp_path / "infiniband")
    for name in (interfaces.VARIABLE, interfaces.HOST_ID, *interfaces.LOG):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "net").mkdir()
    return tmp_path / "net"


def add(network: Path, **states: str) -> None:
    for name, state in states.items():
        (network / name).mkdir()
        (network / name / "operstate").write_text(f"{state}\n")


def test_interfaces_that_are_up(network: Path) -> None:
    add(network, lo="unknown", eth0="up", eth1="down", docker0="up", tun0="unknown")
    (network / "bonding_masters").write_text("")
    unset = "NCCL_SOCKET_IFNAME is not set, and up here are"
    assert interfaces.choices() == f"{unset} docker0, eth0, tun0"
    assert interfaces.choices({interfaces.VARIABLE: "ib0"}) == "NCCL_SOCKET_IFNAME is ib0"


def test_bridges_alone_are_named(network: Path) -> None:
    add(network, lo="unknown", docker0="up", virbr0="up", eth0="down")
    assert interfaces.choices().endswith(f"docker0, virbr0{BRIDGED}")


def test_bandwidth_is_that_of_the_fastest_interface_that_nccl_may_take(network: Path) -> None:
    add(network, lo="unknown", eth0="up", eth1="up", eth2="down", docker0="up", tun0="unknown")
    speeds = {"eth0": 10_000, "eth1": 100_000, "eth2": 400_000, "docker0": 900_000, "tun0": -1}
    for name, speed in speeds.items():
        (network / name / "speed").write_text(f"{speed}\n")
    for chosen, gbit in (("", 100), ("eth0", 10), ("=eth0:1,eth2", 10), ("^eth1,docker", 10)):
        found = interfaces.bandwidth({interfaces.VARIABLE: chosen})
        assert found == pytest.approx(0.8 * gbit * 1e9 / 8)
    assert interfaces.bandwidth({interfaces.VARIABLE: "tun0"}) == interfaces.ASSUMED


def test_bandwidth_of_all_nics_with_rdma(network: Path) -> None:
    for number, (state, rate) in enumerate(
        [("4: ACTIVE", "400 Gb/sec (4X NDR)"), ("1: DOWN", "400 Gb/sec"), ("4: ACTIVE", "200 Gb/s")]
    ):
        port = network.parent / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert interfaces.bandwidth({}) == pytest.approx(0.9 * 600e9 / 8)
    assert interfaces.bandwidth({"NCCL_IB_DISABLE": "1"}) == interfaces.ASSUMED


def test_a_system_that_tells_nothing(network: Path) -> None:
    network.rmdir()
    assert interfaces.bandwidth({}) == interfaces.ASSUMED
    assert interfaces.choices().endswith("up here are no interfaces")


def join(nccl_sync: Any, world: World, seconds: float = 30) -> None:
    """Join the other nodes by NCCL, with a deadline."""
    world.join(1)
    group = RankGroup(1, {"set-up": seconds}, world)
    group.watch_nodes()
    try:
        nccl_sync(group, 0, partial(group.all_gather, 0), flat_params(solver_of(SETTINGS, NET)))
    finally:
        group.leave_nodes()


def test_where_nccl_cannot_connect_hosts_the_error_says_what_to_set(
    nccl_sync: Any, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("NCCL_ERROR_SYSTEM_ERROR")

    node = partial(join, nccl_sync)
    add(network, docker0="up")
    monkeypatch.setattr(Communicator, "__init__", fail)
    told = f"NCCL_SOCKET_IFNAME is not set, and up here are docker0{BRIDGED}"
    for error in run_nodes(2, node):
        assert isinstance(error, SyncError)
        assert str(error) == (
            "NCCL failed (NCCL_ERROR_SYSTEM_ERROR); if it cannot connect the 2 hosts, name the "
            f"interface to the others on each of them: NCCL_SOCKET_IFNAME=eth0 ({told}); "
            "NCCL_DEBUG=INFO tells more"
        )
    (alone,) = run_nodes(1, node)
    assert str(alone) == "NCCL failed (NCCL_ERROR_SYSTEM_ERROR); NCCL_DEBUG=INFO tells more"


SOCKET = "NET/Socket : Using [0]eth0:10.0.0.1<0>"
LOGS = {
    "socket": ((SOCKET, "Using network Socket"), "eth0 10.0.0.1 (Socket)", ["eth0"]),
    "two": (
        ("NET/Socket : Using [0]ens3:10.1.0.7<0> [1]docker0:172.17.0.1<0>", "Using network Socket"),
        "ens3 10.1.0.7, docker0 172.17.0.1 (Socket)",
        ["ens3", "docker0"],
    ),
    "6": (
        ("NET/Socket: Using [0]eth0:fe80::1%eth0<0>", "Using network Socket"),
        "eth0 fe80::1%eth0 (Socket)",
        ["eth0"],
    ),
    "2.28": (
        (
            "NET/Plugin: Could not find: libnccl-net.so",
            "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>",
            "Initialized NET plugin IB",
            "Assigned NET plugin IB to comm",
            "Using network IB",
        ),
        "mlx5_0:1/IB (IB)",
        ["eth0"],
    ),
    "merged": (
        (
            "NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [1]={[2] mlx5_0:1/IB/SHARP} "
            "[RO]; OOB bond0.526:169.136.106.9<0>",
            "Using non-device net plugin version 0",
            "Using network IBext_v8",
        ),
        "mlx5_2:1/RoCE, mlx5_3:1/RoCE, mlx5_0:1/IB/SHARP (IBext_v8)",
        ["bond0.526"],
    ),
    "no InfiniBand": (
        ("NET/IB : No device found.", SOCKET, "Using network Socket"),
        "eth0 10.0.0.1 (Socket)",
        ["eth0"],
    ),
    "a plugin": (("Using network AWS Libfabric",), "AWS Libfabric", []),
    "bootstrap only": (("Bootstrap: Using eth0:10.0.0.1<0>",), "None", []),
}


def nccl_log(lines: Sequence[str]) -> str:
    return "".join(f"gpu01:984:1{i} [{i}] NCCL INFO {line}\n" for i, line in enumerate(lines))


@pytest.mark.parametrize("name", LOGS)
def test_what_nccls_log_tells(name: str) -> None:
    lines, text, names = LOGS[name]
    found = interfaces.network(nccl_log(lines))
    assert str(found) == text
    assert list(found.interfaces if found else ()) == names


def test_interfaces_that_lead_to_no_other_host(network: Path) -> None:
    add(network, docker0="up", ens3="up")
    lines, _, _ = LOGS["two"]
    found = interfaces.network(nccl_log(lines))
    assert found
    assert found.warning == (
        "NCCL took docker0, which leads to no other host: name the interface to the others on each "
        "of them, such as NCCL_SOCKET_IFNAME=ens3"
    )
    loopback = interfaces.Network("Socket", "lo 127.0.0.1", ("lo",))
    assert loopback.warning.startswith("NCCL took lo, which")
    assert not interfaces.Network("Socket", "eth0 10.0.0.1", ("eth0",)).warning


def test_processes_that_nccl_takes_for_hosts() -> None:
    assert interfaces.between_hosts(["a", "b"], {})
    assert not interfaces.between_hosts(["a", "a"], {})
    assert interfaces.between_hosts(["a", "a"], {interfaces.HOST_ID: "x"})
    assert not interfaces.between_hosts(["a"], {interfaces.HOST_ID: "x"})
    assert interfaces.host("a", {}) == "a"
    assert interfaces.host("a", {interfaces.HOST_ID: "x"}) == "x"


def test_a_log_that_the_user_asks_for_stays() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    with interfaces.NcclLog(True, environment) as told:
        assert environment == {"NCCL_DEBUG": "WARN"}
    assert told.network is None


def test_a_log_that_cannot_be_read() -> None:
    environment: dict[str, str] = {}
    with interfaces.NcclLog(True, environment) as told:
        Path(environment["NCCL_DEBUG_FILE"]).unlink()
    assert told.network is None
    assert environment == {}


def test_what_nccl_took_is_logged(
    nccl_sync: Any,
    network: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin, files = Communicator.__init__, set[Path]()

    def connect(self: Communicator, *arguments: Any) -> None:
        if path := os.environ.get("NCCL_DEBUG_FILE"):
            Path(path).write_text(nccl_log(LOGS["two"][0]))
            files.add(Path(path))
        begin(self, *arguments)

    monkeypatch.setattr(Communicator, "__init__", connect)
    caplog.set_level(logging.INFO, "caffepy")
    add(network, ens3="up", docker0="up")
    assert run_nodes(2, partial(join, nccl_sync)) == [None, None]
    took = "NCCL goes from host to host by ens3 10.1.0.7, docker0 172.17.0.1 (Socket)"
    assert took in caplog.messages
    assert any("NCCL took docker0" in message for message in caplog.messages)
    assert files
    assert not any(path.exists() for path in files)
    assert "NCCL_DEBUG" not in os.environ
    caplog.clear()
    files.clear()
    assert run_nodes(1, partial(join, nccl_sync)) == [None]
    assert not files
    assert not any("NCCL" in message for message in caplog.messages)


# ranks that do not come while a communicator is made


def test_a_node_that_never_comes_is_named(
    nccl_sync: Any, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def wait(*arguments: object) -> None:
        assert ended.wait(30)

    def node(world: World) -> None:
        if world.node:  # it calls what NcclSync does before, and hangs
            world.join(1)
            world.gather([None])
            world.barrier()
            ended.wait(30)
            return
        try:
            join(nccl_sync, world, 1)
        finally:
            ended.set()

    monkeypatch.setattr(Communicator, "__init__", wait)
    begun = time.monotonic()
    error, _ = run_nodes(2, node)
    assert isinstance(error, SyncError)
    assert str(error) == ("node 1 (host host1, universal rank 1) made no progress for 1 s (set-up)")
    assert time.monotonic() - begun < 10


def test_nccl_is_named_where_all_wait_for_it(
    nccl_sync: Any,
    network: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    def wait(*arguments: object) -> None:
        assert ended.wait(30)

    add(network, docker0="up")
    monkeypatch.setattr(Communicator, "__init__", wait)
    monkeypatch.setattr(sys.modules[nccl_sync.__module__], "SLOW", 0.2)
    errors = run_nodes(2, lambda world: join(nccl_sync, world, 1))
    ended.set()
    for error in errors:
        assert isinstance(error, SyncError)
        assert error.exit_code == 7
        assert str(error).startswith(
            "NCCL made no progress for 1 s (set-up); if it cannot connect the 2 hosts, name the "
            "interface to the others on each of them: NCCL_SOCKET_IFNAME=eth0 ("
        )
    told = [m for m in caplog.messages if m.startswith("NCCL has not connected all nodes yet; if")]
    assert len(told) == 2


def test_a_first_use_that_does_not_end_is_told(
    nccl_sync: Any,
    network: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some connections are made in the first collective."""
    module = sys.modules[nccl_sync.__module__]
    monkeypatch.setattr(module, "SLOW", 0.2)
    monkeypatch.setattr(module.nccl, "groupEnd", lambda: time.sleep(0.5))
    monkeypatch.setattr(Communicator, "meet", threading.Barrier(2, timeout=30))

    def node(world: World) -> None:
        threading.current_thread().name = str(world.node)
        world.join(1)
        group = RankGroup(1, world=world)
        params = flat_params(solver_of(SETTINGS, NET))
        nccl_sync(group, 0, partial(group.all_gather, 0), params).on_start()

    monkeypatch.setattr(Communicator, "given", [0, 0])
    assert run_nodes(2, node) == [None, None]
    told = [m for m in caplog.messages if m.startswith("NCCL has not connected all nodes yet; if")]
    assert len(told) == 2


def test_a_death_ends_the_wait_for_nccl(
    nccl_sync: Any, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, wires = threading.Event(), Wires(2)

    def wait(communicator: object, size: int, unique_id: bytes, rank: int) -> None:
        if rank == 1:
            wires.kill(1)
        assert ended.wait(30)

    monkeypatch.setattr(Communicator, "__init__", wait)

    def node(world: World) -> None:
        try:
            join(nccl_sync, world, 600 if world.node == 0 else 1)
        finally:
            if world.node == 0:
                ended.set()

    error, _ = run_nodes(2, node, wires)
    assert isinstance(error, SyncError)
    assert str(error) == "node 1 (host host1, universal rank 1) has died"
