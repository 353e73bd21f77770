import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.proto import binary, text
from caffepy.proto.caffe_pb2 import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT,
    BlobProto,
    BlobShape,
    NetParameter,
    SolverState,
)

GOLDEN = Path(__file__).parents[1] / "golden"
NET, STATE = (
    GOLDEN / "digits" / "digits_iter_250.caffemodel",
    GOLDEN / "digits" / "digits_iter_250.solverstate",
)
MEAN = GOLDEN / "data" / "mean.binaryproto"
READERS = {
    "a caffemodel": binary.read_net,
    "a solver state": binary.read_state,
    "a binaryproto": binary.read_blob,
}
FUZZ = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_net_of_caffe() -> None:
    net = binary.read_net(str(NET))
    shapes = {
        layer.name: [binary.blob_to_array(blob).shape for blob in layer.blobs]
        for layer in net.layer
    }
    assert shapes["conv1"] == [(16, 1, 3, 3), (16,)]
    assert shapes["ip2"] == [(10, 64), (10,)]
    assert net.layer[0].type == "Data"


def test_state_of_caffe() -> None:
    state = binary.read_state(str(STATE))
    assert (state.iter, len(state.history)) == (250, 8)
    assert [binary.blob_to_array(blob).shape for blob in state.history][-2:] == [(10, 64), (10,)]


def test_mean_of_caffe() -> None:
    assert binary.blob_to_array(binary.read_blob(str(MEAN))).shape == (1, 3, 16, 18)


@pytest.mark.parametrize("wanted", READERS)
@pytest.mark.parametrize(
    "path", [NET, STATE, MEAN, NET.parent, NET.parent / "solver.prototxt", NET.parent / "no.file"]
)
def test_other_files(wanted: str, path: Path) -> None:
    kind = binary.sniff(str(path))
    if kind == wanted:
        assert READERS[wanted](str(path)).ByteSize()
        return
    with pytest.raises(DataError if wanted == "a binaryproto" else ConfigError) as caught:
        READERS[wanted](str(path))
    said = "no such file" if kind == "missing" else f"looks like {kind}, not {wanted}"
    assert said in str(caught.value)


def test_damage_inside_a_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.caffemodel", b"\x0a\x01x\xa2\x06\x02\x0a\x7f")
    with pytest.raises(
        ConfigError, match="is damaged: it starts like a caffemodel, but cannot be read"
    ):
        binary.read_net(path)


def test_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "x.caffemodel", NET.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is a caffemodel that is cut short"):
        binary.read_net(path)


def test_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is empty$"):
        binary.read_net(write(tmp_path / "x", b""))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"x")
    os.chmod(path, 0)
    with pytest.raises(ConfigError, match="permission denied"):
        binary.read_net(path)


def test_old_net_is_upgraded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = text.parse(
        'name: "n" input: "data" layers { name: "c" type: CONVOLUTION blobs { num: 1 channels: 1 height: 1 width: 2 '
        "data: [1, 2] } }",
        NetParameter(),
    )
    path = write(tmp_path / "old.caffemodel", old.SerializeToString())
    with caplog.at_level(logging.INFO):
        net = binary.read_net(path)
    assert (net.layer[0].type, len(net.layers), len(net.input)) == ("Convolution", 0, 0)
    assert binary.blob_to_array(net.layer[0].blobs[0]).tolist() == [[[[1, 2]]]]
    assert (
        f"Attempting to upgrade input file specified using deprecated V1LayerParameter: {path}"
        in caplog.messages
    )


def test_recurrent_param_of_nvcaffe(tmp_path: Path) -> None:
    numbers = b"\x88\x09\x01" + b"\x98\x09\x02"  # forward_type = 1, forward_math = 2
    layer = b"\x0a\x01r\x12\x04LSTM" + numbers + b"\xba\x09\x02\x08\x07"  # recurrent_param as 151
    path = write(tmp_path / "x", b"\x0a\x01n\xa2\x06" + bytes([len(layer)]) + layer)
    [read] = binary.read_net(path).layer
    assert (read.name, read.type, read.recurrent_param.num_output) == ("r", "LSTM", 7)
    assert not read.HasField("parameter_param")


def test_strings_of_another_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"\x0a\x02\xe9n\xa2\x06\x07\x0a\x02c\xe9\x22\x01\xe9")
    net = binary.read_net(path)
    assert (net.name, net.layer[0].name, list(net.layer[0].top)) == (
        "\ufffdn",
        "c\ufffd",
        ["\ufffd"],
    )


