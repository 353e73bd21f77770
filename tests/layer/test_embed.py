import numpy as np
import pytest

from caffepy.errors import ConfigError, DataError

from .harness import Single, check_golden, check_gradient

X = np.array([[1.0, 0], [3, 1]])
TEXT = 'type: "Embed" embed_param { input_dim: 4 num_output: 3 weight_filler { type: "gaussian" } }'


def test_gradient():
    check_gradient(TEXT, X, propagate_down=[False])


def test_looks_up_rows():
    single = Single(TEXT, X)
    single.params[1][...] = [1, 2, 3]
    (y,) = single.forward()
    np.testing.assert_allclose(y, single.params[0][X.astype(int)] + [1, 2, 3])


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
