"""Binary nets of Caffe's forks: which fork a file is of, and its bytes under our own numbers.

Forks gave the same numbers to different fields. Names and weights of layers have the numbers of
Caffe in all of them (but C3D 1.0), so that weights are read without more; the settings of layers
are read by the numbers of the fork that the file shows to be of. `fork_numbers.tsv` has them: fork,
message, number, field; "-" for a number is a field that the fork lacks, though others, or Caffe,
have it. Fields that are not there have their own numbers, which are those of Caffe.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from caffepy.core.errors import ConfigError
from caffepy.core.names import nearest
from caffepy.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter, V1LayerParameter
from caffepy.proto.forks import first_of, further
from caffepy.proto.upgrade import V1_TYPES

CAFFE, OWN, C3D1 = "caffe", "caffepy", "c3d-1.0"
_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_numbers.tsv")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_WIRE = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_STRING: _BYTES,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_MESSAGE: _BYTES,
}

_MODES = {"LossParameter.NormalizationMode": {3: 100, 4: 3}}
_ENUMS = {"intel": _MODES, "r-fcn": _MODES}
"""Values of enums of forks, and our own ones."""

_LATER = (
    "BatchNorm BatchReindex Bias Clip Crop ELU Embed Filter Input LSTM LSTMUnit Log PReLU "
    "Parameter Python RNN Reduction Reshape SPP Scale Swish Tile"
)
_LAST_V1 = 39
"""The largest number of a layer type of V1 that is Caffe's own."""
_V1_NUMBERS = V1LayerParameter.LayerType.DESCRIPTOR.values_by_name
_CAFFES = frozenset(_LATER.split()) | {
    name for v1, name in V1_TYPES.items() if _V1_NUMBERS[v1].number <= _LAST_V1
}
_SSD = "AnnotatedData DetectionEvaluate DetectionOutput MultiBoxLoss Normalize Permute PriorBox "
_REGIONS = "PSROIPooling ROIPooling SmoothL1Loss SmoothL1LossOHEM SoftmaxWithLossOHEM "
_TYPES = {
    CAFFE: "",
    "ssd": _SSD + "SmoothL1Loss VideoData",
    "refinedet": _SSD + "SmoothL1Loss VideoData",
    "nvcaffe": _SSD + "Axpy DetectNetTransformation L1Loss SmoothL1Loss TRT VideoData",
    "intel": _SSD + _REGIONS + "BoxAnnotatorOHEM BoxData EvalDetection MnActivation Proposal "
    "RegionLoss Reorg SpatialDropout VideoData",
    "faster-rcnn": "ROIPooling SmoothL1Loss",
    "r-fcn": _REGIONS + "BoxAnnotatorOHEM",
    "segnet": "BN DenseImageData Upsample",
    "pspnet": "AdaptiveBiasChannel BN BiasChannel DenseCRF DomainTransform ImageSegData Interp "
    "MatRead MatWrite SegAccuracy UniqueLabel",
    "mobilenet-yolo": _SSD + "ConvolutionDepthwise DepthwiseConvolution EvalDetection HardSigmoid "
    "LaneData ReLU6 RegionLoss Reorg SmoothL1Loss Upsample YoloDetectionOutput YoloSeg Yolov3 "
    "Yolov3DetectionOutput",
    "happynear": "BN CenterLoss ChannelScale EltwiseAffine FocalLoss Flip InnerDistance Insanity "
    "LabelSpecificAdd LargeMarginInnerProduct Local MarginInnerProduct Normalize Noise "
    "PSROIPooling Proposal ROIPooling Resize SmoothL1Loss SubRegion TripletLoss",
    "happynear-master": "BN EltwiseAffine Insanity Local Noise Normalize ROIPooling SubRegion "
    "TripletLoss",
    "caffe-face": "CenterLoss",
    "sphereface": "MarginInnerProduct",
    "flownet2": "Accum BlackAugmentation ChannelNorm Correlation Correlation1D CustomData "
    "DataAugmentation Downsample FlowAugmentation FlowWarp GenerateAugmentationParameters L1Loss "
    "LpqLoss Mean NegReLU Resample",
    "spatial-transformer": "LocLoss PowerFile STLoss SpatialTransformer",
    "pva": "Proposal ROIPooling SmoothL1Loss",
    "c3d": "Convolution3D Deconvolution3D Pooling3D VideoData",
    "shufflenet": "ConvolutionDepthwise DepthwiseConvolution ShuffleChannel",
    "openpose": "CPMData ImResize Nms",
    "cascade-rcnn": "BboxAccuracy BoxGroupOutput DecodeBBox DetectionData DetectionEvaluate "
    "DetectionGroupAccuracy DetectionGroupLoss EvalData FrcnnOutput HardMining ProposalTarget "
    "PSROIPooling ROIAlign ROIPooling ScaleRoute SmoothL1Loss",
    "deformable": "DeformableConvolution ROIPooling SmoothL1Loss",
    "hwgq": "BinaryConvolution BinaryInnerProduct Quant",
    "mnc": "MaskPooling MaskResize ROIPooling ROIWarping SmoothL1Loss",
    "l-softmax": "BN LargeMarginInnerProduct",
}
"""Layer types that a fork has beside Caffe's."""

