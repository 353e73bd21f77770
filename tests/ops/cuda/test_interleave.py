"""Channels of two arrays in turn, and back, against the CPU."""

import numpy as np
import pytest

from caffepy.ops.objects import Normalized, NormSums
from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import loaded, rounded, stored

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("normalized", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("wholes", [1, 2])
@pytest.mark.parametrize("kind", ["float16", "uint16"])
@pytest.mark.parametrize(
    "shape", [(3, 10, 5, 7), (2, 58, 4, 4), (1, 2, 1, 3), (2, 116, 7, 1), (0, 4, 2, 2)], ids=str
)
def test_channels_in_turn(shape, kind, wholes, normalized):
    import cupy

    from caffepy.ops import cpu, cuda

    whole = (shape[0], 2 * shape[1] // wholes, *shape[2:])
    parts = [rounded(data(shape, seed=seed), kind) for seed in range(2)]
    want = [np.zeros(whole, "f") for _ in range(wholes)]
    given, there = [None, None], [None, None]
    for i in normalized:
        numbers = data((4, shape[1]), seed=3 + i)
        given[i] = Normalized(numbers, (None, np.inf, 1.0)[shape[0] - 1])
        there[i] = given[i]._replace(numbers=cupy.asarray(numbers))
    cpu.interleave(parts, want, given)
    have = [stored(np.full(whole, 7), kind, True) for _ in range(wholes)]
    cuda.interleave([stored(a, kind, True) for a in parts], have, there)
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(loaded(b), rounded(a, kind), 1e-2 if normalized else 0)
    if normalized:
        return
    for down in ((True, True), (True, False), (False, True), (False, False)):
        back = [stored(np.zeros(shape), kind, True) if wanted else None for wanted in down]
        cuda.separate(have, back)
        for a, b in zip(parts, back, strict=True):
            if b is not None:
                np.testing.assert_array_equal(loaded(b), a)


@pytest.mark.parametrize("what", ["first", "second", "both", "first, and more in the second"])
@pytest.mark.parametrize("ceiling", [None, np.inf, 1.0], ids=str)
@pytest.mark.parametrize("wholes", [1, 2])
@pytest.mark.parametrize("kind", ["float16", "uint16"])
@pytest.mark.parametrize("shape", [(3, 10, 5, 7), (2, 58, 4, 4), (16, 116, 30, 31)], ids=str)
def test_half_the_gradients_of_normalizations(shape, kind, wholes, ceiling, what):
    import cupy

    from caffepy.ops import cpu, cuda

    whole = (shape[0], 2 * shape[1] // wholes, *shape[2:])
    dys = [rounded(data(whole, seed=seed), kind) for seed in range(wholes)]
    near = {"float16": 2e-3, "uint16": 1e-2}[kind]

    def run(ops, wide, narrow):
        parts, norms = [narrow(np.zeros(shape)) for _ in range(2)], [None, None]
        for i in range(2):
            if what == ("second", "first")[i]:
                continue
            numbers, sums = data((4, shape[1]), seed=3 + i), np.ones((2, shape[1]), "f")
            more = narrow(rounded(data(shape, seed=9), kind)) if i and "more" in what else None
            x, line = narrow(rounded(data(shape, seed=5 + i), kind)), wide(np.zeros_like(sums))
            how = None, None, ceiling, parts[i], *wide(sums), line
            norms[i] = NormSums(x, wide(numbers), more, *how)
        ops.separate([narrow(dy) for dy in dys], parts, norms)
        sums = [a for n in norms if n is not None for a in (n.dscale, n.dbias, n.line)]
        return parts, sums

    parts, sums = run(cpu, np.array, lambda a: np.array(a, "f"))
    have, found = run(cuda, cupy.asarray, lambda a: stored(a, kind, True))
    for a, b in zip(parts, have, strict=True):
        assert np.linalg.norm(loaded(b) - a) <= near * np.linalg.norm(a)
    for a, b in zip(sums, found, strict=True):
        assert np.linalg.norm(b.get() - a) <= near * (1e-2 + np.linalg.norm(a))
