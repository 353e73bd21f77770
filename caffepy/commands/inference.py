"""Nets with trained weights in their TEST phase, for the commands that run them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from caffepy import ops
from caffepy.commands.devices import choose_device
from caffepy.core.errors import ConfigError
from caffepy.core.names import listed, nearest
from caffepy.device.blob import Blob
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.weights import check_weights, layers_in, load_weights
from caffepy.proto.caffe_pb2 import TEST, NetParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import read_net
from caffepy.solver.positions import warn_of_layers
from caffepy.solver.snapshot import verify_model


def definition(
    model: str,
    device: Device,
    *,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
) -> NetParameter:
    """Read the file `model` for its TEST phase, and set the device's precision to the net's.

    `precision` overrides the net's; `level` and `stages` join the net's state.
    """
    param = read_net(model)
    ops.set_precision(device, choose_precision(param, precision))
    param.state.phase, param.state.level = TEST, level
    param.state.stage.extend(stages)
    return param


@contextmanager
def trained_net(
    model: str,
    weights: Iterable[str],
    gpu: str | None = None,
    precision: str | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    threads: int | None = None,
) -> Iterator[Net]:
    """Yield the net of the file `model` in its TEST phase with these weights; then close it.

    `gpu`: numbers of GPUs, of which the first computes; `threads`: those of the CPU. ConfigError
    and DataError say what is wrong with the net, its data or the weights.
    """
    device = choose_device(gpu, threads)
    weights = checked(weights)
    param = definition(model, device, precision=precision, level=level, stages=stages)
    with closing(Net(param, device=device, path=model)) as net:
        load_all(net, weights)
        yield net


def checked(weights: Iterable[str]) -> list[str]:
    """Return these files; ConfigError, before a net is built, if one is missing or holds none."""
    files = list(weights)
    for file in files:
        check_weights(file)
    return files


def load_all(net: Net, weights: Iterable[str]) -> bool:
    """Load these files of weights in turn; one warning names the layers without any.

    ConfigError if that are all that have parameters. Returns False if no file is given that could
    fill them.
    """
    learnable = {net.nodes[param.layer].name for param in net.learnable}
    missing = set(learnable)
    names = list(weights)
    for name in names:
        verify_model(name)
        filled = load_weights(net, name)
        missing -= filled
    if names and learnable and missing == learnable:
        files, there = ", ".join(names), [layer for name in names for layer in layers_in(name)]
        if not there:
            raise ConfigError(f"{files} gives no weights to this net: none of its layers has any")
        raise ConfigError(
            f"{files} gives no weights to this net: its layers are {_first(there)}, those of the "
            f"net {_first([net.nodes[p.layer].name for p in net.learnable])}; names must agree"
        )
    if names:
        warn_of_layers(f"{', '.join(names)}: no weights for", missing, "the fillers set them")
    return not learnable or bool(names)


def _first(names: Iterable[str]) -> str:
    first = list(dict.fromkeys(names))
    return ", ".join([*(f'"{name}"' for name in first[:3]), *(["..."] if first[3:] else [])])


def find_blob(net: Net, name: str) -> Blob:
    """Return the blob of this name; ConfigError suggests the nearest."""
    if name not in net.blobs:
        known = [blob for blob in net.blobs if "_split_" not in blob]
        raise ConfigError(
            f'no blob "{name}" in the net{nearest(name, known)} (blobs: {listed(known, name)})',
            net.path,
        )
    return net.blobs[name]
