"""The speed of solvers that train together, the parts of their time, and their bottleneck."""

import logging
from collections.abc import Callable, Mapping, Sequence

from caffepy.core.events import Displayed
from caffepy.report.speed import Speed, Timed
from caffepy.report.text import columns

log = logging.getLogger(__name__)

Seconds = Mapping[str, float]
WAITS, UNEVEN = 0.2, 0.05
"""Share of the time that is worth a remark; how much slower than the mean a named solver is."""


class Performance(Timed):
    """Logs images a second and shares of the time at each display, and of every solver at the end.

    `read` returns the seconds of each solver by part since the beginning, all 0 if they are
    unknown. `alone` is the images a second of a single device, if it is known. `threads` is the
    number of CPU threads that the solvers share, None on GPUs: where it is below their number,
    none of them is to blame. Tests and snapshots do not count.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Seconds]],
        alone: float | None = None,
        threads: int | None = None,
        nodes: int = 1,
    ) -> None:
        self._read = read
        self._alone, self._threads, self._nodes = alone, threads, nodes
        self._size = len(read())
        self._speed, self._whole = Speed(), Speed()
        super().__init__(self._speed, self._whole)
        self._before = self._begin = [dict(seconds) for seconds in read()]

    def displayed(self, shown: Displayed) -> None:
        rate = self._speed.read()
        if rate is not None:
            before, self._before = self._before, [dict(seconds) for seconds in self._read()]
            spent = list(map(difference, self._before, before))
            parts = ", ".join(f"{part} {share:.0%}" for part, share in shares(spent).items())
            texts = [self._rates(rate), parts, "" if self._crowded else slowest(spent)]
            log.info("    %s", "; ".join(part for part in texts if part))

    def done(self, stopped_early: bool) -> None:
        """Log a table of the whole run and its bottleneck."""
        self.pause()
        rate = self._whole.read()
        if rate is None:
            return
        log.info("Performance of %d solvers: %s", self._size, self._rates(rate))
        if self._nodes > 1:
            log.info("Overall multi-node performance: %.1f img/sec", rate)
        spent = list(map(difference, self._read(), self._begin))
        if not shares(spent):
            return
        named = {str(rank): [seconds] for rank, seconds in enumerate(spent)} | {"mean": spent}
        rows = [["solver", *spent[0]]]
        for name, solvers in named.items():
            rows.append([name, *(f"{share:.1%}" for share in shares(solvers).values())])
        for line in columns(rows, 1):
            log.info("    %s", line)
        if self._crowded:
            crowded = "The CPU is the bottleneck: %d solvers share %d threads."
            log.info(crowded, self._size, self._threads)
            return
        log.info("%s", bottleneck(spent))
        if clause := slowest(spent):
            log.info("The slowest: %s", clause)

    @property
    def _crowded(self) -> bool:
        """True if the solvers of one node have fewer threads than they are."""
        return self._threads is not None and self._threads * self._nodes < self._size

    def _rates(self, rate: float) -> str:
        text = f"{rate:.1f} images/s, {rate / self._size:.1f} per solver"
        if self._alone:
            text += f", {rate / self._alone:.2f} times a single device"
        return text


def difference(a: Seconds, b: Seconds) -> dict[str, float]:
    """Return the seconds between two readings, the later one first."""
    return {part: a[part] - b[part] for part in a}


def shares(solvers: Sequence[Seconds]) -> dict[str, float]:
    """Return each part's share of the time of all these solvers, empty if there is none."""
    sums = {part: sum(seconds[part] for seconds in solvers) for part in solvers[0]}
    whole = sum(sums.values())
    return {part: seconds / whole for part, seconds in sums.items()} if whole else {}


def _slowest(solvers: Sequence[Seconds]) -> tuple[int, float]:
    """Return the solver that computes longest, and by what share of the mean it is slower."""
    work = [seconds["forward"] + seconds["backward"] + seconds["update"] for seconds in solvers]
    rank = max(range(len(work)), key=work.__getitem__)
    mean = sum(work) / len(work)
    return rank, work[rank] / mean - 1 if mean else 0.0


def slowest(solvers: Sequence[Seconds]) -> str:
    """Return a clause about a solver that is clearly slower than the others, if there is one."""
    rank, by = _slowest(solvers)
    return f"solver {rank} computes {by:.0%} longer than the mean" if by > UNEVEN else ""


def bottleneck(solvers: Sequence[Seconds]) -> str:
    """Return one sentence about what these solvers wait for most."""
    of = shares(solvers)
    waits = {part: of[part] for part in ("data", "synchronization", "host") if part in of}
    worst = max(waits, key=waits.__getitem__)
    share = f"{waits[worst]:.0%} of the time"
    if waits[worst] < WAITS:
        computing = f"{of['forward'] + of['backward']:.0%} of the time"
        return f"Computation is the bottleneck: forward and backward take {computing}."
    if worst == "data":
        return f"Data is the bottleneck: solvers wait for it {share}."
    if worst == "host":
        return f"The host is the bottleneck: GPUs wait for work {share}."
    rank, by = _slowest(solvers)
    if by > UNEVEN:
        slowest = f"Solver {rank} is the bottleneck: it is the slowest"
        return f"{slowest}, and synchronization takes {share}."
    return f"Synchronization is the bottleneck: it takes {share}."