FORKS = (*_TYPES, C3D1, OWN)
"""Names of the forks: Caffe itself first, our own numbers last."""

_ALIASES = {"bvlc": CAFFE, "nvidia": "nvcaffe", "intel-caffe": "intel", "c3d-1.1": "c3d"}

_NAMED = {
    "cpm_transform_param": ("CPMData",),
    "image_data_param": ("ImageSegData", "ImageLabelmapData"),
    "norm_param": ("Normalize",),
    "recurrent_param": ("LSTM", "RNN"),
    "smooth_l1_loss_param": ("SmoothL1LossOHEM",),
    "st_param": ("SpatialTransformer",),
}
"""Types that a setting of another name belongs to."""


def fork_named(name: str) -> str:
    """Return a fork by one of its names; ConfigError with all names for another."""
    known = _ALIASES.get(name.lower(), name.lower())
    if known not in FORKS:
        raise ConfigError(
            f'unknown fork "{name}"{nearest(name, FORKS)} (known: {", ".join(FORKS)})'
        )
    return known


@cache
def _rows() -> dict[str, list[tuple[str, str, str]]]:
    """Rows of the table by fork: message, number, field."""
    rows: dict[str, list[tuple[str, str, str]]] = {fork: [] for fork in FORKS}
    with open(_TABLE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            rows[row["fork"]].append((row["message"], row["number"], row["field"]))
    return rows


@cache
def _of_forks() -> set[tuple[str, str]]:
    """Fields that have no number but that of the table: (message, field)."""
    return {(m, f) for rows in _rows().values() for m, number, f in rows if number != "-"}


@cache
def fields_of(fork: str, message: Descriptor) -> dict[int, FieldDescriptor]:
    """Our fields of a message by their numbers in a fork, those of Caffe that it lacks included."""
    if fork == OWN:
        return {field.number: field for field in message.fields}
    name = message.full_name.removeprefix("caffe.")
    rows = [(f, number) for m, number, f in _rows()[fork] if m == name]
    caffes = [(f, number) for m, number, f in _rows()[CAFFE] if m == name]
    found = {f.number: f for f in message.fields if (name, f.name) not in _of_forks()}
    found |= {int(number): message.fields_by_name[f] for f, number in caffes}
    moved = {f: int(number) for f, number in rows if number != "-"}
    found = {number: f for number, f in found.items() if f.name not in moved}
    return found | {number: message.fields_by_name[f] for f, number in moved.items()}


@cache
def _numbers(fork: str, message: Descriptor, without: bool = False) -> dict[str, int]:
    """Numbers of fields in a fork; `without` those that it lacks."""
    numbers = {field.name: number for number, field in fields_of(fork, message).items()}
    if without:
        name = message.full_name.removeprefix("caffe.")
        for of, number, lacking in _rows()[fork]:
            if (of, number) == (name, "-"):
                numbers.pop(lacking, None)
    return numbers


@cache
def _values(fork: str, back: bool, enum: str) -> dict[int, int]:
    values = _ENUMS.get(fork, {}).get(enum.removeprefix("caffe."), {})
    return {ours: theirs for theirs, ours in values.items()} if back else values


@dataclass
class Findings:
    """Parts of a message that mean nothing in a fork: as "Message.field" or "Message 149"."""

    strange: list[str] = field(default_factory=list)


class _DamagedError(ValueError):
    """Bytes that are no message."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _DamagedError
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Part(NamedTuple):
    """A field in bytes: number, wire type, start of the whole, start of its content, end."""

    number: int
    wire: int
    start: int
    content: int
    end: int


def _parts(data: bytes) -> Iterator[_Part]:
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        content = at
        if wire == _VARINT:
            _, at = _varint(data, at)
        elif wire == _BYTES:
            length, content = _varint(data, at)
            at = content + length
        elif wire in _WIDTHS:
            at += _WIDTHS[wire]
        else:
            raise _DamagedError
        if number == 0 or at > len(data):
            raise _DamagedError
        yield _Part(number, wire, start, content, at)


def _fits(field: FieldDescriptor, wire: int, content: bytes) -> bool:
    """True if a field may have such a content: as it is, or packed."""
    usual = _WIRE.get(field.type, _VARINT)
    if wire == usual:
        return True
    if wire != _BYTES or field.default_value != []:
        return False
    return len(content) % _WIDTHS[usual] == 0 if usual in _WIDTHS else content[-1:] < b"\x80"


def _field(number: int, wire: int, content: bytes) -> bytes:
    size = _encoded(len(content)) if wire == _BYTES else b""
    return _encoded(number << 3 | wire) + size + content


def translate(
    data: bytes,
    message: Descriptor,
    source: str,
    target: str,
    found: Findings | None = None,
    strict: bool = False,
) -> bytes:
    """Return the bytes of a message of one fork under the numbers of another.

    Blobs stay as they are. What has no meaning in one of the two is left out and counted in
    `found`, with `strict` also what the target lacks of Caffe's fields; numbers without any meaning
    stay. Either fork is OWN.
    """
    found = Findings() if found is None else found
    known, numbers = fields_of(source, message), _numbers(target, message, strict)
    seen = set()
    own = fields_of(OWN, message)
    name = message.full_name.removeprefix("caffe.")
    fork = target if source == OWN else source
    out = []
    for part in _parts(data):
        content = data[part.content : part.end]
        theirs = known.get(part.number)
        if theirs is None or not _fits(theirs, part.wire, content):
            found.strange.append(f"{name} {part.number}")
            if target == OWN and part.number not in own:
                out.append(data[part.start : part.end])
            continue
        place = theirs.name
        more = further(name, place) if source != OWN else first_of(name, place)
        if more and (source == OWN or place in seen):
            place = more
        seen.add(theirs.name)
        if place not in numbers:
            found.strange.append(f"{name}.{theirs.name}")
            continue
        if theirs.message_type is not None and theirs.message_type is not BlobProto.DESCRIPTOR:
            try:
                content = translate(content, theirs.message_type, source, target, found, strict)
            except _DamagedError:
                found.strange.append(f"{name}.{theirs.name}")
                continue
        elif theirs.enum_type is not None and part.wire == _VARINT:
            values = _values(fork, source == OWN, theirs.enum_type.full_name)
            number, _ = _varint(content, 0)
            content = _encoded(values.get(number, number)) if values else content
        out.append(_field(numbers[place], part.wire, content))
    return b"".join(out)


_SMALL = 64
"""Bytes of a blob's field that may say something of its fork; more are values."""


def _outline(data: bytes) -> tuple[bytes, bool]:
    """Return a net without the values of its blobs, and whether the blobs are those of C3D 1.0."""
    out, volumes = [], False
    for part in _parts(data):
        content = data[part.content : part.end]
        if part.wire == _BYTES and part.number in (2, 100):
            fields = []
            for inner in _parts(content):
                if inner.number == (7 if part.number == 100 else 6) and inner.wire == _BYTES:
                    blob = content[inner.content : inner.end]
                    volumes |= part.number == 2 and _is_volume(blob)
                    fields.append(_field(inner.number, _BYTES, _blob_outline(blob)))
                else:
                    fields.append(content[inner.start : inner.end])
            content = b"".join(fields)
        out.append(_field(part.number, part.wire, content))
    return b"".join(out), volumes


def _blob_outline(blob: bytes) -> bytes:
    """The fields of a blob whose contents are small, each once."""
    parts: dict[int, bytes] = {}
    for part in _parts(blob):
        if part.number in parts:
            break  # values that are not packed
        small = part.end - part.content <= _SMALL or part.wire != _BYTES
        content = blob[part.content : part.end] if small else b""
        parts[part.number] = _field(part.number, part.wire, content)
    return b"".join(parts.values())


def _is_volume(blob: bytes) -> bool:
    """True for a blob of C3D 1.0, whose width is where Caffe's blobs have their values."""
    for part in _parts(blob):
        if part.number >= 5:
            return part.number == 5 and part.wire == _VARINT
    return False


_NET = cast(Descriptor, NetParameter.DESCRIPTOR)


class Candidate(NamedTuple):
    """A fork by which an outline was read: how badly it fits, and what it says."""

    fork: str
    misfit: tuple[int, int, int]
    says: bytes


def _candidates(outline: bytes) -> list[Candidate]:
    found = []
    for fork in FORKS:
        if fork == C3D1:
            continue
        findings = Findings()
        says = translate(outline, _NET, fork, OWN, findings)
        blobs = _strange_in_blobs(says, fork)
        try:
            net = NetParameter.FromString(says)
        except DecodeError:
            continue
        foreign = [layer for layer in net.layer if not _has(fork, layer.type)]
        fitting = sum(map(_fitting, net.layer))
        strange = len(findings.strange) + blobs + (not net.IsInitialized())
        misfit = (strange, len(foreign), -fitting)
        found.append(Candidate(fork, misfit, says))
    if not found:
        raise _DamagedError
    return found


def _strange_in_blobs(net: bytes, fork: str) -> int:
    """Number of fields in blobs that the fork does not have."""
    known = fields_of(fork, BlobProto.DESCRIPTOR)
    return sum(
        part.number not in known
        for outer in _parts(net)
        if outer.number == 100
        for inner in _parts(net[outer.content : outer.end])
        if inner.number == 7
        for part in _parts(net[outer.content : outer.end][inner.content : inner.end])
    )


def _has(fork: str, layer_type: str) -> bool:
    return fork == OWN or layer_type in _CAFFES or layer_type in _TYPES[fork].split()


def _fitting(layer: LayerParameter) -> int:
    """Number of settings of a layer that are those of its type, by their names."""
    wanted = layer.type.lower()
    return sum(
        field.name.removesuffix("_param").replace("_", "") == wanted
        or layer.type in _NAMED.get(field.name, ())
        for field, _ in layer.ListFields()
        if field.name.endswith("_param")
    )


def fork_of(data: bytes, wanted: str | None = None) -> str:
    """Return the fork of a binary net: `wanted` if it fits without a rest, else what it shows.

    ConfigError names the candidates if they read the file in different ways.
    """
    found, best = _shown(data, wanted)
    if len({one.says for one in best}) > 1 and found is None:
        names = ", ".join(one.fork for one in best)
        raise ConfigError(
            f"this file may be of several forks of Caffe, which read it differently: {names}; "
            "name one, as in caffepy weights convert --fork"
        )
    return found or best[0].fork


def likely_fork(data: bytes) -> str:
    """Return the fork of a binary net, or the first of several: enough to read its weights."""
    found, best = _shown(data, None)
    return found or best[0].fork


def _shown(data: bytes, wanted: str | None) -> tuple[str | None, list[Candidate]]:
    """Return the fork if it is clear, and those that fit best."""
    try:
        outline, volumes = _outline(data)
        if volumes:
            return C3D1, []
        candidates = _candidates(outline)
    except (_DamagedError, ValueError):
        return CAFFE, []  # the parser says what is wrong
    least = min(one.misfit for one in candidates)
    best = [one for one in candidates if one.misfit == least]
    named = next((one for one in candidates if one.fork == wanted), None)
    fits = named is not None and (named.misfit[0] == 0 or least[0] > 0)
    if named and fits and named.misfit[2] <= best[0].misfit[2]:
        return named.fork, best
    if len({one.says for one in best}) == 1 or best[0].fork == CAFFE:
        return best[0].fork, best
    return wanted if fits else None, best


def to_own(data: bytes, fork: str) -> tuple[bytes, Findings]:
    """Return the bytes of a net of a fork under our numbers, and what has no meaning."""
    found = Findings()
    if fork == C3D1:
        return _from_volumes(data), found
    return translate(data, _NET, fork, OWN, found), found


def from_own(data: bytes, fork: str, strict: bool) -> tuple[bytes, Findings]:
    """Return the bytes of a net (or of a part of its fields) under a fork's numbers, and what the
    fork has not: with `strict` also fields of Caffe that came after it.
    """
    found = Findings()
    if fork == C3D1:
        return _to_volumes(NetParameter.FromString(data)), found
    return translate(data, _NET, OWN, fork, found, strict), found


# C3D 1.0: layers as Caffe's of 2014, but blobs with five axes and types of its own. Of its nets
# names, types, bottoms, tops and weights are read and written.

_VOLUMES = (
    "None Accuracy BNLL Concat Convolution Data Dropout EuclideanLoss Flatten HDF5Data HDF5Output "
    "Im2col ImageData InfogainLoss InnerProduct LRN MultinomialLogisticLoss Pooling ReLU Sigmoid "
    "Softmax SoftmaxWithLoss Split TanH WindowData EltwiseProduct Power SigmoidCrossEntropyLoss "
    "HingeLoss MemoryData Convolution3D Pooling3D VolumeData VideoData Deconvolution3D "
    "VideoSegmentationData VoxelSoftmax VoxelSoftmaxLoss VideoWithVoxelTruthData VoxelCustomLoss "
    "DownSampling"
)
_VOLUME_TYPES = _VOLUMES.split()
_VOLUME_FIELDS = {2: 3, 3: 4, 4: 1}  # bottom, top, name: their numbers today
_AXES = (1, 2, 3, 4, 5)


def _from_volumes(data: bytes) -> bytes:
    out = []
    for part in _parts(data):
        content = data[part.content : part.end]
        if part.number == 2 and part.wire == _BYTES:
            out.append(_field(100, _BYTES, _from_volume_layer(content)))
        elif part.number == 1:
            out.append(_field(1, _BYTES, content))
    return b"".join(out)


def _from_volume_layer(data: bytes) -> bytes:
    out = []
    for part in _parts(data):
        content = data[part.content : part.end]
        if part.number in _VOLUME_FIELDS:
            out.append(_field(_VOLUME_FIELDS[part.number], _BYTES, content))
        elif part.number == 5:
            number, _ = _varint(content, 0)
            if number < len(_VOLUME_TYPES):
                out.append(_field(2, _BYTES, _VOLUME_TYPES[number].encode()))
        elif part.number == 6:
            out.append(_field(7, _BYTES, _from_volume(content)))
    return b"".join(out)


def _from_volume(blob: bytes) -> bytes:
    sizes, values = dict.fromkeys(_AXES, b"\0"), []
    for part in _parts(blob):
        content = blob[part.content : part.end]
        if part.number in sizes:
            sizes[part.number] = content
        elif part.number in (6, 7):
            values.append(_field(part.number - 1, part.wire, content))
    shape = _field(1, _BYTES, b"".join(sizes.values()))
    return _field(7, _BYTES, shape) + b"".join(values)


def _to_volumes(net: NetParameter) -> bytes:
    out = [_field(1, _BYTES, net.name.encode())] if net.HasField("name") else []
    for layer in net.layer:
        fields = [_field(2, _BYTES, name.encode()) for name in layer.bottom]
        fields += [_field(3, _BYTES, name.encode()) for name in layer.top]
        fields.append(_field(4, _BYTES, layer.name.encode()))
        if layer.type in _VOLUME_TYPES:
            fields.append(_field(5, _VARINT, _encoded(_VOLUME_TYPES.index(layer.type))))
        fields += [_field(6, _BYTES, _to_volume(blob, layer.name)) for blob in layer.blobs]
        out.append(_field(2, _BYTES, b"".join(fields)))
    return b"".join(out)


def _to_volume(blob: BlobProto, layer: str) -> bytes:
    dims = list(blob.shape.dim)
    if not blob.HasField("shape"):
        dims = [blob.num, blob.channels, 1, blob.height, blob.width]
    if len(dims) > len(_AXES):
        raise ConfigError(f'layer "{layer}": a blob of {len(dims)} axes, where C3D 1.0 has five')
    sizes = [1] * (len(_AXES) - len(dims)) + dims
    out = [_field(axis, _VARINT, _encoded(size)) for axis, size in zip(_AXES, sizes, strict=True)]
    for part in _parts(blob.SerializeToString()):
        if part.number in (5, 6):
            content = blob.SerializeToString()[part.content : part.end]
            out.append(_field(part.number + 1, part.wire, content))
    return b"".join(out)
