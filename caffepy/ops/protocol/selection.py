"""Rows and the largest values."""

from typing import Protocol

from caffepy.device.blob import Array


class SelectionOps(Protocol):
    def take_rows(self, x: Array, index: Array, cut: bool, y: Array, wrong: Array) -> None:
        """y = x[index]; x (K, D), index (M), y (M, D).

        An index outside 0 to K - 1 is invalid; it is truncated before that check with `cut`, else
        after it.
        """

    def add_rows(self, dy: Array, index: Array, dx: Array) -> None:
        """dx[index] += dy in the order of dy (M, D); dx (K, D); an index outside dx is skipped."""

    def top_values(self, x: Array, top_k: int, places: bool, values: bool, y: Array) -> None:
        """Write the places of the top_k largest values with `places`, then the values with
        `values`; of equal ones the larger place is first.

        x (outer, C, inner), y (outer, top_k or 2 * top_k, inner). NaN is larger than any number.
        """
