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
    """Return the error with the name of the rank that it comes from; another node has named it.

    It is a copy: the layer in which the root hears of it adds its place, which is not the error's.
    """
    if not isinstance(error, CaffeError):
        notes = getattr(error, "__notes__", ())
        if rank != REMOTE and not any(note.startswith("(rank ") for note in notes):
            error.add_note(f"({rank_name(world, rank)})")
        return error
    copied = copy(error)
    if rank != REMOTE and not str(error).startswith("rank "):
        place = rank_name(world, rank)
        copied.where = f"{place}: {error.where}" if error.where else place
    return copied.with_traceback(error.__traceback__)
