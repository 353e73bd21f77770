"""Plans of cuDNN graphs: made at the first call with their shapes, then run.

The backend's heuristics rank the plans of a graph. With tuning on, the first CANDIDATES of them are
timed with the arrays of that call, and the fastest is taken:

    find -> in _plans?                        -> Plan
         -> in tuned_plans (disk)?  _rebuild  -> Plan
         -> _make: plans of each heuristic mode, first those built without run-time compilation
                   _choose: time them, or take the first that can be built
                   -> Plan, remembered in tuned_plans if it was timed
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.device import math_mode
from caffepy.ops.cuda import autotune
from caffepy.ops.cuda.context import (
    LARGEST_WORKSPACE,
    context,
    import_cudnn,
    lock,
    temporary_workspace,
)
from caffepy.ops.cuda.tuned_plans import remember, tuned_plans

log = logging.getLogger(__name__)

CANDIDATES, MORE_CANDIDATES = 6, 10
"""The number of plans that are timed for an operation, and for a large one."""

SECONDS_EACH = 0.05
"""No further plan is timed once this much time, for each of the candidates, is gone."""

ALIGNED = 16

Build = Callable[[Any, Any], Sequence[Any]]
"""(cudnn, graph) -> the graph's tensors in the order of the arguments of `Plan.run`."""


class Plan:
    """A graph with one plan chosen. The last of its tensors is the output."""

    def __init__(self, graph: Any, tensors: Sequence[Any], workspace: int) -> None:
        self.graph = graph
        self.tensors = tensors
        self.workspace = workspace

    def run(self, *arrays: Any) -> None:
        """Execute on the current stream, on copies of arrays that are not aligned."""
        pointers = [array.data.ptr for array in arrays]
        if any(pointer % ALIGNED for pointer in pointers):
            self._run_on_copies(arrays)
            return
        here = context()
        to = dict(zip(self.tensors, pointers, strict=True))
        self.graph.execute(to, here.workspace.reserve(self.workspace), handle=here.cudnn)

    def _run_on_copies(self, arrays: Sequence[Any]) -> None:
        """Run on aligned copies: plans assume that every array begins at a multiple of 16 bytes,
        which a part of a larger array may not.

        Arrays fill their memory, so a copy of the memory is a copy of the array in any layout.
        """
        here = context()
        copies = [
            here.array(f"copy {i}", array.shape, array.dtype) if array.data.ptr % ALIGNED else array
            for i, array in enumerate(arrays)
        ]
        for array, copy in zip(arrays[:-1], copies, strict=False):
            here.copy(array, copy)
        self.run(*copies)
        here.copy(copies[-1], arrays[-1])


INEXACT = {("backward_weight", 17)}
"""Operations and engines with errors of 6e-4 on float32 (cuDNN 9.19, second convolution of
CaffeNet).
"""

_plans: dict[tuple[int, str], Plan | None] = {}


def find(
    name: str, dtype: DTypeLike, build: Build, arrays: Sequence[Any], candidates: int = CANDIDATES
) -> Plan | None:
    """Return the plan for a graph, None if cuDNN has none.

    The name says all that the graph and its arrays depend on. The dtype is that of the graph's
    arrays unless `build` says otherwise; up to `candidates` plans are timed.
    """
    full = autotune.full_name(name, dtype)
    key = (cupy.cuda.runtime.getDevice(), full)
    with lock:
        if key not in _plans:
            _plans[key] = _make(full, np.dtype(dtype), build, arrays, candidates)
        return _plans[key]


def _make(
    name: str, dtype: np.dtype[Any], build: Build, arrays: Sequence[Any], candidates: int
) -> Plan | None:
    cudnn = import_cudnn()
    _ = context().cudnn  # an unusable library raises here, not as a plan that is not supported
    timing = autotune.may_time()
    if autotune.is_on() and (known := tuned_plans().get(name)):
        plan = _rebuild(cudnn, known, dtype, build)
        if plan is not None:
            return plan
    # Plans with run-time compilation take long to build: only if there is no other.
    compiled = [cudnn.behavior_note.RUNTIME_COMPILATION]
    for without, mode in product((compiled, []), _modes(cudnn)):
        try:
            graph, tensors = _graph(cudnn, dtype, build)
            graph.create_execution_plans([mode])
            graph.deselect_workspace_greater_than(LARGEST_WORKSPACE)
            graph.deselect_numeric_notes(_excluded(cudnn, dtype))
            graph.deselect_behavior_notes(without)
        except _unsupported(cudnn) as error:
            log.debug("%s: cuDNN has no plan (%s)", name, error)
            continue
        with temporary_workspace():
            chosen = _choose(cudnn, name, graph, tensors, arrays if timing else None, candidates)
        if chosen is not None:
            if timing:
                remember(name, graph.get_plan_name_at_index(chosen))
            return _built(graph, tensors, chosen)
    return None


