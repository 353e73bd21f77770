"""Data and DummyData: what Caffe put on the tops, states, messages, fillers."""

import logging
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.blob import Blob
from caffepy.data.write import array_to_datum, write_lmdb
from caffepy.device import Device
from caffepy.errors import CaffeError, ConfigError, DataError
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
CASES = sorted(p.stem for p in GOLDEN.glob("lmdb_*.npz"))


class Feed:
    """The one layer of a net's text, outside a net."""

    def __init__(self, text, tops=2, phase=TRAIN, seed=1, path=None, dtype=np.float32):
        (param,) = text_format.Parse(text, NetParameter()).layer
        self.device = Device(seed=seed)
        self.layer = create_layer(param, phase, self.device, dtype, path)
        self.top = [Blob(dtype=dtype) for _ in range(tops)]
        self.layer.setup([], self.top)
        self.layer.reshape([], self.top)

    def forward(self):
        self.layer.forward([], self.top)
        return [t.data.copy() for t in self.top]


@pytest.fixture
def ten(tmp_path):
    """The path of a prototxt that would lie beside an LMDB `db` of ten images."""
    values = np.random.default_rng(0).integers(0, 256, (10, 3, 7, 9), np.uint8)
    with write_lmdb(str(tmp_path / "db")) as writer:
        for i, image in enumerate(values):
            writer.put(f"{i:08d}", array_to_datum(image, i))
    return str(tmp_path / "net.prototxt")


def text(data="batch_size: 4", transform=""):
    source = "" if "source" in data else 'source: "db" backend: LMDB'
    return f'layer {{ type: "Data" data_param {{ {source} {data} }} transform_param {{ {transform} }} }}'


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_caffe_put_on_the_tops(case, dtype):
    golden = np.load(GOLDEN / f"{case}.npz")
    phase = {"TRAIN": TRAIN, "TEST": TEST}[str(golden["phase"])]
    feed = Feed(str(golden["prototxt"]), phase=phase, path=str(GOLDEN / "net.prototxt"), dtype=dtype)
    for batch in range(int(golden["batches"])):
        for name, answer in zip(("data", "label"), feed.forward(), strict=True):
            expected = golden[f"{name}:{batch}"]
            assert answer.shape == expected.shape
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-4)
    feed.layer.close()


def test_shapes_come_without_consuming_or_a_thread(ten, caplog):
    caplog.set_level(logging.INFO, "caffepy")
    feed = Feed(text(transform="crop_size: 5"), path=ten)
    assert [t.shape for t in feed.top] == [(4, 3, 5, 5), (4,)]
    assert "output data size: 4,3,5,5" in caplog.messages
    np.testing.assert_array_equal(feed.forward()[1], [0, 1, 2, 3])
    feed.layer.close()


def test_one_top_gives_no_labels_and_arrays_stay(ten):
    feed = Feed(text(), tops=1, path=ten)
    array = feed.top[0].data
    first, second = feed.forward()[0], feed.forward()[0]
    assert feed.top[0].data is array
    assert not np.array_equal(first, second)
    feed.layer.close()


def test_random_crops_and_mirrors_are_parts_of_the_image_and_repeat(ten):
    transform = "crop_size: 5 mirror: true"
    whole = Feed(text("batch_size: 10"), path=ten).forward()[0]
    feeds = [Feed(text("batch_size: 10", transform), path=ten, seed=s) for s in (3, 3, 4)]
    crops, again, other = (np.concatenate([f.forward()[0] for _ in range(5)]) for f in feeds)
    np.testing.assert_array_equal(crops, again)
    assert not np.array_equal(crops, other)
    for k, crop in enumerate(crops):
        windows = np.lib.stride_tricks.sliding_window_view(whole[k % 10], (3, 5, 5))[0]
        assert ((windows == crop).all((-3, -2, -1)) | (windows == crop[:, :, ::-1]).all((-3, -2, -1))).any()


def test_state_goes_on_exactly(ten):
    transform = "crop_size: 5 mirror: true"
    first, second = (Feed(text("batch_size: 3", transform), path=ten, seed=s) for s in (1, 2))
    for _ in range(5):
        first.forward()
    second.layer.set_state(first.layer.state())
    for _ in range(6):
        for a, b in zip(first.forward(), second.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
    first.layer.close()
    second.layer.close()


def test_state_of_a_closed_layer_is_empty_and_closing_twice_is_fine(ten):
    feed = Feed(text(), path=ten)
    feed.forward()
    feed.layer.close()
    feed.layer.close()
    assert feed.layer.state() == {}


def test_default_backend_opens_an_lmdb_with_one_warning(ten, caplog):
    folder = Path(ten).parent
    feed = Feed(text(f'source: "{folder}/db" batch_size: 2'))
    np.testing.assert_array_equal(feed.forward()[1], [0, 1])
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"{folder}/db is opened as the LMDB it is; write backend: LMDB"
    ]
    feed.layer.close()


