"""Cost of a push every H iterations for a worker on a GPU: with servers that cost nothing the copies
to the host and back, with `--cluster local` those to servers in processes of Ray on this machine
and back, too.

usage: python benchmarks/push_beside.py [--net caffenet] [--batch 256] [--every 25]
           [--cluster local] [--servers 4] [--replicas 1] [--filters bf16] [--turns 3]

Trains on random images in bf16 alone, without a bound (pushes and pulls come beside the
iterations), and with slack 0 (the worker waits), in turns; prints medians of images/s.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

from caffepy import models, ops
from caffepy.commands.bench.train import Trainer
from caffepy.commands.devices import choose_device
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.cluster import ClusterOptions, options_of_worker, served
from caffepy.parallel.parameter_server.leases import Lease
from caffepy.parallel.parameter_server.messages import Report, Rule, View, slack_of
from caffepy.parallel.parameter_server.ranges import KeyRange
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.solver import Solver


class FreeServers(Client):
    """Counts pushes without sending them; pulls the values of the start."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__(nobody, 0)

    def start(
        self,
        ranges: Sequence[KeyRange],
        values: Sequence[Array],
        rule: Rule,
        state: object,
        update_states: object,
    ) -> None:
        self.view = View(ranges=ranges, rule=rule)
        self._values, self._state = [array.copy() for array in values], state

    def join(self, share: int) -> Any:
        self._share = share
        return self._state

    def await_members(self, count: int) -> None:
        pass

    def lease(self, clock: int) -> Lease:
        return range(clock * self._share, (clock + 1) * self._share)

    def push(self, payloads: Sequence[Any]) -> None:
        self.clock += 1

    def pull(self, slack: float | None = None) -> list[Array]:
        return self._values

    def hand_out(self, states: object) -> None:
        pass

    def take_state(self) -> None:
        pass

    def report(self) -> "Future[Report]":
        answer: Future[Report] = Future()
        answer.set_exception(TimeoutError())
        return answer

    def end(self) -> None:
        pass

    def leave(self) -> None:
        pass


def served_by(
    solver: Solver, consistency: str, options: argparse.Namespace
) -> AbstractContextManager[object]:
    """Return a block in which a solver is a worker of servers that cost nothing, or of Ray's."""
    if not options.cluster:
        slack = slack_of(consistency)
        return ServedWorkers(solver, FreeServers(), Rule(slack), options.every)
    cluster = ClusterOptions(
        options.cluster,
        (1, 1),
        consistency,
        options.every,
        options.servers,
        options.replicas,
        options.filters,
    )
    worker = options_of_worker(solver, cluster, gpu="0", precision="bf16", threads=1)
    return served(solver, cluster, worker)


def images_per_s(trainer: Trainer, consistency: str, options: argparse.Namespace) -> float:
    """Train alone, if there is no consistency, or as a worker; return the median of five windows
    of four pushes.
    """
    solver, device, rates = trainer.solver, trainer.device, list[float]()
    with served_by(solver, consistency, options) if consistency else nullcontext():
        solver.step(2 * options.every)
        device.synchronize()
        for _ in range(5):
            begun = time.perf_counter()
            solver.step(4 * options.every)
            device.synchronize()
            rates.append(trainer.batch * 4 * options.every / (time.perf_counter() - begun))
    return median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="caffenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--filters", default="")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    device = choose_device("0")
    ops.set_precision(device, "bf16")
    solver = models.path(options.net, "solver")
    assert solver
    trainer = Trainer(solver, device=device, batch=options.batch)
    for name, consistency in options.turns * [
        ("alone", ""),
        ("beside", "async"),
        ("waits", "sync"),
    ]:
        rate = images_per_s(trainer, consistency, options)
        sys.stdout.write(f"{name}: {rate:.0f} images/s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
