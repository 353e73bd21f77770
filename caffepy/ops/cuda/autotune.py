"""The autotuner: of several candidates that compute the same, the fastest, timed once per shape and
kind of machine.

A candidate is a plan of cuDNN (plans.py) or a whole way to compute something, such as "convolution
with bias in one plan" or "convolution, then a bias kernel" (`fastest`). The first candidate is the
untimed default: it is taken if tuning is off (CAFFEPY_AUTOTUNE=0, deterministic), if the process
has spent its seconds, and inside a capture, where nothing can be timed. That is why a step runs
once before it is captured.

Choices are kept in ~/.cache/caffepy/plans-<cuDNN version>-<GPU model>.json. It maps the name of a
graph to cuDNN's name of the fastest plan, and the name of a choice between candidates to the index
of one.
"""

import atexit
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.cache import add_entries, cache_file, read
from caffepy.device import cudnn, math_mode
from caffepy.ops.cuda.compiler import compile_ahead, kernel, looks_ahead
from caffepy.ops.cuda.context import lock

log = logging.getLogger(__name__)

SECONDS = float(os.environ.get("CAFFEPY_AUTOTUNE_SECONDS") or 20)
"""After this much timing, a process takes the default of every further choice."""

BETTER = 0.95
"""A candidate replaces an earlier one if it takes less than this part of its time, by default."""

NEAR, TURNS, TIMES = 1.08, 3, 3
"""Candidates that take up to NEAR times the least time are timed again, in TURNS turns of TIMES
calls: so that processes choose alike.
"""

SPIN, SPIN_EACH = 200_000, 100_000
"""Clock cycles of the device before a timing and for each launch in it: the host is ahead then."""

SECONDS_BETWEEN_WRITES = 1.0

Run = Callable[..., Any]
Make = Callable[[], Run | None]

_autotune = os.environ.get("CAFFEPY_AUTOTUNE", "1") != "0"
seconds_spent = 0.0  # by the timings of this process
_loaded: dict[Path, dict[str, Any]] = {}
_unwritten: defaultdict[Path, dict[str, Any]] = defaultdict(dict)
_written = 0.0  # when, of time.perf_counter


def is_on() -> bool:
    """True if candidates are timed, and known results of earlier timings used."""
    return _autotune and not math_mode.current().deterministic


def may_time() -> bool:
    """True if calls may be timed now: tuning is on, time is left, no capture is under way."""
    return is_on() and seconds_spent < SECONDS and not cupy.cuda.get_current_stream().is_capturing()


def add_time(start: float) -> None:
    """Count the time since `start` (of time.perf_counter) as spent."""
    global seconds_spent
    seconds_spent += time.perf_counter() - start


def full_name(name: str, dtype: DTypeLike) -> str:
    """Return the name under which a choice is remembered: with all that it depends on."""
    mode = math_mode.current()
    suffix = " deterministic" * mode.deterministic
    return f"{name} {np.dtype(dtype).name} {mode.precision}{suffix}"


@cache
def _machine(device: int) -> str:
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{cudnn.version()}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}"


def path() -> Path:
    """Return the file of tuned plans for the current device."""
    return cache_file(f"plans-{_machine(cupy.cuda.runtime.getDevice())}.json")


def tuned_plans() -> dict[str, Any]:
    """Return the content of the file, which is read once."""
    file = path()
    if file not in _loaded:
        _loaded[file] = read(file)
    return _loaded[file]


def remember(name: str, fastest: Any) -> None:
    """Add an entry; where no file can be written, each process times for itself.

    Files are written once a second at most, and at the end of the process.
    """
    global _written
    tuned_plans()[name] = fastest
    _unwritten[path()][name] = fastest
    if time.perf_counter() - _written > SECONDS_BETWEEN_WRITES:
        write()
        _written = time.perf_counter()


