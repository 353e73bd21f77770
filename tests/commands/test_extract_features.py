"""Features of the digits, as records of databases and as arrays, held to what the net's blobs hold."""

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy import models
from caffepy.commands.extract_features import Feature, extract_features, features_of, record
from caffepy.core.errors import ConfigError, DataError, UsageError
from caffepy.data.sources import open_database
from caffepy.device.blob import Array
from caffepy.net import Net
from caffepy.net.weights import load_weights
from caffepy.proto.caffe_pb2 import TEST, Datum
from caffepy.proto.text import read_net

MODEL = str(models.path("digits", "train_val"))
WEIGHTS = str(Path(__file__).parents[1] / "golden" / "digits" / "digits_iter_500.caffemodel")
BATCH, IMAGES = 99, 297


@pytest.fixture(scope="module")
def blobs() -> dict[str, Array]:
    """Return the net's blobs in four batches, of which the last is the first again."""
    param = read_net(MODEL)
    param.state.phase = TEST
    net = Net(param, path=MODEL)
    load_weights(net, WEIGHTS)
    rows: dict[str, list[Array]] = {name: [] for name in ("conv1", "ip1", "label", "loss")}
    for _ in range(4):
        net.forward()
        for name, parts in rows.items():
            parts.append(net.blobs[name].host_data.copy())
    net.close()
    return {
        name: np.concatenate([np.atleast_1d(part) for part in parts])
        for name, parts in rows.items()
    }


def extract(features: list[Feature], **more: Any) -> list[int]:
    return extract_features(MODEL, [WEIGHTS], features, **more)


def records(path: Path, backend: str) -> list[tuple[bytes, bytes]]:
    source = open_database(str(path), backend)
    found = [(bytes(key), bytes(value)) for key, value in source.take(len(source))]
    source.close()
    return found


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_records_are_caffes_to_the_byte(
    backend: str, blobs: dict[str, Array], tmp_path: Path
) -> None:
    if backend == "leveldb":
        pytest.importorskip("plyvel")
    names = ["conv1", "ip1", "loss"]
    paths = [str(tmp_path / name) for name in names]
    assert extract(features_of(names, paths, backend), batches=4) == [4 * BATCH, 4 * BATCH, 4]
    for name, shape in (("conv1", (16, 8, 8)), ("ip1", (64, 1, 1)), ("loss", (1, 1, 1))):
        found = records(tmp_path / name, backend.upper())
        assert [key for key, _ in found] == [b"%010d" % i for i in range(len(blobs[name]))]
        for (_, value), row in zip(found, blobs[name], strict=True):
            channels, height, width = shape
            datum = Datum(channels=channels, height=height, width=width)
            datum.float_data.extend(np.ravel(row).tolist())
            assert value == datum.SerializeToString()


def test_files_of_arrays_have_each_item_once(blobs: dict[str, Array], tmp_path: Path) -> None:
    together, alone = str(tmp_path / "features.h5"), str(tmp_path / "ip1.npy")
    features = [
        *features_of(["ip1", "label", "loss"], [together]),
        *features_of(["conv1"], [alone]),
    ]
    assert extract(features) == [IMAGES, IMAGES, 3, IMAGES]
    with h5py.File(together) as file:
        assert sorted(file) == ["ip1", "label", "loss"]
        np.testing.assert_array_equal(file["ip1"], blobs["ip1"][:IMAGES])
        np.testing.assert_array_equal(file["label"], blobs["label"][:IMAGES])
        np.testing.assert_array_equal(file["loss"], blobs["loss"][:3])
    array = np.load(alone)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, blobs["conv1"][:IMAGES])


def test_a_last_batch_that_is_not_full(blobs: dict[str, Array], tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    text = Path(MODEL).read_text().replace("batch_size: 99", "batch_size: 100")
    folder = Path(MODEL).parent
    net.write_text(text.replace('source: "', f'source: "{folder}/'))
    (rows,) = extract_features(
        str(net), [WEIGHTS], [Feature("label", str(tmp_path / "label.npy"), "npy")]
    )
    assert rows == IMAGES
    np.testing.assert_array_equal(np.load(tmp_path / "label.npy"), blobs["label"][:IMAGES])


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "old.npy").write_text("precious")
    for name in ("db", "old.npy"):
        with pytest.raises(DataError, match=f"{name} exists already"):
            extract(features_of(["ip1", "conv1"], [str(tmp_path / "new.h5"), str(tmp_path / name)]))
    assert (tmp_path / "old.npy").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "old.npy"]


