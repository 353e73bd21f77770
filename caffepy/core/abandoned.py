"""What belongs to devices that will never end their work: it cannot be given back, so it is kept to
the end.
"""

_things: list[object] = []


def abandon(*things: object) -> None:
    """Say that some device will never end its work, which these things belong to."""
    _things.extend(things)


def any_abandoned() -> bool:
    """Whether a device was given up: then the end of the process must wait for none."""
    return bool(_things)
