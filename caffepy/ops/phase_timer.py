"""The phases of an iteration, the same for both back ends."""

PARTS = ("data", "forward", "backward", "synchronization", "update")
"""In the order of an iteration."""

HOST = "host"
"""A phase of GPUs only: idle, since the host has not enqueued work yet."""
