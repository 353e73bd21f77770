"""A reader of event files: each record is its length, a checksum, an Event, a checksum."""

import struct
from pathlib import Path
from typing import Any


def events(folder: Path) -> list[Any]:
    """The events of all files in a folder, in the order in which they were written."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def values(folder: Path) -> dict[str, dict[int, Any]]:
    """By tag and step what TensorBoard would show: a run hides what earlier ones have from its
    beginning on.
    """
    from tensorboardX.proto.event_pb2 import SessionLog

    shown: dict[str, dict[int, Any]] = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            for tag, steps in list(shown.items()):
                shown[tag] = {step: value for step, value in steps.items() if step < event.step}
        for value in event.summary.value:
            shown.setdefault(value.tag, {})[event.step] = value
    return {tag: steps for tag, steps in shown.items() if steps}


def scalars(folder: Path, tag: str) -> dict[int, float]:
    return {step: value.simple_value for step, value in values(folder)[tag].items()}