def test_fields_that_caffe_ignores_are_named(ten, caplog):
    feed = Feed(text("batch_size: 2 crop_size: 3 mirror: true rand_skip: 5"), path=ten)
    assert caplog.messages == [
        "data_param's crop_size, mirror, rand_skip are ignored, as in Caffe; "
        "crop_size, mirror belong in transform_param"
    ]
    assert feed.top[0].shape == (2, 3, 7, 9)
    np.testing.assert_array_equal(feed.forward()[1], [0, 1])
    feed.layer.close()


REFUSED = {
    "no batch_size": ("", "", ConfigError, "needs a batch_size of 1 or more"),
    "no prefetch": ("batch_size: 1 prefetch: 0", "", ConfigError, "needs a prefetch of 1 or more"),
    "missing source": ("batch_size: 1 source: 'nowhere'", "", DataError, 'source "nowhere" does not exist'),
    "large crop": ("batch_size: 1", "crop_size: 8", ConfigError, "crop_size 8 is larger than the image, 7 x 9"),
    "mean values": ("batch_size: 1", "mean_value: 1 mean_value: 2", ConfigError, "2 mean_value for 3 channels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, ten):
    data, transform, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        Feed(text(data, transform), path=ten)


def test_an_error_in_the_thread_is_raised_by_forward(tmp_path):
    with write_lmdb(str(tmp_path / "db")) as writer:
        for i, size in enumerate((4, 4, 4, 5)):
            writer.put(f"{i}", array_to_datum(np.zeros((1, size, size), np.uint8)))
    feed = Feed(text("batch_size: 2"), path=str(tmp_path / "net.prototxt"))
    feed.forward()
    for _ in range(2):
        with pytest.raises(
            DataError, match=r'record "3" has shape 1 5 5 \(25\) in a batch that starts with 1 4 4 \(16\)'
        ):
            feed.forward()
    feed.layer.close()


def dummy(text, tops=1, **kwargs):
    return Feed(f'layer {{ type: "DummyData" dummy_data_param {{ {text} }} }}', tops, **kwargs)


SHAPES = {
    "one shape": ("shape { dim: 2 dim: 3 }", [(2, 3), (2, 3)]),
    "each its shape": ("shape { dim: 2 dim: 3 } shape { dim: 4 }", [(2, 3), (4,)]),
    "legacy": ("num: 1 channels: 2 height: 3 width: 4", [(1, 2, 3, 4)] * 2),
    "legacy, some each": ("num: 1 num: 5 channels: 2 height: 3 height: 6 width: 4", [(1, 2, 3, 4), (5, 2, 6, 4)]),
}


@pytest.mark.parametrize("case", SHAPES)
def test_dummy_shapes(case):
    params, shapes = SHAPES[case]
    feed = dummy(params, tops=2)
    assert [t.shape for t in feed.top] == shapes
    assert not any(array.any() for array in feed.forward())


def test_dummy_constants_are_filled_once():
    feed = dummy("shape { dim: 3 } data_filler { value: 7 }", tops=2)
    assert all((t.data == 7).all() for t in feed.top)
    feed.top[0].data[...] = 5
    first, second = feed.forward()
    assert (first == 5).all()
    assert (second == 7).all()


def test_dummy_random_values_are_fresh_and_seeded():
    params = 'shape { dim: 50 } data_filler { value: 2 } data_filler { type: "gaussian" }'
    feed, again = dummy(params, tops=2), dummy(params, tops=2)
    constant, first = feed.forward()
    _, second = feed.forward()
    assert (constant == 2).all()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(again.forward()[1], first)


DUMMY_REFUSED = {
    "no shape": ("", "shape must be given once or once for each top, not 0 times for 3 tops"),
    "two shapes": ("shape { dim: 1 } shape { dim: 1 }", "shape must be given .* not 2 times for 3 tops"),
    "both ways": ("shape { dim: 1 } num: 1", "either shape or num, channels, height and width, not both"),
    "legacy, incomplete": ("num: 1 channels: 1 height: 1", "width must be given .* not 0 times"),
    "two fillers": ("shape { dim: 1 } data_filler {} data_filler {}", "data_filler must be given .* not 2 times"),
    "unknown filler": ("shape { dim: 1 } data_filler { type: 'gausian' }", 'did you mean "gaussian"'),
}


@pytest.mark.parametrize("case", DUMMY_REFUSED)
def test_dummy_refused(case):
    params, message = DUMMY_REFUSED[case]
    with pytest.raises(CaffeError, match=message):
        dummy(params, tops=3).forward()
