"""Files of safetensors, which PyTorch's and other worlds exchange, as the weights of layers.

A tensor "LAYER.weight" is blob 0 of a layer, "LAYER.bias" blob 1, "LAYER.3" blob 3. A layer that
has "running_mean" is a BatchNorm: its blobs are mean, variance, their weight, and as NVCaffe's
scale and bias. A map renames and transposes.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, UsageError, install, reason
from caffepy.device.blob import MAX_AXES, Array, shape_string
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import NetParameter

log = logging.getLogger(__name__)

TYPES = {
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    "BF16": "<u2",  # the upper half of a float32
    "BOOL": "?",
}
PARTS = ("weight", "bias")
STATISTICS = ("running_mean", "running_var", None, "weight", "bias")
SAYS_NOTHING = "num_batches_tracked"  # a count that PyTorch's BatchNorm stores


@dataclass
class Rule:
    """A line of a map: a tensor, its blob, or None to leave it out, and the axes of the tensor in
    the order of the blob. `place` is the line, for messages.
    """

    tensor: str
    blob: str | None
    axes: Sequence[int]
    place: str
    used: bool = field(default=False, compare=False)


class Map:
    """Names of tensors and of blobs "LAYER.weight"; the first rule that fits a name counts, and a
    name that none fits stays as it is. A `*` stands for any text, the same on both sides.
    """

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.rules = rules

    def to_blob(self, name: str) -> tuple[str | None, Rule | None]:
        """Return the name of the tensor's blob, None if it is left out, and the rule."""
        for rule in self.rules:
            if (parts := what_stars_stand_for(rule.tensor, name)) is not None:
                rule.used = True
                return rule.blob and _filled(rule.blob, parts), rule
        return name, None

    def to_tensor(self, names: Sequence[str]) -> tuple[str, Rule | None]:
        """Return the name of the tensor of a blob, which goes by several names, and the rule."""
        for rule in self.rules:
            for name in names:
                if rule.blob and (parts := what_stars_stand_for(rule.blob, name)) is not None:
                    rule.used = True
                    return _filled(rule.tensor, parts), rule
        return names[0], None

    def warn_of_unused(self, what: str) -> None:
        """Log the rules that fitted no name; ConfigError if there are rules and none did."""
        unused = [rule for rule in self.rules if not rule.used]
        if unused and len(unused) == len(self.rules):
            raise ConfigError(f"no {what} has a name of the map", unused[0].place)
        for rule in unused:
            log.warning("%s: no %s has this name", rule.place, what)


def read_map(path: str) -> Map:
    """Read a map: in each line the name of a tensor, that of its blob (LAYER.weight, LAYER.bias,
    LAYER.2, or - for none), and perhaps the tensor's axes in the order of the blob, as 3,2,0,1.

    Names with blanks stand in quotes; `#` begins a comment. UsageError if it cannot be read,
    ConfigError with the line that is wrong.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f'could not open "{path}": {reason(error)}') from None
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8", path) from None
    words = re.compile(r'"([^"]*)"|(#.*)|(\S+)')
    rules = []
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        found = [m[1] if m[1] is not None else m[3] for m in words.finditer(line) if not m[2]]
        if found:
            rules.append(_rule(found, place))
    return Map(rules)


def _rule(words: Sequence[str], place: str) -> Rule:
    if len(words) not in (2, 3):
        message = f"a line has a tensor, a blob, and perhaps axes, not {len(words)} words"
        raise ConfigError(message, place)
    tensor, blob = words[:2]
    if blob != "-" and tensor.count("*") != blob.count("*"):
        raise ConfigError(f'"{tensor}" and "{blob}" must have as many * each', place)
    axes: list[int] = []
    if len(words) > 2:
        given = words[2].split(",")
        axes = [int(axis) for axis in given if axis.isdecimal()]
        if sorted(axes) != list(range(len(given))):
            raise ConfigError(f'"{words[2]}" is no order of axes such as 3,2,0,1', place)
    return Rule(tensor, None if blob == "-" else blob, axes, place)


def what_stars_stand_for(pattern: str, name: str) -> Sequence[str] | None:
    """Return what each * of the pattern stands for in the name, or None if it does not fit.

    Each * but the last takes as little as it can.
    """
    pieces = pattern.split("*")
    if len(pieces) == 1:
        return [] if name == pattern else None
    first, last = pieces[0], pieces[-1]
    at, end = len(first), len(name) - len(last)
    if not name.startswith(first) or not name.endswith(last) or at > end:
        return None
    parts = []
    for piece in pieces[1:-1]:
        found = name.find(piece, at, end)
        if found < 0:
            return None
        parts.append(name[at:found])
        at = found + len(piece)
    return [*parts, name[at:end]]


def _filled(pattern: str, parts: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return pieces[0] + "".join(a + b for a, b in zip(parts, pieces[1:], strict=True))


def _transposed(array: Array, rule: Rule | None, name: str, back: bool = False) -> Array:
    if rule is None or not rule.axes:
        return array
    if len(rule.axes) != array.ndim:
        shape = shape_string(array.shape)
        raise ConfigError(f'"{name}" of shape {shape} has not {len(rule.axes)} axes', rule.place)
    return array.transpose(np.argsort(rule.axes) if back else rule.axes)


def read_tensors(path: str) -> dict[str, Array]:
    """Return the tensors of a file, as float32; ConfigError if it is damaged."""
    library = _library()
    try:
        with open(path, "rb") as file:
            stored = library.deserialize(file.read())
    except library.SafetensorError as error:
        raise ConfigError(f'"{path}" is damaged: {error}') from None
    tensors = {}
    for name, tensor in stored:
        kind = tensor["dtype"]
        if kind not in TYPES:
            raise ConfigError(f'"{name}" has values of type {kind}, which Caffe lacks', path)
        values = np.frombuffer(tensor["data"], TYPES[kind])
        if kind == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if len(tensor["shape"]) > MAX_AXES:
            axes = len(tensor["shape"])
            raise ConfigError(f'"{name}" has {axes} axes; a blob has {MAX_AXES} at most', path)
        tensors[name] = values.reshape(tensor["shape"])
    return tensors


def write_tensors(path: str, tensors: Mapping[str, Array]) -> None:
    """Write the tensors straight to `path`, as PyTorch's libraries take them."""
    from_numpy = _library().numpy
    contiguous = {name: np.require(x, np.float32, ["C"]) for name, x in tensors.items()}
    content = from_numpy.save(contiguous, metadata={"format": "pt"})
    with open(path, "wb") as file:  # the library's own file could be read by its owner alone
        file.write(content)


