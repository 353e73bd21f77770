"""Protobuf's text format, as prototxt files hold it: read with errors that point at the place, and
written.

The grammar is protobuf's own. Positions are character offsets until they are shown; lines and
columns start at 1.
"""

import logging
import os
import re
import stat
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final, NoReturn, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message

from caffepy.core.errors import ConfigError
from caffepy.core.names import nearest
from caffepy.proto import upgrade
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, SolverParameter, V1LayerParameter
from caffepy.proto.forks import (
    fork_of_field,
    fork_of_layer,
    fork_of_value,
    further,
    is_ignored,
    is_refused,
)
from caffepy.proto.sniff import is_binary, mismatch, sniff

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

_TOKEN = re.compile(
    r"""(?: \s++ | \#[^\n]*+ )*+
    (?: (?P<name> [A-Za-z_]\w*+ )
      | (?P<number> \.?[0-9] (?: [eE][+-]? | [\w.] )*+ )
      | (?P<string> "(?: [^"\\\n] | \\[^\n] )*+" | '(?: [^'\\\n] | \\[^\n] )*+' )
      | (?P<symbol> [-{}<>\[\]:;,] )
      | (?P<end> \Z )
      | (?P<other> . ) )""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_VARIABLE = re.compile(r"\$\{\w{1,60}\}|\$\w{1,60}")
CLASSES: Final = 21
"""A num_output for which a template has a variable: PASCAL VOC's classes and the background."""
_TIMES_CLASSES = re.compile("cls([1-9][0-9]?)x")
_INTEGER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19}", re.ASCII)
_FLOAT = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fF]?", re.ASCII)
_ESCAPE = re.compile(
    rb"\\(?: ([abfnrtv?'\"\\]) | ([0-3]?[0-7]{1,2}) | [xX]([0-9a-fA-F]{1,2}) | u([0-9a-fA-F]{4}) "
    rb"| U([0-9a-fA-F]{8}) | (.) )",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = dict(zip(b"abfnrtv?'\"\\", b"\a\b\f\n\r\t\v?'\"\\", strict=True))
_BOOLEANS = dict.fromkeys(("true", "True", "t", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "False", "f", "0"), False)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_CLOSERS = {"{": "}", "<": ">"}
_WIDTH: Final = 110
"""Longest part of a source line that a message shows."""


def parse(text: str, message: M, path: str = "<text>", made_up: bool = False) -> M:
    """Read `text` into `message` and return it.

    With `made_up` data a data layer may be of any type with "Data" in its name and have any
    settings, and a variable may stand for a num_output: a warning names what is not known of them.

    Raises ConfigError: `path:line:col: what is wrong`, then the source line and a caret.
    """
    parser = _Parser(text, path, made_up)
    parser.read_into(message)
    if parser.left_out:
        what = ", ".join(parser.left_out)
        log.warning("%s: left out, since data are made up: %s", path, what)
    if parser.ignored:
        log.info("%s: %s: of a fork of Caffe, without effect", path, ", ".join(parser.ignored))
    if parser.taken:
        what = ", ".join(parser.taken)
        log.warning("%s: a template, taken since data are made up: %s", path, what)
    return message


def format(message: Message) -> str:
    """The message in text format, as Caffe logs it; `MessageToString` says 1.0 where Caffe says
    1, and has shorter fractions.
    """
    return str(message)


def read_text(path: str) -> str:
    """The text of a prototxt file; ConfigError if it cannot be read."""
    try:
        return _read_text(path)
    except (OSError, ValueError):
        raise mismatch(path, "a prototxt") from None


def read_message(path: str, message: M, text: str | None = None, made_up: bool = False) -> M:
    """Read a prototxt file as it stands into `message` and return it; ConfigError says what else
    the file is.

    `text` is the result of `read_text`, if that was called before: a pipe can be read only once.
    `made_up` as in `parse`.
    """
    text = read_text(path) if text is None else text
    try:
        parse(text, message, path, made_up)
    except ConfigError:
        kind = sniff(path)
        if kind == "a pipe" and is_binary(text.encode("utf-8", "surrogateescape")):
            remedy = "save its content as a file"
            raise ConfigError(f'"{path}" is a pipe that gives binary data; {remedy}') from None
        if kind not in ("text", "a pipe"):
            raise mismatch(path, "a prototxt") from None
        raise
    if not message.ListFields():
        raise ConfigError(f'"{path}" is empty')
    return message


def read_net(path: str, text: str | None = None, made_up: bool = False) -> NetParameter:
    """The net of a prototxt file, upgraded. Options and errors as in `read_message`."""
    net = read_message(path, NetParameter(), text, made_up)
    if net.layer and net.layers:
        rarer = "layer" if len(net.layer) < len(net.layers) else "layers"
        raise ConfigError(upgrade.MIXED, locate_field(path, rarer))
    return upgrade.upgrade_net(net, path)


def read_solver(path: str, text: str | None = None, made_up: bool = False) -> SolverParameter:
    """The solver of a prototxt file, upgraded, with a snapshot prefix; the nets it names are not
    read.

    Options as in `read_message`.
    """
    return upgrade.upgrade_solver(read_message(path, SolverParameter(), text, made_up), path)


def locate_layer(path: str, layer: LayerParameter) -> str:
    """`path:line:col` of the block that `layer`, perhaps upgraded or made by a rewrite of the net,
    comes from.

    The file is read anew; `path` alone is returned when the block is not found there.
    """
    parser = _reread(path)
    if parser is None:
        return path
    if found := _blocks_of(parser, layer):
        return parser.place(max(found, key=lambda entry: _likeness(entry[1], layer))[0])
    if layer.type == "Input" and "input" in parser.outer:
        return parser.place(parser.outer["input"])
    return path


def where(path: str | None, layer: LayerParameter) -> str:
    """Return `file:line:col: layer "name" (Type)`, without the file if the net has none."""
    name = f'layer "{layer.name}" ({layer.type})'
    return f"{locate_layer(path, layer)}: {name}" if path else name


def locate_field(path: str, field: str) -> str:
    """`path:line:col` of an outermost field of the file, or `path` alone if it is not there."""
    parser = _reread(path)
    return parser.place(parser.outer[field]) if parser and field in parser.outer else path


def _read_text(path: str) -> str:
    """The file's text. Bytes that are not UTF-8 become surrogates: in a comment they do no harm."""
    with open(path, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise ValueError("a device")
        return file.read().decode("utf-8", "surrogateescape").removeprefix("\ufeff")


def _reread(path: str) -> "_Parser | None":
    """A parser that has read the file as a net or as a solver; None for others, and for pipes."""
    if not os.path.isfile(path):
        return None
    try:
        text = _read_text(path)
    except (OSError, ValueError):
        return None
    return _parsed(text, path)


@lru_cache(maxsize=1)
def _parsed(text: str, path: str) -> "_Parser | None":
    """The parser of the file that was read last: several errors of a large net may be located."""
    for message in (NetParameter(), SolverParameter()):
        parser = _Parser(text, path, made_up=True)
        try:
            parser.read_into(message)
        except ConfigError:
            continue
        return parser
    return None


def _blocks_of(parser: "_Parser", layer: LayerParameter) -> list[tuple[int, LayerParameter]]:
    """The blocks that `layer` may come from, and where they start."""
    blocks = [(offset, _as_layer(block)) for offset, block in parser.layers]
    named = [(offset, block) for offset, block in blocks if block.name == layer.name]
    if not named and layer.type == "Split":
        return [(offset, block) for offset, block in blocks if layer.bottom[0] in block.top][-1:]
    return named


def _likeness(block: LayerParameter, layer: LayerParameter) -> tuple[bool, ...]:
    fields = ("type", "include", "exclude", "top", "bottom")
    return tuple(getattr(block, field) == getattr(layer, field) for field in fields)


def _as_layer(block: LayerParameter | V1LayerParameter) -> LayerParameter:
    if isinstance(block, LayerParameter):
        return block
    layer = LayerParameter()
    upgrade.upgrade_layer(block, layer)
    if block.HasField("layer"):
        layer.name = block.layer.name
        layer.type = upgrade.V1_TYPES.get(upgrade.V0_TYPES.get(block.layer.type, ""), "")
    return layer


class _Field:
    """A field of a message, as the parser needs it; looked up once."""

    def __init__(self, proto: FieldDescriptorProto, descriptor: FieldDescriptor) -> None:
        self.name = descriptor.name
        self.descriptor = descriptor
        self.repeated = proto.label == FieldDescriptorProto.LABEL_REPEATED
        self.required = proto.label == FieldDescriptorProto.LABEL_REQUIRED
        self.holds_message = descriptor.message_type is not None
        values = descriptor.enum_type.values if descriptor.enum_type else ()
        self.values = {value.name: value.number for value in values}
        self.read = _READERS.get(descriptor.cpp_type, _Parser.integer)


@cache
def _fields(descriptor: Descriptor) -> dict[str, _Field]:
    proto = DescriptorProto()
    descriptor.CopyToProto(proto)
    heeded = (
        (p, d)
        for p, d in zip(proto.field, descriptor.fields, strict=True)
        if not is_refused(descriptor.name, p.name)
    )
    return {p.name: _Field(p, d) for p, d in heeded}


def _number(integer: str) -> int:
    """Return the number that a token of `_INTEGER` writes, as in C."""
    octal = integer.startswith("0") and integer.isdigit()
    return int(integer, 8 if octal else 0)


class _Parser:
    """One pass over a text: the current token, its start, and the places of fields and layers."""

    def __init__(self, text: str, path: str, made_up: bool = False) -> None:
        self.text = text
        self.path = path
        self.kind = self.value = ""
        self.start = self.stop = 0
        self.outer: dict[str, int] = {}
        """The first start of each outermost field."""
        self.layers: list[tuple[int, LayerParameter | V1LayerParameter]] = []
        """Every layer block and its start, nested ones too."""
        self.open: list[tuple[Descriptor | None, str, int]] = []
        """The blocks around the current token: type of the message around each, name, start."""
        self.ignored: dict[str, None] = {}
        """Names of fields of forks that say nothing here, in the order of the text."""
        self.made_up = made_up
        self.taken: dict[str, None] = {}
        """Variables of a template that stand for a number of classes, if data are made up."""
        self.left_out: dict[str, None] = {}
        """What is not known of data layers, if data are made up, in the order of the text."""

    def read_into(self, message: Message) -> None:
        self.advance()
        self.block(message, "", 0, self.outer)

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.stop)
        assert match is not None
        assert match.lastgroup is not None
        self.kind = match.lastgroup
        self.value = match[self.kind]
        self.start, self.stop = match.span(self.kind)

    def take(self, *values: str) -> str:
        """The current token if it is one of these, else an empty string."""
        value = self.value
        if value not in values:
            return ""
        self.advance()
        return value

    # What is wrong, and where.

    def place(self, offset: int) -> str:
        line = self.text.count("\n", 0, offset) + 1
        column = offset - self.text.rfind("\n", 0, offset)
        return f"{self.path}:{line}:{column}"

    def fail(self, message: str, offset: int | None = None) -> NoReturn:
        offset = self.start if offset is None else offset
        raise ConfigError(f"{message}\n{self.excerpt(offset)}", self.place(offset))

    def excerpt(self, offset: int) -> str:
        """The source line and, below, a caret at the offset; of a long line only what is near."""
        begin = self.text.rfind("\n", 0, offset) + 1
        end = self.text.find("\n", offset)
        end = len(self.text) if end < 0 else end
        begin = max(begin, offset - _WIDTH // 2)
        line = self.text[begin : min(end, begin + _WIDTH)].rstrip()
        shown = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in line)
        return f"  {shown}\n  {' ' * (offset - begin)}^"

    def unexpected(self, wanted: str) -> NoReturn:
        if self.kind == "end":
            self.fail(f"the file ends where {wanted} should be")
        if self.value in ("'", '"'):
            self.fail("this string is not closed on its line")
        variable = _VARIABLE.match(self.text, self.start)
        if variable := variable or _TIMES_CLASSES.match(self.text, self.start):
            self.fail(
                f"expected {wanted}, not {variable[0]}: the file is a template, whose variables a "
                "script replaces by values"
            )
        found = self.value if self.value.isprintable() else ascii(self.value)
        self.fail(f"expected {wanted}, not {found[:40]}")

    def layer_around(self) -> LayerParameter | V1LayerParameter | None:
        """Return the layer around the current token."""
        starts = {start for *_, start in self.open}
        return next((layer for start, layer in reversed(self.layers) if start in starts), None)

    def of_layer(self) -> str:
        """Return the layer around the current token in words, if its name stands before it."""
        layer = self.layer_around()
        if layer is None or not layer.name:
            return ""
        kind = f" ({layer.type})" if isinstance(layer, LayerParameter) and layer.type else ""
        return f' of layer "{layer.name}"{kind}'

    def unknown_field(self, message: Message) -> NoReturn:
        name, descriptor = self.value[:80], message.DESCRIPTOR
        said = f'unknown field "{name}" in {descriptor.name}'
        if self.text[: self.start].endswith(('"', "'")):
            self.fail(
                f"{said}: it begins right behind a quote; is one missing before on this line?"
            )
        fork = fork_of_field(descriptor.name, name)
        if fork is not None:
            self.fail(
                f"{said}{self.of_layer()}: it is a field of {fork}, which caffepy does not have"
            )
        layer = self.layer_around()
        if isinstance(layer, LayerParameter) and (fork := fork_of_layer(layer.type)):
            self.fail(
                f"{said}{self.of_layer()}: this layer type is one of {fork}, which caffepy does "
                "not have"
            )
        for kind, other in (("net", NetParameter), ("solver", SolverParameter)):
            is_whole = isinstance(message, (NetParameter, SolverParameter))
            if is_whole and name in _fields(other.DESCRIPTOR):
                self.fail(f"{said}: it is a field of a {kind}; is this file a {kind}?")
        if any(around and name in _fields(around) for around, *_ in self.open):
            *_, block, start = self.open[-1]
            line = self.text.count("\n", 0, start) + 1
            unclosed = f'"{block}", which opens in line {line}, is not closed'
            self.fail(f'{said}: is a "}}" missing? {unclosed}')
        homes = [
            field.name
            for field in descriptor.fields
            if field.message_type is not None and name in field.message_type.fields_by_name
        ]
        hint = nearest(name, _fields(descriptor))
        if homes:
            hint = f"; it belongs inside {', '.join(homes[:4])}{', ...' if len(homes) > 4 else ''}"
        self.fail(said + self.of_layer() + hint)

    # What may stand where.

    def block(self, message: Message, closer: str, opened: int, seen: dict[str, int]) -> None:
        """Fields up to the closing brace, which is left for the caller, or the end of the file."""
        fields = _fields(message.DESCRIPTOR)
        while self.value != closer:
            if self.kind != "name":
                if self.kind == "end":
                    self.fail(f'this "{self.text[opened]}" is not closed', opened)
                if not closer and self.value in _CLOSERS.values():
                    self.fail(f'this "{self.value}" closes nothing')
                self.unexpected("a field name")
            field = fields.get(self.value)
            if field is None and self.of_made_up_data():
                self.leave_out()
                continue
            if field is None:
                self.unknown_field(message)
            if is_ignored(message.DESCRIPTOR.name, field.name):
                self.ignored[field.name] = None
            more = further(message.DESCRIPTOR.name, field.name)
            if field.name in seen and more:
                field = fields[more]
            if field.name in seen and not field.repeated:
                twice = f'"{field.name}" is given a second time in {message.DESCRIPTOR.name}'
                line = self.text.count("\n", 0, seen[field.name]) + 1
                self.fail(f"{twice} (first in line {line})")
            start = self.start
            seen.setdefault(field.name, start)
            self.advance()
            if field.holds_message:
                self.messages(message, field, start)
            else:
                self.values(message, field)
            self.take(",", ";")
        for field in fields.values():
            if field.required and field.name not in seen:
                self.fail(f'{message.DESCRIPTOR.name} needs "{field.name}"')

    def of_made_up_data(self) -> bool:
        """True within a layer that gives data, if these are made up."""
        layer = self.layer_around() if self.made_up else None
        if layer is None or layer.bottom:
            return False
        if isinstance(layer, V1LayerParameter):
            return "DATA" in V1LayerParameter.LayerType.Name(layer.type)
        return "Data" in layer.type

    def leave_out(self) -> None:
        """Pass over a field of a data layer that the schema does not have; of the batch size of
        such settings take note.
        """
        layer = self.layer_around()
        assert layer is not None
        self.left_out[f"{self.value[:80]}{self.of_layer()}"] = None
        self.advance()
        self.take(":")
        opened, depth = self.start, 0
        if self.kind in ("end", "other") or self.value in ("}", ">", "]", ":", ",", ";"):
            self.unexpected("a value")
        while True:
            if self.kind == "end":
                self.fail(f'this "{self.text[opened]}" is not closed', opened)
            token, kind = self.value, self.kind
            depth += (token in ("{", "<", "[")) - (token in ("}", ">", "]"))
            self.advance()
            if token == "batch_size" and self.take(":") and _INTEGER.fullmatch(self.value):
                layer.data_param.batch_size = min(_number(self.value), 2**16)
            if depth == 0 and token != "-" and not (kind == self.kind == "string"):
                break
        self.take(",", ";")

    def messages(self, message: Message, field: _Field, start: int) -> None:
        self.take(":")
        child = getattr(message, field.name)
        if not field.repeated:
            child.SetInParent()
            self.message(child, field, start)
        elif self.take("["):
            self.listed(lambda: self.message(child.add(), field, self.start))
        else:
            self.message(child.add(), field, start)

    def message(self, child: Message, field: _Field, start: int) -> None:
        opened, opener = self.start, self.take(*_CLOSERS)
        if not opener:
            self.unexpected(f'"{{" after "{field.name}"')
        if isinstance(child, (LayerParameter, V1LayerParameter)):
            self.layers.append((start, child))
        self.open.append((field.descriptor.containing_type, field.name, start))
        self.block(child, _CLOSERS[opener], opened, {})
        self.open.pop()
        self.advance()

    def values(self, message: Message, field: _Field) -> None:
        if not self.take(":"):
            self.unexpected(f'":" after "{field.name}"')
        more = further(message.DESCRIPTOR.name, field.name)
        if more and self.value == "[":
            several = getattr(message, more)
            self.advance()
            self.listed(lambda: several.append(field.read(self, field)))
            if several:
                setattr(message, field.name, several.pop(0))
            return
        if not field.repeated:
            setattr(message, field.name, field.read(self, field))
            return
        container = getattr(message, field.name)
        if self.take("["):
            self.listed(lambda: container.append(field.read(self, field)))
        else:
            container.append(field.read(self, field))

    def listed(self, element: Callable[[], None]) -> None:
        """Elements with commas between them, up to the closing bracket."""
        if self.take("]"):
            return
        element()
        while not self.take("]"):
            if not self.take(","):
                self.unexpected('"," or "]"')
            element()

    # Values of one kind each.

    def integer(self, field: _Field) -> int:
        if self.made_up and (value := self.of_template(field)):
            return value
        start = self.start
        negative = bool(self.take("-"))
        match = _INTEGER.fullmatch(self.value)
        low, high = _RANGES[field.descriptor.cpp_type]
        if match is None:
            if self.kind != "number":
                self.unexpected(f'a whole number for "{field.name}"')
            if self.value.isdigit() and not self.value.startswith("0"):
                self.fail(f'"{field.name}" must lie between {low} and {high}', start)
            self.fail(f'"{field.name}" needs a whole number', start)
        value = _number(self.value) * (-1 if negative else 1)
        if not low <= value <= high:
            if value < 0 and low == 0:
                self.fail(f'"{field.name}" must not be negative', start)
            self.fail(f'"{field.name}" must lie between {low} and {high}', start)
        self.advance()
        return value

    def of_template(self, field: _Field) -> int:
        """Take a number of classes from a variable that stands for a num_output, or from a name
        such as cls3x for three times it, as in templates of MobileNet-SSD; 0 if there is none.
        """
        variable = _VARIABLE.match(self.text, self.start)
        times = _TIMES_CLASSES.fullmatch(self.value)
        if times is None and (variable is None or field.name != "num_output"):
            return 0
        name = self.value if variable is None else variable[0]
        value = CLASSES * (int(times[1]) if times else 1)
        self.taken[f"{name} as {value}"] = None
        self.stop = self.stop if variable is None else variable.end()
        self.advance()
        return value

    def real(self, field: _Field) -> float:
        sign = -1.0 if self.take("-") else 1.0
        match = _FLOAT.fullmatch(self.value)
        if match is not None:
            value = float(match[1])
        elif self.kind == "name" and self.value.lower() in ("inf", "infinity", "nan"):
            value = float(self.value)
        else:
            self.unexpected(f'a number for "{field.name}"')
        self.advance()
        return sign * value

    def boolean(self, field: _Field) -> bool:
        if self.value not in _BOOLEANS:
            self.unexpected(f'true or false for "{field.name}"')
        return _BOOLEANS[self.take(self.value)]

    def enumerator(self, field: _Field) -> int:
        start = self.start
        if self.kind == "number" or self.take("-"):
            number = int(self.value) if re.fullmatch("[0-9]{1,9}", self.value) else -1
            if self.text[start] == "-" or number not in field.values.values():
                self.fail(f'"{field.name}" takes {_known(field)}', start)
        else:
            name = self.value.strip("\"'")[:80]
            if self.kind not in ("name", "string"):
                self.unexpected(f'a value for "{field.name}" ({_known(field)})')
            of_v1 = field.descriptor.containing_type is V1LayerParameter.DESCRIPTOR
            if name not in field.values and self.made_up and of_v1 and "DATA" in name:
                self.left_out[f"{name}{self.of_layer()}"] = None
                name = "IMAGE_DATA"
            if name not in field.values:
                self.unknown_value(field, name)
            if self.kind == "string":
                self.fail(f'"{field.name}" takes {name} without quotes')
            number = field.values[name]
        self.advance()
        return number

    def unknown_value(self, field: _Field, name: str) -> NoReturn:
        said = f'unknown value "{name}" for "{field.name}"{self.of_layer()}'
        fork = fork_of_value(name)
        if fork is not None:
            self.fail(f"{said}: it is a value of {fork}, which caffepy does not have")
        is_v1 = field.descriptor.containing_type is V1LayerParameter.DESCRIPTOR
        if is_v1 and name in upgrade.V1_TYPES.values():
            self.fail(f'{said}: a layer whose type is a string is called "layer", not "layers"')
        self.fail(f"{said}{nearest(name, field.values)} (it takes {_known(field)})")

    def string(self, field: _Field) -> str | bytes:
        if self.kind != "string":
            if self.kind == "name":
                types = upgrade.V1_TYPES if field.name == "type" else {}
                example = f'{field.name}: "{types.get(self.value, self.value)[:80]}"'
                self.fail(f'"{field.name}" needs a string in quotes: {example}')
            self.unexpected(f'a string in quotes for "{field.name}"')
        start, data = self.start, b""
        while self.kind == "string":
            data += self.value[1:-1].encode("utf-8", "surrogateescape")
            self.advance()
        if b"\\" in data:
            data = _ESCAPE.sub(lambda match: self.unescaped(match, start), data)
        if field.descriptor.type == FieldDescriptor.TYPE_BYTES:
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f'"{field.name}" is not UTF-8', start)

    def unescaped(self, match: re.Match[bytes], start: int) -> bytes:
        simple, octal, hexadecimal, *points, _ = match.groups()
        if simple:
            return bytes([_ESCAPED[simple[0]]])
        if octal:
            return bytes([int(octal, 8)])
        if hexadecimal:
            return bytes([int(hexadecimal, 16)])
        point = int(points[0] or points[1] or b"110000", 16)
        if point > 0x10FFFF:
            self.fail(f"unknown escape {match[0].decode('ascii', 'replace')} in this string", start)
        return chr(point).encode("utf-8", "surrogatepass")


_READERS = {
    FieldDescriptor.CPPTYPE_FLOAT: _Parser.real,
    FieldDescriptor.CPPTYPE_DOUBLE: _Parser.real,
    FieldDescriptor.CPPTYPE_BOOL: _Parser.boolean,
    FieldDescriptor.CPPTYPE_ENUM: _Parser.enumerator,
    FieldDescriptor.CPPTYPE_STRING: _Parser.string,
}


def _known(field: _Field) -> str:
    """The first values of an enum, for a message."""
    names = list(field.values)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
