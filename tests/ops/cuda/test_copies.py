from itertools import product

import numpy as np
import pytest

from tests.ops.cuda.compare import agree, data
from tests.ops.cuda.stored import loaded, rounded, stored

pytestmark = pytest.mark.gpu

VIEWS = {  # shape, index of the source, index of the target
    "whole": ((5, 7), np.s_[:], np.s_[:]),
    "concat": ((8, 3000), np.s_[:, 500:1000], np.s_[:, 2000:2500]),
    "odd columns": ((8, 301), np.s_[:, 51:100], np.s_[:, 7:56]),
    "window": ((3, 4, 20, 24), np.s_[1:3, :, 2:12, 3:9], np.s_[:2, :, 5:15, 4:10]),
    "five axes": ((3, 4, 5, 6, 7), np.s_[:2, :3, :4, :5, :6], np.s_[1:, 1:, 1:, 1:, 1:]),
    "stride": ((40, 40), np.s_[::2, ::2], np.s_[:20, 20:]),
    "one": ((4, 4), np.s_[2:3, 1:2], np.s_[3:, 3:]),
    "none": ((4, 4), np.s_[2:2], np.s_[3:3]),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64])
@pytest.mark.parametrize("case", VIEWS)
def test_copy(case, dtype):
    import cupy

    from caffepy.ops import cuda

    shape, source, target = VIEWS[case]
    x, y = (data(shape, seed=0) * 50).astype(dtype), np.zeros(shape, dtype)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        u, v = cupy.asarray(x), cupy.asarray(y)
        y[target] = x[source]
        cuda.copy(u[source], v[target])
        np.testing.assert_array_equal(v.get(), y)
        v.fill(0)
        stream.begin_capture()
        cuda.copy(u[source], v[target])
        stream.end_capture().launch(stream)
        np.testing.assert_array_equal(v.get(), y)
        v.fill(0)
        cuda.copy(x[source], v[target])
        np.testing.assert_array_equal(v.get(), y)


def test_copy_to_another_type():
    agree("copy", data((3, 4), np.float64), np.empty((3, 4), np.float32))


@pytest.mark.parametrize("kind", ["float32", "uint16"])
def test_copy_of_views_with_the_channels_last(kind):
    import cupy

    from caffepy.ops import cuda

    x = data((3, 12, 5, 7))
    with cupy.cuda.Stream(non_blocking=True):
        u, v = (
            stored(x, kind, channels_last=True),
            stored(np.zeros_like(x), kind, channels_last=True),
        )
        cuda.copy(u, v)
        np.testing.assert_array_equal(loaded(v), rounded(x, kind))
        cuda.copy(u[:, 4:8], v[:, 1:5])
        np.testing.assert_array_equal(loaded(v)[:, 1:5], rounded(x, kind)[:, 4:8])
        np.testing.assert_array_equal(loaded(v)[:, 5:], rounded(x, kind)[:, 5:])
        cuda.copy(x, v)
        np.testing.assert_array_equal(loaded(v), rounded(x, kind))


KINDS = ["float32", "float64", "float16", "uint16"]
SHAPES = [
    (2, 3, 5, 7),
    (2, 1, 4, 9),
    (3, 5, 1, 1),
    (2, 8, 9),
    (2, 20, 13, 3),
    (2, 64, 7, 7),
    (3, 70, 9, 65),
    (2, 3, 50, 61),
    (5, 1000, 2, 2),
    (1, 2, 300, 1, 2),
    (9, 10),
    (17,),
    (0, 3, 4, 4),
]


@pytest.mark.parametrize(("source", "target"), list(product(KINDS, KINDS)))
def test_convert(source, target):
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True) as stream:
        for shape, before, after in product(SHAPES, (False, True), (False, True)):
            x = data(shape)
            want = rounded(rounded(x, source), target)
            u, v = stored(x, source, before), stored(np.zeros(shape), target, after)
            cuda.convert(u, v)
            np.testing.assert_array_equal(loaded(v), want, err_msg=f"{shape} {before} {after}")
            v.fill(0)
            stream.begin_capture()
            cuda.convert(u, v)
            stream.end_capture().launch(stream)
            np.testing.assert_array_equal(
                loaded(v), want, err_msg=f"{shape} {before} {after}, replayed"
            )


def test_convert_rounds_to_even_and_keeps_what_is_no_number():
    import cupy

    from caffepy.ops import cuda

    x = np.array(
        [1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 70_000, -np.inf, np.nan, 1e-7, -0.0, 65_519, 65_520],
        np.float32,
    )
    with cupy.cuda.Stream(non_blocking=True):
        for kind in ("float16", "uint16"):
            v = stored(np.zeros(x.shape), kind)
            cuda.convert(cupy.asarray(x), v)
            np.testing.assert_array_equal(loaded(v), rounded(x, kind))