ARRAYS: dict[str, tuple[BlobProto, object]] = {
    "shape": (BlobProto(shape=BlobShape(dim=[2, 1]), data=[1, 2]), [[1], [2]]),
    "scalar": (BlobProto(shape=BlobShape(), data=[3]), 3),
    "no shape": (BlobProto(data=[3]), 3),
    "nothing": (BlobProto(shape=BlobShape(dim=[0, 4])), []),
    "legacy": (BlobProto(num=1, channels=2, height=1, width=1, data=[1, 2]), [[[[1]], [[2]]]]),
    "legacy wins over shape": (
        BlobProto(num=1, channels=1, height=1, width=2, shape=BlobShape(dim=[2]), data=[1, 2]),
        [[[[1, 2]]]],
    ),
    "double wins": (BlobProto(shape=BlobShape(dim=[1]), data=[1], double_data=[0.5]), [0.5]),
    "raw double": (
        BlobProto(
            shape=BlobShape(dim=[2]),
            raw_data_type=DOUBLE,
            raw_data=np.array([1, 2], "<f8").tobytes(),
        ),
        [1, 2],
    ),
    "raw float": (
        BlobProto(
            shape=BlobShape(dim=[2]),
            raw_data_type=FLOAT,
            raw_data=np.array([1, 2], "<f4").tobytes(),
        ),
        [1, 2],
    ),
    "raw half": (
        BlobProto(
            shape=BlobShape(dim=[2]),
            raw_data_type=FLOAT16,
            raw_data=np.array([1, 2], "<f2").tobytes(),
        ),
        [1, 2],
    ),
    "raw int": (
        BlobProto(shape=BlobShape(dim=[1]), raw_data_type=INT, raw_data=b"\xff\xff\xff\xff"),
        [-1],
    ),
}


@pytest.mark.parametrize(("blob", "values"), ARRAYS.values(), ids=ARRAYS)
def test_arrays(blob: BlobProto, values: object) -> None:
    array = binary.blob_to_array(blob)
    assert array.dtype == np.float32
    assert array.tolist() == values
    assert array.flags.writeable


MISFITS = {
    "too few": (
        BlobProto(shape=BlobShape(dim=[3]), data=[1]),
        "a blob holds 1 values, which does not fit its shape (3)",
    ),
    "some legacy": (
        BlobProto(num=1, data=[1]),
        "a blob holds 1 values, which does not fit its shape (1 0 0 0)",
    ),
    "negative": (
        BlobProto(shape=BlobShape(dim=[-1, -1]), data=[1]),
        "holds 1 values, which does not fit its shape (-1 -1)",
    ),
    "absurd": (
        BlobProto(shape=BlobShape(dim=[0] + [2**40] * 3)),
        "holds 0 values, which does not fit its shape (0 1099",
    ),
    "many axes": (BlobProto(shape=BlobShape(dim=[2**62] * 5000)), "4611686018427387904 ...)"),
    "raw bool": (
        BlobProto(raw_data_type=BOOL, raw_data=b"1"),
        "a blob holds values of type BOOL, which weights cannot",
    ),
    "raw rest": (
        BlobProto(raw_data_type=FLOAT, raw_data=b"12345"),
        "a blob holds 5 bytes, which is not a whole number of",
    ),
}


@pytest.mark.parametrize(("blob", "message"), MISFITS.values(), ids=MISFITS)
def test_arrays_that_do_not_fit(blob: BlobProto, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        binary.blob_to_array(blob)
    assert message in str(caught.value)


def test_a_file_of_an_array_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "mean").write_bytes(
        BlobProto(num=1, channels=2, height=1, width=1, data=[1]).SerializeToString()
    )
    with pytest.raises(
        DataError, match=r"mean: a blob holds 1 values, which does not fit its shape"
    ):
        binary.read_array(f"{tmp_path}/mean")


@pytest.mark.parametrize("count", [0, 1, 31, 32, 999, 1000, 4095, 4096, 600_000])
def test_arrays_come_back(count: int) -> None:
    rng = np.random.default_rng(count)
    data, diff = rng.random((2, count, 1), np.float32)
    blob = binary.array_to_blob(data, diff)
    assert BlobProto.FromString(blob.SerializeToString()) == blob
    np.testing.assert_array_equal(binary.blob_to_array(blob), data)
    if count:
        np.testing.assert_array_equal(binary.blob_to_diff(blob), diff)
    assert binary.blob_to_diff(binary.array_to_blob(data)) is None


def test_blob_is_what_caffe_writes() -> None:
    blob = binary.array_to_blob(np.array([[1, 2]], np.float64)[:, ::-1])
    assert blob == BlobProto(shape=BlobShape(dim=[1, 2]), data=[2, 1])
    assert [field.name for field, _ in blob.ListFields()] == ["data", "shape"]


