"""Training: the loop, learning-rate policies, update rules, snapshots and signals.

Start with `solver.py`, which reads like Caffe's Solver::Step, then `iteration.py` (states and order
of an iteration), `runners.py` (layer by layer, or CUDA graphs) and `step.py` (what is computed).
`capture.py` captures graphs, and has every reason why a net cannot be captured. `faults.py` and
`worker_group.py` can be skipped at first: errors, and solvers that train together.
"""

from caffepy.solver.check import check_folder
from caffepy.solver.gradient_probe import Watch
from caffepy.solver.params import Params
from caffepy.solver.policy import policies
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
