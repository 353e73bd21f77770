"""State of a process that hangs: the stacks of its threads, and the numbers that
`ops.cpu.lock_watch` shares with Python.
"""

import sys
import threading
import traceback
from collections.abc import Mapping, Sequence

BEATS, LIMIT, CODE, SIGNAL, DESCRIPTOR, LENGTH, STARTED, ENDED, SIZE = range(9)
"""Places in these numbers: one that Python keeps changing; polls without a change until the stacks
are written (0: never); the exit code then, or -1 to go on; the signal by which faulthandler writes
stacks; the pipe with signals that Python has not read; bytes of the text before the stacks; 1: the
loop has begun; 1: it is to end.
"""

POLLS_PER_S = 4


def stacks(threads: Mapping[int, int], first: Sequence[int] = ()) -> str:
    """Return the stack of every thread; `threads` has the thread of each rank. Those of the ranks
    `first` come first.
    """
    ranks = {thread: f"rank {rank}" for rank, thread in threads.items()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found, frames = [], sys._current_frames()
    ahead = [threads[rank] for rank in first if threads.get(rank) in frames]
    for ident in dict.fromkeys([*ahead, *frames]):
        frame = frames[ident]
        name = ranks.get(ident, names.get(ident, str(ident)))
        found.append(f"{name}:\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n".join(found)
