"""Further names of modules, with one set of modules: `caffe.io` is `caffepy.io`, which is
`caffepy.pycaffe.io`.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

OURS = "caffepy"
CAFFES = "caffe"
OTHER_NAMES = {"_caffe": "pycaffe"}


class _Names:
    """A finder of the modules of `homes` by their further names, and of `caffepy.x` as `caffe.x`
    while `caffe` is caffepy.

    What caffepy does not have is looked for in folders named caffe on sys.path: modules that people
    have put there.
    """

    def __init__(self) -> None:
        self.homes: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what caffepy, or else a folder named caffe, has under this name."""
        # a Loader but for its base, which would make `import caffepy` ten milliseconds longer
        loader: Any = self
        if fullname in self.homes:
            return ModuleSpec(fullname, loader)
        if not fullname.startswith(f"{CAFFES}.") or not is_installed():
            return None
        if _exists(_our_name(fullname)):
            return ModuleSpec(fullname, loader)
        if fullname.count(".") == 1:
            folders = [os.path.join(folder, CAFFES) for folder in sys.path]
            return PathFinder.find_spec(fullname, folders)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(self.homes.get(name) or _our_name(name))


def _our_name(name: str) -> str:
    first, *rest = name.split(".")[1:]
    return ".".join([OURS, OTHER_NAMES.get(first, first), *rest])


def _exists(name: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False


_finder = _Names()


def add_names(homes: Mapping[str, str]) -> None:
    """Make modules importable by further names; `homes` maps these to the modules' own."""
    _finder.homes.update((name, home) for name, home in homes.items() if name != home)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def is_installed() -> bool:
    """True if `caffe` is a name of caffepy."""
    return OURS in sys.modules and sys.modules.get(CAFFES) is sys.modules[OURS]


def install_as_caffe() -> None:
    """Make `import caffe` find caffepy and its modules, even if Caffe itself is installed."""
    if is_installed():
        return
    for name in [name for name in sys.modules if name.startswith(f"{CAFFES}.")]:
        del sys.modules[name]
    sys.modules[CAFFES] = importlib.import_module(OURS)
