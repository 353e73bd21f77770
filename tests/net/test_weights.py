from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from caffepy.commands.weights import read_weights
from caffepy.core.errors import ConfigError
from caffepy.net import Net, weights
from caffepy.proto.caffe_pb2 import FLOAT16, NetParameter
from tests.net.nets import INPUT, LOSS, ip, net_of

TEXT = 'name: "n" ' + INPUT + ip("a", "x", "a") + ip("b", "a", "b") + LOSS % "b"
SHARED = (
    INPUT
    + ip("a", "x", "a", 'param { name: "w" }')
    + ip("b", "x", "b", 'param { name: "w" }')
    + LOSS % "b"
)


def filled(text: str = TEXT, start: float = 1) -> Net:
    """A net whose parameters (and diffs) count upwards, so that no two agree."""
    net = net_of(text)
    for i, blob in enumerate(net.learnable_params):
        blob.data[...] = np.arange(blob.count).reshape(blob.shape) + 100 * i + start
        blob.diff[...] = -blob.data
    return net


def save_binary(net: Net, path: Path) -> None:
    weights.save_binary(net, str(path))


def save_hdf5(net: Net, path: Path) -> None:
    weights.save_hdf5(net, str(path))


FORMATS = {"binary": save_binary, "hdf5": save_hdf5}


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", [TEXT, SHARED], ids=["plain", "shared"])
def test_there_and_back(save: Callable[[Net, Path], None], text: str, tmp_path: Path) -> None:
    net, other = filled(text), net_of(text)
    save(net, tmp_path / "w")
    weights.load_weights(other, str(tmp_path / "w"))
    for mine, theirs in zip(other.params, net.params, strict=True):
        np.testing.assert_array_equal(mine.data, theirs.data)
        assert not mine.diff.any()


def test_binary_holds_layers_as_used(tmp_path: Path) -> None:
    net = filled(INPUT + ip("a", "x", "a") + ip("b", "x", "b"))
    save_binary(net, tmp_path / "w")
    proto = NetParameter.FromString((tmp_path / "w").read_bytes())
    assert [layer.type for layer in proto.layer] == [
        "Input",
        "Split",
        "InnerProduct",
        "InnerProduct",
    ]
    assert list(proto.layer[2].blobs[0].shape.dim) == [5, 3]
    assert list(proto.layer[2].blobs[0].data) == list(range(1, 16))
    assert not proto.layer[2].blobs[0].diff
    assert not proto.HasField("state")


def test_diffs_are_stored_and_loaded_on_request(tmp_path: Path) -> None:
    net, other = filled(), net_of(TEXT)
    weights.save_binary(net, str(tmp_path / "w"), diff=True)
    weights.load_weights(other, str(tmp_path / "w"))
    np.testing.assert_array_equal(other.params[0].diff, net.params[0].diff)


def test_raw_diffs_of_nvcaffe_are_loaded() -> None:
    net = net_of(INPUT + ip("a", "x", "a"))
    stored = weights.to_proto(net)
    diff = np.arange(15, dtype="<f2")
    stored.layer[1].blobs[0].raw_diff_type = FLOAT16
    stored.layer[1].blobs[0].raw_diff = diff.tobytes()
    weights.copy_trained(net, stored)
    np.testing.assert_array_equal(net.params[0].diff.ravel(), diff)


def test_hdf5_layout(tmp_path: Path) -> None:
    weights.save_hdf5(filled(SHARED), str(tmp_path / "w.h5"), diff=True)
    with h5py.File(tmp_path / "w.h5") as file:
        assert sorted(file["data"]) == ["a", "b", "in", "loss", "x_in_0_split"]
        assert sorted(file["data/a"]) == ["0", "1"]
        assert sorted(file["data/b"]) == ["1"]  # parameter 0 belongs to layer a
        assert sorted(file["diff/b"]) == ["0", "1"]
        assert file["data/a/0"].dtype == np.float32
        assert file["data/a/0"].shape == (5, 3)


def test_hdf5_takes_layer_names_with_slashes(tmp_path: Path) -> None:
    text = INPUT + ip("inception/1x1", "x", "a") + LOSS % "a"
    net, other = filled(text), net_of(text)
    save_hdf5(net, tmp_path / "w.h5")
    weights.load_weights(other, str(tmp_path / "w.h5"))
    np.testing.assert_array_equal(other.params[0].data, net.params[0].data)


