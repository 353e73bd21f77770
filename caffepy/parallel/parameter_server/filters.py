"""Filters: what of a push crosses the wire, and in which form.

    rest           what was kept back at the last push is added
    significant:T  elements are sent if |d| > T * sqrt(mean(d^2)), d all elements of the range; the
                   others are the rest ("significantly modified", Li et al., OSDI 2014; relative to
                   the changes, not to the weights, so that one T sends as much at any learning rate
                   and interval, and of gradients, too). With bf16 a T of 1.6 sends a tenth of the
                   bytes; a worker that trains on what it pulled and its rest (`add_rest`) loses 0.3
                   points or less by it on digits, one that leaves the rest out 0.6
    rows           else, of a range with rows, those that are not all zero are sent: those used, and
                   those that momentum or weight decay moved (an Embed layer wants decay_mult 0)
    bf16           what is sent is rounded to bfloat16; the error goes to the rest, where there is
                   one. Without `significant` there is none: it gained nothing on digits
    zlib           what is sent is deflated, if a sample shrinks: for links of 100 Mbit/s and less

A payload is a plain float32 array, or `Packed`. What a server and its replicas make of it hangs on
nothing but the payload.
"""

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import NamedTuple

import numpy as np

from caffepy.core.errors import UsageError
from caffepy.device.blob import Array, from_bfloat16, to_bfloat16
from caffepy.parallel.parameter_server.ranges import KeyRange

NONE_OF = "--filters {!r} is none of bf16, significant:T with a number T above 0, zlib"

SKIP = 255
"""A gap that skips this number of rows, to none."""

BLOCK = 1 << 15
"""Elements that go together through several passes: these then stay in the cache."""

SAMPLE = 1 << 14
"""Elements that are deflated to see if it pays."""

WORTH = 0.9
"""Share of its bytes to which zlib must bring a sample: it takes 0.1 GB/s."""


class Packed(NamedTuple):
    """A flat float32 array of `size` elements, of which the rows that are missing are zero.

    row: elements of a row, 1 for single ones.
    gaps: of each row, how far it is from the one before, as uint8; None if all rows are there.
    bf16: the values are bfloat16 (uint16), else float32.
    values: of the rows; as uint8 deflated, after the first bytes of all stand the second ones, and
        so on (HDF5's shuffle).
    """

    size: int
    row: int
    gaps: Array | None
    bf16: bool
    values: Array


Payload = Array | Packed


def nbytes(payload: Payload) -> int:
    """Return the bytes of a payload's arrays."""
    if not isinstance(payload, Packed):
        return payload.nbytes
    return payload.values.nbytes + (0 if payload.gaps is None else payload.gaps.nbytes)


def decode(payload: Payload) -> Array:
    """Return the flat float32 array that a payload stands for."""
    if not isinstance(payload, Packed):
        return np.asarray(payload, np.float32)
    if payload.gaps is None:
        return _values(payload)
    array = np.zeros(payload.size, np.float32)
    write(payload, array)
    return array


def write(packed: Packed, array: Array) -> None:
    """Write the rows that are there to their places in a flat array."""
    rows = slice(None) if packed.gaps is None else _rows(packed.gaps)
    array.reshape(-1, packed.row)[rows] = _values(packed).reshape(-1, packed.row)


def differing_rows(rows: Array, others: Array) -> Array:
    """Return of each row of a matrix whether it differs from that of another: where most rows do,
    their first elements tell.
    """
    differ: Array = rows[:, 0] != others[:, 0]
    if 2 * np.count_nonzero(differ) < differ.size:
        whole: Array = (rows != others).any(axis=1)
        return whole
    same = np.flatnonzero(~differ)
    differ[same] = (rows[same] != others[same]).any(axis=1)
    return differ


def pack(values: Array, row: int, rows: Array | None, bf16: bool) -> Payload:
    """Return a payload of rows of a flat array, all if `rows` is None or if that is smaller; it may
    be the array itself.
    """
    if rows is not None:
        gaps, size = _gaps(rows), 2 if bf16 else 4
        if gaps.nbytes + size * rows.size * row < size * values.size:
            some = values.reshape(-1, row)[rows].reshape(-1)
            return Packed(values.size, row, gaps, bf16, _rounded(some) if bf16 else some)
    return Packed(values.size, max(row, 1), None, True, _rounded(values)) if bf16 else values


