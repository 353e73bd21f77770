"""Python modules that a prototxt names: on sys.path, in the working directory, or beside the
prototxt.

Modules in the latter two belong to their folder, so nets in different folders may have modules of
the same name; sys.path does not change. `import caffe` in them finds caffepy if Caffe itself cannot
be imported.
"""

import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any, TypeVar

from caffepy.core.caffe_alias import install_as_caffe
from caffepy.core.errors import CaffeError, ConfigError, UserCodeError
from caffepy.core.names import nearest

T = TypeVar("T")

log = logging.getLogger(__name__)
_loading = threading.RLock()


class UserCode:
    """A user's module; errors in `code.call(function)` name its file and line.

    `path` is the prototxt that names the module. If there is no such module, that named `instead`
    is taken, which is `ours`: its errors speak for themselves. ConfigError if there is none either.
    """

    def __init__(self, module: str, path: str | None, instead: str | None = None) -> None:
        folders = [os.getcwd()] + ([os.path.dirname(os.path.abspath(path))] if path else [])
        self._folders = list(dict.fromkeys(folders))
        self._home = ""
        self._name = self.file = module
        self.ours = False
        with _loading:
            _ensure_caffe()
            _beside.enter(self._folders)
            if module not in sys.modules:
                importlib.invalidate_caches()
                spec = self.call(_find, module)
                if spec is None and instead:
                    self.ours, module = True, instead
                    spec = importlib.util.find_spec(instead)
                if spec is None:
                    found = pkgutil.iter_modules([*self._folders, *sys.path])
                    hint = nearest(module, {other.name for other in found})
                    places = f"(looked on sys.path and in {' and '.join(self._folders)})"
                    raise ConfigError(f'no Python module "{module}"{hint} {places}')
                self._home = os.path.dirname(spec.origin or "")
            self.module = self.call(importlib.import_module, module)
            self.file = getattr(self.module, "__file__", None) or module
            self._home = os.path.dirname(self.file)

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class of this name; ConfigError names the nearest one."""
        found = getattr(self.module, name, None)
        if not callable(found):
            known = [key for key, value in vars(self.module).items() if isinstance(value, type)]
            module, hint = f'module "{self._name}" ({self.file})', nearest(name, known)
            raise ConfigError(f'{module} has no class "{name}"{hint}')
        return found  # type: ignore[no-any-return]

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run user code: imports in it also look beside it, and errors name file and line."""
        before, _beside.active.folders = _beside.folders(), self._folders
        try:
            return function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self.ours and isinstance(error, CaffeError):
                raise
            log.info("%s", "".join(traceback.format_exception(error)).rstrip())
            detail = f": {error}" if str(error) else ""
            message = f"{self._place(error)}{type(error).__name__}{detail}"
            if isinstance(error, CaffeError) and not isinstance(error, UserCodeError):
                raise type(error)(message) from error
            raise UserCodeError(message, error) from error
        finally:
            _beside.active.folders = before

    def _place(self, error: BaseException) -> str:
        """`file:line: in function: ` of the innermost frame, in user code if there is one."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}: "
        frames = list(traceback.walk_tb(error.__traceback__))
        frame, line = next((entry for entry in reversed(frames) if self._owns(*entry)), frames[-1])
        function = frame.f_code.co_name
        where = "" if function == "<module>" else f"in {function}: "
        return f"{frame.f_code.co_filename}:{line}: {where}"

    def _owns(self, frame: FrameType, line: int) -> bool:
        folder = os.path.dirname(frame.f_code.co_filename)
        return frame.f_globals.get("__name__") == self._name or folder == self._home != ""


def is_there(module: str, path: str | None) -> bool:
    """True if UserCode finds the module for a prototxt `path`, sound or not."""
    try:
        UserCode(module, path)
    except UserCodeError:
        return True
    except ConfigError:
        return False
    return True


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None  # the package that should hold it
        raise


class _Beside(MetaPathFinder):
    """Import hook: modules of the folders active in a thread, those of different folders apart."""

    def __init__(self) -> None:
        self.active = threading.local()
        # by folder: names of modules found there; its modules that are not in sys.modules
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._away: dict[str, dict[str, ModuleType]] = {}

    def folders(self) -> Sequence[str]:
        found: Sequence[str] = getattr(self.active, "folders", ())
        return found

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a top-level module in an active folder; a package needs an `__init__.py`."""
        for folder in self.folders() if path is None else ():
            spec = PathFinder.find_spec(fullname, [folder])
            if spec and spec.origin:
                self._names[folder].add(fullname)
                return spec
        return None

    def enter(self, folders: Sequence[str]) -> None:
        """Put the modules of these folders into sys.modules, and remove those of other folders."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        for folder, names in self._names.items():
            if folder not in folders and folder not in self._away:
                loaded = [name for name in sys.modules if name.partition(".")[0] in names]
                self._away[folder] = {name: sys.modules.pop(name) for name in loaded}
        for folder in folders:
            sys.modules.update(self._away.pop(folder, {}))


_beside = _Beside()


def _ensure_caffe() -> None:
    """Make `import caffe` find caffepy, unless Caffe is installed and can be imported."""
    if "caffe" in sys.modules:
        return
    spec = importlib.util.find_spec("caffe")
    if spec and spec.origin:  # without an origin it is any folder named caffe
        try:
            importlib.import_module("caffe")
            return
        except Exception as error:
            other = "%s cannot be imported (%s); `import caffe` finds caffepy instead"
            log.warning(other, spec.origin, error)
    install_as_caffe()
