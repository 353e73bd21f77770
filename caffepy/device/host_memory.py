"""Memory of the host that the process may still take: what is free, within its control groups."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from caffepy.device.control_groups import control_groups, read

MEMINFO = Path("/proc/meminfo")


def free_memory() -> int:
    """Return the bytes that the process can still take; sys.maxsize where the system does not say
    (systems other than Linux).
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", read(MEMINFO), re.MULTILINE)
    free = [int(available[1]) << 10] if available else []
    return max(0, min([*free, *_left_in_groups()], default=sys.maxsize))


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that are left of the limits of the process's control groups and those above.

    Pages of files that can be dropped do not count as used.
    """
    for folder, is_first_version in control_groups("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_file, used_file, cached = (
            names if is_first_version else ("memory.max", "memory.current", "inactive_file")
        )
        limit, used = read(folder / limit_file).strip(), read(folder / used_file).strip()
        if limit.isdigit() and used.isdigit():
            stat = read(folder / "memory.stat")
            droppable = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
            yield int(limit) - int(used) + (int(droppable[1]) if droppable else 0)
