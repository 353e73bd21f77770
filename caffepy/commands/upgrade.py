"""`caffepy upgrade-net` and `upgrade-solver`: files of old formats, written in today's."""

import logging

from google.protobuf.message import Message

from caffepy.core.files import written
from caffepy.proto import binary, text, upgrade
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.proto.fork_wire import CAFFE

log = logging.getLogger(__name__)
LATEST = "File already in latest proto format: %s"


def upgrade_net(source: str, target: str, *, as_binary: bool | None = None) -> bool:
    """Write the net of the file `source` to `target` (may be the same), by default in its form.

    NVCaffe's raw bytes become floats. Return False if settings, which the log names, have no place
    in today's format. ConfigError for no net, UsageError for a file that cannot be written.
    """
    is_text = binary.sniff(source) in ("text", "a pipe", "a device")
    net, fork = (
        (text.read_message(source, NetParameter()), CAFFE)
        if is_text
        else binary.read_stored_net(source)
    )
    upgraded = upgrade.upgrade_net(net, source)
    had_raw = binary.drop_raw(upgraded, source)
    if upgraded is net and not had_raw:
        log.error(LATEST, source)
    as_binary = not is_text if as_binary is None else as_binary
    _write(
        upgraded, target, b"".join(binary.serialized([upgraded], fork, fork)) if as_binary else None
    )
    return not upgrade.misplaced_fields(net)


def upgrade_solver(source: str, target: str) -> None:
    """Write the solver of the prototxt `source` to `target` (may be the same)."""
    solver = text.read_message(source, SolverParameter())
    upgraded = upgrade.upgrade_solver_fields(solver, source)
    if upgraded == solver:
        log.error(LATEST, source)
    _write(upgraded, target)


def _write(message: Message, path: str, data: bytes | None = None) -> None:
    """Write a message as text, or its binary form."""
    content = text.format(message).encode() if data is None else data
    with written(path) as temporary, open(temporary, "wb") as file:
        file.write(content)
    form = "text" if data is None else "binary"
    log.info("Wrote upgraded %s %s proto to %s", message.DESCRIPTOR.name, form, path)
