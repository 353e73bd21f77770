"""Compact bilinear pooling."""

from itertools import islice

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.layer.bilinear import _numbers_of_c

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

PARAM = 'type: "CompactBilinear" compact_bilinear_param { num_output: 7 %s }'
CASES = {"sums": "", "places": "sum_pool: false"}
SHAPES = (2, 3, 4, 2), (2, 5, 4, 2)


def sketch(x0, x1, outputs, sums):
    """The sum of all products of channels, each at its drawn place and with its drawn sign."""
    numbers = _numbers_of_c(1)
    (h0, s0), (h1, s1) = ([list(islice(numbers, x.shape[1])) for _ in range(2)] for x in (x0, x1))
    y = np.zeros((len(x0), outputs, *x0.shape[2:]))
    for n, i, j in np.ndindex(len(x0), len(h0), len(h1)):
        sign = (-1 if s0[i] % 2 == 0 else 1) * (-1 if s1[j] % 2 == 0 else 1)
        y[n, (h0[i] % outputs + h1[j] % outputs) % outputs] += sign * x0[n, i] * x1[n, j]
    return y.sum(axis=(2, 3), keepdims=True) if sums else y


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    x0, x1 = (random(*shape, seed=k) for k, shape in enumerate(SHAPES))
    (y,) = Single(PARAM % CASES[case], x0, x1).forward()
    np.testing.assert_allclose(y, sketch(x0, x1, 7, case == "sums"), rtol=1e-12, atol=1e-12)
    check_gradient(PARAM % CASES[case], x0, x1)


@pytest.mark.parametrize("propagate_down", [(True, False), (False, True)])
def test_gradient_of_one_bottom(propagate_down):
    x0, x1 = (random(*shape, seed=k) for k, shape in enumerate(SHAPES))
    check_gradient(PARAM % "", x0, x1, propagate_down=propagate_down)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 3, 0, 2)])
def test_without_images_or_places(case, shape):
    single = Single(PARAM % CASES[case], np.zeros(shape), np.zeros(shape))
    (y,) = single.forward()
    assert y.shape == (shape[0], 7, *((1, 1) if case == "sums" else shape[2:]))
    assert not y.any()
    (dx, _), _ = single.backward([np.ones_like(y)])
    assert dx.shape == shape


def test_numbers_are_those_of_glibc():
    assert list(islice(_numbers_of_c(1), 3)) == [1804289383, 846930886, 1681692777]


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "CompactBilinear"', SHAPES, "needs a num_output of 1 to 1048576, not 0"),
        (
            'type: "CompactBilinear" compact_bilinear_param { num_output: 1048577 }',
            SHAPES,
            "needs a num_output of 1 to 1048576, not 1048577",
        ),
        (PARAM % "", [(2, 3, 4, 2), (2, 5, 4, 3)], "differ in C alone"),
        (PARAM % "", [(2, 3), (2, 3)], "shapes"),
    ],
)
def test_what_has_no_sketch_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(random(*shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    x0, x1 = (random(*shape, seed=k) for k, shape in enumerate(SHAPES))
    check_plain_on_gpu(PARAM % CASES[case], x0, x1, propagate_down=[True, True])
