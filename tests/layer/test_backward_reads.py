"""What classes say of the data that backward reads, and of those that forward in place leaves: it
decides which blobs share memory, and which layers in place get a top of their own.
"""

import numpy as np
import pytest

from caffepy.device.blob import Array
from caffepy.layer import registry
from caffepy.layer.base import Kept
from caffepy.proto.caffe_pb2 import TEST, TRAIN

from .cases import CASES, NEURONS
from .harness import Single, random

CONSTANT = {"BatchReindex": (1,), "Embed": (0,), "LSTM": (1,), "LSTMUnit": (2,), "RNN": (1,)}
NO_BACKWARD = {"ArgMax", "ContinuationIndicator", "Parameter", "Threshold"}
NO_BACKWARD |= {"PriorBox", "PriorBoxClustered"}
LEARNING = sorted(set(CASES) - NO_BACKWARD)


def single(type_: str, k: int) -> Single:
    shapes, tops, text = CASES[type_][k]
    arrays = [
        np.ones(shape) if i in CONSTANT.get(type_, ()) else random(*shape, seed=i)
        for i, shape in enumerate(shapes)
    ]
    return Single(f'type: "{type_}" {text}', *arrays, tops=tops)


def gradients(it: Single, type_: str, *lost: Array) -> list[Array]:
    """Those after a forward pass whose arrays `lost` are gone before backward."""
    it.forward()
    for array in lost:
        array[...] = np.nan
    wanted = [i not in CONSTANT.get(type_, ()) for i in range(len(it.bottom))]
    bottoms, params = it.backward([random(*top.shape) for top in it.top], wanted)
    return [*(diff for diff in bottoms if diff is not None), *params]


@pytest.mark.parametrize("type_", LEARNING)
def test_backward_reads_what_the_class_says(type_: str) -> None:
    needed = set()
    for k in range(len(CASES[type_])):
        it = single(type_, k)
        says = {"bottom": it.layer.backward_reads_bottom, "top": it.layer.backward_reads_top}
        want = gradients(it, type_)
        for end, blobs in (("bottom", it.bottom), ("top", it.top)):
            found = gradients(it, type_, *(blob.data for blob in blobs))
            same = all(np.array_equal(a, b) for a, b in zip(want, found, strict=True))
            assert same or says[end], f"case {k} reads the data of its {end}"
            if not same or not says[end]:
                needed.add(end)
    assert needed == {"bottom", "top"}, "one of them is never read, though the class says so"


@pytest.mark.parametrize("phase", [TRAIN, TEST])
@pytest.mark.parametrize("case", NEURONS)
def test_neurons_leave_in_place_what_they_say(case: str, phase: int) -> None:
    settings, _ = NEURONS[case]
    it = Single(f'type: "{case.split()[0]}" {settings}', random(4, 3, 5, 5), phase=phase)
    (y,), x, keeps = it.forward(), it.inputs[0], it.layer.in_place_keeps
    if keeps in (Kept.NOTHING, Kept.ALL):
        assert (keeps == Kept.ALL) == np.array_equal(x, y)
        return
    ((dx,), _) = it.backward([np.ones_like(x)])
    assert dx is not None
    active = dx != 0
    assert np.array_equal((y > 0)[active], (x > 0)[active])
    assert (keeps == Kept.ACTIVE) == np.array_equal(y[active], x[active])


def test_layers_of_users_are_taken_to_read_everything() -> None:
    python = registry["Python"]
    assert (python.backward_reads_bottom, python.backward_reads_top) == (True, True)
    assert (python.backward_needs, python.in_place_keeps) == (Kept.ALL, Kept.NOTHING)


def recomputing(type_: str) -> bool:
    return bool(getattr(registry[type_], "can_recompute", False))


@pytest.mark.parametrize("type_", sorted(filter(recomputing, CASES)))
def test_a_recomputed_forward_pass_writes_the_same_and_changes_nothing_else(type_: str) -> None:
    for k in range(len(CASES[type_])):
        it = single(type_, k)
        tops, layer = it.forward(), it.layer
        before = [blob.copy() for blob in it.params]
        drawn, state = it.device.random.state, layer.state()
        lost = [] if layer.is_view else [top.data for top in it.top]
        for array in (*lost, *(buffer.data for buffer in layer.buffers)):
            if not any(np.may_share_memory(array, bottom.data) for bottom in it.bottom):
                array.fill(np.nan if array.dtype.kind == "f" else 1)
        layer.recomputes = True
        layer.forward(it.bottom, it.top)
        layer.recomputes = False
        for a, b in zip([*tops, *before], [*it.tops, *it.params], strict=True):
            np.testing.assert_array_equal(a, b)
        assert it.device.random.state == drawn
        assert layer.state() == state


def test_layers_that_cannot_run_twice() -> None:
    """What reads data or labels, keeps a state from pass to pass, or is code of a user."""
    for type_ in ("Data", "DummyData", "Python", "SoftmaxWithLoss", "LSTM", "MarginInnerProduct"):
        assert not recomputing(type_)
