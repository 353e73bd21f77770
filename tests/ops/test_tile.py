"""Register tiles of every processor's shapes against a matrix product."""

import numpy as np
import pytest

from caffepy.ops.cpu import tile
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.tile import transpose

SHAPES = [(6, 4, 16), (8, 1, 16), (4, 3, 8), (6, 2, 8), (8, 1, 8), (8, 2, 4), (8, 1, 4)]
CASES = [(s, np.float32) for s in SHAPES] + [((8, 3, 8), np.float64), ((8, 2, 2), np.float64)]


@pytest.mark.parametrize(("size", "dtype"), CASES)
def test_sums(size, dtype):
    shape = tile._shape(*size)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(500).astype(dtype)
    place, offset = rng.integers(0, 200, 21), rng.integers(0, 250, 13)
    b, c = (
        rng.standard_normal((13, shape.columns)).astype(dtype),
        rng.standard_normal((21, shape.columns)).astype(dtype),
    )
    want = c + x[50 + place[:, None] + offset] @ b

    def steps(block, lo, hi):
        r = np.arange(lo[0], hi[0])
        return np.stack([offset[r], r * shape.columns], 1)

    plan = tile.schedule([(place, np.arange(21), np.tile([[0, 13]], (21, 1, 1)))], steps, shape)
    plan = plan._replace(steps=plan.steps.reshape(-1))
    tile.accumulate(x[50:], plan, 0, b.reshape(-1), c.reshape(-1), shape)
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)


def test_a_schedule_leaves_out_what_no_row_of_a_tile_needs():
    shape = tile._shape(4, 1, 4)
    ranges = np.array([[[i, i + 1]] for i in (0, 1, 0, 1, 0, 1, 0, 1, 2)])

    def steps(block, lo, hi):
        return np.array([[10 * r, r] for r in range(lo[0], hi[0])])

    plan = tile.schedule([(np.arange(9), np.arange(9) + 100, ranges)] * 2, steps, shape)
    assert plan.first.tolist() == [0, 3, 6]
    assert plan.place[:12].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 8, 8, 8]
    assert (plan.to == plan.place + 100).all()
    assert [plan.steps[a:b].tolist() for a, b in plan.span[:3]] == [[[0, 0]], [[10, 1]], [[20, 2]]]


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_transpose(width):
    @kernel
    def turn(a, b, vector):
        transpose(a, 3, 20, b, 5, 18, vector)

    a, b = np.arange(400, dtype=np.float32), np.zeros(400, np.float32)
    turn(a, b, (0,) * width)
    i, j = np.indices((width, width))
    want = np.zeros(400, np.float32)
    want[5 + 18 * j + i] = a[3 + 20 * i + j]
    np.testing.assert_array_equal(b, want)


def test_the_best_shape_wastes_the_least():
    shapes = tile.shapes(4)
    for outputs in (1, 16, 20, 32, 48, 50, 64, 96, 384):
        waste = [-outputs % s.columns for s in shapes]
        assert waste[tile.best_shape(outputs, 4)] == min(waste)
