import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffepy.core.errors import CaffeError, ConfigError
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import (
    TRAIN,
    BlobProto,
    C2TensorProto,
    LayerParameter,
    NetParameter,
    SolverParameter,
    V1LayerParameter,
)
from caffepy.proto.forks import fork_of_field

GOLDEN = Path(__file__).parents[1] / "golden" / "digits"
FUZZ = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=150
)


def net(source: str) -> NetParameter:
    return text.parse(source, NetParameter(), "n.prototxt")


# Grammar: whatever protobuf's own reader takes, ours takes, with the same result.

SOURCES: dict[str, tuple[str, type[Message]]] = {
    "empty": ("", NetParameter),
    "comments": ('# a # b\n\nname: "x" # c " {\n#', NetParameter),
    "no final newline in a comment": ("#", NetParameter),
    "separators": ('name: "x"; input: "a", input: "b" input_dim: 1,input_dim:2;', NetParameter),
    "colon before a block": ('layer: { name: "a" } layer:{}', NetParameter),
    "angle brackets": ('layer < name: "a" convolution_param: < > >', NetParameter),
    "empty block": ("layer { pooling_param {} } state {}", NetParameter),
    "lists": (
        'input_dim: [1, 2, 3] input: [] input: ["a", "b"] layer: [{ name: "a" }, < >]',
        NetParameter,
    ),
    "list of blocks without a colon": ("layer [{ }, { }] layer []", NetParameter),
    "strings": ("""name: 'a"b' "c'd" '' 'e'""", NetParameter),
    "escapes": (r'name: "\a\b\f\n\r\t\v\'\"\\\0\12\101\x41\x9\u00e9\U0001F600é"', NetParameter),
    "escaped UTF-8": (r'name: "\303\251\xc3\xa9"', NetParameter),
    "bytes": (r'raw_data: "\377\000\xfe" data: 1', BlobProto),
    "integers": ("dim: 0 dim: -0 dim: 0x1F dim: 0XfF dim: 017 dim: 00", BlobProto),
    "extreme integers": (f"dim: {2**63 - 1} dim: {-(2**63)} dim: -0x8000000000000000", BlobProto),
    "floats": (
        "data: [1, -1, 1., .5, 1e3, 1E-3, 1e+3, 1.5f, 0.1, 1e-50, 1e40, -1e40, 1e400]",
        BlobProto,
    ),
    "named floats": ("data: [inf, -inf, nan, Infinity, INF, NaN]", BlobProto),
    "doubles": ("double_data: [0.1, 1e300, -inf]", BlobProto),
    "booleans": ("propagate_down: [true, false, t, f, True, False, 1, 0]", LayerParameter),
    "enums by number": ("phase: 1 include { phase: 0 }", LayerParameter),
    "wide integers": (
        "int64_data: [1, -1] int32_data: -2147483648 string_data: 'x'",
        C2TensorProto,
    ),
    "carriage returns": ('name: "x"\r\nlayer {\r\n}\r\n', NetParameter),
    "byte order of spaces": ('\t\v\f name\t:\n"x"', NetParameter),
}


def blob_of(source: str, kind: type[Message]) -> str:
    return f"shape {{ {source} }}" if kind is BlobProto and source.startswith("dim") else source


@pytest.mark.parametrize(("source", "kind"), SOURCES.values(), ids=SOURCES)
def test_grammar_is_that_of_protobuf(source: str, kind: type[Message]) -> None:
    source = blob_of(source, kind)
    ours, theirs = text.parse(source, kind()), text_format.Parse(source, kind())
    assert ours.SerializeToString() == theirs.SerializeToString()


def test_grammar_of_protobuf_in_cpp_only() -> None:
    assert net(r'name: "\?" input_dim: - 5 layer { loss_weight: 2F }') == NetParameter(
        name="?", input_dim=[-5], layer=[LayerParameter(loss_weight=[2])]
    )


