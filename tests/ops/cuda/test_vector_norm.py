import numpy as np
import pytest

from caffepy.ops import cpu
from tests.ops.cuda.compare import data

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", [1, 3, 64, 72, 512, 2000])
def test_scaled_norms(channels, last):
    import cupy

    from caffepy.ops import cuda

    x, dy = data((2, channels, 35)), data((2, channels, 35), seed=1)
    scale, dscale = data(channels, seed=2), data(channels, seed=3)
    want = y, norm, dx, sums = np.empty_like(x), np.empty((2, 35), "f"), dy.copy(), dscale.copy()
    cpu.scaled_norm_forward(x, scale, y, norm, 0.1)
    cpu.scaled_norm_backward(x, scale, norm, 0.1, dx, dx, sums)

    def laid(a):
        a = cupy.asarray(a)
        return cupy.ascontiguousarray(a.transpose(0, 2, 1)).transpose(0, 2, 1) if last else a

    gx, gdy, gy, gscale, gsums = (
        laid(x),
        laid(dy),
        laid(y),
        cupy.asarray(scale),
        cupy.asarray(dscale),
    )
    gnorm = cupy.empty(norm.shape, "f")
    cuda.scaled_norm_forward(gx, gscale, gy, gnorm, 0.1)
    cuda.scaled_norm_backward(gx, gscale, gnorm, 0.1, gdy, gdy, gsums)
    for got, expected in zip((gy, gnorm, gdy, gsums), want, strict=True):
        np.testing.assert_allclose(got.get(), expected, 1e-4, 1e-4)
