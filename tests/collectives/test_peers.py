import logging

import pytest

from caffepy.collectives import peers
from caffepy.collectives.topology import Topology
from caffepy.core.errors import SyncError
from tests.collectives.test_topology import topology


def test_access_that_damages_data_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = []

    def verify(source: int, destination: int) -> None:
        checked.append((source, destination))
        if (source, destination) == (2, 1):
            raise SyncError("7 bytes arrived damaged")

    monkeypatch.setattr(peers, "enable", lambda _: None)
    monkeypatch.setattr(peers, "verify", verify)
    monkeypatch.setattr(peers.os, "environ", {})
    whole = topology(3)
    found = peers.prepare(whole)
    assert checked == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert found == Topology(
        (0, 1, 2), (None,) * 3, ((False, True, True), (True, False, False), (True, False, False))
    )
    assert caplog.record_tuples == [
        ("caffepy.collectives.peers", logging.WARNING, "7 bytes arrived damaged")
    ]
    assert peers.os.environ["NCCL_P2P_DISABLE"] == "1"


def test_nothing_changes_where_all_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "enable", lambda _: None)
    monkeypatch.setattr(peers, "verify", lambda *_: None)
    monkeypatch.setattr(peers.os, "environ", {})
    assert peers.prepare(topology(3)) == topology(3)
    assert "NCCL_P2P_DISABLE" not in peers.os.environ
