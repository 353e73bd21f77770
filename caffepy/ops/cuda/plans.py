"""Plans of cuDNN graphs: made at the first call with their shapes, then run.

The backend's heuristics rank the engines of a graph. With tuning on, the plans of the first
CANDIDATES of them are timed with the arrays of that call, and the fastest is taken:

    find -> in _plans?                                             -> Plan
         -> a _Search: in tuned_plans (disk)?  build that one      -> Plan
                       else ask heuristics, build CANDIDATES
         -> choose: time them, or take the first                   -> Plan, remembered if timed
                    none runs? ask the next heuristics

Searches ask and build in threads of a pool, if the calls are made in a block of `compile_ahead`
before.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import product
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.device import cudnn, math_mode
from caffepy.device.threads import cores
from caffepy.ops.cuda import autotune
from caffepy.ops.cuda.compiler import log_progress, looks_ahead
from caffepy.ops.cuda.context import LARGEST_WORKSPACE, context, lock, temporary_workspace

log = logging.getLogger(__name__)

CANDIDATES = 6, 10, 30
"""The number of plans that are timed for an operation, a large one and one of the largest."""

BETTER = 0.98
"""A plan replaces an earlier one if it takes less than this part of its time."""

SECONDS_EACH = 0.05
"""No further plan is timed once this much time, for each of the candidates, is gone."""

HEURISTICS = cudnn.HEURISTIC_A, cudnn.HEURISTIC_FALLBACK

DECLINED = cudnn.CudnnError, cupy.cuda.memory.OutOfMemoryError
"""Errors raised for graphs and plans that are not supported."""

Build = Callable[[], Sequence[cudnn.Descriptor]]
"""Return the operations of a graph; the arguments of `Plan.run` are its tensors 0, 1, ..."""


class Plan:
    """A plan that runs with arrays, the last of which is the output."""

    def __init__(self, built: cudnn.Plan) -> None:
        self._built = built
        context().workspace.reserve(built.workspace)

    def run(self, *arrays: Any) -> None:
        """Execute on the current stream.

        Plans assume that every array begins at a multiple of 16 bytes. A part of a larger array may
        not; it is copied. Arrays fill their memory, so a copy of the memory is a copy of the array
        in any layout.
        """
        here = context()
        pointers = [array.data.ptr for array in arrays]
        if any(pointer % cudnn.ALIGNED for pointer in pointers):
            copies = [
                here.array(f"copy {i}", a.shape, a.dtype) if a.data.ptr % cudnn.ALIGNED else a
                for i, a in enumerate(arrays)
            ]
            for array, copy in zip(arrays[:-1], copies, strict=False):
                here.copy(array, copy)
            self.run(*copies)
            here.copy(copies[-1], arrays[-1])
            return
        workspace = here.workspace.reserve(self._built.workspace)
        self._built.execute(here.cudnn, pointers, workspace)


INEXACT = {("backward_weight", 17)}
"""Operations and engines with errors of 6e-4 on float32 (cuDNN 9.19, second convolution of
CaffeNet): they round more than float32 does without a numerical note that says so.
"""

Key = tuple[int, str]  # device, full name

_plans: dict[Key, Plan | None] = {}
_searches: dict[Key, Future["_Search"]] = {}


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "caffepy-plans")


def find(
    name: str,
    dtype: DTypeLike,
    build: Build,
    arrays: Sequence[Any],
    candidates: int = CANDIDATES[0],
) -> Plan | None:
    """Return the plan for a graph, None if cuDNN has none; None, too, in a block of
    `compile_ahead`, where the search for it begins.

    The name says all that the graph and its arrays depend on. The dtype is that of the graph's
    arrays; up to `candidates` plans are timed.
    """
    full = autotune.full_name(name, dtype)
    key = (cupy.cuda.runtime.getDevice(), full)
    if looks_ahead():
        if key not in _plans and key not in _searches:
            search = _Search(key, np.dtype(dtype), build, candidates)
            _searches[key] = _pool().submit(search.begin_in_thread)
        return None
    with lock:
        if key not in _plans:
            begun = _searches.pop(key, None)
            if begun is None or begun.cancel():
                search = _Search(key, np.dtype(dtype), build, candidates).begin(context().cudnn)
            else:
                search = begun.result()
            _plans[key] = search.choose(arrays)
            log_progress("%d plans of cuDNN chosen", len(_plans))
        return _plans[key]


class _Thread(threading.local):
    """cuDNN's handles of this thread, by device: no two threads may use one at a time."""

    def __init__(self) -> None:
        self.handles: dict[int, int] = {}


_thread = _Thread()


def _handle(device: int) -> int:
    if device not in _thread.handles:
        _thread.handles[device] = cudnn.create_handle(0)
    return _thread.handles[device]


