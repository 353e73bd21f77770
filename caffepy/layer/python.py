"""Layers that users write in Python."""

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.core.python_modules import UserCode
from caffepy.device.blob import Blob
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.python_blob import BlobVec, wrap_all
from caffepy.layer.rpn import OWN


@layer("Python")
class Python(Layer):
    """Any bottoms -> any tops, by the class `layer` of the module `module`.

    Its object, `instance`, gets param_str, phase and blobs, and is called with lists of blobs as
    pycaffe shows them. It multiplies by its loss weight (`top[0].diff`) and adds to the diffs of
    its parameters itself. ConfigError names the file and the line of user code that raised.
    Modules of py-faster-rcnn and DetectNet that cannot be imported are replaced by ours
    (`rpn.OWN`).
    """

    bottoms = (0, None)
    tops = (0, None)
    in_place = True
    always_reshape = True
    may_modify_gradients = True
    instance: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share_in_parallel = self.param.python_param.share_in_parallel

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._top = top
        param = self.param.python_param
        if not param.module or not param.layer:
            raise ConfigError(
                'python_param needs "module", the name of a Python module, '
                'and "layer", a class in it'
            )
        self._code = UserCode(param.module, self.path, instead=OWN.get(param.module))
        made_by = self._code.find(param.layer)
        if isinstance(made_by, BuiltinFunctionType):
            raise ConfigError(f'"{param.layer}" ({self._code.file}) is a function, not a class')
        is_class = isinstance(made_by, type)
        if is_class:
            self._require_methods(made_by, f'class "{param.layer}"')
        made = self._code.call(made_by, *([self.param] if _takes_one(made_by) else []))
        if not is_class:  # a function may make the object
            self._require_methods(made, f'what "{param.layer}" returns')
        self.instance = made
        self.stops_gradient = self._code.ours
        if self._code.ours:
            self.instance.device = self.device  # whose random numbers it draws
        self.instance.param_str = param.param_str
        self.instance.phase = self.phase
        self.instance.blobs = BlobVec(self.blobs, self.dtype)
        if hasattr(self.instance, "setup"):
            self._code.call(self.instance.setup, wrap_all(bottom), wrap_all(top))

    def _require_methods(self, owner: object, what: str) -> None:
        for method in ("reshape", "forward"):
            if not callable(getattr(owner, method, None)):
                raise ConfigError(f'{what} ({self._code.file}) has no method "{method}"')

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._code.call(self.instance.reshape, wrap_all(bottom), wrap_all(top))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._code.call(self.instance.forward, wrap_all(bottom), wrap_all(top))

    def skip(self, batches: int) -> None:
        """Run forward for each batch: only the user's code knows how to do that.

        It gets blobs like the tops, which keep their values: nets may still read them. A layer with
        bottoms takes what comes.
        """
        if not self.param.bottom:
            for _ in range(batches):
                self.reshape([], self._unread)
                self.forward([], self._unread)

    @cached_property
    def _unread(self) -> Blobs:
        return [Blob(top.shape, self.dtype, self.device) for top in self._top]

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if hasattr(self.instance, "backward"):
            given = wrap_all(top), list(propagate_down), wrap_all(bottom)
            self._code.call(self.instance.backward, *given)
        elif any(propagate_down) or any(self.param_propagate_down):
            raise ConfigError(
                f'class "{self.param.python_param.layer}" ({self._code.file}) has no method '
                '"backward"; write one, or give the bottoms propagate_down: false and the '
                "parameters lr_mult: 0"
            )


def _takes_one(function: Callable[..., Any]) -> bool:
    """True if the function, or the class, can be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True