def test_nothing_is_left_of_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def forward(net: Net, *_: Any, **__: Any) -> None:
        passes.append(net)
        if len(passes) == 3:
            raise DataError("no more")

    monkeypatch.setattr(Net, "forward", forward)
    paths = [str(tmp_path / name) for name in ("a", "b.npy", "c.h5")]
    with pytest.raises(DataError, match="no more"):
        extract(features_of(["ip1"] * 3, paths))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".h5", ".npy"])
def test_a_file_that_cannot_be_written_is_called_by_its_name(suffix: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/nowhere/ip1{suffix}"
    with pytest.raises(DataError) as caught:
        extract(features_of(["ip1"], [path]), batches=1)
    assert str(caught.value) == f"{path} cannot be written: no such file or directory"


def test_a_blob_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r'no blob "ip3" in the net, did you mean "ip\d"\? \(blobs: data, label, con',
    ):
        extract([Feature("ip3", str(tmp_path / "x.npy"), "npy")])
    assert not list(tmp_path.iterdir())


def test_four_axes_do_not_fit_into_a_record() -> None:
    with pytest.raises(DataError, match=r"three axes, not 1 2 3 4 \(24\); write an HDF5"):
        record(np.zeros((1, 2, 3, 4), np.float32))


def test_data_of_unknown_length(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(
        'layer { name: "d" type: "DummyData" top: "d" dummy_data_param { shape { dim: 2 dim: 3 } } }'
    )
    feature = Feature("d", str(tmp_path / "d.npy"), "npy")
    with pytest.raises(UsageError, match="give a number of batches"):
        extract_features(str(net), [], [feature])
    assert extract_features(str(net), [], [feature], batches=2) == [4]
    assert np.load(tmp_path / "d.npy").shape == (4, 3)


def test_places_for_blobs() -> None:
    assert [f.kind for f in features_of(["a", "b", "c"], ["x", "y.hdf5", "z.NPY"])] == [
        "lmdb",
        "hdf5",
        "npy",
    ]
    assert [f.path for f in features_of(["a", "b"], ["x.h5"])] == ["x.h5", "x.h5"]
    with pytest.raises(
        UsageError, match=r'"x.CSV": .csv files are not written; name a .h5 or .npy file'
    ):
        features_of(["a"], ["x.CSV"])
    assert features_of(["a"], ["x.csv"], "lmdb") == [Feature("a", "x.csv", "lmdb")]
    assert features_of(["a"], ["x.npy"], "leveldb") == [Feature("a", "x.npy", "leveldb")]
    with pytest.raises(UsageError, match='unknown kind of database "lmbd", did you mean "lmdb"'):
        features_of(["a"], ["x"], "lmbd")
    with pytest.raises(UsageError, match="must be equal, not 3 and 2"):
        features_of(["a", "b", "c"], ["x", "y"])
    with pytest.raises(UsageError, match='"x" cannot take blob "b", too'):
        features_of(["a", "b"], ["x"])
    with pytest.raises(UsageError, match=r'"x.h5" cannot take blob "a", too'):
        features_of(["a", "a"], ["x.h5"])


def test_the_log_counts_as_caffes_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.extract_features")
    extract(features_of(["label"], [str(tmp_path / "l.npy")]), batches=12)
    assert caplog.messages == [
        "Using CPU",
        "Extracting Features",
        "Extracted features of 1000 query images for feature blob label",
        "Extracted features of 1188 query images for feature blob label",
        "Successfully extracted the features!",
    ]


@pytest.mark.gpu
def test_features_of_a_gpu(blobs: dict[str, Array], tmp_path: Path) -> None:
    extract(features_of(["ip1"], [str(tmp_path / "ip1.npy")]), gpu="0", precision="fp32")
    np.testing.assert_allclose(
        np.load(tmp_path / "ip1.npy"), blobs["ip1"][:IMAGES], rtol=1e-4, atol=1e-4
    )
