"""The solver: its loop, learning-rate policies, update rules, snapshots and signals."""

from caffepy.solver.gradient_probe import Watch
from caffepy.solver.params import Params
from caffepy.solver.policy import policies
from caffepy.solver.preflight import check_folder
from caffepy.solver.signals import Action, Signals
from caffepy.solver.snapshot import newest_good
from caffepy.solver.solver import Solver
from caffepy.solver.step import Callback
from caffepy.solver.update import Rule, Update, rules

__all__ = [
    "Action",
    "Callback",
    "Params",
    "Rule",
    "Signals",
    "Solver",
    "Update",
    "Watch",
    "check_folder",
    "newest_good",
    "policies",
    "rules",
]