def test_real_files() -> None:
    for name, kind in (("train_val.prototxt", NetParameter), ("solver.prototxt", SolverParameter)):
        source = (GOLDEN / name).read_text()
        assert text.parse(source, kind()) == text_format.Parse(source, kind())


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
}


def value_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return (
            st.binary(max_size=8)
            if field.type == FieldDescriptor.TYPE_BYTES
            else st.text(max_size=8)
        )
    return SCALARS[field.cpp_type]


def filled(draw: Callable[[st.SearchStrategy[Any]], Any], message: Message) -> Message:
    """The message with some of its fields set to anything they can hold."""
    kind = message.DESCRIPTOR
    heeded = [field for field in kind.fields if not fork_of_field(kind.name, field.name)]
    fields = draw(st.lists(st.sampled_from(heeded), max_size=3, unique_by=lambda f: f.name))
    required = [
        name
        for name in message.DESCRIPTOR.fields_by_name
        if message.DESCRIPTOR.name in ("ClipParameter",)
    ]
    for field in {
        f.name: f for f in [*fields, *(message.DESCRIPTOR.fields_by_name[n] for n in required)]
    }.values():
        current = getattr(message, field.name)
        if field.message_type is not None:
            if field.default_value == []:
                filled(draw, current.add())
            else:
                current.SetInParent()
                filled(draw, current)
        elif field.default_value == []:
            current.extend(draw(st.lists(value_of(field), max_size=3)))
        else:
            setattr(message, field.name, draw(value_of(field)))
    return message


@FUZZ
@given(st.data())
def test_what_is_written_is_read_back(data: st.DataObject) -> None:
    message = filled(
        data.draw, data.draw(st.sampled_from([NetParameter, SolverParameter, LayerParameter]))()
    )
    if message.IsInitialized():
        assert text.parse(text.format(message), type(message)()) == message


def test_numbers_are_written_as_caffe_writes_them() -> None:
    blob = "data: 1 data: 0.1 data: 0.00392156839 data: 1e+20 double_data: 0.33333333333333331"
    lines = blob.replace(" d", "\nd")
    assert text.format(text.parse(blob, BlobProto())) == f"{lines}\n"


# Errors: place, message, line, caret.