def to_net(tensors: Mapping[str, Array], names: Map) -> NetParameter:
    """Return the layers of these tensors; those without a place in a layer are logged.

    ConfigError if two tensors are one blob, or a layer lacks one.
    """
    layers: dict[str, dict[str, tuple[str, Array]]] = {}
    left_out = []
    for tensor, array in tensors.items():
        blob, rule = names.to_blob(tensor)
        if blob is None:
            continue
        layer, _, part = blob.rpartition(".")
        known = part in PARTS or part in STATISTICS or part.isdecimal()
        if not layer or not known:
            if rule and "*" not in rule.tensor:
                message = f'"{blob}" is no blob; it must end in .weight, .bias or a number'
                raise ConfigError(message, rule.place)
            if part != SAYS_NOTHING:
                left_out.append(tensor)
            continue
        parts = layers.setdefault(layer, {})
        if part in parts:
            first, second = sorted((parts[part][0], tensor))
            raise ConfigError(f'both "{first}" and "{second}" are "{blob}"')
        parts[part] = tensor, _transposed(array, rule, tensor)
    names.warn_of_unused("tensor")
    if left_out:
        log.warning("Left out, as they belong to no blob: %s", ", ".join(left_out))
    if not layers:
        raise ConfigError("holds no tensor that ends in .weight, .bias or a number")
    net = NetParameter()
    for layer, parts in layers.items():
        arrays = _in_order(layer, {part: array for part, (_, array) in parts.items()})
        net.layer.add(name=layer).blobs.extend(map(binary.array_to_blob, arrays))
    return net


def _in_order(layer: str, parts: dict[str, Array]) -> list[Array]:
    """Return the blobs of a layer by index."""
    order: Sequence[str | None] = STATISTICS if "running_mean" in parts else PARTS
    blobs: dict[int, Array] = {}
    for part, array in parts.items():
        index = int(part) if part.isdecimal() else order.index(part) if part in order else None
        if index is None or index in blobs:
            raise ConfigError(f'layer "{layer}" cannot have all of {", ".join(parts)}')
        blobs[index] = array
    if order is STATISTICS:
        blobs.setdefault(2, np.ones(1, np.float32))
    for i in range(len(blobs)):
        if i not in blobs:
            have, lacks = ", ".join(parts), order[i] if i < len(order) else i
            raise ConfigError(f'layer "{layer}" has {have}, but no {lacks}; see --map')
    return [blobs[i] for i in range(len(blobs))]


def to_tensors(layers: Iterable[tuple[str, str, Sequence[Array]]], names: Map) -> dict[str, Array]:
    """Return the tensors of layers, each a name, its type if it is known, and its blobs.

    ConfigError if two blobs are one tensor. Statistics that are no numbers once divided by their
    weight are logged, and kept.
    """
    tensors: dict[str, Array] = {}
    damaged: list[str] = []
    for layer, type_, blobs in layers:
        parts: dict[int, str] = {i: str(i) for i in range(len(blobs))}
        arrays = dict(enumerate(blobs))
        if _has_statistics(type_, blobs):
            weight = float(arrays.pop(2).reshape(-1)[0])
            with np.errstate(over="ignore", invalid="ignore"):
                for i in (0, 1):
                    arrays[i] = arrays[i] * np.float32(1 / weight if weight else 0)
            if not all(np.isfinite(arrays[i]).all() for i in (0, 1)):
                damaged.append(f"{layer} (weight {weight:g})")
            parts = {i: part for i, part in enumerate(STATISTICS) if part}
        elif len(blobs) <= len(PARTS):
            parts = dict(enumerate(PARTS))
        for i, array in arrays.items():
            blob = f"{layer}.{parts[i]}"
            tensor, rule = names.to_tensor([blob, f"{layer}.{i}"])
            if tensor in tensors:
                raise ConfigError(f'"{blob}" and another blob are both "{tensor}"')
            tensors[tensor] = _transposed(array, rule, blob, back=True)
    names.warn_of_unused("blob")
    if damaged:
        message = "Statistics that divided by their weight are not all finite, of layers: %s"
        log.warning(message, ", ".join(damaged))
    return tensors


def _has_statistics(type_: str, blobs: Sequence[Array]) -> bool:
    """True for the blobs of a BatchNorm, also where the file has no types."""
    return (
        type_ in ("", "BatchNorm")
        and len(blobs) in (3, 5)
        and blobs[2].size == 1
        and blobs[0].size == blobs[1].size
    )


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        remedy = install("safetensors")
        raise ConfigError(f"this file needs the package safetensors: {remedy}") from None
    return safetensors
