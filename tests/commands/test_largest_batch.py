from caffepy.commands.largest_batch import footprint
from caffepy.net.fusion import Step
from caffepy.net.memory import Usage
from caffepy.net.recompute import overhead
from tests.net.nets import net_of
from tests.nets import library


def test_weights_gradients_and_history_count_beside_blobs() -> None:
    net = net_of(
        library.inputs("in", x=(1, 400))
        + library.inner_product("ip", "x", 100, filler='type: "gaussian"', top="y")
    )
    steps = [Step(i) for i in range(len(net.layers))]
    weights = (400 * 100 + 100) * 4
    learns, tests = (footprint([Usage(net, steps, which)], 2) for which in (True, False))
    blobs = learns - overhead(net) - 4 * weights  # data, diff and two arrays of history
    assert 0 < blobs < weights / 4
    assert 0 < tests - overhead(net) - weights <= blobs
