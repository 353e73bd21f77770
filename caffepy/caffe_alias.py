"""The name `caffe` for caffepy, with one set of modules: `caffe.io` is `caffepy.io`."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OURS = "caffepy"
CAFFES = "caffe"
OTHER_NAMES = {"_caffe": "pycaffe"}


class _Caffe(MetaPathFinder, Loader):
    """Makes `caffe.x` another name of `caffepy.x` while `caffe` is one of caffepy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what caffepy has under this name."""
        if not fullname.startswith(f"{CAFFES}.") or not is_installed():
            return None
        return ModuleSpec(fullname, self) if importlib.util.find_spec(_our_name(fullname)) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put caffepy's module in the place of the empty one."""
        sys.modules[module.__name__] = importlib.import_module(_our_name(module.__name__))


def _our_name(name: str) -> str:
    first, *rest = name.split(".")[1:]
    return ".".join([OURS, OTHER_NAMES.get(first, first), *rest])


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
