"""Links as NVML reports them, by an NVML that is not there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.collectives import links
from tests import fake_cupy

FAILED = 3


class Nvml:
    """Stand-ins for GPUs on buses 1, 2, ... that CUDA may number otherwise.

    `ends[a]` are the buses at which GPU a's active links end, 99 being a switch; `switched` pairs
    reach each other by NVLink, `levels` are those of other pairs.
    """

    def __init__(
        self, gpus: int, ends: dict[int, list[int]], switched: bool = False, level: int = 50
    ) -> None:
        self.ends, self.switched, self.level = ends, switched, level
        self.running = 0
        self.handles = {f"0000:{bus:02x}:00.0".encode(): bus for bus in range(1, gpus + 1)}

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.running += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.running -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, name: bytes, into: Any) -> int:  # noqa: N802
        if name not in self.handles:
            return FAILED
        into._obj.value = self.handles[name]
        return 0

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, into: Any) -> int:  # noqa: N802
        into._obj.value = int(link < len(self.ends.get(handle.value, ())))
        return 0 if link < 12 else FAILED

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, into: Any) -> int:  # noqa: N802
        into._obj.bus = self.ends[handle.value][link]
        return 0

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, what: int, into: Any) -> int:  # noqa: N802
        assert what == 2
        into._obj.value = 0 if self.switched else 4
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any, into: Any) -> int:  # noqa: N802
        into._obj.value = self.level
        return 0


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Asks an NVML about GPUs that CUDA has on these buses."""

    def asked(nvml: Any, *buses: int) -> Any:
        cupy = fake_cupy.install(monkeypatch, gpus=len(buses))
        cupy.cuda.runtime.deviceGetPCIBusId = lambda device: f"0000:{buses[device]:02x}:00.0"
        found = links.query(range(len(buses)), nvml)
        assert not getattr(nvml, "running", 0)
        return found

    return asked


def test_links_between_two_gpus_are_counted(ask: Callable[..., Any]) -> None:
    nvml = Nvml(3, {1: [2, 2, 3], 2: [1, 1], 3: [1]}, level=40)
    assert ask(nvml, 1, 2, 3) == [
        [None, "NV2", "NV1"],
        ["NV2", None, "NODE"],
        ["NV1", "NODE", None],
    ]


def test_gpus_are_found_by_their_bus_whatever_their_number_is(ask: Callable[..., Any]) -> None:
    nvml = Nvml(3, {1: [2, 2, 3], 2: [1, 1], 3: [1]}, level=10)
    assert ask(nvml, 3, 1) == [[None, "NV1"], ["NV1", None]]
    assert ask(nvml, 3, 2) == [[None, "PIX"], ["PIX", None]]


def test_links_to_switches_join_all(ask: Callable[..., Any]) -> None:
    nvml = Nvml(2, {1: [99] * 12, 2: [99] * 11}, switched=True)
    assert ask(nvml, 1, 2) == [[None, "NV11"], ["NV11", None]]


@pytest.mark.parametrize(
    ("level", "name"),
    [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (77, None)],
)
def test_how_much_of_the_host_lies_between(
    ask: Callable[..., Any], level: int, name: str | None
) -> None:
    assert ask(Nvml(2, {}, switched=True, level=level), 1, 2) == [[None, name], [name, None]]


def test_nvml_that_is_missing_old_or_unwilling(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(Nvml(1, {}), 1, 2) is None  # a GPU that it does not have
    assert ask(SimpleNamespace(), 1) is None
    assert ask(SimpleNamespace(nvmlInit_v2=lambda: FAILED), 1) is None
    monkeypatch.setattr(links, "LIBRARY", "libnvidia-none.so")
    assert ask(None, 1) is None
