"""Tuned plans on disk: which plan or candidate was fastest, for one cuDNN version and GPU model.

The file is ~/.cache/caffepy/plans-<cuDNN version>-<GPU model>.json. It maps the name of a graph to
cuDNN's name of the fastest plan, and the name of a choice between candidates to the index of one.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import cupy

from caffepy.core.cache import cache_file, keep, read
from caffepy.ops.cuda.context import import_cudnn

_loaded: dict[Path, dict[str, Any]] = {}


@cache
def _machine(device: int) -> str:
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{import_cudnn().backend_version()}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}"


def path() -> Path:
    """Return the file for the current device."""
    return cache_file(f"plans-{_machine(cupy.cuda.runtime.getDevice())}.json")


def tuned_plans() -> dict[str, Any]:
    """Return the content of the file, which is read once."""
    file = path()
    if file not in _loaded:
        _loaded[file] = read(file)
    return _loaded[file]


def remember(name: str, fastest: Any) -> None:
    """Add an entry; where no file can be written, each process times for itself."""
    plans = tuned_plans()
    plans[name] = fastest
    keep(path(), plans)
