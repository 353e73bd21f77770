"""The kernels that decode JPEG files without Python's lock: loaded where many files are decoded."""

import logging
import os
import threading
from typing import Any

log = logging.getLogger(__name__)

MANY = 8192
"""Files that OpenCV decodes before a thread loads the kernels, in 0.2 s, or compiles them, in 15 s,
if no process has done so before. Kernels that read databases are loaded earlier.
"""

_files = 0
_kernels: Any = None
_loading = threading.Lock()  # held from the first load on: there is no second


def _load_anew() -> None:
    """Let a forked child load the kernels, too: the thread that does so is not there."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_load_anew)


def kernels(files: int) -> Any:
    """Return `jpeg_kernels` once they are loaded, else None; `files` more are to be decoded."""
    global _files
    if _kernels is None:
        _files += files
        if _files >= MANY and _loading.acquire(blocking=False):
            threading.Thread(target=_load, name="caffepy-kernels").start()
    return _kernels


def _load() -> None:
    global _kernels
    try:
        from caffepy.data import jpeg_kernels

        jpeg_kernels.load()
        _kernels = jpeg_kernels
    except Exception as error:
        log.warning("OpenCV decodes JPEG files, more slowly on many cores: %s", error)
