"""Plans of cuDNN graphs: found, timed, remembered, run; and what calls into cuDNN and cuBLAS need
on each stream.

A plan is made at the first call with its shapes. The backend's heuristics rank the candidates;
unless timing is off (`autotune`), the first of them are timed with the arrays of that call, and the
winner is kept in memory and in ~/.cache/caffepy/plans-<cuDNN version>-<device>.json. Inside a
capture nothing is timed: let a step run once before.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.cache import cache_file, keep, read
from caffepy.core.errors import DeviceError
from caffepy.device.device import is_layer_lane
from caffepy.ops.cuda import precision
from caffepy.ops.cuda.compiler import kernel

log = logging.getLogger(__name__)

WORKSPACE = 256 << 20
"""Plans that need more bytes than this besides their arrays are not taken."""

CANDIDATES, MORE_CANDIDATES = 6, 10
SECONDS_EACH = 0.05
"""So many plans of an operation are timed, more of a large one, and no further one after so long
for each.
"""

SECONDS = float(os.environ.get("CAFFEPY_AUTOTUNE_SECONDS") or 20)
"""A process that spent so long on timing takes what the heuristics rank first."""

BETTER = 0.95
"""A plan takes the place of one that the heuristics rank higher if it needs less than this part of
its time.
"""

ALIGNED = 16

CUBLAS, CUBLAS_ASIDE = 32 << 20, 4 << 20
"""Bytes of cuBLAS's workspace, and those for gradients that layers compute aside; how it rounds
depends on that.

What solvers must all round alike runs on a device's own stream in one, and in a lane in another.
"""

Build = Callable[[Any, Any], Sequence[Any]]
"""(cudnn, graph) -> the graph's tensors in the order in which arrays are given to `Plan.run`."""

Run = Callable[..., Any]

_autotune = os.environ.get("CAFFEPY_AUTOTUNE", "1") != "0"
_lock = RLock()
_spent = 0.0  # seconds that timing took


def autotune(yes: bool) -> None:
    """Whether plans made from now on are timed; at first yes unless CAFFEPY_AUTOTUNE is 0."""
    global _autotune
    _autotune = yes


