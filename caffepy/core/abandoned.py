"""Resources of devices, and of a cluster, that hang: freeing them would hang too, so they are kept
until the process ends.
"""

import threading

RANK_THREAD = "caffepy rank"
"""First words of the name of a thread that runs a rank."""

_things: list[object] = []


def abandon(*things: object) -> None:
    """Keep these things until the process ends: their device or their threads hang."""
    _things.extend(things)


def at_work() -> bool:
    """True if a rank's thread still runs or a thing was abandoned: exiting might wait for it."""
    names = (thread.name for thread in threading.enumerate())
    return bool(_things) or any(name.startswith(RANK_THREAD) for name in names)
