"""`caffepy weights`: files of weights without a net: their content, conversion between forms."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from caffepy.commands.safetensors import (
    Map,
    read_map,
    read_tensors,
    to_net,
    to_tensors,
    write_tensors,
)
from caffepy.core.errors import CaffeError, ConfigError, UsageError
from caffepy.core.files import written
from caffepy.device.blob import Array, shape_string
from caffepy.net.target_units import make_plain
from caffepy.net.weights import (
    new_hdf5,
    open_hdf5,
    read_units,
    write_layers,
    write_units,
)
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter
from caffepy.proto.fork_wire import CAFFE, OWN, fork_named
from caffepy.proto.upgrade import upgrade_net
from caffepy.report.text import columns, number, printable

log = logging.getLogger(__name__)

HDF5_NAMES = (".h5", ".hdf5")
SAFETENSORS = "a safetensors file"
STATE_FACTS = ("iter", "learned_net", "current_step")
LEGACY_AXES = {"Convolution": 4, "Deconvolution": 4, "InnerProduct": 2}


@dataclass(frozen=True)
class BlobInfo:
    """A blob: its shape, and statistics of its finite values (None if there are none)."""

    shape: tuple[int, ...]
    count: int
    min: float | None
    mean: float | None
    max: float | None
    std: float | None
    not_finite: int


@dataclass(frozen=True)
class LayerInfo:
    """The blobs stored under one name; HDF5 files do not state the layer's type."""

    name: str
    type: str
    blobs: Sequence[BlobInfo]


@dataclass(frozen=True)
class FileInfo:
    """A file: `kind` in words, facts about the whole, the blobs by layer (or history, or mean)."""

    kind: str
    facts: dict[str, Any]
    layers: Sequence[LayerInfo]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(blob.count for layer in self.layers for blob in layer.blobs)

    def json(self) -> str:
        """Return an object: kind, facts, number of values, and the layers with their blobs."""
        layers = [
            {"name": layer.name, "type": layer.type, "blobs": [vars(blob) for blob in layer.blobs]}
            for layer in self.layers
        ]
        return json.dumps({"kind": self.kind, **self.facts, "count": self.count, "layers": layers})

    def table(self) -> str:
        """Return the kind and the facts, a line a blob, and the total."""
        rows = [["layer", "type", "blob", "shape", "min", "mean", "max", "std", "not finite"]]
        for layer in self.layers:
            for i, blob in enumerate(layer.blobs):
                values = blob.min, blob.mean, blob.max, blob.std
                figures = ["-" if x is None else number(x) for x in values]
                place = [layer.name, layer.type, str(i), shape_string(blob.shape)]
                rows.append([*place, *figures, f"{blob.not_finite:,}"])
        if not any(blob.not_finite for layer in self.layers for blob in layer.blobs):
            rows = [row[:-1] for row in rows]
        facts = [printable(f"{name}: {value}") for name, value in self.facts.items() if value != ""]
        total = f"{self.count:,} values, {4 * self.count:,} bytes as float32"
        return "\n".join([self.kind, *facts, "", *columns(rows, left=4), "", total])


def show(path: str) -> FileInfo:
    """Read a caffemodel or solver state (binary or HDF5) or a mean file, or raise ConfigError."""
    kind = binary.sniff(path)
    if kind == "HDF5":
        with open_hdf5(path) as file:
            if not _is_state(file):
                stored = _stored(_weights(file))
                layers = [_layer_info(name, "", blobs.values()) for name, blobs in stored]
                return FileInfo("weights (HDF5)", {}, layers)
            facts: dict[str, Any] = {}
            for key in STATE_FACTS:
                if key in file:
                    value = np.ravel(file[key][()])[0]
                    facts[key] = value.decode() if isinstance(value, bytes) else value.item()
            history = file["history"]
            arrays = (history[key][()] for key in sorted(filter(str.isdigit, history), key=int))
            return FileInfo("solver state (HDF5)", facts, [_layer_info("history", "", arrays)])
    if kind == "a solver state":
        state = binary.read_state(path)
        facts = {name: getattr(state, name) for name in STATE_FACTS}
        history = _layer_info("history", "", map(binary.blob_to_array, state.history))
        return FileInfo("solver state (binary)", facts, [history])
    if kind == "a binaryproto":
        mean = binary.read_array(path)
        images = mean.reshape(-1, *mean.shape[-2:]) if mean.ndim > 2 else mean.reshape(-1, 1, 1)
        channels = ", ".join(map(number, images.mean((1, 2), np.float64)))
        facts = {"mean of each channel": channels}
        return FileInfo("mean file", facts, [_layer_info("mean", "", [mean])])
    if kind == SAFETENSORS:
        tensors = [_layer_info(name, "", [x]) for name, x in read_tensors(path).items()]
        return FileInfo("tensors (safetensors)", {}, tensors)
    net = binary.read_net(path)
    layers = [_layer_info(layer.name, layer.type, _arrays(path, layer)) for layer in net.layer]
    return FileInfo("weights (binary)", {"name": net.name}, layers)


