"""Weights in and out of a net: caffemodels in binary and HDF5 form, matched by layer name."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO

import h5py
import numpy as np

from caffepy.blob import Array, Blob, shape_string
from caffepy.errors import ConfigError
from caffepy.files import replacing
from caffepy.net import nvcaffe
from caffepy.net.net import Net
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter

log = logging.getLogger(__name__)

LEARN_ANEW = "To learn this layer's parameters from scratch rather than copying from a saved net, rename the layer."


def load_weights(net: Net, path: str) -> None:
    """Copy the weights in a caffemodel into the layers of the same names; binary or HDF5 is told by content.

    ConfigError names the file and the layer whose blobs do not fit.
    """
    source = None if binary.sniff(path) == "HDF5" else binary.read_net(path)
    try:
        if source is None:
            load_hdf5(net, path)
        else:
            copy_trained(net, source)
    except ConfigError as error:
        raise error.at(path) from None


def copy_trained(net: Net, source: NetParameter) -> None:
    """Copy blobs (and diffs, where stored) of each source layer to the first layer of that name."""
    targets = {name: i for i, name in reversed(list(enumerate(net.layer_names)))}
    for layer in nvcaffe.adapt(source, net):
        if layer.name not in targets:
            log.info("Ignoring source layer %s", layer.name)
            continue
        blobs = net.layers[targets[layer.name]].blobs
        if len(blobs) != len(layer.blobs):
            raise ConfigError(
                f"Incompatible number of blobs for layer {layer.name}: {len(layer.blobs)} in the file, "
                f"{len(blobs)} in the net"
            )
        for j, (blob, proto) in enumerate(zip(blobs, layer.blobs, strict=True)):
            _copy_blob(blob, proto, layer.name, j)


def _copy_blob(blob: Blob, proto: BlobProto, layer: str, index: int) -> None:
    array = binary.blob_to_array(proto)
    if not _fits(array.shape, blob.shape, legacy=not proto.HasField("shape")):
        raise ConfigError(
            f"Cannot copy param {index} weights from layer '{layer}'; shape mismatch.  Source param shape is "
            f"{shape_string(array.shape)}; target param shape is {shape_string(blob.shape)}. {LEARN_ANEW}"
        )
    blob.data[...] = array.reshape(blob.shape)
    diff = proto.double_diff or proto.diff
    if len(diff) == blob.count > 0:
        blob.diff[...] = np.asarray(diff, blob.dtype).reshape(blob.shape)


def _fits(source: tuple[int, ...], target: tuple[int, ...], legacy: bool) -> bool:
    """Equal shapes, or a legacy (num, channels, height, width) that equals the target right-aligned."""
    if source == target:
        return True
    return legacy and len(target) <= 4 and source == (1,) * (4 - len(target)) + target


def to_proto(net: Net, diff: bool = False) -> NetParameter:
    """The net as Caffe saves it: its name and every layer as used (splits included) with its blobs."""
    return NetParameter(name=net.name, layer=_layers(net, diff))


def _layers(net: Net, diff: bool) -> Iterator[LayerParameter]:
    for layer in net.layers:
        saved = LayerParameter()
        saved.CopyFrom(layer.param)
        del saved.blobs[:]
        saved.blobs.extend(binary.array_to_blob(b.data, b.diff if diff else None) for b in layer.blobs)
        yield saved


def save_binary(net: Net, path: str, diff: bool = False) -> None:
    """Write a binary caffemodel, whole or not at all.

    Messages one after the other read as one message, so only one layer at a time is copied.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        size = file.write(NetParameter(name=net.name).SerializeToString())
        for layer in _layers(net, diff):
            size += file.write(NetParameter(layer=[layer]).SerializeToString())
            if size >= 1 << 31:
                raise ConfigError("a binary caffemodel holds less than 2 GiB; use snapshot_format: HDF5", path)


@contextmanager
def new_hdf5(path: str) -> Iterator[h5py.File]:
    """An HDF5 file to fill, written whole or not at all when the block ends.

    It grows in memory: the HDF5 library can crash the process when the disk is full.
    """
    content = BytesIO()
    with h5py.File(content, "w") as file:
        yield file
    with replacing(path) as temporary, open(temporary, "wb") as target:
        target.write(content.getbuffer())


def save_hdf5(net: Net, path: str, diff: bool = False) -> None:
    """Write an HDF5 caffemodel (`/data/<layer>/<index>`, with `diff` also `/diff/...`), whole or not at all.

    Parameters that a layer shares with an earlier owner are stored with the owner only, as in Caffe.
    """
    owners = set(net.learnable_owner)
    with new_hdf5(path) as file:
        for i, (name, layer) in enumerate(zip(net.layer_names, net.layers, strict=True)):
            group = file.require_group(f"data/{name}")
            for j, blob in enumerate(layer.blobs):
                if (i, j) in owners:
                    group.create_dataset(str(j), data=blob.data)
            if diff:
                group = file.require_group(f"diff/{name}")
                for j, blob in enumerate(layer.blobs):
                    group.create_dataset(str(j), data=blob.diff)


def load_hdf5(net: Net, path: str) -> None:
    """Copy the weights of an HDF5 caffemodel into the layers of the same names; shapes must be equal."""
    owners = set(net.learnable_owner)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ConfigError(f"cannot be read as HDF5: {error}", path) from None
    with file:
        if "data" not in file:
            raise ConfigError("has no group /data, so it holds no weights (is it a solver state?)", path)
        stored = set(_layer_groups(file["data"]))
        for i, name in enumerate(net.layer_names):
            if name in stored and name not in net.layer_names[:i]:
                _load_layer(file["data"][name], net.layers[i].blobs, name, {j for k, j in owners if k == i})
        for name in sorted(stored - set(net.layer_names)):
            log.info("Ignoring source layer %s", name)


def _layer_groups(data: h5py.Group) -> Iterable[str]:
    """Names of the groups of layers, nested ones (a layer name with a slash) included."""
    names: list[str] = []
    data.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Group) else None)
    return names


def _load_layer(group: h5py.Group, blobs: list[Blob], name: str, owned: set[int]) -> None:
    stored = [key for key, item in group.items() if isinstance(item, h5py.Dataset)]
    if len(stored) > len(blobs):
        raise ConfigError(
            f"Incompatible number of blobs for layer {name}: {len(stored)} in the file, {len(blobs)} in the net"
        )
    for j, blob in enumerate(blobs):
        if str(j) not in stored:
            if j in owned:
                raise ConfigError(f"Incompatible number of blobs for layer {name}: param {j} is not in the file")
            continue
        array: Array = group[str(j)][()]
        if array.shape != blob.shape:
            raise ConfigError(
                f"Cannot load blob from hdf5; shape mismatch for param {j} of layer '{name}'.  Source shape is "
                f"{shape_string(array.shape)}; target shape is {shape_string(blob.shape)}"
            )
        blob.data[...] = array
