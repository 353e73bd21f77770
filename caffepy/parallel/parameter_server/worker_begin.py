"""The start of a worker: with what the first had at its own, moved on to where the others are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caffepy.core.errors import UsageError
from caffepy.device.blob import Array
from caffepy.parallel.nodes import shared
from caffepy.parallel.worker import WorkerSolver
from caffepy.solver import Solver
from caffepy.solver.policy import next_step
from caffepy.solver.positions import set_positions, take_positions

Each = Callable[[Callable[[Solver, int], object]], object]
"""Calls a function with each solver of a worker and its rank."""


def begin_state(solver: Solver, ahead: int, parameters: Array | None) -> dict[str, Any]:
    """Return what the other workers begin with, beside the values of the servers.

    ahead: batches that the values are ahead of the solver's data. parameters: those of the start,
    where gradients are pushed.
    """
    device = solver.device
    positions = take_positions(solver.iterations.nets, device)["net"]
    data = shared(solver.net).keys() & positions.keys()
    return {
        "iteration": solver.iter,
        "rate_factor": solver.iterations.rate_factor,
        "data": {name: positions[name] for name in data},
        "ahead": ahead,
        "control": solver.update_state.state(),
        "history": [device.on_host(flat).copy() for flat in solver.history],
        "parameters": parameters,
    }


def follow(
    solvers: Sequence[Solver],
    each: Each,
    begun: Mapping[str, Any],
    later: int,
    own: Mapping[str, Any] | None,
) -> None:
    """Bring the solvers of a worker to where the first began, and `later` iterations on.

    own: the state that this worker had in the snapshot that the first has restored.
    UsageError if the others, who push gradients, have begun.
    """
    solver, gradients = solvers[0], begun["parameters"] is not None
    iterations, device = solver.iterations, solver.device
    if later and gradients:
        raise UsageError(
            "workers that push gradients begin together: with --every 2 or more others may join"
        )
    iteration, step = begun["iteration"] + later, 0
    for number in range(iteration):
        step = next_step(solver.param, number, step)
    iterations.move_to(iteration, step)
    iterations.rate_factor = begun["rate_factor"]
    solver.update_state.set_state(begun["control"])
    positions: Sequence[dict[str, Any]] = own["positions"] if own else []
    if len(positions) != len(solvers):
        positions = []
    if positions:
        set_positions(positions[0], [solver.net], device)
    solver.net.set_state({**solver.net.state(), **begun["data"]})
    with device.scope():
        if not later:
            history = (own and own["history"]) or begun["history"]
            for mine, theirs in zip(solver.history, history, strict=True):
                device.upload(theirs, mine)
        if gradients:
            device.upload(begun["parameters"][: solver.params.data.size], solver.params.data)

    def follow_root(worker: Solver, rank: int) -> None:
        if isinstance(worker, WorkerSolver):
            worker.follow(solver, positions[rank] if positions else None)

    each(follow_root)