def convert(source: str, target: str, fork: str | None = None, names: str | None = None) -> None:
    """Write the weights in `source` to `target`: as HDF5 if that ends in .h5 or .hdf5, as tensors
    if it ends in .safetensors, else binary.

    The target is of the same fork of Caffe as the source, or of `fork`, which is also taken for the
    source's if that does not show its own; ConfigError names the forks if nothing does. Old formats
    are upgraded, and NVCaffe's raw bytes become floats. Stored gradients are kept, but not as
    tensors. Weights of normalized targets become those of targets in tensors and files of forks.
    Tensors have the names in the map at the path `names`, if it is given. ConfigError for a file
    without weights, or with some that the other form cannot hold; UsageError for one that cannot be
    written.
    """
    wanted = fork_named(fork) if fork else None
    ending, kind = target.lower(), binary.sniff(source)
    if names and kind in ("a caffemodel", "HDF5") and not ending.endswith(".safetensors"):
        raise UsageError("--map is for files of safetensors, and neither of the two is one")
    if kind == SAFETENSORS and ending.endswith(".safetensors"):
        raise UsageError("both files are of safetensors; one must be a caffemodel")
    if ending.endswith(HDF5_NAMES):
        _write_hdf5(target, _net(source, names), source)
    elif ending.endswith(".safetensors"):
        net = read_weights(source)
        for layer in net.layer:
            make_plain(layer)
        layers = ((x.name, x.type, _modern_arrays(source, x)) for x in net.layer if x.blobs)
        tensors = to_tensors(layers, read_map(names) if names else Map())
        with written(target) as temporary:
            write_tensors(temporary, tensors)
    else:
        if kind == "a caffemodel":
            stored, shown = binary.read_stored_net(source, wanted)
            net = upgrade_net(stored, source)
        else:
            net, shown = _net(source, names), CAFFE
        binary.drop_raw(net, source)
        if {wanted, shown} - {None, CAFFE, OWN} or wanted == CAFFE:
            for layer in net.layer:
                make_plain(layer)
        try:
            with written(target) as temporary:
                remedy = "give a file name in .h5"
                write_layers(net.name, net.layer, temporary, remedy, wanted or shown, shown)
        except ConfigError as error:
            raise error.at(target) from None
    log.info("Wrote the weights in %s to %s", source, target)


def _net(source: str, names: str | None) -> NetParameter:
    """Return the net of a file of weights or tensors."""
    if binary.sniff(source) != SAFETENSORS:
        return read_weights(source)
    rules = read_map(names) if names else Map()
    tensors = read_tensors(source)
    try:
        return to_net(tensors, rules)
    except ConfigError as error:
        raise error.at(source) from None


def _is_state(file: h5py.File) -> bool:
    return isinstance(file.get("history"), h5py.Group) and "iter" in file


def _weights(file: h5py.File) -> h5py.Group:
    group = file.get("data")
    if not isinstance(group, h5py.Group):
        held = ", ".join(file) or "nothing"
        raise ConfigError(f"has no group /data, so it holds no weights (it holds {held})")
    return group


def _stored(group: h5py.Group) -> list[tuple[str, dict[int, Array]]]:
    """Return the layers of an HDF5 file and their arrays by index; "a/b" is a group in a group."""
    items: dict[str, h5py.HLObject] = {}
    group.visititems(items.__setitem__)
    layers = []
    for name, item in items.items():
        if isinstance(item, h5py.Group):
            arrays = {
                int(key): x[()]
                for key, x in item.items()
                if isinstance(x, h5py.Dataset) and key.isdigit()
            }
            if arrays or not len(item):
                layers.append((name, dict(sorted(arrays.items()))))
    return layers


