import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.proto.caffe_pb2 import TEST, TRAIN

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

TEXT = """type: "DenseBlock" denseblock_param { numTransition: 2 growthRate: 2 %s
    Filter_Filler { type: "gaussian" std: 0.3 } BN_Scaler_Filler { type: "uniform" min: 0.5 max: 2 }
    BN_Bias_Filler { type: "gaussian" std: 0.3 } }"""
X = random(3, 3, 4, 5)


def convolved(x, w):
    """3x3, one element of the output after the other."""
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    y = np.empty((len(x), len(w), *x.shape[2:]))
    for i, j in np.ndindex(*x.shape[2:]):
        y[:, :, i, j] = np.einsum("ncij,ocij->no", padded[:, :, i : i + 3, j : j + 3], w)
    return y


def block(x, blobs, stored=None):
    """The block, one transition after the other, and what it took for mean and variance."""
    taken = []
    for t in range(2):
        w, scale, bias = (blobs[k * 2 + t] for k in range(3))
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        taken.append((mean, variance * x[:, 0].size / (x[:, 0].size - 1)))
        if stored:
            mean, variance = stored[t]
        mean, variance = (v.reshape(1, -1, 1, 1) for v in (mean, variance))
        active = np.maximum((x - mean) / np.sqrt(variance + 1e-5) * scale + bias, 0)
        x = np.concatenate([x, convolved(active, w)], 1)
    return x, taken


def test_dense_block_against_a_loop():
    single = Single(TEXT % "", X)
    assert [b.shape for b in single.layer.blobs[::2]] == [
        *((2, 3, 3, 3), *[(1, 3, 1, 1)] * 4),
        (1,),
    ]
    want, taken = block(X, single.params)
    for passes in (1, 2):
        np.testing.assert_allclose(single.forward()[0], want, rtol=1e-6, atol=1e-6)
        weight = 1 if passes == 1 else 1.1
        np.testing.assert_allclose(single.params[-1], weight)
        for t, numbers in enumerate(taken):
            for kind, number in zip((3, 4), numbers, strict=True):
                stored = single.params[kind * 2 + t].ravel()
                np.testing.assert_allclose(stored, weight * number, rtol=1e-5, atol=1e-6)


def test_stored_statistics_normalize_in_the_test_phase():
    single = Single(TEXT % "", X, phase=TEST)
    single.params[-1][...] = 4
    stored = []
    for t in range(2):
        mean, variance = random(3 + 2 * t), 1 + random(3 + 2 * t, seed=1) ** 2
        single.params[6 + t][...] = 4 * mean.reshape(1, -1, 1, 1)
        single.params[8 + t][...] = 4 * variance.reshape(1, -1, 1, 1)
        stored.append((mean, variance))
    want, _ = block(X, single.params, stored)
    np.testing.assert_allclose(single.forward()[0], want, rtol=1e-6, atol=1e-6)


def test_dense_block_gradient():
    check_gradient(TEXT % "", X, params=range(6))


def with_statistics():
    """The layer with blobs, of which those of statistics are means about 0 and variances of 1."""
    blobs = [*(b.copy() for b in Single(TEXT % "", X).params[:6])]
    blobs += [random(1, c, 1, 1) for c in (3, 5)] + [np.ones((1, c, 1, 1)) for c in (3, 5)]
    text = TEXT % ""
    for blob in (*blobs, np.ones(1)):
        shape = ", ".join(map(str, blob.shape))
        text += f" blobs {{ shape {{ dim: [{shape}] }} double_data: {blob.ravel().tolist()} }}"
    return text


def test_dense_block_gradient_in_the_test_phase():
    check_gradient(with_statistics(), X, params=range(6), phase=TEST)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_dense_block_on_gpu(phase):
    check_plain_on_gpu(with_statistics(), X, propagate_down=[True], phase=phase)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ("use_BC: true", X.shape, "use_BC must be False here"),
        ("pad_h: 0", X.shape, "pad_h must be 1 here"),
        ("", (2, 3, 4), r"needs \(N, C, H, W\), not \[2, 3, 4\]"),
    ],
)
def test_what_dense_block_does_not_do(settings, shape, message):
    with pytest.raises(ConfigError, match=message):
        Single(TEXT % settings, np.zeros(shape))


def test_other_channels_than_the_filters_have():
    single = Single(TEXT % "", X)
    single.bottom[0].reshape((3, 4, 4, 5))
    with pytest.raises(ConfigError, match="the blobs are for 3 channels, not 4"):
        single.layer.reshape(single.bottom, single.top)
