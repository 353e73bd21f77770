import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from caffepy.collectives import peers
from caffepy.collectives.schedule import flat, partners, tree
from caffepy.collectives.topology import Topology
from caffepy.core.errors import DeviceError, SyncError
from tests import fake_cupy
from tests.collectives.test_topology import topology


def test_access_that_damages_data_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = []

    def verify(source: int, destination: int) -> None:
        checked.append((source, destination))
        if (source, destination) == (2, 1):
            raise SyncError("7 bytes arrived damaged")

    monkeypatch.setattr(peers, "_enabled", lambda *_: nullcontext())
    monkeypatch.setattr(peers, "verify", verify)
    monkeypatch.setattr(peers.os, "environ", {})
    whole = topology(3)
    found = peers.prepare(whole)
    assert checked == [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    assert found == Topology(
        (0, 1, 2), (None,) * 3, ((False, True, True), (True, False, False), (True, False, False))
    )
    assert caplog.record_tuples == [
        ("caffepy.collectives.peers", logging.WARNING, "7 bytes arrived damaged")
    ]
    assert peers.os.environ["NCCL_P2P_DISABLE"] == "1"


def test_nothing_changes_where_all_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_enabled", lambda *_: nullcontext())
    monkeypatch.setattr(peers, "verify", lambda *_: None)
    monkeypatch.setattr(peers.os, "environ", {})
    assert peers.prepare(topology(3)) == topology(3)
    assert "NCCL_P2P_DISABLE" not in peers.os.environ


class _Cuda:
    """CUDA's peer access without NVSwitch: each GPU may use the memory of eight others."""

    def __init__(self, cupy: Any) -> None:
        self.peers: dict[int, set[int]] = {}
        self._current = [0]
        cupy.cuda.Device = self.device
        cupy.cuda.runtime.deviceEnablePeerAccess = self.enable
        cupy.cuda.runtime.deviceDisablePeerAccess = self.disable

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self._current.append(index)
        yield
        self._current.pop()

    def enable(self, other: int) -> None:
        mine = self.peers.setdefault(self._current[-1], set())
        if other in mine or len(mine) == 8:
            name = "PeerAccessAlreadyEnabled" if other in mine else "TooManyPeers"
            raise fake_cupy.CUDARuntimeError(f"cudaError{name}")
        mine.add(other)

    def disable(self, other: int) -> None:
        self.peers[self._current[-1]].remove(other)


def test_more_gpus_than_may_be_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(fake_cupy.install(monkeypatch, gpus=12))

    def verify(source: int, destination: int) -> None:
        assert destination in cuda.peers[source]

    monkeypatch.setattr(peers, "verify", verify)
    whole = topology(12)
    assert peers.enable(3, [4]) == [4]
    assert peers.enable(3, [4]) == []
    assert peers.prepare(whole) == whole
    assert {device: others for device, others in cuda.peers.items() if others} == {3: {4}}
    schedule = tree(whole)
    for rank in range(12):
        peers.enable(rank, partners(schedule, rank))
    for step in (step for level in schedule for step in level):
        assert step.destination in cuda.peers[step.source]
        assert step.source in cuda.peers[step.destination]
    with pytest.raises(
        DeviceError, match=r"GPU 0 cannot use .* of GPU \d+ \(.*TooManyPeers\); --sync"
    ):
        peers.enable(0, partners(flat(whole), 0))


@pytest.mark.parametrize("size", [2, 9, 64])
def test_a_tree_has_few_partners(size: int) -> None:
    counts = [len(partners(tree(topology(size)), rank)) for rank in range(size)]
    assert 1 <= min(counts) <= max(counts) <= 8
    assert partners(flat(topology(size, 0.0)), 0) == []