@dataclass
class Filters:
    """The filters of a worker, and what they kept back of each range.

    significant: share of the root mean square of a range's elements that one must surpass.
    bytes_before, bytes_after: of all arrays, and of their payloads.
    """

    bf16: bool = False
    significant: float = 0
    zlib: bool = False
    bytes_before: int = 0
    bytes_after: int = 0
    _rests: dict[int, Array] = field(default_factory=dict, repr=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def encode(self, i: int, key_range: KeyRange, array: Array) -> Payload:
        """Return the payload of a flat float32 array for range i, and keep the rest for the next.
        Several threads may encode ranges of their own.

        Means lose nothing: what they lack would not be made up for by the next push.
        """
        lossy, row = not key_range.is_mean, key_range.row
        if self.significant and lossy:
            payload = self._significant(i, array)
        else:
            rows = np.flatnonzero(_used(array.reshape(-1, row))) if row else None
            payload = pack(array, row, rows, self.bf16 and lossy)
        if self.zlib:
            payload = _deflated(payload)
        with self._counting:
            self.bytes_before += array.nbytes
            self.bytes_after += nbytes(payload)
        return payload

    def add_rest(self, i: int, values: Array) -> Array:
        """Return pulled values of range i plus what this worker has not sent of its changes, for it
        to train on: else it learns once more what it does not see. Not for gradients.
        """
        return values + self._rests[i] if i in self._rests else values

    @property
    def rests(self) -> dict[str, Array]:
        """Copies of what was kept back, by range."""
        return {str(i): rest.copy() for i, rest in self._rests.items()}

    @rests.setter
    def rests(self, rests: Mapping[str, Array]) -> None:
        self._rests = {int(i): np.array(rest, np.float32) for i, rest in rests.items()}

    def _significant(self, i: int, array: Array) -> Payload:
        if i in self._rests:
            rest = self._rests[i]
            with np.errstate(over="ignore"):
                rest += array
        else:
            rest = self._rests[i] = array.copy()
        threshold = self.significant * sqrt(float(np.vdot(rest, rest)) / rest.size)
        if not isfinite(threshold):  # overflows show in the workers' losses
            del self._rests[i]
            return rest
        payload = pack(rest, 1, _above(rest, threshold), self.bf16)
        if not isinstance(payload, Packed):
            del self._rests[i]
        elif payload.gaps is None:
            rest -= _values(payload)
        else:
            rest[_rows(payload.gaps)] -= _values(payload)
        return payload


def parse(text: str) -> Filters:
    """Return the filters "bf16,significant:1.5,zlib", or some of these; "" for none."""
    filters = Filters()
    for name in filter(None, text.split(",")):
        kind, _, number = name.partition(":")
        if name in ("bf16", "zlib"):
            setattr(filters, name, True)
            continue
        try:
            filters.significant = float(number)
        except ValueError:
            raise UsageError(NONE_OF.format(name)) from None
        if kind != "significant" or not 0 < filters.significant < inf:
            raise UsageError(NONE_OF.format(name))
    return filters


def _values(packed: Packed) -> Array:
    """Return the values of the rows that are there, in float32."""
    values = packed.values
    if values.dtype == np.uint8:
        values = _inflate(values, np.dtype(np.uint16 if packed.bf16 else np.float32))
    return from_bfloat16(values) if packed.bf16 else values


def _used(rows: Array) -> Array:
    """Return of each row of a matrix whether it has anything but zeros."""
    return differing_rows(rows, np.broadcast_to(np.float32(0), rows.shape))


def _gaps(rows: Array) -> Array:
    steps = np.diff(rows, prepend=0)
    skips = steps // SKIP
    ends = np.arange(rows.size) + np.cumsum(skips)
    gaps = np.full(rows.size + int(skips.sum()), SKIP, np.uint8)
    gaps[ends] = steps % SKIP
    return gaps


def _rows(gaps: Array) -> Array:
    rows: Array = np.cumsum(gaps, dtype=np.int64)[gaps != SKIP]
    return rows


def _above(array: Array, threshold: float) -> Array:
    """Return the indices of the elements whose magnitude is above a threshold."""
    magnitude, found = np.empty(BLOCK, np.float32), list[Array]()
    for start in range(0, array.size, BLOCK):
        part = array[start : start + BLOCK]
        above = np.abs(part, out=magnitude[: part.size]) > threshold
        found.append(np.flatnonzero(above) + start)
    return np.concatenate(found)


def _rounded(array: Array) -> Array:
    """Return the same as `to_bfloat16`, ten times as fast."""
    bits, rounded = array.view(np.uint32), np.empty(array.size, np.uint16)
    scratch = np.empty(BLOCK, np.uint32)
    for start in range(0, array.size, BLOCK):
        part = bits[start : start + BLOCK]
        sums = np.right_shift(part, 16, out=scratch[: part.size])
        sums &= 1
        sums += 0x7FFF
        sums += part
        sums >>= 16
        rounded[start : start + BLOCK] = sums
    missing = np.isnan(array)
    if missing.any():
        rounded[missing] = to_bfloat16(array[missing])
    return rounded


def _deflated(payload: Payload) -> Payload:
    packed = (
        payload if isinstance(payload, Packed) else Packed(payload.size, 1, None, False, payload)
    )
    start = max(0, packed.values.size // 2 - SAMPLE // 2)
    sample = packed.values[start : start + SAMPLE]
    if _deflate(sample).nbytes > WORTH * sample.nbytes:
        return payload
    values = _deflate(packed.values)
    return packed._replace(values=values) if values.nbytes < packed.values.nbytes else payload


def _deflate(values: Array) -> Array:
    places = np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)
    compress = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return np.frombuffer(compress.compress(places.data) + compress.flush(), np.uint8)


def _inflate(stream: Array, dtype: "np.dtype[np.generic]") -> Array:
    places = np.frombuffer(zlib.decompress(stream.data), np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(places.T).view(dtype).reshape(-1)
