"""The control groups of the process, which limit its CPU time and memory on Linux."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROCESS_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The control groups of the process, and the files of all."""


class Group(NamedTuple):
    """A control group: its folder, and whether it is of version 1, which names its kinds."""

    folder: Path
    is_first_version: bool


def control_groups(kind: str) -> Iterator[Group]:
    """Yield the groups of the process, and those above, that limit "cpu" or "memory"."""
    for line in read(PROCESS_GROUPS).splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds and kind not in kinds.split(","):
            continue
        folder = GROUPS / kinds / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield Group(group, bool(kinds))
            if group == GROUPS:
                break


def read(file: Path) -> str:
    """Return the text of a file of the system; "" if there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
