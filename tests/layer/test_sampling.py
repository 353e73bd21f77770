"""SpatialTransformer against a loop, the fork's figures, numerical gradients, and a GPU."""

from math import floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import FORKS, Single, check_golden, check_gradient, random
from .on_gpu import check_plain_on_gpu

X = random(2, 3, 6, 5)
THETA = np.array([[0.9, 0.2, 0.05, -0.3, 1.1, 0.11], [1.7, -0.6, 0.31, 0.4, 0.53, -0.17]])
CASES = {
    "its size": ("", THETA, (6, 5)),
    "another size": ("output_H: 4 output_W: 7", THETA, (4, 7)),
    "scale given": ("theta_1_2: 0.2 theta_2_2: 0.9", THETA[:, [0, 2, 3, 5]], (6, 5)),
    "no gradient of x": ("to_compute_dU: false", THETA, (6, 5)),
}


def transformer(case):
    return f'type: "SpatialTransformer" st_param {{ {CASES[case][0]} }}'


@pytest.mark.parametrize("case", CASES)
def test_spatial_transformer_against_a_loop(case):
    _, theta, size = CASES[case]
    (y,) = Single(transformer(case), X, theta).forward()
    assert y.shape == (2, 3, *size)
    whole = THETA.copy()
    if case == "scale given":
        whole[:, [1, 4]] = 0.2, 0.9
    want = np.zeros(y.shape)
    for n, s, t in np.ndindex(2, *size):
        at = whole[n].reshape(2, 3) @ (2 * s / size[0] - 1, 2 * t / size[1] - 1, 1)
        u, v = (at + 1) / 2 * (6, 5)
        for i in (floor(u), floor(u) + 1):
            for j in (floor(v), floor(v) + 1):
                if 0 <= i < 6 and 0 <= j < 5:
                    want[n, :, s, t] += (1 - abs(u - i)) * (1 - abs(v - j)) * X[n, :, i, j]
    np.testing.assert_allclose(y, want, atol=1e-12)


@pytest.mark.parametrize("case", ["another size", "scale given"])
def test_spatial_transformer_gradient(case):
    check_gradient(transformer(case), X, CASES[case][1])


def test_x_without_a_gradient():
    single = Single(transformer("no gradient of x"), X, THETA)
    (y,) = single.forward()
    (dx, dtheta), _ = single.backward([random(*y.shape)])
    np.testing.assert_array_equal(dx, 0)
    assert dtheta.all()


@pytest.mark.parametrize("case", ["st_affine", "st_identity", "st_output_size"])
def test_figures_of_the_fork(case):
    check_golden(case, folder=FORKS)


@pytest.mark.parametrize(
    ("param", "theta", "message"),
    [
        ('sampler_type: "nearest"', (2, 6), 'must be "affine" and sampler_type "bilinear"'),
        ("theta_1_1: 1", (2, 6), r"theta must have shape \[2, 5\], not \[2, 6\]"),
        ("output_H: 0", (2, 6), "must be 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(param, theta, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "SpatialTransformer" st_param {{ {param} }}', X, random(*theta))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    theta = CASES[case][1]
    check_plain_on_gpu(transformer(case), X, theta, propagate_down=[True, True])
    flat = np.tile([1.0, 0, 0, 0, 0, 0.1], (2, 1))  # each row of the top reads one column
    if case == "its size":
        check_plain_on_gpu(transformer(case), X, flat, propagate_down=[True, True])


def test_no_images():
    single = Single('type: "SpatialTransformer"', np.zeros((0, 2, 4, 4)), np.zeros((0, 6)))
    assert single.forward()[0].shape == (0, 2, 4, 4)
    (dx, dtheta), _ = single.backward([np.zeros((0, 2, 4, 4))])
    assert (dx.shape, dtheta.shape) == ((0, 2, 4, 4), (0, 6))
