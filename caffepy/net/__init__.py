"""Nets: pure rewrites of their definition, the wiring, weights in and out."""

from caffepy.net.build import filter_state, insert_splits
from caffepy.net.net import Net

__all__ = ["Net", "filter_state", "insert_splits"]
