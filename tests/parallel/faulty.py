"""Injected faults: in a user's layer, as its `python_param` says, or in caffepy, by `arrange`."""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import threading
import time


def this_rank() -> int:
    """Return the rank of this thread."""
    name = threading.current_thread().name
    return int(name.rsplit(" ", 1)[1]) if name.startswith("caffepy rank") else 0


class Faulty:
    """Copies its bottom; `{"what", "rank", "at", "phase"}` in param_str are the fault and when."""

    def setup(self, bottom, top):
        self.orders = json.loads(self.param_str)
        self.passes = 0
        if self.orders["at"] == "setup" and this_rank() == self.orders["rank"] and self.phase == 0:
            go_wrong(**self.orders)

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        if this_rank() == self.orders["rank"] and self.phase == self.orders.get("phase", 0):
            self.passes += 1
            if self.passes == self.orders["at"]:
                go_wrong(**self.orders)

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff


def arrange(where, at, rank=0, **orders):
    """Make a function fail before its n-th call in a rank; `where` is "module:name" or
    "module:Class.method".
    """
    module, _, path = where.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function, calls = getattr(owner, name), []

    def faulty(*arguments, **more):
        if this_rank() == rank:
            calls.append(None)
            if len(calls) == at:
                go_wrong(**orders)
        return function(*arguments, **more)

    setattr(owner, name, faulty)


def go_wrong(what, within=None, **_):
    """Fail; the process is ended after `within` seconds."""
    if within:
        faulthandler.dump_traceback_later(within, exit=True)
    if what == "abort":
        os.abort()
    if what == "raise":
        raise RuntimeError("it went wrong")
    if what == "hang":
        time.sleep(60)
    if what == "keeps the lock":
        ctypes.PyDLL(None).sleep(60)
    if what == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        time.sleep(60)
    if what in KERNELS:
        launch(KERNELS[what])
        return
    if what == "asked to stop":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if what == "asked to stop, and deaf":
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        time.sleep(60)
    if what == "parent killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1)
        return
    if what == "twice":
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        what = "SIGINT"
    os.kill(os.getpid(), getattr(signal, what))


KERNELS = {  # each is given a device int of 0
    "illegal address": 'extern "C" __global__ void wrong(int* at) { ((volatile int*)8)[*at] = 1; }',
    "endless kernel": 'extern "C" __global__ void wrong(int* at) { while (*(volatile int*)at == 0) { } }',
}


def launch(text):
    """Run a kernel on this thread's stream."""
    import cupy

    cupy.RawKernel(text, "wrong")((1,), (1,), (cupy.zeros(1, cupy.int32),))