ERRORS = {
    "nearest field": (
        'name: "x"\nlayer {\n  convolution_param { kernal_size: 3 }\n}',
        '3:23: unknown field "kernal_size" in ConvolutionParameter, did you mean "kernel_size"?',
        "    convolution_param { kernal_size: 3 }\n                        ^",
    ),
    "half of a name": (
        "layer { convolution_param { kernal: 3 } }",
        '1:29: unknown field "kernal" in ConvolutionParameter, did you mean "kernel_size"?',
        "  layer { convolution_param { kernal: 3 } }\n                              ^",
    ),
    "brace missing before a layer": (
        'layer {\n  name: "a"\n  relu_param { }\nlayer { name: "b" } }',
        '4:1: unknown field "layer" in LayerParameter: is a "}" missing? "layer", which opens in line 1, '
        "is not closed",
        '  layer { name: "b" } }\n  ^',
    ),
    "brace missing in a layer": (
        'layer {\n convolution_param {\n  weight_filler {\n   type: "xavier"\n  bias_filler { } } } }',
        '5:3: unknown field "bias_filler" in FillerParameter: is a "}" missing? "weight_filler", which '
        "opens in line 3, is not closed",
        "    bias_filler { } } } }\n    ^",
    ),
    "field one level too high": (
        "layer { num_output: 3 }",
        '1:9: unknown field "num_output" in LayerParameter; it belongs inside convolution_param, '
        "inner_product_param, embed_param, recurrent_param, ...",
        "  layer { num_output: 3 }\n          ^",
    ),
    "field of Intel Caffe": (
        "layer { split_param { } }",
        '1:9: unknown field "split_param" in LayerParameter: it is a field of Intel Caffe, which caffepy does '
        "not have",
        "  layer { split_param { } }\n          ^",
    ),
    "field of another fork": (
        "layer { pooling_param { blobs_lr: 1 } }",
        '1:25: unknown field "blobs_lr" in PoolingParameter: it is a field of happynear, which caffepy '
        "does not have",
        "  layer { pooling_param { blobs_lr: 1 } }\n                          ^",
    ),
    "field of a fork in a layer with a name": (
        'layer { name: "p" type: "Pooling" pooling_param { blobs_lr: 1 } }',
        '1:51: unknown field "blobs_lr" in PoolingParameter of layer "p" (Pooling): it is a field of '
        "happynear, which caffepy does not have",
        '  layer { name: "p" type: "Pooling" pooling_param { blobs_lr: 1 } }\n' + " " * 52 + "^",
    ),
    "value in an old layer with a name": (
        'layers { name: "p" type: POOLS }',
        '1:26: unknown value "POOLS" for "type" of layer "p", did you mean "POOLING"? (it takes '
        "NONE, ABSVAL, ACCURACY, ARGMAX, BNLL, CONCAT, CONTRASTIVE_LOSS, CONVOLUTION, ...)",
        '  layers { name: "p" type: POOLS }\n' + " " * 27 + "^",
    ),
    "value of a fork": (
        "layer { pooling_param { pool: DEF } }",
        '1:31: unknown value "DEF" for "pool": it is a value of happynear, which caffepy does not have',
        "  layer { pooling_param { pool: DEF } }\n                                ^",
    ),
    "solver given as a net": (
        "base_lr: 1",
        '1:1: unknown field "base_lr" in NetParameter: it is a field of a solver; is this file a solver?',
        "  base_lr: 1\n  ^",
    ),
    "nearest value": (
        "layer { pooling_param { pool: AVERAGE } }",
        '1:31: unknown value "AVERAGE" for "pool", did you mean "AVE"? (it takes MAX, AVE, STOCHASTIC, AVE_EXC_PAD, AVE_TF, SUM)',
        "  layer { pooling_param { pool: AVERAGE } }\n                                ^",
    ),
    "value in quotes": (
        'layer { phase: "TEST" }',
        '1:16: "phase" takes TEST without quotes',
        '  layer { phase: "TEST" }\n                 ^',
    ),
    "value that is no number of the enum": (
        "layer { phase: 7 }",
        '1:16: "phase" takes TRAIN, TEST',
        "  layer { phase: 7 }\n                 ^",
    ),
    "negative enum": (
        "layer { phase: -1 }",
        '1:16: "phase" takes TRAIN, TEST',
        "  layer { phase: -1 }\n                 ^",
    ),
    "value of an enum is a block": (
        "layer { phase: { } }",
        '1:16: expected a value for "phase" (TRAIN, TEST), not {',
        "  layer { phase: { } }\n                 ^",
    ),
    "string type in layers": (
        'layers { type: "Pooling" }',
        '1:16: unknown value "Pooling" for "type": a layer whose type is a string is called "layer", not "layers"',
        '  layers { type: "Pooling" }\n                 ^',
    ),
    "enum type in layer": (
        "layer { type: EUCLIDEAN_LOSS }",
        '1:15: "type" needs a string in quotes: type: "EuclideanLoss"',
        "  layer { type: EUCLIDEAN_LOSS }\n                ^",
    ),
    "number for a string": (
        "name: 3",
        '1:7: expected a string in quotes for "name", not 3',
        "  name: 3\n        ^",
    ),
    "not a bool": (
        "force_backward: yes",
        '1:17: expected true or false for "force_backward", not yes',
        "  force_backward: yes\n                  ^",
    ),
    "fraction for an integer": (
        "input_dim: 1.5",
        '1:12: "input_dim" needs a whole number',
        "  input_dim: 1.5\n             ^",
    ),
    "variable of a template": (
        "input_dim: ${NUM_LABELS}",
        '1:12: expected a whole number for "input_dim", not ${NUM_LABELS}: the file is a template, '
        "whose variables a script replaces by values",
        "  input_dim: ${NUM_LABELS}\n             ^",
    ),
    "word for an integer": (
        "input_dim: -one",
        '1:13: expected a whole number for "input_dim", not one',
        "  input_dim: -one\n              ^",
    ),
    "negative unsigned": (
        "layer { convolution_param { pad: -1 } }",
        '1:34: "pad" must not be negative',
        "  layer { convolution_param { pad: -1 } }\n                                   ^",
    ),
    "integer out of range": (
        "input_dim: 2147483648",
        '1:12: "input_dim" must lie between -2147483648 and 2147483647',
        "  input_dim: 2147483648\n             ^",
    ),
    "integer far out of range": (
        "input_dim: 99999999999999999999999999",
        '1:12: "input_dim" must lie between -2147483648 and 2147483647',
        "  input_dim: 99999999999999999999999999\n             ^",
    ),
    "size with an x": (
        "layer { loss_weight: 3x3 }",
        '1:22: expected a number for "loss_weight", not 3x3',
        "  layer { loss_weight: 3x3 }\n                       ^",
    ),
    "missing colon": (
        'name "x"',
        '1:6: expected ":" after "name", not "x"',
        '  name "x"\n       ^',
    ),
    "missing brace": (
        'layer: "x"',
        '1:8: expected "{" after "layer", not "x"',
        '  layer: "x"\n         ^',
    ),
    "unclosed block": (
        'layer {\n  name: "a"\n',
        '1:7: this "{" is not closed',
        "  layer {\n        ^",
    ),
    "brace too many": (
        "layer { } }",
        '1:11: this "}" closes nothing',
        "  layer { } }\n            ^",
    ),
    "wrong brace": ("layer { >", "1:9: expected a field name, not >", "  layer { >\n          ^"),
    "unclosed list": (
        "input_dim: [1, 2",
        '1:17: the file ends where "," or "]" should be',
        "  input_dim: [1, 2\n                  ^",
    ),
    "unclosed string": (
        'name: "abc\ninput: "x"',
        "1:7: this string is not closed on its line",
        '  name: "abc\n        ^',
    ),
    "string closed by the next one": (
        'layer { name: "a type: "Input" }',
        '1:25: unknown field "Input" in LayerParameter: it begins right behind a quote; is one '
        "missing before on this line?",
        '  layer { name: "a type: "Input" }\n' + " " * 26 + "^",
    ),
    "given twice": (
        'name: "a"\n\tname: "b"',
        '2:2: "name" is given a second time in NetParameter (first in line 1)',
        '   name: "b"\n   ^',
    ),
    "block given twice": (
        "layer { lrn_param { }\n lrn_param { } }",
        '2:2: "lrn_param" is given a second time in LayerParameter (first in line 1)',
        "   lrn_param { } }\n   ^",
    ),
    "missing required field": (
        "layer { clip_param { min: 1 } }",
        '1:29: ClipParameter needs "max"',
        "  layer { clip_param { min: 1 } }\n                              ^",
    ),
    "extension": ("[a.b]: 1", "1:1: expected a field name, not [", "  [a.b]: 1\n  ^"),
    "field by number": ("1: 2", "1:1: expected a field name, not 1", "  1: 2\n  ^"),
    "unknown escape": (
        r'name: "\q"',
        r"1:7: unknown escape \q in this string",
        '  name: "\\q"\n        ^',
    ),
    "escape beyond Unicode": (
        r'name: "\U00110000"',
        r"1:7: unknown escape \U00110000 in this string",
        '  name: "\\U00110000"\n        ^',
    ),
    "half a surrogate pair": (
        r'name: "\ud800"',
        '1:7: "name" is not UTF-8',
        '  name: "\\ud800"\n        ^',
    ),
    "control character": (
        'name: "x" \0',
        "1:11: expected a field name, not '\\x00'",
        '  name: "x" ?\n            ^',
    ),
    "not ASCII": ("näme: 1", '1:1: unknown field "n" in NetParameter', "  näme: 1\n  ^"),
    "long line": (
        "#" * 3 + "\n" + " " * 500 + "x: 1" + " " * 500,
        '2:501: unknown field "x" in NetParameter',
        "  " + " " * 55 + "x: 1\n  " + " " * 55 + "^",
    ),
}


