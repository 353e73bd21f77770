"""Memory of the host that the process may still take: what is free, within its control groups."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from caffepy.device.threads import GROUPS, PROCESS_GROUPS

MEMINFO = Path("/proc/meminfo")


def free_memory() -> int:
    """Return the bytes that the process can still take; sys.maxsize where the system does not tell
    (systems other than Linux).
    """
    told = re.search(r"^MemAvailable:\s+(\d+) kB", _read(MEMINFO), re.MULTILINE)
    free = [int(told[1]) << 10] if told else []
    return max(0, min([*free, *_left_in_groups()], default=sys.maxsize))


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that are left of the limits of the process's control groups and those above.

    Pages of files that can be dropped do not count as used.
    """
    for line in _read(PROCESS_GROUPS).splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        # Version 1 names its kinds, version 2 does not.
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_file, used_file, cached = (
            names if kinds else ("memory.max", "memory.current", "inactive_file")
        )
        folder = GROUPS / kinds / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = _read(group / "memory.stat")
                droppable = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
                yield int(limit) - int(used) + (int(droppable[1]) if droppable else 0)
            if group == GROUPS:
                break


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
