"""Where the time of a solver's iterations goes, in the same parts for every back end."""

PARTS = ("data", "forward", "backward", "synchronization", "update")
"""In the order of an iteration, which ends with its update."""

HOST = "host"
"""A part that only GPUs have: they wait for the host to give them work."""