def read_weights(path: str) -> NetParameter:
    """Return the net of a file of weights; an HDF5 file has only names and blobs of layers.

    ConfigError for a solver state, and an HDF5 file in which a layer has only some of its blobs.
    """
    kind = binary.sniff(path)
    is_state = f'"{path}" is a solver state, not weights; train --snapshot goes on from it'
    if kind == "a solver state":
        raise ConfigError(is_state)
    if kind != "HDF5":
        return binary.read_net(path)
    net = NetParameter()
    with open_hdf5(path) as file:
        if not _is_state(file):
            diffs = dict(_stored(file["diff"])) if isinstance(file.get("diff"), h5py.Group) else {}
            for name, arrays in _stored(_weights(file)):
                if list(arrays) != list(range(len(arrays))):
                    raise ConfigError(
                        f'layer "{name}": only blobs {", ".join(map(str, arrays))} are stored, as '
                        "the others are shared with another layer; such weights need their net: "
                        "load and save them from Python"
                    )
                # a layer that stores none, since it shares all, must not stand in a binary file
                if arrays:
                    blobs, known = net.layer.add(name=name).blobs, diffs.get(name, {})
                    blobs.extend(binary.array_to_blob(x, known.get(i)) for i, x in arrays.items())
                    if units := read_units(file["data"][name]):
                        net.layer[-1].target_units.CopyFrom(units)
            return net
    raise ConfigError(is_state)


def _arrays(path: str, layer: LayerParameter) -> Iterator[Array]:
    try:
        yield from map(binary.blob_to_array, layer.blobs)
    except CaffeError as error:
        raise error.at(f'{path}: layer "{layer.name}"') from None


def _modern_arrays(path: str, layer: LayerParameter) -> list[Array]:
    """Return the blobs in the shapes that today's layers give them."""
    arrays = []
    for i, array in enumerate(_arrays(path, layer)):
        legacy = not layer.blobs[i].HasField("shape")
        arrays.append(array.reshape(_modern(array.shape, layer.type, i)) if legacy else array)
    return arrays


def _layer_info(name: str, type: str, arrays: Iterable[Array]) -> LayerInfo:
    blobs = []
    for array in arrays:
        finite = np.isfinite(array)
        values = array if finite.all() else array[finite]
        low = mean = high = std = None
        if values.size:
            low, high = float(values.min()), float(values.max())
            mean, std = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
        damaged = array.size - values.size
        blobs.append(BlobInfo(array.shape, array.size, low, mean, high, std, damaged))
    return LayerInfo(name, type, blobs)


def _write_hdf5(path: str, net: NetParameter, source: str) -> None:
    """Write a group for each layer, as Caffe does, also of parameters that it shares."""
    with written(path) as temporary, new_hdf5(temporary) as file:
        nested = [layer.name for layer in net.layer if "/" in layer.name]
        if nested:
            warning = (
                'Caffe itself does not read layers with a slash in their names from HDF5: "%s"'
            )
            log.warning(warning, nested[0])
        stored_names = set[str]()
        for layer in net.layer:
            group = file.require_group(f"data/{layer.name}")
            if layer.name in stored_names and layer.blobs:
                raise ConfigError(
                    f'two layers are named "{layer.name}", which HDF5 cannot tell apart', source
                )
            stored_names.update([layer.name] if layer.blobs else [])
            if layer.HasField("target_units"):
                write_units(group, layer.target_units)
            for i, array in enumerate(_modern_arrays(source, layer)):
                group.create_dataset(str(i), data=array)
                diff = binary.blob_to_diff(layer.blobs[i])
                if diff is not None:
                    diffs = file.require_group(f"diff/{layer.name}")
                    diffs.create_dataset(str(i), data=diff.reshape(array.shape))


def _modern(shape: tuple[int, ...], type: str, index: int) -> tuple[int, ...]:
    """Return the shape of a blob from when all had four axes: HDF5 is read by exact shapes."""
    axes = LEGACY_AXES.get(type, 4) if index == 0 else 1 if type in LEGACY_AXES else 4
    return shape[-axes:] if all(size == 1 for size in shape[:-axes]) else shape
