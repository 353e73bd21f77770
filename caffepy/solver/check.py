"""Checks before training: of a SolverParameter without its nets, and that snapshots can be written.

Errors name the place in the solver file.
"""

import logging
import os
import shutil
import stat
from contextlib import suppress
from math import inf
from typing import Any

from caffepy.core.average_precision import VERSIONS
from caffepy.core.errors import ConfigError
from caffepy.core.files import temporary_name, working_directory
from caffepy.core.registry import Registry
from caffepy.net import Net
from caffepy.net.weights import MAX_BINARY, check_names
from caffepy.proto.caffe_pb2 import LayerParameter, SolverParameter
from caffepy.proto.text import locate_field
from caffepy.solver.policy import FIELDS, policies
from caffepy.solver.snapshot import Files, clean
from caffepy.solver.update import rules

log = logging.getLogger(__name__)

_WITHOUT_EFFECT = (
    *("momentum_policy", "max_momentum", "momentum_power"),
    *("weight_decay_policy", "weight_decay_power", "max_weight_decay"),
    *("larc", "larc_policy", "larc_eta", "larc_turbo"),
    *("local_lr_auto", "local_gw_ratio"),
)
"""Fields of NVCaffe, and the last two of Intel Caffe, that would train otherwise."""

_OF_SSL = dict.fromkeys(
    ("breadth_decay", "kernel_shape_decay", "block_group_decay", "force_decay"), "SSL's decays"
) | {"prune_threshold": "SkimCaffe's prunings", "winograd_sparsity_factor": "SkimCaffe's prunings"}
"""Fields that train otherwise unless they are 0."""

MIB = 1 << 20
SLACK = 4 << 20
"""Bytes of a snapshot that are neither weights nor history."""


def at_field(path: str | None, field: str) -> str | None:
    """Return `file:line:col` of a field of the solver file; None if the solver has no file."""
    return locate_field(path, field) if path else None


def check_param(param: SolverParameter, path: str | None) -> None:
    """Raise ConfigError for settings that cannot work; warn of fields that are probably missing."""
    name = param.lr_policy
    _check_name(param.type, rules, "type", path)
    if not name:
        raise ConfigError(f"lr_policy is missing (known: {', '.join(policies)})", path)
    if name == "stepearly":
        problem = (
            'lr_policy "stepearly" is one of an early Caffe (pull request 190), which lowers the '
            'rate by the accuracy of tests and caffepy does not have; "plateau" goes by the loss'
        )
        raise ConfigError(problem, at_field(path, "lr_policy"))
    _check_name(name, policies, "lr_policy", path)
    if param.ap_version not in VERSIONS:
        problem = f'ap_version "{param.ap_version}" is none of {", ".join(VERSIONS)}'
        raise ConfigError(problem, at_field(path, "ap_version"))
    fields = FIELDS.get(name, ())
    if "gamma" in fields and param.gamma < 0:
        problem = f'lr_policy "{name}" needs a gamma of 0 or more, not {param.gamma:g}'
        raise ConfigError(problem, at_field(path, "gamma"))
    for field in ("stepsize", "max_iter"):
        if field in fields and getattr(param, field) <= 0:
            value = getattr(param, field) if param.HasField(field) else "missing"
            problem = f'lr_policy "{name}" needs a {field} above 0; it is {value}'
            raise ConfigError(problem, at_field(path, field))
    if name == "multifixed" and not len(param.stagelr) == len(param.stageiter) > 0:
        counts = f"{len(param.stagelr)} and {len(param.stageiter)}"
        problem = f'lr_policy "multifixed" needs as many stagelr as stageiter, not {counts}'
        raise ConfigError(problem, at_field(path, "stagelr"))
    if param.min_lr < 0 or (name == "poly" and param.min_lr > param.base_lr):
        problem = f"min_lr must lie between 0 and base_lr, not at {param.min_lr:g}"
        raise ConfigError(problem, at_field(path, "min_lr"))
    for field in fields:
        if field not in {given.name for given, _ in param.ListFields()}:
            log.warning('lr_policy "%s" reads %s, which is missing and counts as 0', name, field)
    for field in ("average_loss", "iter_size"):
        value = getattr(param, field)
        if value < 1:
            raise ConfigError(f"{field} must be 1 or more, not {value}", at_field(path, field))
    if param.weight_decay and param.regularization_type not in ("L1", "L2"):
        raise ConfigError(
            f'unknown regularization_type "{param.regularization_type}" (known: L1, L2)',
            at_field(path, "regularization_type"),
        )
    for field in _OF_SSL:
        if param.HasField(field) and getattr(param, field):
            raise ConfigError(
                f"{field} is one of {_OF_SSL[field]}, which caffepy does not have",
                at_field(path, field),
            )
    for field, message in rules[param.type].problems(param):
        raise ConfigError(message, at_field(path, field))
    without = [field for field in _WITHOUT_EFFECT if param.HasField(field)]
    if without:
        log.warning("%s: of a fork of Caffe, without effect here", ", ".join(without))
    if not param.HasField("base_lr") and name != "multifixed":
        log.warning("base_lr is missing and counts as 0: nothing will be learned")


