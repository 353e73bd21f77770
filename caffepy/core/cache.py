"""Small results kept from run to run: JSON objects in files of the user's cache."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caffepy.core.files import replacing

log = logging.getLogger(__name__)


def cache_file(name: str) -> Path:
    """Return the path of a cache file, whether it exists or not."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "caffepy" / name


def read(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def add_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to the object in a file; do nothing if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        together = {**read(path), **entries}
        with replacing(str(path)) as temporary:
            Path(temporary).write_text(json.dumps(together, indent=0, sort_keys=True))
    except OSError as error:
        log.debug("cannot write the cache %s: %s", path, error)
