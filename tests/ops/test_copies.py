import numpy as np
import pytest

from caffepy.device.blob import from_bfloat16, to_bfloat16
from caffepy.ops import cpu
from caffepy.ops.cpu.copies import GRAIN


@pytest.mark.parametrize(
    "shape", [(3, 5), (4, 2 * GRAIN), (1, 5 * GRAIN), (1, 1, 6 * GRAIN), (300, 300, 2)]
)
def test_copy_of_views(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    wide = np.zeros((*shape[:-1], shape[-1] + 4))
    cpu.copy(x, wide[..., 2:-2])
    np.testing.assert_array_equal(wide[..., 2:-2], x)
    assert not wide[..., :2].any()
    y = np.empty_like(x)
    cpu.copy(wide[..., 2:-2], y)
    np.testing.assert_array_equal(y, x)


def test_convert():
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    out = np.empty((2, 4, 3), np.float16).transpose(0, 2, 1)
    cpu.convert(x, out)
    np.testing.assert_array_equal(out, x.astype(np.float16))


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even():
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1.00391, 0, np.inf, -np.inf, np.nan], "f4")
    want = [1, 1, 1 + 4 * 2**-8, -1 - 2**-7, 0, np.inf, -np.inf, np.nan]
    out, back = np.empty(x.size, np.uint16), np.empty_like(x)
    cpu.convert(x, out)
    cpu.convert(out, back)
    np.testing.assert_array_equal(back, np.array(want, "f4"))
    bits = np.random.default_rng(0).integers(0, 1 << 32, 300_001, np.uint32)
    x, out, back = bits.view(np.float32), np.empty(bits.size, np.uint16), np.empty(bits.size, "f4")
    cpu.convert(x, out)
    cpu.convert(out, back)
    np.testing.assert_array_equal(out, to_bfloat16(x))
    np.testing.assert_array_equal(back, from_bfloat16(out))


@pytest.mark.parametrize("axis", range(3))
def test_parts_side_by_side(axis):
    x = np.random.default_rng(0).standard_normal((6, 9, 12))
    sizes = [1, 0, 3, x.shape[axis] - 4]
    parts = np.split(x, np.cumsum(sizes)[:-1], axis)
    whole = np.empty_like(x)
    cpu.join([np.ascontiguousarray(p) for p in parts], whole, axis)
    np.testing.assert_array_equal(whole, x)
    cuts = [np.zeros_like(p) for p in parts]
    cpu.cut(x, sizes, [None, *cuts[1:]], axis)
    assert not cuts[0].any()
    for part, want in zip(cuts[1:], parts[1:], strict=True):
        np.testing.assert_array_equal(part, want)


def test_parts_of_nothing():
    parts = [np.empty((0, 2, 3)), np.empty((0, 1, 3))]
    cpu.join(parts, np.empty((0, 3, 3)), 1)
    cpu.cut(np.empty((0, 3, 3)), [2, 1], parts, 1)


@pytest.mark.parametrize("wholes", [1, 2, 3])
@pytest.mark.parametrize("parts", [2, 3])
def test_channels_in_turn(parts, wholes):
    """As join, deal_channels and cut."""
    x = np.random.default_rng(0).standard_normal((2, 36, 3, 5))
    given = np.split(x, parts, 1)
    dealt = np.empty_like(x)
    cpu.deal_channels(x, dealt, parts)
    want = np.split(dealt, wholes, 1)
    have = [np.zeros_like(a) for a in want]
    cpu.interleave([np.ascontiguousarray(a) for a in given], have)
    for a, b in zip(want, have, strict=True):
        np.testing.assert_array_equal(a, b)
    back = [np.zeros_like(a) for a in given]
    cpu.separate(have, [None, *back[1:]])
    assert not back[0].any()
    for a, b in zip(given[1:], back[1:], strict=True):
        np.testing.assert_array_equal(a, b)
