"""Checks of a SolverParameter without its nets; errors name the place in the solver file."""

import logging
from typing import Any

from caffepy.core.errors import ConfigError
from caffepy.core.registry import Registry
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import locate_field
from caffepy.solver.policy import FIELDS, policies
from caffepy.solver.update import rules

log = logging.getLogger(__name__)


def at_field(path: str | None, field: str) -> str | None:
    """Return `file:line:col` of a field of the solver file; None if the solver has no file."""
    return locate_field(path, field) if path else None


def check_param(param: SolverParameter, path: str | None) -> None:
    """Raise ConfigError for settings that cannot work; warn of fields that are probably missing."""
    _check_name(param.type, rules, "type", path)
    _check_policy(param, path)
    for field in ("average_loss", "iter_size"):
        value = getattr(param, field)
        if value < 1:
            raise ConfigError(f"{field} must be 1 or more, not {value}", at_field(path, field))
    if param.weight_decay and param.regularization_type not in ("L1", "L2"):
        raise ConfigError(
            f'unknown regularization_type "{param.regularization_type}" (known: L1, L2)',
            at_field(path, "regularization_type"),
        )
    for field, message in rules[param.type].problems(param):
        raise ConfigError(message, at_field(path, field))
    if not param.HasField("base_lr"):
        log.warning("base_lr is missing and counts as 0: nothing will be learned")


def _check_name(name: str, known: Registry[Any], field: str, path: str | None) -> None:
    try:
        known[name]
    except ConfigError as error:
        raise error.at(at_field(path, field) or field) from None


def _check_policy(param: SolverParameter, path: str | None) -> None:
    name = param.lr_policy
    if not name:
        raise ConfigError(f"lr_policy is missing (known: {', '.join(policies)})", path)
    _check_name(name, policies, "lr_policy", path)
    fields = FIELDS.get(name, ())
    if "gamma" in fields and param.gamma < 0:
        raise ConfigError(
            f'lr_policy "{name}" needs a gamma of 0 or more, not {param.gamma:g}',
            at_field(path, "gamma"),
        )
    for field in ("stepsize", "max_iter"):
        if field in fields and getattr(param, field) <= 0:
            value = getattr(param, field) if param.HasField(field) else "missing"
            raise ConfigError(
                f'lr_policy "{name}" needs a {field} above 0; it is {value}', at_field(path, field)
            )
    for field in fields:
        if not (param.stepvalue if field == "stepvalue" else param.HasField(field)):
            log.warning('lr_policy "%s" reads %s, which is missing and counts as 0', name, field)
