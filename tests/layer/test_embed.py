import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_golden, check_gradient
from .on_gpu import check_plain_on_gpu, check_problem_on_gpu

X = np.array([[1.0, 0], [3, 1]])
TEXT = 'type: "Embed" embed_param { input_dim: 4 num_output: 3 weight_filler { type: "gaussian" } }'


def test_gradient():
    check_gradient(TEXT, X, propagate_down=[False])


def test_looks_up_rows():
    single = Single(TEXT, X)
    single.params[1][...] = [1, 2, 3]
    (y,) = single.forward()
    np.testing.assert_allclose(y, single.params[0][X.astype(int)] + [1, 2, 3])


def test_gradients_against_a_loop():
    """Row 1 is looked up twice, row 2 never."""
    single = Single(TEXT, X)
    (y,) = single.forward()
    dy = np.arange(1.0, 1 + y.size).reshape(y.shape)
    _, (dw, db) = single.backward([dy], [False])
    want, bias = np.zeros((4, 3)), np.zeros(3)
    for index in np.ndindex(X.shape):
        want[int(X[index])] += dy[index]
        bias += dy[index]
    np.testing.assert_allclose(dw, want)
    np.testing.assert_allclose(db, bias)
    assert not dw[2].any()


def test_as_caffe():
    check_golden("embed")


def test_bad_input():
    with pytest.raises(DataError, match="input 4 is not one of the 4 rows 0 to 3"):
        Single(TEXT, np.array([4.0])).forward()
    with pytest.raises(ConfigError, match="input_dim and num_output"):
        Single('type: "Embed" embed_param { num_output: 3 }', X)
    single = Single(TEXT, X)
    with pytest.raises(ConfigError, match="cannot differentiate its input"):
        single.layer.backward(single.top, [True], single.bottom)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["true", "false"])
def test_on_gpu(bias):
    text = TEXT.replace("num_output", f"bias_term: {bias} num_output")
    check_plain_on_gpu(text, np.array([[1.0, 0, 3], [3, 1, 3.5]]), propagate_down=[False])


@pytest.mark.gpu
@pytest.mark.parametrize("number", [4, -1, np.nan])
def test_bad_input_on_gpu(number):
    check_problem_on_gpu(f'name: "e" {TEXT}', np.array([1, number, 9]))
