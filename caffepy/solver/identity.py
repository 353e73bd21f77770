"""The run that a snapshot is of: what distinguishes runs under one snapshot_prefix."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from caffepy.proto.caffe_pb2 import TEST, NetParameter, SolverParameter
from caffepy.solver.policy import FIELDS

SETTINGS = ("type", "base_lr", "lr_policy", "momentum", "weight_decay", "random_seed")


def identity(param: SolverParameter, net: NetParameter) -> dict[str, Any]:
    """Return solver type, rates and seed, and a checksum of the train net without its data layers.

    max_iter is not among them, since a run may be made longer, and data may be moved.
    """
    fields = (*SETTINGS, *FIELDS.get(param.lr_policy, ()))
    values = {field: getattr(param, field) for field in fields if field != "max_iter"}
    for field in ("stepvalue", "plateau_winsize", "stagelr", "stageiter"):
        if field in values:
            values[field] = list(values[field])
    trained = [
        layer
        for layer in net.layer
        if layer.bottom and not any(rule.phase == TEST for rule in layer.include)
    ]
    stages = " ".join(sorted(filter(None, net.state.stage)))
    parts = [f"{net.state.level} {stages}".encode()]
    parts += [layer.SerializeToString(deterministic=True) for layer in trained]
    return {**values, "net": sha256(b"".join(parts)).hexdigest()}


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the settings in which another run differs from this one, as text; "" if it is the same
    run.
    """
    return ", ".join(
        "another net"
        if name == "net"
        else f"{name} {_text(other, name)} instead of {_text(own, name)}"
        for name in {**own, **other}
        if own.get(name) != other.get(name)
    )


def _text(run: Mapping[str, Any], name: str) -> str:
    value = run.get(name, "unset")
    return f"{value:g}" if isinstance(value, float) else str(value)
