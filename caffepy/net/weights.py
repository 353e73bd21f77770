"""Weights in and out of a net: caffemodels in binary and HDF5 form, matched by layer name."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING

from caffepy.core.errors import ConfigError, reason
from caffepy.core.files import replacing
from caffepy.core.hdf5 import check_contents
from caffepy.device.blob import Blob, shape_string
from caffepy.layer.batch_norm import BN
from caffepy.net import nvcaffe
from caffepy.net.net import Net
from caffepy.net.target_units import change_units, units_of
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter, NetParameter, TargetUnits
from caffepy.proto.fork_wire import CAFFE
from caffepy.proto.sniff import mismatch
from caffepy.proto.text import locate_layer

if TYPE_CHECKING:
    import h5py

log = logging.getLogger(__name__)

MAX_BINARY = 1 << 31
"""Bytes that a binary protobuf file must stay below."""


def check_weights(path: str) -> None:
    """Raise ConfigError unless the file looks like weights, binary or HDF5."""
    if binary.sniff(path) not in ("HDF5", "a caffemodel"):
        raise mismatch(path, "a caffemodel")


def load_weights(net: Net, path: str) -> set[str]:
    """Copy the weights of a caffemodel (binary or HDF5, by content) into the layers of the same
    names.

    Returns the names of these layers. Weights that learned normalized targets are changed for a net
    that makes none (`target_units`). ConfigError names the file and the layer whose blobs do not
    fit.
    """
    source = None if binary.sniff(path) == "HDF5" else binary.read_net(path)
    try:
        return load_hdf5(net, path) if source is None else copy_trained(net, source)
    except ConfigError as error:
        raise error.at(path) from None


def layers_in(path: str) -> list[str]:
    """Return the names of the layers with weights in a caffemodel."""
    if binary.sniff(path) != "HDF5":
        return [layer.name for layer in binary.read_net(path).layer if layer.blobs]
    with open_hdf5(path) as file:
        return [name for name, group in file["data"].items() if len(group)]


def copy_trained(net: Net, source: NetParameter) -> set[str]:
    """Copy blobs and stored diffs to the first layer of the same name; return the names.

    ConfigError if blobs of a name differ in number or shape.
    """
    targets = {name: i for i, name in reversed(list(enumerate(net.layer_names)))}
    filled = set()
    for layer in nvcaffe.adapt(source, net):
        if layer.name not in targets:
            log.info("Ignoring source layer %s", layer.name)
            continue
        target = net.layers[targets[layer.name]]
        blobs = target.blobs
        if len(blobs) != len(layer.blobs):
            raise ConfigError(
                f"Incompatible number of blobs for layer {layer.name}: {len(layer.blobs)} in the "
                f"file, {len(blobs)} in the net"
            )
        for j, (blob, proto) in enumerate(zip(blobs, layer.blobs, strict=True)):
            array, shape = binary.blob_to_array(proto), blob.shape
            # a legacy (num, channels, height, width), and C3D 1.0's five axes, are the shape padded
            # with 1 from the left
            is_legacy = not proto.HasField("shape") or array.ndim == 5
            if array.shape != shape and not (
                is_legacy and array.shape == (1,) * (array.ndim - len(shape)) + shape
            ):
                advice = (
                    "To learn this layer's parameters from scratch rather than copying from a "
                    "saved net, rename the layer."
                    if net.phase == TRAIN
                    else "These weights are of another net; give the definition that they were "
                    "trained with."
                )
                if isinstance(target, BN) and array.shape == shape[:2]:
                    advice = (
                        "The last blob of such a BN is the variance in some forks, in happynear's "
                        "1 / sqrt(variance + eps): make it the variance, and all of them 1 C 1 1."
                    )
                raise ConfigError(
                    f"Cannot copy param {j} weights from layer '{layer.name}'; shape mismatch.  "
                    f"Source param shape is {shape_string(array.shape)}; target param shape is "
                    f"{shape_string(shape)}. {advice}"
                )
            blob.host_data[...] = array.reshape(shape)
            diff = binary.blob_to_diff(proto)
            if diff is not None:
                blob.host_diff[...] = diff.reshape(shape)
        filled.add(layer.name)
    stored = {x.name: x.target_units for x in source.layer if x.HasField("target_units")}
    change_units(net, stored, units_of(net))
    return filled


def to_proto(net: Net, diff: bool = False) -> NetParameter:
    """Return the net as Caffe saves it: its name, and every layer (splits too) with its blobs."""
    return NetParameter(name=net.name, layer=_layers(net, diff))


def _layers(net: Net, diff: bool) -> Iterator[LayerParameter]:
    units = units_of(net)
    for layer in net.layers:
        saved = LayerParameter()
        saved.CopyFrom(layer.param)
        del saved.blobs[:]
        if layer.param.name in units:
            saved.target_units.CopyFrom(units[layer.param.name])
        saved.blobs.extend(
            binary.array_to_blob(b.host_data, b.host_diff if diff else None) for b in layer.blobs
        )
        yield saved


def check_names(net: Net, hdf5: bool) -> None:
    """Raise ConfigError if layers in a caffemodel could not be found again by their names."""
    names, pairs = net.layer_names, zip(net.layer_names, net.layers, strict=True)
    with_blobs = {name: layer.blobs for name, layer in pairs if layer.blobs}
    twice = [name for name in with_blobs if names.count(name) > 1]
    if twice:
        places = (
            locate_layer(net.path or "", i.param) for i in net.layers if i.param.name in twice
        )
        lines = sorted({int(place.split(":")[-2]) for place in places if place.count(":") > 1})
        where = f" (lines {', '.join(map(str, lines))})" if lines else ""
        raise ConfigError(
            f"several layers are named {_quoted(twice)}{where}, so a snapshot could "
            "not be loaded again; rename them"
        )
    if not hdf5:
        return
    arrays = {f"{name}/{j}" for name, blobs in with_blobs.items() for j in range(len(blobs))}
    bad = [name for name in names if "\0" in name or {"", "."} & set(name.split("/"))]
    bad += [name for name in names if any(f"{name}/".startswith(f"{array}/") for array in arrays)]
    if bad:
        raise ConfigError(
            f"HDF5 cannot hold layers of the names {_quoted(bad)}; rename them or set "
            "snapshot_format: BINARYPROTO"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name, ensure_ascii=False) for name in names)


def save_binary(net: Net, path: str, diff: bool = False) -> None:
    """Write a binary caffemodel, whole or not at all; ConfigError if that fails."""
    with _whole(path) as temporary:
        write_binary(net, temporary, diff)


def save_hdf5(net: Net, path: str, diff: bool = False) -> None:
    """Write an HDF5 caffemodel, whole or not at all; ConfigError if that fails."""
    with _whole(path) as temporary:
        write_hdf5(net, temporary, diff)


@contextmanager
def _whole(path: str) -> Iterator[str]:
    try:
        with replacing(path) as temporary:
            yield temporary
    except ConfigError as error:
        raise error.at(path) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {reason(error)}", path) from None


def write_binary(net: Net, path: str, diff: bool = False) -> None:
    """Write a binary caffemodel straight to `path`."""
    write_layers(net.name, _layers(net, diff), path, "use snapshot_format: HDF5")


def write_layers(
    name: str,
    layers: Iterable[LayerParameter],
    path: str,
    remedy: str,
    fork: str = CAFFE,
    source: str | None = None,
) -> None:
    """Write a net of these layers, which came from the fork `source`, as a binary caffemodel of a
    fork; ConfigError with the remedy if it gets too large.

    Concatenated protobuf messages read as one, so only one layer at a time is copied.
    """
    with open(path, "wb") as file:
        size = 0
        parts = (NetParameter(layer=[layer]) for layer in layers)
        for data in binary.serialized(chain([NetParameter(name=name)], parts), fork, source):
            size += file.write(data)
            if size >= MAX_BINARY:
                raise ConfigError(f"a binary caffemodel holds less than 2 GiB; {remedy}")


@contextmanager
def new_hdf5(path: str) -> Iterator["h5py.File"]:
    """Yield an HDF5 file to fill; write it to `path` when the block ends.

    It is built in memory: the HDF5 library can crash the process when the disk is full.
    """
    import h5py  # here, as where else it is used: it takes 20 ms

    content = BytesIO()
    with h5py.File(content, "w") as file:
        yield file
    with open(path, "wb") as target:
        target.write(content.getbuffer())


def write_hdf5(net: Net, path: str, diff: bool = False) -> None:
    """Write an HDF5 caffemodel (`/data/<layer>/<index>`, with `diff` also `/diff/...`) straight to
    `path`.

    Parameters that a layer shares with an earlier owner are stored with the owner only, as in
    Caffe.
    """
    check_names(net, hdf5=True)
    owners = {(param.layer, param.index) for param in net.learnable}
    units = units_of(net)
    with new_hdf5(path) as file:
        for i, (name, layer) in enumerate(zip(net.layer_names, net.layers, strict=True)):
            group = file.require_group(f"data/{name}")
            for j, blob in enumerate(layer.blobs):
                if (i, j) in owners:
                    group.create_dataset(str(j), data=blob.host_data)
            if name in units:
                write_units(group, units[name])
            if diff:
                group = file.require_group(f"diff/{name}")
                for j, blob in enumerate(layer.blobs):
                    group.create_dataset(str(j), data=blob.host_diff)


def load_hdf5(net: Net, path: str) -> set[str]:
    """Copy the weights of an HDF5 caffemodel, of equal shapes, by layer name; return the names.

    ConfigError for other shapes, or a file without weights.
    """
    import h5py

    owned = {(param.layer, param.index) for param in net.learnable}
    with open_hdf5(path) as file:
        if "data" not in file:
            raise ConfigError("has no group /data, so it holds no weights (is it a solver state?)")
        items: dict[str, h5py.HLObject] = {}  # also nested ones: layer names with a slash
        file["data"].visititems(items.__setitem__)
        stored = {name for name, item in items.items() if isinstance(item, h5py.Group)}
        for i, name in enumerate(net.layer_names):
            if name in stored and name not in net.layer_names[:i]:
                indices = {j for k, j in owned if k == i}
                _load_layer(file["data"][name], net.layers[i].blobs, name, indices)
        for name in sorted(stored - set(net.layer_names)):
            log.info("Ignoring source layer %s", name)
        filled = stored & set(net.layer_names)
        held = ((name, read_units(file["data"][name])) for name in filled)
        change_units(net, {name: units for name, units in held if units}, units_of(net))
        return filled


def write_units(group: "h5py.Group", units: TargetUnits) -> None:
    """Write the units of a layer's predictions as attributes of its group in an HDF5 file."""
    group.attrs["target_mean"], group.attrs["target_std"] = units.mean, units.std


