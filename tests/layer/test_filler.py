import threading

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob
from caffepy.device.random_numbers import RandomNumbers
from caffepy.layer.filler import MANY, fill, fill_beside, fillers
from caffepy.proto.caffe_pb2 import FillerParameter


def filled(text, *shape, dtype=np.float32, seed=0):
    array = np.full(shape, np.nan, dtype)
    fill(array, text_format.Parse(text, FillerParameter()), np.random.default_rng(seed))
    return array


def test_constant_is_the_default():
    np.testing.assert_array_equal(filled("", 2, 3), 0)
    np.testing.assert_array_equal(filled('type: "constant" value: 2.5', 2, 3), 2.5)


def test_a_blob_is_filled_in_place():
    blob = Blob((2, 3))
    fill(blob, FillerParameter(value=3), np.random.default_rng(0))
    np.testing.assert_array_equal(blob.data, 3)


FILLED_BESIDE = [
    ('type: "msra"', (300, 200)),
    ('type: "constant" value: 3', (5,)),
    ('type: "gaussian" std: 2 sparse: 7', (200, 400)),
    ('type: "uniform"', (7,)),
    ("value: 4", (200, 300)),
    ('type: "xavier"', ()),
    ('type: "positive_unitball"', (40, 1000)),
    ('type: "bilinear"', (4, 3, 60, 60)),
]


def test_fillers_beside_have_the_numbers_of_those_one_after_the_other():
    random, rng = RandomNumbers(3), np.random.Generator(np.random.MT19937(3))
    cases = [(text_format.Parse(text, FillerParameter()), shape) for text, shape in FILLED_BESIDE]
    blobs = [Blob(shape) for _, shape in cases]
    with random.drawing_beside():
        for blob, (param, _) in zip(blobs, cases, strict=True):
            fill_beside(blob, param, random)
        assert random.at_work
    drawn = random.generator.random()
    for blob, (param, shape) in zip(blobs, cases, strict=True):
        want = np.zeros(shape, np.float32)
        fill(want, param, rng)
        np.testing.assert_array_equal(blob.data, want)
    assert drawn == rng.random()
    assert not random.at_work


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform(dtype):
    w = filled('type: "uniform" min: -1 max: 3', 100, 500, dtype=dtype)
    assert -1 <= w.min() < -0.99
    assert 2.99 < w.max() <= 3
    assert w.mean() == pytest.approx(1, abs=0.05)
    assert filled('type: "uniform"', 1000).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gaussian(dtype):
    w = filled('type: "gaussian" mean: 2 std: 0.5', 100, 500, dtype=dtype)
    assert w.mean() == pytest.approx(2, abs=0.02)
    assert w.std() == pytest.approx(0.5, abs=0.02)
    assert filled('type: "gaussian"', 100, 500).std() == pytest.approx(1, abs=0.02)


def test_sparse_gaussian_keeps_a_share_of_the_first_axis():
    w = filled('type: "gaussian" sparse: 5', 50, 2000)
    assert (w != 0).mean() == pytest.approx(0.1, abs=0.01)


def test_positive_unitball_rows_sum_to_one():
    w = filled('type: "positive_unitball"', 4, 3, 5)
    assert w.min() >= 0
    np.testing.assert_allclose(w.sum((1, 2)), 1, rtol=1e-6)


def test_gaussian_unitball_rows_have_length_one():
    w = filled('type: "gaussian_unitball"', 4, 30, 50)
    np.testing.assert_allclose((w * w).sum((1, 2)), 1, rtol=1e-5)
    assert abs(w.mean()) < 1e-3 < w.std()


FANS = {"": 600, "FAN_IN": 600, "FAN_OUT": 800, "AVERAGE": 700}


@pytest.mark.parametrize("norm", FANS)
def test_xavier_and_msra_scale_with_the_fan(norm):
    variance_norm = f" variance_norm: {norm}" if norm else ""
    w = filled('type: "xavier"' + variance_norm, 40, 30, 4, 5)
    assert abs(w).max() == pytest.approx((3 / FANS[norm]) ** 0.5, rel=0.01)
    w = filled('type: "msra"' + variance_norm, 40, 30, 4, 5)
    assert w.std() == pytest.approx((2 / FANS[norm]) ** 0.5, rel=0.03)
    w = filled('type: "msra" alpha: 0.5' + variance_norm, 40, 30, 4, 5)
    assert w.std() == pytest.approx((2 / FANS[norm] / 1.25) ** 0.5, rel=0.03)


def test_fan_out_of_one_axis_is_the_count():
    assert abs(filled('type: "xavier" variance_norm: FAN_OUT', 10000)).max() == pytest.approx(
        0.0003**0.5, rel=0.01
    )


def test_bilinear_against_a_loop():
    w = filled('type: "bilinear"', 2, 3, 4, 4)
    f, c = 2, 3 / 4
    for _, _, y, x in np.ndindex(w.shape):
        assert w[0, 0, y, x] == pytest.approx((1 - abs(x / f - c)) * (1 - abs(y / f - c)))
    np.testing.assert_array_equal(w[1, 2], w[0, 0])
    assert filled('type: "bilinear"', 1, 1, 3, 3)[0, 0, 1, 1] == 1