@pytest.mark.parametrize(("source", "message", "excerpt"), ERRORS.values(), ids=ERRORS)
def test_errors(source: str, message: str, excerpt: str) -> None:
    with pytest.raises(ConfigError) as caught:
        net(source)
    assert str(caught.value) == f"n.prototxt:{message}\n{excerpt}"


def test_net_given_as_a_solver() -> None:
    with pytest.raises(
        ConfigError,
        match='unknown field "layer" in SolverParameter: it is a field of a net; is this',
    ):
        text.parse("layer { }", SolverParameter())


@pytest.mark.parametrize(
    "word", ["a", "[", "{", "layer { ", "input: [", "# \n", '"', "\\", "-", "1", "layer: [{"]
)
def test_repetition_ends_soon(word: str) -> None:
    with pytest.raises(ConfigError):
        net(word * 20_000 + "\1")


def test_message_stays_short() -> None:
    with pytest.raises(ConfigError) as caught:
        net("a" * 100_000 + ": 1")
    assert len(str(caught.value)) < 500


# Files.


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_bytes_of_another_encoding_in_a_comment(tmp_path: Path) -> None:
    assert text.read_net(write(tmp_path / "n", b'# caf\xe9\nname: "x"')).name == "x"


def test_bytes_of_another_encoding_in_a_string(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=':2:7: "name" is not UTF-8\n  name: "caf\\?"\n        \\^'
    ):
        text.read_net(write(tmp_path / "n", b'\nname: "caf\xe9"'))


