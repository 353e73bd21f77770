"""Names that are like one that is not known, for messages."""

import os
from collections.abc import Iterable, Sequence
from itertools import islice

LEAST, BEGINNING, SHORT = 0.6, 0.9, 3
"""Least likeness of a name that is suggested; weight of the likeness to its beginning, and letters
of a name for which that says nothing.
"""

FEW = 40
"""Number of names up to which a message lists all."""

MANY = 2000
"""Number of files of a folder up to which they are compared with one that is not there."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean "X"?` for the nearest known name, or an empty string.

    The name, if not too short, may be like the beginning of a known one; of several the first is
    the nearest. The dashes of flags count for nothing.
    """
    best = max(known, key=lambda one: _likeness(one, name), default="")
    return f', did you mean "{best}"?' if _likeness(best, name) >= LEAST else ""


def neighbour(path: str) -> str:
    """Return what `nearest` does for the files of the folder in which `path` should be, of those
    that are like it without their extensions, too; nothing if there are too many, or no folder. A
    link of this name leads nowhere.
    """
    folder, name = os.path.split(path.rstrip(os.sep))
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in islice(entries, MANY + 1) if entry.name != name]
    except (OSError, ValueError):
        return ""
    if len(names) > MANY:
        return ""
    stem = os.path.splitext(name)[0]
    return nearest(name, [n for n in names if _likeness(os.path.splitext(n)[0], stem) >= LEAST])


def listed(names: Sequence[str], wrong: str) -> str:
    """Return the names, joined by commas; of many those that are most like the wrong one, the
    nearest first, and how many more there are.
    """
    if len(names) <= FEW:
        return ", ".join(names)
    likest = sorted(names, key=lambda one: _likeness(one, wrong), reverse=True)
    return f"{', '.join(likest[:FEW])} and {len(names) - FEW:,} more"


def _likeness(known: str, name: str) -> float:
    from difflib import SequenceMatcher  # only needed for a mistake

    known, name = (one.casefold().lstrip("-") for one in (known, name))
    whole, begin = (SequenceMatcher(None, x, name).ratio() for x in (known, known[: len(name)]))
    return max(whole, BEGINNING * begin * (len(name) > SHORT))
