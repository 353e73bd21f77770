"""Data layers: what Caffe put on the tops, states, messages, fillers."""

import logging
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Blob, Layout, from_bfloat16, to_bfloat16
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import create_layer
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter

pytestmark = pytest.mark.usefixtures("several")

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
CASES = sorted(p.stem for p in GOLDEN.glob("*.npz"))


class Feed:
    """The one layer of a net's text, outside a net."""

    def __init__(
        self,
        text,
        tops=2,
        phase=TRAIN,
        seed=1,
        path=None,
        dtype=np.float32,
        device=None,
        layout=None,
    ):
        (param,) = text_format.Parse(text, NetParameter()).layer
        self.device = device or Device()
        self.device.seed(seed)
        self.top = [Blob(dtype=dtype, device=self.device) for _ in range(tops)]
        with self.device.scope():
            self.layer = create_layer(param, phase, self.device, dtype, path)
            self.layer.setup([], self.top)
            if layout:
                self.top[0].set_layout(layout)
            self.layer.reshape([], self.top)

    def forward(self):
        with self.device.scope():
            self.layer.forward([], self.top)
            return [t.host_data.copy() for t in self.top]


@pytest.fixture
def ten(tmp_path):
    """The path of a prototxt that would lie beside an LMDB `db` of ten images."""
    values = np.random.default_rng(0).integers(0, 256, (10, 3, 7, 9), np.uint8)
    with write_database(str(tmp_path / "db")) as writer:
        for i, image in enumerate(values):
            writer.put(f"{i:08d}", array_to_datum(image, i))
    return str(tmp_path / "net.prototxt")


def text(data="batch_size: 4", transform=""):
    source = "" if "source" in data else 'source: "db" backend: LMDB'
    return f'layer {{ type: "Data" data_param {{ {source} {data} }} transform_param {{ {transform} }} }}'