def test_convert_refuses_views():
    import cupy

    from caffepy.core.errors import DeviceError
    from caffepy.ops import cuda

    with pytest.raises(DeviceError, match="cannot be converted"):
        cuda.convert(cupy.zeros((2, 3, 4, 10), "f")[..., :5], cupy.zeros((2, 3, 4, 5), "f"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["float32", "uint16"])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((2, 24, 3, 5), 3),
        ((3, 10, 7, 1), 2),
        ((1, 6), 6),
        ((3, 20, 5, 7), 2),  # in words of two channels
        ((3, 20, 5, 7), 10),
    ],
)
def test_deal_channels(shape, parts, kind, last):
    from caffepy.ops import cuda

    x = data(shape)
    n, c, *rest = shape
    want = x.reshape(n, parts, c // parts, *rest).swapaxes(1, 2).reshape(shape)
    last = last and len(shape) > 2
    y = stored(np.full(shape, 7), kind, last)
    cuda.deal_channels(stored(x, kind, last), y, parts)
    np.testing.assert_array_equal(loaded(y), rounded(want, kind))


PARTS = {  # shape of the whole, axis, sizes
    "rows": ((12, 5), 0, [3, 4, 5]),
    "columns": ((6, 40), 1, [8, 16, 16]),
    "channels": ((2, 24, 3, 5), 1, [8, 0, 16]),
    "odd channels": ((2, 10, 3, 5), 1, [1, 2, 7]),
    "one": ((2, 6, 3, 5), 1, [6]),
    "many": ((3, 60, 2, 3), 1, [4] * 13 + [8]),
    "height": ((2, 3, 9, 4), 2, [4, 5]),
    "shufflenet": ((3, 20, 5, 7), 1, [10, 10]),
    "googlenet": ((2, 480, 14, 14), 1, [192, 208, 48, 32]),
    "of one position": ((4, 12, 1, 1), 1, [4, 8]),
    "three axes": ((2, 6, 5), 1, [2, 4]),
    "none": ((0, 6, 5), 1, [2, 4]),
    "long lines": ((3, 12000), 1, [2048, 3952, 6000]),
    "odd long lines": ((3, 6001), 1, [1000, 2001, 3000]),
    "many long lines": ((2, 24000), 1, [2400] * 10),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["float32", "uint16"])
@pytest.mark.parametrize("case", PARTS)
def test_parts_side_by_side(case, kind, last):
    import cupy

    from caffepy.ops import cuda

    shape, axis, sizes = PARTS[case]
    last = last and axis == 1
    x = data(shape)
    want = rounded(x, kind)
    pieces = np.split(x, np.cumsum(sizes)[:-1], axis)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        parts = [stored(p, kind, last) for p in pieces]
        whole = stored(np.full(shape, 7), kind, last)
        cuda.join(parts, whole, axis)
        np.testing.assert_array_equal(loaded(whole), want)
        unwanted = len(sizes) // 2
        asked = [None if k == unwanted and k else p for k, p in enumerate(parts)]
        cuda.cut(whole, sizes, asked, axis)
        for part in parts:
            part.fill(0)
        stream.begin_capture()
        cuda.cut(whole, sizes, asked, axis)
        stream.end_capture().launch(stream)
        for part, piece, a in zip(parts, pieces, asked, strict=True):
            np.testing.assert_array_equal(
                loaded(part), np.zeros_like(piece) if a is None else rounded(piece, kind)
            )


@pytest.mark.parametrize("kinds", [("uint16", "float32"), ("float32", "uint16")])
@pytest.mark.parametrize("case", sorted(PARTS.keys() - {"channels", "odd channels"}))
def test_parts_of_another_type(case, kinds):
    from caffepy.ops import cuda

    shape, axis, sizes = PARTS[case]
    x = loaded(stored(data(shape), "uint16"))
    pieces = np.split(x, np.cumsum(sizes)[:-1], axis)
    parts = [stored(p, kinds[0]) for p in pieces]
    whole = stored(np.full(shape, 7), kinds[1])
    cuda.join(parts, whole, axis)
    np.testing.assert_array_equal(loaded(whole), x)
    for part in parts:
        part.fill(0)
    cuda.cut(whole, sizes, [None, *parts[1:]], axis)
    for k, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        np.testing.assert_array_equal(loaded(part), piece if k else 0 * piece)