def test_layers_are_matched_by_name() -> None:
    source = filled(INPUT + ip("other", "x", "other") + ip("b", "other", "b"))
    net = filled(start=0)
    kept = net.params[0].data.copy()
    weights.copy_trained(net, weights.to_proto(source))
    np.testing.assert_array_equal(net.params[0].data, kept)
    np.testing.assert_array_equal(net.params[2].data, source.params[2].data)


@pytest.mark.parametrize(
    ("phase", "advice"), [("TRAIN", "rename the layer"), ("TEST", "are of another net")]
)
def test_shapes_that_differ(phase: str, advice: str) -> None:
    proto = weights.to_proto(filled())
    proto.layer[1].blobs[0].shape.dim[:] = [3, 5]
    message = f"Cannot copy param 0 weights from layer 'a'; shape mismatch.*{advice}"
    with pytest.raises(ConfigError, match=message):
        weights.copy_trained(net_of(f"state {{ phase: {phase} }} {TEXT}"), proto)


def test_numbers_of_blobs_that_differ() -> None:
    proto = weights.to_proto(filled())
    del proto.layer[1].blobs[1]
    with pytest.raises(
        ConfigError, match=r"Incompatible number of blobs for layer a: 1 in the file, 2 in the net"
    ):
        weights.copy_trained(net_of(TEXT), proto)


def test_five_axes_of_c3d_are_right_aligned() -> None:
    source, net = filled(), net_of(TEXT)
    proto = weights.to_proto(source)
    proto.layer[1].blobs[0].shape.dim[:] = [1, 1, 1, 5, 3]
    weights.copy_trained(net, proto)
    np.testing.assert_array_equal(net.params[0].data, source.params[0].data)


@pytest.mark.parametrize(
    ("legacy", "fits"), [((1, 1, 5, 3), True), ((1, 5, 3, 1), False), ((1, 1, 3, 5), False)]
)
def test_legacy_shapes_are_right_aligned(legacy: tuple[int, ...], fits: bool) -> None:
    net, proto = net_of(TEXT), weights.to_proto(filled())
    blob = proto.layer[1].blobs[0]
    blob.ClearField("shape")
    blob.num, blob.channels, blob.height, blob.width = legacy
    if fits:
        weights.copy_trained(net, proto)
        assert net.params[0].data[0, 1] == 2
    else:
        with pytest.raises(ConfigError, match=r"shape mismatch"):
            weights.copy_trained(net, proto)


def test_bn_of_two_axes_is_refused_since_forks_differ() -> None:
    text = INPUT + 'layer { name: "bn" type: "BN" bottom: "x" top: "bn" } ' + LOSS % "bn"
    proto = weights.to_proto(filled(text))
    (stored,) = (layer.blobs for layer in proto.layer if layer.name == "bn")
    stored[0].shape.dim[:] = [1, 3]
    message = r"param 0 weights from layer 'bn'.*in happynear's 1 / sqrt\(variance \+ eps\)"
    with pytest.raises(ConfigError, match=message):
        weights.copy_trained(net_of(text), proto)


def test_hdf5_with_a_missing_or_wrong_dataset(tmp_path: Path) -> None:
    save_hdf5(filled(), tmp_path / "w.h5")
    with h5py.File(tmp_path / "w.h5", "r+") as file:
        del file["data/a/1"]
    with pytest.raises(ConfigError, match=r"w\.h5.*layer a: param 1 is not in the file"):
        weights.load_weights(net_of(TEXT), str(tmp_path / "w.h5"))
    with h5py.File(tmp_path / "w.h5", "r+") as file:
        file["data/a/1"] = np.zeros(7, "f4")
    with pytest.raises(ConfigError, match=r"param 1 of layer 'a'.*7 \(7\).*5 \(5\)"):
        weights.load_weights(net_of(TEXT), str(tmp_path / "w.h5"))


def test_test_nets_share_the_data_not_the_diffs() -> None:
    train, test = filled(), net_of(TEXT)
    test.share_trained_layers_with(train)
    train.params[0].data[0, 0] = 42
    assert test.params[0].data[0, 0] == 42
    assert not test.params[0].diff.any()


