"""Training: the loop, learning-rate policies, update rules, snapshots and signals.

Start with `solver.py`, which reads like Caffe's Solver::Step, then `iteration.py` (states and order
of an iteration), `runners.py` (layer by layer, or CUDA graphs) and `step.py` (what is computed).
`capture.py` captures graphs, and has every reason why a net cannot be captured. `faults.py` and
`worker_group.py` can be skipped at first: errors, and solvers that train together.
"""

from caffepy.solver.check import check_folder as check_folder
from caffepy.solver.gradient_probe import Watch as Watch
from caffepy.solver.monitor import Monitor as Monitor
from caffepy.solver.params import Params as Params
from caffepy.solver.policy import policies as policies
from caffepy.solver.signals import Action as Action
from caffepy.solver.signals import Signals as Signals
from caffepy.solver.signals import StopError as StopError
from caffepy.solver.snapshot import newest_good as newest_good
from caffepy.solver.solver import Solver as Solver
from caffepy.solver.step import Callback as Callback
from caffepy.solver.update import Rule as Rule
from caffepy.solver.update import Update as Update
from caffepy.solver.update import rules as rules
