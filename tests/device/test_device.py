import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import caffepy.device.cuda
from caffepy.core.errors import DataError
from caffepy.device import graph_nodes
from caffepy.device.cuda import CudaDevice, CudaGraph
from caffepy.device.device import Device
from caffepy.device.streams import Streams


def test_where_random_numbers_stand_is_taken_up_again() -> None:
    device = Device(3)
    device.draw_seed()
    state = device.random.state
    assert device.random.state is state
    drawn = [device.draw_seed(), device.rng.random()]
    assert device.random.state is not state
    device.random.state = state
    assert [device.draw_seed(), device.rng.random()] == drawn


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_random_numbers_come_from_the_generators_words_only(position: int) -> None:
    device = Device(3)
    state = dict(device.random.state)
    state["state"] = {**state["state"], "pos": position}
    with pytest.raises(ValueError, match=f"position {position} among 624 random words"):
        device.random.state = state
    assert device.draw_seed() == Device(3).draw_seed()


def test_seeds_fix_the_numbers() -> None:
    device = Device()
    device.seed(5)
    assert device.draw_seed() == Device(5).draw_seed()


def test_errors_are_seen_at_once_and_once() -> None:
    flag = Device().error_flag(lambda value: DataError(f"{value:g} is bad"))
    flag.check()
    flag.found[:] = 1, np.nan
    with pytest.raises(DataError, match="nan is bad"):
        flag.check()
    flag.check()


@pytest.mark.gpu
def test_devices_take_up_the_streams_of_those_that_are_gone() -> None:
    from caffepy.ops.cuda.context import context

    def use(*names: str) -> list[int]:
        device = CudaDevice(0)
        with device.scope(), device.overlapping():
            found = [id(context())]
            for name in names:
                with device.side_stream(name):
                    found.append(id(context()))
        return found

    gc.collect()  # the streams of other tests' devices come back now, not between the two
    own, layer, sync = use("layer", "sync")
    gc.collect()
    assert use("sync", "layer") == [own, sync, layer]
    one, other = CudaDevice(0), CudaDevice(0)
    assert one.stream.ptr != other.stream.ptr


@pytest.mark.gpu
def test_memory_first_used_on_a_side_stream_is_cleared_there() -> None:
    """The main stream is busy meanwhile: what it would clear later is written by then."""
    from caffepy.device.blob import Blob
    from caffepy.ops.cuda.compiler import kernel

    device = CudaDevice(0)
    spin, cycles = kernel("spin", "spin"), np.int64(100_000_000)
    blob = Blob((1000,), device=device)
    with device.scope(), device.overlapping(), device.side_stream("branch 1"):
        with device.stream:
            spin((1,), (1,), (cycles,))
        blob.data[...] = 7
        blob.diff[...] = 8
    assert (blob.host_data == 7).all()
    assert (blob.host_diff == 8).all()


class _Noting:
    """CuPy's streams and events, of which it notes who waits for how much of whose work."""

    def __init__(self) -> None:
        self.cuda = self
        self.given: dict[int, int] = {}
        self.waits: list[tuple[int, tuple[int, int]]] = []

    def Device(self, gpu: int) -> AbstractContextManager[None]:  # noqa: N802
        return nullcontext()

    def Stream(self, **_: object) -> "_NotingStream":  # noqa: N802
        return _NotingStream(self)

    def Event(self, disable_timing: bool) -> "_NotingEvent":  # noqa: N802
        return _NotingEvent()


class _NotingStream(nullcontext[None]):
    def __init__(self, of: _Noting) -> None:
        super().__init__()
        self.of, self.ptr = of, len(of.given)
        of.given[self.ptr] = 0

    def work(self) -> None:
        self.of.given[self.ptr] += 1

    def wait_event(self, event: "_NotingEvent") -> None:
        self.of.waits.append((self.ptr, event.behind))


class _NotingEvent:
    def record(self, stream: _NotingStream) -> None:
        self.behind = stream.ptr, stream.of.given[stream.ptr]


def test_a_side_stream_waits_for_what_was_enqueued_before_the_call() -> None:
    noting = _Noting()
    streams = Streams(noting, 10**6)
    main = streams.main
    with streams.overlapping():
        main.work()
        beside = streams.fork("layer")
        main.work()
        with beside:
            side = streams.current
            assert side is not main
            side.work()
            with streams.fork("other"):
                assert streams.current is side
        assert noting.waits == [(side.ptr, (main.ptr, 1))]
        with streams.fork("other", "layer"):
            other = streams.current
        assert noting.waits[1:] == [(other.ptr, (main.ptr, 2)), (other.ptr, (side.ptr, 1))]
        streams.wait("layer")
        assert noting.waits[3:] == [(main.ptr, (side.ptr, 1))]
    assert noting.waits[4:] == [(main.ptr, (other.ptr, 0))]
    with streams.fork("layer"):
        assert streams.current is main


class _FailedError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")


@pytest.mark.parametrize(
    ("status", "idle", "lost"),
    [(0, True, ""), (600, False, ""), (700, True, "cudaError 700"), (900, True, "")],
    ids=["done", "at work", "failed for good", "recording"],
)
def test_a_gpu_whose_memory_cannot_be_read_is_lost_and_not_at_work(
    status: int, idle: bool, lost: str
) -> None:
    """CuPy's `Stream.done` raises nothing: it is False whatever is wrong."""
    device = object.__new__(CudaDevice)
    streams = device._streams = object.__new__(Streams)
    streams.main = SimpleNamespace(ptr=1, done=True)
    streams.side = {"layer": SimpleNamespace(ptr=2, done=status == 0)}
    runtime = SimpleNamespace(streamQuery={2: status}.__getitem__, CUDARuntimeError=_FailedError)
    device._cupy = streams._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    assert (device.idle, device.lost) == (idle, lost)


@pytest.mark.gpu
def test_small_memsets_of_a_captured_graph_are_done_by_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In their place: after what was before, before what comes after them, and no others."""
    counts = []

    def counted(graph: int, gpu: int) -> int:
        counts.append(graph_nodes.replace_memsets(graph, gpu))
        return counts[-1]

    monkeypatch.setattr(caffepy.device.cuda, "replace_memsets", counted)
    device = CudaDevice(0)
    with device.scope():
        import cupy

        small, large, sums = cupy.ones(300, "f"), cupy.ones(1 << 20, "f"), cupy.zeros(300, "f")

        def work() -> None:
            sums.__iadd__(small)
            small.fill(0)
            large.fill(0)
            small.__iadd__(2)
            large.__iadd__(3)

        work()
        graph = device.capture(work)
        for _ in range(3):
            graph.replay()
        assert counts == [1]
        assert (device.on_host(small) == 2).all()
        assert (device.on_host(large) == 3).all()
        assert (device.on_host(sums) == 1 + 3 * 2).all()


def test_a_graph_gives_back_what_it_holds_whoever_refers_to_it() -> None:
    class Graph:
        """A graph that CuPy captured."""

    graph = Graph()
    held = weakref.ref(graph)
    made = CudaGraph(graph, None, None)
    del graph
    made.close()
    assert held() is None
