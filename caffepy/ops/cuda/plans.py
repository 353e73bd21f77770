"""Plans of cuDNN graphs: made at the first call with their shapes, then run.

The backend's heuristics rank the plans of a graph. With tuning on, the first CANDIDATES of them are
timed with the arrays of that call, and the fastest is taken:

    find -> in _plans?                          -> Plan
         -> in tuned_plans (disk)?  rebuild     -> Plan
         -> make: plans of each heuristic mode, first those built without run-time compilation
                   choose: time them, or take the first that can be built
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

    def __init__(self, graph: Any, tensors: Sequence[Any], index: int) -> None:
        graph.build_plan_at_index(index)
        self.graph, self.tensors = graph, tensors
        self.workspace = int(graph.get_workspace_size())
        context().workspace.reserve(self.workspace)

    def run(self, *arrays: Any) -> None:
        """Execute on the current stream.

        Plans assume that every array begins at a multiple of 16 bytes. A part of a larger array may
        not; it is copied. Arrays fill their memory, so a copy of the memory is a copy of the array
        in any layout.
        """
        here = context()
        pointers = [array.data.ptr for array in arrays]
        if any(pointer % ALIGNED for pointer in pointers):
            copies = [
                here.array(f"copy {i}", a.shape, a.dtype) if a.data.ptr % ALIGNED else a
                for i, a in enumerate(arrays)
            ]
            for array, copy in zip(arrays[:-1], copies, strict=False):
                here.copy(array, copy)
            self.run(*copies)
            here.copy(copies[-1], arrays[-1])
            return
        to = dict(zip(self.tensors, pointers, strict=True))
        self.graph.execute(to, here.workspace.reserve(self.workspace), handle=here.cudnn)


INEXACT = {("backward_weight", 17)}
"""Operations and engines with errors of 6e-4 on float32 (cuDNN 9.19, second convolution of
CaffeNet): they round more than float32 does without a numerical note that says so.
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
            _plans[key] = _Search(full, np.dtype(dtype), build).make(arrays, candidates)
        return _plans[key]


class _Search:
    def __init__(self, name: str, dtype: np.dtype[Any], build: Build) -> None:
        self.name, self.dtype, self.build = name, dtype, build
        self.cudnn = cudnn = import_cudnn()
        self.handle = context().cudnn  # an unusable library raises here, not as a missing plan
        self.modes = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
        # What the frontend raises for graphs and plans that are not supported.
        unsupported = (cudnn.cudnnGraphNotSupportedError, NotImplementedError)
        out_of_memory = cupy.cuda.memory.OutOfMemoryError
        self.declined = (*unsupported, RuntimeError, ValueError, out_of_memory)

    def make(self, arrays: Sequence[Any], candidates: int) -> Plan | None:
        timing = autotune.may_time()
        if autotune.is_on() and (known := autotune.tuned_plans().get(self.name)):
            plan = self.rebuild(known)
            if plan is not None:
                return plan
        # Plans with run-time compilation take long to build: only if there is no other.
        compiled = [self.cudnn.behavior_note.RUNTIME_COMPILATION]
        for without, mode in product((compiled, []), self.modes):
            try:
                graph, tensors = self.graph(mode)
                graph.deselect_workspace_greater_than(LARGEST_WORKSPACE)
                graph.deselect_numeric_notes(self.excluded())
                graph.deselect_behavior_notes(without)
            except self.declined as error:
                log.debug("%s: cuDNN has no plan (%s)", self.name, error)
                continue
            with temporary_workspace():
                chosen = self.choose(graph, tensors, arrays if timing else None, candidates)
            if chosen is not None:
                if timing:
                    autotune.remember(self.name, graph.get_plan_name_at_index(chosen))
                return Plan(graph, tensors, chosen)
        return None

    def graph(self, mode: Any) -> tuple[Any, Sequence[Any]]:
        kinds = self.cudnn.data_type
        outside = {
            "float32": kinds.FLOAT,
            "float64": kinds.DOUBLE,
            "float16": kinds.HALF,
            "uint16": kinds.BFLOAT16,
        }
        inside = kinds.DOUBLE if self.dtype == np.float64 else kinds.FLOAT
        graph = self.cudnn.pygraph(
            handle=self.handle,
            io_data_type=outside[self.dtype.name],
            intermediate_data_type=inside,
            compute_data_type=inside,
        )
        tensors = self.build(self.cudnn, graph)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([mode])
        return graph, tensors

    def excluded(self) -> list[Any]:
        note, mode = self.cudnn.numerical_note, math_mode.current()
        excluded = [note.NONDETERMINISTIC] if mode.deterministic else []
        if self.dtype == np.float32 and mode.precision == "fp32":
            excluded += [note.TENSOR_CORE, note.DOWN_CONVERT_INPUTS]
            excluded += [note.REDUCED_PRECISION_REDUCTION, note.FFT]
            # Winograd's errors are 3e-3.
            excluded += [getattr(note, name) for name in dir(note) if name.startswith("WINOGRAD")]
        return excluded

    def is_inexact(self, graph: Any, index: int) -> bool:
        engine = re.match(r"eng(\d+)", graph.get_plan_name_at_index(index))
        return engine is not None and (self.name.split()[0], int(engine[1])) in INEXACT

    def choose(
        self, graph: Any, tensors: Sequence[Any], arrays: Sequence[Any] | None, candidates: int
    ) -> int | None:
        """Return the index of the plan to take, or None: the fastest with these arrays, without
        arrays the first that can be built.
        """
        start = time.perf_counter()
        best, best_ms, tried = None, float("inf"), 0
        if arrays is not None and not autotune.seconds_spent:
            log.info("Timing cuDNN plans (once per shape and machine)")
        for i in range(graph.get_execution_plan_count()):
            late = time.perf_counter() - start > SECONDS_EACH * candidates
            if tried and (tried == candidates or late):
                break
            try:
                plan = Plan(graph, tensors, i)
                if "float32 fp32" in self.name and self.is_inexact(graph, i):
                    continue
                if arrays is None:
                    return i
                ms = autotune.milliseconds(lambda run=plan.run: run(*arrays), best_ms)  # type: ignore[misc]
            except self.declined as error:
                log.debug("%s: plan %d declined (%s)", self.name, i, error)
                continue
            tried += 1
            if ms < autotune.BETTER * best_ms:
                best, best_ms = i, ms
        autotune.add_time(start)
        if best is not None:
            log.debug("%s: plan %d of %d takes %.3f ms", self.name, best, tried, best_ms)
        return best

    def rebuild(self, tuned: Any) -> Plan | None:
        """Return the plan that was the fastest before, if it can still be built."""
        for mode in self.modes:
            try:
                graph, tensors = self.graph(mode)
                for i in range(graph.get_execution_plan_count()):
                    if graph.get_plan_name_at_index(i) == tuned:
                        return Plan(graph, tensors, i)
            except self.declined as error:
                log.debug("a tuned plan cannot be built: %s", error)
        return None