def test_diff_of_double_and_raw() -> None:
    assert binary.blob_to_diff(BlobProto(double_diff=[1.5])) == 1.5
    assert (
        binary.blob_to_diff(BlobProto(raw_diff_type=FLOAT, raw_diff=np.float32(2.5).tobytes()))
        == 2.5
    )


def raw_net(blob: BlobProto) -> NetParameter:
    net = NetParameter()
    net.layer.add(name="x", blobs=[blob])
    return net


RAW = {
    "both": (
        BlobProto(
            shape=BlobShape(dim=[1]),
            raw_data_type=DOUBLE,
            raw_data=np.float64(2.5).tobytes(),
            raw_diff_type=FLOAT16,
            raw_diff=np.float16(3).tobytes(),
        ),
        BlobProto(shape=BlobShape(dim=[1]), data=[2.5], diff=[3]),
    ),
    "legacy extents": (
        BlobProto(
            num=1,
            channels=1,
            height=1,
            width=1,
            raw_data_type=FLOAT,
            raw_data=np.float32(4).tobytes(),
        ),
        BlobProto(num=1, channels=1, height=1, width=1, data=[4]),
    ),
    "beside others": (
        BlobProto(double_data=[0.1], diff=[5], raw_data_type=FLOAT, raw_data=b"1", raw_diff=b"2"),
        BlobProto(double_data=[0.1], diff=[5]),
    ),
    "types only": (
        BlobProto(data=[1], raw_data_type=FLOAT, raw_diff_type=FLOAT),
        BlobProto(data=[1]),
    ),
    "no gradient": (BlobProto(data=[1], raw_diff_type=FLOAT, raw_diff=b""), BlobProto(data=[1])),
}


@pytest.mark.parametrize(("blob", "plain"), RAW.values(), ids=RAW.keys())
def test_raw_values_become_plain(blob: BlobProto, plain: BlobProto) -> None:
    net = raw_net(blob)
    assert binary.drop_raw(net, "p")
    assert net == raw_net(plain)
    assert not binary.drop_raw(net, "p")
    assert net == raw_net(plain)


def test_raw_values_that_do_not_fit() -> None:
    net = raw_net(BlobProto(shape=BlobShape(dim=[2]), raw_data_type=FLOAT, raw_data=b"1234"))
    with pytest.raises(
        ConfigError, match=r'^p: layer "x": a blob holds 1 values, which does not fit its shape'
    ):
        binary.drop_raw(net, "p")


@FUZZ
@given(st.binary(max_size=300))
def test_fuzz_of_bytes(tmp_path: Path, content: bytes) -> None:
    read_all(write(tmp_path / "x", content))


@FUZZ
@given(st.data())
def test_fuzz_of_real_files(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from([NET, STATE, MEAN])).read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        near_start = data.draw(st.integers(0, 2000))
        whole[near_start : near_start + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3)
        )
    read_all(write(tmp_path / "x", bytes(whole)))


@FUZZ
@given(
    st.lists(
        st.tuples(st.integers(0, 160), st.sampled_from([0, 1, 2, 5]), st.binary(max_size=12)),
        max_size=8,
    )
)
def test_fuzz_of_fields(tmp_path: Path, fields: list[tuple[int, int, bytes]]) -> None:
    content = b"".join(field(*parts) for parts in fields)
    read_all(write(tmp_path / "x", content))
    read_all(write(tmp_path / "x", field(100, 2, content)))
    read_all(write(tmp_path / "x", field(2, 2, content)))


def field(number: int, wire_type: int, content: bytes) -> bytes:
    tag = number << 3 | wire_type
    prefix = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    payloads = {
        0: b"\x07",
        1: bytes(8),
        2: bytes([len(content) & 127]) + content[:127],
        5: bytes(4),
    }
    return prefix + payloads[wire_type]


def read_all(path: str) -> None:
    """Every reader gives a message, whose blobs give arrays, or raises a CaffeError."""
    readers: list[Callable[[str], Message]] = [binary.read_net, binary.read_state, binary.read_blob]
    for read in readers:
        with suppress(CaffeError):
            for blob in blobs(read(path)):
                with suppress(CaffeError):
                    binary.blob_to_array(blob)


def blobs(message: Message) -> list[BlobProto]:
    if isinstance(message, BlobProto):
        return [message]
    if isinstance(message, SolverState):
        return list(message.history)
    assert isinstance(message, NetParameter)
    return [blob for layer in message.layer for blob in layer.blobs]
