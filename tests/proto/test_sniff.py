import os
import pickle
import zipfile
from pathlib import Path

import pytest
from google.protobuf.message import Message

from caffepy.core.errors import DataError
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter, SolverState
from caffepy.proto.sniff import mismatch, sniff

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_KINDS = {
    "digits/digits_iter_250.caffemodel": "a caffemodel",
    "digits/digits_iter_250.solverstate": "a solver state",
    "digits/train_val.prototxt": "text",
    "digits/solver.prototxt": "text",
    "digits/caffe_train.log": "text",
    "digits/digits_test_lmdb": "LMDB",
    "digits/digits_test_lmdb/data.mdb": "LMDB",
    "digits": "a directory",
    "data/mean.binaryproto": "a binaryproto",
    "data/raw_leveldb": "LevelDB",
    "data/lmdb_plain.npz": "a zip archive",
    "no/such/file": "missing",
    "digits/solver.prototxt/x": "unreadable",
    "a\0b": "unreadable",
    "/dev/zero": "a device",
}
CONTENTS = {
    "empty": (b"", "empty"),
    "zeros": (bytes(5000), "zero bytes"),
    "noise": (bytes(range(250, 0, -1)), "unknown binary data"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5"),
    "HDF5 behind a user block": (bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5"),
    "JPEG": (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
    "pickle 2": (pickle.dumps([1], 2), "a Python pickle"),
    "pickle 5": (pickle.dumps({"state_dict": list(range(100))}, 5), "a Python pickle"),
    "legacy PyTorch": (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "a PyTorch file"),
    "safetensors": ((640).to_bytes(8, "little") + b'{"a":', "a safetensors file"),
    "long safetensors": (b"BZh\0\0\0\0\0{", "a safetensors file"),
    "gzip": (b"\x1f\x8b\x08\0", "a gzip file"),
    "tar": (b"x".ljust(257, b"\0") + b"ustar\0", "a tar archive"),
    "text": (b"# caffe\nname: 'x'\n", "text"),
    "text of another encoding": ("name: 'é'".encode("latin-1"), "text"),
    "web page": (b"\n<html><body>404</body>", "a web page"),
    "ONNX": (b"\x08\x07\x12\x07pytorch\x1a\x032.0\x3a\x02\x0a\0\x42\x02\x10\x0d", "an ONNX model"),
}
MESSAGES: dict[str, tuple[Message, str]] = {
    "named net": (NetParameter(name="net"), "a caffemodel"),
    "net without a name": (NetParameter(layer=[{"name": "conv"}]), "a caffemodel"),
    "V1 net": (NetParameter(layers=[{"name": "conv"}]), "a caffemodel"),
    "state": (SolverState(iter=3, learned_net="x.caffemodel"), "a solver state"),
    "state of NVCaffe": (SolverState(iter=3, minimum_loss=0.5), "a solver state"),
    "legacy mean": (BlobProto(num=1, channels=1, height=1, width=1, data=[1]), "a binaryproto"),
    "mean": (BlobProto(shape=BlobShape(dim=[2]), data=[1, 2]), "a binaryproto"),
    "double mean": (BlobProto(shape=BlobShape(dim=[1]), double_data=[1]), "a binaryproto"),
}


@pytest.mark.parametrize(("name", "kind"), GOLDEN_KINDS.items())
def test_golden_files(name: str, kind: str) -> None:
    assert sniff(str(GOLDEN / name)) == kind


@pytest.mark.parametrize(("content", "kind"), CONTENTS.values(), ids=CONTENTS)
def test_contents(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert sniff(str(tmp_path / "x")) == kind


@pytest.mark.parametrize(("message", "kind"), MESSAGES.values(), ids=MESSAGES)
def test_messages(message: Message, kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(message.SerializeToString())
    assert sniff(str(tmp_path / "x")) == kind


def test_zipped_pytorch(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert sniff(str(tmp_path / "x")) == "a PyTorch file"


def test_fields_of_a_fork_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(
        NetParameter(name="x").SerializeToString() + b"\xc2\x3e\x01x"
    )  # field 1000
    assert sniff(str(tmp_path / "x")) == "a caffemodel"


@pytest.mark.parametrize(
    "name", ["digits/digits_iter_250.caffemodel", "digits/digits_iter_250.solverstate"]
)
def test_truncated_anywhere(name: str, tmp_path: Path) -> None:
    whole = (GOLDEN / name).read_bytes()
    ends = 0
    for length in range(20, len(whole), 997):
        (tmp_path / "x").write_bytes(whole[:length])
        kind = sniff(str(tmp_path / "x"))
        full = sniff(str(GOLDEN / name))
        assert kind in (full, f"{full} that is cut short")
        ends += kind == full
    assert ends <= 1


def test_words_of_errors(tmp_path: Path) -> None:
    net, state = (
        str(GOLDEN / "digits/digits_iter_250.caffemodel"),
        str(GOLDEN / "digits/digits_iter_250.solverstate"),
    )
    assert str(mismatch(state, "a caffemodel")) == (
        f'"{state}" looks like a solver state, not a caffemodel; a solver state goes to caffepy train --snapshot'
    )
    assert str(mismatch(net, "a solver state")).endswith(
        "like a caffemodel, not a solver state; did you mean --weights?"
    )
    assert str(mismatch(net, "a caffemodel")) == (
        f'"{net}" is damaged: it starts like a caffemodel, but cannot be read'
    )
    assert isinstance(mismatch(net, "a binaryproto", DataError), DataError)
    assert str(mismatch(str(GOLDEN / "digits/digits_iter_250.cafemodel"), "a caffemodel")).endswith(
        'no such file, did you mean "digits_iter_250.caffemodel"?'
    )


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    assert sniff(str(tmp_path / "x")) == "a pipe"
    message = str(mismatch(str(tmp_path / "x"), "a caffemodel"))
    assert message.endswith("looks like a pipe, not a caffemodel; save its content as a file")
