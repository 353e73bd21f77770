"""Pulled: what a worker has pulled last of ranges with rows, of which only new rows come."""

from typing import NamedTuple

from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.filters import Packed, Payload, decode, nbytes, write
from caffepy.parallel.parameter_server.ranges import KeyRange


class _Rows(NamedTuple):
    epoch: int
    version: int
    values: Array


class Pulled:
    """The values of ranges with rows that a worker has, to which a pull adds the rows that have
    changed since; and the bytes of all pulls, as values and as sent.

    Versions of another epoch do not count: values of a dead primary may have died with it.
    """

    def __init__(self) -> None:
        self.bytes_before, self.bytes_after = 0, 0
        self._rows: dict[int, _Rows] = {}  # by range

    def version(self, i: int, epoch: int) -> int:
        """Return the version that the worker has of a range, -1 if none."""
        has = self._rows.get(i)
        return has.version if has and has.epoch == epoch else -1

    def take(
        self, i: int, key_range: KeyRange, epoch: int, version: int, payload: Payload
    ) -> Array:
        """Return the values of a range, read-only; with rows they are valid until the next pull."""
        self.bytes_before += 4 * (key_range.stop - key_range.start)
        self.bytes_after += nbytes(payload)
        if not key_range.row:
            values = decode(payload)
        elif isinstance(payload, Packed) and payload.gaps is not None:
            values = self._rows[i].values
            if not values.flags.writeable:  # as it was received
                values = values.copy()
            write(payload, values)
        else:
            values = decode(payload)
        if key_range.row:
            self._rows[i] = _Rows(epoch, version, values)
        values = values.view()
        values.flags.writeable = False
        return values
