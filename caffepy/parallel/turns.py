"""Turns: the order in which ranks take batches from the layers that their nets share."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.round_robin import RoundRobin
from caffepy.core.errors import ConfigError
from caffepy.data.reader import Turn, deal_of
from caffepy.device.device import Device
from caffepy.layer import Layer
from caffepy.layer.python import Python
from caffepy.net import Net
from caffepy.solver import Solver
from caffepy.solver.worker_group import EndedGroup

log = logging.getLogger(__name__)

Deal = Sequence[Turn] | None


@dataclass
class _Test:
    """A test of a net: its batches, and how many of them were dealt."""

    batches: int
    taken: int = 0


class Turns:
    """Turns of ranks 0, 1, ... and again 0 at shared layers, such as data layers.

    Between steps a script may run the root's nets: the layers then serve the root alone, after
    `wait_workers` has returned, until `resume`.
    """

    def __init__(
        self,
        group: RankGroup,
        devices: Sequence[Device],
        wait_workers: Callable[[], object] = lambda: None,
    ) -> None:
        self._group, self._devices, self._wait_workers = group, devices, wait_workers
        self._locks = RoundRobin(group)  # of shared layers
        self._nets: list[tuple[Net, Deal]] = []  # the root's, and what they get of all batches
        self._leased = False
        self._alone = False  # a script has run nets of the root since the last step or test
        self._tests: list[_Test] = []

    def join(self, solver: Solver, rank: int) -> None:
        """Give turns to the nets of a rank's solver; waits of the train net are timed."""
        self.share(solver.net, rank, solver.phase_timer.mark)
        for net, batches in zip(solver.test_nets, solver.param.test_iter, strict=True):
            self.share(net, rank, batches=batches)
            if rank == 0:
                self._tests.append(_Test(batches))

    def share(
        self,
        net: Net,
        rank: int,
        mark: Callable[[str], object] = lambda part: None,
        batches: int | None = None,
    ) -> None:
        """Give a net of this rank turns at the layers that it shares, under the forward mutex.

        `mark` is called with "forward" when the net arrives there, and with "data" when it leaves.
        `batches` is the number of batches of a test.
        """

        @contextmanager
        def forward_mutex(layer: Layer) -> Iterator[None]:
            mark("forward")
            with self._locks.lock(rank, layer), layer.forward_lock:
                layer.begin_turn()
                yield
                layer.end_turn()
            mark("data")

        net.set_forward_mutex(forward_mutex, self._alone_at)
        if rank == 0:
            deal = self._deal_of(batches)
            self._nets.append((net, deal))
            if self._group.world.size > 1:
                _serve(net, self._devices, deal)
                _warn_of_unshared(net)

    def wait(self) -> None:
        """Wait in the root until all ranks have taken the batches of its train net's last pass."""
        net, _ = self._nets[0]
        for layer in net.shared_layers:
            self._locks.wait(0, layer)

    def _deal_of(self, batches: int | None) -> Deal:
        """Return what this node gets of the batches of a test or, with None, of training."""
        world = self._group.world
        if world.nodes == 1 and batches is None:
            return None  # one batch to each rank in turn
        return deal_of(world.first_rank, self._group.size, world.size, batches)

    @property
    def taken(self) -> list[int]:
        """Batches that were dealt in the last test of each net."""
        return [test.taken for test in self._tests]

    def begin_test(self, k: int, batches: int) -> None:
        """Begin a test of net `k` with universal rank 0: layers that are not shared then give each
        rank the same batches on however many nodes the ranks are.
        """
        test, (net, _) = self._tests[k], self._nets[1 + k]
        if test.batches != batches or 0 < test.taken < batches:  # the last one was interrupted
            deal = self._deal_of(batches)
            self._nets[1 + k] = net, deal
            _serve(net, self._devices, deal)
        self._tests[k] = _Test(batches)
        self._locks.restart(net.shared_layers)

    def deal(self, k: int, batches: int) -> list[int]:
        """Return the ranks of this node that take the next `batches` batches of test net `k`."""
        test, world = self._tests[k], self._group.world
        every = range(test.taken, test.taken + batches)
        test.taken += batches
        ranks = [batch % world.size - world.first_rank for batch in every]
        return [rank for rank in ranks if 0 <= rank < self._group.size]

    def end_test(self, k: int) -> None:
        """Skip a test of net `k` of which this node had no batch."""
        net, deal = self._nets[1 + k]
        if deal == []:
            for layer in net.shared_layers:
                layer.skip(self._tests[k].batches)

    def lease(self, turns: Callable[[int], Iterator[Turn]] | None) -> None:
        """Make the layers of the train net give the batches of these turns, see `Layer.lease`, or,
        with None, those of their deal again. No rank may be at work.
        """
        net, deal = self._nets[0]
        self._leased = turns is not None
        if turns is None:
            _serve(net, self._devices, deal)
        else:
            for layer in net.shared_layers:
                layer.lease(turns)
        self._locks.restart(net.shared_layers)

    def restart(self) -> None:
        """Make it the root's turn everywhere; no rank may be at work."""
        for test in self._tests:
            test.taken = 0
        self._locks.restart()

    def _alone_at(self, layer: Layer) -> AbstractContextManager[object]:
        """Allow a script to run a net of the root; ConfigError within a step."""
        if self._group.phase != "idle":
            raise ConfigError(
                "solvers that train together take its batches in turn, so a callback cannot run it "
                f"during a {self._group.phase}; run the net between steps, or only the layers "
                "behind this one: forward(start=...)"
            )
        if self._leased:
            raise ConfigError(
                "solvers of a parameter server take its batches in turn: run the net outside of "
                "the block, or only the layers behind this one: forward(start=...)"
            )
        if not self._alone:
            with self._group.during("step"):
                self._wait_workers()
            for net, _ in self._nets:
                _serve(net, self._devices[:1])
            self._alone = True
        return layer.forward_lock

    def resume(self) -> None:
        """Serve all ranks again, if a script has run nets of the root."""
        if self._alone:
            for net, deal in self._nets:
                _serve(net, self._devices, deal)
            self.restart()
            self._alone = False

    def end(self, failed: bool = False) -> None:
        """Make the layers serve the root alone from now on; after an error (`failed`) nobody."""
        for net, _ in self._nets:
            net.set_forward_mutex(_refuse if failed else None)
            if not failed:
                _serve(net, self._devices[:1])


def _serve(net: Net, devices: Sequence[Device], deal: Deal = None) -> None:
    for layer in net.shared_layers:
        if deal != []:
            layer.serve(devices, deal)


def _refuse(layer: Layer) -> NoReturn:
    EndedGroup().check()


def _warn_of_unshared(net: Net) -> None:
    """Warn of user-written layers of each device's own that make data, or that ask to be shared."""
    for node in net.nodes:
        layer, why = node.layer, ""
        if not isinstance(layer, Python) or layer.share_in_parallel:
            continue
        if layer.param.python_param.share_in_parallel:
            why = ", whatever its share_in_parallel: layers with a backward pass are not shared"
        elif not node.bottoms:
            why = (
                ", so that all may take the same batches; with share_in_parallel: true in its "
                "python_param they share one"
            )
        if why:
            log.warning('Each device has its own layer "%s"%s', layer.param.name, why)
