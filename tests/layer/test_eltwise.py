import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_on_gpu, check_plain_on_gpu

# name: eltwise_param, y of the values at one place
CASES = {
    "SUM": ("", sum),
    "SUM coeff": (
        "coeff: 1 coeff: -0.5 coeff: 2",
        lambda v: v[0] - 0.5 * v[1] + (2 * v[2] if len(v) > 2 else 0),
    ),
    "PROD": ("operation: PROD", np.prod),
    "PROD unstable": ("operation: PROD stable_prod_grad: false", np.prod),
    "MAX": ("operation: MAX", max),
}


def make(case, n):
    param = CASES[case][0]
    if n == 2:
        param = param.replace(" coeff: 2", "")
    return f'type: "Eltwise" eltwise_param {{ {param} }}', [
        random(2, 3, 4, seed=i) for i in range(n)
    ]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradient(case, n):
    text, bottoms = make(case, n)
    check_gradient(text, *bottoms)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_gradient_in_place(case, n):
    text, bottoms = make(case, n)
    check_gradient(text, *bottoms, in_place=True)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case, n):
    text, bottoms = make(case, n)
    (y,) = Single(text, *bottoms).forward()
    for index in np.ndindex(y.shape):
        assert y[index] == pytest.approx(CASES[case][1]([b[index] for b in bottoms]))


@pytest.mark.parametrize("case", ["eltwise_max", "eltwise_prod", "eltwise_sum_coeff"])
def test_as_caffe(case):
    check_golden(case)


def test_ties_of_a_maximum():
    single = Single('type: "Eltwise" eltwise_param { operation: MAX }', *[np.ones((1, 1))] * 3)
    single.forward()
    diffs, _ = single.backward([np.ones((1, 1))])
    assert [d[0, 0] for d in diffs] == [0, 1, 0]


def test_product_with_a_zero_has_a_gradient():
    text = 'type: "Eltwise" eltwise_param { operation: PROD stable_prod_grad: false }'
    single = Single(text, np.zeros((1, 1)), np.full((1, 1), 3.0))
    single.forward()
    diffs, _ = single.backward([np.ones((1, 1))])
    assert [d[0, 0] for d in diffs] == [3, 0]


@pytest.mark.parametrize(
    ("param", "shapes", "message"),
    {
        "coeff of a product": (
            "operation: PROD coeff: 1 coeff: 1",
            [(2, 3)] * 2,
            "coeff is for SUM",
        ),
        "too few coeff": ("coeff: 1 coeff: 1", [(2, 3)] * 3, "2 coeff do not fit 3 bottoms"),
        "shapes": (
            "",
            [(2, 3), (2, 4)],
            r"bottom 1 has shape \[2, 4\], bottom 0 has \[2, 3\]",
        ),
    }.values(),
)
def test_what_does_not_fit_is_refused(param, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(
            f'type: "Eltwise" eltwise_param {{ {param} }}',
            *(random(*s) for s in shapes),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_on_gpu_in_all_formats(case, n):
    text, _ = make(case, n)
    check_on_gpu(text, *(seeded(i).integers(-20, 20, (2, 8, 3, 5)) / 4 for i in range(n)))


@pytest.mark.parametrize("rest", [(), (1, 1)])
def test_axpy(rest):
    a, x, y = random(2, 3, *rest, seed=1), random(2, 3, 4, 5, seed=2), random(2, 3, 4, 5, seed=3)
    text = 'type: "Axpy"'
    (z,) = Single(text, a, x, y).forward()
    np.testing.assert_allclose(z, a.reshape(2, 3, 1, 1) * x + y)
    check_gradient(text, a, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("down", [(True, True, True), (True, False, False), (False, True, False)])
def test_axpy_on_gpu(down):
    a, x, y = random(2, 3), random(2, 3, 4, 5, seed=2), random(2, 3, 4, 5, seed=3)
    check_plain_on_gpu('type: "Axpy"', a, x, y, propagate_down=down)


@pytest.mark.parametrize(
    ("a", "y", "message"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 5), r"one number for each image and channel of bottom 1"),
        ((2, 4), (2, 3, 4, 5), r"bottom 0 has shape \[2, 4\]"),
        ((2, 3), (2, 3, 4, 6), r"bottom 2 has shape \[2, 3, 4, 6\], bottom 1 has \[2, 3, 4, 5\]"),
    ],
)
def test_axpy_of_wrong_shapes(a, y, message):
    with pytest.raises(ConfigError, match=message):
        Single('type: "Axpy"', random(*a), random(2, 3, 4, 5), random(*y))