@atexit.register
def write() -> None:
    """Write the entries that are not in their files yet."""
    for file in list(_unwritten):
        add_entries(file, _unwritten.pop(file))


def fastest(
    name: str,
    dtype: DTypeLike,
    candidates: Sequence[Make],
    arguments: Sequence[Any],
    launches: int = 1,
    better: float = BETTER,
) -> tuple[int, Run] | None:
    """Return the candidate that takes the least time with these arguments, and its index; they
    launch about this many kernels. One replaces an earlier one if it takes less than `better` of
    its time.

    Each candidate is a call that makes it, or returns None if there is none; None if none can be
    made, and in a block of `compile_ahead`, where what a candidate needs begins to be made. So it
    is called more than once, and must keep nothing of what it made. The result is remembered like a
    plan.
    """
    full = full_name(name, dtype)
    with lock:
        timing = may_time()
        known: Any = tuned_plans().get(full) if is_on() else None
        if known not in range(len(candidates)):
            known = None
        if looks_ahead():
            wanted = candidates if known is None else candidates[known : known + 1]
            for make in wanted if timing else wanted[:1]:
                make()
            return None
        if known is not None and (run := candidates[known]()) is not None:
            return known, run
        if timing:
            with compile_ahead():
                for make in candidates:
                    make()
        made: list[tuple[int, Run]] = []
        for i, make in enumerate(candidates):
            if (run := make()) is not None:
                made.append((i, run))
                if not timing:
                    break
        if len(made) < 2:
            return made[0] if made else None
        start = time.perf_counter()
        calls = [partial(run, *arguments) for _, run in made]
        times: list[float] = []
        for call in calls:
            times.append(milliseconds(call, min(times, default=float("inf")), launches))
        best = made[choice(calls, times, launches, better)]
        log.debug("%s: candidate %d of %s ms", full, best[0], times)
        add_time(start)
        remember(full, best[0])
        return best


def choice(
    calls: Sequence[Callable[[], object]],
    times: Sequence[float],
    launches: int = 1,
    better: float = BETTER,
) -> int:
    """Return the number of the fastest of these calls, of `launches` kernels each, which took
    `times` milliseconds: those near the least are timed again, in turns. The earlier one of two
    that take the same.
    """
    within = max(NEAR, better, 1 / better) * min(times)
    near = [i for i, ms in enumerate(times) if ms <= within]
    best = near[0]
    if len(near) > 1:
        turns = [[_timed(calls[i], TIMES, launches) for i in near] for _ in range(TURNS)]
        medians = dict(zip(near, np.median(turns, axis=0), strict=True))
        for i in near[1:]:
            if medians[i] < better * medians[best]:
                best = i
    return best


def run_kept(runs: dict[Any, Run], key: Any, make: Make, arguments: Sequence[Any]) -> Any:
    """Run what is kept under this key; make it first if it is not there.

    In a block of `compile_ahead` it is made, but neither kept nor run.
    """
    run = runs.get(key) or make()
    if looks_ahead():
        return None
    assert run is not None
    runs[key] = run
    return run(*arguments)


def milliseconds(
    call: Callable[[], object], limit: float = float("inf"), launches: int = 1
) -> float:
    """Return the device's time for a call of `launches` kernels, after one call to warm up.

    It is timed once, then several times in a row unless the first took half as long again as the
    limit.
    """
    call()
    taken = _timed(call, 1, launches)
    return taken if taken > 1.5 * limit else _timed(call, 5, launches)


def _timed(call: Callable[[], object], times: int, launches: int) -> float:
    """Return the milliseconds of a call, of `times` in a row.

    The stream spins before them, so that the host is ahead and launch latency is not measured.
    """
    stream = cupy.cuda.get_current_stream()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    kernel("spin", "spin")((1,), (1,), (np.int64(SPIN + SPIN_EACH * launches * times),))
    start.record(stream)
    for _ in range(times):
        call()
    stop.record(stream)
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / times
