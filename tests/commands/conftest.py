import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caffepy.collectives.world import World
from caffepy.commands import nodes
from tests.collectives.threads_world import run_nodes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of runs whose Python layers fail as they are told."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent.parent / "parallel/faulty.py", tmp_path)
    return tmp_path


@pytest.fixture
def as_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[int], Any]], list[Any]]:
    """Return what runs a command as each of some nodes, in threads, and returns what each got."""
    own = threading.local()
    monkeypatch.setattr(nodes, "join_launched", lambda *_: own.world)
    monkeypatch.setattr(nodes, "_node", 0)

    def run(count: int, work: Callable[[int], Any]) -> list[Any]:
        def node(world: World) -> Any:
            own.world = world
            return work(world.node)

        monkeypatch.setattr(nodes, "launched", lambda: (count, "TEST") if count > 1 else None)
        return run_nodes(count, node, seconds=120)

    return run
