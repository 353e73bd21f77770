"""What GPUs record does what layers do one by one."""

import numpy as np
import pytest

from caffepy.layer.inner_product import InnerProduct
from caffepy.net import gradients
from tests.solver.cases import NET, solver_of

DEEPER = NET.replace(
    'layer { name: "ip" type: "InnerProduct" bottom: "x"',
    """layer { name: "first" type: "InnerProduct" bottom: "x" top: "h"
  inner_product_param { num_output: 5 transpose: true weight_filler { type: "gaussian" std: 0.3 } } }
layer { name: "relu" type: "ReLU" bottom: "h" top: "h" }
layer { name: "ip" type: "InnerProduct" bottom: "h\"""",
)


@pytest.mark.parametrize("least", [0, 41, 10**6], ids=["all", "the first", "none"])
def test_large_gradients_are_written_rather_than_added_to(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGE", least)
    straight, other = solver_of("weight_decay: 0.01 ", DEEPER), solver_of("weight_decay: 0.01 ", DEEPER)
    straight.step(4)
    step = other._step
    written = []
    for iteration in range(4):
        step.params.diff.fill(np.nan)  # of weights that are written it does not matter what is there
        step.say(0.1, iteration)
        with step._overwriting():
            step.open()
            other.net.forward(steps=other.net.steps)
            step.note()
            other.net.backward(steps=other.net.steps)
            step.update()
        written = [layer.param.name for layer in step._large.values()]
        assert not any(isinstance(layer, InnerProduct) and layer.overwrites for layer in other.net.layers)
    assert written == {0: ["first", "ip"], 41: ["first"], 10**6: []}[least]
    np.testing.assert_allclose(other.params.data, straight.params.data, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other.params.diff, straight.params.diff, rtol=1e-5, atol=1e-7)
