"""A loop without Python's lock that ends a process in which other code never gives the lock back,
so that no thread of Python's runs any more. Linux only.
"""

from typing import Any

from caffepy.core.hangs import (
    BEATS,
    CODE,
    DESCRIPTOR,
    ENDED,
    LENGTH,
    LIMIT,
    POLLS_PER_S,
    SIGNAL,
    STARTED,
)
from caffepy.ops.cpu.compiler import external, kernel

PATIENCE = 3 * POLLS_PER_S  # polls without a beat after which two signals end the process
FIONREAD = 0x541B

_usleep = external("usleep", "int32", "uint32")
_write = external("write", "intp", "int32", "uintp", "uintp")
_ioctl = external("ioctl", "int32", "int32", "uintp", "uintp")
_raise = external("raise", "int32", "int32")
_exit = external("_exit", "void", "int32")


@kernel
def watch(state: Any, unread: Any, text: Any, interrupted: int) -> None:
    """Watch until `state` says that the loop is to end. `unread` is an int32 of the loop's own;
    what `text` begins with is written before the stacks; `interrupted` is the exit code after two
    signals.
    """
    last, stale = -1, 0
    state[STARTED] = 1
    while state[ENDED] == 0:
        _usleep(1_000_000 // POLLS_PER_S)
        if state[BEATS] != last:
            last, stale = state[BEATS], 0
            continue
        stale += 1  # polls, not time: a process that was stopped has not hung
        if stale >= PATIENCE:
            _ioctl(state[DESCRIPTOR], FIONREAD, unread.ctypes.data)
            if unread[0] >= 2:
                _exit(interrupted)
        if stale == state[LIMIT]:
            _write(2, text.ctypes.data, state[LENGTH])
            _raise(state[SIGNAL])
            if state[CODE] >= 0:
                _exit(state[CODE])
