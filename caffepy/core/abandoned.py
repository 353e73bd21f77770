"""Resources of devices that hang: freeing them would hang too, so they are kept until the process
ends.
"""

_things: list[object] = []


def abandon(*things: object) -> None:
    """Keep these things until the process ends: their device hangs."""
    _things.extend(things)


def any_abandoned() -> bool:
    """True if a device was abandoned, so that the process must end without waiting for it."""
    return bool(_things)
