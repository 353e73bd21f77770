import logging

import numba
import numpy as np

from caffepy.ops.cpu import compiler


def add_one(x):
    for i in range(x.size):
        x[i] += 1


def test_kernels_are_cached():
    assert type(compiler.kernel(add_one)._cache).__name__ == "FunctionCache"


def test_without_a_place_for_the_cache_kernels_still_work(monkeypatch):
    def refuse(self):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "enable_caching", refuse)
    x = np.zeros(3)
    compiler.kernel(add_one)(x)
    assert x.tolist() == [1, 1, 1]


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
    assert caplog.messages == ["Compiling CPU kernels (once per machine)"]
