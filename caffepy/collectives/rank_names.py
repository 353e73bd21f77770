"""Names of ranks in messages, and errors that carry the name of the rank that they come from."""

from copy import copy

from caffepy.collectives.world import World
from caffepy.core.errors import CaffeError

REMOTE = -1
"""Rank of a failure on another node."""


def rank_name(world: World, rank: int) -> str:
    """Return the name of a rank of this node: its universal rank, and its host if there are several
    nodes.
    """
    if rank == REMOTE:
        return "another node"
    if world.nodes == 1:
        return f"rank {rank}"
    return f"rank {world.first_rank + rank} (host {world.hosts[world.node]}{world.at})"


def named(world: World, rank: int, error: BaseException) -> BaseException:
    """Return the error with the name of the rank that it comes from."""
    if rank == REMOTE:  # which has named it
        return error
    place = rank_name(world, rank)
    if not isinstance(error, CaffeError):
        if not any(note.startswith("(rank ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"({place})")
        return error
    copied = copy(error)  # the original may still be reported where it was raised
    if not str(error).startswith("rank "):
        copied.where = f"{place}: {error.where}" if error.where else place
    return copied.with_traceback(error.__traceback__)
