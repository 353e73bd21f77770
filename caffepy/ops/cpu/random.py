"""Random numbers as hashes of a seed, the number of a pass and a place, so that threads need no
order.

Place i of seed s gets mix(mix(s + i) + mix(s)), on a GPU too.
"""

from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.protocol.types import Maybe, Seed


@kernel
def mix(h: Any) -> Any:
    """The finalizer of MurmurHash3: every bit of h changes about half the bits of the result."""
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@kernel
def seed_of_pass(seed: int, step_counter: int) -> Any:
    """Return the seed of pass number `step_counter`."""
    return mix(np.uint32(np.uint32(seed) + mix(np.uint32(step_counter))))


def seed_array(seed: Seed, step_counter: Maybe) -> Array:
    """Return the seed of a pass as an int64 array (), the given one if it is that."""
    if step_counter is not None:
        seed = int(seed_of_pass(int(seed), int(step_counter)))
    return np.asarray(seed, np.int64)
