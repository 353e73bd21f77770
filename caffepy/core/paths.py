"""Paths in a prototxt: relative to the working directory, as in Caffe, else to the file that has
them.

For a bundled net its own folder comes first.
"""

import logging
import os

log = logging.getLogger(__name__)

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""Types of a path in the Python interface; `os.fsdecode` makes a str of it."""

BUNDLED = os.path.realpath(f"{os.path.dirname(__file__)}/../models") + os.sep


def locate(name: str, beside: str | None = None) -> str:
    """Return the path under which `name` exists: `name` itself, or a path beside the file `beside`.

    A name that exists in neither place is returned unchanged, so that the caller's message shows
    what the user wrote.
    """
    if not name or os.path.isabs(name) or beside is None:
        return name
    candidate = os.path.join(os.path.dirname(beside), name)
    is_bundled = os.path.realpath(beside).startswith(BUNDLED)
    if not os.path.exists(candidate) or (os.path.exists(name) and not is_bundled):
        return name
    log.info("%s is %s", name, candidate)
    return candidate