def check_max_iter(param: SolverParameter, path: str | None) -> None:
    """Raise ConfigError if max_iter is missing or negative; warn if it is 0."""
    if not param.HasField("max_iter"):
        message = "max_iter is missing: give the number of iterations to train"
        raise ConfigError(message, path)
    if param.max_iter < 0:
        message = f"max_iter must be 0 or more, not {param.max_iter}"
        raise ConfigError(message, at_field(path, "max_iter"))
    if not param.max_iter:
        log.warning("max_iter is 0: nothing will be trained")


def _check_name(name: str, known: Registry[Any], field: str, path: str | None) -> None:
    try:
        known[name]
    except ConfigError as error:
        raise error.at(at_field(path, field) or field) from None


def check_snapshots(
    param: SolverParameter, path: str | None, net: Net, model: int, history: int
) -> None:
    """Raise ConfigError if the last snapshot, with `model` and `history` bytes, cannot be written.

    Temporary files that killed runs have left under its prefix are removed. `path` is the solver
    file.
    """
    hdf5 = param.snapshot_format == SolverParameter.HDF5
    if not hdf5 and max(model, history) >= MAX_BINARY:
        raise ConfigError(
            "a snapshot of this net has a file above 2 GiB, which the binary format cannot hold; "
            "set snapshot_format: HDF5",
            at_field(path, "snapshot_format"),
        )
    check_layers(param, net)
    last = Files.of(param.snapshot_prefix, max(param.max_iter, 0), hdf5)
    check_prefix(param, path, max(model, history), model + history + SLACK, last)
    clean(param.snapshot_prefix)


def check_specs(param: SolverParameter, net: Net) -> None:
    """ConfigError if a parameter asks for what SSL's solver does and caffepy's does not."""
    for node in net.nodes:
        if node.layer.param.connectivity_mode:
            kind = LayerParameter.ConnectivityMode.Name(node.layer.param.connectivity_mode)
            message = f"connectivity_mode: {kind}, a field of SSL, is not supported in training"
            raise ConfigError(f'layer "{node.name}" ({node.layer.type}): {message}', net.path)
        for spec in node.layer.param.param:
            given = spec.regularization_type
            if (
                given not in ("", param.regularization_type)
                and param.weight_decay * spec.decay_mult
            ):
                message = (
                    f'regularization_type "{given}" of one parameter, a field of SSL, is not '
                    f'supported beside the solver\'s "{param.regularization_type}"'
                )
                raise ConfigError(f'layer "{node.name}" ({node.layer.type}): {message}', net.path)


def warn_without_loss(net: Net) -> None:
    """Log if nothing in a train net is to be minimized."""
    if not any(any(node.layer.loss_weights) for node in net.nodes):
        log.warning(
            "%sno layer of the train net is a loss or has a loss_weight: nothing will be learned",
            f"{net.path}: " if net.path else "",
        )


def check_layers(param: SolverParameter, net: Net) -> None:
    """Raise ConfigError if two layers have one name in the snapshots' format."""
    try:
        check_names(net, param.snapshot_format == SolverParameter.HDF5)
    except ConfigError as error:
        raise (error.at(net.path) if net.path else error) from None


def check_prefix(
    param: SolverParameter,
    path: str | None,
    largest: int = 0,
    total: int = 0,
    last: Files | None = None,
) -> None:
    """Call `check_folder` for snapshot_prefix; an error names its place in the solver file."""
    try:
        check_folder(param.snapshot_prefix, largest, total, last)
    except ConfigError as error:
        raise error.at(at_field(path, "snapshot_prefix") or path or "snapshot_prefix") from None


def check_folder(prefix: str, largest: int = 0, total: int = 0, last: Files | None = None) -> None:
    """Raise ConfigError unless files of `total` bytes in all, the `largest` of this size, can be
    written under the prefix and the `last` names.
    """
    if "\0" in prefix:
        raise ConfigError("snapshot_prefix holds a NUL, which no path may")
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        where = (
            "" if os.path.isabs(folder) else f" (the working directory is {working_directory()})"
        )
        raise ConfigError(
            f"the folder {folder} of snapshot_prefix does not exist{where}; create it or change "
            "snapshot_prefix"
        )
    try:
        for path in (last.model, last.state, last.sidecar) if last else ():
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(path).st_mode):
                    raise ConfigError(
                        f"the last snapshot is to be written to {path}, which is a folder; move it "
                        "away"
                    )
    except OSError as error:
        raise ConfigError(
            f"the last snapshot cannot be written to {path}: {error.strerror}"
        ) from None
    try:
        # The temporary name that a file has while it is written.
        temporary = temporary_name(last.sidecar if last else prefix)
        try:
            with open(temporary, "wb") as file:
                file.write(b"\0")
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of snapshot_prefix cannot be written: {error.strerror}"
        ) from None
    if largest > (limit := _size_limit()):
        raise ConfigError(
            f"a snapshot has a file of {largest} bytes, but this process may write files of "
            f"{limit} bytes only; see ulimit -f"
        )
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ConfigError(
            f"a snapshot takes {-(-total // MIB)} MiB, but only {free // MIB} MiB are free in the "
            f"folder {folder} of snapshot_prefix"
        )


def _size_limit() -> float:
    try:
        import resource
    except ImportError:  # not on Windows
        return inf
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return inf if limit == resource.RLIM_INFINITY else limit
