"""Kernels: compiled, kept on disk, loaded, called, and what happens where one of these fails."""

import logging
import os
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

import caffepy.data
import caffepy.ops.cpu
from caffepy.core.errors import UsageError
from caffepy.data.datum_fields import int32
from caffepy.ops.cpu import compiler, machine_code
from caffepy.ops.cpu.compiler import Kernel, inlined, kernel


def add_one(x):
    for i in range(x.size):
        x[i] += 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Kept code lies here, and no message has been told."""
    monkeypatch.setattr(compiler, "_logged", set())
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


def count_up():
    """Another kernel of one code, so that only what lies on the disk is shared."""
    x = np.zeros(3)
    kernel(add_one)(x)
    return x.tolist()


@pytest.fixture
def compilations(monkeypatch):
    """The names of the kernels that are compiled."""
    names = []
    compile_ = compiler._Kept._compile

    def count(self, *args):
        names.append(self._kernel.__name__)
        return compile_(self, *args)

    monkeypatch.setattr(compiler._Kept, "_compile", count)
    return names


# arguments and results


class Sizes(NamedTuple):
    n: int
    weights: Any


@kernel
def weigh(x, sizes, scale, negative, none, more):
    total = x.dtype.type(0)
    for i in range(sizes.n):
        total += x[i, 1] * sizes.weights[i] * scale + more[0] * more[1][0]
    if negative and none is None:
        total = -total
    return total


def test_arguments_of_each_kind_and_results():
    x, weights = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([1, -2, 5], np.int16)
    for array in (x, x[:, ::2], np.asfortranarray(x), x[::-1]):
        args = (array, Sizes(3, weights), 2, np.False_, None, (1.5, (np.int32(2),)))
        assert weigh(*args) == weigh.function(*args)
    for scale in (2, 2.5, np.float32(0.5), np.int8(-3), np.uint64(7), True):
        args = (x, Sizes(3, weights), scale, True, None, (1.5, (np.int32(2),)))
        assert weigh(*args) == weigh.function(*args)
    assert all(isinstance(entry, machine_code.Entry) for entry in weigh.entries.values())
    assert weigh(x, Sizes(2, weights), 1.0, True, weights, (0.0, (0,))) == -9


@pytest.mark.parametrize(
    "value", [True, -3, 2.5, np.float32(1.5), np.uint32(1 << 31), np.int8(-1), np.uint64(1 << 63)]
)
def test_results_of_each_type(value):
    @kernel
    def same(x):
        return x

    assert same(value) == value
    assert isinstance(same(value), type(value.item() if isinstance(value, np.generic) else value))


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_number_that_does_not_fit_is_refused_and_compiles_nothing(number, folder):
    """numba would make uint64 of it, and the file of int would hold what it compiled for that."""

    def half(x):
        return x / 2

    with pytest.raises(struct.error):
        kernel(half)(number)
    assert not list(folder.iterdir())
    assert [kernel(half)(-3), kernel(half)(-3)] == [-1.5, -1.5]


@kernel
def refuse(x):
    if x[0] < 0:
        raise ValueError("negative", 3)
    x[0] += 1


def test_what_a_kernel_raises():
    x = np.zeros(2)
    refuse(x)
    with pytest.raises(ValueError, match="negative") as raised:
        refuse(x - 2)
    assert raised.value.args == ("negative", 3)
    assert x.tolist() == [1, 0]


def test_what_only_numba_can_call():
    @kernel
    def first(names):
        return names[0] + "!"

    @kernel
    def pair(x):
        return x, x + 1

    assert first(("a", "b")) == "a!"
    assert pair(2) == (2, 3)


def test_a_numba_that_does_otherwise_calls_its_kernels_itself(monkeypatch, caplog):
    def emit(library, loop, *more):
        raise ValueError("other arguments")

    monkeypatch.setattr(machine_code, "emit", emit)
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "called by numba (other arguments)" in message


def test_a_numba_that_must_not_compile_is_told_at_once(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    for argument in (np.zeros(3), ("a", "b")):
        with pytest.raises(UsageError, match="NUMBA_DISABLE_JIT is set"):
            kernel(add_one)(argument)


def test_emission_refuses_arguments_of_another_layout():
    one = kernel(add_one)
    one(np.zeros(3))
    (signature,) = one.dispatcher.overloads
    library, loop = (
        one.dispatcher.inspect_llvm(signature),
        one.dispatcher.overloads[signature].fndesc.llvm_func_name,
    )
    words = machine_code.words_of([np.zeros((3, 3))])
    with pytest.raises(ValueError, match="takes"):
        machine_code.emit(library, loop, "enter", words, False)


def test_code_that_calls_what_is_not_known_is_not_loaded():
    assert machine_code.load(b'["NRT_of_another_version"]\n', "enter") is None


@inlined
def double(x):
    return 2 * x


def test_a_kernel_calls_functions_of_ours():
    """Those that are inlined, and plain ones of caffepy, which Python calls as they are."""

    @kernel
    def call(x):
        return double(int32(x))

    assert call((1 << 32) - 2) == -4 == double(int32((1 << 32) - 2))


# files


def test_kernels_are_kept(folder, compilations):
    count_up()
    count_up()
    assert compilations == ["add_one"]
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]


STEP = 1


def test_code_is_kept_until_what_it_refers_to_changes(folder, compilations, monkeypatch):
    def add(x):
        x[0] += double(STEP)

    def run():
        x = np.zeros(1)
        kernel(add)(x)
        return x[0]

    assert [run(), run()] == [2, 2]
    monkeypatch.setitem(globals(), "STEP", 3)
    assert [run(), run()] == [6, 6]
    monkeypatch.setitem(globals(), "double", inlined(lambda x: 4 * x))
    assert [run(), run()] == [12, 12]
    assert compilations == ["add"] * 3
    assert len(list(folder.iterdir())) == 1  # those of older code are removed


def test_code_is_made_anew_if_it_is_called_otherwise(folder, compilations, monkeypatch):
    """A newer caffepy in the same place finds files of kernels that did not change."""
    count_up()
    changed = folder / "machine_code.py"
    changed.write_bytes(Path(machine_code.__file__).read_bytes() + b"# changed\n")
    monkeypatch.setattr(machine_code, "__file__", str(changed))
    monkeypatch.setattr(compiler, "_environment", compiler._environment.__wrapped__)
    assert count_up() == [1, 1, 1]
    assert compilations == ["add_one"] * 2


def test_files_of_other_types_stay(folder):
    one = kernel(add_one)
    for dtype in (np.float32, np.float64, np.int32):
        one(np.zeros(3, dtype))
        one(np.zeros(6, dtype)[::2])
    assert len(list(folder.iterdir())) == 6


def test_without_a_place_for_files_kernels_still_work(monkeypatch, caplog):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/none")
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "NUMBA_CACHE_DIR" in message


def test_a_full_disk_costs_the_files_only(folder, monkeypatch, caplog):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert [count_up(), count_up()] == [[1, 1, 1]] * 2
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert not list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense" * 20])
def test_damaged_files_are_made_anew(content, folder, caplog):
    count_up()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for damaged in (content, whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        path.write_bytes(damaged)
        assert [count_up(), count_up()] == [[1, 1, 1]] * 2
        assert path.read_bytes()[: compiler.CHECKSUM] == compiler._checksum(
            path.read_bytes()[compiler.CHECKSUM :]
        )
    (message,) = caplog.messages
    assert "are damaged" in message


def test_files_are_found_in_a_folder_that_cannot_be_written(monkeypatch, tmp_path, compilations):
    """Beside the modules, where root has compiled, though this user's files go elsewhere."""
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(compiler, "folders", lambda beside: [tmp_path / "a", tmp_path / "b"])
    count_up()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a")
    assert count_up() == [1, 1, 1]
    assert compilations == ["add_one"]
    kernel(add_one)(np.zeros(3, np.float32))
    assert [len(list((tmp_path / name).iterdir())) for name in "ab"] == [1, 1]


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
        if isinstance(function, Kernel)
    }