def test_byte_order_mark(tmp_path: Path) -> None:
    assert text.read_net(write(tmp_path / "n", '\ufeffname: "x"')).name == "x"


FILES = {
    "empty": (b"", "is empty"),
    "only a comment": (b"# nothing\n", "is empty"),
    "weights": (
        (GOLDEN / "digits_iter_250.caffemodel").read_bytes(),
        "looks like a caffemodel, not a prototxt; did you",
    ),
    "state": (
        (GOLDEN / "digits_iter_250.solverstate").read_bytes(),
        "looks like a solver state, not a prototxt; a solver state goes to",
    ),
    "HDF5": (
        b"\x89HDF\r\n\x1a\n\0\0",
        "looks like HDF5, not a prototxt; did you mean --weights or --snapshot?",
    ),
    "UTF-16": (
        'name: "x"'.encode("utf-16"),
        "looks like UTF-16 text, not a prototxt; save it as UTF-8",
    ),
    "web page": (b"<!DOCTYPE html><html>", "looks like a web page, not a prototxt"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "looks like a Git LFS pointer, which stands for a file",
    ),
    "zeros": (bytes(100), "looks like zero bytes, not a prototxt"),
    "garbage": (bytes(range(250, 0, -1)), "looks like unknown binary data, not a prototxt"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("read", [text.read_net, text.read_solver])
def test_files_that_are_no_prototxt(
    read: Callable[[str], Message], content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x", content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f'"{path}" {message}')


def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "solver.prototxt", "")
    with pytest.raises(
        ConfigError,
        match=r'^could not open ".*solvr.prototxt": no such file, did you mean "solver.proto',
    ):
        text.read_solver(str(tmp_path / "solvr.prototxt"))
    with pytest.raises(
        ConfigError,
        match=r'^could not open "/no/such.x": no such file \(there is no folder "/no"\)$',
    ):
        text.read_net("/no/such.x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:  # solver.prototxt is like it in the extension only
        text.read_net("train.prototxt")
    said = f'could not open "train.prototxt": no such file (the working directory is {tmp_path})'
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match=r'^could not open "": no such file'):
        text.read_net("")
    (tmp_path / "link.prototxt").symlink_to("gone")
    with pytest.raises(ConfigError, match=r'no such file \(it is a link to "gone"\)$'):
        text.read_net("link.prototxt")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="looks like a directory, not a prototxt"):
        text.read_net(str(tmp_path))
    with pytest.raises(ConfigError, match="looks like LMDB, not a prototxt"):
        text.read_net(str(GOLDEN / "digits_test_lmdb"))
    with pytest.raises(ConfigError, match=r"could not open .*null byte"):
        text.read_net("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(tmp_path: Path) -> None:
    path = write(tmp_path / "n", 'name: "x"')
    os.chmod(path, 0)
    with pytest.raises(ConfigError, match="permission denied"):
        text.read_net(path)


def test_reading_upgrades(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path / "s.prototxt", 'solver_type: ADAM net_param { layers { type: RELU name: "r" } }'
    )
    with caplog.at_level(logging.INFO):
        solver = text.read_solver(path)
    assert (solver.type, solver.snapshot_prefix) == ("Adam", path.removesuffix(".prototxt"))
    assert solver.net_param.layer[0].type == "ReLU"
    assert (
        f"Attempting to upgrade input file specified using deprecated V1LayerParameter: {path}"
        in caplog.messages
    )


# Places of layers and fields.

NET = """name: "net" input: "data" input_dim: [1, 1, 1, 1]
layer { name: "data" type: "Data" include { phase: TRAIN } }
layer {
  name: "data" type: "Data" include { phase: TEST }
}
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" } layer: [{ name: "a" }, { name: "b" }]
"""


@pytest.mark.parametrize(
    ("layer", "place"),
    [
        ('name: "data" type: "Data" include { phase: TRAIN } phase: TRAIN', ":2:1"),
        ('name: "data" type: "Data" include { phase: TEST }', ":3:1"),
        ('name: "ip" type: "InnerProduct" bottom: "data_split_0" phase: TEST', ":6:1"),
        ('name: "b"', ":6:91"),
        ('name: "ip_ip_0_split" type: "Split" bottom: "ip" top: "x" top: "y"', ":6:1"),
        ('name: "input" type: "Input" top: "data"', ":1:13"),
        ('name: "other" type: "ReLU"', ""),
    ],
)
def test_locate_layer(layer: str, place: str, tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", NET)
    assert text.locate_layer(path, text.parse(layer, LayerParameter())) == path + place


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ('base_lr: 1 net_param { layer { name: "ip" type: "InnerProduct" } }', ":1:24"),
        ('layers { name: "ip" type: RELU }\nlayers { name: "ip" type: INNER_PRODUCT }', ":2:1"),
        ('layers { layer { name: "ip" type: "innerproduct" } }', ":1:1"),
        ('layers { layer { name: "ip" type: "nonsense" } }', ":1:1"),
        ('layer { name: "ip" } }', ""),
        (b"\xff\xfe\0", ""),
    ],
)
def test_locate_layer_of_other_files(source: str | bytes, place: str, tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", source)
    layer = LayerParameter(name="ip", type="InnerProduct", phase=TRAIN)
    assert text.locate_layer(path, layer) == path + place


def test_locate_without_a_file() -> None:
    assert text.locate_layer("/no/file", LayerParameter(name="x")) == "/no/file"
    assert text.locate_field("/no/file", "net") == "/no/file"


def test_locate_field(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.prototxt", 'net: "n"\n  lr_policy: "fixed" test_iter: 1\ntest_iter: 2'
    )
    assert text.locate_field(path, "lr_policy") == f"{path}:2:3"
    assert text.locate_field(path, "test_iter") == f"{path}:2:22"
    assert text.locate_field(path, "gamma") == path


# Whatever is read: a message or a CaffeError.

PIECES = [
    "layer",
    "{",
    "}",
    "name",
    ":",
    '"x"',
    "input_dim",
    "1",
    "-",
    "[",
    "]",
    ",",
    "\0",
    "#",
    "\n",
    "\\",
    "'",
    "é",
]
PIECES += [
    "clip_param",
    "min",
    "1e999",
    "9" * 30,
    "phase",
    "TEST",
    "blobs",
    "data",
    "nan",
    "layers",
    "type",
    "CONVOLUTION",
]


@FUZZ
@given(st.lists(st.sampled_from(PIECES), max_size=30), st.sampled_from(["", " "]))
def test_fuzz_of_pieces(pieces: list[str], between: str) -> None:
    agree_with_protobuf(between.join(pieces))


@FUZZ
@given(st.data())
def test_fuzz_of_a_real_file(data: st.DataObject) -> None:
    source = (GOLDEN / "train_val.prototxt").read_text()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        piece = data.draw(st.sampled_from(PIECES) | st.text(max_size=4))
        source = source[:start] + piece + source[start + data.draw(st.integers(0, 20)) :]
    agree_with_protobuf(source)


def agree_with_protobuf(source: str) -> None:
    """Ours reads what protobuf reads, equal, and refuses by a ConfigError what protobuf refuses."""
    try:
        ours = net(source).SerializeToString()
    except ConfigError:
        ours = None
    try:
        theirs = text_format.Parse(source, NetParameter()).SerializeToString()
    except (text_format.ParseError, UnicodeError, ValueError, DeprecationWarning):
        theirs = None
    assert ours == theirs


@settings(FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_fuzz_of_files(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "x", content)
    for read in (text.read_net, text.read_solver):
        with suppress(CaffeError):
            read(path)
    text.locate_layer(path, LayerParameter(name="x"))


def through_pipe(source: str | bytes) -> NetParameter:
    reading, writing = os.pipe()
    os.write(writing, source.encode() if isinstance(source, str) else source)
    os.close(writing)
    try:
        return text.read_net(f"/dev/fd/{reading}")
    finally:
        os.close(reading)


def test_pipes_are_read_once() -> None:
    assert through_pipe('name: "x"').name == "x"
    with pytest.raises(ConfigError, match=r'/dev/fd/\d+:1:1: .*"nam"'):
        through_pipe('nam: "x"')
    with pytest.raises(ConfigError, match='" is a pipe that gives binary data; save its content'):
        through_pipe(b"\x0a\x01x\xa2\x06\x00")


def test_locating_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    os.mkfifo(path)
    assert text.locate_layer(path, LayerParameter(name="x")) == path
    assert text.locate_field(path, "name") == path


def test_devices_are_not_read() -> None:
    with pytest.raises(ConfigError, match='"/dev/zero" looks like a device, not a prototxt'):
        text.read_net("/dev/zero")


def test_entries_of_two_kinds_are_told_where_the_rarer_is(tmp_path: Path) -> None:
    source = b'layers { name: "a" }\nlayers { name: "b" }\n  layer { name: "c" type: "ReLU" }'
    with pytest.raises(ConfigError, match=r'n:3:3: the net has both old "layers" and new "layer"'):
        text.read_net(write(tmp_path / "n", source))
    old_last = b'layer { name: "a" type: "ReLU" }\nlayers { name: "b" }'
    with pytest.raises(ConfigError, match="n:2:1: the net has both"):
        text.read_net(write(tmp_path / "n", old_last))


MADE_UP = """
layer { name: "d" type: "SequenceData" top: "x" top: "y"
  sequence_data_param { source: "a" 'b' flags: [1, 2] inner < size: -3 > batch_size: 5 }
  transform_param { crop_size: 7 scaling: 2; mirror: true } }
layers { name: "e" type: SEG_LIST_DATA top: "z" image_data_param { batch_size: 2 root: "r" } }
"""


def test_settings_of_data_are_left_out_where_data_are_made_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = text.parse(MADE_UP, NetParameter(), "net.prototxt", made_up=True)
    (new,), (old,) = net.layer, net.layers
    assert (new.transform_param.crop_size, new.transform_param.mirror) == (7, True)
    assert new.data_param.batch_size == 5
    assert (old.type, old.image_data_param.batch_size) == (V1LayerParameter.IMAGE_DATA, 2)
    (record,) = caplog.records
    assert record.getMessage() == (
        'net.prototxt: left out, since data are made up: sequence_data_param of layer "d" '
        '(SequenceData), scaling of layer "d" (SequenceData), SEG_LIST_DATA of layer "e", '
        'root of layer "e"'
    )
    with pytest.raises(ConfigError, match="3:3: unknown field"):
        text.parse(MADE_UP, NetParameter(), "net.prototxt")


@pytest.mark.parametrize(
    ("given_text", "batch"), [("8", 8), ("0x10", 16), ("010", 8), ("99999999", 65536)]
)
def test_a_batch_size_among_what_is_left_out(given_text: str, batch: int) -> None:
    given_text = f'layer {{ type: "AData" a_param {{ batch_size: {given_text} }} }}'
    net = text.parse(given_text, NetParameter(), made_up=True)
    assert net.layer[0].data_param.batch_size == batch


@pytest.mark.parametrize(
    ("given_text", "message"),
    [
        ('layer { name: "r" type: "ReLU" slop: 1 }', "unknown field"),
        ('layer { type: "AData" bottom: "x" slop: 1 }', "unknown field"),
        ("layers { type: FOLD bottom: 1 }", "unknown value"),
        ('layer { type: "AData" slop: { a: 1', 'this "{" is not closed'),
        ('layer { type: "AData" slop: } }', "expected a value, not }"),
        ('layer { type: "AData" slop', "the file ends where a value should be"),
    ],
)
def test_what_is_wrong_though_data_are_made_up(given_text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text.parse(given_text, NetParameter(), made_up=True)


def test_a_variable_for_a_number_of_outputs_is_one_of_classes_where_data_are_made_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = """layer { name: "c" type: "Convolution" convolution_param {
      num_output: ${NUM_LABELS} kernel_size: 3 } }"""
    (layer,) = text.parse(source, NetParameter(), "net.prototxt", made_up=True).layer
    given = layer.convolution_param
    assert (given.num_output, list(given.kernel_size)) == (text.CLASSES, [3])
    assert caplog.messages == [
        "net.prototxt: a template, taken since data are made up: ${NUM_LABELS} as 21"
    ]
    for made_up, setting in ((False, "num_output"), (True, "group")):
        with pytest.raises(ConfigError, match="the file is a template"):
            text.parse(source.replace("num_output", setting), NetParameter(), made_up=made_up)


def test_times_the_classes_of_a_template(caplog: pytest.LogCaptureFixture) -> None:
    source = """layer { name: "c" type: "Convolution" convolution_param { num_output: cls6x } }
      layer { name: "r" reshape_param { shape { dim: [0, -1, cls1x] } } }"""
    c, r = text.parse(source, NetParameter(), "net.prototxt", made_up=True).layer
    assert c.convolution_param.num_output == 126
    assert list(r.reshape_param.shape.dim) == [0, -1, 21]
    (message,) = caplog.messages
    assert message.endswith("since data are made up: cls6x as 126, cls1x as 21")
    with pytest.raises(ConfigError, match="not cls6x: the file is a template"):
        text.parse(source, NetParameter())


def test_a_net_in_a_solver_has_made_up_data(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text('net_param { layer { type: "OwnData" top: "x" own_param { } } } base_lr: 1')
    assert text.read_solver(str(path), made_up=True).net_param.layer[0].type == "OwnData"
