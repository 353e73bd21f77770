import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of runs whose Python layers fail as they are told."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent.parent / "parallel/faulty.py", tmp_path)
    return tmp_path
