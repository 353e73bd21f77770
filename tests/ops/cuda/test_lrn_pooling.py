"""Maxima of LRN in one pass, and both gradients, against those of the CPU."""

import numpy as np
import pytest

from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import loaded, rounded, stored

pytestmark = pytest.mark.gpu

ALEXNET = ((3, 3), (2, 2), (0, 0))
CASES = {
    "alexnet": ((3, 96, 15, 23), 5, 1.5, ALEXNET),
    "256 channels": ((2, 256, 13, 13), 5, 1.5, ALEXNET),
    "many blocks": ((20, 192, 28, 28), 5, 1.5, ALEXNET),
    "padding": ((2, 64, 12, 11), 3, 1.5, ((3, 3), (2, 2), (1, 1))),
    "touching": ((2, 16, 8, 6), 9, 1.5, ((2, 2), (2, 2), (0, 0))),
    "stride 1": ((2, 96, 6, 7), 7, 1.5, ((3, 3), (1, 1), (1, 1))),
    "13 packs": ((2, 104, 9, 9), 5, 1.5, ALEXNET),
    "20 channels": ((2, 20, 9, 9), 5, 1.5, ALEXNET),
    "wide": ((2, 96, 9, 9), 11, 1.5, ALEXNET),
    "s of 0 and more": ((3, 96, 15, 23), 5, 0.0, ALEXNET),
    "windows of 4": ((2, 96, 9, 9), 5, 1.5, ((4, 4), (2, 2), (0, 0))),
}
NEAR = {"float32": 2e-5, "float16": 2e-3, "uint16": 1.2e-2}


def place_in_plane(index, window, size):
    """The index of the CPU, of one that counts within the window."""
    (kernel, _), (stride, _), (pad, _) = window
    rows, columns = np.indices(index.shape[2:]) * stride - pad
    return (rows + index // kernel) * size[1] + columns + index % kernel


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case, kind, monkeypatch):
    import cupy

    from caffepy.ops import cpu, cuda

    monkeypatch.setattr(cuda.pooling, "BUSY", 1)
    shape, local_size, k, window = CASES[case]
    (kernel, _), (stride, _), (pad, _) = window
    terms = local_size, 0.5, 0.75, k
    out = [-(-(n + 2 * pad - kernel) // stride) + 1 for n in shape[2:]]
    x = rounded(3 * np.maximum(data(shape), 0.01 if k == 0 else 0), kind)
    dy = rounded(data((*shape[:2], *out), seed=1), kind)
    normalized, scale, dx = (np.empty_like(x) for _ in range(3))
    cpu.lrn_forward(x, normalized, scale, terms)
    y, where = np.empty_like(dy), np.empty(dy.shape, np.int32)
    cpu.max_pool_forward(normalized, y, where, window)
    with cupy.cuda.Stream(non_blocking=True):
        on_gpu = [stored(a, kind, True) for a in (x, np.full(dy.shape, 7), dy)]
        index = stored(np.zeros(dy.shape), "float32", True).astype(np.uint8)
        cuda.lrn_max_pool_forward(*on_gpu[:2], index, terms, window)
        found = place_in_plane(index.get().astype(np.int32), window, shape[2:])
        near = NEAR[kind]
        np.testing.assert_allclose(loaded(on_gpu[1]), y, near, near)
        flat = normalized.reshape(*shape[:2], -1)
        taken = np.take_along_axis(flat, found.reshape(*shape[:2], -1), 2).reshape(y.shape)
        np.testing.assert_allclose(taken, y, near, near)
        np.testing.assert_array_equal(found[y == 0], where[y == 0])  # the first of equal ones
        db = np.ones(shape[1], np.float32)
        cpu.lrn_max_pool_backward(x, dy, found.astype(np.int32), dx, terms, window, db)
        for place in (False, True):
            to = on_gpu[0] if place else stored(np.full(shape, 7), kind, True)
            sums = cupy.ones(shape[1], np.float32)
            cuda.lrn_max_pool_backward(on_gpu[0], on_gpu[2], index, to, terms, window, sums)
            np.testing.assert_allclose(loaded(to), dx, near, near * np.abs(dx).max())
            allowed = near * np.abs(dx).sum(axis=(0, 2, 3)).max()
            np.testing.assert_allclose(sums.get(), db, 0, allowed)


def test_without_a_bias():
    import cupy

    from caffepy.ops import cuda

    shape, terms, window = (64, 96, 28, 28), (5, 0.5, 0.75, 1.5), ALEXNET
    made = []
    with cupy.cuda.Stream(non_blocking=True):
        for db in (None, cupy.zeros(96, np.float32)):
            x, dx = (stored(np.maximum(data(shape), 0), "uint16", True) for _ in range(2))
            y = stored(np.ones((64, 96, 14, 14)), "uint16", True)
            index = cupy.zeros_like(y).astype(np.uint8)
            cuda.lrn_max_pool_forward(x, y, index, terms, window)
            cuda.lrn_max_pool_backward(x, y, index, dx, terms, window, db)
            made.append(dx.get())
    np.testing.assert_array_equal(*made)
    assert np.count_nonzero(made[0])