def test_all_functions_are_compiled_without_the_gil():
    functions = compiled()
    assert len(functions) > 50
    for name, function in functions.items():
        assert function.options["nogil"], name
        assert function.options["error_model"] == "numpy", name
        assert not {"nnan", "ninf"} & function.options["fastmath"], name


def test_nan_is_seen():
    @kernel
    def is_nan(x):
        return x != x

    assert is_nan(np.nan) is True


def test_the_first_compilation_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "caffepy"):
        count_up()
        kernel(add_one)(np.zeros(3, np.float32))
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
        command, env = [sys.executable, "-c", PROGRAM], os.environ | {"NUMBA_CACHE_DIR": tmp_path}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    compiled = run()
    assert len([*tmp_path.glob("recurrent.*.kernel")]) == 4
    assert run() == compiled


KERNELS = """
import sys
import numpy as np
from caffepy.ops.cpu.compiler import kernel

@kernel
def smooth(x, y):
    part = np.empty(3, np.float32)  # by numba's runtime
    for i in range(len(x) - 2):
        part[:] = x[i : i + 3]
        y[i] = np.abs(part).sum()

@kernel
def product(x, y):
    y[:] = np.floor(x.reshape(-1, 2)).ravel() * np.max(x)
"""


def test_kernels_that_are_kept_are_loaded_without_numba(tmp_path):
    """And it may be loaded afterwards."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*names):
        calls = "".join(
            f"\ny = np.zeros(4, np.float32); {name}(np.float32([-1.5, 2, 3, -4]), y); print(y)"
            for name in names
        )
        program = f"from kernels import *{calls}\nprint('numba' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    smoothed, multiplied = "[6.5 9.  0.  0. ]", "[ -6.   6.   9. -12.]"
    assert run("smooth") == [smoothed, "True"]
    assert run("smooth") == [smoothed, "False"]
    assert run("smooth", "product", "smooth") == [smoothed, multiplied, smoothed, "True"]
    assert run("product", "smooth") == [multiplied, smoothed, "False"]


FORKING = """
import os, signal, sys, threading
import numpy as np
from caffepy.data import jpegs
from caffepy.ops.cpu import elementwise, machine_code

begun, emit = threading.Event(), machine_code.emit
def slowly(*arguments):
    begun.set()
    threading.Event().wait(1)
    return emit(*arguments)
machine_code.emit = slowly

def call(kind):
    x = np.array([-1, 2], kind)
    elementwise.add(x, x)
    return x.tolist()

jpegs._loading.acquire()  # by a thread that loads them
thread = threading.Thread(target=call, args=[np.float32])
thread.start()
begun.wait()
if not (child := os.fork()):
    signal.alarm(60)
    os._exit(call(np.float64) != [-2, 4] or jpegs._loading.locked())
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
sys.exit(ended or call(np.float32) != [-2, 4] or not jpegs._loading.locked())
"""


def test_a_process_may_be_forked_while_a_thread_compiles(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
