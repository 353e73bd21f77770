import logging
from pathlib import Path

import numba
import numpy as np

from caffepy.ops.cpu import compiler


def add_one(x):
    for i in range(x.size):
        x[i] += 1


def test_kernels_are_cached():
    assert type(compiler.kernel(add_one)._cache).__name__ == "FunctionCache"


def test_without_a_place_for_the_cache_kernels_still_work(monkeypatch, caplog):
    def refuse(self):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "enable_caching", refuse)
    x = np.zeros(3)
    compiler.kernel(add_one)(x)
    compiler.kernel(add_one)
    assert x.tolist() == [1, 1, 1]
    assert [m for m in caplog.messages if "NUMBA_CACHE_DIR" in m] == caplog.messages[:1]
    compiler._warn_of_no_cache.cache_clear()


def test_every_kernel_is_compiled_in_one_place():
    sources = Path(compiler.__file__).parent.glob("*.py")
    assert [path.name for path in sources if "njit(" in path.read_text()] == ["compiler.py"]


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