def test_layers_that_a_test_net_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    train, test = (
        net_of(INPUT + ip("a", "x", "a") + ip("b", "a", "b")),
        net_of(INPUT + ip("b", "x", "b")),
    )
    caplog.set_level("INFO", "caffepy.net.net")
    message = r"""layer "b" \(InnerProduct\): Cannot share param 0 weights from layer 'b'; shape """
    with pytest.raises(
        ConfigError, match=f"^{message}mismatch.*; the layer needs the same settings"
    ):
        test.share_trained_layers_with(train)
    assert caplog.messages == ["Ignoring source layer a"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"old")

    def no_space(*arrays: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.binary, "array_to_blob", no_space)
    with pytest.raises(ConfigError, match=r"w: cannot be written: no space left on device"):
        weights.save_binary(net_of(TEXT), str(path))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", FORMATS)
def test_a_bad_path_is_named(form: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone/w: cannot be written: no such file or directory"):
        FORMATS[form](net_of(TEXT), tmp_path / "gone" / "w")


@pytest.mark.parametrize("name", ["", ".", "/", "x/", "x//y", "./x", "x\\000", "b/0", "b/1/x"])
def test_names_that_hdf5_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    net = net_of(TEXT.replace('name: "a"', f'name: "{name}"'))
    weights.check_names(net, hdf5=False)
    with pytest.raises(ConfigError, match="HDF5 cannot hold layers of the names"):
        weights.save_hdf5(net, str(tmp_path / "w.h5"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x/y", "b/2", "b/x", "..", "x.", "ä"])
def test_other_names_come_back_from_hdf5(name: str, tmp_path: Path) -> None:
    text = TEXT.replace('name: "a"', f'name: "{name}"')
    weights.save_hdf5(filled(text), str(tmp_path / "w.h5"))
    net = net_of(text)
    assert name in weights.load_weights(net, str(tmp_path / "w.h5"))
    for ours, theirs in zip(net.params, filled(text).params, strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)


@pytest.mark.parametrize("hdf5", [False, True])
def test_layers_of_one_name_are_refused_if_one_has_parameters(hdf5: bool) -> None:
    net = net_of(TEXT.replace('name: "b"', 'name: "a"'))
    with pytest.raises(ConfigError, match='several layers are named "a"'):
        weights.check_names(net, hdf5)


def test_damaged_hdf5_is_one_message(tmp_path: Path) -> None:
    """Truncated anywhere or with any bytes changed, a file loads or is refused; nothing else
    happens.
    """
    path = tmp_path / "w.h5"
    save_hdf5(filled(), path)
    content, net, rng = path.read_bytes(), net_of(TEXT), np.random.default_rng(5)
    refused = 0
    for _ in range(300):
        broken = bytearray(content)
        for place in rng.integers(len(broken), size=rng.integers(1, 9)):
            broken[place] = rng.integers(256)
        path.write_bytes(broken[: rng.integers(len(broken) + 1) if rng.random() < 0.2 else None])
        try:
            weights.load_weights(net, str(path))
        except ConfigError:
            refused += 1
    assert 0 < refused < 300


def _external_storage(file: h5py.File, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(1 << 10))
    file["data/a"].create_dataset("0", (3, 2), np.float32, external=[(folder / "secret", 0, 24)])


def _virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((3, 2), np.float32)
    layout[:] = h5py.VirtualSource(folder / "other.h5", "x", (3, 2))
    file["data/a"].create_virtual_dataset("0", layout)


def _external_link(file: h5py.File, folder: Path) -> None:
    file["data/a/0"] = h5py.ExternalLink(folder / "other.h5", "/x")


def _bomb(file: h5py.File, folder: Path) -> None:
    file["data/a"].create_dataset("0", (1 << 15, 1 << 15), np.float32)


FOREIGN = {
    "external storage": (_external_storage, 'the values of "data/a/0" lie in other files'),
    "virtual": (_virtual, 'the values of "data/a/0" lie in other files'),
    "external link": (_external_link, '"data/a/0" is a link to another file'),
    "a bomb": (_bomb, "it claims 42949[0-9]+ bytes of values in [0-9]+ bytes"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_hdf5_weights_read_no_other_file_and_claim_no_more_than_they_hold(
    case: str, tmp_path: Path
) -> None:
    spoil, message = FOREIGN[case]
    save_hdf5(filled(), tmp_path / "w.h5")
    with h5py.File(tmp_path / "w.h5", "r+") as file:
        del file["data/a/0"]
        spoil(file, tmp_path)
    for read in (lambda path: weights.load_weights(net_of(TEXT), path), read_weights):
        with pytest.raises(ConfigError, match=message):
            read(str(tmp_path / "w.h5"))
