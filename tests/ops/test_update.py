"""Updates with a gradient that is not kept."""

import numpy as np
import pytest

from caffepy.ops import cpu
from tests.ops.cuda.test_update import RULES, segments


@pytest.mark.parametrize("rule", RULES)
def test_an_update_by_factors_of_the_gradient(rule: str) -> None:
    histories, numbers = RULES[rule]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, n)).astype(np.float32) for n in (5, 7))
    w = rng.standard_normal((5, 7)).astype(np.float32)
    start = [w, *(rng.random((5, 7)).astype(np.float32) for _ in range(histories))]
    how = segments([35], np.float32)
    flat = [x.ravel().copy() for x in start]
    gradient = np.einsum("mr,mc->rc", a, b).ravel()
    cpu.update_params(rule, (flat[0], gradient, *flat[1:]), how, numbers)
    updated = [x.copy() for x in start]
    cpu.product_update(rule, a, b, updated, how, numbers)
    assert np.abs(updated[0] - w).max() > 0
    for have, want in zip(updated, flat, strict=True):
        np.testing.assert_allclose(have.ravel(), want, rtol=1e-4, atol=1e-5)
