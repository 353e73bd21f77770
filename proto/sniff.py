"""The kind of a file, by its first bytes and, for protobuf, by its outermost fields."""

import os
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caffepy.core.errors import CaffeError, ConfigError, reason
from caffepy.core.files import working_directory
from caffepy.core.names import neighbour
from caffepy.proto import caffe_pb2

_SIGNATURES = (
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", "a PyTorch file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"\x80\x05\x95", "a Python pickle"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\0", "an xz file"),
    (b"7z\xbc\xaf'\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x7fELF", "a program or library"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_HDF5 = b"\x89HDF\r\n\x1a\n"
_LMDB = b"\xde\xc0\xef\xbe"  # at byte 16 of data.mdb
_LONGEST_HEADER = 100_000_000  # of safetensors, whose length comes first
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_STRING: _BYTES,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_MESSAGE: _BYTES,
}
_MOST_FIELDS = 10_000


def _outer_fields(message: type[Message]) -> set[tuple[int, int]]:
    """The (number, wire type) pairs of the fields of a message; arrays come packed or not."""
    fields = message.DESCRIPTOR.fields
    pairs = {(field.number, _WIRE_TYPES.get(field.type, _VARINT)) for field in fields}
    return pairs | {(field.number, _BYTES) for field in fields if field.default_value == []}


_MESSAGES = {
    "a caffemodel": _outer_fields(caffe_pb2.NetParameter),
    "a solver state": _outer_fields(caffe_pb2.SolverState),
    "a binaryproto": _outer_fields(caffe_pb2.BlobProto),
    "an ONNX model": {(1, _VARINT), (5, _VARINT), *((n, _BYTES) for n in (2, 3, 4, 7, 8))},
}

STATE_GOES_TO = "a solver state goes to caffepy train --snapshot"
_ADVICE = {
    ("a caffemodel", "a solver state"): STATE_GOES_TO,
    ("a caffemodel", "text"): "a prototxt goes to --model or --solver",
    ("a solver state", "a caffemodel"): "did you mean --weights?",
    ("a solver state", "text"): "a prototxt goes to --model or --solver",
    ("a prototxt", "a caffemodel"): "did you mean --weights?",
    ("a prototxt", "a solver state"): STATE_GOES_TO,
    ("a prototxt", "HDF5"): "did you mean --weights or --snapshot?",
    ("a prototxt", "UTF-16 text"): "save it as UTF-8",
    ("a caffemodel", "a safetensors file"): "caffepy weights convert makes one of it",
    ("a caffemodel", "a pipe"): "save its content as a file",
    ("a solver state", "a pipe"): "save its content as a file",
}


def sniff(path: str) -> str:
    """The kind of the file at `path`, in words for a message; never raises.

    Caffe's own kinds are "a caffemodel", "a solver state", "a binaryproto", "text", "HDF5", "LMDB"
    and "LevelDB"; the first three may be followed by " that is cut short". Others are "empty",
    "missing", "unreadable", "a directory", "a pipe", "a device", "zero bytes", well-known foreign
    kinds such as "a PyTorch file", and "unknown binary data".
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            names = os.listdir(path)
            if "data.mdb" in names:
                return "LMDB"
            return "LevelDB" if "CURRENT" in names else "a directory"
        if not stat.S_ISREG(mode):  # to read it may not end, or consume it
            return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a pipe"
        with open(path, "rb") as file:
            return _sniff_file(file)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError):
        return "unreadable"


def _sniff_file(file: BinaryIO) -> str:
    head = file.read(4096)
    if not head:
        return "empty"
    # whose length may begin as another kind does: 640 as a pickle
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LONGEST_HEADER:
        return "a safetensors file"
    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if any(head.startswith(_HDF5, offset) for offset in (0, 512, 1024, 2048)):
        return "HDF5"
    if head[16:20] == _LMDB:
        return "LMDB"
    if head.startswith(b"PK\x03\x04"):
        return "a PyTorch file" if b"data.pkl" in head else "a zip archive"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if not is_binary(head):
        if head.startswith(b"version https://git-lfs"):
            return "a Git LFS pointer, which stands for a file that was not downloaded"
        is_page = head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html"))
        return "a web page" if is_page else "text"
    if not any(head):
        return "zero bytes"
    return _sniff_message(file) or "unknown binary data"


def is_binary(data: bytes) -> bool:
    """True if there are bytes that no text has."""
    return _CONTROL.search(data) is not None


def _sniff_message(file: BinaryIO) -> str | None:
    """The kind of Caffe message that the outermost fields of the file fit, or None."""
    size = file.seek(0, os.SEEK_END)
    seen: set[tuple[int, int]] = set()
    end = 0
    for pair, end in _scan(file, size):
        if pair[1] not in (_VARINT, _FIXED64, _BYTES, _FIXED32) or pair[0] == 0:
            return None
        if end <= size:
            seen.add(pair)
    best, most = None, 0
    for kind, known in _MESSAGES.items():
        # a known field of another wire type clashes; unknown ones may be a fork's
        clashing = {number for number, _ in seen - known} & {number for number, _ in known}
        if not clashing and len(seen & known) > most:
            best, most = kind, len(seen & known)
    return f"{best} that is cut short" if best and end > size else best


def _scan(file: BinaryIO, size: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Outermost fields of a protobuf file: ((number, wire type), end of the field)."""
    position = 0
    for _ in range(_MOST_FIELDS):
        if position >= size:
            return
        file.seek(position)
        prefix = file.read(20)
        tag, used = _varint(prefix, 0)
        number, wire_type = tag >> 3, tag & 7
        length = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        if wire_type in (_VARINT, _BYTES):
            value, used = _varint(prefix, used)
            length = value if wire_type == _BYTES else 0
        position += used + length
        yield (number, wire_type), position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint at a position and the one behind it: behind the data if it is cut short."""
    value = shift = 0
    for byte in data[position : position + 10]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return value, position + 1


def mismatch(path: str, wanted: str, error: type[CaffeError] = ConfigError) -> CaffeError:
    """The error for a file that is no `wanted` ("a caffemodel") but another kind, or damaged."""
    kind = sniff(path)
    if kind == "missing":
        return error(f'could not open "{path}": no such file{_missing(path)}')
    if kind == "unreadable":
        return error(f'could not open "{path}": {_reason(path)}')
    if kind == "empty":
        return error(f'"{path}" is empty')
    if kind == wanted:
        return error(f'"{path}" is damaged: it starts like {wanted}, but cannot be read')
    if kind == f"{wanted} that is cut short":
        return error(f'"{path}" is {kind}')
    advice = _ADVICE.get((wanted, kind))
    return error(f'"{path}" looks like {kind}, not {wanted}' + (f"; {advice}" if advice else ""))


def _missing(path: str) -> str:
    """Return `, did you mean "X"?` for a file beside; if none is near, where it was looked for; of
    a link, where it leads.
    """
    if os.path.islink(path):
        return f' (it is a link to "{os.readlink(path)}")'
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        return f' (there is no folder "{folder}")'
    where = "" if os.path.isabs(path) else f" (the working directory is {working_directory()})"
    return neighbour(path) or where


def _reason(path: str) -> str:
    try:
        with open(path, "rb"):
            return "it cannot be read"
    except OSError as error:
        return reason(error)
    except ValueError as error:
        return str(error)
