"""Nets that compute data again rather than keep them give the numbers of those that keep them, to
the last bit, with less memory.
"""

from itertools import pairwise

import pytest

from caffepy.net.memory import Usage, lifetimes, save_memory
from caffepy.net.recompute import in_segments, recomputed_layers

from ..nets import library
from .nets import net_of
from .test_memory import DATA, NETS, Driven, assert_same, conv, images, loss, plain, poison

# In place: BatchNorm on a blob that a branch reads before, ReLU, Dropout on the blob of a
# checkpoint; stochastic pooling draws, too.
DRAWING = (
    DATA
    + conv("a", "data")
    + library.in_place("Dropout", "a_drop", "a")
    + conv("b", "a", relu=False)
    + library.layer("BatchNorm", "b_norm", "b")
    + library.layer("Scale", "b_scale", "b_norm", "scale_param { bias_term: true }", top="b_norm")
    + library.relu("b_relu", "b_norm")
    + conv("c", "b_norm", relu=False)
    + library.in_place("BatchNorm", "c_norm", "c")
    + library.layer("Eltwise", "sum", "b_norm c")
    + library.relu("sum_relu", "sum")
    + library.pooling("some", "sum", "pool: STOCHASTIC kernel_size: 2 stride: 2")
    + library.in_place("RReLU", "rrelu", "some")
    + conv("d", "some")
    + library.in_place("Dropout", "d_drop", "d")
    + library.layer("LRN", "norm", "d", "lrn_param { local_size: 3 alpha: 0.1 }")
    + conv("e", "norm")
    + loss("fc", "e")
)
ALL = {**NETS, "drawing": (DRAWING, images)}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_numbers_are_the_same_to_the_last_bit(name: str, fuse: bool) -> None:
    text, source = ALL[name]
    nets = [
        Driven(net := net_of(text), source, net.steps if fuse else plain(net)) for _ in range(2)
    ]
    usage = in_segments(nets[1].usage, 4)
    nets[1].shared = lifetimes(usage)
    save_memory([usage])
    for memory in nets[1].shared:
        poison(memory)
    for _ in range(3):
        assert_same(nets[0].run(), nets[1].run())
    again = [index for steps in usage.recompute.values() for index in steps]
    assert again or name in ("forced", "recurrent")
    steps = [usage.steps[index] for index in again]
    of = [nets[1].net.layers[i] for step in steps for i in step.layers or [step.last]]
    assert all(layer.can_recompute for layer in of)
    assert len(of) == recomputed_layers(usage)
    statistics = [
        [blob.data for layer in it.net.layers for blob in layer.statistics] for it in nets
    ]
    assert_same(*statistics)
    if name == "drawing":
        assert {"Dropout", "BatchNorm", "ReLU"} <= {layer.type for layer in of}
        assert len(statistics[0]) == 6


def test_there_are_no_more_segments_than_steps() -> None:
    net = net_of(NETS["inception"][0])
    usage = Usage(net, plain(net), True)
    assert in_segments(usage, 1) == usage
    assert in_segments(usage, 10**9) == in_segments(usage, len(usage.steps))


def test_data_that_are_computed_again_are_live_twice() -> None:
    text = DATA + "".join(conv(b, a, relu=False) for a, b in pairwise(["data", *"abcd"]))
    net = net_of(text + loss("fc", "d"))
    usage = in_segments(Usage(net, plain(net), True), 2)
    ((last, again),) = usage.recompute.items()
    names = [net.layer_names[usage.steps[i].last] for i in again]
    assert (net.layer_names[last], names) == ("b", ["a"])
    shared, steps = lifetimes(usage), len(usage.steps)
    a, b = (shared[net.blobs[name].data_memory] for name in "ab")
    first, second = (net.layer_names.index(name) for name in "ab")
    back = 2 * steps - 2 - second  # of c; then a is computed again, then comes backward of b
    assert a.spans == [(first, second), (back + 1, back + 2)]
    assert b.spans == [(second, back)]