DEVICES = [Device, pytest.param(CudaDevice, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_caffe_put_on_the_tops(case, dtype, device):
    golden = np.load(GOLDEN / f"{case}.npz")
    phase = {"TRAIN": TRAIN, "TEST": TEST}[str(golden["phase"])]
    path = str(GOLDEN / "net.prototxt")
    feed = Feed(str(golden["prototxt"]), phase=phase, path=path, dtype=dtype, device=device())
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
        assert (
            (windows == crop).all((-3, -2, -1)) | (windows == crop[:, :, ::-1]).all((-3, -2, -1))
        ).any()


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


LAYOUTS = {
    "plain": Layout(np.dtype(np.float32), False),
    "channels last": Layout(np.dtype(np.float32), True),
    "bf16": Layout(np.dtype(np.uint16), True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mean", ["", "mean_value: 3", "mean_value: 3 mean_value: 5 mean_value: 7"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_gets_the_numbers_of_the_cpu(layout, mean, ten):
    transform = f"crop_size: 5 mirror: true scale: 0.3 {mean}"
    host = Feed(text("batch_size: 3 prefetch: 2", transform), path=ten)
    device = CudaDevice()
    feeds = [
        Feed(
            text("batch_size: 3 prefetch: 2", transform),
            path=ten,
            device=device,
            layout=LAYOUTS[layout],
        )
    ]
    feeds.append(
        Feed(
            text("batch_size: 3", transform),
            path=ten,
            device=device,
            layout=LAYOUTS[layout],
            seed=9,
        )
    )
    for k in range(20):
        data, label = host.forward()
        if layout == "bf16":
            data = from_bfloat16(to_bfloat16(data))
        if k == 7:
            feeds[1].layer.set_state(feeds[0].layer.state())
        for feed in feeds[: 1 + (k >= 7)]:
            on_gpu = feed.forward()
            np.testing.assert_array_equal(on_gpu[0], data)
            np.testing.assert_array_equal(on_gpu[1], label)
    for feed in (host, *feeds):
        feed.layer.close()


@pytest.mark.gpu
def test_a_gpu_takes_images_of_all_kinds(tmp_path):
    rng = np.random.default_rng(0)
    with write_database(str(tmp_path / "db")) as writer:
        for i in range(24):
            image = rng.integers(
                0, 256, (3, *(rng.integers(5, 9, 2) if 8 <= i < 16 else (6, 7))), np.uint8
            )
            writer.put(
                f"{i:02d}", array_to_datum(image.astype(np.float32) / 7 if i % 8 == 3 else image, i)
            )
    layer = text("batch_size: 4", "crop_size: 5 mirror: true mean_value: 1 scale: 0.3")
    path = str(tmp_path / "net.prototxt")
    feeds = [Feed(layer, path=path, device=device) for device in (Device(), CudaDevice())]
    for _ in range(12):
        for a, b in zip(*(feed.forward() for feed in feeds), strict=True):
            np.testing.assert_array_equal(a, b)
    for feed in feeds:
        feed.layer.close()


@pytest.mark.parametrize("kind", ["Data", "HDF5Data"])
def test_a_state_of_another_kind_of_source_starts_anew(kind, ten, tmp_path, caplog):
    if kind == "Data":
        feed = Feed(text("batch_size: 3"), path=ten)
    else:
        write_hdf5(tmp_path, a=numbers(0, 3))
        feed = hdf5('hdf5_data_param { source: "list.txt" batch_size: 3 }', tmp_path)
    feed.layer.set_state({"something": 3})
    assert "has no position in" in caplog.text
    np.testing.assert_array_equal(feed.forward()[1], [0, 1, 2])
    feed.layer.close()


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
        "data_param: without effect, as in Caffe: crop_size, mirror, rand_skip; "
        "write crop_size, mirror in transform_param"
    ]
    assert feed.top[0].shape == (2, 3, 7, 9)
    np.testing.assert_array_equal(feed.forward()[1], [0, 1])
    feed.layer.close()


def test_a_shuffle_of_records_is_said_to_have_no_effect(ten, caplog):
    feed = Feed(text("batch_size: 10 shuffle: true"), path=ten)
    assert caplog.messages == [
        "data_param's shuffle has no effect: records come in the order of their keys"
    ]
    np.testing.assert_array_equal(feed.forward()[1], range(10))
    feed.layer.close()


REFUSED = {
    "no batch_size": ("", "", ConfigError, "needs a batch_size of 1 or more"),
    "no prefetch": ("batch_size: 1 prefetch: 0", "", ConfigError, "needs a prefetch of 1 or more"),
    "missing source": (
        "batch_size: 1 source: 'nowhere'",
        "",
        DataError,
        'source "nowhere" does not exist',
    ),
    "large crop": (
        "batch_size: 1",
        "crop_size: 8",
        ConfigError,
        "crop_size 8 is larger than the image, 7 x 9",
    ),
    "mean values": (
        "batch_size: 1",
        "mean_value: 1 mean_value: 2",
        ConfigError,
        "2 mean_value for 3 channels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, ten):
    data, transform, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        Feed(text(data, transform), path=ten)


def test_an_error_in_the_thread_is_raised_by_forward(tmp_path):
    with write_database(str(tmp_path / "db")) as writer:
        for i, size in enumerate((4, 4, 4, 5)):
            writer.put(f"{i}", array_to_datum(np.zeros((1, size, size), np.uint8)))
    feed = Feed(text("batch_size: 2"), path=str(tmp_path / "net.prototxt"))
    feed.forward()
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=r'record "3" has shape 1 5 5 \(25\) in a batch that starts with 1 4 4 \(16\)',
        ):
            feed.forward()
    feed.layer.close()


def dummy(text, tops=1, **kwargs):
    return Feed(f'layer {{ type: "DummyData" dummy_data_param {{ {text} }} }}', tops, **kwargs)


SHAPES = {
    "one shape": ("shape { dim: 2 dim: 3 }", [(2, 3), (2, 3)]),
    "each its shape": ("shape { dim: 2 dim: 3 } shape { dim: 4 }", [(2, 3), (4,)]),
    "legacy": ("num: 1 channels: 2 height: 3 width: 4", [(1, 2, 3, 4)] * 2),
    "legacy, some each": (
        "num: 1 num: 5 channels: 2 height: 3 height: 6 width: 4",
        [(1, 2, 3, 4), (5, 2, 6, 4)],
    ),
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


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dummy_on_a_gpu(layout):
    params = 'shape { dim: 2 dim: 3 dim: 4 dim: 5 } data_filler { value: 2 } data_filler { type: "gaussian" }'
    feed = dummy(params, tops=2, device=CudaDevice(), layout=LAYOUTS[layout])
    array = feed.top[0].data
    for _ in range(2):
        constant, random = feed.forward()
        assert (constant == 2).all()
        assert random.std() > 0.5
        assert feed.top[0].data is array


def test_dummy_random_values_are_fresh_and_seeded():
    params = 'shape { dim: 50 } data_filler { value: 2 } data_filler { type: "gaussian" }'
    feed, again = dummy(params, tops=2), dummy(params, tops=2)
    constant, first = feed.forward()
    _, second = feed.forward()
    assert (constant == 2).all()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(again.forward()[1], first)


def test_dummy_random_values_are_the_layers_own_and_go_on_where_they_stopped():
    params = (
        'shape { dim: 50 } data_filler { type: "gaussian" } data_filler { type: "gaussianstatic" }'
    )
    feed, again, resumed = (dummy(params, tops=2, seed=seed) for seed in (1, 1, 2))
    feed.forward()
    state, (drawn, static) = feed.layer.state(), feed.forward()
    again.forward()
    again.layer.device.rng.random(7)  # as a Dropout of another solver's may do meanwhile
    np.testing.assert_array_equal(again.forward()[0], drawn)
    resumed.layer.set_state(state)
    for array, expected in zip(resumed.forward(), (drawn, static), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert dummy("shape { dim: 3 }").layer.state() == {}


def test_dummy_static_values_are_drawn_once():
    feed = dummy(
        'shape { dim: 50 } data_filler { type: "gaussianstatic" } data_filler { type: "uniform" }',
        tops=2,
    )
    (first, fresh), (second, other) = feed.forward(), feed.forward()
    assert first.std() > 0.5
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(fresh, other)


DUMMY_REFUSED = {
    "no shape": ("", "shape must be given once or once for each top, not 0 times for 3 tops"),
    "two shapes": (
        "shape { dim: 1 } shape { dim: 1 }",
        "shape must be given .* not 2 times for 3 tops",
    ),
    "both ways": (
        "shape { dim: 1 } num: 1",
        "either shape or num, channels, height and width, not both",
    ),
    "legacy, incomplete": ("num: 1 channels: 1 height: 1", "width must be given .* not 0 times"),
    "two fillers": (
        "shape { dim: 1 } data_filler {} data_filler {}",
        "data_filler must be given .* not 2 times",
    ),
    "unknown filler": (
        "shape { dim: 1 } data_filler { type: 'gausian' }",
        'did you mean "gaussian"',
    ),
}


@pytest.mark.parametrize("case", DUMMY_REFUSED)
def test_dummy_refused(case):
    params, message = DUMMY_REFUSED[case]
    with pytest.raises(CaffeError, match=message):
        dummy(params, tops=3).forward()


def hdf5(params, folder, tops=2, **kwargs):
    names = 'top: "data" top: "label"'
    return Feed(
        f'layer {{ type: "HDF5Data" {names} {params} }}',
        tops,
        path=str(folder / "net.prototxt"),
        **kwargs,
    )


def write_hdf5(folder, **files):
    for name, datasets in files.items():
        with h5py.File(folder / f"{name}.h5", "w") as f:
            for key, value in datasets.items():
                f[key] = value
    (folder / "list.txt").write_text("\n".join(f"{name}.h5" for name in files))


def numbers(start, count):
    """Datasets of which each row is its number."""
    rows = np.arange(start, start + count)
    return {"data": np.repeat(rows[:, None], 2, 1), "label": rows.astype(np.float64)}


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_hdf5_shuffles_every_round_anew_and_resumes(names, tmp_path):
    write_hdf5(tmp_path, **{name: numbers(5 * i, 5) for i, name in enumerate(names)})
    params = 'hdf5_data_param { source: "list.txt" batch_size: 2 shuffle: true }'
    feed, again = hdf5(params, tmp_path), hdf5(params, tmp_path, seed=9)
    rounds = [np.concatenate([feed.forward()[1] for _ in range(5 * len(names))]) for _ in range(2)]
    for labels in np.reshape(rounds, (4, -1)):
        np.testing.assert_array_equal(np.sort(labels), np.arange(5 * len(names)))
    assert not np.array_equal(*rounds)
    again.layer.set_state(feed.layer.state())
    for _ in range(20):
        for a, b in zip(feed.forward(), again.forward(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_hdf5_of_fewer_rows_than_before(tmp_path):
    write_hdf5(tmp_path, a=numbers(0, 7))
    feed = hdf5('hdf5_data_param { source: "list.txt" batch_size: 5 }', tmp_path)
    feed.forward()
    write_hdf5(tmp_path, a=numbers(0, 3))
    again = hdf5('hdf5_data_param { source: "list.txt" batch_size: 2 }', tmp_path)
    again.layer.set_state(feed.layer.state())
    np.testing.assert_array_equal(again.forward()[1], [2, 0])


HDF5_REFUSED = {
    "transform": ("transform_param { scale: 2 }", ConfigError, "HDF5Data does not transform data"),
    "no batch_size": ("hdf5_data_param { source: 'list.txt' }", ConfigError, "needs a batch_size"),
    "missing list": (
        "hdf5_data_param { source: 'no.txt' batch_size: 1 }",
        DataError,
        '"no.txt" cannot be read: no such',
    ),
    "no list": (
        "hdf5_data_param { source: 'a.h5' batch_size: 1 }",
        DataError,
        "an HDF5 file; give a text file that lists",
    ),
    "empty list": (
        "hdf5_data_param { source: 'empty.txt' batch_size: 1 }",
        DataError,
        "names no HDF5 files",
    ),
    "missing file": (
        "hdf5_data_param { source: 'other.txt' batch_size: 1 }",
        DataError,
        '"x.h5", .* is missing',
    ),
}


@pytest.mark.parametrize("case", HDF5_REFUSED)
def test_hdf5_refused(case, tmp_path):
    write_hdf5(tmp_path, a=numbers(0, 3))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.txt").write_text("x.h5")
    params, error, message = HDF5_REFUSED[case]
    with pytest.raises(error, match=message):
        hdf5(params, tmp_path)


HDF5_DAMAGED = {
    "no dataset": (
        {"data": np.zeros(3), "labels": np.zeros(3)},
        'no dataset "label", did you mean "labels"',
    ),
    "rows differ": (
        {"data": np.zeros(3), "label": np.zeros(2)},
        'same number of rows, at least 1: "data" 3, "label" 2',
    ),
    "no rows": (
        {"data": np.zeros((0, 2)), "label": np.zeros(0)},
        'at least 1: "data" 0, "label" 0',
    ),
    "a link": (
        {"data": h5py.SoftLink("/no"), "label": np.zeros(2)},
        'no dataset "data", but a link that leads nowhere',
    ),
    "a link to a file": (
        {"data": h5py.ExternalLink("no.h5", "/data"), "label": np.zeros(2)},
        "that leads nowhere",
    ),
    "scalar": ({"data": 1.0, "label": np.zeros(2)}, '"data" is no dataset of numbers'),
    "text": ({"data": b"hello", "label": np.zeros(2)}, '"data" is no dataset of numbers'),
    "other width": (
        {"data": np.zeros((2, 3)), "label": np.zeros(2)},
        r"shape 3 \(3\), those of .*a.h5 2 \(2\)",
    ),
}


@pytest.mark.parametrize("case", HDF5_DAMAGED)
def test_hdf5_damaged(case, tmp_path):
    datasets, message = HDF5_DAMAGED[case]
    write_hdf5(tmp_path, a=numbers(0, 3), b=datasets)
    feed = hdf5('hdf5_data_param { source: "list.txt" batch_size: 2 }', tmp_path)
    feed.forward()
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            feed.forward()


def test_hdf5_that_claims_more_than_it_holds_takes_no_memory(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", (1 << 15, 1 << 15), np.float32)
        file.create_dataset("label", (1 << 15,), np.float32)
    (tmp_path / "list.txt").write_text("a.h5")
    with pytest.raises(DataError, match=r"it claims 4\d+ bytes of values in \d+ bytes"):
        hdf5('hdf5_data_param { source: "list.txt" batch_size: 2 }', tmp_path)


def test_hdf5_goes_back_from_a_file_that_ends_early(tmp_path, monkeypatch):
    write_hdf5(tmp_path, a=numbers(0, 2), b=numbers(2, 4))
    feed = hdf5('hdf5_data_param { source: "list.txt" batch_size: 2 }', tmp_path)
    start = feed.layer.state()

    def half(self, out):
        out[:] = -1
        raise OSError("unexpected end of file")

    with monkeypatch.context() as patch:
        patch.setattr(h5py.Dataset, "read_direct", half)
        with pytest.raises(DataError, match=r"b.h5 cannot be read: unexpected end of file"):
            feed.forward()
    feed.layer.set_state(start)
    feed.forward()
    assert feed.top[1].data.tolist() == [0, 1]


@pytest.fixture
def listed(tmp_path):
    """The path of a prototxt beside a list of six images whose pixels are their labels."""
    (tmp_path / "with blanks").mkdir()
    for i in range(6):
        cv2.imwrite(f"{tmp_path}/with blanks/{i}.png", np.full((4, 5, 3), i, np.uint8))
    (tmp_path / "list.txt").write_text("".join(f"with blanks/{i}.png {i}.7\n" for i in range(6)))
    return str(tmp_path / "net.prototxt")


def image_data(params, path, transform="", **kwargs):
    source = "" if "source" in params else 'source: "list.txt"'
    params = f"image_data_param {{ {source} {params} }} transform_param {{ {transform} }}"
    return Feed(f'layer {{ type: "ImageData" {params} }}', path=path, **kwargs)


def test_image_list_in_order_with_integer_labels(listed):
    feed = image_data("batch_size: 4", listed)
    assert [t.shape for t in feed.top] == [(4, 3, 4, 5), (4,)]
    for k in range(4):
        data, label = feed.forward()
        np.testing.assert_array_equal(label, [(4 * k + i) % 6 for i in range(4)])
        np.testing.assert_array_equal(data, np.broadcast_to(label[:, None, None, None], data.shape))
    feed.layer.close()


def test_image_list_gray_and_resized(listed):
    feed = image_data("batch_size: 2 is_color: false new_height: 7 new_width: 3", listed)
    assert feed.forward()[0].shape == (2, 1, 7, 3)
    feed.layer.close()


def test_image_list_shuffles_every_epoch_anew_and_resumes(listed):
    feed, again = (
        image_data("batch_size: 3 shuffle: true", listed, "mirror: true", seed=s) for s in (1, 2)
    )
    epochs = [np.concatenate([feed.forward()[1] for _ in range(2)]) for _ in range(8)]
    for labels in epochs:
        np.testing.assert_array_equal(np.sort(labels), range(6))
    assert len({tuple(labels) for labels in epochs}) > 1
    again.layer.set_state(feed.layer.state())
    for _ in range(9):
        for a, b in zip(feed.forward(), again.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
    feed.layer.close()
    again.layer.close()


def test_image_list_skips_at_random(listed):
    firsts = set()
    for seed in range(20):
        feed = image_data("batch_size: 1 rand_skip: 3", listed, seed=seed)
        firsts.add(int(feed.forward()[1][0]))
        feed.layer.close()
    assert firsts == {0, 1, 2}


IMAGES_REFUSED = {
    "missing list": ('source: "no.txt"', '"no.txt" cannot be read: no such file'),
    "empty list": ('source: "empty.txt"', "empty.txt lists no images"),
    "a tab": (
        'source: "lines.txt"',
        'lines.txt:2: "b.png\t2" is not an image path, a blank and a label',
    ),
    "missing image": (
        'source: "absent.txt"',
        "x.png cannot be read: no such file or directory; no root_folder is given, which would",
    ),
    "root without its slash": (
        'source: "absent.txt" root_folder: "in"',
        r'inx.png cannot be read: .*; root_folder "in" does not end in "/"',
    ),
    "missing root": (
        'source: "absent.txt" root_folder: "nowhere/"',
        r'nowhere/x.png cannot be read: .*; there is no root_folder "nowhere/"$',
    ),
    "no image": ('source: "text.txt"', r"list.txt: its image cannot be decoded \(\d+ bytes\)"),
    "one size": ("new_height: 3", "new_height and new_width must both be given or neither"),
    "skips too many": ("rand_skip: 4000000000", "lists 6 images, not enough to skip"),
}


@pytest.mark.parametrize("case", IMAGES_REFUSED)
def test_image_list_refused(case, listed):
    texts = {
        "empty.txt": "",
        "lines.txt": "a.png 1\nb.png\t2",
        "absent.txt": "x.png 0",
        "text.txt": "list.txt 0",
    }
    for name, content in texts.items():
        (Path(listed).parent / name).write_text(content)
    params, message = IMAGES_REFUSED[case]
    with pytest.raises(CaffeError, match=message):
        image_data(params, listed)


def test_a_list_of_nearly_this_name_is_suggested(listed, monkeypatch):
    monkeypatch.chdir(Path(listed).parent)
    with pytest.raises(DataError, match=r'no such file or directory, did you mean "list\.txt"'):
        image_data('source: "lst.txt"', listed)


def memory(transform=""):
    params = "memory_data_param { batch_size: 2 channels: 1 height: 2 width: 3 }"
    return Feed(f'layer {{ type: "MemoryData" {params} transform_param {{ {transform} }} }}')


def test_memory_goes_around():
    feed = memory("scale: 100")
    data, labels = np.arange(24.0, dtype=np.float32).reshape(4, 1, 2, 3), np.arange(4)
    feed.layer.reset(data, labels)
    for k in range(3):
        values, label = feed.forward()
        part = slice(0, 2) if k % 2 == 0 else slice(2, 4)
        np.testing.assert_array_equal(values, data[part])
        np.testing.assert_array_equal(label, labels[part].reshape(2, 1, 1, 1))


def test_memory_transforms_what_is_added():
    feed = memory("scale: 0.5")
    images = np.arange(12, dtype=np.uint8).reshape(2, 1, 2, 3)
    feed.layer.add(images, np.array([3, 4]))
    with pytest.raises(DataError, match="before those given earlier were used up"):
        feed.layer.add(images, np.array([3, 4]))
    values, label = feed.forward()
    np.testing.assert_array_equal(values, images / 2)
    np.testing.assert_array_equal(label.ravel(), [3, 4])
    feed.layer.add(images, np.array([3, 4]))


def test_memory_refused():
    feed = memory()
    with pytest.raises(DataError, match="needs data before forward"):
        feed.forward()
    with pytest.raises(DataError, match=r"arrays of shape 1 3 3 \(9\) for a layer of 1 2 3 \(6\)"):
        feed.layer.reset(np.zeros((2, 1, 3, 3)), np.zeros(2))
    with pytest.raises(
        DataError, match="3 arrays and 3 labels; give a multiple of the batch size 2"
    ):
        feed.layer.reset(np.zeros((3, 1, 2, 3)), np.zeros(3))
    with pytest.raises(ConfigError, match="batch_size, channels, height and width of 1 or more"):
        Feed(
            'layer { type: "MemoryData" memory_data_param { batch_size: 2 channels: 1 height: 2 } }'
        )
