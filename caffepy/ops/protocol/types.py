"""Types of arguments that many operations take."""

from collections.abc import Sequence

from caffepy.device.blob import Array

Maybe = Array | None
Seed = int | Array
"""A seed, or on the CPU an int64 array () of it, which is read when the operation runs."""
Pair = tuple[int, int]
Sizes = Sequence[int]