def read_units(group: "h5py.Group") -> TargetUnits | None:
    """Return what `write_units` wrote, or None."""
    attributes = group.attrs
    if not {"target_mean", "target_std"} <= set(attributes):
        return None
    return TargetUnits(mean=attributes["target_mean"], std=attributes["target_std"])


def check_hdf5(path: str) -> None:
    """Raise ConfigError if the structure of an HDF5 file is damaged."""
    with open_hdf5(path):
        pass


@contextmanager
def open_hdf5(path: str) -> Iterator["h5py.File"]:
    """Yield the file to read; any error in the block becomes a ConfigError. All of its structure
    is looked at first.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            check_contents(file)
            yield file
    except ConfigError as error:
        raise error.at(path) from None
    except Exception as error:  # h5py fails in many ways on damaged files
        raise ConfigError(f"cannot be read as HDF5: {error}", path) from None


def _load_layer(group: "h5py.Group", blobs: list[Blob], name: str, owned: set[int]) -> None:
    import h5py

    stored = [key for key, item in group.items() if isinstance(item, h5py.Dataset)]
    if len(stored) > len(blobs):
        raise ConfigError(
            f"Incompatible number of blobs for layer {name}: {len(stored)} in the file, "
            f"{len(blobs)} in the net"
        )
    for j, blob in enumerate(blobs):
        if str(j) not in stored:
            if j in owned:
                raise ConfigError(
                    f"Incompatible number of blobs for layer {name}: param {j} is not in the file"
                )
            continue
        array = group[str(j)]
        if array.shape != blob.shape:
            raise ConfigError(
                f"Cannot load blob from hdf5; shape mismatch for param {j} of layer '{name}'.  "
                "Source shape is "
                f"{shape_string(array.shape)}; target shape is {shape_string(blob.shape)}"
            )
        blob.host_data[...] = array[()]
