"""Binary files of Caffe, read whole: weights, solver states, means; and the arrays inside their
blobs.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter, SolverState, Type
from caffepy.proto.fork_wire import CAFFE, OWN, fork_of, from_own, likely_fork, to_own
from caffepy.proto.sniff import mismatch
from caffepy.proto.sniff import sniff as sniff
from caffepy.proto.upgrade import upgrade_net

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Array = NDArray[Any]
Floats = NDArray[np.float32]

_RAW_TYPES = {
    Type.DOUBLE: "<f8",
    Type.FLOAT: "<f4",
    Type.FLOAT16: "<f2",
    Type.INT: "<i4",
    Type.UINT: "<u4",
}
_RAW_FIELDS = ("raw_data", "raw_data_type", "raw_diff", "raw_diff_type")
_DATA_TAG, _DIFF_TAG = b"\x2a", b"\x32"  # fields 5 and 6, length-delimited


def read_net(path: str) -> NetParameter:
    """The net of a .caffemodel, upgraded, for its weights: settings of layers may be missing if it
    is not clear of which fork of Caffe it is. ConfigError says what else the file is.
    """
    data = _bytes(path, "a caffemodel", ConfigError)
    return upgrade_net(_net(data, likely_fork(data), path), path)


def read_stored_net(path: str, fork: str | None = None) -> tuple[NetParameter, str]:
    """The net of a .caffemodel as it stands in the file, perhaps in an old format, and the fork of
    Caffe that it is of: `fork` if the file can be read so, else the one that it shows.

    ConfigError names the forks if it is not clear.
    """
    data = _bytes(path, "a caffemodel", ConfigError)
    try:
        shown = fork_of(data, fork)
    except ConfigError as error:
        raise error.at(path) from None
    return _net(data, shown, path), shown


def _net(data: bytes, fork: str, path: str) -> NetParameter:
    if fork != CAFFE:
        data, found = to_own(data, fork)
        if found.strange:
            message = "%s: fields that %s does not have are left out: %s"
            log.warning(message, path, fork, ", ".join(dict.fromkeys(found.strange)))
    return _merge(NetParameter(), data, path, "a caffemodel", ConfigError)


def serialized(
    parts: Iterable[NetParameter], fork: str = CAFFE, source: str | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a net, or of parts that make one, under the numbers of a fork; what that
    lacks is left out, and named in the log at the end. `source` is the fork that they come from.
    """
    left_out: dict[str, None] = {}
    for part in parts:
        data = part.SerializePartialToString()
        if fork not in (CAFFE, OWN):
            data, found = from_own(data, fork, strict=fork != source)
            left_out |= dict.fromkeys(found.strange)
        yield data
    if left_out:
        log.warning("%s does not have, so that it is left out: %s", fork, ", ".join(left_out))


def read_state(path: str) -> SolverState:
    """The state of a .solverstate; ConfigError says what else the file is."""
    return _read(path, SolverState(), "a solver state", ConfigError)


def read_blob(path: str) -> BlobProto:
    """The blob of a .binaryproto, such as a mean; DataError says what else the file is."""
    return _read(path, BlobProto(), "a binaryproto", DataError)


def read_array(path: str) -> Floats:
    """The values of the blob of a .binaryproto, in its shape; DataError if it is damaged."""
    blob = read_blob(path)
    try:
        return blob_to_array(blob)
    except CaffeError as error:
        raise DataError(f"{path}: {error.message}") from None


def _read(path: str, message: M, kind: str, error: type[CaffeError]) -> M:
    return _merge(message, _bytes(path, kind, error), path, kind, error)


def _bytes(path: str, kind: str, error: type[CaffeError]) -> bytes:
    if sniff(path) != kind:
        raise mismatch(path, kind, error)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        raise mismatch(path, kind, error) from None


def _merge(message: M, data: bytes, path: str, kind: str, error: type[CaffeError]) -> M:
    try:
        message.MergeFromString(data)
    except DecodeError:
        raise mismatch(path, kind, error) from None
    _repair_strings(message)
    return message


def _repair_strings(message: Message) -> None:
    """Make strings text: C++ writes them in any encoding, Python shows such ones as bytes."""
    for field, value in message.ListFields():
        repeated = field.default_value == []
        if field.message_type is BlobProto.DESCRIPTOR:
            continue
        if field.message_type is not None:
            for child in value if repeated else [value]:
                _repair_strings(child)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if repeated:
                value[:] = map(_as_text, value)
            else:
                setattr(message, field.name, _as_text(value))


def _as_text(string: str | bytes) -> str:
    return string.decode("utf-8", "replace") if isinstance(string, bytes) else string


