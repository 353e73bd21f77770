"""Network interfaces of this host, of which NCCL takes some between hosts.

It takes those that NCCL_SOCKET_IFNAME names. Without that it takes InfiniBand's (ib*), else what is
up but docker* and lo; those only if nothing else is up. A bridge to the containers or virtual
machines of this host leads to no other host.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "NCCL_SOCKET_IFNAME"
NETWORK = Path("/sys/class/net")
BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lxc", "podman", "flannel", "cali")
"""How the names of interfaces to containers and virtual machines begin."""


def up() -> list[str]:
    """Return the interfaces that are up, without the loopback; none if the system does not tell."""
    found = []
    with suppress(OSError):
        for folder in sorted(NETWORK.iterdir()):
            with suppress(OSError):
                if (folder / "operstate").read_text().strip() in ("up", "unknown"):
                    found.append(folder.name)
    return [name for name in found if name != "lo"]


def told(environment: Mapping[str, str] = os.environ) -> str:
    """Return what NCCL chooses from, in words."""
    if chosen := environment.get(VARIABLE):
        return f"{VARIABLE} is {chosen}"
    names = up()
    text = f"{VARIABLE} is not set, and up here are {', '.join(names) or 'no interfaces'}"
    if names and all(name.startswith(BRIDGES) for name in names):
        text += ", which lead to containers or virtual machines of this host"
    return text
