"""`caffepy train --on-divergence rollback:FACTOR`: a run that diverges goes on from its last
snapshot with a lower learning rate.
"""

import logging
from typing import NamedTuple

from caffepy.core.abandoned import at_work
from caffepy.core.errors import DivergenceError, UsageError
from caffepy.core.events import asked_to_end
from caffepy.solver import Solver
from caffepy.solver.snapshot import is_whole

log = logging.getLogger(__name__)

STOP = "stop"


class Rollback(NamedTuple):
    """The reaction to a divergence: up to `most` times the learning rate is multiplied by
    `factor`.
    """

    factor: float
    most: int = 3


def on_divergence(text: str) -> Rollback | None:
    """Read "stop" (None), "rollback:FACTOR" or "rollback:FACTOR:N"; else UsageError."""
    if text == STOP:
        return None
    try:
        what, factor, *most = text.split(":")
        rollback = Rollback(float(factor), *map(int, most))
    except (TypeError, ValueError):
        what, rollback = "", Rollback(0, 0)
    if what != "rollback" or not 0 < rollback.factor < 1 or rollback.most < 1:
        raise UsageError(
            f'--on-divergence "{text}" is neither stop nor rollback:FACTOR or rollback:FACTOR:N, '
            "with FACTOR between 0 and 1 and N, the most rollbacks, 1 or more"
        )
    return rollback


class Start(NamedTuple):
    """The beginning of a run, or of what follows a divergence.

    `snapshot` is a state file or "auto", None to start anew; `anew` is true if the run did at
    first. `rate_factor` is that of the learning rate, None for that of the snapshot.
    """

    snapshot: str | None
    anew: bool
    rate_factor: float | None = None
    rollbacks: int = 0

    def after(self, error: DivergenceError, solver: Solver, rollback: Rollback | None) -> "Start":
        """Return where to go on after this error of a run that began here; if nowhere, raise it.

        That is the last snapshot that is not damaged; the beginning only if there never was one.
        The iteration that diverged is not the first one after a rollback: its loss would be the
        same at any rate.
        """
        if rollback is None or asked_to_end.is_set() or at_work():
            raise error
        before, base_lr = solver.iterations.rate_factor, solver.param.base_lr
        if self.rollbacks == rollback.most:
            raise DivergenceError(
                f"{error}; rollbacks before this: {rollback.most}, the last to base_lr {base_lr:g} "
                f"x {before:g}"
            ) from error
        earlier = solver.resume_state.before(solver.iter)
        snapshot = next(filter(is_whole, earlier), None)
        if snapshot is None and (earlier or not self.anew or solver.iter == 0):
            what = "no earlier snapshot is whole" if earlier else "there is no earlier snapshot"
            raise DivergenceError(f"{error}; no rollback: {what}") from error
        factor = before * rollback.factor
        log.warning(
            "%s; rollback %d of %d: training goes on from %s with base_lr %g x %g = %g",
            *(error, self.rollbacks + 1, rollback.most, snapshot or "the beginning"),
            *(base_lr, factor, base_lr * factor),
        )
        return Start(snapshot, self.anew, factor, self.rollbacks + 1)
