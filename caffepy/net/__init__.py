"""Nets: pure rewrites of their definition, the wiring, weights in and out."""

from caffepy.net.build import filter_state, insert_splits
from caffepy.net.net import Net, any_turn

__all__ = ["Net", "any_turn", "filter_state", "insert_splits"]