@pytest.mark.parametrize(
    "name", [name for name in fillers if name not in ("constant", "bilinear", "bilinearstatic")]
)
def test_random_fillers_follow_the_generator(name):
    text = f'type: "{name}"'
    np.testing.assert_array_equal(filled(text, 4, 5), filled(text, 4, 5))
    assert (filled(text, 4, 5) != filled(text, 4, 5, seed=1)).any()


@pytest.mark.parametrize(
    "name", [name for name in fillers if not name.startswith(("bilinear", "truths"))]
)
def test_scalars_can_be_filled(name):
    assert np.isfinite(filled(f'type: "{name}"'))


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    {
        "name": ('type: "xaver"', (2, 3), 'unknown filler name "xaver", did you mean "xavier"'),
        "empty": ("", (0, 3), r"shape 0 3 \(0\) has nothing to fill"),
        "sparse": (
            'type: "xavier" sparse: 3',
            (2, 3),
            'sparse is for the filler "gaussian", not for "xavier"',
        ),
        "too sparse": (
            'type: "gaussian" sparse: 3',
            (2, 3),
            "more non-zero weights than 2 outputs",
        ),
        "uniform": ('type: "uniform" min: 2 max: 1', (2, 3), "min 2 and max 1"),
        "gaussian": ('type: "gaussian" std: -1', (2, 3), "0 or more, not -1"),
        "bilinear": ('type: "bilinear"', (1, 1, 2, 3), r"square kernels, not 1 1 2 3 \(6\)"),
    }.values(),
)
def test_what_cannot_be_filled_is_refused(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        filled(text, *shape)


def test_truths_have_rows_of_three_kinds():
    rows = filled('type: "truthsstatic" min: 2 max: 2 value: 3', 1, 1, 4, 8)[0, 0]
    np.testing.assert_array_equal(rows[:, :3], [[0, 2, 0], [0, 2, 0], [1, 2, 0], [2, 2, 0]])
    assert np.all((rows[:, 3:5] >= 0) & (rows[:, 5:7] <= 1) & (rows[:, 5:7] > rows[:, 3:5]))
    boxes = filled('type: "truthsstatic" min: 1 max: 3 value: 100', 50, 5)
    assert set(boxes[:, 4]) == {1, 2, 3}
    assert np.all((boxes[:, :2] >= 0) & (boxes[:, 2:4] <= 99))
    np.testing.assert_array_equal(filled('type: "truthsstatic" value: 100', 1, 3), [[100, 100, 1]])
    with pytest.raises(ConfigError, match="rows of 8, 5 or 3 numbers, not 2 4 "):
        filled('type: "truthsstatic"', 2, 4)


@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_what_cannot_be_filled_beside_is_refused_at_once(count):
    random = RandomNumbers(0)
    with random.drawing_beside():
        fill_beside(Blob((MANY,)), FillerParameter(type="gaussian"), random)
        with pytest.raises(ConfigError, match="min <= max"):
            fill_beside(Blob((1, count)), FillerParameter(type="uniform", min=1, max=0), random)
        with pytest.raises(ConfigError, match=r"5 0 \(0\) has nothing to fill"):
            fill_beside(Blob((5, 0)), FillerParameter(type="gaussian"), random)


def test_a_filler_of_a_fork_is_told_to_be_one():
    param = FillerParameter(type="gabor")
    with pytest.raises(ConfigError, match='"gabor" is one of Intel Caffe'):
        fill_beside(Blob((4, 3)), param, RandomNumbers(0))
    with pytest.raises(ConfigError, match='"gabor" is one of Intel Caffe'):
        fill(np.empty((4, 3)), param, np.random.default_rng(0))


def test_outside_of_a_net_s_building_blobs_are_filled_at_once():
    random, blob = RandomNumbers(0), Blob((MANY,))
    fill_beside(blob, FillerParameter(type="gaussian"), random)
    assert blob.data.all()
    assert not random.at_work


def test_a_blob_that_shares_another_s_data_leaves_them_alone():
    """What was given to be filled is the blob's own memory."""
    random, owner, blob = RandomNumbers(0), Blob((MANY,)), Blob((MANY,))
    held, may_go_on = threading.Event(), threading.Event()

    def hold(rng):
        held.set()
        assert may_go_on.wait(10)

    with random.drawing_beside():
        random.beside(hold)
        assert held.wait(10)
        fill_beside(blob, FillerParameter(type="gaussian"), random)
        blob.share_data(owner)
        may_go_on.set()
    np.testing.assert_array_equal(owner.data, 0)


def test_an_error_beside_is_raised_by_whoever_waits():
    random = RandomNumbers(0)
    with pytest.raises(ZeroDivisionError), random.drawing_beside():
        random.beside(lambda rng: 1 // 0)
    assert 0 <= random.generator.random() < 1
