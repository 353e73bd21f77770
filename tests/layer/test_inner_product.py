import numpy as np
import pytest

from caffepy.errors import ConfigError

from .harness import Single, check_golden, check_gradient, random

CASES = {
    "basic": ((3, 2, 2, 2), "num_output: 4"),
    "no bias": ((3, 5), "num_output: 4 bias_term: false"),
    "transposed": ((3, 5), "num_output: 4 transpose: true"),
    "axis 2": ((2, 3, 2, 2), "num_output: 3 axis: 2"),
    "axis -1": ((2, 3, 4), "num_output: 3 axis: -1"),
    "axis 0": ((2, 3), "num_output: 3 axis: 0"),
}


def text(param):
    return f'name: "ip" type: "InnerProduct" inner_product_param {{ {param} weight_filler {{ type: "gaussian" }} }}'


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    shape, param = CASES[case]
    check_gradient(text(param), random(*shape))


@pytest.mark.parametrize("case", ["ip_basic", "ip_axis2", "ip_transpose"])
def test_as_caffe(case):
    check_golden(case)


@pytest.mark.parametrize("transpose", ["false", "true"])
def test_formula(transpose):
    single = Single(text(f"num_output: 4 axis: 2 transpose: {transpose}"), random(2, 3, 4, 5))
    w, b = single.params
    b[...] = random(4)
    w = w.T if transpose == "true" else w
    (y,) = single.forward()
    np.testing.assert_allclose(y, single.inputs[0].reshape(2, 3, 20) @ w.T + b)


def test_only_what_is_wanted_is_computed():
    single = Single(text("num_output: 2"), random(2, 5))
    single.forward()
    single.layer.param_propagate_down = [True, False]
    (dx,), (dw, db) = single.backward([random(2, 2)], [False])
    assert dx is None
    assert dw.all()
    assert not db.any()


def test_num_output_is_needed():
    with pytest.raises(ConfigError, match="num_output must be 1 or more"):
        Single(text(""), random(2, 3))


def test_the_inner_size_must_stay():
    single = Single(text("num_output: 2"), random(2, 3, 4, 4))
    single.bottom[0].reshape((5, 3, 4, 4))
    single.layer.reshape(single.bottom, single.top)
    assert single.top[0].shape == (5, 2)
    single.bottom[0].reshape((2, 3, 4, 5))
    with pytest.raises(
        ConfigError, match=r"Input size incompatible with inner product parameters. .* 48 inputs, not 60"
    ):
        single.layer.reshape(single.bottom, single.top)
