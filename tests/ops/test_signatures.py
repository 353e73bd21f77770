"""The back ends are what `caffepy.ops.protocol` says, in both directions: the same names, the same
parameters in the same order, the same defaults.

Needs no GPU, and no CuPy either: where it is not installed, a stub with every attribute stands in
for it.
"""

import importlib
import inspect
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest

import caffepy.ops
from caffepy.ops import cpu, objects
from caffepy.ops.protocol.contract import Ops


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


@pytest.fixture(params=["cpu", "cuda"])
def backend(request):
    return cpu if request.param == "cpu" else request.getfixturevalue("cuda")


def parameters(function):
    return [
        (p.name, p.kind.name, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def public(thing):
    """Return the names of a class or back end, without the modules that a package contains."""
    return {
        name: value
        for name, value in vars(thing).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


CONTRACT = {name: value for family in Ops.__mro__ for name, value in public(family).items()}


def test_the_same_names(backend):
    assert set(public(backend)) == set(CONTRACT)


@pytest.mark.parametrize("name", CONTRACT)
def test_the_same_parameters(backend, name):
    ours, theirs = CONTRACT[name], getattr(backend, name)
    assert parameters(theirs) == parameters(ours)
    if not inspect.isclass(theirs):
        return
    methods = {key: f for key, f in public(getattr(objects, name)).items() if callable(f)}
    # What has no meaning on the CPU it inherits from `objects`.
    assert set(methods) >= {key for key, f in public(theirs).items() if callable(f)}
    for method, function in methods.items():
        assert parameters(getattr(theirs, method)) == parameters(function), method


def test_each_function_is_documented():
    classes = [c for c in public(objects).values() if inspect.isclass(c)]
    own = [c for c in classes if c.__module__ == objects.__name__]
    assert own
    for thing in [*CONTRACT.values(), *own]:
        assert thing.__doc__, thing


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    from caffepy.core.errors import DeviceError

    for name in [name for name in sys.modules if name.startswith("caffepy.ops.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'caffepy\[cuda13\]'"):
        importlib.import_module("caffepy.ops.cuda")
