"""cuDNN's backend API, before a library that notes what it is told."""

import ctypes
from typing import Any

import pytest

from caffepy.core.errors import DeviceError
from caffepy.device import cudnn
from caffepy.device.cudnn import FLOAT, CudnnError, Descriptor, Graph


class Noted:
    """What was set of each descriptor by its address: (kind, {attribute: values})."""

    def __init__(self) -> None:
        self.made: list[tuple[int, dict[int, list[Any]]]] = []
        self.types: dict[int, int] = {}  # of the attributes, as last set
        self.alive: set[int] = set()
        self.status = 0

    def cudnnBackendCreateDescriptor(self, kind: int, pointer: Any) -> int:  # noqa: N802
        self.made.append((kind, {}))
        pointer._obj.value = len(self.made)
        self.alive.add(len(self.made))
        return 0

    def cudnnBackendSetAttribute(  # noqa: N802
        self, pointer: ctypes.c_void_p, name: int, type_: int, count: Any, array: Any
    ) -> int:
        assert len(array) == count.value
        self.made[(pointer.value or 0) - 1][1][name] = list(array)
        self.types[name] = type_
        return 0

    def cudnnBackendFinalize(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        return self.status

    def cudnnBackendDestroyDescriptor(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        self.alive.remove(pointer.value or 0)
        return 0

    def cudnnGetLastErrorString(self, text: Any, size: ctypes.c_size_t) -> None:  # noqa: N802
        text.value = b"no such engine"


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    library = Noted()
    monkeypatch.setattr(cudnn, "library", lambda: cudnn._Library(library, library))
    return library


def tensors(count: int) -> list[Descriptor]:
    return [cudnn.tensor(uid, (2, 3, 5, 7), (105, 1, 21, 3), FLOAT) for uid in range(count)]


def test_a_tensor(noted: Noted) -> None:
    made = cudnn.tensor(4, (2, 3), (3, 1), cudnn.BFLOAT16, virtual=True)
    attributes = {900: [16], 901: [9], 902: [2, 3], 903: [3, 1], 906: [4], 907: [True]}
    assert noted.made == [(17, attributes)], made


def test_operations_name_their_tensors_and_keep_them(noted: Noted) -> None:
    window = (1, 2), (3, 4), (5, 6)
    gradient = cudnn.convolution("backward_weight", window, FLOAT, tensors(3))
    x, dy, dw, how, operation = range(1, 6)
    kind, attributes = noted.made[operation - 1]
    assert (kind, attributes[716], attributes[717], attributes[715]) == (11, [x], [dy], [dw])
    assert attributes[714] == [how]
    convolution = noted.made[how - 1][1]
    assert (convolution[103], convolution[104], convolution[102]) == ([1, 2], [3, 4], [5, 6])
    assert noted.alive == {x, dy, dw, how, operation}
    del gradient
    assert not noted.alive


@pytest.mark.parametrize(("compute", "factor"), [(FLOAT, 4), (cudnn.DOUBLE, 5)])
def test_factors_are_of_the_type_in_which_cudnn_computes(
    noted: Noted, compute: int, factor: int
) -> None:
    """A float where cuDNN reads a double is 0, or any number."""
    cudnn.convolution("forward", ((1, 1), (0, 0), (1, 1)), compute, tensors(3))
    assert (noted.types[700], noted.types[701]) == (factor, factor)


def test_an_engine_of_a_name(noted: Noted) -> None:
    graph = Graph(7, [cudnn.relu(FLOAT, *tensors(2))])
    config = graph.config("eng17_k24=3_k2=-1")
    engine, *knobs, last = noted.made[-4:]
    assert engine[1][1301] == [17]
    assert [(kind, set_[600], set_[601]) for kind, set_ in knobs] == [
        (7, [24], [3]),
        (7, [2], [-1]),
    ]
    assert last == (
        3,
        {300: [len(noted.made) - 3], 302: [len(noted.made) - 2, len(noted.made) - 1]},
    )
    assert config.pointer.value == len(noted.made)


def test_what_is_declined_says_why(noted: Noted) -> None:
    noted.status = 3000
    with pytest.raises(CudnnError, match="cuDNN's status 3000: no such engine"):
        tensors(1)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(cudnn, "wheel", lambda: "")
    monkeypatch.setattr(cudnn.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"libcudnn.so.9: cannot .* install 'caffepy\[cuda13\]'"):
        cudnn.library.__wrapped__()
