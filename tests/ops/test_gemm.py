"""Matrix products in register tiles against numpy's."""

import numpy as np
import pytest

from caffepy.ops.cpu import gemm
from caffepy.ops.cpu.gemm import Planes, Product, Transposed

# products, images, M, K, positions: panels within images and across them, ends of rows and columns
SIZES = {
    "one element": (1, 1, 1, 1, 1),
    "whole tiles": (1, 2, 16, 5, 48),
    "across images": (1, 5, 9, 7, 20),
    "many images in a panel": (1, 70, 3, 4, 1),
    "products": (3, 2, 13, 6, 50),
    "blocks of rows": (1, 1, 200, 9, 33),
    "steps beyond the panel of a transpose": (1, 3, 10, 50, 600),
}
TYPES = [np.float32, np.float64]


def planes(z: int, rows: int, positions: int) -> Planes:
    return Planes(rows * positions, z * rows * positions, positions)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(name, dtype, with_bias):
    z, n, m, k, p = SIZES[name]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((z, m, k)), rng.standard_normal((n, z, k, p))
    bias = rng.standard_normal((z, m)) if with_bias else np.zeros((z, m))
    c = np.full((n, z, m, p), np.nan, dtype)
    product = Product((m, k), (z, n, p), (planes(z, k, p), planes(z, m, p)), dtype)
    product(a.astype(dtype), b.astype(dtype), bias.astype(dtype) if with_bias else None, c)
    np.testing.assert_allclose(c, a @ b + bias[..., None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_transposed(name, dtype, turned):
    z, n, m, k, p = SIZES[name]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((n, z, m, p)), rng.standard_normal((n, z, k, p))
    c = rng.standard_normal((z, k, m) if turned else (z, m, k)).astype(dtype)
    sums = (a @ b.swapaxes(2, 3)).sum(0)
    want = sums.swapaxes(1, 2) if turned else sums
    sizes = (m, k, p), (z, n), (planes(z, m, p), planes(z, k, p))
    product = Transposed(*sizes, dtype, turned)
    for adds in (True, False):
        expected = want + c if adds else want
        product(a.astype(dtype), b.astype(dtype), c, adds)
        np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-3)


def test_an_element_does_not_depend_on_its_place():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 300), (1, 300, 70)))
    whole = np.empty((1, 20, 70), np.float32)
    Product((20, 300), (1, 1, 70), (planes(1, 300, 70), planes(1, 20, 70)), a.dtype)(
        a, b, None, whole
    )
    part = np.empty((1, 3, 5), np.float32)
    Product((3, 300), (1, 1, 5), (planes(1, 300, 5), planes(1, 3, 5)), a.dtype)(
        a[9:12], np.ascontiguousarray(b[..., 60:65]), None, part
    )
    np.testing.assert_array_equal(part, whole[:, 9:12, 60:65])


def test_turn():
    a = np.arange(2.0 * 70 * 21).reshape(2, 70, 21)
    np.testing.assert_array_equal(gemm.turn(a, np.empty((2, 21, 70))), a.swapaxes(1, 2))


def test_tiles_of_a_processor_with_fewer_registers(monkeypatch):
    monkeypatch.setattr(gemm, "_tile_of", lambda dtype: ((0,) * 4, (0,) * 8))
    test_product("across images", np.float32, True)
    test_transposed("blocks of rows", np.float32, False)