class Room:
    """Device memory that grows. What it once gave out stays allocated, since captured graphs know
    its address.
    """

    def __init__(self) -> None:
        self.size = 0
        self.kept: list[Any] = []

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes."""
        if size > self.size or not self.kept:
            size = max(size, 1 << 20, min(2 * self.size, WORKSPACE))
            self.kept.append(cupy.cuda.alloc(size))
            self.size = size
        return int(self.kept[-1].ptr)


class Context:
    """Handles and memory of one stream of one device; made at the first call on it.

    Calls on a stream run one after the other, so they share memory for what does not outlast them.
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self._cublas_size = CUBLAS_ASIDE if is_layer_lane(stream) else CUBLAS
        self.workspace = Room()
        self._rooms: dict[str, Room] = {}
        self._cudnn: Any = None
        self._cublas = 0

    def array(self, purpose: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array in memory that belongs to the purpose; the next call with this purpose gives it
        out again.
        """
        room = self._rooms.get(purpose) or self._rooms.setdefault(purpose, Room())
        room.reserve(prod(shape) * np.dtype(dtype).itemsize)
        return cupy.ndarray(shape, dtype, room.kept[-1])

    def copy(self, source: Any, to: Any) -> None:
        """Copy a contiguous array to another one, if they are not the same."""
        if source is not to:
            runtime = cupy.cuda.runtime
            runtime.memcpyAsync(
                to.data.ptr, source.data.ptr, to.nbytes, runtime.memcpyDeviceToDevice, self.stream
            )

    @property
    def cudnn(self) -> Any:
        """The stream's cuDNN handle."""
        if self._cudnn is None:
            cudnn = import_cudnn()
            try:
                handle = _handle("cudnn", cudnn.create_handle)
                cudnn.set_stream(handle=handle, stream=self.stream)
            except RuntimeError as error:
                raise DeviceError(f"cuDNN cannot be used on this GPU ({error})") from error
            self._cudnn = handle
        return self._cudnn

    def cublas(self, cublas: Any) -> int:
        """The stream's cuBLAS handle; setting the stream would take the workspace away, so both are
        set once.
        """
        if not self._cublas:
            handle = _handle("cublas", cublas.create)
            cublas.set_stream(handle, self.stream)
            size = self._cublas_size
            cublas.set_workspace(handle, self.array("cublas", (size,), np.uint8).data.ptr, size)
            self._cublas = handle
        return self._cublas


_spares: dict[tuple[int, str], Any] = {}


def _handle(kind: str, create: Callable[[], Any]) -> Any:
    """A new handle; one is always made in advance, since none can be made in a capture, which may
    bring new streams.
    """
    key = (cupy.cuda.runtime.getDevice(), kind)
    with _lock:
        handle = _spares.pop(key, None) or create()
        if not cupy.cuda.get_current_stream().is_capturing():
            _spares[key] = create()
    return handle


_contexts: dict[tuple[int, int], Context] = {}


def context() -> Context:
    """What belongs to the current device and stream."""
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    found = _contexts.get(key)
    if found is None:
        with _lock:
            found = _contexts.setdefault(key, Context(key[1]))
    return found


def import_cudnn() -> Any:
    """The cuDNN frontend."""
    try:
        import cudnn
    except Exception as error:  # it raises whatever its search for libcudnn ends with
        raise DeviceError(
            f"the cuDNN frontend cannot be used ({error}): pip install 'caffepy[cuda13]' (or cuda12)"
        ) from error
    return cudnn


class Plan:
    """A graph with one plan chosen. The last of its tensors is what it writes."""

    def __init__(self, graph: Any, tensors: Sequence[Any], workspace: int) -> None:
        self.graph = graph
        self.tensors = tensors
        self.workspace = workspace

    def run(self, *arrays: Any) -> None:
        """Execute on the current stream."""
        pointers = [array.data.ptr for array in arrays]
        if any(pointer % ALIGNED for pointer in pointers):
            self._run_on_copies(arrays)
            return
        here = context()
        to = dict(zip(self.tensors, pointers, strict=True))
        self.graph.execute(to, here.workspace.reserve(self.workspace), handle=here.cudnn)

    def _run_on_copies(self, arrays: Sequence[Any]) -> None:
        """For parts of larger arrays: graphs take it that all begin at multiples of 16 bytes, and
        cannot be told.

        Arrays fill their memory, so that a copy of it is one of the array, in whichever order that
        lies.
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


def _exact(name: str, dtype: DTypeLike) -> str:
    return f"{name} {np.dtype(dtype).name} {precision.get()}{' deterministic' * precision.deterministic()}"


def find(
    name: str, dtype: DTypeLike, build: Build, arrays: Sequence[Any], candidates: int = CANDIDATES
) -> Plan | None:
    """The plan for a graph, None if cuDNN has none. The name says all that the graph and its arrays
    depend on.

    The dtype is that of the graph's arrays unless `build` says otherwise; so many candidates are
    timed.
    """
    exact = _exact(name, dtype)
    key = (cupy.cuda.runtime.getDevice(), exact)
    with _lock:
        if key not in _plans:
            _plans[key] = _make(exact, np.dtype(dtype), build, arrays, candidates)
        return _plans[key]


def fastest(
    name: str, dtype: DTypeLike, ways: Sequence[Callable[[], Run | None]], arguments: Sequence[Any]
) -> tuple[int, Run] | None:
    """Of several ways to do the same, the one that takes the least time with these arguments, and
    its index.

    A way is made by a call that gives None where there is none. Where nothing is timed the first
    that there is is taken. Which one won is kept as winners are.
    """
    global _spent
    exact = _exact(name, dtype)
    with _lock:
        known: Any = _winners().get(exact) if _wanted() else None
        if known in range(len(ways)) and (run := ways[known]()) is not None:
            return known, run
        timing = may_time()
        made: list[tuple[int, Run]] = []
        for i, way in enumerate(ways):
            if (run := way()) is not None:
                made.append((i, run))
                if not timing:
                    break
        if len(made) < 2:
            return made[0] if made else None
        start, best, best_ms = time.perf_counter(), made[0], float("inf")
        for i, run in made:
            ms = milliseconds(lambda run=run: run(*arguments), best_ms)  # type: ignore[misc]
            log.debug("%s: way %d takes %.3f ms", exact, i, ms)
            if ms < BETTER * best_ms:
                best, best_ms = (i, run), ms
        _spent += time.perf_counter() - start
        _remember(exact, best[0])
        return best


def _make(
    name: str, dtype: np.dtype[Any], build: Build, arrays: Sequence[Any], candidates: int
) -> Plan | None:
    cudnn = import_cudnn()
    _ = context().cudnn  # a library that cannot be used at all is no plan that declines
    timing = may_time()
    if _wanted() and (known := _winners().get(name)):
        plan = _replay(cudnn, known, dtype, build)
        if plan is not None:
            return plan
    compiled = [
        cudnn.behavior_note.RUNTIME_COMPILATION
    ]  # plans that take long to build: only if there is no other
    for without, mode in product((compiled, []), _modes(cudnn)):
        try:
            graph, tensors = _graph(cudnn, dtype, build)
            graph.create_execution_plans([mode])
            graph.deselect_workspace_greater_than(WORKSPACE)
            graph.deselect_numeric_notes(_excluded(cudnn, dtype))
            graph.deselect_behavior_notes(without)
        except _declines(cudnn) as error:
            log.debug("%s: cuDNN has no plan (%s)", name, error)
            continue
        with _borrowed_workspace():
            chosen = _choose(cudnn, name, graph, tensors, arrays if timing else None, candidates)
        if chosen is not None:
            if timing:
                _remember(name, graph.get_plan_name_at_index(chosen))
            return _built(graph, tensors, chosen)
    return None


@contextmanager
def _borrowed_workspace() -> Iterator[None]:
    """Candidates have a workspace of their own, which goes back to the device."""
    here = context()
    kept, here.workspace = here.workspace, Room()
    try:
        yield
    finally:
        large = here.workspace.size > kept.size
        here.workspace = kept
        if large and not cupy.cuda.get_current_stream().is_capturing():
            cupy.get_default_memory_pool().free_all_blocks()


def _modes(cudnn: Any) -> tuple[Any, Any]:
    return cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK


def _built(graph: Any, tensors: Sequence[Any], index: int) -> Plan:
    graph.build_plan_at_index(index)
    plan = Plan(graph, tensors, int(graph.get_workspace_size()))
    context().workspace.reserve(plan.workspace)
    return plan


def _declines(cudnn: Any) -> tuple[type[BaseException], ...]:
    """What the frontend raises for graphs and plans that the backend cannot do."""
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
    excluded = [note.NONDETERMINISTIC] if precision.deterministic() else []
    if dtype == np.float32 and precision.get() == "fp32":
        excluded += [
            note.TENSOR_CORE,
            note.DOWN_CONVERT_INPUTS,
            note.REDUCED_PRECISION_REDUCTION,
            note.FFT,
        ]
        excluded += [
            getattr(note, name) for name in dir(note) if name.startswith("WINOGRAD")
        ]  # errors of 3e-3
    return excluded


def _is_inexact(name: str, graph: Any, index: int) -> bool:
    """Whether fp32 is asked for and the plan's engine rounds more than float32 does, though it
    carries no such note.
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
    """The index of the plan that is taken, or None; it is timed if there are arrays."""
    global _spent
    start = time.perf_counter()
    best, best_ms, tried = None, float("inf"), 0
    if arrays is not None and not _spent:
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
            ms = milliseconds(lambda run=plan.run: run(*arrays), best_ms)  # type: ignore[misc]
        except (*_declines(cudnn), cupy.cuda.memory.OutOfMemoryError) as error:
            log.debug("%s: plan %d declined (%s)", name, i, error)
            continue
        tried += 1
        if ms < BETTER * best_ms:
            best, best_ms = i, ms
    _spent += time.perf_counter() - start
    if best is not None:
        log.debug("%s: plan %d of %d takes %.3f ms", name, best, tried, best_ms)
    return best


def _wanted() -> bool:
    return _autotune and not precision.deterministic()


def may_time() -> bool:
    """Whether calls may be timed now: wanted, time left, and no capture under way."""
    return _wanted() and _spent < SECONDS and not cupy.cuda.get_current_stream().is_capturing()


def milliseconds(call: Callable[[], None], limit: float = float("inf"), times: int = 5) -> float:
    """The device's time for a call, after one call to warm up; one call tells enough if it takes
    twice the limit.
    """
    call()
    stream = cupy.cuda.get_current_stream()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    taken = 0.0
    for n in (1, times):
        kernel("spin", "spin")((1,), (1,), (np.int64(500_000 + 200_000 * n),))
        start.record(stream)
        for _ in range(n):
            call()
        stop.record(stream)
        stop.synchronize()
        taken = cupy.cuda.get_elapsed_time(start, stop) / n
        if taken > 2 * limit:
            break
    return float(taken)


def _replay(cudnn: Any, winner: Any, dtype: np.dtype[Any], build: Build) -> Plan | None:
    """The plan that won before, if it can still be had."""
    for mode in _modes(cudnn):
        try:
            graph, tensors = _graph(cudnn, dtype, build)
            graph.create_execution_plans([mode])
            for i in range(graph.get_execution_plan_count()):
                if graph.get_plan_name_at_index(i) == winner:
                    return _built(graph, tensors, i)
        except (*_declines(cudnn), cupy.cuda.memory.OutOfMemoryError) as error:
            log.debug("a plan that won before cannot be had: %s", error)
    return None


_winners_of: dict[Path, dict[str, Any]] = {}


@cache
def _machine(device: int) -> str:
    """What winners are good for: a version of cuDNN and a kind of device."""
    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return f"{import_cudnn().backend_version()}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}"


def _path() -> Path:
    return cache_file(f"plans-{_machine(cupy.cuda.runtime.getDevice())}.json")


def _winners() -> dict[str, Any]:
    """Name of a graph -> cuDNN's name of the plan that won, of a choice between several ways -> the
    index of one.
    """
    path = _path()
    if path not in _winners_of:
        _winners_of[path] = read(path)
    return _winners_of[path]


def _remember(name: str, what: Any) -> None:
    """Keep a winner; where nothing can be written, each process times for itself."""
    winners = _winners()
    winners[name] = what
    keep(_path(), winners)
