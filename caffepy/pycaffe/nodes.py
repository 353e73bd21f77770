"""pycaffe's world: the processes that mpirun or srun started, whose solvers train as one."""

import atexit
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from caffepy.collectives.launch import launched
from caffepy.collectives.mpi import MpiTransport, join_launched
from caffepy.collectives.world import World
from caffepy.core.errors import CaffeError, UsageError
from caffepy.device.threads import set_num_threads

_world = World(solvers=1)  # of this process, until it joins others
_status: int | None = None  # of the last sys.exit


def current() -> World:
    """Return the world of this process."""
    return _world


def world(solvers: int = 1) -> World:
    """Join the processes that mpirun or srun started, each of which calls this with the number of
    its solvers before it builds one; for `Solver.together`.

    A process that is alone has a world of its own: `size` is `solvers`. Of each process the world
    has the number, `node` of `nodes`, and on its host `rank_on_host`; `size` counts the solvers of
    all. Only node 0 writes snapshots. When a script ends with an exception, the others raise it;
    when it ends otherwise, as by sys.exit, those that wait for it raise SyncError with its host and
    exit code. UsageError says what is missing.
    """
    global _world
    if solvers < 1:
        raise UsageError(f"a process has 1 solver or more, not {solvers}")
    if _world.nodes > 1:
        if _world.solvers[_world.node] != solvers:
            known = _world.solvers[_world.node]
            raise UsageError(f"the other processes know that this one has {known} solver(s)")
    elif launched():
        joined = join_launched()
        assert isinstance(joined.transport, MpiTransport)
        set_num_threads(joined.transport.threads)
        joined.join(solvers)
        _world = joined
        vars(sys)["exit"] = partial(_exit, sys.exit)
        atexit.register(_leave)
    else:
        _world = World(solvers=solvers)
    return _world


def _exit(exits: Callable[[Any], NoReturn], status: Any = None) -> NoReturn:
    """Call sys.exit and keep its status, which Python does not pass to functions called at exit."""
    global _status
    _status = status if isinstance(status, int) else int(status is not None)
    exits(status)


def _leave() -> None:
    """Leave the others when the script ends; report to them the exception that ended it, if any."""
    error = getattr(sys, "last_value", None)
    try:
        if error is None:
            _world.leave(_status)
            return
    except CaffeError as met:
        error = met
    if _world.failure() is None:
        _world.send_failure(error)
    _world.close(failed=True)
