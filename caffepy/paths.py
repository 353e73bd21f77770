"""Where a path in a prototxt leads: from the working directory, as in Caffe, else beside the file that names it."""

import logging
import os

log = logging.getLogger(__name__)


def locate(name: str, beside: str | None = None) -> str:
    """The path under which `name` exists: `name` itself, or, for a relative name, one beside the file `beside`.

    A name that exists in neither place is returned unchanged, so that the caller's message shows what the user wrote.
    """
    if not name or os.path.isabs(name) or os.path.exists(name) or beside is None:
        return name
    candidate = os.path.join(os.path.dirname(beside), name)
    if not os.path.exists(candidate):
        return name
    log.info("%s is not in the working directory; using %s", name, candidate)
    return candidate
