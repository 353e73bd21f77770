"""Convolutions of images with their maxima at once, against the convolution and the pooling apart."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy import ops  # noqa: E402
from caffepy.device.blob import Layout  # noqa: E402
from caffepy.device.cuda import CudaDevice  # noqa: E402
from caffepy.ops import cuda  # noqa: E402
from caffepy.ops.cuda import strided_images  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from caffepy.ops.objects import Maxima  # noqa: E402

from .stored import loaded, stored  # noqa: E402

WINDOW = ((3, 3), (2, 2), (0, 0))
CASES = {  # x, kernel, stride, pad, lines and columns of maxima
    "GoogLeNet": ((2, 3, 224, 224), 7, 2, 3, (56, 56)),
    "odd sizes": ((3, 3, 31, 38), 7, 2, 3, (8, 9)),
    "rounded down": ((2, 3, 40, 36), 7, 2, 3, (9, 8)),
    "4 channels": ((2, 4, 30, 32), 7, 2, 3, (7, 8)),
    "gray": ((2, 1, 20, 24), 4, 2, 0, (4, 5)),
    "no stride": ((2, 2, 20, 22), 4, 1, 1, (9, 10)),
    "one window": ((1, 3, 6, 6), 7, 2, 3, (1, 1)),
}


def numbers(shape, seed):
    """Few bits, so that products are exact and a sum of one order is that of another, or nearly."""
    return np.round(8 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32) / 8


@pytest.mark.parametrize("dtype", ["uint16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_maxima_and_gradients(case, dtype):
    shape, kernel, stride, pad, pooled = CASES[case]
    device = CudaDevice(0, seed=1)
    ops.set_precision(device, "bf16" if dtype == "uint16" else "fp16")
    with device.scope():
        x, w = stored(numbers(shape, 1), dtype, True), numbers((64, shape[1], kernel, kernel), 2)
        b = cupy.asarray(numbers(64, 3))
        sizes = ((stride, stride), (pad, pad), (1, 1))
        conv = cuda.Convolution(shape, w.shape, sizes, 1, np.dtype(dtype))
        assert conv.pools(Layout(np.dtype(dtype), True), WINDOW)
        geometry = Geometry(shape, w.shape, conv.y_shape, *sizes)
        w, top = cupy.asarray(w), (shape[0], 64, *pooled)
        z = stored(np.zeros(conv.y_shape), dtype, True)
        (y, want), dy = (stored(np.zeros(top), dtype, True) for _ in "ab"), numbers(top, 4)
        index, places = (cupy.zeros(top, np.uint8) for _ in "ab")  # in the order of y
        maxima = Maxima(y, index, WINDOW, True)
        (make,) = strided_images.forward(geometry, maxima, np.dtype(dtype))
        make()(x, w, b, z, maxima)
        assert not z.any()
        conv.forward(x, w, b, z)
        cuda.max_pool_forward(z, want, places, WINDOW, relu=True)
        np.testing.assert_allclose(loaded(y), loaded(want), rtol=1e-2, atol=1e-2)
        assert (index != places).mean() < 0.05

        gradients = [(cupy.ones_like(w), cupy.ones_like(b)) for _ in range(3)]
        maxima = maxima._replace(y=stored(dy, dtype, True))
        (make,) = strided_images.backward_weight(geometry, maxima, np.dtype(dtype))
        for dw, db in gradients[1:]:
            make()(x, z, maxima, dw, db)
        assert all((a == b).all() for a, b in zip(*gradients[1:], strict=True))
        cuda.max_pool_backward(maxima.y, index, z, WINDOW)
        conv.backward_weight(x, z, *gradients[0])
        for have, known in zip(gradients[1], gradients[0], strict=True):
            assert cupy.linalg.norm(have - known) < 1e-2 * cupy.linalg.norm(known)


def test_what_is_left_to_others():
    fits = (2, 3, 32, 32), (64, 3, 7, 7), ((2, 2), (3, 3), (1, 1))
    narrow, wide = Layout(np.dtype(np.uint16), True), Layout(np.dtype(np.float32), True)
    other = ((2, 2), (2, 2), (0, 0))
    for layout, window, (x, w, sizes) in (
        (wide, WINDOW, fits),
        (narrow, other, fits),
        (narrow, WINDOW, ((2, 3, 32, 33), *fits[1:])),
        (narrow, WINDOW, ((2, 3, 32, 32), (96, 3, 7, 7), fits[2])),
        (narrow, WINDOW, ((2, 8, 32, 32), (64, 8, 7, 7), fits[2])),
        (narrow, WINDOW, ((2, 3, 32, 256), *fits[1:])),
    ):
        conv = cuda.Convolution(x, w, sizes, 1, layout.dtype)
        assert not conv.pools(layout, window)
