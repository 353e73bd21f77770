"""Products between normalizations, whose channels are no whole packs of 16 bytes, against the CPU."""

import numpy as np
import pytest

from tests.ops.cuda.test_convolution import LAST
from tests.ops.cuda.test_depthwise import BEFORE, check_both, check_given

pytestmark = pytest.mark.gpu

# x, outputs
CASES = {
    "58": ((2, 58, 6, 8), 58),
    "116": ((3, 116, 8, 7), 116),
    "more outputs": ((4, 24, 5, 9), 58),
    "more inputs": ((4, 116, 13, 14), 12),
    "few": ((1, 4, 2, 2), 4),
}
MANY = {"58": ((24, 58, 55, 58), 58), "116": ((41, 116, 28, 28), 116)}  # blocks have several tiles
KINDS = "bf16", "fp16"


def check_gradients(name, x_shape, outputs, before):
    how = (1, 1), (0, 0), (1, 1)
    check_both(LAST[name], x_shape, (outputs, x_shape[1], 1, 1), how, 1, before)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KINDS)
def test_both_gradients(name, case, before):
    check_gradients(name, *CASES[case], before)


@pytest.mark.parametrize("before", ["nothing", "norm", "norm 6"])
@pytest.mark.parametrize("case", MANY)
def test_both_gradients_of_many_pixels(case, before):
    check_gradients("bf16", *MANY[case], before)


@pytest.mark.parametrize("ceiling", [None, np.inf, 1.0], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KINDS)
def test_of_what_a_normalization_gives(name, case, ceiling):
    check_given(LAST[name], *CASES[case], ceiling)


@pytest.mark.parametrize("case", MANY)
def test_many_pixels_of_what_a_normalization_gives(case):
    check_given(LAST["bf16"], *MANY[case], None)
