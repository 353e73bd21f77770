"""Network interfaces of this host, which of them NCCL takes between hosts, and what they carry.

It takes those that NCCL_SOCKET_IFNAME names. Without that it takes InfiniBand's (ib*), else what is
up but docker* and lo; those only if nothing else is up. A bridge to the containers or virtual
machines of this host leads to no other host.

Which it has taken stands only in its own log (NCCL_DEBUG), in lines such as

    a:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>
    a:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    a:7:9 [0] NCCL INFO Using network IB

of which the last one tells which network it is. OOB is the interface that InfiniBand begins with.
"""

import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "NCCL_SOCKET_IFNAME"
HOST_ID = "NCCL_HOSTID"
"""NCCL takes processes whose values differ for those of several hosts."""

LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": ""}
NETWORK = Path("/sys/class/net")
BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lxc", "podman", "flannel", "cali")
"""Beginnings of the names of interfaces to containers and virtual machines."""

INFINIBAND = Path("/sys/class/infiniband")
"""NICs with RDMA, those of RoCE among them."""

RDMA, TCP = 0.9, 0.8
"""Part of a NIC's bits that arrives."""

ASSUMED = TCP * 100e9 / 8
"""Bytes a second of a host whose system does not tell, as that of a virtual machine."""


def up() -> list[str]:
    """Return the interfaces that are up, without the loopback; none if the system does not tell."""
    found = []
    with suppress(OSError):
        for folder in sorted(NETWORK.iterdir()):
            with suppress(OSError):
                if (folder / "operstate").read_text().strip() in ("up", "unknown"):
                    found.append(folder.name)
    return [name for name in found if name != "lo"]


def between_hosts(hosts: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """True if NCCL goes from host to host where nodes are on these: they differ, or NCCL_HOSTID,
    which all nodes have or none, makes them differ.
    """
    return len(set(hosts)) > 1 or (len(hosts) > 1 and HOST_ID in environment)


def host(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what tells a node's host from others for NCCL: NCCL_HOSTID, else the host's name."""
    return environment.get(HOST_ID, name)


class Network(NamedTuple):
    """Network that NCCL took: its name, such as Socket or IB, the devices or interfaces that it
    uses, and the names of all interfaces that sockets use.
    """

    name: str
    used: str
    interfaces: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.used} ({self.name})" if self.used else self.name

    @property
    def warning(self) -> str:
        """Words on interfaces that lead to no other host; empty if there are none."""
        wrong = [name for name in self.interfaces if name == "lo" or name.startswith(BRIDGES)]
        if not wrong:
            return ""
        right = next((name for name in up() if not name.startswith(BRIDGES)), "eth0")
        return (
            f"NCCL took {', '.join(wrong)}, which leads to no other host: name the interface to "
            f"the others on each of them, such as {VARIABLE}={right}"
        )


def network(log: str) -> Network | None:
    """Return the network that NCCL took, by its log; None if that names none."""
    named = re.search(r"NCCL INFO Using network (.+)", log)
    if not named:
        return None
    name = named[1].strip()
    kind = "IB" if name.startswith("IB") else re.escape(name)
    using = re.search(rf"NCCL INFO NET/{kind} ?: Using (.+)", log)
    names = using[1] if using else ""
    sockets = re.findall(r"([^\s\]]+?):(\S+)<\d+>", names)
    devices = re.findall(r"[\w.-]+:\d+/[\w/]+", names)
    used = devices or [f"{interface} {address}" for interface, address in sockets]
    return Network(name, ", ".join(used), tuple(interface for interface, _ in sockets))


class NcclLog:
    """A block in which NCCL connects hosts, and logs to a file of which nothing is left.

    NCCL reads its variables when it first logs, which must be in the block. It goes on writing to
    the removed file; of these subsystems that is little. Nothing is done unless it is `wanted`, or
    where the user asks for a log.
    """

    def __init__(self, wanted: bool, environment: MutableMapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._wanted = wanted and not any(name in environment for name in LOG)
        self._path: Path | None = None
        self._network: Network | None = None

    def __enter__(self) -> "NcclLog":
        if self._wanted:
            with suppress(OSError):
                handle, path = tempfile.mkstemp(prefix="caffepy-nccl-", suffix=".log")
                os.close(handle)
                self._path = Path(path)
                self._environment.update({**LOG, "NCCL_DEBUG_FILE": path})
        return self

    @property
    def network(self) -> Network | None:
        """The network that NCCL took, if the log names it."""
        if self._path and not self._network:
            with suppress(OSError):
                self._network = network(self._path.read_text(errors="replace"))
        return self._network

    def __exit__(self, *error: object) -> None:
        if self._path:
            self._network = self.network
            for name in LOG:  # other processes should not get them
                self._environment.pop(name, None)
            with suppress(OSError):
                self._path.unlink()
            self._path = None


def choices(environment: Mapping[str, str] = os.environ) -> str:
    """Return, as text, the interfaces that NCCL chooses from, until it is known which it took."""
    if chosen := environment.get(VARIABLE):
        return f"{VARIABLE} is {chosen}"
    names = up()
    text = f"{VARIABLE} is not set, and up here are {', '.join(names) or 'no interfaces'}"
    if names and all(name.startswith(BRIDGES) for name in names):
        text += ", which lead to containers or virtual machines of this host"
    return text


def bandwidth(environment: Mapping[str, str] = os.environ) -> float:
    """Return the bytes a second that go from this host to others, as the speeds of its interfaces
    tell: those of all NICs with RDMA, else the fastest interface that NCCL may take.
    """
    if environment.get("NCCL_IB_DISABLE", "0") == "0":
        ports = [_read(port / "rate") for port in INFINIBAND.glob("*/ports/*") if _is_active(port)]
        if gbit := sum(float(rate[1]) for rate in map(_NUMBER.match, ports) if rate):
            return RDMA * gbit * 1e9 / 8
    chosen = environment.get(VARIABLE, "")
    listed = [name.partition(":")[0] for name in chosen.lstrip("^=").split(",") if name]
    if chosen and not chosen.startswith("^"):
        names = [name for name in up() if name.startswith(tuple(listed))]
    else:
        names = [name for name in up() if not name.startswith((*BRIDGES, *listed))]
    speeds = [_NUMBER.match(_read(NETWORK / name / "speed")) for name in names]
    mbit = max((float(speed[1]) for speed in speeds if speed), default=0.0)
    return TCP * mbit * 1e6 / 8 or ASSUMED


_NUMBER = re.compile(r"([0-9.]+)")


def _is_active(port: Path) -> bool:
    return "ACTIVE" in _read(port / "state")


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
