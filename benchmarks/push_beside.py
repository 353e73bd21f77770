"""What pushing every H iterations costs a worker on a GPU when the servers cost nothing: the copies
to the host and back, beside the iterations or waited for.

usage: python benchmarks/push_beside.py [--net caffenet] [--batch 256] [--every 25]

Trains on random images in bf16 alone, with slack 0 (the worker waits), and without a bound (pushes
and pulls come beside the iterations), in turns; prints medians of images/s.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

from caffepy import models, ops
from caffepy.commands.bench.train import SYNTHETIC, Trainer
from caffepy.commands.devices import choose_device
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.leases import Lease
from caffepy.parallel.parameter_server.messages import Rule, View
from caffepy.parallel.parameter_server.ranges import KeyRange
from caffepy.parallel.parameter_server.worker import ServedWorkers


class FreeServers(Client):
    """Counts pushes without sending them; pulls the values of the start."""

    def __init__(self) -> None:
        self.worker, self.clock = 0, 0

    def start(
        self, ranges: Sequence[KeyRange], values: Sequence[Array], rule: Rule, state: object
    ) -> None:
        self.view = View(ranges=ranges, rule=rule)
        self._values, self._state = [array.copy() for array in values], state

    def join(self, share: int) -> Any:
        return self._state

    def await_members(self, count: int) -> None:
        pass

    def lease(self, clock: int) -> Lease:
        return Lease(clock, 1)

    def push(self, payloads: Sequence[Any]) -> None:
        self.clock += 1

    def pull(self, slack: float | None = None) -> list[Array]:
        return self._values

    def report(self) -> None:
        pass

    def end(self) -> None:
        pass

    def leave(self) -> None:
        pass


def images_per_s(net: str, batch: int, every: int, slack: float | None) -> float:
    """Train alone, if there is no slack, or as a worker; return the median of five windows."""
    device = choose_device("0")
    ops.set_precision(device, "bf16")
    trainer = Trainer(
        models.path(net, "solver"), device=device, batch=batch, image=None, data=SYNTHETIC
    )
    solver, rates = trainer.solver, list[float]()

    def windows() -> None:
        solver.step(every)
        device.synchronize()
        for _ in range(5):
            begun = time.perf_counter()
            solver.step(4 * every)
            device.synchronize()
            rates.append(batch * 4 * every / (time.perf_counter() - begun))

    if slack is None:
        windows()
    else:
        with ServedWorkers(solver, FreeServers(), Rule(slack), every):
            windows()
    solver.close()
    return median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="caffenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=int, default=25)
    options = parser.parse_args()
    for name, slack in 3 * [("alone", None), ("beside", inf), ("waits", 0.0)]:
        rate = images_per_s(options.net, options.batch, options.every, slack)
        sys.stdout.write(f"{name}: {rate:.0f} images/s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
