from pathlib import Path

import pytest

from caffepy.device import control_groups, host_memory
from caffepy.device.host_memory import free_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 1000 MiB free whose process is in the group /a/b."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1024000 kB\n")
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "groups" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "PROCESS_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    return tmp_path


def test_what_the_system_has(system: Path) -> None:
    assert free_memory() == 1000 * MIB
    (system / "meminfo").unlink()
    assert free_memory() > 1 << 60


def test_groups_have_less(system: Path) -> None:
    group = system / "groups" / "a"
    (group / "memory.max").write_text(f"{300 * MIB}\n")
    (group / "memory.current").write_text(f"{200 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {50 * MIB}\n")
    (group / "b" / "memory.max").write_text("max\n")
    (group / "b" / "memory.current").write_text("0\n")
    assert free_memory() == 150 * MIB
    (group / "memory.current").write_text(f"{400 * MIB}\n")
    assert free_memory() == 0


def test_groups_of_version_1(system: Path) -> None:
    (system / "cgroup").write_text("3:cpu:/x\n2:memory:/a\n")
    group = system / "groups" / "memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{90 * MIB}")
    (group / "memory.usage_in_bytes").write_text(f"{80 * MIB}")
    assert free_memory() == 10 * MIB
