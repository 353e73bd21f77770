"""The back ends have the same functions, with the same parameters in the same order and the same
defaults.

Needs no GPU, and no CuPy either: where it is not installed, something that has every attribute
stands in for it.
"""

import importlib
import inspect
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest

import caffepy.ops
from caffepy.ops import cpu


@pytest.fixture(scope="module")
def cuda():
    if find_spec("cupy") is not None:
        yield importlib.import_module("caffepy.ops.cuda")
        return
    sys.modules["cupy"] = MagicMock(name="cupy")
    try:
        yield importlib.import_module("caffepy.ops.cuda")
    finally:
        for name in [
            name for name in sys.modules if name == "cupy" or name.startswith("caffepy.ops.cuda")
        ]:
            del sys.modules[name]
        if hasattr(caffepy.ops, "cuda"):
            del caffepy.ops.cuda


def parameters(function):
    return [
        (p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()
    ]


def methods(kind):
    return {
        name: f
        for name, f in inspect.getmembers(kind, callable)
        if not name.startswith("_") or name == "__init__"
    }


@pytest.mark.parametrize("name", cpu.__all__)
def test_the_same_parameters(cuda, name):
    ours, theirs = getattr(cpu, name), getattr(cuda, name, None)
    assert theirs is not None, f"ops.cuda has no {name}"
    if not inspect.isclass(ours):
        assert parameters(theirs) == parameters(ours)
        return
    assert inspect.isclass(theirs)
    assert set(methods(ours)) <= set(methods(theirs))
    for method, function in methods(ours).items():
        assert parameters(getattr(theirs, method)) == parameters(function), method


def test_the_same_names(cuda):
    assert set(cuda.__all__) == set(cpu.__all__)


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    from caffepy.core.errors import DeviceError

    for name in [name for name in sys.modules if name.startswith("caffepy.ops.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'caffepy\[cuda13\]'"):
        importlib.import_module("caffepy.ops.cuda")