def blob_to_array(blob: BlobProto) -> Floats:
    """The values of a blob as float32, in its shape (four axes if a legacy extent is set).

    double_data wins over data; NVCaffe's raw_data is read where neither is set. Raises ConfigError
    if the number of values is not that of the shape.
    """
    return _shaped(blob, _values(blob, "double_data", "data", "raw_data"))


def blob_to_diff(blob: BlobProto) -> Floats | None:
    """The gradient of a blob, like its values, or None if the blob carries none."""
    values = _values(blob, "double_diff", "diff", "raw_diff")
    return _shaped(blob, values) if values.size else None


def array_to_blob(array: Array, diff: Array | None = None) -> BlobProto:
    """A BlobProto with the array's shape and, as float32, its values and perhaps its gradient."""
    blob = BlobProto(shape=BlobShape(dim=array.shape))
    blob.MergeFromString(_packed(_DATA_TAG, array))
    if diff is not None:
        assert diff.shape == array.shape, f"diff {diff.shape} of data {array.shape}"
        blob.MergeFromString(_packed(_DIFF_TAG, diff))
    return blob


def drop_raw(net: NetParameter, path: str) -> bool:
    """Turn the values that NVCaffe stores as raw bytes into those that every Caffe reads; False if
    there are none.

    The layers of `net` are changed. Raises ConfigError, which names the layer, if a blob's bytes do
    not fit its shape.
    """
    found = False
    for layer in net.layer:
        try:
            for blob in layer.blobs:
                found |= _drop_raw(blob)
        except ConfigError as error:
            raise error.at(f'{path}: layer "{layer.name}"') from None
    return found


def _drop_raw(blob: BlobProto) -> bool:
    """Change only what is raw: legacy extents and values in double precision stay."""
    if not any(map(blob.HasField, _RAW_FIELDS)):
        return False
    if blob.HasField("raw_data") and not (blob.double_data or blob.data):
        blob.MergeFromString(_packed(_DATA_TAG, blob_to_array(blob)))
    if blob.HasField("raw_diff") and not (blob.double_diff or blob.diff):
        diff = blob_to_diff(blob)
        if diff is not None:
            blob.MergeFromString(_packed(_DIFF_TAG, diff))
    for field in _RAW_FIELDS:
        blob.ClearField(field)
    return True


def _packed(tag: bytes, array: Array) -> bytes:
    """A packed float field, by joining bytes: protobuf's containers take values one by one."""
    payload = np.ascontiguousarray(array, "<f4").tobytes()
    length, prefix = len(payload), bytearray(tag)
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + payload


def _values(blob: BlobProto, double: str, single: str, raw: str) -> Array:
    """The flat values of the first of the three fields that is set."""
    if getattr(blob, double):
        return np.array(getattr(blob, double), np.float64)
    if getattr(blob, single) or not blob.HasField(raw):
        return _unpacked(blob, single)
    stored = getattr(blob, f"{raw}_type")
    if stored not in _RAW_TYPES:
        kind = Type.Name(stored)
        raise ConfigError(f"a blob holds values of type {kind}, which weights cannot have")
    data, dtype = getattr(blob, raw), np.dtype(_RAW_TYPES[stored])
    if len(data) % dtype.itemsize:
        whole = f"a whole number of {Type.Name(stored)} values"
        raise ConfigError(f"a blob holds {len(data)} bytes, which is not {whole}")
    return np.frombuffer(data, dtype)


def _unpacked(blob: BlobProto, field: str) -> Array:
    """A float field; where protobuf (before 7) gives it value by value, by its serialized form."""
    values = getattr(blob, field)
    if hasattr(values, "__array__") or len(values) < 1000:
        return np.array(values, np.float32)
    alone = BlobProto()
    alone.CopyFrom(blob)
    for other, _ in blob.ListFields():
        if other.name != field:
            alone.ClearField(other.name)
    length = 4 * len(values)
    header = 1 + -(-length.bit_length() // 7)  # bytes of the tag and of the length
    return np.frombuffer(alone.SerializeToString(), "<f4", len(values), header)


def _shaped(blob: BlobProto, values: Array) -> Floats:
    legacy = ("num", "channels", "height", "width")
    dims = list(blob.shape.dim)
    if any(blob.HasField(extent) for extent in legacy):
        dims = [getattr(blob, extent) for extent in legacy]
    if len(dims) <= 32 and min(dims, default=0) >= 0 and math.prod(dims) == values.size:
        with suppress(ValueError):  # numpy bounds what (0, 2^40, 2^40) would take without the 0
            return np.require(values.reshape(dims), np.float32, ["C", "W"])
    shape = " ".join(map(str, dims[:32])) + (" ..." if len(dims) > 32 else "")
    raise ConfigError(f"a blob holds {values.size} values, which does not fit its shape ({shape})")