def _modes(cudnn: Any) -> tuple[Any, Any]:
    return cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK


def _built(graph: Any, tensors: Sequence[Any], index: int) -> Plan:
    graph.build_plan_at_index(index)
    plan = Plan(graph, tensors, int(graph.get_workspace_size()))
    context().workspace.reserve(plan.workspace)
    return plan


def _unsupported(cudnn: Any) -> tuple[type[BaseException], ...]:
    """Return the errors that the frontend raises for graphs and plans that are not supported."""
    return (cudnn.cudnnGraphNotSupportedError, NotImplementedError, RuntimeError, ValueError)


def _graph(cudnn: Any, dtype: np.dtype[Any], build: Build) -> tuple[Any, Sequence[Any]]:
    kinds = cudnn.data_type
    outside = {
        "float32": kinds.FLOAT,
        "float64": kinds.DOUBLE,
        "float16": kinds.HALF,
        "uint16": kinds.BFLOAT16,
    }
    inside = kinds.DOUBLE if dtype == np.float64 else kinds.FLOAT
    graph = cudnn.pygraph(
        handle=context().cudnn,
        io_data_type=outside[dtype.name],
        intermediate_data_type=inside,
        compute_data_type=inside,
    )
    tensors = build(cudnn, graph)
    graph.validate()
    graph.build_operation_graph()
    return graph, tensors


def _excluded(cudnn: Any, dtype: np.dtype[Any]) -> list[Any]:
    note = cudnn.numerical_note
    mode = math_mode.current()
    excluded = [note.NONDETERMINISTIC] if mode.deterministic else []
    if dtype == np.float32 and mode.precision == "fp32":
        excluded += [
            note.TENSOR_CORE,
            note.DOWN_CONVERT_INPUTS,
            note.REDUCED_PRECISION_REDUCTION,
            note.FFT,
        ]
        # Winograd's errors are 3e-3.
        excluded += [getattr(note, name) for name in dir(note) if name.startswith("WINOGRAD")]
    return excluded


def _is_inexact(name: str, graph: Any, index: int) -> bool:
    """True if fp32 is set and the plan's engine rounds more than float32 does without a numerical
    note that says so.
    """
    engine = re.match(r"eng(\d+)", graph.get_plan_name_at_index(index))
    return (
        "float32 fp32" in name
        and engine is not None
        and (name.split()[0], int(engine[1])) in INEXACT
    )


def _choose(
    cudnn: Any,
    name: str,
    graph: Any,
    tensors: Sequence[Any],
    arrays: Sequence[Any] | None,
    candidates: int,
) -> int | None:
    """Return the index of the plan to take, or None: the fastest with these arrays, without arrays
    the first that can be built.
    """
    start = time.perf_counter()
    best, best_ms, tried = None, float("inf"), 0
    if arrays is not None and not autotune.seconds_spent:
        log.info("Timing cuDNN plans (once per shape and machine)")
    for i in range(graph.get_execution_plan_count()):
        if tried and (
            tried == candidates or time.perf_counter() - start > SECONDS_EACH * candidates
        ):
            break
        try:
            plan = _built(graph, tensors, i)
            if _is_inexact(name, graph, i):
                continue
            if arrays is None:
                return i
            ms = autotune.milliseconds(lambda run=plan.run: run(*arrays), best_ms)  # type: ignore[misc]
        except (*_unsupported(cudnn), cupy.cuda.memory.OutOfMemoryError) as error:
            log.debug("%s: plan %d declined (%s)", name, i, error)
            continue
        tried += 1
        if ms < autotune.BETTER * best_ms:
            best, best_ms = i, ms
    autotune.add_time(start)
    if best is not None:
        log.debug("%s: plan %d of %d takes %.3f ms", name, best, tried, best_ms)
    return best


def _rebuild(cudnn: Any, tuned: Any, dtype: np.dtype[Any], build: Build) -> Plan | None:
    """Return the plan that was the fastest before, if it can still be built."""
    for mode in _modes(cudnn):
        try:
            graph, tensors = _graph(cudnn, dtype, build)
            graph.create_execution_plans([mode])
            for i in range(graph.get_execution_plan_count()):
                if graph.get_plan_name_at_index(i) == tuned:
                    return _built(graph, tensors, i)
        except (*_unsupported(cudnn), cupy.cuda.memory.OutOfMemoryError) as error:
            log.debug("a tuned plan cannot be built: %s", error)
    return None
