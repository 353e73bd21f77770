import logging
import os
import subprocess
import sys
from importlib import import_module
from pkgutil import iter_modules

import numba
import numpy as np
import pytest
from numba.core import caching
from numba.core.dispatcher import Dispatcher

import caffepy.data
import caffepy.ops.cpu
from caffepy.ops.cpu import compiler


def add_one(x):
    for i in range(x.size):
        x[i] += 1


@pytest.fixture(autouse=True)
def silent_so_far(monkeypatch):
    monkeypatch.setattr(compiler, "_said", set())


def count_up():
    """Another function of one code, so that only what lies on the disk is shared."""
    x = np.zeros(3)
    compiler.kernel(add_one)(x)
    return x.tolist()


def test_kernels_are_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    count_up()
    assert {path.suffix for path in tmp_path.rglob("*.nb*")} == {".nbi", ".nbc"}
    kernel = compiler.kernel(add_one)
    kernel(np.zeros(3))
    assert sum(kernel.stats.cache_hits.values()) == 1


def test_without_a_place_for_the_cache_kernels_still_work(monkeypatch, caplog):
    def refuse(function):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compiler, "_Cache", refuse)
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "NUMBA_CACHE_DIR" in message


def test_a_full_disk_costs_the_cache_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "No space left on device" in message


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"nonsense"], ids=["empty", "truncated", "foreign"]
)
@pytest.mark.parametrize("kind", [".nbi", ".nbc"])
def test_damaged_files_are_made_anew(kind, content, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    count_up()
    for path in tmp_path.rglob(f"*{kind}"):
        path.write_bytes(content)
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "are damaged" in message
    assert all(path.read_bytes() != content for path in tmp_path.rglob("*.nb*"))


def compiled():
    """Return what numba compiles of caffepy by name, parts of kernels too."""
    packages = ((package, package.__name__) for package in (caffepy.ops.cpu, caffepy.data))
    names = (
        f"{name}.{m.name}" for package, name in packages for m in iter_modules(package.__path__)
    )
    return {
        f"{module}.{name}": function
        for module in names
        for name, function in vars(import_module(module)).items()
        if isinstance(function, (Dispatcher, compiler.Kernel))
    }


def test_all_functions_are_compiled_without_the_gil_and_each_kernel_is_kept_on_disk():
    functions = compiled()
    assert len(functions) > 50
    for name, function in functions.items():
        assert function.targetoptions["nogil"], name
        assert function.targetoptions["error_model"] == "numpy", name
        kept = function.stats.cache_path is not None
        assert kept != function.targetoptions.get("forceinline", False), name


def test_nan_is_seen():
    @numba.njit(fastmath=compiler.FASTMATH)
    def is_nan(x):
        return x != x

    assert is_nan(np.nan)


def test_the_first_compilation_is_said_once(caplog):
    listener = compiler._FirstCompilation()
    with caplog.at_level(logging.INFO, "caffepy"):
        for _ in range(2):
            listener.on_start(None)
            listener.on_end(None)
    (message,) = caplog.messages
    assert message.startswith("Compiling CPU kernels")


PROGRAM = """
import hashlib
import numpy as np
from caffepy.ops import cpu

def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)

steps, streams, size = 5, 10, 24
lstm = cpu.LSTM(steps, streams, size, np.float32)
a, w = normal(steps, streams, 4 * size), normal(4 * size, size)
cont = np.ones((steps, streams), np.float32)
kept, h, c, da = (np.zeros((steps, streams, n), np.float32) for n in (size, size, size, 4 * size))
lstm.forward(a, w, cont, (normal(streams, size), normal(streams, size)), kept, h, c)
lstm.backward(a, w, cont, normal(streams, size), c, normal(steps, streams, size), da)
print(hashlib.sha256(h.tobytes() + c.tobytes() + da.tobytes()).hexdigest())
"""


def test_a_kernel_that_is_loaded_gives_what_it_gave_when_it_was_compiled(tmp_path):
    def run():
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run() == run()


def test_the_first_kernel_loads_no_scipy_but_scripts_may():
    pytest.importorskip("scipy")
    program = """
import sys
import numba, numpy as np
from caffepy.ops import cpu
cpu.add_bias(np.zeros((2, 3), np.float32), np.ones(3, np.float32))
assert "scipy.linalg" not in sys.modules
x = np.array([[1.0, 2.0, 4.0], [3.0, 1.0, 0.0]])
np.testing.assert_allclose(numba.njit(lambda x: np.cov(x))(x), np.cov(x))
np.testing.assert_allclose(numba.njit(lambda x: np.dot(x, x.T))(x), x @ x.T)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


KERNELS = """
import sys
import numpy as np
from caffepy.ops.cpu.compiler import kernel

@kernel
def smooth(x, y):
    part = np.empty(3, np.float32)
    for i in range(len(x) - 2):
        part[:] = x[i : i + 3]
        y[i] = np.abs(part).sum()

@kernel
def product(x, y):
    y[:] = np.floor(x.reshape(-1, 2)).ravel() * np.max(x)
"""
IMPORTS = "\nprint([m for m in ('numba.np.arraymath', 'scipy.linalg') if m in sys.modules])"


def test_kernels_that_are_kept_are_loaded_without_all_that_numba_can_compile(tmp_path):
    """Also where a process then compiles another kernel with the same parts, and keeps it."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])

    def run(*names):
        calls = "".join(
            f"\ny = np.zeros(4, np.float32); {name}(np.float32([-1.5, 2, 3, -4]), y); print(y)"
            for name in names
        )
        program = f"from kernels import *{calls}{IMPORTS}"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    smoothed, multiplied = "[6.5 9.  0.  0. ]", "[ -6.   6.   9. -12.]"
    compiled, nothing = "['numba.np.arraymath']", "[]"
    assert run("smooth") == [smoothed, compiled]
    assert run("smooth") == [smoothed, nothing]
    assert run("smooth", "product") == [smoothed, multiplied, compiled]
    assert run("product", "smooth") == [multiplied, smoothed, nothing]
