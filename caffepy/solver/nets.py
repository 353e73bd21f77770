"""Builds the nets of a solver: which fields define the train net and the test nets, in which
states.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.weights import check_weights, load_weights
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter, NetState, SolverParameter
from caffepy.proto.text import read_net
from caffepy.proto.upgrade import upgrade_net
from caffepy.solver.check import at_field
from caffepy.solver.snapshot import verify_model

log = logging.getLogger(__name__)

TRAIN_FIELDS = ("net", "net_param", "train_net", "train_net_param")


@dataclass(frozen=True)
class Source:
    """The definition of a net with its state merged in, its file, and its name in log lines."""

    param: NetParameter
    path: str | None
    origin: str


def build_train_net(source: Source, device: Device, root: Net | None, batch_parts: int = 1) -> Net:
    """Build the train net, which shares layers with the train net of a root solver, if any."""
    from_file = ": " in source.origin
    log.info("Creating training net %s %s", "from" if from_file else "specified in", source.origin)
    return Net(
        source.param, device=device, path=source.path, root_net=root, batch_parts=batch_parts
    )


def build_test_net(k: int, source: Source, device: Device, root: Net | None, debug: bool) -> Net:
    """Build test net `k`, which shares layers with the same net of a root solver, if any."""
    log.info("Creating test net (#%d) specified by %s", k, source.origin)
    net = Net(source.param, device=device, path=source.path, root_net=root)
    net.debug_info = debug
    return net


def weight_files(weights: Iterable[str], path: str | None) -> list[str]:
    """Return the files of weights, given as lists of names beside the solver file `path`;
    ConfigError if one is missing or is no file of weights.
    """
    files = [locate(name.strip(), path) for entry in weights for name in entry.split(",")]
    for file in files:
        check_weights(file)
    return files


def finetune(net: Net, files: Iterable[str]) -> Net:
    """Load these files of weights, with a warning if a train net takes nothing from one; return the
    net.
    """
    own = {net.nodes[param.layer].name for param in net.learnable}
    for file in files:
        log.info("Finetuning from %s", file)
        verify_model(file)
        if not own & load_weights(net, file) and net.phase == TRAIN:
            names = ", ".join(f'"{name}"' for name in sorted(own))
            message = (
                "%s gives no weights to this net: none of its layers has the name of one of %s"
            )
            log.warning(message, file, names)
    return net


def check_shared(net: Net, has_root: bool) -> None:
    """ConfigError unless the net of a worker can share its shared layers with a root solver."""
    for layer in net.shared_layers:
        name = f'layer "{layer.param.name}" ({layer.type})'
        if not has_root:
            raise ConfigError(
                f"root_net needs to be set for all non-root solvers: {name} is the root's alone"
            )
        if layer.blobs:
            raise ConfigError(f"{name} has parameters, so that solvers cannot share it", net.path)


def net_sources(
    param: SolverParameter, path: str | None, made_up: bool = False
) -> tuple[Source, list[Source]]:
    """Return the sources of the train net and the test nets, in Caffe's order; ConfigError if
    fields disagree.

    Test nets are all test_net_param, all test_net, then copies of net or net_param until there is
    one for each test_iter. `made_up` data: see `parse` in proto/text.py.
    """

    @cache
    def read(name: str) -> tuple[NetParameter, str]:
        file = locate(name, path)
        return read_net(file, made_up=made_up), file

    def source(field: str, value: str | NetParameter, phase: int, *states: NetState) -> Source:
        if not isinstance(value, str):
            return Source(_in_state(upgrade_net(value, path), phase, *states), path, field)
        try:
            net, file = read(value)
        except ConfigError as error:
            raise error.at(at_field(path, field) or field) from None
        return Source(_in_state(net, phase, *states), file, f"{field} file: {value}")

    given = [field for field in TRAIN_FIELDS if param.HasField(field)]
    if len(given) != 1:
        what = f"not {' and '.join(given)} at once" if given else "but none is given"
        place = at_field(path, given[1]) if given else path
        raise ConfigError(
            f"a solver needs exactly one of {', '.join(TRAIN_FIELDS)} for its train net, {what}",
            place,
        )
    train = source(given[0], getattr(param, given[0]), TRAIN, param.train_state)
    fields, states = _test_fields(param, path), list(param.test_state)
    return train, [
        source(field, value, TEST, *states[i : i + 1]) for i, (field, value) in enumerate(fields)
    ]


def _test_fields(param: SolverParameter, path: str | None) -> list[tuple[str, str | NetParameter]]:
    """Return field and value of each test net; ConfigError if their numbers disagree."""
    explicit: list[tuple[str, str | NetParameter]] = [
        *(("test_net_param", net) for net in param.test_net_param),
        *(("test_net", name) for name in param.test_net),
    ]
    common = next((field for field in ("net", "net_param") if param.HasField(field)), None)
    iters, states, interval = len(param.test_iter), len(param.test_state), param.test_interval
    few = (
        f"test_iter must be given once per test net: {iters} given for {len(explicit)} test net(s)"
    )
    missing = (
        f"test_interval: {interval} asks for tests, but test_iter (how many batches a test takes) "
        "is missing"
    )
    uneven = (
        f"test_state must be given once per test net or not at all: {states} given for {iters} "
        "test net(s)"
    )
    never = f"test_interval must be above 0 where there are test nets, not {interval}"
    below_one = next((batches for batches in param.test_iter if batches < 1), None)
    empty = f"test_iter must be 1 or more, not {below_one}"
    for wrong, field, problem in (
        (iters < len(explicit) or (iters > len(explicit) and not common), "test_iter", few),
        (not iters and common and interval > 0, "test_interval", missing),
        (states and states != iters, "test_state", uneven),
        (iters and interval <= 0, "test_interval", never),
        (below_one is not None, "test_iter", empty),
    ):
        if wrong:
            raise ConfigError(problem, at_field(path, field))
    return explicit + [(common or "", getattr(param, common or "net"))] * (iters - len(explicit))


def _in_state(net: NetParameter, phase: int, *more: NetState) -> NetParameter:
    """Return a copy with its state: the phase, the net's own, then `more`; later ones win."""
    state = NetState(phase=phase)  # type: ignore[arg-type]
    for given in (net.state, *more):
        state.MergeFrom(given)
    copy = NetParameter()
    copy.CopyFrom(net)
    copy.state.CopyFrom(state)
    return copy