class _Search:
    """The plans of a graph to choose from: that which was the fastest before, or the first ones
    that can be built.
    """

    def __init__(self, key: Key, dtype: np.dtype[Any], build: Build, candidates: int) -> None:
        self.device, self.name = key
        self.build = build
        self.known = autotune.tuned_plans().get(self.name) if autotune.is_on() else None
        self.count = candidates if autotune.may_time() else 1
        self.excluded = _excluded_notes(dtype)
        self.plans: list[tuple[cudnn.Engine | None, cudnn.Plan]] = []
        # Plans with run-time compilation take long to build: only if there is no other.
        self._left = product(([cudnn.RUNTIME_COMPILATION], []), HEURISTICS)

    def begin_in_thread(self) -> "_Search":
        """Ask cuDNN and build in another thread."""
        with cupy.cuda.Device(self.device):
            return self.begin(_handle(self.device))

    def begin(self, handle: int) -> "_Search":
        """Ask cuDNN and build."""
        self.handle = handle
        if not self._rebuild():
            self._ask()
        return self

    def _ask(self) -> None:
        """Build the first plans of the next heuristic that has any."""
        self.plans = []
        for without, heuristic in self._left:
            self._build(heuristic, without)
            if self.plans:
                break

    def _rebuild(self) -> bool:
        """Build the plan that was the fastest before, if it can still be built."""
        if not isinstance(self.known, str):
            return False
        try:
            config = self._graph().config(self.known)
            self.plans = [(None, cudnn.Plan(self.handle, config))]
        except DECLINED as error:
            log.debug("a tuned plan cannot be built: %s", error)
            self.known = None
        return bool(self.plans)

    def _graph(self) -> cudnn.Graph:
        return cudnn.Graph(self.handle, self.build())

    def _build(self, heuristic: int, without: Sequence[int]) -> None:
        """Build the first plans of a heuristic that have none of these notes on behavior."""
        try:
            engines = self._graph().engines(heuristic)
        except DECLINED as error:
            log.debug("%s: cuDNN has no plan (%s)", self.name, error)
            return
        for engine in engines:
            if self.excluded & set(engine.numerical_notes) or self._is_inexact(engine.number):
                continue
            if len(self.plans) == self.count or set(without) & set(engine.behavior_notes):
                continue
            try:
                plan = cudnn.Plan(self.handle, engine.config)
            except DECLINED as error:
                log.debug("%s: engine %d declined (%s)", self.name, engine.number, error)
                continue
            if plan.workspace <= LARGEST_WORKSPACE:
                self.plans.append((engine, plan))

    def _is_inexact(self, engine: int) -> bool:
        return "float32 fp32" in self.name and (self.name.split()[0], engine) in INEXACT

    def choose(self, arrays: Sequence[Any]) -> Plan | None:
        """Return the plan to take, None without any: the fastest with these arrays, if they may be
        timed now, else the first.
        """
        if not self.plans:
            return None
        if self.known or not autotune.may_time():
            return Plan(self.plans[0][1])
        if not autotune.seconds_spent:
            log.info("Timing cuDNN plans (once per shape and machine)")
        wait(list(_searches.values()))  # busy threads would delay the launches that are timed
        with temporary_workspace():
            while (fastest := self._fastest(arrays)) is None:
                self.handle = context().cudnn  # not that of another thread
                self._ask()
                if not self.plans:
                    return None
        engine, plan = fastest
        autotune.remember(self.name, engine.name)
        return Plan(plan)

    def _fastest(self, arrays: Sequence[Any]) -> tuple[cudnn.Engine, cudnn.Plan] | None:
        start = time.perf_counter()
        found: list[tuple[cudnn.Engine, cudnn.Plan]] = []
        calls: list[Callable[[], None]] = []
        times: list[float] = []
        for engine, built in self.plans:
            assert engine is not None
            late = time.perf_counter() - start > SECONDS_EACH * self.count
            if found and late:
                break
            try:
                call = partial(Plan(built).run, *arrays)
                times.append(autotune.milliseconds(call, min(times, default=float("inf"))))
            except DECLINED as error:
                log.debug("%s: engine %d declined (%s)", self.name, engine.number, error)
                continue
            found.append((engine, built))
            calls.append(call)
        best = autotune.choice(calls, times, better=BETTER) if found else None
        autotune.add_time(start)
        if best is None:
            return None
        log.debug("%s: %s of %s ms", self.name, found[best][0].name, times)
        return found[best]


def _excluded_notes(dtype: np.dtype[Any]) -> set[int]:
    """Return the numerical notes that plans may not have."""
    mode = math_mode.current()
    excluded = {cudnn.NONDETERMINISTIC} if mode.deterministic else set[int]()
    if dtype == np.float32 and mode.precision == "fp32":
        excluded |= {cudnn.TENSOR_CORE, cudnn.DOWN_CONVERT_INPUTS}
        excluded |= {cudnn.REDUCED_PRECISION_REDUCTION, cudnn.FFT}
        excluded |= set(cudnn.WINOGRAD)  # errors of 3e-3
    return excluded
