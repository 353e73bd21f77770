"""SharedScores: tests of which each rank runs a share of the batches."""

from functools import partial

from caffepy.collectives.worker_threads import WorkerThreads
from caffepy.parallel.worker import WorkerSolver
from caffepy.solver.test_pass import Totals


class SharedScores:
    """Deals the batches of `nets` test nets to the ranks in turn, and collects the workers' totals.

    The ranks share the data layers of test nets, so the next batch of a net is always of the rank
    after the one that had the last, in later tests as well.
    """

    def __init__(self, workers: WorkerThreads[WorkerSolver], nets: int) -> None:
        self._workers = workers
        self.next_ranks = [0] * nets

    def restart(self) -> None:
        """Give the next batch of each net to the root."""
        self.next_ranks = [0] * len(self.next_ranks)

    def run(self, k: int, batches: int) -> bool:
        """Start this number of batches, at most one a rank; True if one is the root's."""
        size = self._workers.group.size
        ranks = [(self.next_ranks[k] + i) % size for i in range(batches)]
        self.next_ranks[k] = (ranks[-1] + 1) % size
        for rank in ranks:
            if rank:
                self._workers.give(partial(WorkerSolver.test_batch, k=k), rank)
        return 0 in ranks

    def totals(self, k: int) -> list[Totals]:
        """End the test; return the totals of the workers, in the order of their ranks."""
        self._workers.give(partial(WorkerSolver.end_test, k=k))
        self._workers.wait_idle()
        return [worker.totals for _, worker in sorted(self._workers.members.items())]
