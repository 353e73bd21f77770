"""The memory that training takes on a GPU, by the plan of the net's memory, and the largest batch
that fits; nothing is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caffepy.core.errors import ConfigError
from caffepy.net.memory import Usage, beside, lifetimes
from caffepy.net.recompute import arena, fitting, overhead

LINES = 12
"""Number of batches after which `largest_batch` bisects."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits into `room` bytes, of which it takes about `memory`; 0 if a batch
    of 1 takes `memory` already. `limit` is the error of the next larger batch if its net cannot be
    built.
    """

    room: int
    batch: int
    memory: int
    limit: str | None = None


def footprint(usages: Sequence[Usage], histories: int) -> int:
    """Return about how many bytes of a GPU nets take that share parameters and run in turn: the
    first with gradients and `histories` arrays of history if it learns.
    """
    first = usages[0]
    parameters = sum(blob.count * blob.dtype.itemsize for blob in first.net.learnable_params)
    copies = 2 + histories if first.learns else 1
    others = sum(beside(usage, lifetimes(usage)) for usage in usages)
    return parameters * copies + others + max(map(arena, usages)) + overhead(first.net)


def recomputing(usage: Usage) -> Usage:
    """Return the usage that takes the least memory: it recomputes what that asks for."""
    return fitting(usage, 0)


def largest_batch(need: Callable[[int], int], room: int, given: int) -> LargestBatch:
    """Return the largest batch for which `need`, which grows about linearly, is at most `room`
    bytes; `given` is the net's. ConfigError if the net cannot be built with a batch of 1.
    """
    known = {1: need(1)}
    if known[1] > room:
        return LargestBatch(room, 0, known[1])
    fits, exceeds, limit = 1, None, None
    guess = max(2, given)
    while exceeds is None or exceeds - fits > 1:
        try:
            known[guess] = need(guess)
        except ConfigError as error:
            exceeds, limit = guess, str(error)
        else:
            if known[guess] > room:
                exceeds, limit = guess, None
            else:
                fits = guess
        guess = _between(known, room, fits, exceeds)
    return LargestBatch(room, fits, known[fits], limit)


def _between(known: dict[int, int], room: int, fits: int, exceeds: int | None) -> int:
    """Return the batch to look at next: where the line through what is known meets the room, or the
    middle, if that does not lead there soon.
    """
    if exceeds is not None and (exceeds not in known or len(known) > LINES):
        return (fits + exceeds) // 2
    low, high = (min(known), max(known)) if exceeds is None else (fits, exceeds)
    slope = (known[high] - known[low]) / (high - low) if high > low else 0.0
    guess = int(low + (room - known[low]) / slope) if slope > 0 else 2 * fits
    most = 64 * fits if exceeds is None else exceeds - 1
    return max(fits + 1, min(guess, most))
