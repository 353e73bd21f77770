"""The name `caffe` for caffepy, with one set of modules: `caffe.io` is `caffepy.io`."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS = "caffepy"
CAFFES = "caffe"
OTHER_NAMES = {"_caffe": "pycaffe"}


class _Caffe(MetaPathFinder, Loader):
    """Makes `caffe.x` another name of `caffepy.x` while `caffe` is one of caffepy.

    What caffepy does not have is looked for in folders named caffe on sys.path: modules that people have put there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what caffepy, or else a folder named caffe, has under this name."""
        if not fullname.startswith(f"{CAFFES}.") or not is_installed():
            return None
        if _exists(_our_name(fullname)):
            return ModuleSpec(fullname, self)
        if fullname.count(".") == 1:
            return PathFinder.find_spec(fullname, [os.path.join(folder, CAFFES) for folder in sys.path])
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put caffepy's module in the place of the empty one."""
        sys.modules[module.__name__] = importlib.import_module(_our_name(module.__name__))


def _our_name(name: str) -> str:
    first, *rest = name.split(".")[1:]
    return ".".join([OURS, OTHER_NAMES.get(first, first), *rest])


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False


_finder = _Caffe()


def is_installed() -> bool:
    """Whether `caffe` is a name of caffepy."""
    return OURS in sys.modules and sys.modules.get(CAFFES) is sys.modules[OURS]


def install_as_caffe() -> None:
    """Let `import caffe`, and of what is in it, find caffepy from now on, even where Caffe itself is there."""
    if is_installed():
        return
    for name in [name for name in sys.modules if name.startswith(f"{CAFFES}.")]:
        del sys.modules[name]
    sys.modules[CAFFES] = importlib.import_module(OURS)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
